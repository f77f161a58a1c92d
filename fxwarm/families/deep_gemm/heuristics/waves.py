"""SM90 heuristics, *old* (upstream ``79f48ee``) and *mid* (``0f5f266`` to ``d30fc36``).

The tile with the fewest waves, then the fullest last wave, then the library's three tie rules.
*old* takes only as many SMs as these waves need and compiles that count in, so it has many more
kernels. Source: ``csrc/jit_kernels/heuristics/common.hpp`` and ``sm90.hpp`` of these commits.

The choice is a running comparison, not a sort (the tie rules are no order), so candidates are
walked one by one, each for all M at once.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fxwarm.families.deep_gemm.heuristics.arith import Ints, align, ceil_div, get_swizzle_mode
from fxwarm.families.deep_gemm.heuristics.descriptor import Gemm
from fxwarm.families.deep_gemm.heuristics.errors import Unmodelled
from fxwarm.families.deep_gemm.heuristics.kernel import Config

__all__ = ["get_best_config", "interval_ids"]

SMEM_CAPACITY = 232448
_FLIPS = np.array([16, 32, 64, 128, 256, 512], np.int64)


class _Pick(NamedTuple):
    m: int
    k: int
    block_m: int
    block_n: int
    waves: int


def get_best_config(gemm: Gemm, values: Ints, old: bool) -> list[Config]:
    """Return the config that the library picks at each value of the swept dimension."""
    _refuse(gemm, old)
    max_k = gemm.swept == "max_k"
    m = np.full_like(values, gemm.m or 0) if max_k else values
    k = values if max_k else np.full_like(values, gemm.k)
    blocks = _best_blocks(gemm, m, old)
    rows = zip(m.tolist(), k.tolist(), *(a.tolist() for a in blocks), strict=True)
    return [_config(gemm, _Pick(*row), old) for row in rows]


def _refuse(gemm: Gemm, old: bool) -> None:
    if gemm.gemm_type == "MGroupedContiguousWithPsumLayout":
        raise Unmodelled("SM90 has no psum layout before upstream 7f2a703")
    if gemm.settings.block_n_multiple_of != 1 or gemm.settings.block_m_multiple_of != 1:
        raise Unmodelled("set_block_size_multiple_of is not read before upstream 7f2a703")
    plain = gemm.d_dtype == "bf16" and (gemm.major_a, gemm.major_b) == ("K", "K")
    absent = gemm.kernel_type == "1D1D" or gemm.gemm_type in ("Batched", "KGroupedContiguous")
    if old and (absent or not plain or gemm.with_accumulation):
        raise Unmodelled(f"upstream 79f48ee has no {gemm.tag} on SM90 but bf16 D, K-major, no C")


def _best_blocks(gemm: Gemm, m: Ints, old: bool) -> tuple[Ints, Ints, Ints]:
    """Return block_m, block_n and the number of waves, each for all ``m``."""
    best_m, best_n, best_waves, best_util = (np.zeros_like(m) for _ in range(4))
    sms = gemm.settings.num_sms
    for block_m, largest_m in _block_ms(gemm, old):
        for block_n in _block_ns(gemm, old):
            if not _is_block_size_legal(gemm, old, block_m, block_n):
                continue
            blocks = ceil_div(m, block_m) * ceil_div(gemm.n, block_n) * gemm.expected_groups
            waves = ceil_div(blocks, sms)
            util = np.where(blocks % sms == 0, sms, blocks % sms)
            tied = (waves == best_waves) & (util == best_util)
            # case 3 of the library: another block_m and a wider block_n, inside the shape
            wider = (best_m != block_m) & (block_n > best_n) & (block_n <= gemm.n) & (block_m <= m)
            narrower = (best_m == block_m) & (block_n < best_n)
            shorter = (best_n == block_n) & (block_m < best_m)
            better = (
                (best_m == 0)
                | (waves < best_waves)
                | ((waves == best_waves) & (util > best_util))
                | (tied & (narrower | shorter | wider))
            )
            better &= m <= largest_m
            best_m[better], best_n[better] = block_m, block_n
            best_waves[better], best_util[better] = waves[better], util[better]
    return best_m, best_n, best_waves


def _block_ms(gemm: Gemm, old: bool) -> list[tuple[int, int]]:
    """Return the M tiles, each with the largest M for which it is tried."""
    no_limit = 2**31 - 1
    if gemm.gemm_type == "MGroupedContiguous":
        return [(gemm.settings.mk_alignment, no_limit)]
    if gemm.gemm_type == "MGroupedMasked":
        return [(64, no_limit), (128, no_limit)]
    tiles = [(64, no_limit), (128, no_limit), (256, no_limit)]
    small = not old and gemm.kernel_type != "1D1D" and gemm.major_a == "K"
    return [*tiles, (16, 16), (32, 32)] if small else tiles


def _block_ns(gemm: Gemm, old: bool) -> list[int]:
    if not old and gemm.kernel_type == "1D1D" and gemm.d_dtype == "fp32":
        return [16, *range(24, 257, 16)]
    return list(range(16, 257, 16))


def _is_block_size_legal(gemm: Gemm, old: bool, block_m: int, block_n: int) -> bool:
    fp32 = gemm.d_dtype == "fp32"
    if fp32 and block_m == 256:
        return False
    if block_n > 128 and gemm.kernel_type == "1D2D" and block_n not in (144, 160, 192):
        return False
    if not old:
        widest = {"1D1D": 152, "NoSF": 200, "1D2D": 256}[gemm.kernel_type]
        if fp32 and block_n > widest:
            return False
        if gemm.major_b == "MN" and block_n >= 128 and block_n % 64:
            return False  # keeps B's swizzle at 128 bytes
    return block_m <= 128 or block_n <= 128


@lru_cache(maxsize=4096)
def _config(gemm: Gemm, pick: _Pick, old: bool) -> Config:
    m, k, block_m, block_n, waves = pick
    multicast, on_a = _multicast(gemm, pick, old)
    num_sms = gemm.settings.num_sms
    if old or gemm.settings.minimize_num_sms:
        blocks = ceil_div(m, block_m) * ceil_div(gemm.n, block_n) * gemm.expected_groups
        num_sms = align(ceil_div(blocks, waves), multicast)
    k_blocks = ceil_div(k, gemm.block_k)
    stages = min(12, k_blocks) if old else 32
    if not _is_unrollable(gemm, block_n):
        stages = min(stages, 4)
    while (smem := _smem(gemm, pick, stages, old)) > SMEM_CAPACITY:
        stages -= 1
    size = gemm.ab_size
    return Config(
        block_m,
        block_n,
        gemm.block_k,
        get_swizzle_mode(gemm.block_k if gemm.major_a == "K" else block_m, size),
        get_swizzle_mode(gemm.block_k if gemm.major_b == "K" else block_n, size),
        0 if gemm.d_dtype == "fp32" else get_swizzle_mode(block_n, gemm.d_size),
        stages,
        tma_threads=128,
        math_threads=128 if block_m <= 64 else 256,
        cluster=multicast,
        multicast_a=on_a,
        num_sms=num_sms,
        smem=smem,
        last_stages=k_blocks % stages,
    )


def _multicast(gemm: Gemm, pick: _Pick, old: bool) -> tuple[int, bool]:
    """Return the cluster size, and whether A is the shared operand."""
    never = gemm.gemm_type == "Batched" or (
        gemm.gemm_type == "KGroupedContiguous" and gemm.groups > 4
    )
    paired = gemm.gemm_type != "MGroupedMasked" or ceil_div(gemm.n, pick.block_n) % 2 == 0
    if pick.m >= 512 and paired and not never and gemm.settings.num_sms % 2 == 0:
        return (
            2,
            pick.block_m > pick.block_n,
        )  # both operands are legal or none is; the larger tile's wins
    return 1, old  # *old* names A even when nothing is shared


def _is_unrollable(gemm: Gemm, block_n: int) -> bool:
    """Whether more than 4 stages are allowed: FP8 unrolls stages times scale positions."""
    return (
        gemm.ab_dtype != "fp8"
        or gemm.block_k % block_n == 0
        or gemm.block_k // math.gcd(block_n, gemm.block_k) > 4
    )


def _smem(gemm: Gemm, pick: _Pick, stages: int, old: bool) -> int:
    block_m, block_n = pick.block_m, pick.block_n
    tile = block_m * block_n * gemm.d_size
    stage = (block_m + block_n) * gemm.block_k * gemm.ab_size
    if gemm.ab_dtype == "fp8":
        stage += 4 * block_m if old else align(4 * block_m, 128)
        if gemm.kernel_type == "1D1D":
            stage += align(4 * block_n, 128)
    scales = align(
        ceil_div(pick.k, gemm.block_k) * 4 * (1 if gemm.block_k % block_n == 0 else 2), 8
    )
    if old:
        return tile + stages * stage + scales + 16 * (stages + 1)
    maps = 512 if gemm.gemm_type == "KGroupedContiguous" else 0
    return align(tile, 1024) + stages * stage + scales + 16 * stages + maps


def interval_ids(gemm: Gemm, values: Ints) -> Ints:
    """Return a number for each value; where it repeats, the config is the same.

    Besides ceil(m / 64), ``m >= 512`` and ``block_m <= m`` flip inside an interval, at 512, 256,
    128, 64, and *mid*'s small tiles at 16 and 32.
    """
    if gemm.swept == "max_k":
        return values
    step = gemm.settings.mk_alignment if gemm.gemm_type == "MGroupedContiguous" else 64
    ids: Ints = ceil_div(values, math.gcd(step, 64)) * 16
    ids += np.searchsorted(_FLIPS, values, side="right") + np.searchsorted(_FLIPS, values)
    return ids
