"""DeepGEMM's calls as torch ops: ``torch.ops.fxwarm.fp8_gemm_nt`` and its kin.

Most builds of DeepGEMM register no torch op, and a call of theirs breaks the graph. These ops carry the
library's own argument names and scale layouts, with each (tensor, scales) pair flattened:

    x: "f8e4m3[s77, 7168]", x_sf: "f32[s77, 56]", w: "f8e4m3[2112, 7168]", w_sf: "f32[17, 56]"
    d = torch.empty(x.shape[0], 2112, dtype=torch.bfloat16)
    torch.ops.fxwarm.fp8_gemm_nt(x, x_sf, w, w_sf, d)

On CUDA an op calls the installed library and nothing else; on the CPU it is a reference in float32. All
write into ``d`` and return nothing, for inference only: no gradient flows through ``d``.

``recipe`` is (rows of A, rows of B, columns) that one scale covers; None is (1, 128, 128), or (1, 1, 128)
where ``b_sf`` is int32. ``compiled_dims`` None is the library's default, which decides what kernels share.
"""

# ruff: noqa: PLR0917 (the argument order is the schema's)

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fxwarm.ops import _gemm, _gemm_checks
from fxwarm.ops._define import define_op
from fxwarm.ops._library import Function
from fxwarm.ops._schemas import FP8_OPTIONS, PLAIN, SCALED

_PSUM = "bool use_psum_layout=False, SymInt? expected_m_for_psum_layout=None"

_fp8_gemm_nt = Function("deep_gemm", "fp8_gemm_nt", "fp8_fp4_gemm_nt")
_bf16_gemm_nt = Function("deep_gemm", "bf16_gemm_nt")
_fp8_contiguous = Function(
    "deep_gemm", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"
)
_fp8_masked = Function(
    "deep_gemm",
    "m_grouped_fp8_gemm_nt_masked",
    "fp8_m_grouped_gemm_nt_masked",  # sgl-deep-gemm 0.1.x and the September 2025 upstream
    "m_grouped_fp8_fp4_gemm_nt_masked",
)
_bf16_contiguous = Function("deep_gemm", "m_grouped_bf16_gemm_nt_contiguous")
_einsum = Function("deep_gemm", "einsum")
_fp8_einsum = Function("deep_gemm", "fp8_einsum")
_prenorm = Function("deep_gemm", "tf32_hc_prenorm_gemm")


def _recipe(recipe: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if recipe is None else tuple(recipe)  # pybind11 takes no list for a tuple


# Dense: d[M, N] = a[M, K] @ b[N, K].T (+ c)


def _call_fp8_gemm_nt(
    a: Tensor,
    a_sf: Tensor,
    b: Tensor,
    b_sf: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Sequence[int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> None:
    _fp8_gemm_nt(
        (a, a_sf),
        (b, b_sf),
        d,
        c=c,
        recipe=_recipe(recipe),
        compiled_dims=compiled_dims,
        disable_ue8m0_cast=disable_ue8m0_cast,
    )


fp8_gemm_nt = define_op(
    f"fp8_gemm_nt({SCALED}, Tensor? c=None, {FP8_OPTIONS}) -> ()",
    fake=partial(_gemm_checks.check_gemm, "fp8_gemm_nt"),
    cpu=_gemm.dense,
    cuda=_call_fp8_gemm_nt,
    by_name=True,
)


def _call_bf16_gemm_nt(
    a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, compiled_dims: str | None = None
) -> None:
    _bf16_gemm_nt(a, b, d, c=c, compiled_dims=compiled_dims)


bf16_gemm_nt = define_op(
    f"bf16_gemm_nt({PLAIN}, Tensor? c=None, str? compiled_dims=None) -> ()",
    fake=partial(_gemm_checks.check_gemm, "bf16_gemm_nt"),
    cpu=_gemm.dense,
    cuda=_call_bf16_gemm_nt,
    by_name=True,
)


# Grouped, contiguous: row i of d[M, N] = row i of a[M, K] @ b[group of i].T. The layout is one group id a
# row, -1 for padding; or, psum, the row after the last of each group, which starts at a multiple of the
# alignment (128). Padding rows of d are not defined: the CPU leaves them, a kernel may write them.


def _call_fp8_contiguous(
    a: Tensor,
    a_sf: Tensor,
    b: Tensor,
    b_sf: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Sequence[int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    _fp8_contiguous(
        (a, a_sf),
        (b, b_sf),
        d,
        grouped_layout,  # by position: it was m_indices in 2025
        recipe=_recipe(recipe),
        compiled_dims=compiled_dims,
        disable_ue8m0_cast=disable_ue8m0_cast,
        use_psum_layout=use_psum_layout,
        expected_m_for_psum_layout=expected_m_for_psum_layout,
    )


m_grouped_fp8_gemm_nt_contiguous = define_op(
    f"m_grouped_fp8_gemm_nt_contiguous({SCALED}, Tensor grouped_layout, {FP8_OPTIONS}, {_PSUM}) -> ()",
    fake=partial(_gemm_checks.check_contiguous, "m_grouped_fp8_gemm_nt_contiguous"),
    cpu=_gemm.contiguous,
    cuda=_call_fp8_contiguous,
    by_name=True,
)


def _call_bf16_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    compiled_dims: str | None = None,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    _bf16_contiguous(
        a,
        b,
        d,
        grouped_layout,
        compiled_dims=compiled_dims,
        use_psum_layout=use_psum_layout,
        expected_m_for_psum_layout=expected_m_for_psum_layout,
    )


m_grouped_bf16_gemm_nt_contiguous = define_op(
    f"m_grouped_bf16_gemm_nt_contiguous({PLAIN}, Tensor grouped_layout, str? compiled_dims=None, "
    f"{_PSUM}) -> ()",
    fake=partial(_gemm_checks.check_contiguous, "m_grouped_bf16_gemm_nt_contiguous"),
    cpu=_gemm.contiguous,
    cuda=_call_bf16_contiguous,
    by_name=True,
)


# Grouped, masked: the first masked_m[g] rows of d[g, Mmax, N] = a[g, Mmax, K] @ b[g].T. Of all sizes only
# expected_m, a plain number that the host guesses, decides the kernel.


def _call_fp8_masked(
    a: Tensor,
    a_sf: Tensor,
    b: Tensor,
    b_sf: Tensor,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: Sequence[int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> None:
    _fp8_masked(
        (a, a_sf),
        (b, b_sf),
        d,
        masked_m,
        expected_m,
        recipe=_recipe(recipe),
        compiled_dims=compiled_dims,
        disable_ue8m0_cast=disable_ue8m0_cast,
    )


m_grouped_fp8_gemm_nt_masked = define_op(
    f"m_grouped_fp8_gemm_nt_masked({SCALED}, Tensor masked_m, SymInt expected_m, {FP8_OPTIONS}) -> ()",
    fake=partial(_gemm_checks.check_masked, "m_grouped_fp8_gemm_nt_masked"),
    cpu=_gemm.masked,
    cuda=_call_fp8_masked,
    by_name=True,
)


# Batched over heads: expr is 'bhr,hdr->bhd' or 'bhd,hdr->bhr', b of the letters is the batch; or 'bmk,bnk->mn', a sum.


def _call_einsum(
    expr: str,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    use_cublaslt: bool = False,
) -> None:
    _gemm_checks.check_sum_target("einsum", expr, d, c)
    if c is not None and c.data_ptr() != d.data_ptr() and d.dtype == torch.float32:
        # where d is used again, Inductor makes two tensors of one that is both; the library asserts that it is one
        d.copy_(c)
        c = d
    _einsum(expr, a, b, d, c=c, use_cublaslt=use_cublaslt)


einsum = define_op(
    f"einsum(str expr, {PLAIN}, Tensor? c=None, bool use_cublaslt=False) -> ()",
    fake=partial(_gemm_checks.check_einsum, "einsum"),
    cpu=_gemm.einsum,
    cuda=_call_einsum,
    by_name=True,
)


def _call_fp8_einsum(
    expr: str,
    a: Tensor,
    a_sf: Tensor,
    b: Tensor,
    b_sf: Tensor,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Sequence[int] | None = None,
) -> None:
    _fp8_einsum(expr, (a, a_sf), (b, b_sf), d, c=c, recipe=_recipe(recipe))


fp8_einsum = define_op(
    f"fp8_einsum(str expr, {SCALED}, Tensor? c=None, int[]? recipe=None) -> ()",
    fake=partial(_gemm_checks.check_einsum, "fp8_einsum"),
    cpu=_gemm.einsum,
    cuda=_call_fp8_einsum,
    by_name=True,
)


# mHC pre-norm: d[M, N] = a[M, K] @ b[N, K].T in TF32, sqr_sum[M] = sum of a**2 over K. With num_splits both
# get a leading dim of that size, over which the caller sums: each split is a part of K.


def _call_prenorm(
    a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None
) -> None:
    _prenorm(a, b, d, sqr_sum, num_splits=num_splits)


tf32_hc_prenorm_gemm = define_op(
    "tf32_hc_prenorm_gemm(Tensor a, Tensor b, Tensor(d!) d, Tensor(s!) sqr_sum, "
    "SymInt? num_splits=None) -> ()",
    fake=partial(_gemm_checks.check_prenorm, "tf32_hc_prenorm_gemm"),
    cpu=_gemm.prenorm,
    cuda=_call_prenorm,
    by_name=True,
)
