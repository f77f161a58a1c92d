"""What a graph holds before anything is asked of it: its inputs, the values of its nodes, its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from passes.calls import Bounder
from passes.places import name_of
from passes.sizes import Sizes

if TYPE_CHECKING:
    import torch
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


def make_bounder(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    max_size: int = 8192,
    ranges: Mapping[Any, Any] | None = None,
) -> Bounder:
    """Return what bounds the sizes of ``gm``.

    A tensor that is neither an argument nor a Parameter has symbolic sizes under ``dynamic=True``; its real sizes, read
    from ``example_inputs``, then replace these symbols everywhere: N and K are a weight's, and a weight does not change.
    """
    holes = placeholders_of(gm)
    values = [value_of(hole) for hole in holes]
    sources = [getattr(hole, "_dynamo_source", None) for hole in holes]
    names = [hole.name if s is None else name_of(s) for hole, s in zip(holes, sources, strict=True)]
    sizes = Sizes(
        _shape_env_of(gm),
        max_size=max_size,
        inputs=dict(zip(names, values, strict=True)),
        ranges=ranges,
        pins=_pins_of(holes, values, example_inputs),
    )
    return Bounder(sizes)


def _pins_of(
    holes: Sequence[torch.fx.Node], values: Sequence[Any], example_inputs: Sequence[Any]
) -> dict[Any, int]:
    """Return the one value of each symbol that is a size of a tensor that stays."""
    import torch

    pins: dict[Any, int] = {}
    for hole, value, real in zip(holes, values, example_inputs, strict=False):
        if not isinstance(value, torch.Tensor) or not isinstance(real, torch.Tensor):
            continue
        if not isinstance(real, torch.nn.Parameter) and _is_argument(hole):
            continue
        for size, number in zip(value.shape, real.shape, strict=False):
            expr = getattr(getattr(size, "node", None), "expr", None)
            if expr is not None and expr.is_Symbol and type(number) is int:
                pins[expr] = number
    return pins


def _is_argument(hole: torch.fx.Node) -> bool:
    """Whether an input of the graph may be another tensor at the next call: no module's, global's or closure's is."""
    if (hole.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"):
        return False
    root: Any = getattr(hole, "_dynamo_source", None)
    while getattr(root, "base", None) is not None:
        root = root.base
    # An argument that an inner function captures is the content of a cell as well, but an input of the frame.
    from_cell = getattr(root, "is_derefed_cell_contents", False)
    return type(root).__name__ != "GlobalSource" and (
        not from_cell or getattr(root, "is_input", False)
    )


def placeholders_of(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the placeholders of ``gm`` in order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def _shape_env_of(gm: torch.fx.GraphModule) -> ShapeEnv | None:
    """Return the ShapeEnv behind the sizes of ``gm``, from its first symbolic size."""
    for node in gm.graph.nodes:
        for value in flat([value_of(node)]):
            for size in (*getattr(value, "shape", ()), value):
                env = getattr(getattr(size, "node", None), "shape_env", None)
                if env is not None:
                    return env  # type: ignore[no-any-return]
    return None


def value_of(node: torch.fx.Node) -> Any:
    """Return the fake value of ``node`` (Dynamo's or AOTAutograd's), or the tensor that a get_attr node holds."""
    import torch

    for key in ("example_value", "val"):
        if key in node.meta:
            return node.meta[key]
    if node.op == "get_attr":
        held: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            held = getattr(held, part, None)
        return held if isinstance(held, torch.Tensor) else None
    return None


def flat(values: Any) -> list[Any]:
    """Return the leaves of nested tuples and lists."""
    out: list[Any] = []
    for value in values:
        out += flat(value) if isinstance(value, tuple | list) else [value]
    return out
