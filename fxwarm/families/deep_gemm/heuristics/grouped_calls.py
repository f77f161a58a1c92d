"""The library's grouped calls, each turned into the ``Gemm`` that its host code describes.

As ``calls``, of which this is the second half.
"""

from __future__ import annotations

from fxwarm.families.deep_gemm.heuristics.descriptor import Dtype, Gemm, Major, Settings
from fxwarm.families.deep_gemm.heuristics.versions import Version, default_compiled_dims

__all__ = [
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
]

_DEFAULT = Settings()


def m_grouped_fp8_gemm_nt_contiguous(
    groups: int,
    n: int,
    k: int,
    version: Version,
    settings: Settings = _DEFAULT,
    *,
    use_psum_layout: bool = False,
    has_expected_m: bool = False,
    compiled_dims: str | None = None,
    major_sfb: Major = "K",
    gran_k: int = 128,
) -> Gemm:
    """Describe a grouped FP8 GEMM over one long M, which is swept.

    With ``use_psum_layout`` and ``expected_m_for_psum_layout`` the latter is swept.
    """
    hopper = settings.arch == 90
    return Gemm(
        "sm90_m_grouped_fp8_gemm_contiguous_1d2d"
        if hopper
        else "sm100_m_grouped_fp8_fp4_gemm_contiguous_1d1d",
        "MGroupedContiguousWithPsumLayout" if use_psum_layout else "MGroupedContiguous",
        "1D2D" if hopper else "1D1D",
        n,
        k,
        groups,
        has_expected_m=_psum_only(use_psum_layout, has_expected_m),
        major_sfb=major_sfb,
        compiled_dims=_grouped_dims(version, compiled_dims),
        gran_k=gran_k,
        settings=settings,
    )


def m_grouped_bf16_gemm_nt_contiguous(
    groups: int,
    n: int,
    k: int,
    version: Version,
    settings: Settings = _DEFAULT,
    *,
    use_psum_layout: bool = False,
    has_expected_m: bool = False,
    major_b: Major = "K",
    compiled_dims: str | None = None,
) -> Gemm:
    """Describe a grouped bf16 GEMM over one long M, which is swept."""
    return Gemm(
        "sm90_m_grouped_bf16_gemm_contiguous"
        if settings.arch == 90
        else "sm100_bf16_m_grouped_gemm_contiguous",
        "MGroupedContiguousWithPsumLayout" if use_psum_layout else "MGroupedContiguous",
        "NoSF",
        n,
        k,
        groups,
        has_expected_m=_psum_only(use_psum_layout, has_expected_m),
        ab_dtype="bf16",
        major_b=major_b,
        compiled_dims=_grouped_dims(version, compiled_dims),
        settings=settings,
    )


def m_grouped_fp8_gemm_nt_masked(
    groups: int,
    n: int,
    k: int,
    version: Version,
    settings: Settings = _DEFAULT,
    *,
    max_m: int | None = None,
    compiled_dims: str | None = None,
    major_sfb: Major = "K",
    gran_k: int = 128,
) -> Gemm:
    """Describe a masked grouped FP8 GEMM; ``expected_m`` is swept, max_m enters no kernel."""
    hopper = settings.arch == 90
    return Gemm(
        "sm90_fp8_m_grouped_gemm_masked_1d2d"
        if hopper
        else "sm100_m_grouped_fp8_fp4_gemm_masked_1d1d",
        "MGroupedMasked",
        "1D2D" if hopper else "1D1D",
        n,
        k,
        groups,
        m=max_m,
        major_sfb=major_sfb,
        compiled_dims=_grouped_dims(version, compiled_dims),
        gran_k=gran_k,
        settings=settings,
    )


def m_grouped_bf16_gemm_nt_masked(
    groups: int,
    n: int,
    k: int,
    version: Version,
    settings: Settings = _DEFAULT,
    *,
    max_m: int | None = None,
    compiled_dims: str | None = None,
) -> Gemm:
    """Describe a masked grouped bf16 GEMM; ``expected_m`` is swept."""
    return Gemm(
        f"sm{settings.arch}_bf16_m_grouped_gemm_masked",
        "MGroupedMasked",
        "NoSF",
        n,
        k,
        groups,
        m=max_m,
        ab_dtype="bf16",
        compiled_dims=_grouped_dims(version, compiled_dims),
        settings=settings,
    )


def k_grouped_fp8_gemm_nt_contiguous(
    groups: int,
    m: int,
    n: int,
    version: Version,
    settings: Settings = _DEFAULT,
    *,
    compiled_dims: str | None = None,
) -> Gemm:
    """Describe a GEMM per group of K rows, D fp32 with C; max(ks) is swept, M is literal."""
    return Gemm(
        "sm90_fp8_gemm_1d1d" if settings.arch == 90 else "sm100_k_grouped_fp8_gemm_1d1d",
        "KGroupedContiguous",
        "1D1D",
        n,
        0,
        groups,
        m=m,
        d_dtype="fp32",
        with_accumulation=True,
        major_a="K" if settings.arch == 90 else "MN",
        major_b="K" if settings.arch == 90 else "MN",
        compiled_dims=_k_grouped_dims(version, compiled_dims),
        settings=settings,
    )


def k_grouped_bf16_gemm_tn_contiguous(
    groups: int,
    m: int,
    n: int,
    version: Version,
    settings: Settings = _DEFAULT,
    *,
    d_dtype: Dtype = "fp32",
    with_accumulation: bool = True,
    compiled_dims: str | None = None,
) -> Gemm:
    """Describe a bf16 GEMM per group of K rows, A and B MN-major; max(ks) is swept."""
    return Gemm(
        f"sm{settings.arch}_bf16_k_grouped_gemm",
        "KGroupedContiguous",
        "NoSF",
        n,
        0,
        groups,
        m=m,
        ab_dtype="bf16",
        d_dtype=d_dtype,
        with_accumulation=with_accumulation,
        major_a="MN",
        major_b="MN",
        compiled_dims=_k_grouped_dims(version, compiled_dims),
        settings=settings,
    )


def _psum_only(use_psum_layout: bool, has_expected_m: bool) -> bool:
    if has_expected_m and not use_psum_layout:
        raise ValueError("expected_m_for_psum_layout needs use_psum_layout=True")
    return has_expected_m


def _grouped_dims(version: Version, compiled_dims: str | None) -> str:
    return default_compiled_dims("m_grouped", version) if compiled_dims is None else compiled_dims


def _k_grouped_dims(version: Version, compiled_dims: str | None) -> str:
    return default_compiled_dims("k_grouped", version) if compiled_dims is None else compiled_dims
