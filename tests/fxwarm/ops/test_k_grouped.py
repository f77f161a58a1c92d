"""DeepGEMM's K-grouped GEMMs: each group a product of its own part of K, added to what is there."""

from __future__ import annotations

import pytest
import torch

from fxwarm import exc
from fxwarm.ops import per_token_cast_to_fp8
from fxwarm.ops.scales import dequantize
from tests.fxwarm.ops.tensors import BF16, close, randn

OPS = torch.ops.fxwarm
KS, M, N = [128, 384, 0], 64, 32
LAYOUT = torch.tensor(KS, dtype=torch.int32)


def cast(x):
    """Quantise each run of 128 along K, the first dim, and return what it stands for as well."""
    bits, sf = per_token_cast_to_fp8(x.T.contiguous())
    return bits, sf, dequantize(bits, sf, 1, 128).T


def wanted(a, b, c):
    parts = zip(a.split(KS), b.split(KS), c, strict=True)
    return torch.stack([x.float().T @ y.float() + z for x, y, z in parts])


def test_bfloat16_groups_add_up_in_place():
    a, b, d = randn(512, M, dtype=BF16), randn(512, N, dtype=BF16), randn(3, M, N)
    expected = wanted(a, b, d)
    OPS.k_grouped_bf16_gemm_tn_contiguous(a, b, d, KS, LAYOUT, d)
    assert close(d, expected, 1e-4)


def test_fp8_groups_with_k_in_front_and_with_k_behind():
    (a, a_sf, x), (b, b_sf, y), c = cast(randn(512, M)), cast(randn(512, N)), randn(3, M, N)
    expected = wanted(x, y, c)
    d = c.clone()
    front = a.T.contiguous(), a_sf.T.contiguous(), b.T.contiguous(), b_sf.T.contiguous()
    OPS.k_grouped_fp8_gemm_tn_contiguous(*front, d, KS, LAYOUT, c)
    assert close(d, expected, 1e-4)
    flat = [torch.cat([p.flatten() for p in t.split(KS, 1)]) for t in (a, b)]
    d = c.clone()
    OPS.k_grouped_fp8_gemm_nt_contiguous(flat[0], a_sf, flat[1], b_sf, d, KS, LAYOUT, d)
    assert close(d, expected, 1e-4)


def test_groups_that_contradict_the_operands_are_refused():
    a, b, d = randn(512, M, dtype=BF16), randn(512, N, dtype=BF16), randn(3, M, N)
    with pytest.raises(exc.ShapeMismatchError, match=r"ks are 2 numbers"):
        OPS.k_grouped_bf16_gemm_tn_contiguous(a, b, d, [128, 384], LAYOUT)
    with pytest.raises(exc.ShapeMismatchError, match=r"ks=\[128, 128, 0\]"):
        OPS.k_grouped_bf16_gemm_tn_contiguous(a, b, d, [128, 128, 0], LAYOUT)
