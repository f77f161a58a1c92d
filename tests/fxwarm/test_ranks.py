"""Many ranks: each kernel built once per cache folder, loaded everywhere, and nobody waits for the dead.

Real processes joined by gloo. They are forked from a server that has torch in memory, so a process costs 0.1 s.
"""

from __future__ import annotations

import json
import multiprocessing
import stat
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from fxwarm.ranks import Facts, Item, agree, deal, name_folder
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
    """B5, C1, C2, C5, C6, C8 and two kinds of device: in the same two processes, with a group timeout of 2 s."""
    a, b, c8 = (str(tmp_path / name) for name in ("nodeA", "nodeB", "c8"))
    slow = {"TOY_BUILD_SECONDS": ["6", "0"]}
    sms = [json.dumps({"name": f"card{n}", "device": "cpu", "num_sms": n}) for n in (132, 78)]
    scenes = {
        "B5": {"widths": [8], "family": "short", "env": {"TOY_ROWS": ["1000000", "1"]}},
        "B5fits": {
            "widths": [8],
            "family": "short",
            "most": 4096,
            "env": {"TOY_ROWS": ["1000000", "1100"]},
        },
        "C1": {"widths": [8], "most": 1, "env": {"TOY_BUILD_SECONDS": ["6", "6"]}},
        "C2": {
            "widths": widths(4),
            "most": 2,
            "env": {"TOY_CACHE_DIR": [a, b], "TOY_BUILD_SECONDS": ["0.2", "1.0"]},
            "late": {"1": 3},
        },
        "C6": {
            "widths": list(range(8, 18)),
            "most": 2,
            "family": "tuned",
            "env": {"TOY_CACHE_DIR": str(tmp_path / "c6")},
        },
        "C6again": {
            "widths": list(range(8, 18)),
            "most": 2,
            "family": "tuned",
            "env": {"TOY_CACHE_DIR": str(tmp_path / "c6")},
        },
        "C5": {
            "widths": [8],
            "family": "tuned",
            "env": {"TOY_CACHE_DIR": [str(tmp_path / "c6"), str(tmp_path / "c5")]},
        },
        "fails": {"widths": [9], "family": "tuned", "env": {"TOY_TUNE_FAILS": "1"}},
        "C8": {"widths": widths(8), "most": 2, "env": {"TOY_CACHE_DIR": [c8, c8]}},
        "devices": {"widths": [8], "env": {"TOY_TARGET": sms}},
    }
    del slow
    shown = play(2, tmp_path, {"scenes": scenes, "group_timeout_s": 2})
    for name, two in shown.items():
        print(name, [round(r["seconds"], 2) for r in two])
    one, other = shown["B5"]
    assert sorted(one["loads"]) == sorted(other["loads"]) == ["scale_8_one"]
    assert all(
        "rank 1 on" in " ".join(r["said"]) and "1 rows are too few" in " ".join(r["said"])
        for r in shown["B5"]
    )

    for r in shown["C1"]:
        assert r["loads"] == ["scale_8_one"]
        assert r["status"] == "complete"
        assert r["seconds"] >= 6
    assert len(built(shown["C1"])) == 1

    assert all(len(r["builds"]) == 4 and r["status"] == "complete" for r in shown["C2"])
    assert max(r["seconds"] for r in shown["C2"]) < 3 + 4 * 1.0 + 2

    one, other = shown["C6"]
    assert one["tactics"] == other["tactics"]
    assert len(one["tactics"]) == 20
    assert any("20 by best mean time" in text for text in one["said"])
    again, _ = shown["C6again"]
    assert again["tactics"] == one["tactics"]
    assert any("nothing tuned" in text for text in again["said"])
    assert all(
        r["tactics"].keys() == {f"scale<8, {k}>" for k in ("one", "mult16", "other")}
        for r in shown["C5"]
    )
    assert shown["C5"][0]["tactics"] == shown["C5"][1]["tactics"]
    assert all("no timer here" in " ".join(r["said"]) for r in shown["fails"])

    assert len(built(shown["devices"])) == 3
    for r in (*shown["C2"], *shown["C6"], *shown["C8"]):
        assert r["jit_after"] == []


def test_a_rank_that_dies_is_reported_and_the_others_build_its_share(tmp_path):
    begin = time.monotonic()
    shown = play(
        4,
        tmp_path,
        {
            "scenes": {
                "dead": {"widths": widths(8), "most": 2, "dies": 2},
                "after": {"widths": [40]},
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
