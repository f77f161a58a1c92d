"""Two ranks, two H200s, one cold cache: each kernel built once, both load, then nothing compiles on either.

    python tests/gpu/ranks.py --out tests/gpu/results/ranks.json

Qwen3-30B-A3B-FP8 at TP 2 on DeepGEMM. Per start (cold, then warm in new processes) each rank joins a gloo group, calls
``fxwarm.warm_all(group)``, and then makes every call at every attainable M through the real library. Needs torch,
fxwarm's dependencies and a DeepGEMM on PYTHONPATH; no pytest.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:] = [
    str(CHECKOUT),
    *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent),
]

MODEL, TP = "Qwen3-30B-A3B-FP8", 2
LIMIT = 80.0
"""Seconds that one start may take, process start and sweep included."""


def run_rank(args: argparse.Namespace) -> dict[str, Any]:
    """Join, warm with the others, sweep; return what this rank saw."""
    import torch
    import torch.distributed as dist

    import fxwarm
    from fxwarm import artifacts
    from fxwarm.families.deep_gemm.library import find_library
    from fxwarm.options import Options
    from fxwarm.warmup import Warmup
    from passes.records import ShapeSet, Site
    from tests.gpu import deep_gemm

    logging.basicConfig(level=logging.INFO, format=f"rank {args.rank}: %(message)s")
    deep_gemm.MODELS["tp"] = (MODEL, TP)
    calls = deep_gemm.make_calls(
        *deep_gemm.weights(json.loads(Path(args.shapes).read_text()), "tp")
    )
    torch.cuda.set_device(args.rank)
    torch.cuda.init()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{args.port}", rank=args.rank, world_size=args.ranks
    )
    shapes = ShapeSet(calls=tuple(calls), sites=(Site(),) * len(calls))
    where = torch.device("cuda", args.rank)
    warmup = Warmup(shapes, Options(when="manual"), device=where)
    artifacts.WarmCallable(lambda *_: None, warmup)
    dist.barrier()
    begin = time.perf_counter()
    (report,) = fxwarm.warm_all(dist.group.WORLD)
    seconds = time.perf_counter() - begin
    assert warmup.plan is not None
    dist.barrier()  # both sweep at once, so that an entry of either counts on both
    swept = deep_gemm.sweep_all(calls)
    dist.barrier()
    found = {
        "seconds": round(seconds, 2),
        "status": report.status,
        "kernels": len(warmup.plan),
        "built": sum(not b.error for b in report.built),
        "found": len(report.found),
        "launches": sum(not x.error for x in report.loaded),
        "errors": [f"{x.key}: {x.error}" for x in report.failed][:10],
        "gaps": [str(g) for g in report.gaps][:10],
        "notes": list(report.notes),
        "library": str(find_library({})),
        "card": torch.cuda.get_device_name(),
        "peak_bytes": report.peak_bytes,
        **{
            k: swept[k]
            for k in ("calls_after", "jit_after", "slowest_call_ms", "over_5_ms", "sweep_s")
        },
    }
    dist.destroy_process_group()
    return found


def start(args: argparse.Namespace, name: str, folder: Path) -> list[dict[str, Any]]:
    """Start every rank in a process of its own on one shared cache; return what each saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {
        **os.environ,
        "DG_JIT_CACHE_DIR": str(folder / "deep_gemm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]),
    }
    answers = [folder / f"{name}-{rank}.json" for rank in range(args.ranks)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--ranks",
                str(args.ranks),
                "--rank",
                str(rank),
                "--port",
                str(port),
                "--shapes",
                args.shapes,
                "--answer",
                str(answer),
            ],
            env=environ,
        )
        for rank, answer in enumerate(answers)
    ]
    end = time.monotonic() + args.limit
    try:
        for process in processes:
            process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"{name}: not done after {args.limit:.0f} s", flush=True)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        json.loads(answer.read_text()) if answer.exists() else {"failed": f"exit {p.returncode}"}
        for answer, p in zip(answers, processes, strict=True)
    ]


def entries(folder: Path) -> int:
    """Return how many kernels the shared cache holds."""
    cache = folder / "deep_gemm" / "cache"
    return sum(p.is_dir() and not p.name.startswith(".") for p in cache.glob("*"))


def main() -> None:
    places = [
        CHECKOUT.parent / "shared" / "model_shapes.json",
        CHECKOUT / ".gpu" / "model_shapes.json",
    ]
    default = next((str(p) for p in places if p.exists()), str(places[0]))
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", default="")
    parser.add_argument("--ranks", type=int, default=TP)
    parser.add_argument("--shapes", default=default)
    parser.add_argument("--limit", type=float, default=LIMIT)
    for name in ("--rank", "--port"):
        parser.add_argument(name, type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--answer", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        Path(args.answer).write_text(json.dumps(run_rank(args)))
        return
    import torch

    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
    }
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "card": f"{args.ranks} x {torch.cuda.get_device_name()}",
        "versions": versions,
        "command": f"python tests/gpu/ranks.py --ranks {args.ranks}",
        "model": f"{MODEL}, TP {TP}",
        "ranks": {},
    }
    with tempfile.TemporaryDirectory(prefix="fxwarm-ranks-") as name:
        folder = Path(name)
        cold = start(args, "cold", folder)
        result["entries_cold"] = entries(folder)
        warm = start(args, "warm", folder) if all("failed" not in r for r in cold) else []
        result["entries_warm"] = entries(folder)
    for rank, one in enumerate(cold):
        versions["library"] = one.get("library", "")
        again = warm[rank] if warm else {}
        shown = {k: v for k, v in one.items() if k not in ("seconds", "card", "library")}
        result["ranks"][str(rank)] = {
            "cold_s": one.get("seconds"),
            "warm_s": again.get("seconds"),
            **shown,
            "warm_built": again.get("built"),
            "warm_launches": again.get("launches"),
            "warm_jit_after": again.get("jit_after"),
            "warm_slowest_call_ms": again.get("slowest_call_ms"),
            "warm_failed": again.get("failed", ""),
        }
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    columns = [
        "kernels",
        "built",
        "launches",
        "cold_s",
        "warm_s",
        "calls_after",
        "jit_after",
        "warm_jit_after",
        "slowest_call_ms",
        "status",
    ]
    print("rank".ljust(6) + "".join(c.rjust(max(8, len(c) + 2)) for c in columns))
    for rank, one in result["ranks"].items():
        cells = (str(one.get(c, "-")).rjust(max(8, len(c) + 2)) for c in columns)
        print(rank.ljust(6) + "".join(cells), one.get("failed", ""), flush=True)
    built = sum(one.get("built") or 0 for one in result["ranks"].values())
    print(
        f"{built} builds for {result['entries_cold']} entries; {result['entries_warm']} after the warm start"
    )


if __name__ == "__main__":
    main()
