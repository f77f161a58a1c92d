"""What DeepGEMM asks of the tensors of a call, as fakes: see ``_checks``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxwarm.exc import ShapeMismatchError
from fxwarm.families.deep_gemm.entries import unsummed
from fxwarm.ops._checks import Size, check_dtype, check_rank, check_shape, describe
from fxwarm.ops.scales import FP8, scale_recipe, scale_shape

_OUT = (torch.bfloat16, torch.float32)
_SF = (torch.float32, torch.int32)
_EXPRS = ("bhr,hdr->bhd", "bhd,hdr->bhr")
_SUM = "bmk,bnk->mn"


def check_gemm(
    op: str,
    *,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    a_sf: Tensor | None = None,
    b_sf: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
    form: str = "nt",
    grouped: bool = False,
    batched: bool = False,
    **_: Any,
) -> None:
    """Check ``[M, K] x [N, K] -> [M, N]``; grouped: B is ``[G, N, K]``; batched: A and D have G too.

    A of the forms tn and tt is ``[K, M]``, B of nn and tn ``[K, N]``, their scales alike.
    """
    flip_a, flip_b = form[0] == "t", form[1] == "n"
    check_rank(op, "b", b, _layout("N", grouped=grouped, flip=flip_b))
    check_rank(op, "a", a, _layout("M", grouped=batched, flip=flip_a))
    groups, (n, k) = list(b.shape[:-2]), _stored(b.shape[-2:], flip_b)
    lead = groups if batched else []
    m, _k = _stored(a.shape[-2:], flip_a)
    rows, rows_a = (len(lead),), (len(lead) + flip_a,)
    for name, operand in (("a", a), ("b", b)):
        check_dtype(op, name, operand, (torch.bfloat16,) if a_sf is None else (FP8,))
    check_shape(op, "a", a, [*lead, *_stored((m, k), flip_a)], f"b = {describe(b)}", rows=rows_a)
    if a_sf is not None and b_sf is not None:
        gran_m, gran_n, gran_k = scale_recipe(recipe, b_sf)
        wanted = [*groups, *_stored(scale_shape(n, k, gran_n, gran_k, b_sf.dtype), flip_b)]
        _check_scales(op, "b", b, b_sf, wanted, _stored((gran_n, gran_k), flip_b))
        wanted = [*lead, *_stored(scale_shape(m, k, gran_m, gran_k, a_sf.dtype), flip_a)]
        _check_scales(op, "a", a, a_sf, wanted, _stored((gran_m, gran_k), flip_a), rows_a)
    # the grouped kernels write bfloat16 only
    check_dtype(op, "d", d, _OUT[:1] if grouped else _OUT)
    because = f"a = {describe(a)} with b = {describe(b)}"
    if head_splits is not None:
        because += f" and head_splits={tuple(head_splits)}"
        n = _with_mids(op, n, head_splits)
    check_shape(op, "d", d, [*lead, m, n], because, rows=rows)
    _check_c(op, c, d, rows)


def _layout(letter: str, *, grouped: bool, flip: bool) -> str:
    return f"[{'G, ' if grouped else ''}{', '.join(_stored((letter, 'K'), flip))}]"


def _stored(dims: Sequence[Any], flip: bool) -> tuple[Any, Any]:
    """Return two dims in the order in which an operand has them."""
    first, second = dims
    return (second, first) if flip else (first, second)


def _with_mids(op: str, n: Size, head_splits: Sequence[int]) -> Size:
    """Return the columns of heads of (left, mid, right), of which the ``n`` given ones are left and right."""
    splits = tuple(head_splits)
    if len(splits) != 3 or min(splits) < 0 or splits[0] + splits[2] == 0:
        raise ShapeMismatchError(f"{op}: head_splits is {splits}; give (left, mid, right) columns")
    left, mid, right = splits
    if n % (left + right):
        text = f"{op}: {n} columns are no whole heads of {left} and {right}; make b and head_splits agree"
        raise ShapeMismatchError(text)
    return n + n // (left + right) * mid


def check_contiguous(
    op: str,
    *,
    a: Tensor,
    b: Tensor,
    grouped_layout: Tensor,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: Size | None = None,
    **rest: Any,
) -> None:
    """Check a grouped GEMM over contiguous rows, and its layout: an id a row, or an end a group."""
    check_gemm(op, a=a, b=b, grouped=True, **rest)
    check_dtype(op, "grouped_layout", grouped_layout, (torch.int32,))
    if use_psum_layout:
        because = f"the psum layout of b = {describe(b)}"
        check_shape(op, "grouped_layout", grouped_layout, [b.shape[0]], because)
        return
    because = f"a = {describe(a)}"
    check_shape(op, "grouped_layout", grouped_layout, [a.shape[0]], because, rows=(0,))
    if expected_m_for_psum_layout is not None:
        raise ShapeMismatchError(
            f"{op}: expected_m_for_psum_layout is given without use_psum_layout; leave it out"
        )


def check_masked(op: str, *, b: Tensor, masked_m: Tensor, **rest: Any) -> None:
    """Check a grouped GEMM over padded groups, of which ``masked_m[g]`` rows count."""
    check_gemm(op, b=b, grouped=True, batched=True, **rest)
    check_dtype(op, "masked_m", masked_m, (torch.int32,))
    check_shape(op, "masked_m", masked_m, [b.shape[0]], f"b = {describe(b)}")


def check_einsum(
    op: str,
    *,
    expr: str,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    a_sf: Tensor | None = None,
    b_sf: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Sequence[int] | None = None,
    **_: Any,
) -> None:
    """Check a product of heads; 'b' of ``expr`` is the batch, the others are the weight's."""
    if expr == _SUM and a_sf is None:
        _check_sum(op, a=a, b=b, d=d, c=c)
        return
    if expr not in _EXPRS:
        known = ", ".join(_EXPRS if a_sf is not None else (*_EXPRS, _SUM))
        raise ShapeMismatchError(f"{op}: expr is {expr!r}; give one of {known}")
    left, right, result = expr.replace("->", ",").split(",")
    check_rank(op, "b", b, "[h, d, r]")
    check_rank(op, "a", a, f"[{', '.join(left)}]")
    size = {**dict(zip(right, b.shape, strict=True)), "b": a.shape[0]}
    for name, operand in (("a", a), ("b", b)):
        check_dtype(op, name, operand, (torch.bfloat16,) if a_sf is None else (FP8,))
    check_shape(op, "a", a, [size[x] for x in left], f"b = {describe(b)} in {expr}", rows=(0,))
    if a_sf is not None and b_sf is not None:
        gran_m, gran_n, gran_k = scale_recipe(recipe, b_sf)
        k, n = left[2], result[2]
        sf_n, sf_k = scale_shape(size[n], size[k], gran_n, gran_k, b_sf.dtype)
        wanted = [size["h"], *((sf_n, sf_k) if right == f"h{n}{k}" else (sf_k, sf_n))]
        _check_scales(op, "b", b, b_sf, wanted, (gran_n, gran_k))
        sf_m, sf_k = scale_shape(size["b"], size[k], gran_m, gran_k, a_sf.dtype)
        _check_scales(op, "a", a, a_sf, [sf_m, size["h"], sf_k], (gran_m, gran_k), (0,))
    check_dtype(op, "d", d, _OUT if a_sf is not None else _OUT[:1])
    because = f"{expr} of a = {describe(a)} with b = {describe(b)}"
    check_shape(op, "d", d, [size[x] for x in result], because, rows=(0,))
    _check_c(op, c, d, (0,))


def _check_sum(op: str, *, a: Tensor, b: Tensor, d: Tensor, c: Tensor | None) -> None:
    check_rank(op, "a", a, "[b, m, k]")
    check_rank(op, "b", b, "[b, n, k]")
    (batch, m, k), n = a.shape, b.shape[1]
    for name, operand in (("a", a), ("b", b)):
        check_dtype(op, name, operand, (torch.bfloat16,))
    check_shape(op, "b", b, [batch, n, k], f"a = {describe(a)} in bmk,bnk->mn", rows=(0,))
    check_dtype(op, "d", d, _OUT)
    check_shape(op, "d", d, [m, n], f"a = {describe(a)} with b = {describe(b)}")
    _check_c(op, c, d, ())
    check_sum_target(op, _SUM, d, c)


def check_sum_target(op: str, expr: str, d: Tensor, c: Tensor | None) -> None:
    """Raise ShapeMismatchError for a sum over the batch that the library would crash on."""
    reason = unsummed(expr, str(d.dtype).removeprefix("torch."), c is not None)
    if reason:
        raise ShapeMismatchError(f"{op}: {reason}")


def check_prenorm(
    op: str, *, a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: Size | None = None
) -> None:
    """Check the mHC pre-norm GEMM: bfloat16 x float32 -> float32, with the splits as a leading dim."""
    check_rank(op, "b", b, "[N, K]")
    check_rank(op, "a", a, "[M, K]")
    check_dtype(op, "a", a, (torch.bfloat16,))
    for name, tensor in (("b", b), ("d", d), ("sqr_sum", sqr_sum)):
        check_dtype(op, name, tensor, (torch.float32,))
    (m, _), (n, k) = a.shape, b.shape
    check_shape(op, "a", a, [m, k], f"b = {describe(b)}", rows=(0,))
    lead = [] if num_splits is None else [num_splits]
    rows = range(len(lead) + 1)  # the number of splits follows M
    because = f"a = {describe(a)} with b = {describe(b)} and num_splits={num_splits}"
    check_shape(op, "d", d, [*lead, m, n], because, rows=rows)
    check_shape(op, "sqr_sum", sqr_sum, [*lead, m], because, rows=rows)


def _check_scales(  # noqa: PLR0917
    op: str,
    name: str,
    tensor: Tensor,
    sf: Tensor,
    wanted: Sequence[Size],
    block: tuple[int, int],
    rows: Sequence[int] = (),
) -> None:
    check_dtype(op, f"{name}_sf", sf, _SF)
    because = f"{name} = {describe(tensor)} with a scale for each {block} block"
    check_shape(op, f"{name}_sf", sf, wanted, because, rows=rows)


def _check_c(op: str, c: Tensor | None, d: Tensor, rows: Sequence[int]) -> None:
    if c is not None:
        check_dtype(op, "c", c, (d.dtype,))
        check_shape(op, "c", c, d.shape, f"d = {describe(d)}", rows=rows)
