"""``tf32_hc_prenorm_gemm``, the GEMM before an mHC layer: M enters through the callers' split of K.

a [m, k] bf16, b [n, k] fp32, d fp32 [splits, m, n]. No heuristic and no SM count in the kernel,
only n, k and the number of splits. Source: DeepGEMM ``sm90_/sm100_tf32_hc_prenorm_gemm.hpp``;
the split rule is that of vLLM 0.33 ``compute_num_split`` and SGLang 0.5.23
``_compute_num_split_for_mhc_pre``.
"""

from __future__ import annotations

import numpy as np

from fxwarm.families.deep_gemm.heuristics.arith import Ints, align, ceil_div, get_swizzle_mode
from fxwarm.families.deep_gemm.heuristics.attainable import Values, to_sorted
from fxwarm.families.deep_gemm.heuristics.kernel import Kernel

__all__ = ["compute_num_split", "prenorm_kernels", "tf32_hc_prenorm_gemm"]

SMEM_CAPACITY = 232448
_BLOCK = 64


def compute_num_split(m: Ints, k: int, num_sms: int) -> Ints:
    """Return the K-splits that callers ask for at each number of tokens ``m`` (> 0).

    ``k`` is the flattened width, hc_mult * hidden. Constant within blocks of 64 tokens; with 132
    SMs and k=28672 it takes 22 values over m=1..8192.
    """
    most = ceil_div(k, _BLOCK) // 4
    splits: Ints = np.maximum(1, np.minimum(num_sms // ceil_div(m, _BLOCK), most))
    return splits


def tf32_hc_prenorm_gemm(n: int, k: int, num_splits: int, arch: int = 90) -> Kernel:
    """Return the kernel for ``num_splits`` (1 where the call names none).

    Raises ValueError for shapes that the library refuses.
    """
    widest = 32 if arch == 90 else 128
    if n > widest or n % 8 or k % _BLOCK or num_splits < 1:
        raise ValueError(
            f"tf32_hc_prenorm_gemm takes n <= {widest} in steps of 8, k in steps of 64 and at "
            f"least one split, not n={n}, k={k}, num_splits={num_splits}"
        )
    block_n = align(n, 16)
    swizzle = get_swizzle_mode(block_n, 4)
    stages = 12
    while (smem := _smem(block_n, swizzle, stages, arch)) > SMEM_CAPACITY:
        stages -= 1
    arguments = (n, k, _BLOCK, block_n, _BLOCK, num_splits, swizzle, stages, 128, 128)
    return Kernel(
        f"sm{arch}_tf32_hc_prenorm_gemm",
        f"sm{arch}_tf32_hc_prenorm_gemm_impl",
        tuple(map(str, arguments)),
        threads=256,
        smem=SMEM_CAPACITY if arch == 90 else smem,  # SM90 always launches with all of it
    )


def prenorm_kernels(
    n: int,
    k: int,
    ms: Values,
    *,
    num_sms: int = 132,
    arch: int = 90,
    splits: Ints | int | None = None,
) -> dict[Kernel, int]:
    """Return each kernel with the smallest M that needs it.

    ``splits`` is what the graph passes: one number, or an array [len(ms)] evaluated at ``ms``
    (then sorted, distinct and above 0). None applies the callers' rule, ``compute_num_split``.
    """
    points = to_sorted(ms)
    if splits is None:
        splits = compute_num_split(points, k, num_sms)
    wanted = np.broadcast_to(np.asarray(splits, np.int64), points.shape)
    distinct, first = np.unique(wanted, return_index=True)
    witnesses = sorted(zip(points[first].tolist(), distinct.tolist(), strict=True))
    return {tf32_hc_prenorm_gemm(n, k, split, arch): m for m, split in witnesses}


def _smem(block_n: int, swizzle: int, stages: int, arch: int) -> int:
    stage = _BLOCK * _BLOCK * 2 + block_n * _BLOCK * 4
    barriers = 16 * stages if arch == 90 else 8 * (4 * stages + 1) + 4
    return stage * stages + _BLOCK * swizzle + barriers
