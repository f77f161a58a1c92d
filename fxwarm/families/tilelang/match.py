"""Recognise calls of TileLang kernels in a graph: mHC ops, fxwarm's, TileKernels' and vLLM's, and declared ones.

Graph:
    mhc_pre(residual: bf16[s77, 4, 7168], fn: f32[24, 28672], hc_scale, hc_base, 1e-06, 1e-06, 1e-06, 2.0, 20)

Facts:
    KernelCall(tilelang, mhc_pre, residual=bfloat16[s0, 4, 7168], fn=float32[24, 28672], tokens=s0, k=28672, ...)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fxwarm.families.mhc import calls as mhc_calls
from fxwarm.families.tilelang import declarations, plain
from fxwarm.families.tilelang.statics import FAMILY
from passes.records import Gap, KernelCall


def match(op: Any) -> Iterable[KernelCall | Gap]:
    """Return the TileLang call that ``op`` makes; empty if it makes none. Pure."""
    declared = declarations.find(f"{op.namespace}::{op.name}")
    if declared is not None:
        return (_declared(op, declared),)
    call = plain.match(op)
    if call is not None:
        return (call,)
    layer = mhc_calls.read(op)
    if layer is None:
        return ()
    open_statics = [name for name, value in layer.statics.items() if value is None]
    if open_statics:
        names = ", ".join(open_statics)
        return (
            _gap(
                op,
                f"{names} is a symbol in this graph and part of the kernel; make it a Python constant",
            ),
        )
    if layer.mult is None or layer.hidden is None:
        return (
            _gap(op, "the weight fn has a dynamic shape; mark it static, or make it a parameter"),
        )
    attrs: dict[str, Any] = {
        "origin": layer.origin,
        "tokens": layer.tokens,
        "hidden": layer.hidden,
        "mult": layer.mult,
    }
    if layer.kind in ("pre", "fused"):
        attrs |= {"k": layer.k, "rule": layer.rule}
    attrs |= layer.statics
    attrs |= {n: True for n in ("norm", "delayed", "broadcast") if getattr(layer, n)}
    name = {"pre": "mhc_pre", "post": "mhc_post", "head": "hc_head", "fused": "mhc_fused_post_pre"}
    return (op.call(FAMILY, name[layer.kind], layer.main, attrs),)


def _declared(op: Any, declared: declarations.Declaration) -> KernelCall | Gap:
    tensors = {n: v for n, v in op.arguments.items() if hasattr(v, "shape") and hasattr(v, "dtype")}
    attrs = {
        n: plain
        for n, v in op.arguments.items()
        if n not in tensors and v is not None and (plain := _plain(v)) is not None
    }
    call: KernelCall = op.call(FAMILY, declared.op, tensors, attrs)
    return call


def _plain(value: Any) -> Any:
    """An argument as a record can hold it; None for lists of tensors and the like."""
    if isinstance(value, (tuple, list)):
        parts = tuple(_plain(v) for v in value)
        return None if any(p is None for p in parts) else parts
    known = mhc_calls.number(value)
    if known is not None:
        return known
    return value if isinstance(value, str) or hasattr(value, "free_symbols") else None


def _gap(op: Any, reason: str) -> Gap:
    return Gap(f"{op.namespace}::{op.name}", reason, str(op.place or ""), FAMILY)
