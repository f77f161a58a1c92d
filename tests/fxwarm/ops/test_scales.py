"""Quantisation with block scales, against a loop over blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxwarm.ops import per_block_cast_to_fp8, per_token_cast_to_fp8
from fxwarm.ops.scales import FP8, dequantize, scale_shape, unpack_ue8m0
from tests.fxwarm.ops.tensors import randn

sizes = st.integers(1, 300)


@settings(max_examples=30, deadline=None)
@given(m=st.integers(0, 5), k=sizes)
def test_each_token_block_uses_the_whole_range_of_fp8(m, k):
    x = randn(m, k)
    fp8, sf = per_token_cast_to_fp8(x)
    assert (fp8.dtype, fp8.shape, sf.shape) == (FP8, x.shape, (m, -(-k // 128)))
    for i in range(m):
        for j in range(sf.shape[1]):
            block = slice(128 * j, 128 * j + 128)
            amax = x[i, block].abs().max().clamp_min(1e-4)
            assert torch.isclose(sf[i, j], amax / 448)
            assert (fp8[i, block].float() * sf[i, j] - x[i, block]).abs().max() <= amax / 16


@settings(max_examples=20, deadline=None)
@given(g=st.integers(1, 2), n=sizes, k=sizes)
def test_each_weight_block_has_one_scale_in_each_group(g, n, k):
    w = randn(g, n, k)
    fp8, sf = per_block_cast_to_fp8(w)
    assert fp8.shape == w.shape
    assert sf.shape == (g, -(-n // 128), -(-k // 128))
    alone, alone_sf = per_block_cast_to_fp8(w[0])
    assert torch.equal(alone.float(), fp8[0].float())
    assert torch.equal(alone_sf, sf[0])
    assert (dequantize(fp8, sf, 128, 128) - w).abs().max() <= w.abs().max() / 16
    corner = w[:, :128, :128].abs().amax((1, 2)).clamp_min(1e-4) / 448
    assert torch.allclose(sf[:, 0, 0], corner)


def test_zeros_get_a_finite_scale():
    for cast in (per_token_cast_to_fp8, per_block_cast_to_fp8):
        fp8, sf = cast(torch.zeros(3, 200, dtype=torch.bfloat16))
        assert sf.isfinite().all()
        assert (sf > 0).all()
        assert not fp8.float().any()


@pytest.mark.parametrize("k", [128, 512, 640, 1000])
def test_packed_scales_hold_four_exponents_each(k):
    exponents = torch.randint(120, 135, (3, scale_shape(3, k, 1, 128, torch.int32)[1] * 4))
    packed = sum(exponents[:, i::4] << (8 * i) for i in range(4)).to(torch.int32)
    assert packed.shape == scale_shape(3, k, 1, 128, torch.int32)
    assert torch.equal(unpack_ue8m0(packed), torch.exp2(exponents.float() - 127))
