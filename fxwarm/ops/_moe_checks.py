"""What FlashInfer asks of the tensors of a call, as fakes: see ``_checks``. Each returns the empty output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxwarm.exc import ShapeMismatchError
from fxwarm.ops._checks import check_dtype, check_rank, check_shape, describe
from fxwarm.ops.scales import FP8

GATED = (3, 4, 5, 7, 8, 10)
"""Activations with a gate half: Swiglu, Geglu, SwigluBias, SwigluStep, GegluTanh, Situ (0.6.18.post1)."""

_UNPACKED = (torch.bfloat16, torch.float16, torch.float32, FP8)
_BLOCK = 128


def check_cutlass(
    op: str,
    *,
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: Sequence[Tensor],
    use_deepseek_fp8_block_scale: bool,
    use_mxfp8_act_scaling: bool,
    min_latency_mode: bool,
    activation_type: int,
    **_: Any,
) -> Tensor:
    """Check ``[M, H]`` with fc1 ``[E, 2I or I, H]`` and fc2 ``[E, H, I]``; return ``[M, H]``."""
    fc1, fc2 = fc1_expert_weights, fc2_expert_weights
    check_rank(op, "fc2_expert_weights", fc2, "[E, H, I]")
    check_rank(op, "input", input, "[M, H]")
    check_rank(op, "token_selected_experts", token_selected_experts, "[M, top_k]")
    if min_latency_mode:
        raise NotImplementedError(f"{op}: FlashInfer has no min_latency_mode yet; leave it False")
    m, (experts, hidden, inter) = input.shape[0], fc2.shape
    weights = f"fc2_expert_weights = {describe(fc2)}"
    if input.dtype in _UNPACKED:
        check_shape(op, "input", input, [m, hidden], weights, rows=(0,))
    if fc2.dtype in _UNPACKED:
        wide = inter * (2 if activation_type in GATED else 1)
        because = f"{weights} with activation_type={activation_type}"
        check_shape(op, "fc1_expert_weights", fc1, [experts, wide, hidden], because)
    check_dtype(op, "token_selected_experts", token_selected_experts, (torch.int32,))
    check_dtype(op, "token_final_scales", token_final_scales, (torch.float32,))
    wanted = [m, token_selected_experts.shape[1]]
    because = f"input = {describe(input)}"
    check_shape(op, "token_selected_experts", token_selected_experts, wanted, because, rows=(0,))
    because = f"token_selected_experts = {describe(token_selected_experts)}"
    check_shape(op, "token_final_scales", token_final_scales, wanted, because, rows=(0,))
    if use_deepseek_fp8_block_scale:
        _count(op, quant_scales, 2, "use_deepseek_fp8_block_scale")
        _check_blocks(op, "quant_scales[0]", fc1, quant_scales[0])
        _check_blocks(op, "quant_scales[1]", fc2, quant_scales[1])
    elif fc2.dtype == FP8 and not use_mxfp8_act_scaling:
        _count(op, quant_scales, 4, "float8_e4m3fn weights")
    elif fc2.dtype in _UNPACKED[:3]:
        _count(op, quant_scales, 0, f"{describe(fc2)} weights")
    return input.new_empty((m, hidden), dtype=output_dtype)


def check_bmm(
    op: str, *, A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, dtype: torch.dtype, **_: Any
) -> Tensor:
    """Check ``[b, M, K] @ [b, K, N]``; return ``[b, M, N]``."""
    check_rank(op, "B", B, "[b, K, N]")
    check_rank(op, "A", A, "[b, M, K]")
    for name, tensor in (("A", A), ("B", B)):
        check_dtype(op, name, tensor, (FP8, torch.float8_e5m2))
    m, (batch, k, n) = A.shape[1], B.shape
    check_shape(op, "A", A, [batch, m, k], f"B = {describe(B)}", rows=(1,))
    return A.new_empty((batch, m, n), dtype=dtype)


def check_block_scale(
    op: str,
    *,
    input: Tensor,
    weight: Tensor,
    input_scale: Tensor | None,
    weight_scale: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Check ``[M, K] @ [N, K].T``, scales of FP8 operands in runs of 128 or blocks; return ``[M, N]``."""
    check_rank(op, "weight", weight, "[N, K]")
    check_rank(op, "input", input, "[M, K]")
    m, (n, k) = input.shape[0], weight.shape
    check_shape(op, "input", input, [m, k], f"weight = {describe(weight)}", rows=(0,))
    for name, tensor, scale in (("input", input, input_scale), ("weight", weight, weight_scale)):
        check_dtype(op, name, tensor, (torch.bfloat16, FP8))
        if (tensor.dtype == FP8) != (scale is not None):
            text = "needs its scales" if scale is None else "is quantised by FlashInfer; give no"
            raise ShapeMismatchError(f"{op}: {name} = {describe(tensor)} {text} {name}_scale")
    columns = (k + _BLOCK - 1) // _BLOCK
    if input_scale is not None:
        because = f"input = {describe(input)}"
        check_shape(op, "input_scale", input_scale, [m, columns], because, rows=(0,))
    if weight_scale is not None and weight_scale.shape[0] != n:
        wanted = [(n + _BLOCK - 1) // _BLOCK, columns]
        check_shape(op, "weight_scale", weight_scale, wanted, f"weight = {describe(weight)}")
    return input.new_empty((m, n), dtype=out_dtype or torch.bfloat16)


def check_mono(
    op: str,
    *,
    activations_in: Tensor,
    router_logits: Tensor,
    expert_weights_up: Tensor,
    expert_scales_up: Tensor,
    expert_weights_down: Tensor,
    expert_scales_down: Tensor,
    **_: Any,
) -> Tensor:
    """Check ``[M, K]`` with up ``[E, 2N, K]`` and down ``[E, K, N]``; return ``[M, K]``."""
    check_rank(op, "expert_weights_down", expert_weights_down, "[E, K, N]")
    check_rank(op, "activations_in", activations_in, "[M, K]")
    m, (experts, k, n) = activations_in.shape[0], expert_weights_down.shape
    because = f"expert_weights_down = {describe(expert_weights_down)}"
    check_dtype(op, "activations_in", activations_in, (torch.bfloat16,))
    check_shape(op, "activations_in", activations_in, [m, k], because, rows=(0,))
    check_shape(op, "expert_weights_up", expert_weights_up, [experts, 2 * n, k], because)
    because = f"activations_in = {describe(activations_in)} with {experts} experts"
    check_shape(op, "router_logits", router_logits, [m, experts], because, rows=(0,))
    for name, weight, sf in (
        ("expert_scales_up", expert_weights_up, expert_scales_up),
        ("expert_scales_down", expert_weights_down, expert_scales_down),
    ):
        check_dtype(op, name.replace("scales", "weights"), weight, (FP8,))
        _check_blocks(op, name, weight, sf)
    return torch.empty_like(activations_in, memory_format=torch.contiguous_format)


def check_trtllm(
    op: str,
    *,
    routing_logits: Tensor,
    hidden_states: Tensor,
    hidden_states_scale: Tensor,
    num_experts: int,
    **_: Any,
) -> Tensor:
    """Check the activations; return bfloat16 ``[M, H]``. The weights' layouts vary too much to check."""
    check_rank(op, "hidden_states", hidden_states, "[M, H]")
    m, hidden = hidden_states.shape
    because = f"hidden_states = {describe(hidden_states)} with {num_experts} experts"
    check_shape(op, "routing_logits", routing_logits, [m, num_experts], because, rows=(0,))
    if hidden_states.dtype == FP8:
        because = f"hidden_states = {describe(hidden_states)}"
        wanted = [hidden // _BLOCK, m]
        check_shape(op, "hidden_states_scale", hidden_states_scale, wanted, because, rows=(1,))
    return hidden_states.new_empty((m, hidden), dtype=torch.bfloat16)


def _count(op: str, quant_scales: Sequence[Tensor], wanted: int, why: str) -> None:
    if len(quant_scales) != wanted:
        text = f"{op}: {len(quant_scales)} quant_scales given, {why} needs {wanted}; see FlashInfer"
        raise ShapeMismatchError(text)


def _check_blocks(op: str, name: str, weight: Tensor, sf: Tensor) -> None:
    check_dtype(op, name, sf, (torch.float32,))
    groups, n, k = weight.shape
    wanted = [groups, (n + _BLOCK - 1) // _BLOCK, (k + _BLOCK - 1) // _BLOCK]
    check_shape(op, name, sf, wanted, f"{describe(weight)} in ({_BLOCK}, {_BLOCK}) blocks")
