"""Where an op stands in the model, and where a size comes from: ``layers.3.mlp (model.py:42)``, ``x.shape[0]``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_FRAME = re.compile(r'File "([^"]*)", line (\d+)')
_SEPARATOR = r"[/\\]"
_ITEM = re.compile(
    r"\._(?:modules|parameters|buffers)\[['\"]?([^\]'\"]+)['\"]?\]|\[['\"]?([^\]'\"]+)['\"]?\]"
)


Place = tuple[str, str]
"""A module path and a source line; either may be empty."""


def place_of(node: torch.fx.Node, outer: Place = ("", "")) -> Place:
    """Return the module path and the source line of ``node``; what its graph does not say is that of ``outer``.

    Only the file's own name is kept: directories differ from machine to machine, and records must not.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    line = f"{re.split(_SEPARATOR, frames[-1][0])[-1]}:{frames[-1][1]}" if frames else ""
    return _module_of(node.meta.get("nn_module_stack")) or outer[0], line or outer[1]


def describe(place: Place) -> str:
    """Return ``place`` as text."""
    module, line = place
    return f"{module} ({line})" if module and line else module or line


def _module_of(stack: Any) -> str:
    """Return the path of the innermost module: ``L['self']._modules['layers'][3].mlp`` becomes ``layers.3.mlp``."""
    if not stack:
        return ""
    last = list(stack.values())[-1]
    path = str(last[0] if isinstance(last, tuple | list) else last)
    root = re.match(r"L\['\w+'\]", path)
    path = path[root.end() :] if root else path
    return _ITEM.sub(lambda m: f".{m[1] or m[2]}", path).strip(".")


def name_of(source: Any) -> str:
    """Return a torch source in the model's words: ``L['x'].size()[0]`` is ``x.shape[0]``."""
    # a method before torch 2.11
    name = str(source.name() if callable(source.name) else source.name)
    match = re.fullmatch(r"L\['(\w+)'\](.*?)(?:\.size\(\)\[(\d+)\])?", name)
    if not match:
        return name
    root, path, dim = match.groups()
    return root + path + (f".shape[{dim}]" if dim is not None else "")
