"""How many partial sums an mHC pre-norm GEMM makes: the one rule that specialises two libraries' kernels.

DeepGEMM's ``tf32_hc_prenorm_gemm`` writes that many partial sums and TileLang's fused kernel reduces as many; both
compile the number in. It follows from the token count and the SM count, in blocks of 64 tokens. Imports no torch and
no kernel library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sympy

    from passes.records import Dim, KernelCall

BLOCK = 64
"""Rows of tokens, and columns of K, that one block of the GEMM takes."""

RULES = ("mhc", "mhc_bucketed")
"""What the attribute ``num_splits`` of a call holds where the caller derives it from the tokens at run time."""


def num_splits(tokens: int, k: int, num_sms: int, rule: str = "mhc") -> int:
    """Return the number of K-splits of the mHC pre-norm GEMM at ``tokens`` tokens.

    ``k`` is the width of the GEMM in elements: hc_mult * hidden, or hidden for a first layer that broadcasts. With
    132 SMs and k=28672 it takes 22 values over 1..8192 tokens. The rule "mhc_bucketed" rounds it to 1, 4 or 16.

    Raises ValueError at 0 tokens, where the callers return without a kernel.
    Source: vLLM 0.33 ``compute_num_split``, SGLang 0.5.23 ``_compute_num_split_for_mhc_pre``.
    """
    if tokens < 1:
        raise ValueError(f"{tokens} tokens need no kernel; return before asking for their splits")
    splits = max(1, min(num_sms // -(-tokens // BLOCK), -(-k // BLOCK) // 4))
    if rule == "mhc_bucketed":
        return 1 if splits == 1 else 4 if splits <= 4 else 16
    return splits


def expression(tokens: sympy.Expr | int, k: int, num_sms: int, rule: str = "mhc") -> sympy.Expr:
    """Return ``num_splits`` as an expression of ``tokens``."""
    import sympy

    blocks = sympy.ceiling(sympy.sympify(tokens) / BLOCK)
    splits = sympy.Max(1, sympy.Min(sympy.floor(num_sms / blocks), -(-k // BLOCK) // 4))
    if rule == "mhc_bucketed":
        return sympy.Piecewise((1, splits <= 1), (4, splits <= 4), (16, True))
    return splits


def device_sms(device: Any) -> int:
    """Return the SMs of ``device`` (a torch.device); a CPU counts as many as its target says."""
    if device.type != "cuda":
        from fxwarm import devices

        return devices.CPU_SMS
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def prenorm_call(op: Any) -> KernelCall | None:
    """Return the call of DeepGEMM's ``tf32_hc_prenorm_gemm`` inside the mHC op ``op``; None: it makes none.

    Its attribute ``num_splits`` names the rule, since the SM count is not known before there is a target;
    ``resolve`` turns it into numbers.

    Facts:
        KernelCall(deep_gemm, tf32_hc_prenorm_gemm, a=bfloat16[s0, 16384], b=float32[24, 16384], num_splits="mhc")
    """
    from fxwarm.ops import mhc_calls

    found = mhc_calls.prenorm(op)
    if found is None:
        return None
    a, b, rule = found
    call: KernelCall = op.call("deep_gemm", "tf32_hc_prenorm_gemm", {"a": a, "b": b}, {"num_splits": rule})
    return call


def resolve(call: KernelCall, num_sms: int) -> KernelCall:
    """Return ``call`` with a Dim in the place of a rule in ``num_splits``; any other call as it is."""
    import msgspec

    rule = call.attr("num_splits")
    if rule not in RULES:
        return call
    dim = splits_dim(call, call["a"].dims[0].expr, int(call["a"].dims[1]), num_sms, str(rule))
    attrs = tuple((name, dim if name == "num_splits" else value) for name, value in call.attrs)
    return msgspec.structs.replace(call, attrs=attrs)


def splits_dim(call: KernelCall, tokens: str, k: int, num_sms: int, rule: str) -> Dim:
    """Return the splits of ``call`` as a Dim over its symbols, with the values it can take."""
    from passes import bound, runs
    from passes.records import Dim

    expr = expression(bound.parse(call, tokens), k, num_sms, rule)
    values = sorted({int(row[0]) for row in bound.image(call, expr).rows})
    import numpy as np

    return Dim(str(expr), values[0], values[-1], runs.from_array(np.array(values, np.int64)))
