"""CUDA graph captures over DeepGEMM: warm they hold no load and replay right, cold they are refused and named.

    python tests/gpu/capture.py --out tests/gpu/results/capture.json

deepseek-ai/DeepGEMM#443: fp8_gemm_nt of 7168 x 2048 at M = 1 to 64, each phase in a process of its own, about 30 s in
all. Also what the monitor says, without a look at any call, of a compile and of a first load of DeepGEMM's C++ side, and
what it costs a call. Needs torch, fxwarm's dependencies and a DeepGEMM on PYTHONPATH; no pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:] = [
    str(CHECKOUT),
    *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent),
]

N, K = 7168, 2048
CAPTURED = (1, 2, 4, 8, 16, 32, 64)
OTHER = (512, 1024)
"""Another weight, which no plan holds."""
LIMIT = 100.0


def shapes_of(most: int) -> Any:
    """What a model with one linear gives, for up to ``most`` tokens."""
    from passes.bound import bound_dim
    from passes.records import Dim, KernelCall, ShapeSet, Site, Symbol, TensorSpec

    symbols = (Symbol("s0", 1, most),)
    m = bound_dim("s0", symbols, ())

    def spec(dtype: str, *dims: Any) -> Any:
        return TensorSpec(dtype, tuple(Dim.static(d) if isinstance(d, int) else d for d in dims))

    tensors = {
        "a": spec("float8_e4m3fn", m, K), "a_sf": spec("float32", m, K // 128),
        "b": spec("float8_e4m3fn", N, K), "b_sf": spec("float32", N // 128, K // 128),
        "d": spec("bfloat16", m, N),
    }  # fmt: skip
    call = KernelCall("deep_gemm", "fp8_gemm_nt", tuple(tensors.items()), (), symbols)
    return ShapeSet(calls=(call,), sites=(Site(1, "model.py:1 in forward"),))


def make_warmup(most: int, **options: Any) -> Any:
    import torch

    from fxwarm.options import Options
    from fxwarm.warmup import Warmup

    return Warmup(shapes_of(most), Options(**options), device=torch.device("cuda", 0))


def tensors(m: int, n: int = N, k: int = K) -> list[Any]:
    """Random values that are no NaN, scales that are powers of two."""
    import torch

    generator = torch.Generator("cuda").manual_seed(m)

    def fp8(rows: int, columns: int) -> Any:
        code = torch.randint(0x28, 0x48, (rows, columns), device="cuda", generator=generator)
        sign = torch.randint(0, 2, (rows, columns), device="cuda", generator=generator) << 7
        return (code | sign).to(torch.uint8).view(torch.float8_e4m3fn)

    return [
        fp8(m, k), torch.ones(m, k // 128, device="cuda"),
        fp8(n, k), torch.ones(-(-n // 128), k // 128, device="cuda"),
        torch.zeros(m, n, device="cuda", dtype=torch.bfloat16),
    ]  # fmt: skip


def call(values: list[Any]) -> None:
    import torch

    import fxwarm.ops  # noqa: F401

    torch.ops.fxwarm.fp8_gemm_nt.default(*values)


def captured(values: list[Any]) -> Any:
    """Return a graph of one call."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(values)
    return graph


def wrong_by(values: list[Any]) -> float:
    """Return the relative error of the last call against float32."""
    wanted = values[0].float() @ values[2].float().T
    return round(float((values[4].float() - wanted).norm() / wanted.norm()), 5)


def told(seen: Any) -> list[dict[str, Any]]:
    """Return what a monitor saw, as plain data."""
    return [
        {
            "library": e.library, "kind": e.kind, "op": e.op, "key": str(e.key), "shape": e.shape, "place": e.place,
            "seconds": round(e.seconds, 3), "capturing": e.capturing, "severity": e.severity, "whose": e.whose,
            "missing_from": e.missing_from,
        }
        for e in seen
    ]  # fmt: skip


def complete() -> dict[str, Any]:
    """The plan holds every captured M."""
    import torch

    import fxwarm
    from tests.gpu.deep_gemm import entry_names

    report = make_warmup(64).finish()
    inputs = {m: tensors(m) for m in CAPTURED}
    before, equal, wrong = entry_names(), 0, 0.0
    with fxwarm.no_jit("count") as seen:
        graphs = {m: captured(values) for m, values in inputs.items()}
        for m, values in inputs.items():
            values[4].zero_()
            graphs[m].replay()
            torch.cuda.synchronize()
            replayed = values[4].clone()
            wrong = max(wrong, wrong_by(values))
            call(values)
            equal += torch.equal(replayed, values[4])
        events = told(seen)
    return {
        "status": report.status, "kernels": len(report.loaded), "built": len(report.built),
        "captured": len(graphs), "replay_equals_eager": equal, "replay_error": wrong,
        "jit_after": len(events) + len(entry_names() - before), "events": events, "cost": cost(inputs[64]),
    }  # fmt: skip


def cost(values: list[Any]) -> dict[str, Any]:
    """Host seconds of a warm call, with and without a monitor, in turn."""
    import torch

    import fxwarm

    modes: dict[str, Callable[[], Any]] = {
        "without": contextlib.nullcontext,
        "again": contextlib.nullcontext,
        "count": lambda: fxwarm.no_jit("count"),
        "warn": lambda: fxwarm.no_jit("warn"),
        "raise": lambda: fxwarm.no_jit("raise"),
    }
    times: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(30):
        for name, mode in modes.items():
            with mode():
                call(values)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(100):
                    call(values)
                times[name].append((time.perf_counter() - begin) / 100)
                torch.cuda.synchronize()
    base = statistics.median(times["without"])
    return {
        name: {"us": round(statistics.median(t) * 1e6, 2), "ratio": round(statistics.median(t) / base, 3)}
        for name, t in times.items()
    }  # fmt: skip


def left_out() -> dict[str, Any]:
    """M = 64 is not in the plan: its kernel lies on disk and would be loaded in the capture."""
    import torch

    import fxwarm

    make_warmup(32).finish()
    values, error = tensors(64), ""
    with fxwarm.no_jit("count") as seen:
        try:
            captured(values).replay()
            torch.cuda.synchronize()
        except Exception as failure:  # what it does to the engine is what it is
            error = f"{type(failure).__name__}: {str(failure)[:200]}"
        return {"events": told(seen), "capture": error or f"survived, error {wrong_by(values)}"}


def left_out_raise() -> dict[str, Any]:
    """The same, stopped before the library is called: nothing is lost, and warm it can be captured."""
    import torch

    import fxwarm
    from fxwarm.exc import JitError

    make_warmup(32).finish()
    values, error = tensors(64), ""
    try:
        with fxwarm.no_jit("raise", calls=False):
            captured(values)
    except JitError as failure:
        error = str(failure)
    report = make_warmup(64).finish()
    captured(values).replay()
    torch.cuda.synchronize()
    return {"raised": error, "status_after": report.status, "replay_error": wrong_by(values)}


def cold() -> dict[str, Any]:
    """A model that was never called, in a capture: an error if strict, else a line and a warmup at the next call."""
    import torch

    from fxwarm import exc
    from fxwarm.artifacts import WarmCallable

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("fxwarm").addHandler(handler)
    values = tensors(8)
    strict = WarmCallable(lambda *a: call(list(a)), make_warmup(64, strict=True))
    raised, x = "", torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        try:
            strict(*values)
        except exc.ColdCaptureError as error:
            raised = str(error)
    lenient = WarmCallable(lambda *a: x.add_(1), make_warmup(64))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        lenient(*values)
    errors = [line for line in lines if line.startswith("ERROR")]
    in_capture = lenient.warmup.report
    strict(*values)
    torch.cuda.synchronize()
    return {
        "raised": raised, "logged": errors[:2], "warmed_in_the_capture": in_capture is not None,
        "status_after": strict.warmup.report.status, "error": wrong_by(values),
    }  # fmt: skip


def waits() -> dict[str, Any]:
    """A warmup in another thread while a capture is open."""
    import torch

    make_warmup(32).finish()
    values, one = tensors(16), make_warmup(64)
    graph, thread = torch.cuda.CUDAGraph(), threading.Thread(target=lambda: one.finish())
    with torch.cuda.graph(graph):
        thread.start()
        time.sleep(1.0)
        call(values)
        meanwhile = one.report is not None
    thread.join(60)
    graph.replay()
    torch.cuda.synchronize()
    return {
        "warmed_meanwhile": meanwhile, "status_after": one.report.status, "loaded_after": len(one.report.loaded),
        "replay_error": wrong_by(values),
    }  # fmt: skip


def compiles() -> dict[str, Any]:
    """A compile and its load by C++, heard by its files alone."""
    import torch

    import fxwarm

    torch.cuda.init()
    values = tensors(48, *OTHER)
    import importlib

    from fxwarm.families.deep_gemm.library import module_name

    importlib.import_module(module_name() or "deep_gemm")
    with fxwarm.no_jit("count") as seen:
        begin = time.perf_counter()
        call(values)
        seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        return {"events": told(seen), "call_s": round(seconds, 3), "error": wrong_by(values)}


loads = compiles
"""The same call in a new process: its kernels are on disk."""

PHASES: dict[str, Callable[[], dict[str, Any]]] = {
    f.__name__: f for f in (complete, compiles, left_out, left_out_raise, cold, waits)
} | {"loads": loads}


def spawn(name: str, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Start one phase in a process of its own."""
    answer = folder / f"{name}.json"
    cache = folder / ("watched" if name in ("compiles", "loads") else "captured")
    environ = {
        **os.environ,
        "DG_JIT_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"inductor-{name}"),
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, "--phase", name, "--answer", str(answer)]
    return subprocess.Popen(command, env=environ), answer


def together(names: list[str], folder: Path) -> dict[str, Any]:
    """Run phases at the same time; return what each saw."""
    begin = time.monotonic()
    started = {name: spawn(name, folder) for name in names}
    found = {}
    for name, (process, answer) in started.items():
        try:
            process.wait(max(1.0, LIMIT - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            process.kill()
        found[name] = json.loads(answer.read_text()) if answer.exists() else {"failed": f"exit {process.poll()}"}  # fmt: skip
    return found


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """Return what was promised, and whether it was kept."""

    def events(name: str) -> list[dict[str, Any]]:
        return found.get(name, {}).get("events") or []

    def get(name: str, key: str) -> Any:
        return found.get(name, {}).get(key)

    named = [e for e in events("left_out") if e["op"] == "fp8_gemm_nt" and e["shape"]]
    built = [e for e in events("compiles") if e["op"] == "fp8_gemm_nt" and e["kind"] == "build"]
    loaded = [e for e in events("loads") if e["op"] == "fp8_gemm_nt" and e["kind"] == "load"]
    return {
        "warm: no JIT in 7 captures": get("complete", "jit_after") == 0 and get("complete", "captured") == 7,
        "warm: replay equals eager": get("complete", "replay_equals_eager") == 7,
        "left out: named as a load during a capture": any(e["capturing"] and e["severity"] == 3 and e["kind"] == "load" for e in named),
        "left out, raise: stopped before, captured after": "during a graph capture" in str(get("left_out_raise", "raised")) and get("left_out_raise", "replay_error") is not None,
        "cold, strict: ColdCaptureError": "being captured" in str(get("cold", "raised")),
        "cold: an error is logged, warm at the next call": bool(get("cold", "logged")) and get("cold", "warmed_in_the_capture") is False and get("cold", "status_after") == "complete",
        "a warmup waits for the capture": get("waits", "warmed_meanwhile") is False and get("waits", "status_after") == "complete",
        "a compile is told with op, shape, place, seconds": any(e["shape"] and e["place"] and e["seconds"] > 0.3 and e["whose"] == "this process" for e in built),
        "a first load is told with op, shape, place": any(e["shape"] and e["place"] and e["whose"] == "this process" for e in loaded),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", default="")
    parser.add_argument("--phase", default="", help=argparse.SUPPRESS)
    parser.add_argument("--answer", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        Path(args.answer).write_text(json.dumps(PHASES[args.phase]()))
        os._exit(0)  # a capture that was broken may break the end of the process, too
    import torch

    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fxwarm-capture-") as name:
        folder = Path(name)
        found = together(["complete", "compiles"], folder)
        found |= together(["left_out", "left_out_raise", "cold", "waits", "loads"], folder)
    from fxwarm.families.deep_gemm.library import find_library
    from tests.gpu.figures import write

    result = {
        "date": time.strftime("%Y-%m-%d"),
        "card": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "library": str(find_library({})),
        },
        "command": "python tests/gpu/capture.py",
        "seconds": round(time.monotonic() - begin, 1),
        "verdicts": verdicts(found),
        "phases": found,
    }
    if args.out:
        write(args.out, result)
    for name, one in found.items():
        print(f"{name}: {json.dumps(one)[:600]}", flush=True)
    for what, kept in result["verdicts"].items():
        print(f"{'ok  ' if kept else 'FAIL'} {what}")
    print(f"{result['seconds']} s", flush=True)
    sys.exit(0 if all(result["verdicts"].values()) else 1)


if __name__ == "__main__":
    main()
