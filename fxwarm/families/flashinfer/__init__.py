"""FlashInfer: the fused MoE on Hopper, ``mono_moe``, the autotuned ``bmm_fp8``. Plans without importing it."""

from __future__ import annotations

from fxwarm.families.flashinfer.family import FlashInfer

__all__ = ["FlashInfer"]
