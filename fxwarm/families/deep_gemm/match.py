"""Recognise DeepGEMM calls in a graph, whatever host makes them, and give each its canonical form.

An op is known by its name and the names in its schema, never by its namespace: the same call is
``fxwarm::fp8_gemm_nt``, ``deep_gemm::fp8_fp4_gemm_nt``, ``vllm::fp8_gemm_nt_op``,
``sglang::deep_gemm_fp8_fp8_bf16_nt``, or lives under a namespace with a build hash in it.

Graph:
    fp8_gemm_nt_op(q: f8e4m3[s77, 7168], scale, w: f8e4m3[2112, 7168], w_scale, out: bf16[s77, 2112])

Facts:
    KernelCall(deep_gemm, fp8_gemm_nt, a=f8e4m3[s0, 7168], ..., d=bf16[s0, 2112])

Source of the schemas: sgl-deep-gemm 0.2.5, vLLM 0.33, SGLang 0.5.23, hub kernels 2.3.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fxwarm.families.deep_gemm import shapes
from fxwarm.families.deep_gemm.entries import ENTRIES, UNCOVERED, Entry, spelling
from fxwarm.families.mhc import splits as mhc_splits

if TYPE_CHECKING:
    from passes.calls import SymTensor
    from passes.flatten import OpCall
    from passes.records import Gap, KernelCall

__all__ = ["FAMILY", "match"]

FAMILY = "deep_gemm"

SMALL_M = 32
"""Rows below which vLLM's ``dynamic_flashinfer_deepgemm_blockscale_gemm`` does not call DeepGEMM."""

_ALIASES: dict[str, tuple[str, ...]] = {
    "a": ("a", "a_data", "q_input", "A", "lhs"),
    "a_sf": ("a_sf", "a_scale", "input_scale", "As", "lhs_scales"),
    "b": ("b", "b_data", "weight", "B", "rhs"),
    "b_sf": ("b_sf", "b_scale", "weight_scale", "Bs", "rhs_scales"),
    "d": ("d", "output", "C", "out"),
    "grouped_layout": ("grouped_layout", "m_indices"),
    "ks": ("ks", "ks_cpu"),
    "kv": ("kv", "kv_data"),
    "expr": ("expr", "equation"),
    "cu_seq_len_k_start": ("cu_seq_len_k_start", "ks"),
    "cu_seq_len_k_end": ("cu_seq_len_k_end", "ke"),
}
_WRAPPERS = {
    "fp8_gemm_nt_op": "fp8_gemm_nt",
    "deep_gemm_fp8_fp8_bf16_nt": "fp8_gemm_nt",
}
_QUIET: dict[str, Any] = {
    "disable_ue8m0_cast": False,
    "use_psum_layout": False,
    "ensure_zero_padding": True,
    "use_cublaslt": False,
    "logits_dtype": "float32",
}
"""Defaults that all versions share: a call that spells them out is the same call."""


def match(op: OpCall) -> Iterable[KernelCall | Gap]:
    """Return the DeepGEMM calls that ``op`` makes; empty if it is none of DeepGEMM's.

    Raises ShapeMismatchError (a ValueError), which shows both shapes, for tensors that contradict
    each other.
    """
    name = op.name
    if name == "dynamic_flashinfer_deepgemm_blockscale_gemm":
        return _dynamic(op)
    canonical = _WRAPPERS.get(name) or spelling(name)
    if canonical is not None:
        found = _canonical(op, ENTRIES[canonical])
        return () if found is None else (found,)
    for part, reason in UNCOVERED.items():
        if part in name:
            return (_gap(op, reason),)
    prenorm = mhc_splits.prenorm_call(op)  # an mHC op runs one of our GEMMs before its own kernel
    return () if prenorm is None else (prenorm,)


def _canonical(op: OpCall, entry: Entry) -> KernelCall | None:
    given = op.arguments
    values: dict[str, Any] = {}
    required = [name for part in entry.positional for name in part.split(",")]
    for name in (*required, *entry.optional):
        source = next((n for n in _ALIASES.get(name, (name,)) if n in given), None)
        if source is not None:
            values[name] = given[source]
    if "recipe" in entry.optional:
        for recipe in ("recipe", "recipe_a", "recipe_b"):
            values.setdefault(recipe, _flattened(given, recipe))
    if "use_deep_gemm_e8m0" in given:
        values["disable_ue8m0_cast"] = not given["use_deep_gemm_e8m0"]
    tensors = {n: v for n, v in values.items() if _is_tensor(v)}
    if not all(name in tensors for name in entry.tensors):
        return None  # another op of that name: aten::einsum has no output to write
    # an op that spells out a default is the call that does not
    attrs = {
        n: _plain(v)
        for n, v in values.items()
        if n not in tensors and v is not None and not (n in _QUIET and v == _QUIET[n])
    }
    shapes.check(entry.op, {n: tuple(t.shape) for n, t in tensors.items()}, _dtypes(tensors), attrs)
    ordered = {n: tensors[n] for n in (*entry.tensors, *entry.optional) if n in tensors}
    return op.call(FAMILY, entry.op, shapes.unify(entry.op, ordered, attrs), attrs)


def _dynamic(op: OpCall) -> tuple[KernelCall, ...]:
    """vLLM's Hopper default quantises x by itself; from 32 rows on it calls DeepGEMM.

    Its scales are MN-major and not padded, as ``per_token_group_quant_fp8`` lays them out.
    """
    given: Mapping[str, Any] = op.arguments
    x, w, w_scale = (given[name] for name in ("x", "w", "w_scale"))
    if len(x.shape) != 2 or len(w.shape) != 2:
        return ()
    m, k = x.shape
    if isinstance(m, int) and m < SMALL_M:
        return ()
    group = given.get("group", given.get("group_size", 128))
    groups = -(-int(k) // int(group))
    tensors = {
        "a": _derived(x, w.dtype, (m, k), (k, 1)),
        "a_sf": _derived(x, "float32", (m, groups), (1, m)),
        "b": w,
        "b_sf": w_scale,
        "d": _derived(x, "bfloat16", (m, w.shape[0]), (w.shape[0], 1)),
    }
    attrs = {} if given.get("e8m0") else {"disable_ue8m0_cast": True}
    shapes.check(
        "fp8_gemm_nt", {n: tuple(t.shape) for n, t in tensors.items()}, _dtypes(tensors), attrs
    )
    call = shapes.at_least(op.call(FAMILY, "fp8_gemm_nt", tensors, attrs), "a", 0, SMALL_M)
    return () if call is None else (call,)


def _derived(like: Any, dtype: str, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> SymTensor:
    from passes.calls import SymTensor

    return SymTensor(dtype, shape, strides, like.device)


def _flattened(given: Mapping[str, Any], recipe: str) -> tuple[int, ...] | None:
    """Hub kernels pass a recipe as ints ``recipe_0``, ``recipe_1``, ...; all 0 or less is None."""
    parts = [given[n] for i in range(3) if (n := f"{recipe}_{i}") in given]
    return tuple(parts) if parts and any(isinstance(p, int) and p > 0 for p in parts) else None


def _plain(value: Any) -> Any:
    return tuple(_plain(v) for v in value) if isinstance(value, (tuple, list)) else value


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "strides")


def _dtypes(tensors: Mapping[str, SymTensor]) -> dict[str, str]:
    return {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}


def _gap(op: OpCall, reason: str) -> Gap:
    from passes.records import Gap

    return Gap(f"{op.namespace}::{op.name}", reason, str(op.place or ""), FAMILY)
