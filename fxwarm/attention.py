"""Attention that torch hands to cuDNN, which plans each new shape at its first call: seen, not warmed.

    q: "bf16[1, 32, s77, 128]"
    _scaled_dot_product_cudnn_attention(q, k, v, ...) -> gap

Only the graph after AOTAutograd says which implementation torch chose. A plan is for one shape, so that no warmup over a
range is possible; torch's other implementations have none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from passes.graphs import value_of
from passes.places import describe, place_of
from passes.records import Gap

_FORWARD = "aten::_scaled_dot_product_cudnn_attention"
_NAMES = (_FORWARD, f"{_FORWARD}_backward")
_REASON = (
    "cuDNN plans attention anew for each shape that it has not seen (50 ms on an H200, 0.7 s where it also compiles), "
    "which no warmup covers; torch.backends.cuda.enable_cudnn_sdp(False) before the model is compiled chooses torch's own "
    "kernels, which come compiled; long prompts may take longer with them. Clear torch's compile cache as well: its key "
    "does not hold this switch"
)


def find_cudnn_attention(gm: torch.fx.GraphModule) -> tuple[Gap, ...]:
    """Return a gap where ``gm`` calls cuDNN's attention with sizes that vary; what is static is planned with the first call."""
    for node in _nodes(gm):
        if _name(node) in _NAMES and _varies(node):
            return (Gap(_FORWARD, _REASON, describe(place_of(node))),)
    return ()


def attends(gm: torch.fx.GraphModule) -> bool:
    """Return whether Dynamo's graph has attention on a CUDA device for which torch may yet choose cuDNN's."""
    return torch.backends.cuda.cudnn_sdp_enabled() and any(
        node.target is torch.nn.functional.scaled_dot_product_attention
        and any(tensor.device.type == "cuda" for tensor in _tensors(node))
        for node in _nodes(gm)
    )


def _nodes(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the nodes of ``gm`` and of the bodies within."""
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


def _name(node: torch.fx.Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    values = (value_of(n) for n in node.all_input_nodes)
    return [value for value in values if isinstance(value, torch.Tensor)]


def _varies(node: torch.fx.Node) -> bool:
    return any(not isinstance(size, int) for tensor in _tensors(node) for size in tensor.shape)
