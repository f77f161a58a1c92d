"""How many partial sums an mHC pre-norm GEMM makes: the one rule that specialises two libraries' kernels.

DeepGEMM's ``tf32_hc_prenorm_gemm`` writes that many partial sums and TileLang's fused kernel reduces as many; both
compile the number in. It follows from the token count and the SM count, in blocks of 64 tokens. Imports no torch and
no kernel library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from passes.records import KernelCall

BLOCK = 64
"""Rows of tokens, and columns of K, that one block of the GEMM takes."""

RULES = ("mhc", "mhc_bucketed")
"""What ``num_splits`` of a call holds where the caller derives it from the tokens at run time, on its device."""


def num_splits(tokens: int, k: int, num_sms: int, rule: str = "mhc") -> int:
    """Return the number of K-splits of the mHC pre-norm GEMM at ``tokens`` tokens.

    ``k`` is the width of the GEMM in elements: hc_mult * hidden, or hidden for a first layer that broadcasts. With
    132 SMs and k=28672 it takes 22 values over 1..8192 tokens. The rule "mhc_bucketed" rounds up to 1, 4 or 16.

    Raises ValueError at 0 tokens, where the callers return without a kernel.
    Source: vLLM 0.33 ``compute_num_split``, SGLang 0.5.23 ``_compute_num_split_for_mhc_pre``.
    """
    if tokens < 1:
        raise ValueError(f"{tokens} tokens need no kernel; return before asking for their splits")
    splits = max(1, min(num_sms // -(-tokens // BLOCK), -(-k // BLOCK) // 4))
    if rule == "mhc_bucketed":
        return 1 if splits == 1 else 4 if splits <= 4 else 16
    return splits


def expression(tokens: str, k: int, num_sms: int, rule: str = "mhc") -> str:
    """Return ``num_splits`` as text over the sizes in ``tokens``, for ``passes.bound``.

    >>> expression("s0", 28672, 132)
    'Max(1, Min(112, 132//Max(1, (s0 + 63)//64)))'
    """
    from passes import expr

    cap = -(-k // BLOCK) // 4
    blocks = f"Max(1, (({tokens}) + {BLOCK - 1})//{BLOCK})"  # at 0 tokens nobody asks, and nothing divides by 0
    splits = f"Max(1, Min({cap}, {num_sms}//{blocks}))"
    if rule == "mhc_bucketed":
        splits = f"Where({splits} <= 1, 1, Where({splits} <= 4, 4, 16))"
    return expr.to_text(expr.parse(splits))


def device_sms(device: Any) -> int:
    """Return the SMs of ``device`` (a torch.device); a CPU counts as many as its target says."""
    if device.type != "cuda":
        from fxwarm import devices

        return devices.CPU_SMS
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def prenorm_call(op: Any) -> KernelCall | None:
    """Return the call of DeepGEMM's ``tf32_hc_prenorm_gemm`` that the mHC op ``op`` makes; None: it makes none.

    Its attribute ``num_splits`` names the rule, for a graph does not know the SM count; ``resolve`` makes it numbers.

    Facts:
        KernelCall(deep_gemm, tf32_hc_prenorm_gemm, a=bfloat16[s0, 16384], b=float32[24, 16384], num_splits="mhc")
    """
    from fxwarm.families.mhc.calls import read

    layer = read(op)
    if layer is None or layer.a is None or layer.b is None:
        return None
    tensors = {"a": layer.a, "b": layer.b}
    call: KernelCall = op.call(
        "deep_gemm", "tf32_hc_prenorm_gemm", tensors, {"num_splits": layer.rule}
    )
    return call


def resolve(call: KernelCall, num_sms: int) -> KernelCall:
    """Return ``call`` with the rule in ``num_splits`` as a Dim, and with its outputs d and sqr_sum.

    Any other call comes back as it is. Raises ValueError for tokens without an upper bound.
    """
    rule = call.attr("num_splits")
    if rule not in RULES:
        return call
    import msgspec

    from passes import bound
    from passes.records import Dim, TensorSpec

    tokens, k = call["a"].dims
    text = expression(tokens.expr, int(k), num_sms, str(rule))
    splits = bound.bound_dim(text, call.symbols, call.guards)
    if splits.is_static:
        splits = Dim.static(int(splits))
    d = TensorSpec("float32", (splits, tokens, call["b"].dims[0]))
    outputs = (("d", d), ("sqr_sum", TensorSpec("float32", (splits, tokens))))
    attrs = tuple((name, splits if name == "num_splits" else value) for name, value in call.attrs)
    return msgspec.structs.replace(call, tensors=(*call.tensors, *outputs), attrs=attrs)
