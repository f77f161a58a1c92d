"""TileKernels' own mHC functions: which TileLang kernels each op of ``fxwarm.ops.tile_kernels`` launches.

None follows from the token count: up to 1.0.0 these functions compute with one split whatever they are told. Two build
the kernel of their backward pass as they run forward, so that one is needed too; it has the SM count in it.

Facts:
    KernelCall(tilelang, mhc_pre_big_fuse, residual=bfloat16[s0, 4, 7168], fn=float32[24, 28672], hidden=7168, ...)

Source: TileKernels 1.0.0, ``tile_kernels/modeling/mhc/ops``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from fxwarm.families.mhc.calls import number
from fxwarm.ops import mhc_factories as factories
from fxwarm.records import Target
from passes.records import Gap, KernelCall

_MHC = "tile_kernels.mhc."
MUL = _MHC + "norm_fn_kernel:_mhc_pre_norm_fn_fwd_mul"
NORM = _MHC + "norm_fn_kernel:_mhc_pre_norm_fn_fwd_norm"
MERGE = _MHC + "norm_fn_kernel:_mhc_fn_normw_merge_fwd"
SPLIT = _MHC + "pre_split_mixes_kernel:_mhc_pre_split_mixes_"
SINKHORN = _MHC + "sinkhorn_kernel:_mhc_sinkhorn_"
APPLY = _MHC + "pre_apply_mix_kernel:_mhc_pre_apply_mix_"
HEAD = _MHC + "head_compute_mix_kernel:_mhc_head_compute_mix_fwd"
EXPAND = _MHC + "expand_kernel:expand_to_mhc_fwd_tl"

_MAIN = {
    "mhc_pre_big_fuse": ("residual", "fn"),
    "mhc_post_fwd": ("residual", "x"),
    "mhc_pre_norm_fn": ("residual", "mhc_fn"),
    "mhc_pre_split_mixes": ("input_mixes", "mhc_scale"),
    "sinkhorn_normalize": ("x",),
    "mhc_pre_apply_mix": ("x", "mix"),
    "mhc_head_compute_mix": ("input_mix", "mhc_scale"),
    "expand_to_mhc": ("hidden",),
}
"""Op -> the tensors that tell it from another op of that name; the first has the tokens in its leading dims."""

_OUTER = {"mhc_pre_split_mixes": 1, "mhc_head_compute_mix": 1, "expand_to_mhc": 1}
"""Trailing dims of the first tensor that belong to a token; 2 where none is given."""

_WEIGHTS = ("fn", "mhc_fn", "mhc_scale")

NAMES = tuple(_MAIN)


def match(op: Any) -> KernelCall | Gap | None:
    """Return the call of a TileKernels function that ``op`` makes, or None if it makes none."""
    names = _MAIN.get(op.name)
    if names is None or not all(hasattr(op.arguments.get(name), "shape") for name in names):
        return None
    first = op.arguments[names[0]]
    attrs: dict[str, Any] = {"tokens": math.prod(first.shape[: -_OUTER.get(op.name, 2)])}
    for name, value in op.arguments.items():
        if hasattr(value, "shape") or value is None:
            continue
        known = number(value)
        if known is None:
            reason = f"{name} is a symbol in this graph and part of the kernel; make it a Python constant"
            return Gap(f"{op.namespace}::{op.name}", reason, str(op.place or ""), "tilelang")
        attrs[name] = known
    if op.arguments.get("mhc_norm_weight") is not None:
        attrs["norm"] = True
    # an activation is no graph input here: one with static sizes would pass for a weight
    tensors = {
        name: op.arguments[name]
        if name in _WEIGHTS
        else dataclasses.replace(op.arguments[name], placeholder=None)
        for name in names
    }
    call: KernelCall = op.call("tilelang", op.name, tensors, attrs)
    return call


def kernels(call: KernelCall, target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the factory and the statics of each kernel that ``call`` launches or builds. Raises ValueError."""
    yield from _KERNELS[call.op](call, target)


def _big_fuse(call: KernelCall, target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows, width = (int(d) for d in call["fn"].dims)
    mult = math.isqrt(rows + 1) - 1
    yield MUL, {"mhc_mult3": rows, "n_rms_group": 1, "rms_group_size": width}
    yield (
        factories.BIG_FUSE,
        factories.pre_statics(
            width // mult,
            mult,
            1,
            _float(call, "rms_eps"),
            _float(call, "mhc_pre_eps"),
            _float(call, "mhc_sinkhorn_eps"),
            _float(call, "mhc_post_mult_value"),
            _int(call, "sinkhorn_repeat"),
        ),
    )


def _post(call: KernelCall, target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    mult, hidden = (int(d) for d in call["residual"].dims[-2:])
    yield factories.POST, factories.post_statics(hidden, mult)


def _norm_fn(call: KernelCall, target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows, width = (int(d) for d in call["mhc_fn"].dims)
    if call.attr("norm"):
        yield MERGE, {"m": rows, "n": width}
    groups = {"mhc_mult3": rows, "n_rms_group": 1, "rms_group_size": width}
    yield MUL, groups
    yield NORM, {**groups, "rms_eps": _float(call, "mhc_norm_eps"), "n_splits": 1}


def _split_mixes(call: KernelCall, target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    statics = {
        "mhc_mult": _int(call, "mhc_mult"),
        "mhc_post_mult_value": _float(call, "mhc_post_mult_value"),
        "token_block_size": 32,
    }
    yield SPLIT + "fwd", {**statics, "mhc_pre_eps": _float(call, "mhc_pre_eps")}
    yield SPLIT + "bwd", {**statics, "num_sms": target.num_sms}


def _sinkhorn(call: KernelCall, target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    statics = {
        "hidden_size": int(call["x"].dims[-1]),
        "repeat": _int(call, "repeat", 10),
        "eps": _float(call, "eps", 1e-6),
    }
    yield SINKHORN + "fwd", {**statics, "token_block_size": 1}
    yield SINKHORN + "bwd", {**statics, "token_block_size": 32}


def _apply_mix(call: KernelCall, target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    mult, hidden = (int(d) for d in call["x"].dims[-2:])
    for direction in ("fwd", "bwd"):
        yield APPLY + direction, {"mhc_mult": mult, "hidden": hidden}


def _head_mix(call: KernelCall, target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    eps, mult = _float(call, "mhc_pre_eps"), int(call["input_mix"].dims[-1])
    yield HEAD, {"mhc_mult": mult, "mhc_pre_eps": eps, "token_block_size": 32}


def _expand(call: KernelCall, target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    hidden, mult = int(call["hidden"].dims[-1]), _int(call, "mhc_mult")
    yield EXPAND, {"hidden": hidden, "mhc_mult": mult}


def _float(call: KernelCall, name: str, default: float = 0.0) -> float:
    return float(str(call.attr(name, default)))


def _int(call: KernelCall, name: str, default: int = 0) -> int:
    return int(str(call.attr(name, default)))


_KERNELS = dict(
    zip(
        NAMES,
        (_big_fuse, _post, _norm_fn, _split_mixes, _sinkhorn, _apply_mix, _head_mix, _expand),
        strict=True,
    )
)
