"""A digest of a graph's structure that every process on every machine gives, for where torch gives no key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

_SAYS_ITS_NAME = (
    *(str, OpOverload, OpOverloadPacket, HigherOrderOperator),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def digest_of(gm: GraphModule) -> str:
    """Return "d" and 32 hex digits that name the ops of ``gm``, how they are connected and their plain constants.

    Graph:
        x: "f32[s77, 8]", w: "f32[8]"
        out = toy.scale(x, w)

    Text that is hashed:
        placeholder
        placeholder
        call_function toy.scale (%0,%1) {}
        output ((%2,),) {}

    Shapes are left to the digest of the calls, which knows their ranges. Names of inputs and symbols, and objects with
    an address, are left out, for they vary between graphs that are equal.
    """
    return "d" + hashlib.sha256("\n".join(_lines(gm)).encode()).hexdigest()[:32]


def _lines(gm: Any) -> Iterator[str]:
    places: dict[Node, int] = {}
    for node in gm.graph.nodes:
        places[node] = len(places)
        if node.op == "placeholder":
            yield node.op
            continue
        target = _name(node.target) if node.op.startswith("call_") else ""
        yield f"{node.op} {target} {_text(node.args, places)} {_text(node.kwargs, places)}"
        if node.op in ("get_attr", "call_module"):
            inner: Any = gm
            for part in str(node.target).split("."):
                inner = getattr(inner, part, None)
            if isinstance(inner, GraphModule):
                yield from _lines(inner)


def _text(value: Any, places: dict[Node, int]) -> str:
    if isinstance(value, Node):
        return f"%{places[value]}"
    if isinstance(value, (tuple, list)):
        return f"({','.join(_text(v, places) for v in value)})"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{_text(v, places)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return "slice" + _text((value.start, value.stop, value.step), places)
    if value is None or value is ... or type(value) in (bool, int, float, complex, str):
        return repr(value)
    return _name(value)


def _name(value: Any) -> str:
    if isinstance(value, _SAYS_ITS_NAME):
        return str(value)
    owner = value if hasattr(value, "__qualname__") else type(value)
    home = getattr(owner, "__module__", "")  # a method of a C class has none
    return f"{home}.{owner.__qualname__}"  # its own text may hold its address
