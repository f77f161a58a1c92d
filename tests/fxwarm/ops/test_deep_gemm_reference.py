"""The CPU references against plain float32 matmuls of the dequantised tensors."""

from __future__ import annotations

import pytest
import torch

from fxwarm.ops import _gemm
from tests.fxwarm.ops.tensors import BF16, F32, close, fp8_blocks, fp8_rows, randn

ops = torch.ops.fxwarm
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    ("m", "n", "k"), [(0, 128, 128), (1, 64, 128), (5, 300, 200), (1500, 1100, 256)]
)
def test_a_dense_gemm_is_a_matmul_of_what_the_scales_stand_for(m, n, k):
    (a, a_sf, x), (b, b_sf, w) = fp8_rows(m, k), fp8_blocks(n, k)
    d = torch.full((m, n), torch.nan, dtype=BF16)
    assert ops.fp8_gemm_nt(a, a_sf, b, b_sf, d) is None
    assert close(d, x @ w.t())


def test_scales_in_either_major_give_the_same():
    (a, a_sf, _), (b, b_sf, _) = fp8_rows(7, 384), fp8_blocks(256, 384)
    first, second = torch.empty(7, 256, dtype=BF16), torch.empty(7, 256, dtype=BF16)
    ops.fp8_gemm_nt(a, a_sf, b, b_sf, first)
    ops.fp8_gemm_nt(a, a_sf.t().contiguous().t(), b, b_sf.t().contiguous().t(), second)
    assert torch.equal(first, second)


def test_a_scale_a_row_on_both_sides_accumulates_in_float32():
    (a, a_sf, x), (b, b_sf, w) = fp8_rows(9, 384), fp8_rows(70, 384)
    c = randn(9, 70)
    d = torch.empty(9, 70)
    ops.fp8_gemm_nt(a, a_sf, b, b_sf, d, c, recipe=[1, 1, 128])
    assert close(d, c + x @ w.t(), 1e-5)
    into = c.clone()
    ops.fp8_gemm_nt(a, a_sf, b, b_sf, into, into, recipe=[1, 1, 128])
    assert torch.equal(into, d)


def test_packed_scales_are_one_a_row_by_default():
    m, n, k = 3, 40, 640
    a, b = randn(m, k).to(torch.float8_e4m3fn), randn(n, k).to(torch.float8_e4m3fn)
    exponents = torch.randint(124, 130, (n, 8))
    sf = sum(exponents[:, i::4] << (8 * i) for i in range(4)).to(torch.int32)
    wide = torch.exp2(exponents.float() - 127).repeat_interleave(128, 1)[:, :k]
    d = torch.empty(m, n)
    ops.fp8_gemm_nt(a, sf[:m], b, sf, d)
    assert close(d, (a.float() * wide[:m]) @ (b.float() * wide).t(), 1e-5)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_bf16_with_and_without_c(dtype):
    a, b, c = randn(6, 100, dtype=BF16), randn(1030, 100, dtype=BF16), randn(6, 1030, dtype=dtype)
    d = torch.empty(6, 1030, dtype=dtype)
    ops.bf16_gemm_nt(a, b, d)
    assert close(d, a.float() @ b.float().t())
    ops.bf16_gemm_nt(a, b, d, c)
    assert close(d, c + a.float() @ b.float().t())


def stored(form: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[M, K]`` and ``[..., N, K]``, values or scales, as ``form`` has them, in memory of their own."""
    return (
        a.t().contiguous() if form[0] == "t" else a,
        b.mT.contiguous() if form[1] == "n" else b,
    )


@pytest.mark.parametrize("form", ["nn", "tn", "tt"])
def test_each_form_is_nt_of_what_it_stores_the_other_way_round(form):
    m, n, k = 70, 300, 384
    (a, a_sf, x), (b, b_sf, w) = fp8_rows(m, k), fp8_blocks(n, k)
    (left, right), (left_sf, right_sf) = stored(form, a, b), stored(form, a_sf, b_sf)
    d = torch.empty(m, n, dtype=BF16)
    op = getattr(ops, f"fp8_gemm_{form}")
    op(left, left_sf, right, right_sf, d)
    assert close(d, x @ w.t())
    b, b_sf, w = fp8_rows(n, k)
    (left, right), (left_sf, right_sf) = stored(form, a, b), stored(form, a_sf, b_sf)
    d, c = torch.empty(m, n), randn(m, n)
    op(left, left_sf, right, right_sf, d, c, [1, 1, 128])
    assert close(d, c + x @ w.t(), 1e-5)
    y, v = randn(m, k, dtype=BF16), randn(n, k, dtype=BF16)
    op = getattr(ops, f"bf16_gemm_{form}")
    op(*stored(form, y, v), d, c)
    assert close(d, c + y.float() @ v.float().t())
    torch.library.opcheck(op.default, (*stored(form, y, v), d, c), test_utils=CHECKS)


@pytest.mark.parametrize("psum", [False, True])
def test_groups_of_transposed_weights_are_the_groups_of_nt(psum):
    groups, m, n, k = 3, 300, 160, 256
    ids = torch.tensor([0] * 128 + [2] * 128 + [-1] * 44, dtype=torch.int32)
    layout = torch.tensor([128, 128, 256], dtype=torch.int32) if psum else ids
    (a, a_sf, _), (b, b_sf, _) = fp8_rows(m, k), fp8_blocks(groups, n, k)
    d, wanted = (torch.full((m, n), 7.0, dtype=BF16) for _ in range(2))
    rest = {"use_psum_layout": psum}
    ops.m_grouped_fp8_gemm_nt_contiguous(a, a_sf, b, b_sf, wanted, layout, **rest)
    ops.m_grouped_fp8_gemm_nn_contiguous(a, a_sf, b.mT, b_sf.mT, d, layout, **rest)
    assert torch.equal(d, wanted)
    y, v = randn(m, k, dtype=BF16), randn(groups, n, k, dtype=BF16)
    ops.m_grouped_bf16_gemm_nt_contiguous(y, v, wanted, layout, **rest)
    args = y, v.mT.contiguous(), d, layout
    ops.m_grouped_bf16_gemm_nn_contiguous(*args, **rest)
    assert close(d, wanted)
    op = ops.m_grouped_bf16_gemm_nn_contiguous.default
    torch.library.opcheck(op, args, rest, test_utils=CHECKS)


def _grouped(ids: list[int], psum: torch.Tensor | None, fp8: bool) -> None:
    m, n, k, groups = len(ids), 160, 256, 4
    d = torch.full((m, n), 7.0, dtype=BF16)
    layout = torch.tensor(ids, dtype=torch.int32) if psum is None else psum
    if fp8:
        (a, a_sf, x), (b, b_sf, w) = fp8_rows(m, k), fp8_blocks(groups, n, k)
        ops.m_grouped_fp8_gemm_nt_contiguous(
            a, a_sf, b, b_sf, d, layout, use_psum_layout=psum is not None
        )
    else:
        a, b = randn(m, k, dtype=BF16), randn(groups, n, k, dtype=BF16)
        x, w = a.float(), b.float()
        ops.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=psum is not None)
    wanted = torch.full((m, n), 7.0)
    for i, group in enumerate(ids):
        if group >= 0:
            wanted[i] = x[i] @ w[group].t()
    assert close(d, wanted)


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize(
    "ids", [[], [0], [-1, -1], [0] * 5 + [-1] * 3 + [3] * 9, [3, 0, -1, 2, 0, 3, 2, -1]]
)
def test_each_row_is_multiplied_by_its_groups_weight_and_padding_is_left(ids, fp8):
    _grouped(ids, None, fp8)


@pytest.mark.parametrize("fp8", [True, False])
def test_psum_groups_start_at_multiples_of_the_alignment(fp8):
    ends = [3, 128, 128 + 130, 384 + 1]  # group 1 is empty: it ends where it starts
    ids = [0] * 3 + [-1] * 125 + [2] * 130 + [-1] * 126 + [3] + [-1] * 127
    _grouped(ids, torch.tensor(ends, dtype=torch.int32), fp8)


def test_a_group_that_does_not_exist_is_named():
    a, b, d = randn(2, 64, dtype=BF16), randn(3, 8, 64, dtype=BF16), torch.empty(2, 8, dtype=BF16)
    with pytest.raises(ValueError, match="group 3 of 3"):
        ops.m_grouped_bf16_gemm_nt_contiguous(a, b, d, torch.tensor([0, 3], dtype=torch.int32))


def test_only_the_masked_rows_of_a_group_are_written():
    groups, m, n, k = 3, 20, 136, 256
    (a, a_sf, x), (b, b_sf, w) = fp8_rows(groups, m, k), fp8_blocks(groups, n, k)
    d = torch.full((groups, m, n), 7.0, dtype=BF16)
    counts = [0, 20, 3]
    ops.m_grouped_fp8_gemm_nt_masked(
        a, a_sf, b, b_sf, d, torch.tensor(counts, dtype=torch.int32), 8
    )
    wanted = torch.full((groups, m, n), 7.0)
    for g, count in enumerate(counts):
        wanted[g, :count] = x[g, :count] @ w[g].t()
    assert close(d, wanted)


def test_the_masked_rows_of_bfloat16_groups():
    groups, m, n, k = 3, 20, 136, 256
    a, b = randn(groups, m, k, dtype=BF16), randn(groups, n, k, dtype=BF16)
    d, counts = torch.full((groups, m, n), 7.0, dtype=BF16), [0, 20, 3]
    args = a, b, d, torch.tensor(counts, dtype=torch.int32), 8
    ops.m_grouped_bf16_gemm_nt_masked(*args)
    wanted = torch.full((groups, m, n), 7.0)
    for g, count in enumerate(counts):
        wanted[g, :count] = a[g, :count].float() @ b[g].float().t()
    assert close(d, wanted)
    torch.library.opcheck(ops.m_grouped_bf16_gemm_nt_masked.default, args, test_utils=CHECKS)


@pytest.mark.parametrize("m", [0, 5])
def test_the_middle_of_each_head_is_left_as_it_is(m):
    (left, mid, right), heads, k = (64, 32, 128), 4, 256
    (a, a_sf, x), (b, b_sf, w) = fp8_rows(m, k), fp8_blocks(heads * (left + right), k)
    d = torch.full((m, heads * (left + mid + right)), 7.0, dtype=BF16)
    args = a, a_sf, b, b_sf, d, [left, mid, right]
    ops.fp8_gemm_nt_skip_head_mid(*args)
    parts = (x @ w.t()).view(m, heads, left + right)
    gap = torch.full((m, heads, mid), 7.0)
    wanted = torch.cat([parts[..., :left], gap, parts[..., left:]], 2).flatten(1)
    assert close(d, wanted)
    op = ops.fp8_gemm_nt_skip_head_mid.default
    torch.library.opcheck(op, args, test_utils=("test_faketensor",))


@pytest.mark.parametrize("expr", ["bhr,hdr->bhd", "bhd,hdr->bhr"])
@pytest.mark.parametrize("batch", [0, 1, 9])
def test_einsums_are_einsums(expr, batch):
    heads, dim, rank = 3, 256, 128
    left, _, out = expr.replace("->", ",").split(",")
    size = {"b": batch, "h": heads, "d": dim, "r": rank}
    a_shape, d_shape = [size[x] for x in left], [size[x] for x in out]
    a, b = randn(*a_shape, dtype=BF16), randn(heads, dim, rank, dtype=BF16)
    d = torch.empty(d_shape, dtype=BF16)
    ops.einsum(expr, a, b, d)
    assert close(d, torch.einsum(expr, a.float(), b.float()))
    (a, a_sf, x), (b, b_sf, w) = fp8_rows(*a_shape), fp8_blocks(heads, dim, rank)
    ops.fp8_einsum(expr, a, a_sf, b, b_sf, d)
    assert close(d, torch.einsum(expr, x, w))


@pytest.mark.parametrize("m", [0, 1, 70])
@pytest.mark.parametrize("splits", [None, 1, 3, 5])
def test_the_sum_over_splits_is_the_whole_prenorm(m, splits):
    n, k = 24, 64 * 7
    a, b = randn(m, k, dtype=BF16), randn(n, k)
    lead = () if splits is None else (splits,)
    d, sqr_sum = torch.full((*lead, m, n), torch.nan), torch.full((*lead, m), torch.nan)
    ops.tf32_hc_prenorm_gemm(a, b, d, sqr_sum, splits)
    whole, squares = (d, sqr_sum) if splits is None else (d.sum(0), sqr_sum.sum(0))
    assert close(whole, a.float() @ b.t(), 1e-5)
    assert close(squares, a.float().square().sum(1), 1e-5)


def test_the_first_splits_are_one_block_longer():
    a, b = torch.ones(1, 64 * 5, dtype=BF16), torch.ones(8, 64 * 5)
    d, sqr_sum = torch.empty(3, 1, 8), torch.empty(3, 1)
    ops.tf32_hc_prenorm_gemm(a, b, d, sqr_sum, 3)
    assert sqr_sum.flatten().tolist() == [128.0, 128.0, 64.0]


def test_a_reference_holds_a_few_rows_in_float32_at_a_time(monkeypatch):
    seen = []
    dequantize = _gemm.dequantize
    monkeypatch.setattr(
        _gemm, "dequantize", lambda x, *a: seen.append(x.shape) or dequantize(x, *a)
    )
    (a, a_sf, _), (b, b_sf, _) = fp8_rows(2500, 128), fp8_blocks(2100, 128)
    ops.fp8_gemm_nt(a, a_sf, b, b_sf, torch.empty(2500, 2100, dtype=BF16))
    assert max(rows for rows, _ in seen) == 1024


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_sum_over_the_batch_adds_to_c(dtype):
    a, b, c = randn(3, 16, 32, dtype=BF16), randn(3, 24, 32, dtype=BF16), randn(16, 24).to(dtype)
    d = c.clone()
    ops.einsum("bmk,bnk->mn", a, b, d, d)
    assert close(d, c.float() + torch.einsum("bmk,bnk->mn", a.float(), b.float()))
