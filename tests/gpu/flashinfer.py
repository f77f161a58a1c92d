"""FlashInfer on a Hopper card: build, tune, sweep every token count, and once more in a second process.

    python tests/gpu/flashinfer.py --out flashinfer.json [--skip-fused-moe] [--block-scale]

Needs a checkout, torch with CUDA, nvcc, ninja and flashinfer-python; no pytest. Of ``fused_moe_90`` only the bf16 part
is built (32 of 247 translation units, about 5 minutes on 16 cores), from private copies that this script makes of
FlashInfer's sources. Prints a table last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# this file is called flashinfer.py: it must not be what ``import flashinfer`` finds
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE]
sys.path.insert(0, str(HERE.parents[1]))

SLOWEST_MS = 5.0


def make_subset(whole: Callable[[], Any]) -> Any:
    """Return the library's spec of ``fused_moe_90`` with bf16 alone; every other dtype says so when it is asked for."""
    from flashinfer.jit import env
    from flashinfer.jit.core import gen_jit_spec

    spec = whole()
    folder = env.FLASHINFER_GEN_SRC_DIR / "bf16_subset"
    folder.mkdir(parents=True, exist_ok=True)
    kept = []
    for source in spec.sources:
        text = source.read_text()
        if source.name.endswith(".generated.cu"):
            if "_sm80_" in source.name and "cutlass::bfloat16_t" in text:
                kept.append(write(folder / "sm80" / source.name, only_bf16(text)))
            elif (
                text.count("__nv_bfloat16, __nv_bfloat16, __nv_bfloat16")
                == text.count("INSTANTIATE_")
                > 0
            ):
                kept.append(source)
        elif source.name == "flashinfer_cutlass_fused_moe_binding.cu":
            begin, end = (
                text.index("    auto make_humming_runner"),
                text.index("    if (!mKernelRunner) {"),
            )
            runner = (
                "    if (mActivationDtype == dl_bfloat16 && mWeightDtype == dl_bfloat16) {\n"
                "      mKernelRunner = std::make_shared<"
                "kernels::CutlassMoeFCRunner<__nv_bfloat16, __nv_bfloat16>>();\n    }\n"
            )
            kept.append(write(folder / "copies" / source.name, text[:begin] + runner + text[end:]))
        elif source.name == "cutlass_fused_moe_instantiation.cu":
            wanted = "template class CutlassMoeFCRunner<__nv_bfloat16, __nv_bfloat16>;"
            text = re.sub(
                r"template class CutlassMoeFCRunner<[^;]*;",
                lambda m: m[0] if m[0] == wanted else "",
                text,
            )
            kept.append(write(folder / "copies" / source.name, text))
        elif (
            not source.name.startswith("moe_gemm_kernels_")
            or source.name == "moe_gemm_kernels_bf16_bf16.cu"
        ):
            kept.append(source)
    flags = [
        f
        for f in spec.extra_cuda_cflags
        if f.startswith(("-D", "-gencode")) and f != "-DENABLE_FP8_BLOCK_SCALE"
    ]
    return gen_jit_spec(
        spec.name,
        kept,
        extra_cuda_cflags=flags,
        extra_ldflags=spec.extra_ldflags,
        extra_include_paths=[
            *spec.extra_include_dirs,
            env.FLASHINFER_CSRC_DIR / "fused_moe" / "cutlass_backend",
        ],
    )


def only_bf16(text: str) -> str:
    """Return generated SM80 launchers without those of other dtypes."""
    keep = "sm80_generic_fused_moe_gemm_kernelLauncher<cutlass::bfloat16_t, cutlass::bfloat16_t"
    return re.sub(r"template void [^;]*;", lambda m: m[0] if keep in m[0] else "", text)


def write(path: Path, text: str) -> Path:
    """Write ``text`` unless it is there: ninja looks at times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return path


def use_subset() -> None:
    """Make the library build and load the subset under its own name."""
    from flashinfer.fused_moe import core

    made = make_subset(core.gen_cutlass_fused_moe_sm90_module)
    core.gen_cutlass_fused_moe_sm90_module = lambda use_fast_build=False: made


class Case:
    """One layer: how to call it for a number of tokens, and how far off it is from a plain reference."""

    def __init__(self, name: str, most: int) -> None:
        self.name, self.most = name, most

    def call(self, tokens: int, device: str) -> Any:
        import torch

        x = self.inputs(tokens, device)
        return self.op(*x, *self.weights(device), torch.bfloat16)

    def inputs(self, tokens: int, device: str) -> list[Any]:
        raise NotImplementedError

    def weights(self, device: str) -> list[Any]:
        raise NotImplementedError

    def op(self, *args: Any) -> Any:
        raise NotImplementedError

    def error(self) -> float:
        return 0.0


class FusedMoe(Case):
    """Qwen3-30B-A3B's layer on one of four expert-parallel ranks' worth of experts."""

    E, H, I, K = 32, 2048, 768, 8  # noqa: E741

    def inputs(self, tokens: int, device: str) -> list[Any]:
        import torch

        ids = torch.empty(tokens, self.K, dtype=torch.int32, device=device)
        scales = torch.empty(tokens, self.K, device=device)
        x = torch.empty(tokens, self.H, dtype=torch.bfloat16, device=device)
        if device != "meta":
            x.normal_()
            ids.copy_(torch.rand(tokens, self.E, device=device).argsort(1)[:, : self.K])
            scales.uniform_().div_(scales.sum(1, keepdim=True))
        return [x, ids, scales]

    def weights(self, device: str) -> list[Any]:
        if device == "meta" or not hasattr(self, "_held"):
            import torch

            made = [
                torch.empty(*shape, dtype=torch.bfloat16, device=device)
                for shape in ((self.E, 2 * self.I, self.H), (self.E, self.H, self.I))
            ]
            if device == "meta":
                return made
            self._held = [w.normal_(std=0.02) for w in made]
        return self._held

    def op(self, x: Any, ids: Any, scales: Any, w13: Any, w2: Any, dtype: Any) -> Any:
        import torch

        return torch.ops.fxwarm.cutlass_fused_moe(
            x, ids, scales, w13, w2, dtype, [], use_fused_finalize=False
        )

    def error(self) -> float:
        import torch

        worst = 0.0
        for tokens in (1, 77):
            x, ids, scales = self.inputs(tokens, "cuda")
            w13, w2 = self.weights("cuda")
            got = self.op(x, ids, scales, w13, w2, torch.bfloat16).float()
            want = torch.zeros_like(got)
            for e in range(self.E):
                weight = (scales * (ids == e)).sum(1, keepdim=True)
                up, gate = (x.float() @ w13[e].float().T).split(self.I, 1)
                want += weight * ((torch.nn.functional.silu(gate) * up) @ w2[e].float().T)
            worst = max(worst, float((got - want).norm() / want.norm()))
        return worst


class Bmm(Case):
    """An LM head's slice and a side projection: rows 1 to ``most``."""

    N, K = 4096, 2048

    def inputs(self, tokens: int, device: str) -> list[Any]:
        import torch

        x = torch.empty(1, tokens, self.K, device=device)
        x = x if device == "meta" else x.normal_()
        return [x.to(torch.float8_e4m3fn)]

    def weights(self, device: str) -> list[Any]:
        if device == "meta" or not hasattr(self, "_held"):
            import torch

            w = torch.empty(1, self.N, self.K, device=device)
            w = w if device == "meta" else w.normal_()
            held = [
                w.to(torch.float8_e4m3fn).transpose(1, 2),
                torch.ones(1, device=device),
                torch.ones(1, device=device),
            ]
            if device == "meta":
                return held
            self._held = held
        return self._held

    def op(self, a: Any, b: Any, a_scale: Any, b_scale: Any, dtype: Any) -> Any:
        import torch

        return torch.ops.fxwarm.bmm_fp8(a, b, a_scale, b_scale, dtype)

    def error(self) -> float:
        import torch

        (a,), (b, *scales) = self.inputs(5, "cuda"), self.weights("cuda")
        got, want = self.op(a, b, *scales, torch.bfloat16).float(), a.float() @ b.float()
        return float((got - want).norm() / want.norm())


class MonoMoe(Case):
    """The one shape that ``mono_moe`` has, up to 8 tokens."""

    E, N, K = 256, 512, 2048

    def inputs(self, tokens: int, device: str) -> list[Any]:
        import torch

        made = [
            torch.empty(tokens, width, dtype=torch.bfloat16, device=device)
            for width in (self.K, self.E)
        ]
        return made if device == "meta" else [t.normal_() for t in made]

    def weights(self, device: str) -> list[Any]:
        if device == "meta" or not hasattr(self, "_held"):
            import torch

            held = []
            for rows, width in ((2 * self.N, self.K), (self.K, self.N)):
                w = torch.empty(self.E, rows, width, dtype=torch.bfloat16, device=device)
                w = w if device == "meta" else w.normal_()
                held += [
                    w.to(torch.float8_e4m3fn),
                    torch.full((self.E, rows // 128, width // 128), 0.02, device=device),
                ]
            if device == "meta":
                return held
            self._held = held
        return self._held

    def op(
        self, x: Any, logits: Any, up: Any, up_sf: Any, down: Any, down_sf: Any, dtype: Any
    ) -> Any:
        import torch

        return torch.ops.fxwarm.mono_moe(x, logits, up, up_sf, down, down_sf, 8)

    def error(self) -> float:
        import torch

        x, weights = self.inputs(2, "cuda"), self.weights("cuda")
        got = self.op(*x, *weights, torch.bfloat16).float().cpu()
        want = self.op(*[t.cpu() for t in x], *[t.cpu() for t in weights], torch.bfloat16).float()
        return float((got - want).norm() / want.norm())


def shapes_of(case: Case) -> Any:
    """Return what the layer asks for, traced on meta tensors for 1 to ``most`` tokens."""
    import torch

    from fxwarm.tracing import trace

    torch._dynamo.reset()
    weights = [torch.nn.Parameter(w, requires_grad=False) for w in case.weights("meta")]

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = torch.nn.ParameterList(weights)

        def forward(self, *inputs: Any) -> Any:
            return case.op(*inputs, *self.held, torch.bfloat16)

    inputs = case.inputs(min(7, case.most), "meta")
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, tensor.dim() - 2, min=1, max=case.most)
    return trace(Layer(), *inputs, max_size=case.most)


class Counter:
    """What the library does that a warm process must not."""

    def __init__(self) -> None:
        import flashinfer.jit.core as jit
        from flashinfer.autotuner import AutoTuner

        self.ninja, self.profiles = 0, 0
        run, profile = jit.run_ninja, AutoTuner._profile_single_kernel

        def count_ninja(*args: Any, **kwargs: Any) -> Any:
            self.ninja += 1
            return run(*args, **kwargs)

        def count_profile(*args: Any, **kwargs: Any) -> Any:
            self.profiles += 1
            return profile(*args, **kwargs)

        jit.run_ninja, AutoTuner._profile_single_kernel = count_ninja, count_profile

    def state(self) -> dict[str, Any]:
        from flashinfer.autotuner import AutoTuner
        from flashinfer.jit import env

        from fxwarm.families.flashinfer import cache

        modules = {p.name: p.stat().st_mtime_ns for p in env.FLASHINFER_JIT_DIR.glob("*/*.so")}
        tactics = len(AutoTuner.get().profiling_cache)
        kernels = sorted(cache.block_kernels())
        return {
            "modules": modules,
            "tactics": tactics,
            "kernels": kernels,
            "profiles": self.profiles,
            "ninja": self.ninja,
        }


@contextlib.contextmanager
def tripwire() -> Iterator[None]:
    """Make the library raise instead of building."""
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    try:
        yield
    finally:
        del os.environ["FLASHINFER_DISABLE_JIT"]


def sweep(case: Case, counter: Counter) -> dict[str, Any]:
    """Call the layer at every token count; return what the library did meanwhile, and the slowest call."""
    import torch

    from fxwarm.families.flashinfer import upstream

    before, slowest, worst = counter.state(), 0.0, 0
    with tripwire(), upstream.watch() as said, torch.inference_mode():
        for tokens in range(1, case.most + 1):
            inputs, weights = case.inputs(tokens, "cuda"), case.weights("cuda")
            torch.cuda.synchronize()
            begin = time.perf_counter()
            case.op(*inputs, *weights, torch.bfloat16)
            torch.cuda.synchronize()
            taken = (time.perf_counter() - begin) * 1e3
            if taken > slowest:
                slowest, worst = taken, tokens
    after = counter.state()
    changed = {k: [before[k], after[k]] for k in after if after[k] != before[k]}
    return {
        "jit_after": len(changed) + len(said),
        "changed": changed,
        "warnings": said[:5],
        "calls_after": case.most,
        "slowest_call_ms": round(slowest, 3),
        "slowest_at": worst,
    }


def measure(case: Case, counter: Counter) -> dict[str, Any]:
    """Warm one layer in this process, sweep it, and say what each step took."""
    import torch

    import fxwarm

    begin = time.perf_counter()
    plan = fxwarm.plan(shapes_of(case))
    planned = time.perf_counter() - begin
    before = counter.state()
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    begin = time.perf_counter()
    report = fxwarm.warm(plan)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    after = counter.state()
    return {
        "status": report.status,
        "failed": [f"{x.key}: {x.error}"[:300] for x in report.failed],
        "gaps": [str(g) for g in report.gaps],
        "kernels": len(plan.planned),
        "launches": len({p.witness for p in plan.planned if p.witness is not None}),
        "built": len([b for b in report.built if not b.error]),
        "build_s": round(report.build_seconds, 2),
        "tuned": len([t for t in report.tuned if not t.found and not t.error]),
        "found": len([t for t in report.tuned if t.found]),
        "tune_s": round(sum(t.seconds for t in report.tuned), 2),
        "measured_tactics": after["profiles"] - before["profiles"],
        "plan_s": round(planned, 2),
        "seconds": round(seconds, 2),
        "rng_kept": bool(torch.equal(state, torch.cuda.get_rng_state())),
        "peak_bytes": report.peak_bytes,
        "relative_error": round(case.error(), 5),
        **sweep(case, counter),
    }


def run_phase(args: argparse.Namespace) -> None:
    """Do everything once in this process and write what came out."""
    import torch

    import fxwarm.ops.flashinfer  # noqa: F401
    from fxwarm.families.flashinfer.library import find_library

    cases: list[Case] = [Bmm("bmm_fp8", 64), MonoMoe("mono_moe", 8)]
    if not args.skip_fused_moe:
        use_subset()
        cases.append(FusedMoe("cutlass_fused_moe bf16", args.tokens))
    counter = Counter()
    found: dict[str, Any] = {}
    for case in cases:
        try:
            found[case.name] = measure(case, counter)
        except Exception as error:
            import traceback

            traceback.print_exc()
            found[case.name] = {
                "status": "error",
                "failed": [f"{type(error).__name__}: {error}"[:500]],
            }
    if args.block_scale:
        found["fp8_blockscale_gemm_sm90"] = block_scale(counter)
    card = torch.cuda.get_device_properties(0)
    head = {
        "card": f"{card.name}, {card.multi_processor_count} SMs",
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "flashinfer": find_library({}).version,
        },
    }
    Path(args.result).write_text(json.dumps({**head, "models": found}))


def block_scale(counter: Counter) -> dict[str, Any]:
    """Warm the dense block-scale GEMM, whose kernels are compiled at call time, and compare with the model of them."""
    import torch

    import fxwarm
    from fxwarm.families.flashinfer import FlashInfer
    from fxwarm.records import Planned, Target, WarmPlan
    from passes.records import Dim, KernelCall, ShapeSet, Site, Symbol, TensorSpec

    n, k, most = 2112, 7168, 512

    def spec(dtype: str, *dims: Any) -> TensorSpec:
        return TensorSpec(dtype, tuple(d if isinstance(d, Dim) else Dim.static(d) for d in dims))

    tensors = {
        "input": spec("bfloat16", Dim("s0", 1, most, ((1, most, 1),)), k),
        "weight": spec("float8_e4m3fn", n, k),
        "weight_scale": spec("float32", -(-n // 128), k // 128),
    }
    call = KernelCall(
        "flashinfer",
        "fp8_blockscale_gemm_sm90",
        tuple(tensors.items()),
        (),
        (Symbol("s0", 1, most),),
    )
    family, target = FlashInfer(), Target.current()
    library = family.library({})
    planned = tuple(p for p in family.keys([call], target, library) if isinstance(p, Planned))
    plan = WarmPlan(target, (library,), planned, shapes=ShapeSet((call,), (Site(),)))
    begin = time.perf_counter()
    report = fxwarm.warm(plan)
    seconds = time.perf_counter() - begin
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    weight = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.ones(-(-n // 128), k // 128, device="cuda")
    before, slowest = counter.state(), 0.0
    with tripwire():
        for tokens in range(1, most + 1):
            x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
            torch.cuda.synchronize()
            start = time.perf_counter()
            fp8_blockscale_gemm_sm90(x, weight, None, scale)
            torch.cuda.synchronize()
            slowest = max(slowest, (time.perf_counter() - start) * 1e3)
    after = counter.state()
    return {
        "status": report.status,
        "failed": [f"{x.key}: {x.error}"[:300] for x in report.failed],
        "gaps": [str(g) for g in report.gaps],
        "kernels": len(planned),
        "launches": len(planned),
        "built": len(report.built),
        "tuned": 0,
        "seconds": round(seconds, 2),
        "jit_after": sum(after[key] != before[key] for key in after),
        "calls_after": most,
        "slowest_call_ms": round(slowest, 3),
        "compiled": after["kernels"],
    }


def start(args: argparse.Namespace, phase: str, folder: Path) -> dict[str, Any]:
    """Run one phase in a process of its own."""
    result = folder / f"{phase}.json"
    env = {
        **os.environ,
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "TRTLLM_DG_CACHE_DIR": str(folder / "trtllm"),
        "FXWARM_CACHE_DIR": str(folder / "fxwarm"),
    }
    flags = [
        f for f in ("--skip-fused-moe", "--block-scale") if getattr(args, f[2:].replace("-", "_"))
    ]
    command = [
        sys.executable,
        __file__,
        "--result",
        str(result),
        "--tokens",
        str(args.tokens),
        *flags,
    ]
    begin = time.perf_counter()
    subprocess.run(command, env=env, check=True)
    return {**json.loads(result.read_text()), "process_s": round(time.perf_counter() - begin, 1)}


def combine(cold: dict[str, Any], warm: dict[str, Any]) -> dict[str, Any]:
    """Return one record a layer, with the seconds of both processes."""
    models = {}
    for name, first in cold["models"].items():
        second = warm["models"][name]
        models[name] = {
            **first,
            "cold_s": first.get("seconds"),
            "warm_s": second.get("seconds"),
            "jit_after": first.get("jit_after", 1) + second.get("jit_after", 1),
            "slowest_call_ms": max(
                first.get("slowest_call_ms", 0.0), second.get("slowest_call_ms", 0.0)
            ),
            "warm": second,
        }
    return models


def show(models: dict[str, Any]) -> bool:
    """Print the table; return whether every promise was kept."""
    print(
        f"{'layer':26} {'keys':>4} {'cold s':>7} {'warm s':>7} {'calls':>5} {'JIT':>3} {'max ms':>7}  status"
    )
    kept = True
    for name, m in models.items():
        second = m["warm"]
        fine = (
            m["status"] == second["status"] == "complete"
            and not m["jit_after"]
            and m["slowest_call_ms"] <= SLOWEST_MS
            and not second.get("built")
            and not second.get("tuned")
        )
        kept &= fine
        print(
            f"{name:26} {m.get('kernels', 0):4} {m['cold_s'] or 0:7.1f} {m['warm_s'] or 0:7.1f} "
            f"{m.get('calls_after', 0):5} {m['jit_after']:3} {m['slowest_call_ms']:7.2f}  "
            f"{'kept' if fine else 'BROKEN: ' + '; '.join([*m.get('failed', []), *m.get('gaps', [])])[:200]}"
        )
    return kept


def main(parse: Callable[[], argparse.Namespace]) -> int:
    """Run both phases, write the figures, print the table."""
    args = parse()
    if args.result:
        run_phase(args)
        return 0
    folder = Path(args.workspace or tempfile.mkdtemp(prefix="fxwarm-flashinfer-"))
    cold = start(args, "cold", folder)
    warm = start(args, "warm", folder)
    models = combine(cold, warm)
    record = {
        "date": date.today().isoformat(),
        "card": cold["card"],
        "versions": cold["versions"],
        "command": " ".join(["python", "tests/gpu/flashinfer.py", *sys.argv[1:]]),
        "process_s": [cold["process_s"], warm["process_s"]],
        "models": models,
    }
    if args.out:
        Path(args.out).write_text(json.dumps(record, indent=1))
    return 0 if show(models) else 1


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="where to write the figures, as JSON")
    parser.add_argument(
        "--skip-fused-moe", action="store_true", help="leave out the 5 minutes of fused_moe_90"
    )
    parser.add_argument(
        "--block-scale",
        action="store_true",
        help="also the GEMM whose kernels nvcc makes at call time",
    )
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of the MoE layer")
    parser.add_argument("--workspace", help="folder of all caches; a fresh one by default")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(parse))
