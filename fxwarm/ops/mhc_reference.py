"""The mathematics of mHC in plain torch, in any floating dtype: what the kernels are held against.

x are the residual streams [T, m, H], X the same flattened to [T, m*H], ``fn`` [m*(2+m), m*H]. Source: the formulas of
DeepSeek's TileKernels 1.0.0 (``tile_kernels.mhc``).
"""

# ruff: noqa: PLR0917 (the argument order is the ops')

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fxwarm.families.mhc.splits import BLOCK


def prenorm_reference(
    a: Tensor, b: Tensor, num_splits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return partial sums of a @ b.T [splits, T, n] and of a*a [splits, T], K cut at multiples of 64."""
    blocks = -(-a.shape[1] // BLOCK)
    edges = [min(i * blocks // num_splits * BLOCK, a.shape[1]) for i in range(num_splits)] + [
        a.shape[1]
    ]
    a, b = a.to(dtype), b.to(dtype)
    parts = [(a[:, i:j], b[:, i:j]) for i, j in itertools.pairwise(edges)]
    return torch.stack([x @ w.T for x, w in parts]), torch.stack([(x * x).sum(1) for x, _ in parts])


def mhc_pre_reference(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return post_mix [T, m], comb_mix [T, m, m] and layer_input [T, H], computed and returned in ``dtype``."""
    tokens, m, hidden = residual.shape
    x, scale, base = residual.to(dtype), hc_scale.to(dtype), hc_base.to(dtype)
    flat = x.reshape(tokens, m * hidden)
    rms = torch.rsqrt(flat.square().mean(1, keepdim=True) + rms_eps)
    mixes = flat @ fn.to(dtype).T * rms
    pre = torch.sigmoid(mixes[:, :m] * scale[0] + base[:m]) + hc_pre_eps
    post = torch.sigmoid(mixes[:, m : 2 * m] * scale[1] + base[m : 2 * m]) * hc_post_mult_value
    comb = (mixes[:, 2 * m :] * scale[2] + base[2 * m :]).reshape(tokens, m, m)
    comb = torch.softmax(comb, -1) + hc_sinkhorn_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_sinkhorn_eps)
    for _ in range(sinkhorn_repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_sinkhorn_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_sinkhorn_eps)
    return post, comb, (pre.unsqueeze(-1) * x).sum(1)


def mhc_post_reference(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return the next residual streams [T, m, H]: out_k = post_k x + sum_j comb[j, k] residual_j, in ``dtype``."""
    streams = comb_res_mix.to(dtype).transpose(1, 2) @ residual.to(dtype)
    return streams + post_layer_mix.to(dtype).unsqueeze(-1) * x.to(dtype).unsqueeze(1)
