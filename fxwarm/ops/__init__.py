"""Torch ops for kernel libraries that register none, so that their calls are nodes of a graph.

``import fxwarm.ops`` defines them all in ``torch.ops.fxwarm``, once a process, and imports no kernel
library: that happens at the first call on CUDA. On the CPU each op is a reference in plain torch.
"""

from fxwarm.ops import deep_gemm, flashinfer, gemm_forms, k_grouped, mhc, mqa_logits, tile_kernels
from fxwarm.ops._library import use_library
from fxwarm.ops.scales import per_block_cast_to_fp8, per_token_cast_to_fp8

__all__ = [
    "deep_gemm",
    "flashinfer",
    "gemm_forms",
    "k_grouped",
    "mhc",
    "mqa_logits",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp8",
    "tile_kernels",
    "use_library",
]
