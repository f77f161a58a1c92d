"""Many ranks: each kernel built once per cache folder, loaded everywhere, and nobody waits for the dead.

Real processes joined by gloo. They are forked from a server that has torch in memory, so a process costs 0.1 s.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from fxwarm.ranks.dealing import Facts, Item, agree, deal, name_folder
from fxwarm.records import CompileKey

CHECKOUT = Path(__file__).resolve().parents[2]


def play(
    world: int, out: Path, plan: dict[str, Any], limit: float = 60
) -> dict[str, list[dict[str, Any] | None]]:
    """Run the scenes on ``world`` ranks; return by scene what each rank showed, None for one that died."""
    import torch.distributed as dist

    from tests import ranks_toys

    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "fxwarm.artifacts", "tests.ranks_toys"])
    plan = {"out": str(out), "silence": 3.0, **plan}
    processes = [
        context.Process(target=ranks_toys.start, args=(rank, world, store.port, plan), daemon=True)
        for rank in range(world)
    ]
    [p.start() for p in processes]
    end = time.monotonic() + limit
    [p.join(max(0, end - time.monotonic())) for p in processes]
    hung = [rank for rank, p in enumerate(processes) if p.is_alive()]
    [p.kill() for p in processes]
    assert not hung, f"ranks {hung} did not end within {limit} s"
    files = {(name, r): out / f"{name}-{r}.json" for name in plan["scenes"] for r in range(world)}
    return {
        name: [
            json.loads(files[name, r].read_text()) if files[name, r].exists() else None
            for r in range(world)
        ]
        for name in plan["scenes"]
    }


def built(ranks: list[Any]) -> Counter:
    return Counter(name for r in ranks if r for name in r["builds"])


def widths(keys: int) -> list[int]:
    """Widths whose calls at 1 to 2 rows need ``keys`` kernels, two each."""
    return list(range(8, 8 + (keys + 1) // 2))


# Pure: what every rank computes alike


def test_a_rank_plans_what_its_cache_learned_as_a_start_alone_does(fresh):
    from fxwarm import family, options, receipts, warmup
    from fxwarm.records import Planned, Target
    from tests.fault_child import shapes
    from tests.toy_family import Toy

    family.register(Toy)
    try:
        one = warmup.Warmup(shapes((3,)), options.resolve(), target=Target.named("cpu"))
        learned = Planned(CompileKey("toy", "scale", ("9", "other")))
        receipts.learn(one.make_plan(), [learned], one.options)
        assert learned.key in one.make_plan().keys
    finally:
        family.unregister("toy")


def facts(ranks: int, keys: int, **changes: Any) -> dict[int, Facts]:
    items = tuple(Item("f", "k", CompileKey("toy", "scale", (f"{i:02}",))) for i in range(keys))
    return {r: Facts("host", missing=items, **changes.get(f"r{r}", {})) for r in range(ranks)}


def test_c10_every_process_computes_the_same_split_of_22_keys():
    share = deal(facts(4, 22))
    assert sorted(map(len, share.values())) == [5, 5, 6, 6]
    assert len({item for items in share.values() for item in items}) == 22
    assert deal(dict(reversed(facts(4, 22).items()))) == share
    short = deal(facts(4, 22, r2={"builds": False}))
    assert [len(items) for items in short.values()] == [8, 7, 0, 7]


def test_keys_go_only_to_ranks_that_lack_them_and_failed_ones_to_nobody():
    found = facts(2, 4)
    items = found[0].missing
    found[1] = Facts("host", missing=items[2:], failed=((items[3], "no compiler"),))
    share = deal(found)
    assert share == {0: [items[0], items[1]], 1: [items[2]]}


def test_a_key_that_a_rank_built_where_another_cannot_see_it_is_built_there_too():
    found = facts(2, 1)
    (item,) = found[0].missing
    assert deal({0: Facts("a", tried=(item,)), 1: found[1]}) == {0: [], 1: [item]}
    assert deal({0: Facts("a", missing=(item,), tried=(item,)), 1: found[1]}) == {0: [], 1: []}


def test_equal_timings_give_the_same_choice_again():
    timings = {1: {"s": {"b": 1.0, "a": 2.0}}, 0: {"s": {"a": 1.0, "b": 2.0}}}
    assert (
        agree(timings) == agree(dict(reversed(timings.items()))) == {"s": ("a", "best mean time")}
    )
    assert agree({0: {"s": {"a": 1.0}}, 1: {"s": {"b": 1.0}}}) == {"s": ("a", "choice of rank 0")}


def test_a_copied_folder_is_another_folder(tmp_path):
    import shutil

    one = name_folder(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert one == name_folder(tmp_path / "a") != name_folder(tmp_path / "b")


# Real processes


def test_four_ranks(tmp_path):
    """A22, C10, C7, D3: one after the other in the same four processes."""
    fake = tmp_path / "badcc"
    fake.write_text(
        f'#!/bin/sh\necho x >> {tmp_path}/attempts\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\necho "broken pipe stage" >&2\nexit 1\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    broken = {
        "env": {"TOY_CC": str(fake), "TOY_CACHE_DIR": str(tmp_path / "d3")},
        "widths": [8],
        "serves": False,
    }
    two = {"most": 2}
    scenes = {
        "A22": {"widths": widths(6), **two},
        "C10": {"widths": widths(22), "env": {"TOY_BUILD_SECONDS": "0.1"}, **two},
        "C10x": {"widths": widths(22), "excluded": [2], **two},
        "C7": {"widths": [8], "family": "short", "env": {"TOY_REFUSES": ["", "", "other", ""]}},
        "D3": broken,
        "D3again": {**broken, "env": {"TOY_CACHE_DIR": str(tmp_path / "d3")}},
    }
    shown = play(4, tmp_path, {"scenes": scenes})

    a22 = shown["A22"]
    assert set(built(a22).values()) == {1}
    assert len(built(a22)) == 6
    assert all(
        len(r["loads"]) == 6 and not r["jit_after"] and r["status"] == "complete" for r in a22
    )

    for name, builds in (("C10", [5, 5, 6, 6]), ("C10x", [0, 7, 7, 8])):
        assert set(built(shown[name]).values()) == {1}
        assert len(built(shown[name])) == 22
        assert sorted(len(r["builds"]) for r in shown[name]) == builds
        assert all(len(r["loads"]) == 22 and r["status"] == "complete" for r in shown[name])
        assert all((r["build_seconds"] > 0) == bool(r["builds"]) for r in shown[name])
    assert shown["C10x"][2]["builds"] == []

    for r in shown["C7"]:
        assert sorted(r["loads"]) == ["scale_8_mult16", "scale_8_one"]
        assert r["seconds"] < 10
        assert any("rank 2 on" in text and "no input for" in text for text in r["said"])

    assert (tmp_path / "attempts").read_text().count("x") == 3  # three kernels, one attempt each
    for r in shown["D3"]:
        assert r["loaded"] == []
        assert r["status"] == "partial"
        assert any("cc exited with 1: broken pipe stage" in text for text in r["said"])
    assert set(built(shown["D3again"]).values()) == {1}
    assert len(built(shown["D3again"])) == 3


def test_two_ranks(tmp_path):
    """B5, C1, C2, C5, C6, C7, C8, two kinds of device: in the same two processes, with a group timeout of 2 s."""
    a, b, c6, c8, copied = (str(tmp_path / n) for n in ("a", "b", "c6", "c8", "copied"))
    sms = [json.dumps({"name": f"card{n}", "device": "cpu", "num_sms": n}) for n in (132, 78)]
    ten, two = list(range(8, 18)), {"most": 2}
    scenes: dict[str, Any] = {
        "B5": {"widths": [8], "family": "short", "env": {"TOY_ROWS": ["1000000", "1"]}},
        "C1": {"widths": [8], "most": 1, "env": {"TOY_BUILD_SECONDS": "6"}},
        "C2": {
            "widths": widths(4),
            "env": {"TOY_CACHE_DIR": [a, b], "TOY_BUILD_SECONDS": ["0.2", "1.0"]},
            "late": {"1": 4},
            **two,
        },
        "C6": {"widths": ten, "family": "tuned", "env": {"TOY_CACHE_DIR": c6}, **two},
        "C6again": {"widths": ten, "family": "tuned", "env": {"TOY_CACHE_DIR": c6}, **two},
        "C5": {"widths": [8], "family": "tuned", "env": {"TOY_CACHE_DIR": [c6, b]}, **two},
        "alone": {"widths": [9], "family": "tuned", "group": False},
        "untunable": {"widths": [9], "family": "tuned", "env": {"TOY_TUNE_FAILS": "1"}},
        "unplannable": {"widths": [9], "env": {"TOY_PLAN_FAILS": ["", "1"]}, "serves": False},
        "C8": {"widths": widths(24), "env": {"TOY_CACHE_DIR": c8}, **two},
        "C8all": {
            "widths": widths(24),
            "copy": [c8, copied, 0],
            "env": {"TOY_CACHE_DIR": [c8, copied]},
            **two,
        },
        "C8one": {
            "widths": widths(24),
            "copy": [c8, copied, 1],
            "env": {"TOY_CACHE_DIR": [c8, copied]},
            **two,
        },
        "devices": {"widths": [8], "env": {"TOY_TARGET": sms}},
    }
    shown = play(2, tmp_path, {"scenes": scenes, "group_timeout_s": 2})

    for r in shown["B5"]:
        assert r["loads"] == ["scale_8_one"]
        assert any("rank 1 on node1" in text and "1 rows are too few" in text for text in r["said"])

    assert len(built(shown["C1"])) == 1
    for r in shown["C1"]:
        assert r["loads"] == ["scale_8_one"]
        assert r["status"] == "complete"
    assert any(
        "rank 1 waits for rank 0 on node0" in x and "building toy" in x
        for x in shown["C1"][1]["log"]
    )

    for r in shown["C2"]:
        assert len(r["builds"]) == 4
        assert r["status"] == "complete"
    assert abs(shown["C2"][0]["ended"] - shown["C2"][1]["ended"]) < 1
    assert shown["C2"][1]["seconds"] < 4 * 1.0 + 3  # the slow node's own time
    assert any("rank 1" in x and "not come yet" in x for x in shown["C2"][0]["log"])
    assert any("rank 1 on node1" in x and "building toy" in x for x in shown["C2"][0]["log"])

    one, other = shown["C6"]
    assert one["tactics"] == other["tactics"]
    assert len(one["tactics"]) == 20
    assert one["status"] == other["status"] == "complete"
    assert any("20 by best mean time" in text for text in one["said"])
    again, _ = shown["C6again"]
    assert again["tactics"] == one["tactics"]
    assert any("nothing tuned" in text for text in again["said"])
    one, other = shown["C5"]
    assert one["tactics"] == other["tactics"]
    assert len(one["tactics"]) == 2
    for rank, r in enumerate(shown["alone"]):  # no collective, so a gap
        assert any(f"rank {rank} tuned 3 entries alone" in text for text in r["said"])
    for r in shown["untunable"]:
        assert any("no timer here" in text for text in r["said"])

    one, other = shown["unplannable"]
    assert len(one["loads"]) == 3
    assert any("rank 1 on node1: RuntimeError: no plan here" in text for text in one["said"])
    assert other["status"] == one["status"] == "partial"

    for name, builds in (("C8all", 0), ("C8one", 1)):
        assert [len(r["builds"]) for r in shown[name]] == [0, builds]
        assert len({r["plan_key"] for r in shown[name]}) == 1
        first = next(x for x in shown[name][1]["log"] if x.startswith("fxwarm: rank 1"))
        assert first == f"fxwarm: rank 1 on node1: {24 - builds} kernels found, {builds} missing"

    for r in shown[
        "devices"
    ]:  # each kind is dealt out among its own; the toy's file happens to be the same
        assert "6 missing kernels dealt out over 2 ranks: 3, 3" in r["said"]
        assert len(r["loads"]) == 3
    for name in scenes.keys() - {"B5", "untunable", "unplannable"}:
        assert [r["jit_after"] for r in shown[name]] == [[], []], name


def test_two_ranks_shrink_until_it_fits(tmp_path):
    """B5: rank 1 runs out of memory above 1024 rows; rank 0 never does."""
    scene = {"widths": [8], "family": "short", "rows": 4096}
    scenes = {
        "fits": {**scene, "env": {"TOY_ROWS": ["1000000", "1100"]}},
        "never": {**scene, "env": {"TOY_ROWS": ["1000000", "10"]}},
    }
    shown = play(2, tmp_path, {"scenes": scenes})
    for r in shown["fits"]:
        assert list(r["witness"].values()) == [1024]
        assert r["loads"] == ["scale_8_mult16"]
        assert any("rank 1 on node1 has room for" in x and "1024" in x for x in r["said"])
    for r in shown["never"]:
        assert r["loads"] == []
        assert any("left out on all ranks: rank 1 on node1" in x for x in r["said"])


def test_eight_processes_at_once(tmp_path):
    """C9, D1: without a group the locks share the work, with one it is dealt out; nobody sees half an entry."""
    scenes = {
        "C9": {"widths": widths(6), "env": {"TOY_BUILD_SECONDS": "0.2"}, "group": False},
        "D1": {"widths": widths(6), "slowly": True, "group": False},
        "D1group": {"widths": widths(6), "slowly": True},
    }
    for scene in scenes.values():
        scene |= {"most": 2, "at_once": True}
    shown = play(8, tmp_path, {"scenes": scenes})
    for name, ranks in shown.items():
        assert len(built(ranks)) == 6, name
        assert set(built(ranks).values()) == {1}, name
        assert [len(r["loads"]) for r in ranks] == [6] * 8, name
        assert all(r["status"] == "complete" and r["jit_after"] == [] for r in ranks), name
    assert max(r["seconds"] for r in shown["C9"]) < 3 * 6 * 0.2 + 3


def test_sixteen_processes_make_the_same_folders_at_the_same_moment(tmp_path):
    """D4: the cache's root and its scratch folder are absent."""
    deep = str(tmp_path / "not" / "there" / "yet")
    scenes = {"D4": {"widths": [8], "most": 1, "env": {"TOY_CACHE_DIR": deep}, "at_once": True}}
    shown = play(16, tmp_path, {"scenes": scenes})["D4"]
    assert [r["status"] for r in shown] == ["complete"] * 16
    assert sum(built(shown).values()) == 1


def test_under_torchrun_a_compiled_callable_never_talks_to_its_peers(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT), "TOY_CACHE_DIR": str(tmp_path / "toy")}
    environ |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "OMP_NUM_THREADS": "1"}
    environ |= {"FXWARM_CACHE_DIR": str(tmp_path / "fxwarm"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "tests.ranks_compiled", str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert sorted(n for r in shown for n in r["builds"]) == [
        f"scale_8_{k}" for k in ("mult16", "one", "other")
    ]
    for r in shown:
        assert sorted(r["loads"]) == [f"scale_8_{k}" for k in ("mult16", "one", "other")]
        assert r["jit_after"] == []
        assert r["status"] == "complete"


def test_a_rank_that_dies_is_reported_and_the_others_build_its_share(tmp_path):
    begin, two = time.monotonic(), {"most": 2}
    shown = play(
        4,
        tmp_path,
        {
            "scenes": {
                "dead": {"widths": widths(8), "dies": 2, **two},
                "after": {"widths": [40]},
                "left": {"widths": widths(8), "env": {"TOY_INTERRUPTED": ["", "", "", "1"]}, **two},
            },
            "silence": 2.0,
        },
    )
    assert time.monotonic() - begin < 40
    assert shown["dead"][2] is None
    for r in (shown["dead"][i] for i in (0, 1, 3)):
        assert len(r["loads"]) == 8
        assert r["jit_after"] == []
        assert r["seconds"] < 15
        assert any("rank 2 was lost" in text for text in r["said"])
    assert all(len(r["loads"]) == 3 and r["seconds"] < 5 for r in shown["after"] if r)
    assert shown["left"][3] is None
    for r in (shown["left"][i] for i in (0, 1)):
        assert len(r["loads"]) == 8
        assert any("rank 3 was lost" in text and "KeyboardInterrupt" in text for text in r["said"])
