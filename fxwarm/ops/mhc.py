"""Manifold-constrained hyper-connections as torch ops: ``fxwarm::mhc_pre`` and ``fxwarm::mhc_post``.

    post_mix, comb_mix, layer_input = mhc_pre(residual, fn, hc_scale, hc_base, 1e-6, 1e-6, 1e-6, 2.0, 20)
    residual = mhc_post(sublayer(layer_input), residual, post_mix, comb_mix)

A pre node is two kernels of two libraries: DeepGEMM's ``tf32_hc_prenorm_gemm``, which writes partial sums, and a
fused TileLang kernel that reduces them; both are compiled for the number of partial sums, which follows from the
token count (``mhc_splits``). On a CUDA device these are DeepGEMM's and TileKernels'. On a CPU the GEMM is a reference
and the fused kernel is TileLang's too, compiled for the CPU, so that a CPU meets the same JIT; without TileLang it is
a reference as well. No gradients.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor

from fxwarm.families.mhc.splits import device_sms, num_splits
from fxwarm.ops import mhc_factories as factories
from fxwarm.ops._define import define_op
from fxwarm.ops.mhc_reference import mhc_post_reference, mhc_pre_reference, prenorm_reference

log = logging.getLogger(__name__)

Triple = tuple[Tensor, Tensor, Tensor]


def _pre_fake(
    residual: Tensor, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, *args: Any
) -> Triple:
    mult, hidden = _check_pre(residual, fn, hc_scale, hc_base, int(args[-1]))
    tokens = residual.shape[0]
    return (
        residual.new_empty((tokens, mult), dtype=torch.float32),
        residual.new_empty((tokens, mult, mult), dtype=torch.float32),
        residual.new_empty((tokens, hidden)),
    )


def _pre_cpu(residual: Tensor, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, *args: Any) -> Triple:
    post, comb, layer_input = _pre_fake(residual, fn, hc_scale, hc_base, *args)
    tokens, mult, hidden = residual.shape
    if tokens == 0:
        return post, comb, layer_input
    if not has_cpu_kernels():
        post, comb, wide = mhc_pre_reference(
            residual, fn, hc_scale, hc_base, *args, dtype=torch.float32
        )
        return post, comb, wide.to(residual.dtype)
    splits = num_splits(tokens, mult * hidden, device_sms(residual.device))
    partial, squares = prenorm_reference(residual.flatten(1), fn, splits, torch.float32)
    kernel = factories.get_factory(factories.BIG_FUSE_CPU)(
        **factories.pre_statics(hidden, mult, splits, *args)
    )
    wide = torch.empty(tokens, hidden)
    streams = residual.contiguous().float()
    kernel(
        partial,
        squares,
        hc_scale.contiguous(),
        hc_base.contiguous(),
        streams,
        post,
        comb.flatten(1),
        wide,
    )
    return post, comb, wide.to(residual.dtype)


def _pre_cuda(
    residual: Tensor, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, *args: Any
) -> Triple:
    post, comb, layer_input = _pre_fake(residual, fn, hc_scale, hc_base, *args)
    tokens, mult, hidden = residual.shape
    if tokens == 0:
        return post, comb, layer_input
    from fxwarm.ops import deep_gemm  # noqa: F401  (defines the op)

    residual, fn = residual.contiguous(), fn.contiguous()
    splits = num_splits(tokens, mult * hidden, device_sms(residual.device))
    partial = post.new_empty((splits, tokens, fn.shape[0]))
    squares = post.new_empty((splits, tokens))
    with torch.cuda.device(residual.device):  # both libraries launch on the current device
        torch.ops.fxwarm.tf32_hc_prenorm_gemm(residual.flatten(1), fn, partial, squares, splits)
        kernel = factories.get_factory(factories.BIG_FUSE)(
            **factories.pre_statics(hidden, mult, splits, *args)
        )
        scale, base = hc_scale.contiguous(), hc_base.contiguous()
        kernel(partial, squares, scale, base, residual, post, comb.flatten(1), layer_input)
    return post, comb, layer_input


def _post_fake(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    _check_post(x, residual, post_layer_mix, comb_res_mix)
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


def _post_cpu(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    tokens, mult, hidden = residual.shape
    if tokens == 0:
        return _post_fake(x, residual, post_layer_mix, comb_res_mix)
    post = post_layer_mix.reshape(tokens, mult).contiguous()
    if not has_cpu_kernels():
        wide = mhc_post_reference(x, residual, post, comb_res_mix, torch.float32)
        return wide.to(residual.dtype)
    kernel = factories.get_factory(factories.POST_CPU)(**factories.post_statics(hidden, mult))
    wide = torch.empty(residual.shape)
    streams, added = residual.contiguous().float(), x.contiguous().float()
    kernel(comb_res_mix.contiguous(), streams, post, added, wide)
    return wide.to(residual.dtype)


def _post_cuda(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    out = _post_fake(x, residual, post_layer_mix, comb_res_mix)
    tokens, mult, hidden = residual.shape
    if tokens == 0:
        return out
    post = post_layer_mix.reshape(tokens, mult).contiguous()
    with torch.cuda.device(residual.device):
        kernel = factories.get_factory(factories.POST)(**factories.post_statics(hidden, mult))
        kernel(comb_res_mix.contiguous(), residual.contiguous(), post, x.contiguous(), out)
    return out


def _check_pre(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor, repeat: int
) -> tuple[int, int]:
    """Return hc_mult and hidden, both from the weight: in a graph the activation's may still be symbols."""
    _check(residual.dim() == 3, "mhc_pre: residual must be [T, m, H], not {}", residual.shape)
    _check(fn.dim() == 2, "mhc_pre: fn must be [m*(2+m), m*H], not {}", fn.shape)
    rows = int(fn.shape[0])
    mult = math.isqrt(rows + 1) - 1
    _check(mult > 0 and mult * (2 + mult) == rows, "mhc_pre: fn has {} rows, not m*(2+m)", rows)
    hidden = fn.shape[1] // mult
    _check(
        residual.shape[1] == mult,
        "mhc_pre: residual has {} streams, fn wants {}",
        residual.shape[1],
        mult,
    )
    _check(
        residual.shape[2] == hidden,
        "mhc_pre: residual has hidden {}, fn wants {}",
        residual.shape[2],
        hidden,
    )
    _check(
        scale.dim() == 1 and scale.shape[0] == 3,
        "mhc_pre: hc_scale must be [3], not {}",
        scale.shape,
    )
    _check(
        base.dim() == 1 and base.shape[0] == rows,
        "mhc_pre: hc_base must be [{}], not {}",
        rows,
        base.shape,
    )
    for name, weight in (("fn", fn), ("hc_scale", scale), ("hc_base", base)):
        _check(weight.dtype == torch.float32, "mhc_pre: {} is {}; give float32", name, weight.dtype)
    _check_dtype("mhc_pre: residual", residual)
    _check(repeat >= 1, "mhc_pre: sinkhorn_repeat is {}; give at least 1", repeat)
    return mult, hidden


def _check_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> None:
    _check(residual.dim() == 3, "mhc_post: residual must be [T, m, H], not {}", residual.shape)
    _check(x.dim() == 2, "mhc_post: x must be [T, H], not {}", x.shape)
    _check(post.dim() in (2, 3), "mhc_post: post_layer_mix must be [T, m], not {}", post.shape)
    _check(comb.dim() == 3, "mhc_post: comb_res_mix must be [T, m, m], not {}", comb.shape)
    tokens, mult, hidden = residual.shape
    for name, other in (("x", x), ("post_layer_mix", post), ("comb_res_mix", comb)):
        _check(
            other.shape[0] == tokens,
            "mhc_post: {} has {} tokens, residual {}",
            name,
            other.shape[0],
            tokens,
        )
    _check(x.shape[1] == hidden, "mhc_post: x has hidden {}, residual {}", x.shape[1], hidden)
    for name, other in (("post_layer_mix", post), ("comb_res_mix", comb)):
        _check(
            other.shape[1] == mult,
            "mhc_post: {} has {} streams, residual {}",
            name,
            other.shape[1],
            mult,
        )
        _check(other.dtype == torch.float32, "mhc_post: {} is {}; give float32", name, other.dtype)
    _check(comb.shape[2] == mult, "mhc_post: comb_res_mix must be [T, m, m], not {}", comb.shape)
    _check(x.dtype == residual.dtype, "mhc_post: x is {}, residual {}", x.dtype, residual.dtype)
    _check_dtype("mhc_post: residual", residual)


def _check_dtype(what: str, tensor: Tensor) -> None:
    cuda = tensor.device.type == "cuda"
    allowed = (torch.bfloat16,) if cuda else (torch.bfloat16, torch.float32)
    _check(tensor.dtype in allowed, what + " is {}; give {}", tensor.dtype, allowed[0])


def _check(holds: bool, message: str, *values: object) -> None:
    """Assert ``holds``, also of symbols while a graph is traced: there it becomes a fact about them."""
    torch._check(
        holds,
        lambda: message.format(*(list(v) if isinstance(v, torch.Size) else v for v in values)),
    )


@functools.cache
def has_cpu_kernels() -> bool:
    """Whether TileLang can serve this CPU; says so once where it cannot and the reference runs."""
    if not factories.has_tilelang():
        log.info(
            "mHC runs as a reference on this CPU: TileLang is not installed; pip install tilelang"
        )
        return False
    try:
        factories.get_factory(factories.BIG_FUSE_CPU)
    except Exception as error:  # an import that fails must not cost the user the model
        log.warning("mHC runs as a reference on this CPU: TileLang does not import: %s", error)
        return False
    return True


mhc_pre = define_op(
    "mhc_pre(Tensor residual, Tensor fn, Tensor hc_scale, Tensor hc_base, float rms_eps, float hc_pre_eps, "
    "float hc_sinkhorn_eps, float hc_post_mult_value, int sinkhorn_repeat) -> (Tensor, Tensor, Tensor)",
    fake=_pre_fake,
    cpu=_pre_cpu,
    cuda=_pre_cuda,
)
"""Mix the residual streams into one layer input.

residual [T, m, H] bf16 (float32 too on a CPU), fn [m*(2+m), m*H], hc_scale [3], hc_base [m*(2+m)] float32.
Returns post_mix [T, m] and comb_mix [T, m, m] in float32 and layer_input [T, H] in residual's dtype.
"""

mhc_post = define_op(
    "mhc_post(Tensor x, Tensor residual, Tensor post_layer_mix, Tensor comb_res_mix) -> Tensor",
    fake=_post_fake,
    cpu=_post_cpu,
    cuda=_post_cuda,
)
"""Add a sublayer's output to the residual streams: out_k = post_k x + sum_j comb[j, k] residual_j.

x [T, H] and residual [T, m, H] of one dtype, post_layer_mix [T, m] (or [T, m, 1]) and comb_res_mix [T, m, m] float32.
Returns [T, m, H] in residual's dtype.
"""
