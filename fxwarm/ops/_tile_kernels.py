"""CPU references of TileKernels' mHC functions: float32 over any leading dims, from ``mhc_reference``."""

from __future__ import annotations

import torch
from torch import Tensor

from fxwarm.ops.mhc_reference import mhc_post_reference, mhc_pre_reference

F32 = torch.float32


def big_fuse(
    *,
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, split, Sinkhorn and the weighted sum of the streams in one."""
    *outer, mult, hidden = residual.shape
    eps = rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat
    flat = residual.reshape(-1, mult, hidden)
    post, comb, wide = mhc_pre_reference(flat, fn, mhc_scale, mhc_base, *eps, dtype=F32)
    return (
        post.view(*outer, mult, 1),
        comb.view(*outer, mult, mult),
        wide.to(residual.dtype).view(*outer, hidden),
    )


def post(*, x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """Add a sublayer's output to the residual streams."""
    mult, hidden = residual.shape[-2:]
    parts = x.reshape(-1, hidden), residual.reshape(-1, mult, hidden)
    mixes = post_layer_mix.reshape(-1, mult), comb_res_mix.reshape(-1, mult, mult)
    return mhc_post_reference(*parts, *mixes, F32).to(residual.dtype).view(residual.shape)


def norm_fn(
    *,
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    n_splits: int,
) -> Tensor:
    """RMS-normalise the streams of a token together, times ``mhc_fn``."""
    x = residual.flatten(-2).float()
    fn = mhc_fn if mhc_norm_weight is None else mhc_fn * mhc_norm_weight
    return x @ fn.T * torch.rsqrt(x.square().mean(-1, keepdim=True) + mhc_norm_eps)


def split_mixes(
    *,
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the mixes of a token into pre, post and comb, each scaled and shifted."""
    m, scale = (
        mhc_mult,
        mhc_scale.repeat_interleave(torch.tensor([mhc_mult, mhc_mult, mhc_mult**2])),
    )
    mixes = input_mixes * scale + mhc_base
    pre = torch.sigmoid(mixes[..., :m]) + mhc_pre_eps
    after = torch.sigmoid(mixes[..., m : 2 * m]) * mhc_post_mult_value
    return pre.unsqueeze(-1), after.unsqueeze(-1), mixes[..., 2 * m :].unflatten(-1, (m, m)).clone()


def sinkhorn(*, x: Tensor, repeat: int, eps: float) -> Tensor:
    """Softmax of the rows, then columns and rows in turn divided by their sums."""
    comb = torch.softmax(x, -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb.contiguous()


def apply_mix(*, x: Tensor, mix: Tensor) -> Tensor:
    """Sum the streams, weighted."""
    return (mix * x.float()).sum(-2).to(x.dtype)


def head_mix(
    *, input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float
) -> Tensor:
    """Weights of the streams before the language model's head."""
    return torch.sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps


def expand(*, hidden: Tensor, mhc_mult: int) -> Tensor:
    """Repeat the embedding for each stream."""
    return hidden.unsqueeze(-2).repeat_interleave(mhc_mult, -2)
