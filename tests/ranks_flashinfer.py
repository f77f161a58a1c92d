"""What the processes of test_together.py run under torchrun: FlashInfer's real tuner, a clock that differs by rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxwarm
from fxwarm import artifacts, warmup
from fxwarm.families.flashinfer import modules, stored, upstream
from fxwarm.families.flashinfer.together import common
from fxwarm.families.flashinfer.tuner_key import is_tuned
from fxwarm.options import resolve
from fxwarm.records import Target
from passes.records import ShapeSet, Site
from tests.fxwarm.families.flashinfer.calls import bmm, moe
from tests.fxwarm.families.flashinfer.fake import make_library, put_module

SIZES: dict[str, Any] = {"experts": 4, "hidden": 16, "inter": 8, "top_k": 2}
MOST = 40


class Clock:
    """Each rank has another favourite; rank 1 may lack memory for the largest bucket."""

    def __init__(self, rank: int) -> None:
        self.rank, self.short = rank, False

    def __call__(self, shape: tuple[int, ...], tactic: int) -> float:
        if self.short and self.rank == 1 and shape[0] == 64:
            raise torch.cuda.OutOfMemoryError("no room")
        return 1.0 + 0.1 * ((tactic + self.rank) % 3) + 0.01 * tactic


def build_modules(folder: Path, patch: pytest.MonkeyPatch, log: Path) -> None:
    """Stand in for ninja: the module's file appears, and who made it is written down."""

    def make_spec(name: str) -> SimpleNamespace:
        def build(need_lock: bool) -> None:
            put_module(folder, name)
            with log.open("a") as out:
                out.write(f"{dist.get_rank()} {name}\n")

        path = folder / "cached_ops" / name / f"{name}.so"
        return SimpleNamespace(is_aot=False, build=build, get_library_path=lambda: path)

    (folder / "ninja").write_text("#!/bin/sh\n")
    (folder / "ninja").chmod(0o755)
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    patch.setattr(upstream, "make_spec", make_spec)
    patch.setattr(modules, "nvcc", lambda: "nvcc")


def play(library: SimpleNamespace, folder: Path) -> dict[str, Any]:
    """Warm one model with all ranks, as a fresh process would; return what came of it on this one."""
    library.restart()
    artifacts.pending.clear()
    warmup._resident.clear()
    rank, world = dist.get_rank(), dist.get_world_size()
    calls = (moe(MOST, **SIZES, tp_size=world, tp_rank=rank), bmm(8, n=32, k=16))
    one = warmup.Warmup(
        ShapeSet(calls=calls, sites=(Site(),) * len(calls)),
        resolve({"when": "manual", "cache_dir": str(folder / f"store-{rank}")}),
        device=torch.device("cpu"),
        target=Target.named("h200"),
    )
    held = artifacts.WarmCallable(lambda: None, one)
    (report,) = fxwarm.warm_all(dist.group.WORLD)
    assert held.warmup.plan is not None
    planned = [p for p in held.warmup.plan.planned if is_tuned(p.key)]
    return {
        "status": report.status,
        "said": [*map(str, report.gaps), *report.notes, *(f"{x.error}" for x in report.failed)],
        "tactics": {str(common(p.key)): stored.held(p, "sm_90a") for p in planned},
        "keys": sorted(str(p.key) for p in planned),
        "measured": len(library.measured),
        "found": sum(t.found for t in report.tuned),
        "tuned": len(report.tuned),
    }


def main(folder: Path) -> None:
    """Be one rank: warm cold, warm again, without one rank's file, and with too little memory on one."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    workspace, clock, patch = folder / "workspace", Clock(rank), pytest.MonkeyPatch()
    workspace.mkdir(exist_ok=True)
    library = make_library(workspace, patch, clock, built=False)
    build_modules(workspace, patch, folder / "builds.log")
    shown = {"cold": play(library, folder), "again": play(library, folder)}
    files = sorted((workspace / "fxwarm").glob(f"*rank{rank}.json"))
    shown["files"] = [p.name for p in files]  # type: ignore[assignment]
    dist.barrier()
    if rank == 0:
        [p.unlink() for p in files]
    shown["lost"] = play(library, folder)
    dist.barrier()
    [p.unlink() for p in (workspace / "fxwarm").glob(f"*rank{rank}.json")]
    clock.short = True
    shown["short"] = play(library, folder)
    (folder / f"{rank}.json").write_text(json.dumps(shown))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
