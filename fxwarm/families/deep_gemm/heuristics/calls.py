"""The library's dense and einsum calls, each turned into the ``Gemm`` that its host code describes.

Functions have the library's names; ``n`` and ``k`` are logical dims. ``compiled_dims``
None means the default of that version. ``_nn``, ``_tn``, ``_tt`` and the ``fp8_fp4_`` spellings
are the same calls with other operand majors or another default; pass those.

Source: DeepGEMM ``csrc/apis/gemm.hpp``, ``einsum.hpp`` and the ``GemmDesc`` of each
``jit_kernels/impls`` file.
"""

from __future__ import annotations

from fxwarm.families.deep_gemm.heuristics.descriptor import Dtype, Gemm, Major, Settings
from fxwarm.families.deep_gemm.heuristics.versions import Version, default_compiled_dims

__all__ = [
    "bf16_gemm_nt",
    "einsum_bhd_hdr_bhr",
    "einsum_bhr_hdr_bhd",
    "fp8_einsum_bhr_hdr_bhd",
    "fp8_gemm_nt",
]

_DEFAULT = Settings()


def _dims(op: str, version: Version, compiled_dims: str | None) -> str:
    return default_compiled_dims(op, version) if compiled_dims is None else compiled_dims


def fp8_gemm_nt(
    n: int,
    k: int,
    version: Version,
    settings: Settings = _DEFAULT,
    *,
    one_d_one_d: bool = False,
    compiled_dims: str | None = None,
    major_sfb: Major = "K",
    epilogue: str = Gemm.epilogue,
    gran_k: int = 128,
) -> Gemm:
    """Describe a dense FP8 GEMM; M is swept.

    SM90 has two kernels: 1D2D (B scaled in 128 x 128 blocks, D bf16) and, with
    ``one_d_one_d`` (recipe (1, 1, 128)), 1D1D, whose D is fp32 and which needs C.
    """
    hopper = settings.arch == 90
    return Gemm(
        ("sm90_fp8_gemm_1d1d" if one_d_one_d else "sm90_fp8_gemm_1d2d")
        if hopper
        else "sm100_fp8_fp4_gemm_1d1d",
        "Normal",
        "1D1D" if one_d_one_d or not hopper else "1D2D",
        n,
        k,
        d_dtype="fp32" if one_d_one_d else "bf16",
        with_accumulation=one_d_one_d,
        major_sfb=major_sfb,
        compiled_dims=_dims("fp8_gemm_nt", version, compiled_dims),
        epilogue=epilogue,
        gran_k=gran_k,
        settings=settings,
    )


def bf16_gemm_nt(
    n: int,
    k: int,
    version: Version,
    settings: Settings = _DEFAULT,
    *,
    d_dtype: Dtype = "bf16",
    with_accumulation: bool = False,
    major_a: Major = "K",
    major_b: Major = "K",
    compiled_dims: str | None = None,
) -> Gemm:
    """Describe a dense bf16 GEMM; M is swept. See ``versions.uses_cublaslt`` first."""
    return Gemm(
        f"sm{settings.arch}_bf16_gemm",
        "Normal",
        "NoSF",
        n,
        k,
        ab_dtype="bf16",
        d_dtype=d_dtype,
        with_accumulation=with_accumulation,
        major_a=major_a,
        major_b=major_b,
        compiled_dims=_dims("bf16_gemm_nt", version, compiled_dims),
        settings=settings,
    )


def fp8_einsum_bhr_hdr_bhd(
    h: int, d: int, r: int, version: Version, settings: Settings = _DEFAULT, *,
    major_sfb: Major = "K",
) -> Gemm:  # fmt: skip
    """Describe ``fp8_einsum("bhr,hdr->bhd")``: a GEMM [b, d, r] for each of h heads; b is swept."""
    hopper = settings.arch == 90
    return Gemm(
        "sm90_fp8_gemm_1d2d" if hopper else "sm100_fp8_gemm_1d1d",
        "Batched",
        "1D2D" if hopper else "1D1D",
        d,
        r,
        h,
        major_sfb=major_sfb,
        compiled_dims=default_compiled_dims("einsum", version),
        settings=settings,
    )


def einsum_bhr_hdr_bhd(
    h: int, d: int, r: int, version: Version, settings: Settings = _DEFAULT
) -> Gemm:
    """Describe bf16 ``einsum("bhr,hdr->bhd")``, not through cuBLASLt; b is swept."""
    return Gemm(
        f"sm{settings.arch}_bf16_bhr_hdr_bhd",
        "Batched",
        "NoSF",
        d,
        r,
        h,
        ab_dtype="bf16",
        compiled_dims=default_compiled_dims("einsum", version),
        settings=settings,
    )


def einsum_bhd_hdr_bhr(
    h: int, d: int, r: int, version: Version, settings: Settings = _DEFAULT
) -> Gemm:
    """Describe bf16 ``einsum("bhd,hdr->bhr")``: [b, r, d] with B N-major; b is swept."""
    return Gemm(
        f"sm{settings.arch}_bf16_bhd_hdr_bhr",
        "Batched",
        "NoSF",
        r,
        d,
        h,
        ab_dtype="bf16",
        major_b="MN",
        compiled_dims=default_compiled_dims("einsum", version),
        settings=settings,
    )
