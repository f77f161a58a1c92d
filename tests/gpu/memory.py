"""What a warmup of DeepGEMM takes of a Hopper GPU's memory, and what it leaves: measured beside what the report says.

    python tests/gpu/memory.py --out tests/gpu/results/memory-h200.json

Two public reports as claims, each in a process of its own (about 35 s in all):

- room (vllm#57258): a [7168, 2048] weight is warmed, 80% of the free memory is taken, and M = 1..8192 in steps of 257
  is served; and the other way round, with no room left: the model answers, what was not launched is reported.
- left (vllm#30637): that weight and 32 experts of [4096, 7168]; the peak in the report is the measured one, all scratch
  is free afterwards, four equal layers peak as one does, and ``fxwarm.memory`` bounds it.

Needs torch, fxwarm's dependencies and a DeepGEMM on PYTHONPATH; no pytest.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:] = [
    str(CHECKOUT),
    *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent),
]

N, K, TOKENS, STEP = 7168, 2048, 8192, 257
EXPERTS, TOPK, INTER, FEWER_TOKENS = 32, 8, 4096, 4096
MIB = 1 << 20
BUDGET = 256 * MIB
"""``fxwarm.memory`` of the bounded warmup: room for the dense witnesses, not for 0.9 GiB of experts."""
LEFT = 72 * MIB
"""What is left free where everything else is taken: the library's 32 MiB of workspace, and half of it for a witness, of
which the largest takes 38 MiB."""
DEVICE = "cuda"


def used() -> int:
    """Bytes of the device that are taken, by whomever."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


class Watch:
    """The device's memory while something runs: before, at the peak, after; torch's own counts beside the driver's."""

    def __init__(self, *, look: bool = True) -> None:
        """``look`` every half millisecond for the driver's peak: not where calls are timed."""
        self._looks = look

    def __enter__(self) -> Watch:
        import torch

        self._torch = torch
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.allocated, self.reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        self.driver = self._top = used()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        torch = self._torch
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._begin
        self._stop.set()
        self._thread.join()
        self.peak_reserved = torch.cuda.max_memory_reserved() - self.reserved
        self.peak_driver = self._top - self.driver
        self.kept_allocated = torch.cuda.memory_allocated() - self.allocated
        self.kept_reserved = torch.cuda.memory_reserved() - self.reserved
        self.kept_driver = used() - self.driver

    def _look(self) -> None:
        while self._looks and not self._stop.wait(0.0005):
            self._top = max(self._top, used())

    def figures(self) -> dict[str, Any]:
        names = ("peak_reserved", "peak_driver", "kept_allocated", "kept_reserved", "kept_driver")
        return {f"{name}_bytes": getattr(self, name) for name in names}


def open_device() -> None:
    """Open the device and load torch's own kernels for what is done to tensors here: they take memory, too."""
    import torch

    for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.int32):
        torch.zeros(8, dtype=dtype, device=DEVICE).fill_(1)
        torch.ones(8, dtype=dtype, device=DEVICE)
        full = torch.full((8,), 1, dtype=dtype, device=DEVICE)
        assert bool((full == 1).all())
    torch.cuda.synchronize()


def take_all_but(left: int) -> list[Any]:
    """Take the device's memory but for ``left`` bytes, in as few pieces as it gives."""
    import torch

    pieces, size = [], int(torch.cuda.mem_get_info()[0])
    while (free := int(torch.cuda.mem_get_info()[0]) - left) > 2 * MIB and size >= 2 * MIB:
        try:
            pieces.append(torch.empty(min(size, free), dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            size //= 2
    return pieces


def make_model(layers: int) -> Any:
    """Return ``layers`` equal layers on the meta device: the dense weight, then the experts."""
    import torch
    from torch import nn

    from fxwarm.ops import per_token_cast_to_fp8

    def weight(*shape: int) -> tuple[Any, Any]:
        scales = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        return nn.Parameter(values, False), nn.Parameter(torch.empty(scales, device="meta"), False)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.w_sf = weight(N, K)
            self.e, self.e_sf = weight(EXPERTS, INTER, N)

        def forward(self, x: Any) -> Any:
            tokens = x.shape[0]
            a, a_sf = per_token_cast_to_fp8(x)
            h = x.new_empty(tokens, N)
            torch.ops.fxwarm.fp8_gemm_nt(a, a_sf, self.w, self.w_sf, h)
            padded = TOPK * tokens + torch.sym_min(TOPK * tokens, EXPERTS) * 127
            rows = 128 * ((padded + 127) // 128)
            index = torch.arange(rows, device=x.device)
            ids = ((index // 128) % EXPERTS).to(torch.int32)
            a, a_sf = per_token_cast_to_fp8(h[index % tokens])
            d = x.new_empty(rows, INTER)
            torch.ops.fxwarm.m_grouped_fp8_gemm_nt_contiguous(a, a_sf, self.e, self.e_sf, d, ids)
            return d[:tokens, :K]

    return nn.Sequential(*(Layer() for _ in range(layers)))


def trace(layers: int) -> Any:
    """Return the shapes of ``layers`` layers at 1 to ``FEWER_TOKENS`` tokens."""
    import torch

    import fxwarm

    x = torch.empty(64, K, dtype=torch.bfloat16, device="meta")
    return fxwarm.trace(make_model(layers), x, max_size=FEWER_TOKENS)


def dense_calls() -> list[Any]:
    from tests.gpu import deep_gemm

    return deep_gemm.make_calls([[N, K]], [], 1)


def make(shapes: Any, cache: Path, plan: Any = None, **more: Any) -> Any:
    from fxwarm.options import resolve
    from fxwarm.warmup import Warmup

    options = resolve({"cache_dir": str(cache / f"fxwarm-{os.getpid()}"), **more})
    return Warmup(shapes, options, plan=plan)


def shapes_of(calls: list[Any]) -> Any:
    from passes.records import ShapeSet, Site

    return ShapeSet(tuple(calls), (Site(),) * len(calls))


def told(report: Any) -> dict[str, Any]:
    return {
        "status": report.status,
        "kernels": len(report.built) + len(report.found),
        "launches": sum(not x.error for x in report.loaded),
        "reported_peak_bytes": report.peak_bytes,
        "reported_kept_bytes": report.kept_bytes,
        "not_launched": [str(x.key) for x in report.loaded if x.error],
        "reasons": sorted({x.error[:160] for x in report.failed})[:3],
        "gaps": [str(g) for g in report.gaps][:5],
    }


# Phases: each in a process of its own


def build(args: argparse.Namespace) -> dict[str, Any]:
    """Put the kernels of the dense weight into the cache, so that the others find them."""
    warmup = make(shapes_of(dense_calls()), Path(args.cache))
    begin = time.perf_counter()
    warmup.start()
    warmup.wait()
    return {"kernels": len(warmup.plan.planned), "cold_s": round(time.perf_counter() - begin, 2)}


def left(args: argparse.Namespace) -> dict[str, Any]:
    """Warm within a budget, then without: what each took at most, what it left, and what it says of that."""
    shapes = trace(args.layers)
    open_device()
    bounded = make(shapes, Path(args.cache), memory=BUDGET)
    begin = time.perf_counter()
    bounded.start()
    bounded.wait()  # the library was asked and everything is built: what follows is the load alone
    cold = time.perf_counter() - begin
    with Watch() as small:
        first = bounded.finish()
    full = make(shapes, Path(args.cache), plan=bounded.plan)
    full.start()
    full.wait()
    with Watch() as whole:
        second = full.finish()
    assert full.plan is not None
    found = {
        "layers": args.layers,
        "calls": len(shapes.calls),
        "planned": len(full.plan.planned),
        "cold_s": round(cold, 2),
        "warm_s": round(whole.seconds, 3),
        "bounded": {**told(first), **small.figures()},
        "whole": {**told(second), **whole.figures()},
    }
    off = abs(second.peak_bytes - whole.peak_reserved) / max(whole.peak_reserved, 1)
    found["off_by"] = round(off, 4)
    found["claims"] = {
        "peak as measured, within 5%": off <= 0.05,
        "kept as measured": second.kept_bytes == whole.kept_allocated
        and first.kept_bytes == small.kept_allocated,
        "scratch is free": whole.kept_reserved <= whole.kept_allocated + 2 * MIB
        and small.kept_reserved <= small.kept_allocated + 2 * MIB,
        "within fxwarm.memory": first.peak_bytes - first.kept_bytes <= BUDGET,
        "what did not fit is named": bool(told(first)["not_launched"]),
        "all is warm in the end": not second.failed,
    }
    return found


def serve(sizes: list[int]) -> dict[str, Any]:
    """Call the library at these M; return what JITted meanwhile, and what memory that took beside torch's."""
    import torch

    import fxwarm
    from fxwarm.families.deep_gemm import inputs
    from fxwarm.families.deep_gemm.entries import invoke
    from fxwarm.families.deep_gemm.library import module_name
    from passes import bound

    library = importlib.import_module(module_name() or "deep_gemm")
    (call,) = dense_calls()
    slowest, right = 0.0, True
    with Watch(look=False) as memory, fxwarm.no_jit("count") as seen:
        for m in sizes:
            values = inputs.arguments(bound.at(call, {"s0": m}), torch.device(DEVICE))
            torch.cuda.synchronize()
            begin = time.perf_counter()
            invoke(library, call.op, values)
            torch.cuda.synchronize()
            slowest = max(slowest, time.perf_counter() - begin)
            right = right and bool((values["d"] == K).all())  # ones times ones
            del values
    return {
        "calls_after": len(sizes),
        "jit_after": seen.count,
        "events": [str(e) for e in seen.events][:5],
        "slowest_call_ms": round(1e3 * slowest, 3),
        "right": right,
        "beside_torch_bytes": memory.kept_driver - memory.kept_reserved,
    }


def modelled() -> tuple[Any, Any]:
    """Return the shapes of the dense weight and the model's plan, all of which is built: nothing is asked."""
    from fxwarm.planner import make_plan
    from fxwarm.records import Target

    shapes = shapes_of(dense_calls())
    return shapes, make_plan(shapes, Target.current())


def room(args: argparse.Namespace) -> dict[str, Any]:
    """Warm, take 80% of what is free, serve."""
    import torch

    shapes, plan = modelled()
    open_device()
    warmup = make(shapes, Path(args.cache), plan=plan)
    warmup.start()
    warmup.wait()
    with Watch() as memory:
        report = warmup.finish()
    cache = torch.empty(int(0.8 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device=DEVICE)
    found = {**told(report), **memory.figures(), "warm_s": round(memory.seconds, 3)}
    found |= serve([*range(1, TOKENS + 1, STEP)])
    found["taken_bytes"] = len(cache)
    found["claims"] = {
        "at most 64 MiB above before": memory.kept_reserved <= 64 * MIB,
        "the driver agrees": memory.kept_driver <= 64 * MIB,
        "kept as reported": report.kept_bytes == memory.kept_allocated,
        "serving builds and loads nothing": found["jit_after"] == 0,
        "serving is right": found["right"],
        "nothing else was taken": found["beside_torch_bytes"] <= 4 * MIB,
        "complete": report.status == "complete",
    }
    return found


def no_room(args: argparse.Namespace) -> dict[str, Any]:
    """Take all but a little, then warm, serve small sizes; then give it back and warm the rest."""
    import torch

    shapes, plan = modelled()
    open_device()
    pieces = take_all_but(LEFT)
    report = make(shapes, Path(args.cache), plan=plan).finish()
    found = {**told(report), **serve([1, 2, 16])}
    known = {x.key for x in report.loaded if not x.error} | {x.key for x in report.failed}
    pieces.clear()
    torch.cuda.empty_cache()
    rest = make(shapes, Path(args.cache), plan=plan).finish()
    found["claims"] = {
        "the model answers": found["right"],
        "some could not be launched": bool(found["not_launched"]),
        "each is loaded or named": known == {p.key for p in plan.planned},
        "with room again the rest loads": not rest.failed
        and len(rest.loaded) == len(found["not_launched"]),
    }
    return found


PHASES = {"build": build, "left": left, "room": room, "no_room": no_room}


# The run


def begin(phase: str, home: Path, layers: int = 1) -> Any:
    """Start one phase in a fresh process; call what is returned for its answer."""
    answer = home / f"{phase}-{layers}.json"
    command = [sys.executable, __file__, "--phase", phase, "--cache", str(home),
               "--answer", str(answer), "--layers", str(layers)]  # fmt: skip
    environ = {**os.environ, "DG_JIT_CACHE_DIR": str(home / "deep_gemm")}
    environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environ)

    def wait() -> dict[str, Any]:
        try:
            code = process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        found = (
            json.loads(answer.read_text()) if answer.exists() else {"failed": f"exit code {code}"}
        )
        found["process_s"] = round(time.perf_counter() - start, 1)
        print(f"{phase} {layers}: {json.dumps(found)}", flush=True)
        return found

    return wait


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="")
    parser.add_argument("--layers", type=int, default=1, help=argparse.SUPPRESS)
    for name in ("--phase", "--cache", "--answer"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        Path(args.answer).write_text(json.dumps(PHASES[args.phase](args)))
        return
    import torch

    from fxwarm.families.deep_gemm.library import find_library
    from tests.gpu.figures import write

    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fxwarm-memory-") as folder:
        home = Path(folder)
        # torch's own counts are of one process: these share the device and the builds
        together = {"build": begin("build", home), "left, 1 layer": begin("left", home)}
        together["left, 4 layers"] = begin("left", home, 4)
        cases |= {name: wait() for name, wait in together.items()}
        for name, phase in (("room", "room"), ("no room", "no_room")):
            cases[name] = begin(phase, home)()
    one, four = cases["left, 1 layer"], cases["left, 4 layers"]
    if "whole" in one and "whole" in four:
        same = one["whole"]["reported_peak_bytes"] == four["whole"]["reported_peak_bytes"]
        four["claims"]["four layers peak as one does"] = same
    result = {
        "date": time.strftime("%Y-%m-%d"), "card": torch.cuda.get_device_name(),
        "versions": {"library": str(find_library({})), "torch": torch.__version__, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))},
        "command": "python tests/gpu/memory.py", "cases": cases,
    }  # fmt: skip
    if args.out:
        write(args.out, result)
    print(
        f"{'':16}{'peak MiB':>9}{'measured':>9}{'kept MiB':>9}{'launches':>9}{'JIT after':>10}  claims"
    )
    for name, case in cases.items():
        if name == "build":
            continue
        shown = {**case, **case.get("whole", {})}
        broken = [c for c, holds in case.get("claims", {"it ran": False}).items() if not holds]
        print(
            f"{name:16}{shown.get('reported_peak_bytes', 0) / MIB:>9.0f}{shown.get('peak_reserved_bytes', 0) / MIB:>9.0f}"
            f"{shown.get('reported_kept_bytes', 0) / MIB:>9.0f}{shown.get('launches', '-'):>9}{shown.get('jit_after', '-'):>10}"
            f"  {'hold' if not broken else 'BROKEN: ' + '; '.join(broken)}"
        )


if __name__ == "__main__":
    main()
