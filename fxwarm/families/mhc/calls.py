"""The mHC ops of a graph, read from their schemas: fxwarm's own and vLLM's, whose names differ and meaning does not.

An op is known by its name and its arguments, never by its namespace. vLLM's ``n_splits`` argument is ignored, as vLLM
ignores it: the body computes the splits from the tokens. Source of the schemas: vLLM 0.33.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one mHC op does. Sizes are ints or expressions; a static is None where the graph does not fix it."""

    kind: str
    """"pre", "post" or "head"; "fused" is a post and the next pre."""
    origin: str
    """Whose kernels run: "tile_kernels" or "vllm"."""
    tokens: Any
    hidden: Any
    mult: Any
    k: Any = 0
    """Width of the pre-norm GEMM: mult * hidden, or hidden where a first layer broadcasts."""
    rule: str = "mhc"
    statics: dict[str, Any] = dataclasses.field(default_factory=dict)
    norm: bool = False
    delayed: bool = False
    broadcast: bool = False
    a: Any = None
    """The activation of the GEMM, [tokens, k], and its weight b [mult*(2+mult), k]."""
    b: Any = None
    main: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Tensors of the op that its sizes come from."""


def read(op: Any) -> Layer | None:
    """Return what the mHC op ``op`` does, or None if it is none."""
    reader = _READERS.get(op.name)
    if reader is None or not all(name in op.arguments for name in reader.needs):
        return None
    return reader.read(op.arguments)


def number(value: Any) -> Any:
    """Return a plain number for an int, a float or a constant expression; None for anything else.

    With ``dynamic=True`` Dynamo turns floats into symbols; one that came from a constant still has its value.
    """
    if isinstance(value, (bool, int, float)):
        return value
    if getattr(value, "is_Integer", False):
        return int(value)
    if getattr(value, "is_number", False) and getattr(value, "is_real", False):
        return float(value)
    return None


@dataclasses.dataclass(frozen=True)
class _Reader:
    read: Callable[[dict[str, Any]], Layer]
    needs: tuple[str, ...]


def _own_pre(given: dict[str, Any]) -> Layer:
    return _pre(given, origin="tile_kernels")


def _vllm_pre(given: dict[str, Any]) -> Layer:
    return _pre(given, origin="vllm", norm=given.get("norm_weight") is not None)


def _vllm_delayed(given: dict[str, Any]) -> Layer:
    return _pre(given, origin="vllm", norm=given.get("norm_weight") is not None, delayed=True)


def _vllm_broadcast(given: dict[str, Any]) -> Layer:
    residual, fn = given["residual"], given["fn_broadcast"]
    rows, hidden = fn.shape
    return Layer(
        kind="pre",
        origin="vllm",
        tokens=residual.shape[0],
        hidden=hidden,
        mult=_mult(rows),
        k=hidden,
        statics=_statics(given),
        norm=True,
        broadcast=True,
        a=_like(residual, (residual.shape[0], hidden)),
        b=fn,
        main={"residual": _activation(residual), "fn": fn},
    )


def _vllm_fused(given: dict[str, Any]) -> Layer:
    delayed = "capture_aux" in given or "pre_mix" in given
    norm = given.get("norm_weight") is not None
    return _pre(given, origin="vllm", kind="fused", norm=norm, delayed=delayed)


def _post(given: dict[str, Any], origin: str) -> Layer:
    residual = given["residual"]
    *outer, mult, hidden = residual.shape
    main = {name: _activation(given[name]) for name in ("x", "residual")}
    return Layer("post", origin, math.prod(outer), hidden, mult, main=main)


def _head(given: dict[str, Any]) -> Layer:
    streams = given["hs_flat"]
    tokens, mult, hidden = streams.shape
    statics = {name: number(given.get(name)) for name in ("rms_eps", "hc_eps")}
    return Layer(
        "head",
        "vllm",
        tokens,
        hidden,
        mult,
        statics=statics,
        main={"hs_flat": _activation(streams)},
    )


def _pre(
    given: dict[str, Any], origin: str, kind: str = "pre", norm: bool = False, delayed: bool = False
) -> Layer:
    residual, fn = given["residual"], given["fn"]
    rows, k = fn.shape
    tokens, mult = math.prod(residual.shape[:-2]), _mult(rows)
    if (
        given.get("x") is not None and kind == "pre"
    ):  # a first layer: its GEMM may be as narrow as hidden
        wide = residual.shape[-1]
    else:
        wide = k // mult if isinstance(mult, int) else None
    statics = _statics(given)
    if delayed:
        statics["use_pre_mix_in"] = given.get("pre_mix") is not None
        if kind == "fused" and given.get("capture_aux"):
            statics["write_aux"] = True
    return Layer(
        kind=kind,
        origin=origin,
        tokens=tokens,
        hidden=wide,
        mult=mult,
        k=k,
        rule="mhc_bucketed" if delayed else "mhc",
        statics=statics,
        norm=norm,
        delayed=delayed,
        broadcast=isinstance(wide, int) and k == wide,
        a=_like(residual, (tokens, k)),
        b=fn,
        main={"residual": _activation(residual), "fn": fn},
    )


def _statics(given: dict[str, Any]) -> dict[str, Any]:
    names = ["rms_eps", "hc_pre_eps", "hc_sinkhorn_eps", "hc_post_mult_value", "sinkhorn_repeat"]
    if given.get("norm_weight") is not None:
        names.append("norm_eps")
    return {name: number(given.get(name)) for name in names}


def _mult(rows: Any) -> int | None:
    return math.isqrt(rows + 1) - 1 if isinstance(rows, int) else None


def _activation(tensor: Any) -> Any:
    """Return ``tensor`` as no graph input: one with static sizes would pass for a weight."""
    return dataclasses.replace(tensor, placeholder=None)


def _like(tensor: Any, shape: tuple[Any, ...]) -> Any:
    from passes.calls import SymTensor

    return SymTensor(tensor.dtype, shape, device=tensor.device)


_WEIGHTS = ("residual", "fn", "hc_scale", "hc_base", "rms_eps", "sinkhorn_repeat")
_POST = ("x", "residual", "post_layer_mix", "comb_res_mix")

_READERS = {
    "mhc_pre": _Reader(_own_pre, _WEIGHTS),
    "mhc_post": _Reader(lambda given: _post(given, "tile_kernels"), _POST),
    "mhc_pre_tilelang": _Reader(_vllm_pre, _WEIGHTS),
    "mhc_pre_delayed_tilelang": _Reader(_vllm_delayed, _WEIGHTS),
    "mhc_pre_broadcast_tilelang": _Reader(_vllm_broadcast, ("residual", "fn_broadcast", "rms_eps")),
    "mhc_post_tilelang": _Reader(lambda given: _post(given, "vllm"), _POST),
    "mhc_fused_post_pre_tilelang": _Reader(_vllm_fused, (*_WEIGHTS, "post_layer_mix")),
    "mhc_fused_post_pre_delayed_tilelang": _Reader(_vllm_fused, (*_WEIGHTS, "post_layer_mix")),
    "hc_head_fused_kernel_tilelang": _Reader(_head, ("hs_flat", "rms_eps", "hc_eps")),
}
NAMES = tuple(_READERS)
"""Names of the ops that ``read`` knows."""
