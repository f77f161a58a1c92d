"""One GEMM call as the heuristics see it, without the dimension that varies.

The varying dimension (``Gemm.swept``) is M for most calls, ``expected_m`` for masked ones and for
a psum layout that was given it, and max(ks) for k-grouped ones. All else is static.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Dtype", "Gemm", "GemmType", "KernelType", "Major", "Settings"]

GemmType = Literal[
    "Normal",
    "Batched",
    "MGroupedContiguous",
    "MGroupedContiguousWithPsumLayout",
    "MGroupedMasked",
    "KGroupedContiguous",
]
KernelType = Literal["1D2D", "1D1D", "NoSF"]
Dtype = Literal["fp8", "bf16", "fp32"]
Major = Literal["K", "MN"]

_SIZES: dict[Dtype, int] = {"fp8": 1, "bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Settings:
    """What a device and the library's global setters put into every kernel."""

    arch: int = 90
    """Compute capability times ten: 90 (Hopper) or 100 (Blackwell)."""
    num_sms: int = 132
    """SMs that kernels may use: the device's, or what ``set_num_sms`` was given. Even."""
    mk_alignment: int = 128
    """``set_mk_alignment_for_contiguous_layout``, in rows."""
    block_m_multiple_of: int = 1
    block_n_multiple_of: int = 1
    """``set_block_size_multiple_of``."""
    ignore_compile_dims: bool = False
    """``set_ignore_compile_dims``: no dim is compiled in."""
    minimize_num_sms: bool = False
    """``DG_JIT_MINIMIZE_NUM_SMS=1``; read by *mid* alone, *old* always does it."""

    def __post_init__(self) -> None:
        if self.arch not in (90, 100):
            raise ValueError(f"arch {self.arch} has no DeepGEMM heuristics here; use 90 or 100")
        if self.num_sms < 2 or self.num_sms % 2:
            raise ValueError(f"num_sms is {self.num_sms}, but DeepGEMM asserts an even SM count")


@dataclass(frozen=True)
class Gemm:
    """D[m, n] (+)= A[m, k] @ B[n, k], per group; upstream's ``GemmDesc``.

    Shapes are logical, in elements. Make one with a function of ``calls``, which carry the names
    of the library's calls.
    """

    tag: str
    """What the library calls the kernel, e.g. ``sm90_fp8_gemm_1d2d``; in the cache folder."""
    gemm_type: GemmType
    kernel_type: KernelType
    n: int
    k: int
    """For k-grouped calls any value: sum(ks) enters no kernel, max(ks) is swept."""
    groups: int = 1
    m: int | None = None
    """M where something else is swept: max_m of a masked call, M of a k-grouped one."""
    has_expected_m: bool = False
    """A psum layout was given ``expected_m_for_psum_layout``."""
    ab_dtype: Dtype = "fp8"
    d_dtype: Dtype = "bf16"
    with_accumulation: bool = False
    major_a: Major = "K"
    major_b: Major = "K"
    major_sfb: Major = "K"
    compiled_dims: str = "nk"
    epilogue: str = "epilogue::transform::EpilogueIdentity"
    gran_k: int = 128
    """K elements per scale factor. 32 (``SF_GRAN`` 32) is not modelled on SM90."""
    settings: Settings = field(default_factory=Settings)

    @property
    def swept(self) -> Literal["m", "expected_m", "max_k"]:
        """The dimension whose values decide between kernels."""
        if self.gemm_type == "KGroupedContiguous":
            return "max_k"
        if self.gemm_type == "MGroupedMasked" or self.has_expected_m:
            return "expected_m"
        return "m"

    @property
    def compiles_m(self) -> bool:
        """Whether M is literal in the kernel, so that each M is a kernel of its own."""
        return "m" in self.compiled_dims and not self.settings.ignore_compile_dims

    @property
    def expected_groups(self) -> int:
        """Groups that the cost counts: a contiguous layout is one long M."""
        if self.gemm_type == "MGroupedContiguous":
            return 1
        if self.gemm_type == "MGroupedContiguousWithPsumLayout":
            return self.groups if self.has_expected_m else 1
        return self.groups

    @property
    def ab_size(self) -> int:
        """Bytes of an element of A and B."""
        return _SIZES[self.ab_dtype]

    @property
    def d_size(self) -> int:
        """Bytes of an element of D."""
        return _SIZES[self.d_dtype]

    @property
    def block_k(self) -> int:
        """K elements of one tile: 128 bytes."""
        return 128 // self.ab_size
