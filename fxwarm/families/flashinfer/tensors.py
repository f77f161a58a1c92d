"""Arguments of a real call: the live weights where they are known, made-up tensors for the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fxwarm.families.flashinfer.entries import ENTRIES
from passes.records import Attr, KernelCall, TensorSpec

if TYPE_CHECKING:
    import torch

    from fxwarm.family import Bind

__all__ = ["make_arguments", "run"]

_OURS = ("max_rows",)
"""Attributes that are not the library's."""


def run(
    call: KernelCall,
    device: torch.device,
    bind: Bind,
    limit: int | None = None,
    rows: Iterable[int] = (),
) -> None:
    """Make the static ``call`` once, outside of any capture, and wait for it. ``limit`` replaces its own.

    And once more, with the same weights, at each other number of ``rows``.
    """
    import torch

    from fxwarm.families.flashinfer.keys import with_rows
    from fxwarm.families.flashinfer.upstream import function_of

    function = function_of(ENTRIES[call.op].home, call.op)
    arguments = make_arguments(call, device, bind)
    if limit is not None:
        arguments["tune_max_num_tokens"] = limit
    _check(call, function, arguments)
    function(**arguments)
    for count in rows:
        other = with_rows(call, count)
        changed = {
            name: _make(other, name, other[name], device)
            for name, _ in ENTRIES[call.op].rows
            if name in call
        }
        function(**{**arguments, **changed})
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_arguments(call: KernelCall, device: torch.device, bind: Bind) -> dict[str, Any]:
    """Return the keyword arguments of the library's function for a static call."""
    live = bind(call) or {}
    arguments: dict[str, Any] = {}
    if call.op == "cutlass_fused_moe":
        arguments["quant_scales"] = []
    for name, spec in call.tensors:
        tensor = live.get(name)
        if tensor is None:
            tensor = _make(call, name, spec, device)
        base, _, index = name.partition(".")
        if index:
            arguments.setdefault(base, []).append(tensor)
        else:
            arguments[name] = tensor
    for name, value in call.attrs:
        if name not in _OURS and value is not None:
            arguments[name] = _plain(call, name, value)
    return arguments


def _plain(call: KernelCall, name: str, value: Attr) -> Any:
    """Return an attribute as the library takes it: a dtype, a member of its enum, a list."""
    import torch

    from fxwarm.families.flashinfer.upstream import activation

    if isinstance(value, str) and name.endswith("dtype"):
        return getattr(torch, value)
    if name == "activation_type" and call.op == "cutlass_fused_moe" and isinstance(value, int):
        return activation(value)
    return list(value) if isinstance(value, tuple) else value


def _make(call: KernelCall, name: str, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    import torch

    shape = [int(d) for d in spec.dims]
    if name in ("token_selected_experts", "topk_ids"):
        return _expert_ids(call, shape, device)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if "scale" in name or name in ("token_final_scales", "input_sf", "expert_weights"):
        return torch.ones(shape, device=device).to(dtype)
    tensor = _filled(shape, dtype, device)
    if spec.strides:
        strides = [int(s) for s in spec.strides]
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(tensor)
    return tensor


def _filled(shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    import torch

    if dtype.itemsize == 1:
        # bytes below 56 are small positive numbers in both fp8 formats, and pairs of small ones in any 4-bit format
        return torch.randint(0, 56, shape, dtype=torch.uint8, device=device).view(dtype)
    if dtype.is_floating_point:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.05)
    return torch.zeros(shape, dtype=dtype, device=device)


def _expert_ids(call: KernelCall, shape: list[int], device: torch.device) -> torch.Tensor:
    """Return ids that are valid and distinct within a row, spread evenly over all experts of all ranks."""
    import torch

    weights = call["fc1_expert_weights"] if "fc1_expert_weights" in call else call["gemm1_weights"]
    local, ranks = int(weights.dims[0]), call.attr("ep_size", 1)
    experts = local * (ranks if isinstance(ranks, int) else 1)
    rows, top_k = shape
    ids = torch.arange(rows * top_k, device=device).reshape(rows, top_k) % max(experts, 1)
    return ids.to(torch.int32)


def _check(call: KernelCall, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raise TypeError, naming them, for arguments that this build does not know."""
    known = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return
    lacking = sorted(set(arguments) - set(known))
    if lacking:
        raise TypeError(
            f"the installed flashinfer has no {', '.join(lacking)} in {call.op}; install a newer one"
        )
