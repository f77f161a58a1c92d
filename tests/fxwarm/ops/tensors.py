"""Small calls of each DeepGEMM op, with the plain float32 result beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from fxwarm.ops import per_block_cast_to_fp8, per_token_cast_to_fp8
from fxwarm.ops.scales import dequantize

BF16, F32 = torch.bfloat16, torch.float32


def randn(*size: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + sum(size))).to(dtype)


def fp8_rows(*size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return activations, their scales, and what both stand for in float32."""
    x, sf = per_token_cast_to_fp8(randn(*size))
    return x, sf, dequantize(x, sf, 1, 128)


def fp8_blocks(*size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, their scales, and what both stand for in float32."""
    w, sf = per_block_cast_to_fp8(randn(*size, seed=1))
    return w, sf, dequantize(w, sf, 128, 128)


def close(got: Tensor, wanted: Tensor, tol: float = 0.01) -> bool:
    """Whether two results agree to ``tol`` of the largest element: bfloat16 rounds at 0.004."""
    scale = wanted.float().abs().max().clamp_min(1e-6) if wanted.numel() else torch.ones(())
    return got.shape == wanted.shape and bool(
        ((got.float() - wanted.float()).abs() <= tol * scale).all()
    )
