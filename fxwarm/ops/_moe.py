"""CPU references of FlashInfer's calls: each expert that has tokens, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxwarm.ops import _gemm
from fxwarm.ops.scales import FP8, per_block_cast_to_fp8, per_token_cast_to_fp8

_SWIGLU, _SWIGLU_BIAS = 3, 5
_FP8_MAX = 448.0

Linear = Callable[[Tensor, int], Tensor]
"""Multiplies rows by one expert's weight."""


def cutlass(
    *,
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: Sequence[Tensor],
    fc1_expert_biases: Tensor | None,
    fc2_expert_biases: Tensor | None,
    swiglu_alpha: Tensor | None,
    swiglu_beta: Tensor | None,
    swiglu_limit: Tensor | None,
    tp_rank: int,
    ep_rank: int,
    use_deepseek_fp8_block_scale: bool,
    activation_type: int,
    **_: Any,
) -> Tensor:
    """Run the local experts of an expert-parallel rank; under tensor parallelism the result is partial.

    Unquantised, FP8 with a scale a tensor, and FP8 in DeepSeek's blocks, where activations are quantised
    in runs of 128 as the kernel does. Swiglu and SwigluBias only.
    """
    if activation_type not in (_SWIGLU, _SWIGLU_BIAS):
        raise _unsupported(f"activation_type={activation_type}")
    first, second = fc1_expert_weights, fc2_expert_weights
    if use_deepseek_fp8_block_scale:
        up, down = _blocks(first, quant_scales[0]), _blocks(second, quant_scales[1])
    elif second.dtype == FP8 and len(quant_scales) == 4:
        up, down = _scaled(first, second, quant_scales)
    elif second.dtype in (torch.bfloat16, torch.float16, torch.float32):
        up, down = _plain(first), _plain(second)
    else:
        raise _unsupported(f"{second.dtype} weights with these flags")

    def activate(x: Tensor, e: int) -> Tensor:
        if fc1_expert_biases is not None:
            x = x + fc1_expert_biases[e].float()
        linear, gate = x.chunk(2, -1)  # FlashInfer's order: the up half first
        if swiglu_limit is not None:
            limit = float(swiglu_limit[e])
            linear, gate = linear.clamp(-limit, limit), gate.clamp(max=limit)
        if swiglu_beta is not None:
            linear = linear + swiglu_beta[e]
        alpha = 1.0 if swiglu_alpha is None else swiglu_alpha[e]
        return gate * torch.sigmoid(alpha * gate) * linear

    def expert(x: Tensor, e: int) -> Tensor:
        out = down(activate(up(x, e), e), e)
        if fc2_expert_biases is not None and tp_rank == 0:  # added once over the ranks
            out = out + fc2_expert_biases[e].float()
        return out

    ids = token_selected_experts - ep_rank * second.shape[0]
    out = _combine(input, ids, token_final_scales, second.shape[:2], expert)
    return out.to(output_dtype)


def bmm(
    *, A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, dtype: torch.dtype, **_: Any
) -> Tensor:
    """Multiply in float32, then by both scales."""
    return (torch.bmm(A.float(), B.float()) * (A_scale * B_scale)).to(dtype)


def block_scale(
    *,
    input: Tensor,
    weight: Tensor,
    input_scale: Tensor | None,
    weight_scale: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Multiply in float32 what the kernel sees: bfloat16 operands are quantised, rows in runs of 128."""
    if input_scale is None:
        input, input_scale = per_token_cast_to_fp8(input)
    if weight_scale is None:
        weight, weight_scale = per_block_cast_to_fp8(weight)
    out = torch.empty((input.shape[0], weight.shape[0]), device=input.device)
    by_row = weight_scale.shape[0] == weight.shape[0]
    recipe = (1, 1, 128) if by_row else (1, 128, 128)
    _gemm.dense(a=input, a_sf=input_scale, b=weight, b_sf=weight_scale, d=out, recipe=recipe)
    return out.to(out_dtype or torch.bfloat16)


def mono(
    *,
    activations_in: Tensor,
    router_logits: Tensor,
    expert_weights_up: Tensor,
    expert_scales_up: Tensor,
    expert_weights_down: Tensor,
    expert_scales_down: Tensor,
    top_k: int,
    scoring_func: str,
    renormalize: bool,
    interleave_up: bool,
) -> Tensor:
    """Route, then run the experts in DeepSeek's blocks, the gate half of the up weights first."""
    if scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func is {scoring_func!r}; give 'softmax' or 'sigmoid'")
    logits = router_logits.float()
    scores = logits.sigmoid() if scoring_func == "sigmoid" else logits.softmax(-1)
    weights, ids = scores.topk(top_k)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    up = _blocks(expert_weights_up, expert_scales_up, interleaved=not interleave_up)
    down = _blocks(expert_weights_down, expert_scales_down)

    def expert(x: Tensor, e: int) -> Tensor:
        gate, linear = up(x, e).chunk(2, -1)
        return down(F.silu(gate) * linear, e)

    shape = expert_weights_down.shape[:2]
    return _combine(activations_in, ids, weights, shape, expert).to(activations_in.dtype)


def trtllm(**_: Any) -> Tensor:
    """Raise: its routing methods and weight layouts have no reference here."""
    raise NotImplementedError("trtllm_fp8_block_scale_moe has no CPU reference; trace it on meta")


def _combine(
    x: Tensor, ids: Tensor, scales: Tensor, shape: Sequence[int], expert: Linear
) -> Tensor:
    """Return, for each row, the scaled sum of its experts; ids that are not local add nothing."""
    experts, hidden = shape
    out = torch.zeros((x.shape[0], hidden), device=x.device)
    for e in ids.unique().tolist():
        if 0 <= e < experts:
            row, slot = (ids == e).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(x[row], e) * scales[row, slot].float().unsqueeze(1))
    return out


def _plain(weight: Tensor) -> Linear:
    return lambda x, e: x.to(weight.dtype).float() @ weight[e].float().t()


def _scaled(first: Tensor, second: Tensor, scales: Sequence[Tensor]) -> tuple[Linear, Linear]:
    """Return both products of FP8 with a scale a tensor: (fc1 out, fc2 in, fc2 out, fc1 in) scales."""
    out1, in2, out2, _ = scales

    def up(x: Tensor, e: int) -> Tensor:
        return (x.float() @ first[e].float().t()) * out1.reshape(-1)[e]

    def down(x: Tensor, e: int) -> Tensor:
        fp8 = (x * in2.reshape(-1)[0]).clamp(-_FP8_MAX, _FP8_MAX).to(FP8)
        return (fp8.float() @ second[e].float().t()) * out2.reshape(-1)[e]

    return up, down


def _blocks(weight: Tensor, sf: Tensor, *, interleaved: bool = False) -> Linear:
    """Return the product with FP8 weights in (128, 128) blocks, rows quantised in runs of 128."""

    def run(x: Tensor, e: int) -> Tensor:
        fp8, scales = per_token_cast_to_fp8(x)
        w = weight[e]
        if interleaved:  # slabs of 2 x 4 x (8 gate rows, 8 up rows)
            w = w.unflatten(0, (-1, 2, 4, 2, 8)).movedim(3, 0).flatten(0, 4)
        out = torch.empty((x.shape[0], w.shape[0]), device=x.device)
        _gemm.dense(a=fp8, a_sf=scales, b=w, b_sf=sf[e], d=out)
        return out

    return run


def _unsupported(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"cutlass_fused_moe has no CPU reference for {what}; trace it on meta, or run it on CUDA"
    )
