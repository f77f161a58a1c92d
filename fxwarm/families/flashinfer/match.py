"""Recognise FlashInfer's calls in a graph, whatever namespace they have, and give each its canonical form.

Graph:
    y: "bf16[s77, 2048]" = fxwarm.cutlass_fused_moe(x, ids, scales, w13, w2, torch.bfloat16, [])

Facts:
    KernelCall(flashinfer, cutlass_fused_moe, input=bf16[s0, 2048], token_selected_experts=i32[s0, 8], ...)

FlashInfer registers no op of its own: a node is ``fxwarm::``'s, or one of an engine with the same argument names.
A tensor list becomes one tensor an element, ``quant_scales.0`` and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fxwarm.families.flashinfer.entries import ENTRIES, SPELLINGS, UNCOVERED, Entry
from passes.records import Gap, KernelCall

if TYPE_CHECKING:
    from passes.flatten import OpCall

__all__ = ["FAMILY", "match"]

FAMILY = "flashinfer"

SMALL_M = 32
"""Rows below which vLLM's ``dynamic_flashinfer_deepgemm_blockscale_gemm`` calls FlashInfer."""


def match(op: OpCall) -> Iterable[KernelCall | Gap]:
    """Return the FlashInfer call that ``op`` makes; empty if it is none of FlashInfer's."""
    if op.name == "dynamic_flashinfer_deepgemm_blockscale_gemm":
        return _canonical(op, ENTRIES["fp8_blockscale_gemm_sm90"], {"max_rows": SMALL_M - 1})
    canonical = SPELLINGS.get(op.name)
    if canonical is not None:
        return _canonical(op, ENTRIES[canonical], {})
    if op.name in UNCOVERED:
        reason = f"{op.name} is tuned at its first call, and {UNCOVERED[op.name]}"
        return (Gap(f"{op.namespace}::{op.name}", reason, str(op.place or ""), FAMILY),)
    return ()


def _canonical(op: OpCall, entry: Entry, more: dict[str, Any]) -> tuple[KernelCall, ...]:
    tensors: dict[str, Any] = {}
    attrs: dict[str, Any] = dict(more)
    for given, value in op.arguments.items():
        name = entry.aliases.get(given, given)
        if _is_tensor(value):
            tensors[name] = value
        elif isinstance(value, (tuple, list)) and any(map(_is_tensor, value)):
            tensors.update(
                {f"{name}.{i}": part for i, part in enumerate(value) if _is_tensor(part)}
            )
        elif value not in (None, (), []) and not (
            name in entry.defaults and value == entry.defaults[name]
        ):
            attrs[name] = _plain(value)
    if not all(name in tensors for name in entry.required):
        return ()
    if more:  # the host's own switches, which the library's function does not know
        attrs = {"max_rows": attrs["max_rows"]}
    rest = [name for name in tensors if name not in entry.required]
    return (op.call(FAMILY, entry.op, {n: tensors[n] for n in (*entry.required, *rest)}, attrs),)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_plain(v) for v in value)
    text = str(value)
    return text.removeprefix("torch.") if text.startswith("torch.") else value
