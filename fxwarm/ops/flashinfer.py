"""FlashInfer's MoE and FP8 calls as torch ops: ``torch.ops.fxwarm.cutlass_fused_moe`` and its kin.

FlashInfer registers no torch op for them, and a call of theirs breaks the graph. These ops carry the
library's own argument names (0.6.18.post1) and return one fresh tensor:

    x: "bf16[s77, 2048]", ids: "i32[s77, 8]", scales: "f32[s77, 8]", w13: "bf16[128, 1536, 2048]"
    y: "bf16[s77, 2048]" = torch.ops.fxwarm.cutlass_fused_moe(x, ids, scales, w13, w2, torch.bfloat16, [])

Whatever enters the tuner's key is an argument, so a node says it all; a value that the installed version
does not know must be left at its default. Left out, because an op that returns a fresh tensor cannot have
them: ``output``, ``workspace_buffer``, ``scratchpad``, ``routing_replay_out`` and the unfinalized results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fxwarm.ops import _moe, _moe_checks
from fxwarm.ops._define import define_op
from fxwarm.ops._library import Function

_MOE_WEIGHTS = (
    "Tensor gemm1_weights, Tensor gemm1_weights_scale, "
    "Tensor gemm2_weights, Tensor gemm2_weights_scale"
)


Adapt = Callable[[Any, dict[str, Any]], None]
_REQUIRED = object()


def _call_by_name(
    schema: str, function: Function, adapt: Adapt | None = None
) -> Callable[..., Any]:
    """Return the CUDA side of an op whose arguments are keywords of ``function``.

    Defaults are passed too where the installed version knows the argument, for its own may differ.
    ``adapt`` gets the library and the arguments to change.
    """
    arguments = torch._C.parse_schema(f"fxwarm::{schema}").arguments
    names = [argument.name for argument in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def is_set(name: str, value: Any) -> bool:
        default = defaults.get(name, _REQUIRED)
        return value is not default and (isinstance(value, torch.Tensor) or value != default)

    def call(*args: Any, **kwargs: Any) -> Any:
        callee = function.resolve()
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        known = function.accepted
        if known is not None and not known.issuperset(given):
            function.require([name for name, value in given.items() if is_set(name, value)])
            given = {name: value for name, value in given.items() if name in known}
        if adapt is not None:
            adapt(function.module, given)
        out = callee(**given)
        return out[0] if isinstance(out, list | tuple) else out  # cutlass_fused_moe returns four

    return call


def _define(
    schema: str,
    module: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    adapt: Adapt | None = None,
) -> torch._ops.OpOverload:
    """Define the op of ``schema`` for the function of its name in ``module``; ``fake`` is told the name first."""
    name = schema[: schema.index("(")]
    cuda = _call_by_name(schema, Function(module, name), adapt)
    return define_op(schema, fake=partial(fake, name), cpu=cpu, cuda=cuda, by_name=True)


def _name_activation(module: Any, given: dict[str, Any]) -> None:
    # the tuner's file holds the name of the enum's member, so a bare number would be another key
    given["activation_type"] = module.ActivationType(given["activation_type"])


cutlass_fused_moe = _define(
    "cutlass_fused_moe(Tensor input, Tensor token_selected_experts, Tensor token_final_scales, "
    "Tensor fc1_expert_weights, Tensor fc2_expert_weights, ScalarType output_dtype, "
    "Tensor[] quant_scales, Tensor? fc1_expert_biases=None, Tensor? fc2_expert_biases=None, "
    "Tensor? input_sf=None, Tensor? swiglu_alpha=None, Tensor? swiglu_beta=None, "
    "Tensor? swiglu_limit=None, int tp_size=1, int tp_rank=0, int ep_size=1, int ep_rank=0, "
    "int cluster_size=1, int cluster_rank=0, bool enable_alltoall=False, "
    "bool use_deepseek_fp8_block_scale=False, bool use_w4_group_scaling=False, "
    "bool use_mxfp8_act_scaling=False, bool min_latency_mode=False, bool use_packed_weights=False, "
    "bool use_wfp4afp8_humming=False, int tune_max_num_tokens=8192, bool? enable_pdl=None, "
    "int activation_type=3, bool swizzled_input_sf=True, bool use_fused_finalize=True, "
    "int[]? profile_ids=None) -> Tensor",
    "flashinfer.fused_moe",
    fake=_moe_checks.check_cutlass,
    cpu=_moe.cutlass,
    adapt=_name_activation,
)
"""One MoE layer: ``[M, H] -> [M, H]``. ``fc1_expert_weights`` is ``[E, 2I, H]``, the up half first."""

bmm_fp8 = _define(
    "bmm_fp8(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, ScalarType dtype, "
    'str backend="cublas") -> Tensor',
    "flashinfer",
    fake=_moe_checks.check_bmm,
    cpu=_moe.bmm,
)
"""``[b, M, K] @ [b, K, N] -> [b, M, N]`` with one scale a tensor; ``B`` is column-major on CUDA."""

fp8_blockscale_gemm_sm90 = _define(
    "fp8_blockscale_gemm_sm90(Tensor input, Tensor weight, Tensor? input_scale=None, "
    "Tensor? weight_scale=None, ScalarType? out_dtype=None) -> Tensor",
    "flashinfer.gemm",
    fake=_moe_checks.check_block_scale,
    cpu=_moe.block_scale,
)
"""``[M, K] @ [N, K].T -> [M, N]`` in DeepSeek's blocks; its kernels are compiled by nvcc at call time. SM90."""

mono_moe = _define(
    "mono_moe(Tensor activations_in, Tensor router_logits, Tensor expert_weights_up, "
    "Tensor expert_scales_up, Tensor expert_weights_down, Tensor expert_scales_down, int top_k, "
    'str scoring_func="softmax", bool renormalize=True, bool interleave_up=True) -> Tensor',
    "flashinfer.fused_moe",
    fake=_moe_checks.check_mono,
    cpu=_moe.mono,
)
"""Routing and MoE in one kernel, ``[M, K] -> [M, K]``. Here the gate half of the up weights comes first.

On CUDA: SM90, M <= 8, and E, N, K = 256, 512, 2048 (0.6.18.post1), which the library asserts, not the fake.
"""

trtllm_fp8_block_scale_moe = _define(
    "trtllm_fp8_block_scale_moe(Tensor routing_logits, Tensor? routing_bias, Tensor hidden_states, "
    f"Tensor hidden_states_scale, {_MOE_WEIGHTS}, int num_experts, int top_k, int? n_group, "
    "int? topk_group, int intermediate_size, int local_expert_offset, int local_num_experts, "
    "float? routed_scaling_factor, int routing_method_type=0, bool use_shuffled_weight=False, "
    "int weight_layout=0, bool? enable_pdl=None, int tune_max_num_tokens=8192, "
    "int activation_type=3, bool norm_topk_prob=True) -> Tensor",
    "flashinfer.fused_moe",
    fake=_moe_checks.check_trtllm,
    cpu=_moe.trtllm,
)
"""SM100: routing and MoE with DeepSeek's FP8 blocks, finalized, ``[M, H] -> bfloat16[M, H]``. No CPU side."""
