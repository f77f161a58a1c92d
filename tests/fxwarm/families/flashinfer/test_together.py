"""Tuning with other ranks: the group decides on one tactic an entry, and every rank keeps that in a file of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fxwarm.families.flashinfer import FlashInfer, stored, together, tuner
from fxwarm.families.flashinfer.keys import MODULE
from fxwarm.families.flashinfer.library import find_library
from fxwarm.families.flashinfer.tuner_key import is_tuned
from fxwarm.records import Planned, Target
from tests.fxwarm.families.flashinfer.calls import bmm, moe
from tests.fxwarm.families.flashinfer.conftest import HERE, REASON

HOPPER = Target.named("h200")
SIZES = {"experts": 4, "hidden": 16, "inter": 8, "top_k": 2}
ROOT = Path(__file__).resolve().parents[4]


def plan(*calls, library=None):
    found = FlashInfer().keys(calls, HOPPER, library or find_library({}))
    return [p for p in found if isinstance(p, Planned)]


def test_keys_of_two_ranks_are_one_to_the_group():
    from fxwarm.records import Library

    library = Library("flashinfer-python", "0.6.18.post1")
    one, other = (plan(moe(8, tp_size=2, tp_rank=r), library=library) for r in (0, 1))
    assert {p.key for p in one if is_tuned(p.key)}.isdisjoint(p.key for p in other)
    assert [together.common(p.key) for p in one] == [together.common(p.key) for p in other]
    wider = plan(moe(8, tp_size=4, tp_rank=1), library=library)
    assert together.common(wider[-1].key) != together.common(other[-1].key)


def test_all_is_measured_anew_and_the_groups_choice_is_kept(library):
    planned = plan(moe(16, **SIZES), bmm(8, n=32, k=16))
    family = FlashInfer()
    family.missing(planned, HOPPER)
    assert not [t for t in family.tune(planned, lambda c: None) if t.error]
    assert set(family.tactics(planned).values()) == {"0", "3"}
    library.measured.clear()
    heard = {}

    def reduce(timings):
        heard.update(timings)
        return {key: max(times, key=times.get) for key, times in timings.items()}

    wanted = [p for p in planned if p.key.tag != MODULE]
    tuned = list(family.tune(wanted, lambda c: None, reduce=reduce))
    assert not [t for t in tuned if t.error]
    assert heard.keys() == {p.key for p in wanted}
    assert {tuple(times.items()) for key, times in heard.items() if key.kernel == "gemm1"} == {
        (("0", 1.0), ("1", 2.0), ("2", 3.0))
    }
    assert set(family.tactics(planned).values()) == {"2", "4", "1"}  # the slowest of each
    library.restart()
    assert all(t.found for t in family.tune(planned, lambda c: None))
    assert set(family.tactics(planned).values()) == {"2", "4", "1"}
    assert not library.measured


def test_what_another_plan_holds_is_not_lost_by_measuring_anew(library):
    first, second = plan(moe(16, **SIZES)), plan(moe(16, **SIZES, use_fused_finalize=False))
    family = FlashInfer()
    family.missing(first, HOPPER)
    list(family.tune(first, lambda c: None))
    wanted = [p for p in second if is_tuned(p.key)]
    list(family.tune(wanted, lambda c: None, reduce=lambda t: dict.fromkeys(t, "1")))
    assert set(family.tactics(first).values()) == {"0", "3"}
    assert set(family.tactics(second).values()) == {"1"}


def test_one_open_bucket_leaves_the_others_choices_alone(library):
    """One call measures every bucket; only those that were asked for are decided."""
    planned = [p for p in plan(moe(16, **SIZES)) if is_tuned(p.key)]
    family = FlashInfer()
    family.missing(planned, HOPPER)
    list(family.tune(planned, lambda c: None, reduce=lambda t: dict.fromkeys(t, "2")))
    list(family.tune(planned[:1], lambda c: None, reduce=lambda t: dict.fromkeys(t, "1")))
    assert sorted(family.tactics(planned).values()) == ["1", *["2"] * 9]


def test_a_release_that_mixes_options_up_is_told(library, monkeypatch):
    from fxwarm import exc

    monkeypatch.setattr(stored, "tells_options_apart", lambda: False)
    with pytest.raises(exc.LibraryError, match=r"install 0\.6\.18"):
        list(together.tune(plan(moe(4, **SIZES)), "sm_90a", lambda c: None, lambda t: {}))


def test_listening_leaves_the_tuner_as_it_was(library):
    one = tuner.tuner()
    before = dict(vars(one))
    with pytest.raises(ValueError, match="stop"), tuner.timings():
        raise ValueError("stop")
    assert vars(one).keys() == before.keys()


@pytest.mark.skipif(not HERE, reason=REASON)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_on_every_tactic(world, tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
        "-m", "tests.ranks_flashinfer", str(tmp_path),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), *[p for p in sys.path if p]])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shown = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]

    builds = (tmp_path / "builds.log").read_text().splitlines()
    assert Counter(line.split()[1] for line in builds) == {
        "fused_moe_90": 1, "trtllm_utils": 1, "gemm": 1,
    }  # fmt: skip
    first = shown[0]["cold"]
    assert len(first["tactics"]) == 2 * 7 + 4
    assert None not in first["tactics"].values()
    assert len({tuple(r["cold"]["keys"]) for r in shown}) == world  # each rank's key holds the rank
    assert len({r["files"][0] for r in shown}) == world
    for scene in ("cold", "again", "lost", "short"):
        for rank, r in enumerate(shown):
            assert r[scene]["tactics"] == first["tactics"], (scene, rank)
            assert r[scene]["status"] == "complete", (scene, rank, r[scene]["said"])
            assert not [text for text in r[scene]["said"] if "alone" in text]
    for r in shown:
        assert r["cold"]["measured"] == 7 * (3 + 2) + 4 * 2
        assert any(f"18 tuned entries of flashinfer agreed over {world}" in x for x in r["cold"]["said"])  # fmt: skip
        assert r["again"]["measured"] == 0
        assert any("nothing tuned" in text for text in r["again"]["said"])
        assert (
            r["lost"]["measured"] == r["cold"]["measured"]
        )  # one rank's file is gone: all measure
    assert shown[1]["short"]["measured"] < shown[0]["short"]["measured"]
