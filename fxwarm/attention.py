"""Attention that torch hands to cuDNN, which plans each new shape at its first call: seen, not warmed.

    q: "bf16[1, 32, s77, 128]"
    _scaled_dot_product_cudnn_attention(q, k, v, ...) -> gap

Only the graph after AOTAutograd says which implementation torch chose. A plan is for one shape, so that no warmup over a
range is possible; torch's other implementations have none.
"""

from __future__ import annotations

import torch

from passes.places import describe, place_of
from passes.records import Gap

_OP = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_REASON = (
    "cuDNN plans attention anew for each shape that it has not seen (70 ms on an H200, 0.9 s where it also compiles), "
    "which no warmup covers; torch.backends.cuda.enable_cudnn_sdp(False) before the model is compiled chooses torch's own "
    "kernels, which come compiled; long prompts may take longer with them"
)


def find_cudnn_attention(gm: torch.fx.GraphModule) -> tuple[Gap, ...]:
    """Return a gap where ``gm`` calls cuDNN's attention with sizes that vary; what is static is planned with the first call."""
    node = next((n for n in gm.graph.nodes if n.target is _OP and _varies(n)), None)
    return () if node is None else (Gap(_OP.name(), _REASON, describe(place_of(node))),)


def _varies(node: torch.fx.Node) -> bool:
    values = (n.meta.get("val") for n in node.all_input_nodes)
    return any(
        not isinstance(size, int)
        for value in values
        if isinstance(value, torch.Tensor)
        for size in value.shape
    )
