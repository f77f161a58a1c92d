"""Measure DeepGEMM's warmup on a Hopper GPU: fxwarm beside the lists that engines launch today.

    python tests/gpu/deep_gemm.py --out tests/gpu/results/deep_gemm.json [--only fxwarm relaxed sweep]

Per model, in fresh processes and a fresh cache: fxwarm cold (ask, build, load), then every attainable
M of every call through the real library, numerics of some kernels, and a warm start. On the Qwen3
set also the relaxed list that vLLM launches by default, one call after the other; and for one
shape every M. Needs torch, fxwarm's dependencies and a DeepGEMM on PYTHONPATH; no pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
# this file is called as the library is: its folder must not be where imports look first
sys.path[:] = [
    str(CHECKOUT),
    *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent),
]

MODELS = {"qwen3": ("Qwen3-30B-A3B-FP8", 1), "deepseek-v3": ("DeepSeek-V3/R1", 8)}
"""Short name -> (name in the shapes file, tensor parallel size)."""
DEVICE = "cuda"
TOKENS = 8192
ONE_SHAPE = (5120, 2048)
FP8, F32, BF16, I32 = "float8_e4m3fn", "float32", "bfloat16", "int32"


# Shapes: what a traced model gives, as records


def weights(shapes: dict[str, Any], model: str) -> tuple[list[list[int]], list[list[int]], int]:
    """Return (dense [N, K], grouped [G, N, K], topk) of one rank."""
    name, tp = MODELS[model]
    found = shapes.get(name) or shapes["models"][name]

    def numbers(value: list[Any]) -> list[int]:
        return [v for v in value if isinstance(v, int)]

    dense = [
        numbers(w.get("any_tp") or w["tp"][str(tp)])
        for w in found["dense"].values()
        if w["dtype"] == "fp8_block128"
    ]
    grouped = [numbers(w) for w in found["grouped"]["tp"][str(tp)].values()]
    return dense, grouped, found["grouped"].get("topk") or found["moe"]["topk"]


def grouped_rows(topk: int, groups: int) -> str:
    """Rows of a grouped GEMM at s0 tokens: each expert's share is padded to 128."""
    return f"128*(({topk}*s0 + Min({topk}*s0, {groups})*127 + 127)//128)"


def make_calls(dense: list[list[int]], grouped: list[list[int]], topk: int) -> list[Any]:
    """Return the calls at 1..TOKENS tokens, scales row-major as transformers hands them over."""
    from passes.bound import bound_dim
    from passes.records import Dim, KernelCall, Symbol, TensorSpec

    symbols = (Symbol("s0", 1, TOKENS),)

    def spec(dtype: str, *dims: Any) -> Any:
        made = [Dim.static(d) if isinstance(d, int) else bound_dim(d, symbols, ()) for d in dims]
        return TensorSpec(dtype, tuple(made))

    def call(op: str, m: str, groups: list[int], n: int, k: int) -> Any:
        up = lambda x: -(-x // 128)  # noqa: E731
        tensors = {
            "a": spec(FP8, m, k), "a_sf": spec(F32, m, up(k)), "b": spec(FP8, *groups, n, k),
            "b_sf": spec(F32, *groups, up(n), up(k)), "d": spec(BF16, m, n),
        }  # fmt: skip
        if groups:
            tensors["grouped_layout"] = spec(I32, m)
        return KernelCall("deep_gemm", op, tuple(tensors.items()), (), symbols)

    found = [call("fp8_gemm_nt", "s0", [], n, k) for n, k in dense]
    for g, n, k in grouped:
        found.append(call("m_grouped_fp8_gemm_nt_contiguous", grouped_rows(topk, g), [g], n, k))
    return found


# Measuring


class Meter:
    """Wall seconds, CPU seconds of child processes, and the device memory at its highest point."""

    def __enter__(self) -> Meter:
        import torch

        self._torch = torch
        self._stop = threading.Event()
        self._before = self._used()
        self.peak = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._cpu, self._begin = self._children(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begin
        self.cpu = self._children() - self._cpu
        self._stop.set()
        self._thread.join()

    def _used(self) -> int:
        free, total = self._torch.cuda.mem_get_info()
        return int(total - free)

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, self._used() - self._before)

    @staticmethod
    def _children() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime


def entry_names() -> set[str]:
    from fxwarm.families.deep_gemm import cache
    from fxwarm.families.deep_gemm.library import find_library

    generation = dict(find_library({}).settings)["generation"]
    return set(cache.entries(cache.roots(generation)))


def sweep_all(calls: list[Any], rows: dict[int, list[list[int]]] | None = None) -> dict[str, Any]:
    """Make every call at every attainable size (or at ``rows``) through the real library."""
    import importlib

    import torch

    from fxwarm.families.deep_gemm.buffers import Buffers, Call
    from fxwarm.families.deep_gemm.entries import invoke
    from fxwarm.families.deep_gemm.library import module_name
    from fxwarm.families.deep_gemm.sweep import make_sweep

    library = importlib.import_module(module_name() or "deep_gemm")
    before = entry_names()
    slow: list[dict[str, Any]] = []
    made, slowest = 0, 0.0
    begin = time.perf_counter()
    for index, call in enumerate(calls):
        request = make_sweep(call).request()
        if rows is not None:
            wanted = {r[0] for r in rows[index]}
            request["rows"] = [r for r in request["rows"] if r[0] in wanted]
        one = Call(request, torch)
        one.allocate(Buffers(torch, DEVICE, one.operand_bytes))
        for row in range(len(one.rows)):
            values = one.values(row)
            if made % 32 == 0:
                torch.cuda.synchronize()  # or a full launch queue would be timed
            start = time.perf_counter()
            invoke(library, one.op, values)
            took = 1e3 * (time.perf_counter() - start)
            slowest = max(slowest, took)
            made += 1
            if took > 5:
                slow.append({"call": str(call), "m": one.rows[row][0], "ms": round(took, 2)})
            if took > 1000:
                print(f"    {made} calls, {time.perf_counter() - begin:.0f} s", flush=True)
        torch.cuda.synchronize()
        del one
        torch.cuda.empty_cache()
    return {
        "calls_after": made,
        "jit_after": len(entry_names() - before),
        "slowest_call_ms": round(slowest, 3),
        "over_5_ms": slow[:20],
        "sweep_s": round(time.perf_counter() - begin, 2),
    }


def check_numerics(planned: list[Any], most: int = 12) -> dict[str, Any]:
    """Compare some kernels at their witnesses with float32 on the same FP8 inputs."""
    import importlib

    import torch

    from fxwarm.families.deep_gemm import inputs
    from fxwarm.families.deep_gemm.entries import invoke
    from fxwarm.families.deep_gemm.library import module_name

    library = importlib.import_module(module_name() or "deep_gemm")
    generator = torch.Generator(DEVICE).manual_seed(0)
    gemms = [
        p
        for p in planned
        if "gemm" in p.key.tag and inputs.bytes_of(inputs.legal(p.witness)) < 4 << 30
    ]
    chosen = gemms[:: max(1, len(gemms) // most)][:most]
    worst, done = 0.0, []
    for p in chosen:
        call = inputs.legal(p.witness)
        values = inputs.arguments(call, torch.device(DEVICE))
        for name in ("a", "b"):
            noise = torch.randint(
                0x28, 0x48, values[name].shape, device=DEVICE, generator=generator
            )
            sign = torch.randint(0, 2, values[name].shape, device=DEVICE, generator=generator) << 7
            values[name].view(torch.uint8).copy_((noise | sign).to(torch.uint8))
            del noise, sign
            exponent = torch.randint(
                -2, 3, values[f"{name}_sf"].shape, device=DEVICE, generator=generator
            )
            values[f"{name}_sf"].copy_(torch.exp2(exponent.float()))
        invoke(library, call.op, values)
        b, b_sf = values["b"], values["b_sf"]
        group = 0
        if call.op.startswith("m_grouped"):
            group = int(values["grouped_layout"][-1])
            b, b_sf = b[group], b_sf[group]
        n, k = b.shape
        rows = slice(-min(64, values["a"].shape[0]), None)
        spread = b_sf.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        left = values["a"][rows].float() * values["a_sf"][rows].repeat_interleave(128, 1)[:, :k]
        wanted = left @ (b.float() * spread).T
        error = float((values["d"][rows].float() - wanted).norm() / wanted.norm())
        worst = max(worst, error)
        done.append({"m": int(call["a"].dims[0]), "kernel": str(p.key), "error": round(error, 5)})
        del values, spread, left, wanted
    return {"numerics_worst": round(worst, 5), "numerics_ok": worst < 0.01, "numerics": done}


def check_names(planned: list[Any]) -> str:
    """Recompute each entry's name, and each source's hash of headers, from the source alone."""
    import re

    from fxwarm.families.deep_gemm import digest, library, toolchain

    found = library.find_library({})
    generation = dict(found.settings)["generation"]
    include = library.include_of(found.module)
    assert include is not None
    compiler = toolchain.find_compiler(generation)
    text = (include / "cutlass" / "version.h").read_text()
    cutlass = "".join(
        re.search(rf"CUTLASS_{p} (\d+)", text)[1] for p in ("MAJOR", "MINOR", "PATCH")
    )
    right, known = 0, {}
    for p in planned:
        s = p.source
        if generation == "A":
            name = digest.name_a(p.key.tag, s.code, s.flags, compiler.version)
            hashed = digest.includes_hash(s.code, include, known=known)
            right += name == s.entry and s.code.startswith(f"// Includes' hash value: {hashed}\n")
        else:
            flags = [f for f in s.flags if f != "--include-path" and str(include) not in f]
            name = digest.name_b(p.key.tag, s.code, flags, compiler_text=compiler.text,
                                 include=include, cutlass=cutlass)  # fmt: skip
            right += name == s.entry
    return f"{right} of {len(planned)}"


# Phases: each in a process of its own


def make_warmup(calls: list[Any], cache_dir: Path, jobs: int) -> Any:
    """What the backend makes of a graph with these calls."""
    from fxwarm.options import resolve
    from fxwarm.warmup import Warmup
    from passes.records import ShapeSet, Site

    shapes = ShapeSet(tuple(calls), (Site(),) * len(calls))
    options = resolve({"jobs": jobs, "cache_dir": str(cache_dir / "fxwarm")})
    return Warmup(shapes, options)


def trace_meanwhile(layers: int) -> float:
    """Trace some layers of Qwen3-30B-A3B on the meta device, as Dynamo would now; return the seconds."""
    from fxwarm.demo.facts import trace_model

    begin = time.perf_counter()
    if layers:
        trace_model("qwen3-30b-a3b", TOKENS, layers)
    return time.perf_counter() - begin


def fxwarm_cold(calls: list[Any], cache_dir: Path, jobs: int, layers: int) -> dict[str, Any]:
    """Ask, build and load as the backend does, from a cold cache; then check every call.

    ``cold_s`` runs from the moment that the shapes are known. The recorder's child starts when a trace begins, as under
    torch.compile, here of ``layers`` layers; with 0 layers its whole start is in ``cold_s``.
    """
    from fxwarm.families.deep_gemm import DeepGemm
    from fxwarm.records import Planned, Target

    target = Target.current()
    DeepGemm().prepare(target, DeepGemm().library({}))
    traced = trace_meanwhile(layers)
    with Meter() as whole:
        warmup = make_warmup(calls, cache_dir, jobs)
        report = warmup.finish()
    print(f"  {whole.seconds:.1f} s: {report.status}", flush=True)
    family, planned = DeepGemm(), list(warmup.plan.planned)
    modelled = [p for p in family.keys(calls, target, family.library({})) if isinstance(p, Planned)]
    return {
        "library": str(report.libraries[0]),
        "status": report.status,
        "kernels": len(planned),
        "built": sum(not b.error for b in report.built),
        "launches": sum(not x.error for x in report.loaded),
        "traced_layers": layers,
        "trace_s": round(traced, 2),
        "cold_s": round(whole.seconds, 2),
        "ask_and_build_s": round(report.build_seconds, 2),
        "load_s": round(sum(x.seconds for x in report.loaded), 2),
        "nvcc_cpu_s": round(whole.cpu, 1),
        "slowest_kernel_s": round(max((b.seconds for b in report.built), default=0), 2),
        "peak_bytes": whole.peak,
        "load_peak_bytes": report.peak_bytes,
        "kept_bytes": report.kept_bytes,
        "errors": [f"{x.key}: {x.error}" for x in report.failed][:10],
        "gaps": [str(g) for g in report.gaps][:10],
        "drift": family.drift(modelled, planned)[:10],
        "names_reproduced": check_names(planned),
        **sweep_all(calls),
        **check_numerics(planned),
    }


def fxwarm_warm(calls: list[Any], cache_dir: Path, jobs: int) -> dict[str, Any]:
    """The next start: the receipt stands, so nothing is asked or built, and every kernel is loaded."""
    import torch

    torch.cuda.init()
    with Meter() as whole:
        report = make_warmup(calls, cache_dir, jobs).finish()
    return {
        "warm_s": round(whole.seconds, 2),
        "warm_status": report.status,
        "warm_built": len(report.built),
        "warm_found": len(report.found),
        "warm_launches": sum(not x.error for x in report.loaded),
        "warm_peak_bytes": whole.peak,
    }


def relaxed_rows(n: int, most: int) -> list[int]:
    """vLLM 0.33's default list for a weight with N = ``n``: K is no input (facts of hosts)."""
    sms = 132
    found = {1, 2, 4, *range(8, 65, 8), *range(64, most + 1, 64)}
    for bm in (64, 128, 256):
        for bn in range(16, min(256, n) + 1, 16):
            found |= {wave * sms * bm // -(-n // bn) for wave in range(1, 11)}
    return sorted(m for m in found if 0 < m <= most)


def relaxed(shapes: dict[str, Any]) -> dict[str, Any]:
    dense, grouped, topk = weights(shapes, "qwen3")
    calls = make_calls(dense, grouped, topk)
    lists = [relaxed_rows(n, TOKENS) for n, _ in dense]
    widest = max(n for _, n, _ in grouped)
    for g, _, _ in grouped:
        sums = {
            128 * -(-(topk * t + min(topk * t, g) * 127) // 128)
            for t in relaxed_rows(widest, TOKENS)
        }
        lists.append(sorted(sums))
    return serial(calls, lists)


def serial(calls: list[Any], lists: list[list[int]]) -> dict[str, Any]:
    with Meter() as meter:
        found = sweep_all(calls, {i: [[m] for m in ms] for i, ms in enumerate(lists)})
    return {
        "launches": found["calls_after"],
        "kernels": found["jit_after"],
        "cold_s": round(meter.seconds, 2),
        "nvcc_cpu_s": round(meter.cpu, 1),
        "peak_bytes": meter.peak,
    }


def run_phase(args: argparse.Namespace) -> dict[str, Any]:
    shapes = json.loads(Path(args.shapes).read_text())
    if args.phase == "relaxed":
        return relaxed(shapes)
    if args.phase == "sweep":
        return serial(make_calls([list(ONE_SHAPE)], [], 1), [list(range(1, TOKENS + 1))])
    if args.phase == "warm":
        return fxwarm_warm(make_calls(*weights(shapes, args.model)), Path(args.cache), args.jobs)
    calls = make_calls(*weights(shapes, args.model))
    return fxwarm_cold(calls, Path(args.cache), args.jobs, args.layers)


# The run


def spawn(args: argparse.Namespace, phase: str, model: str, cache_dir: Path) -> dict[str, Any]:
    """Run one phase in a fresh process with its cache; print its time as it ends."""
    answer = cache_dir / f"{phase}.json"
    command = [sys.executable, __file__, "--phase", phase, "--model", model, "--cache", str(cache_dir),
               "--shapes", args.shapes, "--jobs", str(args.jobs), "--layers", str(args.layers),
               "--answer", str(answer)]  # fmt: skip
    environ = {**os.environ, "DG_JIT_CACHE_DIR": str(cache_dir / "deep_gemm")}
    environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    print(f"{phase} {model} ...", flush=True)
    begin = time.perf_counter()
    done = subprocess.run(command, env=environ, check=False, timeout=args.limit)
    seconds = time.perf_counter() - begin
    found = (
        json.loads(answer.read_text())
        if answer.exists()
        else {"failed": f"exit code {done.returncode}"}
    )
    found["process_s"] = round(seconds, 2)
    shown = {k: v for k, v in found.items() if not isinstance(v, list)}
    print(f"  {phase} {model}: {seconds:.1f} s {json.dumps(shown)}", flush=True)
    return found


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{'':34}{'kernels':>8}{'launches':>9}{'cold s':>8}{'nvcc CPU s':>11}{'warm s':>8}{'MiB':>7}{'JIT after':>10}{'slowest ms':>11}"
    ]
    rows = [*((f"fxwarm, {m}", r) for m, r in result["models"].items()),
            ("relaxed list, one by one", result.get("relaxed")), ("every M of one shape", result.get("sweep"))]  # fmt: skip
    for name, r in rows:
        if r:
            lines.append(
                f"{name:34}{r.get('kernels', '-'):>8}{r.get('launches', '-'):>9}{r.get('cold_s', '-'):>8}"
                f"{r.get('nvcc_cpu_s', '-'):>11}{r.get('warm_s', '-'):>8}{r.get('peak_bytes', 0) >> 20:>7}"
                f"{r.get('jit_after', '-'):>10}{r.get('slowest_call_ms', '-'):>11}"
            )
    return "\n".join(lines)


def main() -> None:
    places = [
        CHECKOUT.parent / "shared" / "model_shapes.json",
        CHECKOUT / ".gpu" / "model_shapes.json",
    ]
    default = next((str(p) for p in places if p.exists()), str(places[0]))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("fxwarm", "relaxed", "sweep"),
        default=["fxwarm", "relaxed", "sweep"],
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--shapes", default=default)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--layers", type=int, default=8, help="layers traced while the child starts"
    )
    parser.add_argument(
        "--limit", type=float, default=500.0, help="seconds that one phase may take"
    )
    for name in ("--phase", "--model", "--cache", "--answer"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        Path(args.answer).write_text(json.dumps(run_phase(args)))
        return
    import torch

    from fxwarm.families.deep_gemm.library import find_library
    from fxwarm.families.deep_gemm.toolchain import find_compiler

    library = find_library({})
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "card": torch.cuda.get_device_name(),
        "versions": {
            "library": str(library), "torch": torch.__version__, "python": platform.python_version(),
            "nvcc": ".".join(map(str, find_compiler().version)), "cores": args.jobs,
        },
        "command": "python tests/gpu/deep_gemm.py " + " ".join(["--only", *args.only]),
        "models": {},
    }  # fmt: skip

    def keep() -> None:
        if args.out:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="fxwarm-gpu-") as folder:
        for model in args.models if "fxwarm" in args.only else ():
            home = Path(folder, model)
            home.mkdir()
            found = spawn(args, "cold", model, home)
            if "failed" not in found:
                found |= {
                    k: v for k, v in spawn(args, "warm", model, home).items() if k != "process_s"
                }
            result["models"][model] = found
            keep()
        for phase in ("relaxed", "sweep"):
            if phase in args.only:
                home = Path(folder, phase)
                home.mkdir()
                result[phase] = spawn(args, phase, "qwen3", home)
                keep()
    keep()
    print(table(result), flush=True)


if __name__ == "__main__":
    main()
