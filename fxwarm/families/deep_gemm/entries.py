"""DeepGEMM's entry points by name: their canonical form, their host spellings, how to call them.

One table for all who need it: ``match`` (graph -> canonical call), ``recorder_child`` and ``load``
(canonical call -> the library). No torch here, and nothing heavy: the recorder's child imports it.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

__all__ = [
    "ENTRIES",
    "LOGITS_DTYPES",
    "NO_MODEL",
    "OF_DTYPE",
    "UNCOVERED",
    "Entry",
    "find_function",
    "invoke",
    "spelling",
    "uncovered",
    "unsummed",
]


class Entry(NamedTuple):
    """One entry point. Tensors and attributes have the library's argument names.

    ``positional`` are the arguments in the library's own order; "a,a_sf" is one that it takes as a
    pair. ``optional`` are passed by keyword, and only where the call has them, so that one form
    fits all versions.
    """

    op: str
    positional: tuple[str, ...]
    optional: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Spellings of the op, in graphs and in the library; the canonical one first."""
    returns: bool = False
    """Whether the result is returned: the entry allocates it."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors that every call has, in order."""
        flat = [name for part in self.positional for name in part.split(",")]
        return tuple(name for name in flat if name not in _SCALARS)


_SCALARS = ("expr", "expected_m", "ks", "num_sms", "block_kv", "max_context_len", "head_splits")
_FP8 = ("recipe", "recipe_a", "recipe_b", "compiled_dims", "disable_ue8m0_cast")
_PSUM = ("use_psum_layout", "ensure_zero_padding", "expected_m_for_psum_layout")


def _entries() -> dict[str, Entry]:
    pair = ("a,a_sf", "b,b_sf", "d")
    found: list[Entry] = []
    names: tuple[str, ...]
    optional: tuple[str, ...]
    for form in ("nt", "nn", "tn", "tt"):
        name = f"fp8_gemm_{form}"
        found.append(Entry(name, pair, ("c", *_FP8), (name, f"fp8_fp4_gemm_{form}")))
        name = f"bf16_gemm_{form}"
        found.append(Entry(name, ("a", "b", "d"), ("c", "compiled_dims"), (name,)))
    for form in ("nt", "nn"):
        name = f"m_grouped_fp8_gemm_{form}_contiguous"
        other = f"m_grouped_fp8_fp4_gemm_{form}_contiguous"
        found.append(Entry(name, (*pair, "grouped_layout"), (*_FP8, *_PSUM), (name, other)))
        name = f"m_grouped_bf16_gemm_{form}_contiguous"
        plain = ("a", "b", "d", "grouped_layout")
        found.append(Entry(name, plain, ("compiled_dims", *_PSUM), (name,)))
    masked = ("masked_m", "expected_m")
    names = (
        "m_grouped_fp8_gemm_nt_masked",
        "m_grouped_fp8_fp4_gemm_nt_masked",
        "fp8_m_grouped_gemm_nt_masked",  # the only name that all sgl 0.1.x wheels share
    )
    found.append(Entry(names[0], (*pair, *masked), _FP8, names))
    names = ("m_grouped_bf16_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked")
    found.append(Entry(names[0], ("a", "b", "d", *masked), ("compiled_dims",), names))
    ks = ("ks", "grouped_layout")
    for form in ("nt", "tn"):
        name = f"k_grouped_fp8_gemm_{form}_contiguous"
        optional = ("c", "recipe", "compiled_dims", "use_psum_layout")
        found.append(Entry(name, (*pair, *ks), optional, (name,)))
    name = "k_grouped_bf16_gemm_tn_contiguous"
    optional = ("c", "compiled_dims", "use_psum_layout")
    found.append(Entry(name, ("a", "b", "d", *ks), optional, (name,)))
    prenorm = ("a", "b", "d", "sqr_sum")
    name = "tf32_hc_prenorm_gemm"
    found.append(Entry(name, prenorm, ("num_splits",), (name,)))
    einsum = ("expr", "a", "b", "d")
    found.append(Entry("einsum", einsum, ("c", "use_cublaslt"), ("einsum",)))
    found.append(Entry("fp8_einsum", ("expr", *pair), ("c", "recipe"), ("fp8_einsum",)))
    name = "get_paged_mqa_logits_metadata"
    metadata = ("context_lens", "block_kv", "num_sms")
    found.append(Entry(name, metadata, ("indices",), (name,), returns=True))
    name = "fp8_gemm_nt_skip_head_mid"
    optional = ("recipe", "compiled_dims", "disable_ue8m0_cast")
    found.append(Entry(name, (*pair, "head_splits"), optional, (name,)))
    name = "fp8_mqa_logits"
    window = ("cu_seq_len_k_start", "cu_seq_len_k_end")
    optional = ("clean_logits", "max_seqlen_k", "logits_dtype")
    found.append(Entry(name, ("q", "kv,kv_sf", "weights", *window), optional, (name,), True))
    name = "fp8_paged_mqa_logits"
    paged = ("q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta")
    optional = ("clean_logits", "indices", "logits_dtype")
    found.append(Entry(name, (*paged, "max_context_len"), optional, (name,), True))
    return {entry.op: entry for entry in found}


ENTRIES: dict[str, Entry] = _entries()
"""Canonical op -> entry."""

OF_DTYPE: dict[str, str] = {
    "fp8_mqa_logits": "fp8_fp4_mqa_logits",
    "fp8_paged_mqa_logits": "fp8_fp4_paged_mqa_logits",
}
"""Canonical op -> the function that takes FP8 queries as (q, None), and alone is told the dtype of the logits."""
LOGITS_DTYPES = ("float32", "bfloat16")
"""What logits may be; the first where nothing is said."""

NO_MODEL: dict[str, str] = {
    "fp8_gemm_nt_skip_head_mid": "its epilogue is part of the kernel and is not modelled",
    "fp8_mqa_logits": "the MQA logits kernels are not modelled",
    "fp8_paged_mqa_logits": "the MQA logits kernels are not modelled",
    "k_grouped_fp8_gemm_tn_contiguous": "the transposed k-grouped call is not modelled",
}
"""Canonical ops that only the library itself can name kernels for, and why."""

UNCOVERED: dict[str, str] = {
    "mega_moe": "it needs symmetric buffers of a whole process group, which a warmup has not",
    "mega_mhc": "it needs the buffers of its caller, which a warmup has not",
    "mega_gate": "it needs the buffers of its caller, which a warmup has not",
    "sparse_mqa": "sparse MQA logits are not modelled and depend on index tensors",
    "fp4_mqa_logits": "the FP4 MQA logits kernels are not modelled",
    "fp4_paged_mqa_logits": "the FP4 MQA logits kernels are not modelled",
    "mxfp8_bmm": "it wraps fp8_einsum with scales of granularity 32, which is not modelled",
    "transform_sf_into_required_layout": "its layout kernels are planned with a GEMM only",
    "get_mn_major_tma_aligned": "its layout kernels are planned with a GEMM only",
}
"""Parts of names of DeepGEMM's other entry points: recognised, and reported as gaps."""

_HOST = ("get_symm_buffer", "get_token_alignment", "transform_weights", "_")
"""Beginnings of names that hold such a part and compile nothing."""


def uncovered(name: str) -> str:
    """Return why the entry point ``name`` is not covered; empty where it is, or where it is none."""
    if name in _SPELLINGS or name.startswith(_HOST):
        return ""
    return next((reason for part, reason in UNCOVERED.items() if part in name), "")


def unsummed(expr: str, dtype: str, has_c: bool) -> str:
    """Return why an einsum would end the process; empty where it would not.

    The sum over the batch is added to a float32 d, and the library reads c without asking whether there is one
    (``csrc/apis/einsum.hpp`` of 54e2261).
    """
    if expr.replace(" ", "") != "bmk,bnk->mn" or dtype != "float32" or has_c:
        return ""
    return "a float32 d of bmk,bnk->mn is added to, and without c the library crashes; zero d and pass it as c as well"


_SPELLINGS: dict[str, str] = {name: e.op for e in ENTRIES.values() for name in e.names}


def spelling(name: str) -> str | None:
    """Return the canonical op that ``name`` spells, None if it spells none."""
    return _SPELLINGS.get(name)


def find_function(module: Any, op: str) -> Any:
    """Return the library's function for a canonical op.

    Raises AttributeError that lists the names looked for.
    """
    names = ENTRIES[op].names
    for name in names:
        function = getattr(module, name, None)
        if function is not None:
            return function
    where = getattr(module, "__file__", module)
    raise AttributeError(f"{where} has no {' or '.join(names)}; this build does not export {op}")


def invoke(module: Any, op: str, values: dict[str, Any]) -> Any:
    """Call the library's function for a canonical op; ``values`` are its arguments by name.

    A dtype is its name, as records hold it. Raises AttributeError where the build has no such function.
    """
    entry = ENTRIES[op]
    arguments: list[Any] = []
    for part in entry.positional:
        names = part.split(",")
        arguments.append(values[part] if len(names) == 1 else tuple(values[n] for n in names))
    keywords = {n: values[n] for n in entry.optional if values.get(n) is not None}
    dtype = keywords.pop("logits_dtype", "float32")
    if dtype == "float32":
        return find_function(module, op)(*arguments, **keywords)
    function = getattr(module, OF_DTYPE[op], None)
    if function is None:
        where = getattr(module, "__file__", module)
        raise AttributeError(
            f"{where} has no {OF_DTYPE[op]}; this build writes float32 logits only"
        )
    keywords["logits_dtype"] = getattr(importlib.import_module("torch"), dtype)
    return function((arguments[0], None), *arguments[1:], **keywords)
