"""Puts fp8 layers in the place of a transformers model's linears and experts, without copying its code."""

from __future__ import annotations

from torch import nn

from fxwarm.demo.layers import Fp8Experts, Fp8Linear, fuse

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
"""Linears that take the same input, which transformers keeps apart and engines concatenate along N."""

KEPT = ("lm_head",)
"""Linears that stay as they are: engines keep the head in bf16. Routers are no linears in transformers."""


def use_fp8(model: nn.Module) -> nn.Module:
    """Replace the linears and experts of ``model`` in place by layers that call DeepGEMM's ops; return it."""
    for module in list(model.modules()):
        for names in FUSED:
            linears = [getattr(module, name, None) for name in names]
            if all(isinstance(linear, nn.Linear) for linear in linears):
                for name, part in zip(names, fuse(linears), strict=True):  # type: ignore[arg-type]
                    setattr(module, name, part)
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name not in KEPT:
                setattr(module, name, Fp8Linear([child]))
            elif isinstance(getattr(child, "gate_up_proj", None), nn.Parameter):
                experts = Fp8Experts(child.gate_up_proj, child.down_proj, child.act_fn)  # type: ignore[arg-type]
                setattr(module, name, experts)
    return model
