"""Which calls FlashInfer has kernels for, so that the others are said before anything is built for them.

Source: FlashInfer 0.6.18.post1 ``cutlass_fused_moe``, ``mono_moe`` and the requirements of ``bmm_fp8``.
"""

from __future__ import annotations

from fxwarm.families.flashinfer.buckets import LARGEST
from fxwarm.families.flashinfer.entries import module_of
from passes.records import Dim, KernelCall

__all__ = ["MONO_ROWS", "why_not"]

MONO_ROWS = 8
_MONO_SHAPE = (256, 2048, 512)
"""Experts, hidden size and inner size: the one shape that ``mono_moe`` is compiled for."""


def why_not(call: KernelCall, arch: str) -> tuple[str, int]:
    """Return why (part of) ``call`` has no kernel on ``arch``, "" if it all has, and the most rows that have one."""
    try:
        module_of(call.op, arch)
    except ValueError as error:
        return str(error), 0
    reason = ""
    if call.op == "cutlass_fused_moe":
        reason = _fused_moe(call, arch)
    elif call.op == "bmm_fp8":
        backend = call.attr("backend", "cublas")
        if backend not in ("cublas",):
            reason = f"backend={backend!r} of bmm_fp8 is not modelled: it picks among libraries; give backend='cublas'"
    elif call.op == "mono_moe":
        return _mono(call)
    most = call.attr("max_rows")
    return reason, 0 if reason else int(most) if isinstance(most, int) else LARGEST


def _fused_moe(call: KernelCall, arch: str) -> str:
    x, weight = call["input"].dtype, call["fc1_expert_weights"].dtype
    hopper = arch.startswith("sm_90")
    if call.attr("min_latency_mode") is True:
        return "min_latency_mode raises NotImplementedError in FlashInfer; leave it False"
    if call.attr("use_deepseek_fp8_block_scale") is True:
        if not hopper:
            return "FlashInfer has the fp8 block scale of cutlass_fused_moe on SM90 alone; use a trtllm op"
        if (x, weight) != ("bfloat16", "float8_e4m3fn"):
            return f"the fp8 block scale takes bfloat16 input and float8_e4m3fn weights, not {x} and {weight}"
    if hopper and (call.attr("use_mxfp8_act_scaling") is True or weight == "int64"):
        return "FlashInfer has the NVFP4 and MXFP8 modes of cutlass_fused_moe on SM100 and later, not on SM90"
    return ""


def _mono(call: KernelCall) -> tuple[str, int]:
    experts, hidden, inter = call["expert_weights_down"].dims
    shape = tuple(int(d) for d in (experts, hidden, inter))
    if shape != _MONO_SHAPE:
        return (
            f"mono_moe is compiled for [experts, hidden, inner] = {list(_MONO_SHAPE)} alone, not {list(shape)}",
            0,
        )
    rows: Dim = call["activations_in"].dims[0]
    if rows.upper is None or rows.upper > MONO_ROWS:
        most = f"up to {rows.upper}" if rows.upper else "without a bound"
        return (
            f"mono_moe takes at most {MONO_ROWS} rows and raises beyond; these go {most}: branch before it",
            MONO_ROWS,
        )
    return "", MONO_ROWS
