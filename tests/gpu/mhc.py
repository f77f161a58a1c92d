"""Measure the warmup of mHC layers on a Hopper GPU: DeepGEMM's and TileLang's kernels of one rule.

    python tests/gpu/mhc.py --out tests/gpu/results/mhc.json [--hidden 7168] [--without]

In fresh processes: fxwarm cold (trace, plan, build, load), then every token count 1..8192 through both ops, which must
compile and elaborate nothing, and numerics against float64; a warm start on the same caches; then cold and warm for the
kernels of each library alone, so that planning, import, build and load of each are seen; then the first call of one layer
under torch.compile, cold and warm. Builds are timed from the plan on: what imports TileLang for them, 7 s in another
process, runs beside the trace of a model's 61 layers, 10 s. ``--without`` also times the first call of each number of splits as it is without fxwarm:
about three minutes of compilers. Needs torch, fxwarm's dependencies, DeepGEMM, TileLang and TileKernels on PYTHONPATH;
no pytest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
# this file's folder holds files with the names of libraries: it must not be where imports look first
sys.path[:] = [
    str(CHECKOUT),
    *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent),
]

TOKENS = 8192
MULT = 4
ARGS = (1e-6, 1e-6, 1e-6, 2.0, 20)
DISTRIBUTIONS = (
    "torch",
    "tilelang",
    "tile-kernels",
    "apache-tvm-ffi",
    "sgl-deep-gemm",
    "tokenspeed-deepgemm",
    "z3-solver",
)
SLOW_MS = 5.0


def make_layer(hidden: int, device: str, between: Any = None) -> Any:
    """Return a block of a pre and a post layer with random weights, and what is ``between`` them."""
    import torch

    import fxwarm.ops.deep_gemm
    import fxwarm.ops.mhc  # noqa: F401  (defines the ops)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows, rng = MULT * (2 + MULT), torch.Generator().manual_seed(0)

            def weight(*size: int, scale: float = 1.0) -> torch.nn.Parameter:
                return torch.nn.Parameter(
                    torch.randn(*size, generator=rng) * scale, requires_grad=False
                )

            self.fn = weight(rows, MULT * hidden, scale=0.02)
            self.scale, self.base = weight(3), weight(rows)

        def forward(self, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mixes = torch.ops.fxwarm.mhc_pre(residual, self.fn, self.scale, self.base, *ARGS)
            post, comb, x = mixes
            if between is not None:
                x = between(x)
            return post, comb, x, torch.ops.fxwarm.mhc_post(x, residual, post, comb)

    return Block().to(device)


def make_model(hidden: int, layers: int) -> Any:
    """Return ``layers`` layers as a trace of a model goes through them, without weights.

    Each is latent attention and a gated MLP of DeepSeek-V3's widths in plain torch, each with an mHC pair around it.
    """
    import torch
    from torch.nn import Linear, Module, ModuleList, RMSNorm
    from torch.nn.functional import scaled_dot_product_attention, silu

    heads, dim, rank = 128, 128, 512

    class Attention(Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.rank_norm = RMSNorm(hidden), RMSNorm(rank)
            self.down, self.out = Linear(hidden, 3 * rank), Linear(heads * dim, hidden)
            self.up = ModuleList(Linear(rank, heads * dim) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = self.down(self.norm(x)).chunk(3, -1)
            q, k, v = (
                up(self.rank_norm(part)).view(-1, heads, dim).transpose(0, 1)
                for up, part in zip(self.up, low, strict=True)
            )
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(mixed.transpose(0, 1).reshape(-1, heads * dim))

    class Mlp(Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.down = RMSNorm(hidden), Linear(18432, hidden)
            self.gate, self.up = Linear(hidden, 18432), Linear(hidden, 18432)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            return self.down(silu(self.gate(x)) * self.up(x))

    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            parts = [kind().bfloat16() for _ in range(layers) for kind in (Attention, Mlp)]
            self.mixes = ModuleList(make_layer(hidden, "meta", part) for part in parts)

        def forward(self, residual: torch.Tensor) -> torch.Tensor:
            for mix in self.mixes:
                residual = mix(residual)[-1]
            return residual

    return Model()


def register() -> None:
    """Make the families known: from a checkout there are no entry points."""
    import fxwarm
    from fxwarm.families.deep_gemm import DeepGemm
    from fxwarm.families.tilelang import TileLang

    fxwarm.register(TileLang)
    fxwarm.register(DeepGemm)


class Counters:
    """What both libraries did so far: TileLang compiles, disk reads and elaborations, DeepGEMM's cache entries."""

    def __init__(self) -> None:
        from fxwarm.families.tilelang import jit

        jit.watch()
        self.tilelang = (jit.Counts.builds, jit.Counts.loads, jit.Counts.elaborations)
        folder = Path(os.environ["DG_JIT_CACHE_DIR"])
        self.deep_gemm = sum(1 for _ in folder.rglob("*.cubin"))

    def since(self, before: Counters) -> dict[str, int]:
        """Return the difference, by what it counts."""
        names = ("tilelang_builds", "tilelang_loads", "tilelang_elaborations")
        new = (now - then for now, then in zip(self.tilelang, before.tilelang, strict=True))
        return {
            **dict(zip(names, new, strict=True)),
            "deep_gemm_builds": self.deep_gemm - before.deep_gemm,
        }


def warm(hidden: int, jobs: int, family: str, layers: int) -> dict[str, Any]:
    """Trace and warm the kernels of ``family``, or of both; return what it took.

    Behind ``torch.compile`` the model is traced twice, and what asks and builds starts, and imports, when the backend has
    seen the first trace: here the first has one layer, the second all. The libraries are imported here before the
    builds, so that import, build and load are told apart. One family is planned, then built; both are planned and built
    at once.
    """
    import torch

    import fxwarm
    from fxwarm import planner
    from fxwarm.records import Target

    register()
    torch.cuda.init()
    with torch.device("meta"):
        model = make_model(hidden, layers)
        residual = torch.empty(16, MULT, hidden, dtype=torch.bfloat16)
        one = make_model(hidden, 1)  # has all the shapes
    shapes = fxwarm.trace(one, residual, max_size=TOKENS)
    if family:
        shapes = only(shapes, family)
    planner.prepare(shapes, Target.current())
    begin = time.perf_counter()
    fxwarm.trace(model, residual, max_size=TOKENS)
    traced = time.perf_counter()
    import_libraries({call.family for call in shapes.calls})
    imported = time.perf_counter()
    plan = fxwarm.plan(shapes) if family else shapes
    planned = time.perf_counter()
    report = fxwarm.warm(plan, jobs=jobs)
    done = time.perf_counter()
    keys = {*(b.key for b in report.built), *report.found}
    families: dict[str, int] = {}
    for key in keys:
        families[key.family] = families.get(key.family, 0) + 1
    loaded: dict[str, float] = {}
    for x in report.loaded:
        loaded[x.key.family] = round(loaded.get(x.key.family, 0) + x.seconds, 3)
    return {
        "seconds": round(done - begin, 2),
        "trace_s": round(traced - begin, 2),
        "import_s": round(imported - traced, 2),
        "plan_s": round(planned - imported, 2) if family else "in build_s",
        "warm_up_s": round(done - planned, 2),
        "status": report.status,
        "kernels": len(keys),
        "kernels_by_family": families,
        "built": sum(not b.error for b in report.built),
        "build_s": round(report.build_seconds, 2),
        "slowest_build_s": round(max((b.seconds for b in report.built), default=0), 2),
        "launches": sum(not x.error for x in report.loaded),
        "load_s": round(sum(loaded.values()), 3),
        "load_s_by_family": loaded,
        "failed": [f"{x.key}: {x.error[-300:]}" for x in report.failed][:10],
        "gaps": [str(g) for g in report.gaps][:10],
        "library": [str(lib) for lib in report.libraries],
    }


def compile_model(hidden: int) -> dict[str, Any]:
    """Make the first call under torch.compile, and say what it waited for."""
    import torch

    import fxwarm
    from fxwarm.backend import fxwarm as backend

    register()
    block = make_layer(hidden, "cuda")
    residual = torch.randn(16, MULT, hidden, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(block, backend=backend)
    torch.cuda.synchronize()
    started, begin = time.time(), time.perf_counter()
    with torch.no_grad():
        compiled(residual)
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    (report,) = (r for r in fxwarm.reports() if r.loaded)
    last = {
        name: max((p.stat().st_mtime for p in Path(os.environ[folder]).rglob("*.*")), default=0.0)
        for name, folder in (("tilelang", "TILELANG_CACHE_DIR"), ("deep_gemm", "DG_JIT_CACHE_DIR"))
    }
    built = {key.family for key in (b.key for b in report.built if not b.error)}
    return {
        "seconds": round(first, 2),
        "status": report.status,
        "kernels": len(report.loaded),
        "built": sum(not b.error for b in report.built),
        "build_s": round(report.build_seconds, 2),
        "done_after_s": {n: round(last[n] - started, 2) for n in sorted(built)},
        "launches": sum(not x.error for x in report.loaded),
        "load_s": round(sum(x.seconds for x in report.loaded), 3),
    }


def only(shapes: Any, family: str) -> Any:
    """Return the calls of ``family`` alone."""
    import msgspec

    kept = [(call, site) for call, site in shapes.items() if call.family == family]
    calls, sites = zip(*kept, strict=True)
    return msgspec.structs.replace(shapes, calls=calls, sites=sites)


def import_libraries(families: set[str]) -> None:
    """Import what the kernels of ``families`` come from."""
    if "tilelang" in families:
        from fxwarm.ops import mhc_factories

        mhc_factories.get_factory(mhc_factories.BIG_FUSE)
        mhc_factories.get_factory(mhc_factories.POST)
    if "deep_gemm" in families:
        import importlib

        from fxwarm.families.deep_gemm import library

        importlib.import_module(library.module_name())


def sweep(hidden: int, sizes: Any) -> dict[str, Any]:
    """Run both ops at each of ``sizes`` and say what compiled, and how long the slowest call took on the host."""
    import torch

    block = make_layer(hidden, "cuda")
    streams = torch.randn(TOKENS, MULT, hidden, device="cuda", dtype=torch.bfloat16)
    before, slowest, slow = Counters(), 0.0, []
    begin = time.perf_counter()
    for made, tokens in enumerate(sizes):
        if made % 16 == 0:
            torch.cuda.synchronize()  # or a full launch queue would be timed
        start = time.perf_counter()
        block(streams[:tokens])
        took = 1e3 * (time.perf_counter() - start)
        slowest = max(slowest, took)
        if took > SLOW_MS:
            slow.append({"tokens": tokens, "ms": round(took, 2)})
    torch.cuda.synchronize()
    found = Counters().since(before)
    return {
        "calls_after": 2 * len(sizes),
        "jit_after": sum(found.values()),
        "jit_after_by_kind": found,
        "slowest_call_ms": round(slowest, 3),
        "over_5_ms": slow[:30],
        "sweep_s": round(time.perf_counter() - begin, 2),
    }


def check_numerics(hidden: int) -> dict[str, Any]:
    """Compare both ops with float64 at some token counts."""
    import torch

    from fxwarm.ops.mhc_reference import mhc_post_reference, mhc_pre_reference

    block, worst = make_layer(hidden, "cuda"), {}
    for tokens in (1, 64, 65, 786, 2817):
        rng = torch.Generator("cuda").manual_seed(tokens)
        residual = torch.randn(
            tokens, MULT, hidden, device="cuda", dtype=torch.bfloat16, generator=rng
        )
        post, comb, x, out = block(residual)
        wanted = mhc_pre_reference(residual, block.fn, block.scale, block.base, *ARGS)
        after = mhc_post_reference(x, residual, post, comb)
        pairs = zip(
            ("post", "comb", "layer_input", "out"),
            (post, comb, x, out),
            (*wanted, after),
            strict=True,
        )
        for name, got, right in pairs:
            error = float((got.double() - right).norm() / right.norm())
            worst[name] = max(worst.get(name, 0.0), round(error, 6))
        del residual, wanted, after, out
    # TF32 keeps 10 bits of the GEMM's inputs, bfloat16 8 bits of the outputs
    right = worst["post"] < 2e-3 and worst["comb"] < 5e-3
    right = right and worst["layer_input"] < 5e-3 and worst["out"] < 5e-3
    return {"numerics": worst, "numerics_ok": right}


def run_phase(args: argparse.Namespace) -> dict[str, Any]:
    """Do one phase in this process."""
    from fxwarm.families.mhc.splits import num_splits

    first: dict[int, int] = {}
    import torch

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for tokens in range(1, TOKENS + 1):
        first.setdefault(num_splits(tokens, MULT * args.hidden, sms), tokens)
    if args.phase == "without":
        import tilelang  # noqa: F401  (so that its compiles are counted)

        from fxwarm.ops import mhc_factories

        mhc_factories.get_factory(mhc_factories.BIG_FUSE)
        return sweep(args.hidden, list(first.values()))
    if args.phase in ("compile cold", "compile warm"):
        return compile_model(args.hidden)
    found = warm(args.hidden, args.jobs, args.family, args.layers)
    found["splits"] = len(first)
    if args.family:  # a sweep would compile the other family's kernels
        return found
    if args.phase == "cold":
        found |= sweep(args.hidden, range(1, TOKENS + 1))
        found |= check_numerics(args.hidden)
    else:
        found |= sweep(args.hidden, list(first.values()))
    return found


def spawn(args: argparse.Namespace, phase: str, folder: Path, family: str = "") -> dict[str, Any]:
    """Run one phase in a fresh process on the caches in ``folder``, for the kernels of ``family`` or all."""
    answer = folder / f"{phase}.json"
    environ = {
        **os.environ,
        "TILELANG_CACHE_DIR": str(folder / "tilelang"),
        "DG_JIT_CACHE_DIR": str(folder / "deep_gemm"),
        "FXWARM_CACHE_DIR": str(folder / "fxwarm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TILELANG_PRINT_ON_COMPILATION": "0",
        "FXWARM_JOBS": str(args.jobs),
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, "--phase", phase, "--answer", str(answer)]
    command += ["--hidden", str(args.hidden), "--jobs", str(args.jobs), "--family", family]
    # behind the trace of a warm start nothing is hidden
    command += ["--layers", str(args.layers if phase == "cold" else 1)]
    begin = time.perf_counter()
    done = subprocess.run(command, env=environ, check=False, timeout=args.limit)
    if not answer.exists():
        return {"failed": [f"exit code {done.returncode}"]}
    found = json.loads(answer.read_text())
    found["process_s"] = round(time.perf_counter() - begin, 2)
    print(f"{phase} {family}: {json.dumps(found)}", flush=True)
    return found


def describe() -> dict[str, Any]:
    """Return the card and the versions."""
    import torch

    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    props = torch.cuda.get_device_properties(0)
    card = f"{props.name}, {props.multi_processor_count} SMs, {os.cpu_count()} CPU cores"
    return {"card": card, "versions": {"python": platform.python_version(), **versions}}


def main() -> int:
    """Run the phases, write the figures, print a table."""
    from tests.gpu.figures import write

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("mhc.json"))
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument(
        "--jobs", type=int, default=0, help="compiles at once; 0 is fxwarm's default"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=61,
        help="layers traced while the libraries are imported in other processes: DeepSeek-V3's",
    )
    parser.add_argument("--limit", type=float, default=500, help="seconds for one phase")
    parser.add_argument(
        "--without", action="store_true", help="also the first calls without fxwarm"
    )
    parser.add_argument(
        "--brief", action="store_true", help="leave out DeepGEMM's kernels alone and torch.compile"
    )
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--family", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        args.answer.write_text(json.dumps(run_phase(args)))
        return 0
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": f"python tests/gpu/mhc.py --hidden {args.hidden} --jobs {args.jobs}"
        + " --brief" * args.brief,
        "hidden": args.hidden,
        "layers": args.layers,
    }
    with tempfile.TemporaryDirectory() as folder:
        cold = spawn(args, "cold", Path(folder))
        again = spawn(args, "warm", Path(folder))
    result["alone"] = {}
    for family in ("tilelang", "deep_gemm")[: 1 if args.brief else 2]:
        with tempfile.TemporaryDirectory() as folder:
            phases = [spawn(args, phase, Path(folder), family) for phase in ("cold", "warm")]
        result["alone"][family] = dict(zip(("cold", "warm"), phases, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        for phase in () if args.brief else ("compile cold", "compile warm"):
            result[phase] = spawn(args, phase, Path(folder))
    if args.without:
        with tempfile.TemporaryDirectory() as folder:
            result["without"] = spawn(args, "without", Path(folder))
    result |= describe()
    result |= {**cold, "cold_s": cold.get("seconds"), "warm_s": again.get("seconds"), "warm": again}
    write(args.out, result)
    print(table(result))
    kept = (
        not cold.get("jit_after", 1) and not again.get("jit_after", 1) and not again.get("built", 1)
    )
    right = cold.get("numerics_ok", False) and cold.get("status") == "complete"
    return 0 if kept and right else 1


def table(result: dict[str, Any]) -> str:
    """Return the figures that count: one row a phase and family, then the goals."""
    names = ("kernels", "built", "trace_s", "import_s", "plan_s", "build_s", "load_s", "seconds")
    names = (*names, "calls_after", "jit_after", "slowest_call_ms")
    phases = [("cold", result), ("warm", result["warm"]), ("without", result.get("without"))]
    for family, found in result["alone"].items():
        phases += [(f"{phase}, {family} alone", found[phase]) for phase in ("cold", "warm")]
    phases += [(f"torch.{phase}", result.get(phase)) for phase in ("compile cold", "compile warm")]
    rows = [("", *names)]
    rows += [(name, *(str(f.get(n, "-")) for n in names)) for name, f in phases if f is not None]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names) + 1)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    goals = [f"{what}: {value} s, goal {most} s" for what, value, most in goals_of(result)]
    numerics = f"relative errors: {result.get('numerics')}"
    return "\n".join(
        [f"mHC, hidden {result['hidden']}, {result['card']}", *lines, *goals, numerics]
    )


def goals_of(result: dict[str, Any]) -> list[tuple[str, Any, float]]:
    """Return (what, seconds measured, seconds wanted) on 16 cores."""
    alone = result["alone"]["tilelang"]
    return [
        ("TileLang built, cold", alone["cold"].get("build_s"), 10.0),
        ("TileLang loaded, warm", alone["warm"].get("load_s"), 1.5),
        ("both planned and built, cold", result.get("build_s"), 10.0),
    ]


if __name__ == "__main__":
    sys.exit(main())
