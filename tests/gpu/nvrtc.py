"""DeepGEMM in NVRTC mode on a Hopper GPU: workers build, nothing compiles afterwards.

    python tests/gpu/nvrtc.py --out tests/gpu/results/nvrtc-h200.json

One weight of Qwen3-30B-A3B-FP8 ([5120, 2048]) and the mHC pre-norm GEMM (N = 24, K = 16384) at 1 to 256 tokens, each
run in a process and a cache of its own (about 50 s in all):

- toolkit: DG_JIT_USE_NVRTC=1. The headers of 2026 do not compile with NVRTC and a CUDA 13 toolkit as it is: they include
  <utility>, and <cuda/std/...>, which CUDA 13 keeps in include/cccl. So the toolkit that the library is given is this
  machine's, with those two put where NVRTC looks.
- as it is: the same without that. What NVRTC cannot compile goes to nvcc, into the same entry (DeepGEMM#359).

Then every attainable M of every call through the real library. Needs torch, fxwarm's dependencies and a DeepGEMM of
generation A on PYTHONPATH; no pytest.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
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

TOKENS, N, K = 256, 5120, 2048
UTILITY = """\
#pragma once
#include <cuda_device_runtime_api.h>
#include <cuda/std/utility>
namespace std {
using cuda::std::index_sequence;
using cuda::std::integer_sequence;
using cuda::std::make_index_sequence;
using cuda::std::make_integer_sequence;
}
"""


def make_toolkit(real: Path, folder: Path) -> Path:
    """Return a toolkit in ``folder`` that is ``real``, with headers that NVRTC finds."""
    include = folder / "include"
    include.mkdir(parents=True)
    for source in (real / "include", real / "include" / "cccl"):
        for path in source.iterdir() if source.is_dir() else ():
            if not os.path.lexists(include / path.name):
                (include / path.name).symlink_to(path)
    if not (include / "utility").exists():
        (include / "utility").write_text(UTILITY)
    for path in real.iterdir():
        if path.name != "include":
            (folder / path.name).symlink_to(path)
    return folder


def entries() -> tuple[set[str], set[str]]:
    """Return the names in the library's cache, and those of them that are whole."""
    from fxwarm.families.deep_gemm import cache

    roots = cache.roots("A")
    folder = roots.write / "cache"
    return set(os.listdir(folder)) if folder.is_dir() else set(), set(cache.entries(roots))


class Warnings(logging.Handler):
    """Keeps what fxwarm warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage()[:300])


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plan, build and load in NVRTC mode from a cold cache; then make every call."""
    import torch

    from tests.fxwarm.families.deep_gemm.samples import dense, prenorm
    from tests.gpu import deep_gemm

    torch.cuda.init()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    calls = [dense(N, K, upper=TOKENS), prenorm(24, 16384, upper=TOKENS, sms=sms)]
    warnings = Warnings()
    logging.getLogger("fxwarm").addHandler(warnings)
    with deep_gemm.Meter() as whole:
        warmup = deep_gemm.make_warmup(calls, Path(args.cache), args.jobs)
        warmup.start()
        warmup.wait()
        built_s = time.perf_counter() - whole._begin
        before, _ = entries()
        report = warmup.finish()
    named, _ = entries()
    found: dict[str, Any] = {
        "status": report.status,
        "kernels": len(warmup.plan.planned),
        "built": sum(not b.error for b in report.built),
        "launches": sum(not x.error for x in report.loaded),
        "built_at_load": len(named - before),
        "by_nvcc": sum("nvcc is tried" in text for text in warnings.said),
        "warnings": warnings.said[:4],
        "errors": [f"{x.key}: {x.error}"[:600] for x in report.failed][:4],
        "gaps": [str(g) for g in report.gaps][:4],
        "cold_s": round(whole.seconds, 2),
        "build_s": round(built_s, 2),
        "load_s": round(sum(x.seconds for x in report.loaded), 3),
        "child_cpu_s": round(whole.cpu, 1),
        "peak_bytes": whole.peak,
        "kept_bytes": report.kept_bytes,
    }
    found |= deep_gemm.sweep_all(calls)
    after, whole_after = entries()
    found["jit_after"] = len(after - named)
    found["damaged_after"] = sorted(after - whole_after)
    found["claims"] = {
        "complete": report.status == "complete",
        "every kernel built before the load": found["built"] == found["kernels"]
        and not found["built_at_load"],
        "0 compiled in the sweep": not found["jit_after"] and not found["damaged_after"],
    }
    return found


def spawn(name: str, home: Path, toolkit: Path, jobs: int) -> dict[str, Any]:
    answer = home / "answer.json"
    home.mkdir(parents=True)
    # NVRTC opens a library of its own by name: torch's copy of it, or the toolkit's
    libraries = [str(p) for root in sys.path for p in Path(root or ".").glob("nvidia/*/lib")]
    libraries += [str(toolkit / "lib64"), os.environ.get("LD_LIBRARY_PATH", "")]
    environ = {
        **os.environ, "DG_JIT_CACHE_DIR": str(home / "deep_gemm"), "DG_JIT_USE_NVRTC": "1", "CUDA_HOME": str(toolkit),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [
        sys.executable,
        __file__,
        "--cache",
        str(home),
        "--answer",
        str(answer),
        "--jobs",
        str(jobs),
    ]
    begin = time.perf_counter()
    try:
        code: Any = subprocess.run(command, env=environ, check=False, timeout=120).returncode
    except subprocess.TimeoutExpired:
        code = "none within 120 s"
    found = json.loads(answer.read_text()) if answer.exists() else {"failed": f"exit code {code}"}
    found["process_s"] = round(time.perf_counter() - begin, 1)
    print(f"{name}: {json.dumps(found)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="")
    parser.add_argument("--only", nargs="+", default=["toolkit", "as it is"])
    parser.add_argument("--jobs", type=int, default=min(16, len(os.sched_getaffinity(0))))
    for name in ("--cache", "--answer"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cache:
        Path(args.answer).write_text(json.dumps(run(args)))
        return
    import torch

    from fxwarm.families.deep_gemm.library import find_library
    from fxwarm.families.deep_gemm.toolchain import find_compiler
    from tests.gpu.figures import write

    compiler = find_compiler()
    real = compiler.path.resolve().parents[1]
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "card": torch.cuda.get_device_name(),
        "versions": {"library": str(find_library({})), "torch": torch.__version__, "python": platform.python_version(),
                     "nvcc": ".".join(map(str, compiler.version)), "cores": args.jobs},
        "command": "DG_JIT_USE_NVRTC=1 python tests/gpu/nvrtc.py", "runs": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="fxwarm-nvrtc-") as folder:
        toolkits = {"toolkit": make_toolkit(real, Path(folder, "cuda")), "as it is": real}
        for at, name in enumerate(args.only):
            result["runs"][name] = spawn(name, Path(folder, f"run{at}"), toolkits[name], args.jobs)
            if args.out:
                write(args.out, result)
    print(
        f"{'':20}{'kernels':>8}{'by nvcc':>8}{'launches':>9}{'cold s':>8}{'load s':>8}{'MiB':>7}{'JIT after':>10}{'slowest ms':>11}  claims"
    )
    for name, r in result["runs"].items():
        broken = [c for c, holds in r.get("claims", {"it ran": False}).items() if not holds]
        cells = (
            "kernels",
            "by_nvcc",
            "launches",
            "cold_s",
            "load_s",
            "",
            "jit_after",
            "slowest_call_ms",
        )
        widths = (8, 8, 9, 8, 8, 7, 10, 11)
        values = [r.get("peak_bytes", 0) >> 20 if not c else r.get(c, "-") for c in cells]
        row = "".join(f"{v:>{w}}" for v, w in zip(values, widths, strict=True))
        print(f"NVRTC, {name:13}{row}  {'hold' if not broken else 'BROKEN: ' + '; '.join(broken)}")


if __name__ == "__main__":
    main()
