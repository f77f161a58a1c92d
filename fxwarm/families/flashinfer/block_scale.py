"""The kernels that FlashInfer's C++ compiles by nvcc at call time: DeepSeek's fp8 block scale on SM90.

One kernel for each (N, K, blocks, groups, stages), cached under a readable name. Below a threshold the operands are
swapped, and the token count takes the place of N. The class is the token count itself, not tokens x top_k.

Arithmetic alone. Re-computed from FlashInfer 0.6.18.post1 ``deep_gemm/jit_utils.cuh``, ``compiler.cuh`` and
``fp8_blockscale_gemm_kernel.cuh``; loading checks it against the names that appear in the library's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["BlockGemm", "BlockKernel", "first_of_each_kernel", "kernel_at"]

_BLOCK_K = 128
_SMEM = 232448  # bytes; a constant of the library, not the device's


class BlockGemm(NamedTuple):
    """One GEMM with its static dims: D[M, n] = A[M, k] @ B[n, k].T, per group."""

    n: int
    k: int
    groups: int
    """Experts of this rank; 1 for a dense GEMM."""
    grouped: bool = True
    num_sms: int = 132

    @property
    def threshold(self) -> int:
        """Rows from which the operands are not swapped: 64 on a card of 78 SMs (H20), else 32; dense always 32."""
        return 64 if self.grouped and self.num_sms == 78 else 32


class BlockKernel(NamedTuple):
    """One compiled kernel. ``name`` is its folder in the library's cache."""

    swap_ab: bool
    n: int
    k: int
    block_m: int
    block_n: int
    groups: int
    stages: int
    multicast: int
    grouped: bool

    @property
    def gemm_type(self) -> str:
        """The library's name of the way in which groups are laid out."""
        return "GroupedWithOffset" if self.grouped else "Normal"

    @property
    def name(self) -> str:
        """The folder's name. Groups and stages stand in it twice, the first pair without a separator."""
        stages = f"{self.groups}_{self.stages}"
        blocks = f"{self.n}_{self.k}_{self.block_m}_{self.block_n}_{_BLOCK_K}"
        swap = "swapAB_" if self.swap_ab else ""
        return f"gemm_{swap}{blocks}_{stages}{stages}_{self.multicast}_{self.gemm_type}"

    @property
    def template(self) -> tuple[str, ...]:
        """What specialises the kernel, in the library's order."""
        sizes = (
            self.n,
            self.k,
            self.block_m,
            self.block_n,
            _BLOCK_K,
            self.groups,
            self.stages,
            self.multicast,
        )
        return (*map(str, sizes), self.gemm_type)


def kernel_at(gemm: BlockGemm, tokens: int) -> BlockKernel:
    """Return the kernel that the library compiles for ``gemm`` at ``tokens`` rows. Raises ValueError below 1."""
    if tokens < 1:
        raise ValueError("at 0 rows the library returns without a kernel")
    swap = tokens < gemm.threshold
    rows, columns = (gemm.n, tokens) if swap else (tokens, gemm.n)
    block_m = 64 if rows <= 64 else 128
    block_n = min(range(16, 129, 8), key=lambda width: _cost(gemm, rows, columns, block_m, width))
    stages = next(
        (s for s in _stages(block_n) if _smem(s, gemm.k, block_m, block_n, swap) <= _SMEM), 0
    )
    long, wide, block = (columns, rows, block_m) if swap else (rows, columns, block_n)
    multicast = 1
    if gemm.groups == 1 and long >= 1024 and wide % (2 * block) == 0 and gemm.num_sms % 2 == 0:
        multicast = 2
    return BlockKernel(
        swap, gemm.n, gemm.k, block_m, block_n, gemm.groups, stages, multicast, gemm.grouped
    )


def first_of_each_kernel(
    gemm: BlockGemm, tokens: Sequence[int]
) -> Iterator[tuple[int, BlockKernel]]:
    """Yield each kernel that ``gemm`` needs at any of ``tokens``, ascending, with the first of them that needs it.

    (N=1536, K=2048, 128 experts, 132 SMs) at 1..8192: 1, 17, 25, 32 and 65.
    """
    seen: set[BlockKernel] = set()
    last = None
    for count in tokens:
        if count < 1:
            continue
        # above the threshold the choice sees only the number of row blocks, and whether multicast is on
        whole = count >= gemm.threshold
        kind = (
            (count <= 64, -(-count // (64 if count <= 64 else 128)), count >= 1024)
            if whole
            else count
        )
        if kind == last:
            continue
        last = kind
        kernel = kernel_at(gemm, count)
        if kernel not in seen:
            seen.add(kernel)
            yield count, kernel


def _cost(
    gemm: BlockGemm, rows: int, columns: int, block_m: int, block_n: int
) -> tuple[int, int, int]:
    """Fewer waves, then a fuller last wave, then the narrower block."""
    blocks = -(-rows // block_m) * -(-columns // block_n) * gemm.groups
    return -(-blocks // gemm.num_sms), -(blocks % gemm.num_sms or gemm.num_sms), block_n


def _stages(block_n: int) -> tuple[int, ...]:
    return (8, 7, 6, 5, 4) if 128 % block_n == 0 else (6, 5, 4)


def _smem(stages: int, k: int, block_m: int, block_n: int, swap: bool) -> int:
    """Return the shared memory of a kernel in bytes: output, operands and barriers, scales."""
    fixed = block_m * block_n * 2 + stages * ((block_m + block_n) * _BLOCK_K + 16)
    scales = -(-k // _BLOCK_K) * 4
    if swap:
        return fixed + stages * (-(-block_n * 4 // 128) * 128) + -(-scales // 8) * 8
    twice = 1 if _BLOCK_K % block_n == 0 else 2
    return fixed + stages * block_m * 4 + -(-scales * twice // 8) * 8
