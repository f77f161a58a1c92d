"""The arguments of a node by the names of its op's schema, as plain values.

    fp8_gemm(x, w, out, recipe=(1, 128, 128))  ->  {"a": f8e4m3[s77, 7168], "b": ..., "out": ..., "recipe": (1, 128, 128)}

What AOTAutograd makes of a mutating op is read back: ``auto_functionalized_v2(op, _all_bases=[y], _out_base_index=0)``
has the argument ``out``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from passes.bound import is_contiguous
from passes.calls import SymTensor, Value
from passes.graphs import value_of
from passes.sizes import Sizes

if TYPE_CHECKING:
    import torch
    from torch._ops import OpOverload, OpOverloadPacket


def overload_of(
    packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> OpOverload:
    """Return the overload of ``packet`` that these arguments fit: ``default`` if it does, else the first."""
    names = sorted(packet.overloads(), key=lambda name: name != "default")
    overloads = [getattr(packet, name) for name in names]
    return next((o for o in overloads if _fits(o, args, kwargs)), overloads[0])


def _fits(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    arguments = overload._schema.arguments
    given = {a.name for a in arguments[: len(args)]} | kwargs.keys()
    return (
        len(args) <= sum(not a.kwarg_only for a in arguments)
        and kwargs.keys() <= {a.name for a in arguments}
        and all(a.name in given or a.has_default_value() for a in arguments)
    )


def bind(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument of a call by its schema name, defaults filled in; values are still nodes."""
    bound = {}
    for at, argument in enumerate(overload._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        bound[argument.name] = args[at] if at < len(args) else kwargs.get(argument.name, default)
    return bound


class View:
    """An argument that ``auto_functionalized_v2`` took apart: a base, and how the op's own argument lies in it."""

    __slots__ = ("base", "how")

    def __init__(self, base: Any, how: Mapping[str, Any]) -> None:
        self.base = base
        self.how = how


def unfunctionalize(overload: OpOverload, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the op inside ``auto_functionalized`` or its second version, by schema name."""
    bases = kwargs.get("_all_bases") or ()

    def view(prefix: str) -> Any:
        index = kwargs.get(f"{prefix}_base_index")
        if index is None:
            return None
        start = len(prefix) + 1
        return View(
            bases[index], {k[start:]: v for k, v in kwargs.items() if k.startswith(f"{prefix}_")}
        )

    bound = bind(overload, (), kwargs)
    for name in bound:
        if (count := kwargs.get(f"_{name}_length")) is not None:
            bound[name] = [view(f"_{name}_{i}") for i in range(count)]
        elif f"_{name}_base_index" in kwargs:
            bound[name] = view(f"_{name}")
    return bound


class Reader:
    """Turns what a node holds into plain values. ``placeholders`` are the graph inputs that nodes stand for."""

    def __init__(self, sizes: Sizes, placeholders: Mapping[torch.fx.Node, int]) -> None:
        self._sizes = sizes
        self._placeholders = placeholders

    def read(self, value: Any) -> Value:  # noqa: PLR0911
        """Return ``value`` as a tensor spec, number, expression, string, or tuple of these.

        dtypes, devices and layouts become their names; objects of any other kind the name of their type.
        """
        import torch

        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.fx.Node):
            return self._read_node(value)
        if isinstance(value, torch.Tensor):
            return "nested tensor" if value.is_nested else self.tensor(value)
        if isinstance(value, tuple | list):
            return tuple(map(self.read, value))
        if isinstance(value, View):
            return self._read_view(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            ragged = not hasattr(value.node, "expr")
            return str(value) if ragged else self._sizes.size(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return str(value)
        if isinstance(value, int | float | str):  # an enum, or numpy's
            return value
        return type(value).__qualname__

    def _read_node(self, node: torch.fx.Node) -> Value:
        import torch

        held = value_of(node)
        if isinstance(held, torch.Tensor) and not held.is_nested:
            return self.tensor(held, self._placeholders.get(node))
        return None if held is None else self.read(held)

    def tensor(self, tensor: torch.Tensor, placeholder: int | None = None) -> SymTensor:
        """Return what is known of a fake or real tensor: of a DTensor the local part, of a wrapper its outside."""
        import torch

        local = getattr(tensor, "_local_tensor", tensor)
        shape = tuple(map(self._sizes.size, local.shape))
        strides = None
        if local.layout == torch.strided:
            strides = tuple(map(self._sizes.size, local.stride()))
            strides = None if is_contiguous(shape, strides) else strides
        dtype = str(tensor.dtype).removeprefix("torch.")
        return SymTensor(dtype, shape, strides, str(tensor.device), placeholder)

    def _read_view(self, view: View) -> Value:
        """Return the tensor that the op gets: its base, sliced or restrided."""
        base = self.read(view.base)
        how = view.how
        if not isinstance(base, SymTensor):
            return base
        if how.get("size") is not None:
            shape = tuple(self._size(s) for s in how["size"])
            strides = tuple(self._size(s) for s in how["stride"])
            return SymTensor(
                base.dtype, shape, None if is_contiguous(shape, strides) else strides, base.device
            )
        if how.get("slice_dim") is None:
            return base
        import sympy

        at = how["slice_dim"]
        whole = base.shape[at]
        start, end = (self._size(how[f"slice_{end}"]) for end in ("start", "end"))
        start = 0 if start is None else start
        if isinstance(start, int) and start < 0:
            start = start + whole
        if end is None or (isinstance(end, int) and end >= 1 << 62):
            end = whole
        elif isinstance(end, int) and end < 0:
            end = end + whole
        elif end != whole:
            end = sympy.Min(end, whole)
        shape = tuple(
            self._sizes.size(sympy.sympify(end - start)) if i == at else s
            for i, s in enumerate(base.shape)
        )
        # what the base's strides were is unchanged by a slice; a contiguous base's have to be written out
        strides = base.strides or _contiguous_strides(base.shape)
        return SymTensor(
            base.dtype, shape, None if is_contiguous(shape, strides) else strides, base.device
        )

    def _size(self, value: Any) -> Any:
        read = self.read(value)
        return read if read is None else self._sizes.size(read)


def _contiguous_strides(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))
