"""DeepGEMM's choice of kernels, as pure arithmetic: no GPU, no torch, no kernel library.

``gemm_kernels(fp8_gemm_nt(2112, 7168, version), (1, 8192), version)`` is every kernel that this
weight can need at any of these M, each with the smallest M that makes the library pick it. It
imports the standard library and numpy alone, and raises instead of guessing.
"""

from __future__ import annotations

from fxwarm.families.deep_gemm.heuristics.attainable import Values
from fxwarm.families.deep_gemm.heuristics.batch import (
    aligned_batches,
    einsum_bmk_bnk_mn_kernels,
    paged_mqa_logits_metadata_kernels,
)
from fxwarm.families.deep_gemm.heuristics.calls import (
    bf16_gemm_nt,
    einsum_bhd_hdr_bhr,
    einsum_bhr_hdr_bhd,
    fp8_einsum_bhr_hdr_bhd,
    fp8_gemm_nt,
)
from fxwarm.families.deep_gemm.heuristics.descriptor import Gemm, Settings
from fxwarm.families.deep_gemm.heuristics.errors import (
    HeuristicsError,
    UnknownVersion,
    Unmodelled,
)
from fxwarm.families.deep_gemm.heuristics.grouped_calls import (
    k_grouped_bf16_gemm_tn_contiguous,
    k_grouped_fp8_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from fxwarm.families.deep_gemm.heuristics.kernel import Config, Kernel
from fxwarm.families.deep_gemm.heuristics.layout import (
    column_major,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    layout_kernels,
    pack_fp32_into_ue8m0,
    row_major,
    tma_aligned,
)
from fxwarm.families.deep_gemm.heuristics.prenorm import (
    compute_num_split,
    prenorm_kernels,
    tf32_hc_prenorm_gemm,
)
from fxwarm.families.deep_gemm.heuristics.selection import (
    gemm_kernels,
    get_best_config,
    interval_firsts,
    kernel_at,
)
from fxwarm.families.deep_gemm.heuristics.sm100 import (
    get_theoretical_mk_alignment_for_contiguous_layout,
)
from fxwarm.families.deep_gemm.heuristics.versions import (
    Version,
    default_compiled_dims,
    newest,
    resolve_version,
    uses_cublaslt,
)

__all__ = [
    "Config",
    "Gemm",
    "HeuristicsError",
    "Kernel",
    "Settings",
    "UnknownVersion",
    "Unmodelled",
    "Values",
    "Version",
    "aligned_batches",
    "bf16_gemm_nt",
    "column_major",
    "compute_num_split",
    "default_compiled_dims",
    "einsum_bhd_hdr_bhr",
    "einsum_bhr_hdr_bhd",
    "einsum_bmk_bnk_mn_kernels",
    "fp8_einsum_bhr_hdr_bhd",
    "fp8_gemm_nt",
    "gemm_kernels",
    "get_best_config",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "interval_firsts",
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "kernel_at",
    "layout_kernels",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "newest",
    "pack_fp32_into_ue8m0",
    "paged_mqa_logits_metadata_kernels",
    "prenorm_kernels",
    "resolve_version",
    "row_major",
    "tf32_hc_prenorm_gemm",
    "tma_aligned",
    "uses_cublaslt",
]
