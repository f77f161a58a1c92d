"""Which TileLang kernels one call launches, as factories and statics that may still depend on the token count.

TileKernels' two factories serve fxwarm's ops on CUDA, and two of our own on a CPU. vLLM 0.33 has its own, with more
statics; what it bakes in besides is not visible to us. Sources: TileKernels 1.0.0 and vLLM 0.33
``model_executor/kernels/mhc``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fxwarm.families.mhc.splits import expression
from fxwarm.families.tilelang import declarations, plain
from fxwarm.families.tilelang.declarations import Expr
from fxwarm.ops import mhc_factories as factories
from fxwarm.records import Library, Target
from passes.records import Dim, KernelCall

VLLM = "vllm.model_executor.kernels.mhc.tilelang_kernels:"

SMALL = 32
"""Tokens up to which vLLM 0.33 folds post and the GEMM into one kernel on Hopper."""

OVERLAPPED = 16
"""Tokens up to which vLLM 0.33 computes the input and the coefficients on two streams, on Blackwell only."""


@dataclasses.dataclass(frozen=True)
class Use:
    """One factory that a call uses within a range of token counts; some statics are expressions over its sizes."""

    factory: str
    statics: dict[str, Any]
    tokens: str
    lower: int = 1
    upper: int | None = None


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A kernel that a call launches and that we cannot name, and why."""

    reason: str


def uses(call: KernelCall, target: Target, library: Library) -> Iterator[Use | Unknown]:
    """Yield the kernels that ``call`` launches on ``target``."""
    declared = declarations.find(call.op)
    if declared is not None:
        yield Use(declared.factory, dict(declared.statics(call, target)), "1")
        return
    origin, tokens = call.attr("origin"), _text(call.attr("tokens"))
    if call.op in plain.NAMES:
        yield from _plain(call, target, library, tokens)
    elif origin == "tile_kernels":
        yield from _own(call, target, library, tokens)
    elif origin != "vllm":
        yield Unknown(
            f"the op {call.op} is not declared here; call fxwarm.families.tilelang.declare in this process"
        )
    elif target.device == "cpu":
        yield Unknown("vLLM has no TileLang kernel for a CPU; plan for a GPU target")
    else:
        yield from _vllm(call, target, library, tokens)


def _plain(
    call: KernelCall, target: Target, library: Library, tokens: str
) -> Iterator[Use | Unknown]:
    if target.device == "cpu":  # a reference runs
        return
    if reason := _absent(library):
        yield Unknown(reason)
        return
    for factory, statics in plain.kernels(call, target):
        yield Use(factory, dict(statics), tokens)


def _absent(library: Library) -> str:
    if library.installed and dict(library.settings).get("tile-kernels") == "absent":
        return "TileKernels is not installed; pip install --no-deps tile-kernels"
    return ""


def _own(
    call: KernelCall, target: Target, library: Library, tokens: str
) -> Iterator[Use | Unknown]:
    on_cpu = target.device == "cpu"
    if not on_cpu and (reason := _absent(library)):
        yield Unknown(reason)
        return
    hidden, mult = call.attr("hidden"), call.attr("mult")
    if call.op == "mhc_post":
        path = factories.POST_CPU if on_cpu else factories.POST
        yield Use(path, {"mhc": mult, "hidden": hidden}, tokens)
        return
    statics = {
        "hidden_size": hidden,
        "rms_eps": _float(call, "rms_eps"),
        "mhc_pre_eps": _float(call, "hc_pre_eps"),
        "mhc_sinkhorn_eps": _float(call, "hc_sinkhorn_eps"),
        "mhc_post_mult_value": _float(call, "hc_post_mult_value"),
        "sinkhorn_repeat": call.attr("sinkhorn_repeat"),
        "n_splits": _splits(call, target, tokens),
        "mhc_mult": mult,
    }
    yield Use(factories.BIG_FUSE_CPU if on_cpu else factories.BIG_FUSE, statics, tokens)


def _vllm(
    call: KernelCall, target: Target, library: Library, tokens: str
) -> Iterator[Use | Unknown]:
    hidden, mult = call.attr("hidden"), call.attr("mult")
    if call.op == "hc_head":
        eps = {"rms_eps": _float(call, "rms_eps"), "hc_eps": _float(call, "hc_eps")}
        yield Use(
            VLLM + "hc_head_fuse_tilelang", {"hidden_size": hidden, **eps, "hc_mult": mult}, tokens
        )
        return
    post = Use(VLLM + "mhc_post_tilelang", {"hc": mult, "hidden": hidden}, tokens)
    if call.op == "mhc_post":
        yield post
        return
    if dict(library.settings).get("deep_gemm") == "absent":
        yield Unknown(
            "without DeepGEMM vLLM takes TileLang GEMMs whose kernels are not modelled; install deep_gemm"
        )
        return
    name = "mhc_pre_big_fuse"
    name += "_broadcast" if call.attr("broadcast") and not call.attr("delayed") else ""
    name += "_with_norm_tilelang" if call.attr("norm") else "_tilelang"
    statics: dict[str, Any] = {
        "hidden_size": hidden,
        **{
            n: _float(call, n)
            for n in ("rms_eps", "hc_pre_eps", "hc_sinkhorn_eps", "hc_post_mult_value")
        },
        "sinkhorn_repeat": call.attr("sinkhorn_repeat"),
        "hc_mult": mult,
    }
    if call.attr("norm"):
        statics["norm_eps"] = _float(call, "norm_eps")
    if call.attr("delayed"):
        statics |= {
            "use_pre_mix_in": bool(call.attr("use_pre_mix_in")),
            "save_pre_mix": True,
            "rms_numel": call.attr("k"),
        }
        if call.attr("write_aux"):
            statics["write_aux"] = True
    splits = _splits(call, target, tokens)
    first = 1
    if call.op == "mhc_fused_post_pre" and target.arch == "sm_90a":
        first = SMALL + 1
        few = _few_splits(int(str(hidden)))
        yield Use(VLLM + name, {**statics, "n_splits": few}, tokens, upper=SMALL)
        fused = {"hc": mult, "hidden": hidden, "n_splits": few, "n_thr": 128}
        yield Use(VLLM + "mhc_fused_tilelang", {**fused, "tile_n": 2}, tokens, upper=15)
        yield Use(
            VLLM + "mhc_fused_tilelang", {**fused, "tile_n": 6}, tokens, lower=16, upper=SMALL
        )
    elif call.op == "mhc_fused_post_pre":
        yield Unknown(
            f"the small-batch kernels of {call.op} are known for sm_90a only; warm by hand up to {SMALL} tokens"
        )
    if call.op == "mhc_fused_post_pre":
        yield dataclasses.replace(post, lower=first)
    yield Use(VLLM + name, {**statics, "n_splits": splits}, tokens, lower=first)
    if call.attr("norm") and call.attr("delayed") and target.arch.startswith("sm_100"):
        # The coefficients on a stream of their own, beside the input; no auxiliary output in these modes.
        apart = {n: value for n, value in statics.items() if n != "write_aux"}
        for mode in ("input", "stats"):
            split = {**apart, "n_splits": splits, "split_mode": mode}
            yield Use(VLLM + name, split, tokens, upper=OVERLAPPED)
    if call.attr("norm") and call.attr("delayed"):
        yield Unknown(
            "vLLM holds these kernels itself (MHC_PRE_NORM_KERNEL): they are built, but its first call of each "
            "reads it from disk; run vLLM's own warm-up too"
        )


def _few_splits(hidden: int) -> int:
    """Splits of vLLM's fused kernel: 8, halved until 128 threads a split divide the hidden size."""
    splits = 8
    while splits > 1 and hidden % (splits * 128):
        splits //= 2
    return splits


def _splits(call: KernelCall, target: Target, tokens: str) -> Expr:
    return Expr(
        expression(tokens, int(str(call.attr("k"))), target.num_sms, str(call.attr("rule")))
    )


def _float(call: KernelCall, name: str) -> float:
    value = call.attr(name)
    assert isinstance(value, (int, float)), f"{name} of {call} is {value}"
    return float(value)


def _text(value: Any) -> str:
    return value.expr if isinstance(value, Dim) else str(value)
