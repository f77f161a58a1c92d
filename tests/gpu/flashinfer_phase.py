"""What one process of ``flashinfer.py`` does: build modules, or warm one layer, sweep it and check its numbers."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.gpu.flashinfer_cases import CASES, Case, FusedMoe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def build(names: Sequence[str], jobs: int) -> dict[str, Any]:
    """Build modules through the family, ``jobs`` translation units at a time; return what each took."""
    from fxwarm.families.flashinfer import modules
    from fxwarm.families.flashinfer.keys import MODULE
    from fxwarm.records import CompileKey, Planned

    if "fused_moe_90" in names:
        use_subset()
    planned = [Planned(CompileKey("flashinfer", name, ("sm_90a",), MODULE)) for name in names]
    return {
        built.key.kernel: {
            "seconds": round(built.seconds, 1),
            "bytes": built.bytes,
            "error": built.error,
        }
        for built in modules.build(planned, jobs)
    }


def use_subset() -> None:
    """Make the library build and load the bf16 part of ``fused_moe_90`` under its own name."""
    from flashinfer.fused_moe import core

    from tests.gpu.flashinfer_subset import make_subset

    made = make_subset(core.gen_cutlass_fused_moe_sm90_module)
    core.gen_cutlass_fused_moe_sm90_module = lambda use_fast_build=False: made


class Counter:
    """What the library does that a warm process must not. Others build other modules meanwhile."""

    def __init__(self, modules: Collection[str]) -> None:
        import flashinfer.jit.core as jit
        from flashinfer.autotuner import AutoTuner

        self.names, self.ninja, self.profiles = modules, 0, 0
        run, profile = jit.run_ninja, AutoTuner._profile_single_kernel

        def count_ninja(*args: Any, **kwargs: Any) -> Any:
            self.ninja += 1
            return run(*args, **kwargs)

        def count_profile(*args: Any, **kwargs: Any) -> Any:
            self.profiles += 1
            return profile(*args, **kwargs)

        jit.run_ninja, AutoTuner._profile_single_kernel = count_ninja, count_profile

    def state(self) -> dict[str, Any]:
        """Return what is built, stored and counted now."""
        from flashinfer.jit import env

        from fxwarm.families.flashinfer import cache, tuner

        return {
            "modules": {
                p.name: p.stat().st_mtime_ns
                for p in env.FLASHINFER_JIT_DIR.glob("*/*.so")
                if p.stem in self.names
            },
            "tactics": len(tuner.tuner().profiling_cache),
            "kernels": sorted(cache.block_kernels()),
            "profiles": self.profiles,
            "ninja": self.ninja,
        }


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {key: [before[key], after[key]] for key in after if after[key] != before[key]}


@contextlib.contextmanager
def tripwire() -> Iterator[None]:
    """Make the library raise instead of building."""
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    try:
        yield
    finally:
        del os.environ["FLASHINFER_DISABLE_JIT"]


def call_ms(case: Case, tokens: int) -> float:
    """Return the milliseconds of one call with ``tokens`` tokens, until the device is done."""
    inputs, weights = case.inputs(tokens, DEVICE), case.weights(DEVICE)
    synchronize()
    begin = time.perf_counter()
    case.op(*inputs, *weights)
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def sweep(case: Case, counter: Counter) -> dict[str, Any]:
    """Call the layer at every token count, the first calls of this process; say what the library did meanwhile."""
    from fxwarm.families.flashinfer import tuner

    before = counter.state()
    with tripwire(), tuner.watch() as said, torch.inference_mode():
        taken = [(call_ms(case, tokens), tokens) for tokens in range(1, case.most + 1)]
        slowest = sorted(taken, reverse=True)[:3]
        again = [(round(call_ms(case, tokens), 3), tokens) for _, tokens in slowest]
    changed = changes(before, counter.state())
    middle = sorted(taken)[len(taken) // 2][0]
    return {
        "jit_after": len(changed) + len(said),
        "changed": changed,
        "warnings": said[:5],
        "calls_after": case.most,
        "first_call_ms": round(taken[0][0], 3),
        "median_call_ms": round(middle, 3),
        "slowest_call_ms": round(slowest[0][0], 3),
        "slowest_at": slowest[0][1],
        "slowest_again_ms": again,
    }


def measure(case: Case, save: Callable[[dict[str, Any]], None]) -> None:
    """Warm one layer in this process, sweep it and check it; ``save`` what is known after each step."""
    import fxwarm
    from fxwarm.families.flashinfer import FlashInfer
    from fxwarm.families.flashinfer.keys import MODULE
    from fxwarm.records import Target

    if isinstance(case, FusedMoe):
        use_subset()
    order: list[str] = []
    for name in ("tune", "load", "verify"):
        method = getattr(FlashInfer, name)

        def noted(self: Any, *args: Any, _name: str = name, _method: Any = method) -> Any:
            order.append(_name)
            return _method(self, *args)

        setattr(FlashInfer, name, noted)
    begin = time.perf_counter()
    plan = fxwarm.plan(case.shapes(), None if DEVICE == "cuda" else Target.named("h200"))
    found: dict[str, Any] = {"plan_s": round(time.perf_counter() - begin, 2)}
    found["kernels"] = len(plan.planned)
    found["launches"] = len({p.witness for p in plan.planned if p.witness is not None})
    found["gaps"] = [str(g) for g in plan.gaps]
    save(found)

    counter = Counter([p.key.kernel for p in plan.planned if p.key.tag == MODULE])
    before = counter.state()
    torch.manual_seed(3)
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if DEVICE == "cuda" else [])]
    begin = time.perf_counter()
    report = warm(plan)
    synchronize()
    found["seconds"] = round(time.perf_counter() - begin, 2)
    after = counter.state()
    now = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if DEVICE == "cuda" else [])]
    found |= {
        "status": report.status,
        "failed": [f"{x.key}: {x.error}"[:400] for x in report.failed],
        "gaps": [str(g) for g in report.gaps],
        "notes": list(report.notes),
        "built": [str(b.key) for b in report.built if not b.error],
        "tuned": len([t for t in report.tuned if not t.found and not t.error]),
        "found": len([t for t in report.tuned if t.found]),
        "tune_s": round(sum(t.seconds for t in report.tuned), 2),
        "load_s": round(sum(x.seconds for x in report.loaded), 2),
        "measured_tactics": after["profiles"] - before["profiles"],
        "modules_written": sorted(set(changes(before, after).get("modules", [[], []])[1])),
        "block_kernels": len(after["kernels"]) - len(before["kernels"]),
        "order": order[:3],
        "rng_kept": all(torch.equal(a, b) for a, b in zip(states, now, strict=True)),
        "peak_bytes": report.peak_bytes,
    }
    save(found)
    found |= sweep(case, counter)
    save(found)
    found["relative_error"] = round(case.error(DEVICE), 5)
    save(found)


def warm(plan: Any) -> Any:
    """Warm ``plan`` here; on a machine without a card as if it had one."""
    import fxwarm
    from fxwarm import warmup

    return fxwarm.warm(plan) if DEVICE == "cuda" else warmup.run(plan, None, "cpu")


def head() -> dict[str, Any]:
    """Return what the figures were measured on."""
    from fxwarm.families.flashinfer.library import find_library

    card = torch.cuda.get_device_properties(0) if DEVICE == "cuda" else None
    return {
        "card": f"{card.name}, {card.multi_processor_count} SMs" if card else "cpu",
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "flashinfer": find_library({}).version,
        },
    }


def run_case(name: str, result: Path) -> None:
    """Measure the layer ``name`` and write what is known to ``result`` after each step."""
    kind, most = CASES[name]

    def save(found: dict[str, Any]) -> None:
        result.write_text(json.dumps({**head(), "found": found}))

    measure(kind(most), save)
