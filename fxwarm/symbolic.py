"""A symbolic batch on the first call, without any marking by the user.

A backend runs inside Dynamo's restart loop. Marking the real inputs and raising a restart makes Dynamo trace the
frame again with symbolic sizes: one more trace, no recompile at the next size.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Collection, Iterable
from typing import Any

import torch

from passes.records import Specialization

log = logging.getLogger(__name__)

try:
    from torch._dynamo import exc as _exc

    class Retrace(_exc.TensorifyScalarRestartAnalysis, _exc.UnspecializeRestartAnalysis):
        """Ask Dynamo to trace the frame again.

        Two bases: the first is what Dynamo lets through from a backend, only the second makes it clear its speculation
        log, without which a model whose trace depends on the size fails with SpeculationLogDivergence
        (torch 2.11 to 2.14).
        """
except (ImportError, AttributeError) as _error:  # no restart: plan what Dynamo traced
    log.info("no symbolic retrace on torch %s: %s", torch.__version__, _error)
    Retrace = None  # type: ignore[assignment,misc]

_marked = torch.utils.weak.WeakTensorKeyDictionary()
"""Tensors that are marked now, with the dims: at most one restart a tensor and compile."""
_before = torch.utils.weak.WeakTensorKeyDictionary()
"""What ``_MARKS`` were on a tensor before it was marked."""
_MARKS = (
    "_dynamo_weak_dynamic_indices",
    "_dynamo_unbacked_indices",
    "_dynamo_hint_overrides",
    "_dynamo_unbacked_bounds",
    "_dynamo_shape_ids",
    "_has_dynamo_dim_marking",
)
"""What torch's marking functions set on a tensor (2.11 to 2.14)."""


def retrace_if_static(
    gm: torch.fx.GraphModule, inputs: list[Any], weights: Collection[int], how: str
) -> None:
    """Raise Retrace if an activation of ``gm`` has leading dims that are still plain numbers; else return.

    ``weights`` are the placeholders that hold weights, ``how`` is "dynamic", "unbacked" or "off". ``dynamic=False``,
    ``mark_static`` and torch's own static inputs are respected; so is ``aot_compile``, which has no restart loop.
    """
    if how == "off" or Retrace is None or not torch._dynamo.config.automatic_dynamic_shapes:
        return
    if getattr(torch._functorch.config, "bypass_autograd_cache_key", False):
        return
    todo = [
        (tensor, dims)
        for index, node, tensor in _activations(gm, inputs, weights)
        if tensor not in _marked and (dims := _static_dims(node, tensor, how))
    ]
    for tensor, dims in todo:
        _mark(tensor, dims, how)
    if todo:
        raise Retrace(restart_reason="fxwarm: symbolic batch")


def mark_leading(tensors: Iterable[Any], how: str) -> None:
    """Mark the sizes of a module's inputs that count tokens, so that its first trace is symbolic at once."""
    for tensor in tensors:
        if torch.is_tensor(tensor) and tensor not in _marked and how != "off":
            fixed = getattr(tensor, "_dynamo_static_indices", ())
            dims = [d for d in _leading(tensor) if d not in fixed and tensor.shape[d] >= 2]
            if dims:
                _mark(tensor, dims, how)


def _mark(tensor: torch.Tensor, dims: list[int], how: str) -> None:
    _marked[tensor] = dims
    _before[tensor] = {name: copy.copy(getattr(tensor, name, None)) for name in _MARKS}
    for dim in dims:
        if how == "unbacked":
            torch._dynamo.decorators.mark_unbacked(tensor, dim)
        else:  # not mark_dynamic: that makes an error of a model that specialises on its batch
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def settle(
    gm: torch.fx.GraphModule, inputs: list[Any], weights: Collection[int]
) -> tuple[Specialization, ...]:
    """End what ``retrace_if_static`` began: take the marks off, and return the sizes that the model fixed all the same.

    The tensors are the user's and may be compiled again, by us or by others. To be called before Dynamo makes the
    guards of the frame: they compare these very attributes.
    """
    fixed = _specialized(gm, inputs, weights)
    unmark(inputs)
    return fixed


def unmark(tensors: Iterable[Any]) -> None:
    """Make each tensor what it was before it was marked."""
    for tensor in tensors:
        for name, value in _before.pop(tensor, {}).items() if torch.is_tensor(tensor) else ():
            if value is not None:
                setattr(tensor, name, value)
            elif hasattr(tensor, name):
                delattr(tensor, name)
        if torch.is_tensor(tensor):
            _marked.pop(tensor, None)


def _specialized(
    gm: torch.fx.GraphModule, inputs: list[Any], weights: Collection[int]
) -> tuple[Specialization, ...]:
    """Return the sizes that the model fixed although they were marked, and the line of the user's that did it.

    A tensor of which one leading size stayed symbolic counts as symbolic: of [T, 4, H] the 4 is fixed by every model.
    """
    out = []
    for _, node, tensor in _activations(gm, inputs, weights):
        value: Any = node.meta.get("example_value")
        marked = [d for d in _marked.get(tensor, ()) if value is not None and d < value.dim()]
        sizes = [_fixed(value.shape[d]) for d in marked]
        if any(size is None for size in sizes):
            continue
        for dim, size in zip(marked, sizes, strict=True):
            name = f"{_source(node)}.size()[{dim}]"
            out.append(Specialization(name, int(size or 0), _culprit(value, _source(node), dim)))
    return tuple(out)


def _activations(
    gm: torch.fx.GraphModule, inputs: list[Any], weights: Collection[int]
) -> list[tuple[int, torch.fx.Node, torch.Tensor]]:
    nodes = gm.graph.find_nodes(op="placeholder")
    return [
        (index, node, value)
        for index, (node, value) in enumerate(zip(nodes, inputs, strict=False))
        if index not in weights
        and torch.is_tensor(value)
        and not isinstance(value, (torch.nn.Parameter, torch._subclasses.FakeTensor))
        and not (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
    ]


def _static_dims(node: torch.fx.Node, tensor: torch.Tensor, how: str) -> list[int]:
    fake = node.meta.get("example_value")
    if fake is None or not torch.is_tensor(fake):
        return []
    fixed = getattr(tensor, "_dynamo_static_indices", ())
    return [
        dim
        for dim in _leading(tensor)
        if dim not in fixed
        and isinstance(fake.shape[dim], int)
        # A size of 0 or 1 is specialised by torch in any case, unless it is unbacked.
        and (tensor.shape[dim] >= 2 or (how == "unbacked" and tensor.shape[dim] == 1))
    ]


def _fixed(size: int | torch.SymInt) -> int | None:
    """Return the number that ``size`` is by now, or None while it is symbolic; adds no guard."""
    if isinstance(size, int):
        return size
    expr = size.node.shape_env.simplify(size.node.expr)
    return int(expr) if expr.is_Integer else None


def _leading(tensor: torch.Tensor) -> range:
    """Dims that count tokens: [T], [T, H], [B, S, H]; of token ids [B, S]; of anything deeper only the first."""
    dims = tensor.dim()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return range(min(dims, 2)) if dims <= 2 else range(1)
    return range(2) if dims == 3 else range(min(dims, 1))


def _source(node: torch.fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", node.name)
    return name() if callable(name) else str(name)


def _culprit(value: Any, source: str, dim: int) -> str:
    """Return "file.py:12 in forward" for the line that fixed a size; empty where torch did not note it."""
    mode = getattr(value, "fake_mode", None)
    stacks = getattr(getattr(mode, "shape_env", None), "specialization_stacks", None) or {}
    for known, stack in stacks.items():
        name = known.name() if callable(known.name) else known.name
        if source in name and name.endswith(f"[{dim}]") and stack:
            frame = stack[-1]
            return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""
