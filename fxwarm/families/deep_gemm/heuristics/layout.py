"""Scale-layout kernels: what an FP8 call compiles besides its GEMM, the usual hole in a warmup.

The GEMM wants scales MN-major with the stride of MN padded to 16 bytes. Scales of that layout
pass; contiguous ones go through a kernel that has ceil(k / gran_k) in its template and not M;
all others through a plain copy without JIT.

Source: DeepGEMM ``csrc/jit_kernels/impls/smxx_layout.hpp``, ``csrc/apis/layout.hpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxwarm.families.deep_gemm.heuristics.arith import align
from fxwarm.families.deep_gemm.heuristics.attainable import Values, to_sorted
from fxwarm.families.deep_gemm.heuristics.errors import Unmodelled
from fxwarm.families.deep_gemm.heuristics.kernel import Kernel
from fxwarm.families.deep_gemm.heuristics.versions import Version

__all__ = [
    "column_major",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "layout_kernels",
    "pack_fp32_into_ue8m0",
    "row_major",
    "tma_aligned",
]

Strides = Callable[[int, int], Sequence[int]]
"""From (mn, sf_k) to the strides, in elements, of scales [mn, sf_k] or [groups, mn, sf_k]."""
_THREADS = 512


def row_major(mn: int, sf_k: int) -> tuple[int, int]:
    """Strides of contiguous scales [mn, sf_k]."""
    del mn
    return sf_k, 1


def column_major(mn: int, sf_k: int) -> tuple[int, int]:
    """Strides of MN-major scales without padding: at mn=1 they count as contiguous."""
    del sf_k
    return 1, mn


def tma_aligned(mn: int, sf_k: int) -> tuple[int, int]:
    """Strides of MN-major fp32 scales padded to 16 bytes: what the GEMM wants."""
    del sf_k
    return 1, align(mn, 4)


def layout_kernels(
    ms: Values, sf_k: int, strides: Strides, version: Version, *, arch: int = 90, groups: int = 1
) -> dict[Kernel, int]:
    """Return the layout kernels of fp32 scales over ``ms``, each with the smallest M that needs it.

    ``sf_k`` = ceil(k / 128). Empty when the scales fit or are copied. M = 1 can differ from all
    others: an unpadded column is contiguous there.
    """
    found: dict[Kernel, int] = {}
    for m in to_sorted(ms).tolist():
        shape = (m, sf_k) if groups == 1 else (groups, m, sf_k)
        if arch == 90:
            kernel = get_mn_major_tma_aligned_tensor(shape, strides(m, sf_k), version)
        else:
            kernel = get_mn_major_tma_aligned_packed_ue8m0_tensor(shape, strides(m, sf_k), version)
        if kernel is not None:
            found.setdefault(kernel, m)
    return found


def get_mn_major_tma_aligned_tensor(
    shape: Sequence[int], strides: Sequence[int], version: Version
) -> Kernel | None:
    """Return the transpose of fp32 scales on SM90, None if there is nothing to do or a copy.

    ``shape`` is [mn, sf_k] or [groups, mn, sf_k]; M must not be 0. SFB (128 x 128 blocks) is only
    checked by the library and never comes here.
    """
    mn, sf_k = shape[-2:]
    aligned = align(mn, 4)
    whole_groups = len(shape) == 2 or strides[0] == aligned * sf_k
    if whole_groups and (strides[-2], strides[-1]) == (1, aligned):
        return None
    if not _is_contiguous(shape, strides):
        return None
    if version.transpose_arity is None:
        raise Unmodelled(
            f"the template of transpose_fp32 in {version.distribution} {version.number} is not known"
        )
    arguments = (_THREADS, 64, sf_k, 128)[: version.transpose_arity]
    width = min(sf_k, 128) if version.transpose_arity == 4 else sf_k
    return Kernel(
        "transpose_fp32",
        "transpose_fp32",
        tuple(map(str, arguments)),
        threads=_THREADS,
        smem=64 * (width + 1 - width % 2) * 4,  # an odd row pitch: no bank conflicts
    )


def get_mn_major_tma_aligned_packed_ue8m0_tensor(
    shape: Sequence[int],
    strides: Sequence[int],
    version: Version,
    *,
    psum_groups: int | None = None,
) -> Kernel | None:
    """Return the kernel that packs fp32 scales into UE8M0 on SM100, None if torch does it.

    Scales of granularity (128, 128) are broadcast to rows first, which makes them contiguous.
    ``psum_groups`` is the number of groups of a psum layout. Never run on a Blackwell.
    """
    mn, sf_k = shape[-2:]
    batches = shape[0] if len(shape) == 3 else 1
    if version.pack_psum is None:
        raise Unmodelled(
            f"the SM100 pack kernels of {version.distribution} {version.number} are not known"
        )
    psum = [psum_groups or 1, "false" if psum_groups is None else "true"]
    if not _is_contiguous(shape, strides):
        if mn % 4 or batches > 1:
            return None
        return pack_fp32_into_ue8m0(1, version)
    if mn * sf_k % 4 and batches > 1:
        return None
    arguments = [_THREADS, 48, sf_k, *(psum if version.pack_psum else [])]
    extra = align((psum_groups or 0) * 2, 4)
    return Kernel(
        "transpose_and_pack_fp32_into_ue8m0",
        "transpose_and_pack_fp32_into_ue8m0",
        tuple(map(str, arguments)),
        threads=_THREADS,
        smem=(48 * sf_k + extra) * 4,
    )


def pack_fp32_into_ue8m0(groups: int, version: Version, *, psum: bool = False) -> Kernel:
    """Return the packing kernel of MN-major (groups=1) or k-grouped scales on SM100."""
    arguments: list[object] = [groups, _THREADS, 128, 16]
    if version.pack_psum:
        arguments += ["true", str(psum).lower()]
    return Kernel(
        "pack_fp32_into_ue8m0", "pack_fp32_into_ue8m0", tuple(map(str, arguments)), _THREADS
    )


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """As torch sees it: the stride of a dimension of size 1 does not count."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
