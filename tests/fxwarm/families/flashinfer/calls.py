"""Records of FlashInfer calls for the tests, without a graph."""

from __future__ import annotations

from passes.records import Dim, KernelCall, Symbol, TensorSpec


def rows(expr: str, upper: int, factor: int = 1) -> tuple[Dim, Symbol]:
    symbol = Symbol("s0", 1, upper)
    return Dim(expr, factor, factor * upper, ((factor, factor * upper, factor),)), symbol


def spec(dtype: str, *dims: Dim | int) -> TensorSpec:
    return TensorSpec(dtype, tuple(d if isinstance(d, Dim) else Dim.static(d) for d in dims))


def moe(
    upper: int = 1024,
    *,
    experts: int = 32,
    hidden: int = 2048,
    inter: int = 768,
    top_k: int = 8,
    dtype: str = "bfloat16",
    factor: int = 1,
    **attrs,
) -> KernelCall:
    """``cutlass_fused_moe`` for 1..upper tokens, or each ``factor`` of them."""
    m, symbol = rows("s0" if factor == 1 else f"{factor}*s0", upper, factor)
    x = "bfloat16" if attrs.get("use_deepseek_fp8_block_scale") else dtype
    tensors = {
        "input": spec(x, m, hidden),
        "token_selected_experts": spec("int32", m, top_k),
        "fc1_expert_weights": spec(dtype, experts, 2 * inter, hidden),
        "fc2_expert_weights": spec(dtype, experts, hidden, inter),
        "token_final_scales": spec("float32", m, top_k),
    }
    if attrs.get("use_deepseek_fp8_block_scale"):
        tensors["quant_scales.0"] = spec("float32", experts, 2 * inter // 128, hidden // 128)
        tensors["quant_scales.1"] = spec("float32", experts, hidden // 128, inter // 128)
    named = {"output_dtype": "bfloat16", "tune_max_num_tokens": 8192, **attrs}
    return KernelCall(
        "flashinfer", "cutlass_fused_moe", tuple(tensors.items()), tuple(named.items()), (symbol,)
    )


def block_scale_moe(upper: int = 8192, **sizes) -> KernelCall:
    return moe(upper, dtype="float8_e4m3fn", use_deepseek_fp8_block_scale=True, **sizes)


def bmm(upper: int = 64, *, n: int = 4096, k: int = 512, batch: int = 1, **attrs) -> KernelCall:
    """``bmm_fp8`` with a column-major weight."""
    m, symbol = rows("s0", upper)
    weight = TensorSpec(
        "float8_e4m3fn", tuple(map(Dim.static, (batch, k, n))), (str(k * n), "1", str(k))
    )
    tensors = {
        "A": spec("float8_e4m3fn", batch, m, k),
        "B": weight,
        "A_scale": spec("float32", 1),
        "B_scale": spec("float32", 1),
    }
    named = {"dtype": "bfloat16", **attrs}
    return KernelCall(
        "flashinfer", "bmm_fp8", tuple(tensors.items()), tuple(named.items()), (symbol,)
    )


def mono(upper: int = 8, *, experts: int = 256, hidden: int = 2048, inter: int = 512) -> KernelCall:
    m, symbol = rows("s0", upper)
    tensors = {
        "activations_in": spec("bfloat16", m, hidden),
        "router_logits": spec("bfloat16", m, experts),
        "expert_weights_up": spec("float8_e4m3fn", experts, 2 * inter, hidden),
        "expert_weights_down": spec("float8_e4m3fn", experts, hidden, inter),
        "expert_scales_up": spec("float32", experts, 2 * inter // 128, hidden // 128),
        "expert_scales_down": spec("float32", experts, hidden // 128, inter // 128),
    }
    return KernelCall("flashinfer", "mono_moe", tuple(tensors.items()), (("top_k", 8),), (symbol,))


def trtllm(upper: int = 4096) -> KernelCall:
    m, symbol = rows("s0", upper)
    tensors = {
        "hidden_states": spec("float8_e4m3fn", m, 7168),
        "gemm1_weights": spec("float8_e4m3fn", 32, 4096, 7168),
        "gemm2_weights": spec("float8_e4m3fn", 32, 7168, 2048),
        "routing_logits": spec("float32", m, 256),
    }
    attrs = {"num_experts": 256, "top_k": 8, "tune_max_num_tokens": 8192}
    return KernelCall(
        "flashinfer",
        "trtllm_fp8_block_scale_moe",
        tuple(tensors.items()),
        tuple(attrs.items()),
        (symbol,),
    )
