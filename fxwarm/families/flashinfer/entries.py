"""FlashInfer's entry points by name: where their rows stand, which module holds them, what their tuner keys.

One table for all who need it: ``match`` (graph -> canonical call), ``keys`` (call -> kernels), ``tensors``
(call -> arguments). No torch here, and no library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["ENTRIES", "OPTIONS", "SPELLINGS", "UNCOVERED", "Entry", "module_of"]


class Entry(NamedTuple):
    """One entry point. Tensors and attributes have the library's argument names."""

    op: str
    required: tuple[str, ...]
    """Tensors without which an op of this name is another one."""
    rows: tuple[tuple[str, int], ...]
    """Where the number of tokens stands: (tensor, dim); the first is the one to read."""
    module: str
    """Name of the module that holds it; ``{sm}`` is the architecture's number."""
    tuned: tuple[str, ...] = ()
    """Names under which the tuner keeps its entries."""
    archs: tuple[str, ...] = ("90",)
    home: str = "flashinfer"
    """Module that exports the function."""
    defaults: Mapping[str, Any] = {}
    """A call that spells one of these out is the call that does not."""
    aliases: Mapping[str, str] = {}
    """Other hosts' argument names, and ours."""


OPTIONS: tuple[tuple[str, Any], ...] = (
    ("x_dtype", None),
    ("weight_dtype", None),
    ("output_dtype", None),
    ("top_k", None),
    ("tp_size", 1),
    ("tp_rank", 0),
    ("ep_size", 1),
    ("ep_rank", 0),
    ("cluster_size", 1),
    ("cluster_rank", 0),
    ("enable_alltoall", False),
    ("use_deepseek_fp8_block_scale", False),
    ("use_w4_group_scaling", False),
    ("use_mxfp8_act_scaling", False),
    ("use_wfp4afp8_humming", False),
    ("min_latency_mode", False),
    ("enable_pdl", None),
    ("activation_type", 3),
    ("use_packed_weights", False),
    ("use_fused_finalize", True),
)
"""What decides the tactics of ``cutlass_fused_moe`` besides shapes, in the library's order, with the defaults."""

_MOE_DEFAULTS = {
    **{name: value for name, value in OPTIONS if value is not None},
    "swizzled_input_sf": True,
}
_TRTLLM = ("hidden_states", "gemm1_weights", "gemm2_weights")


def _trtllm(op: str) -> Entry:
    rows = (("hidden_states", 0), ("routing_logits", 0), ("topk_ids", 0), ("expert_weights", 0))
    defaults = {"activation_type": 3, "norm_topk_prob": True, "do_finalize": True}
    home = "flashinfer.fused_moe"
    tuned = (f"flashinfer::{op}",)
    return Entry(
        op, _TRTLLM, rows, "fused_moe_trtllm_sm{sm}", tuned, ("100", "103"), home, defaults
    )


def _entries() -> dict[str, Entry]:
    moe = ("input", "token_selected_experts", "fc1_expert_weights", "fc2_expert_weights")
    rows = (("input", 0), ("token_selected_experts", 0), ("token_final_scales", 0), ("input_sf", 0))
    gemms = ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2")
    archs = ("90", "100", "103")
    home = "flashinfer.fused_moe"
    found = [
        Entry("cutlass_fused_moe", moe, rows, "fused_moe_{sm}", gemms, archs, home, _MOE_DEFAULTS),
        Entry(
            "bmm_fp8",
            ("A", "B"),
            (("A", 1),),
            "gemm",
            ("fp8_gemm",),
            archs,
            defaults={"backend": "cublas"},
        ),
        Entry(
            "mono_moe",
            ("activations_in", "router_logits", "expert_weights_up", "expert_weights_down"),
            (("activations_in", 0), ("router_logits", 0)),
            "monomoe",
            home=home,
            defaults={"scoring_func": "softmax", "renormalize": True, "interleave_up": True},
        ),
        Entry(
            "fp8_blockscale_gemm_sm90",
            ("input", "weight"),
            (("input", 0), ("input_scale", 0)),
            "fp8_blockscale_gemm_90",
            home="flashinfer.gemm",
            aliases={"x": "input", "w": "weight", "w_scale": "weight_scale"},
        ),
    ]
    for kind in (
        "bf16",
        "fp8_per_tensor_scale",
        "fp8_block_scale",
        "fp4_block_scale",
        "mxint4_block_scale",
    ):
        found += [_trtllm(f"trtllm_{kind}_moe"), _trtllm(f"trtllm_{kind}_routed_moe")]
    return {entry.op: entry for entry in found}


ENTRIES: dict[str, Entry] = _entries()
"""Canonical op -> entry."""

SPELLINGS: dict[str, str] = {
    **{op: op for op in ENTRIES},
    "flashinfer_fp8_blockscale_gemm": "fp8_blockscale_gemm_sm90",
    "flashinfer_bmm_fp8": "bmm_fp8",
}
"""Name of an op in a graph, of whatever namespace -> canonical op."""

UNCOVERED: dict[str, str] = {
    "mm_fp4": "its tuner is not modelled",
    "flashinfer_mm_fp4": "its tuner is not modelled",
    "mm_mxfp8": "its tuner is not modelled",
    "mm_bf16": "backend cublaslt keys M itself up to 0.7.2, so no range can be warmed",
    "cute_dsl_fused_moe_nvfp4": "its kernels are not modelled",
}
"""FlashInfer's other tuned ops: recognised, and reported as gaps."""


def module_of(op: str, arch: str) -> str:
    """Return the name of the module that holds ``op`` on ``arch`` (the compilers' name, as in "sm_90a").

    Raises ValueError where the op does not exist on that architecture.
    """
    entry = ENTRIES[op]
    number = arch.removeprefix("sm_").rstrip("af")
    if number not in entry.archs:
        known = ", ".join(f"SM{a}" for a in entry.archs)
        raise ValueError(f"{op} exists on {known}, not on {arch or 'a CPU'}; plan for such a card")
    return entry.module.format(sm="100" if "trtllm" in entry.module else number)
