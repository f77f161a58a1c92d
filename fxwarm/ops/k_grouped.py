"""DeepGEMM's K-grouped GEMMs, the weight gradients of grouped layers, as torch ops.

d[g] = a of group g, [M, K_g], times b of group g, [N, K_g], transposed (+ c[g]): ``ks`` are the K_g as numbers of the
host, ``grouped_layout`` the same as a tensor. M and N stand in the kernel; ``ks`` only through their largest.

    torch.ops.fxwarm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, [128, 256], layout, d)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxwarm.exc import ShapeMismatchError
from fxwarm.ops._checks import check_dtype, check_rank, check_shape, describe
from fxwarm.ops._define import define_op
from fxwarm.ops._library import Function
from fxwarm.ops.scales import FP8, dequantize

_BLOCK = 128
_REST = (
    "Tensor(d!) d, SymInt[] ks, Tensor grouped_layout, Tensor? c=None, {recipe}str? compiled_dims=None, "
    "bool use_psum_layout=False"
)


def _check(
    op: str,
    *,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    ks: Sequence[Any],
    grouped_layout: Tensor,
    c: Tensor | None = None,
    flat: bool = False,
    **_: Any,
) -> None:
    """Check operands ``[sum(ks), M or N]``, or those of each group as ``[M or N, K_g]`` one after the other."""
    check_rank(op, "d", d, "[G, M, N]")
    groups, m, n = d.shape
    fp8 = a.dtype == FP8
    check_dtype(op, "d", d, (torch.float32,))
    check_dtype(op, "grouped_layout", grouped_layout, (torch.int32,))
    check_shape(op, "grouped_layout", grouped_layout, [groups], f"d = {describe(d)}")
    if ks and len(ks) != groups:
        text = f"{op}: ks are {len(ks)} numbers, but d = {describe(d)} has {groups} groups; give one a group"
        raise ShapeMismatchError(text)
    for name, operand, rows in (("a", a, m), ("b", b, n)):
        check_dtype(op, name, operand, (FP8,) if fp8 else (torch.bfloat16,))
        check_rank(op, name, operand, "[sum(ks) * rows]" if flat else "[sum(ks), rows]")
        wanted = [sum(ks) * rows] if flat else [sum(ks), rows]
        if ks:
            check_shape(
                op, name, operand, wanted, f"ks={list(ks)} with d = {describe(d)}", rows=(0,)
            )
    if c is not None:
        check_dtype(op, "c", c, (d.dtype,))
        check_shape(op, "c", c, d.shape, f"d = {describe(d)}")


def _run(
    *,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    ks: Sequence[int],
    a_sf: Tensor | None = None,
    b_sf: Tensor | None = None,
    c: Tensor | None = None,
    use_psum_layout: bool = False,
    flat: bool = False,
    **_: Any,
) -> None:
    if use_psum_layout:
        raise NotImplementedError(
            "the psum layout is SM100's and has no CPU reference; trace it on meta"
        )
    start = 0
    for group, k in enumerate(ks):
        end = start + k
        x, y = (
            _part(t, sf, rows, start, end, flat=flat)
            for t, sf, rows in ((a, a_sf, d.shape[1]), (b, b_sf, d.shape[2]))
        )
        out = x @ y.T
        d[group] = (out if c is None else out + c[group].float()).to(d.dtype)
        start = end


def _part(t: Tensor, sf: Tensor | None, rows: int, start: int, end: int, *, flat: bool) -> Tensor:
    """Return the rows of one group, ``[rows, K_g]``, in float32."""
    part = t[start * rows : end * rows].view(rows, end - start) if flat else t[start:end].T
    if sf is None:
        return part.float()
    # scales have K in front where the values do, and are transposed with them
    scales = sf if flat else sf.T
    low = start // _BLOCK
    return dequantize(part, scales[:, low : low - (start - end) // _BLOCK], 1, _BLOCK)


def _define(name: str, *, fp8: bool, flat: bool) -> torch._ops.OpOverload:
    function = Function("deep_gemm", name)
    recipe = "int[]? recipe=None, " if fp8 else ""
    operands = "Tensor a, Tensor a_sf, Tensor b, Tensor b_sf" if fp8 else "Tensor a, Tensor b"
    schema = f"{name}({operands}, {_REST.format(recipe=recipe)}) -> ()"
    defaults: dict[str, Any] = {"c": None, "recipe": None, "compiled_dims": None}
    names = [argument.name for argument in torch._C.parse_schema(f"fxwarm::{schema}").arguments]

    def cuda(*args: Any, **kwargs: Any) -> None:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        a = (given["a"], given["a_sf"]) if fp8 else given["a"]
        b = (given["b"], given["b_sf"]) if fp8 else given["b"]
        recipe = given["recipe"]
        function(
            a,
            b,
            given["d"],
            list(given["ks"]),
            given["grouped_layout"],
            c=given["c"],
            recipe=None if recipe is None else tuple(recipe),
            compiled_dims=given["compiled_dims"],
            use_psum_layout=given.get("use_psum_layout", False),
        )

    fake: Callable[..., Any] = partial(_check, name, flat=flat)
    return define_op(schema, fake=fake, cpu=partial(_run, flat=flat), cuda=cuda, by_name=True)


k_grouped_fp8_gemm_nt_contiguous = _define("k_grouped_fp8_gemm_nt_contiguous", fp8=True, flat=True)
"""SM90: each group's operands K-major, one after the other in one dim; scales ``[M or N, sum(ks) / 128]``."""

k_grouped_fp8_gemm_tn_contiguous = _define("k_grouped_fp8_gemm_tn_contiguous", fp8=True, flat=False)
"""SM100: operands ``[sum(ks), M or N]``; scales ``[sum(ks) / 128, M or N]``."""

k_grouped_bf16_gemm_tn_contiguous = _define(
    "k_grouped_bf16_gemm_tn_contiguous", fp8=False, flat=False
)
"""bfloat16, operands ``[sum(ks), M or N]``."""
