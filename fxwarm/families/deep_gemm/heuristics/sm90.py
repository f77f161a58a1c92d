"""SM90 heuristics, *new*: of all legal tiles the one with the fewest modelled cycles.

Upstream ``7f2a703`` to ``54e2261``, every sgl-deep-gemm and tokenspeed-deepgemm. Source:
DeepGEMM ``csrc/jit_kernels/heuristics/sm90.hpp``. Agrees with what three real builds generated
on an H200 at all 592,698 recorded points, shared memory included.

A candidate is legal or not whatever M is (up to the small tiles), and its stages and shared
memory do not depend on M. So all is laid out once a call, and only the cycles are computed for
all M at once: an array of shape [M, candidates].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fxwarm.families.deep_gemm.heuristics.arith import Ints, align, ceil_div, get_swizzle_mode
from fxwarm.families.deep_gemm.heuristics.descriptor import Gemm
from fxwarm.families.deep_gemm.heuristics.errors import Unmodelled
from fxwarm.families.deep_gemm.heuristics.kernel import Config

__all__ = ["get_best_config", "get_layout_candidates", "interval_ids"]

SMEM_CAPACITY = 232448
_MAX_STAGES = 16
_ANY_M = 2**31 - 1
_WORST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class _Candidate:
    largest_m: int
    cluster_m: int
    cluster_n: int
    config: Config


def get_layout_candidates(gemm: Gemm) -> list[_Candidate]:
    """Return the legal tiles in order of enumeration, which decides ties."""
    settings = gemm.settings
    lone = gemm.gemm_type == "Batched" or (
        gemm.gemm_type == "KGroupedContiguous" and gemm.groups > 4
    )
    clusters = [(1, 1)] if lone else [(1, 1), (1, 2), (2, 1)]
    found: list[_Candidate] = []
    for cluster_m, cluster_n in clusters:
        size = cluster_m * cluster_n
        if settings.num_sms % size:
            continue
        for block_m, largest_m in _block_ms(gemm):
            for block_n in _block_ns(gemm):
                if not _is_legal(gemm, block_m, block_n, size):
                    continue
                config = _config(gemm, block_m, block_n, size, cluster_n > 1)
                if config is not None:
                    found.append(_Candidate(largest_m, cluster_m, cluster_n, config))
    return found


def _block_ms(gemm: Gemm) -> list[tuple[int, int]]:
    """Return the M tiles, each with the largest M for which it is tried."""
    if gemm.gemm_type in ("MGroupedContiguous", "MGroupedContiguousWithPsumLayout"):
        return [(gemm.settings.mk_alignment, _ANY_M)]
    if gemm.gemm_type == "MGroupedMasked":
        return [(64, _ANY_M), (128, _ANY_M)]
    tiles = [(64, _ANY_M), (128, _ANY_M), (16, 16), (32, 32)]
    return tiles if gemm.d_dtype == "fp32" else [*tiles, (256, _ANY_M)]


def _block_ns(gemm: Gemm) -> list[int]:
    step = math.lcm(16, gemm.settings.block_n_multiple_of)
    end = {"1D2D": 192, "1D1D": 160, "NoSF": 256}[gemm.kernel_type]
    if gemm.kernel_type == "1D1D" and gemm.d_dtype == "fp32":
        return [16, *range(24, end + 1, step)]  # odd multiples of 8: no bank conflicts in fp32
    return list(range(step, end + 1, step))


def _is_legal(gemm: Gemm, block_m: int, block_n: int, cluster: int) -> bool:
    over = block_n - gemm.block_k
    if gemm.kernel_type == "1D2D" and over > 0 and block_n % over and gemm.block_k % over:
        return False  # more than two scale blocks of B in one tile
    paired = gemm.gemm_type in ("MGroupedMasked", "MGroupedContiguousWithPsumLayout")
    if paired and ceil_div(gemm.n, block_n) % cluster:
        return False
    return block_m <= 128 or block_n <= 128  # registers


def _config(
    gemm: Gemm, block_m: int, block_n: int, cluster: int, multicast_a: bool
) -> Config | None:
    """Return the tile with its swizzles and pipeline, or None if they are too small."""
    size = gemm.ab_size
    swizzle_a = get_swizzle_mode(gemm.block_k if gemm.major_a == "K" else block_m, size)
    swizzle_b = get_swizzle_mode(gemm.block_k if gemm.major_b == "K" else block_n, size)
    if swizzle_a % 64 or swizzle_b % 64:
        return None
    swizzle_cd = 0 if gemm.d_dtype == "fp32" else get_swizzle_mode(block_n, gemm.d_size)
    stages, smem = get_pipeline_config(gemm, block_m, block_n)
    if stages < 3 or (stages < 4 and block_m * block_n < 128 * 192):
        return None
    return Config(
        block_m,
        block_n,
        gemm.block_k,
        swizzle_a,
        swizzle_b,
        swizzle_cd,
        stages,
        tma_threads=128,
        math_threads=128 if block_m <= 64 else 256,
        cluster=cluster,
        multicast_a=multicast_a,
        num_sms=gemm.settings.num_sms,
        smem=smem,
    )


def get_pipeline_config(gemm: Gemm, block_m: int, block_n: int) -> tuple[int, int]:
    """Return the stages that fit into shared memory, and the bytes they take with the rest."""
    fixed = align(block_m * block_n * gemm.d_size, 1024) + _MAX_STAGES * 16
    stage = (block_m + block_n) * gemm.block_k * gemm.ab_size
    if gemm.kernel_type == "1D2D":  # all scales of B for this tile stay resident
        rows = 1 if gemm.block_k % block_n == 0 else 2
        fixed += align(ceil_div(gemm.k, gemm.block_k) * 4 * rows, 8)
    if gemm.gemm_type == "KGroupedContiguous":
        fixed += 4 * 128  # tensor maps
    if gemm.kernel_type != "NoSF":
        stage += align(4 * block_m, 128)
    if gemm.kernel_type == "1D1D":
        stage += align(4 * block_n, 128)
    # C++ truncates toward zero; a negative count is dropped either way
    stages = min(max(SMEM_CAPACITY - fixed, 0) // stage, _MAX_STAGES)
    return stages, fixed + stages * stage


@lru_cache(maxsize=256)
def _table(gemm: Gemm) -> tuple[tuple[Config, ...], Ints]:
    """Return the configs, and [5, candidates]: largest M, cluster_m, cluster_n, bm, bn."""
    _refuse(gemm)
    found = get_layout_candidates(gemm)
    if not found:
        raise Unmodelled(f"{gemm.tag} with n={gemm.n}, k={gemm.k} has no legal tile")
    rows = [
        (c.largest_m, c.cluster_m, c.cluster_n, c.config.block_m, c.config.block_n) for c in found
    ]
    return tuple(c.config for c in found), np.array(rows, np.int64).T


def _refuse(gemm: Gemm) -> None:
    if gemm.gran_k != 128 and gemm.kernel_type != "NoSF":
        raise Unmodelled(f"SM90 scales per {gemm.gran_k} elements of K (SF_GRAN) have other rules")
    if gemm.kernel_type != "NoSF" and (gemm.major_a, gemm.major_b) != ("K", "K"):
        raise ValueError("FP8 on SM90 needs A and B K-major; transpose them, or use bf16")


def get_best_config(gemm: Gemm, values: Ints) -> list[Config]:
    """Return the config that the library picks at each value of the swept dimension."""
    configs, table = _table(gemm)
    return [configs[i] for i in np.argmin(get_cycles(gemm, values, table), axis=1).tolist()]


def get_cycles(gemm: Gemm, values: Ints, table: Ints) -> Ints:
    """Return the modelled cycles, [values, candidates]; the first smallest of a row is chosen.

    All is integer arithmetic but the last division, which is float32 as in the library: rounding
    can merge two costs into a tie, and a tie goes to the first.
    """
    largest_m, cluster_m, cluster_n, block_m, block_n = table
    column = values.reshape(-1, 1)
    max_k = gemm.swept == "max_k"
    m = np.full_like(column, gemm.m or 0) if max_k else column
    k = column if max_k else np.full_like(column, gemm.k)
    sms, ab, d = gemm.settings.num_sms, gemm.ab_size, gemm.d_size

    blocks = -(-m // block_m) * -(-gemm.n // block_n) * gemm.expected_groups
    waves = -(-blocks // sms)
    tile = block_m * block_n * d
    cd = tile * (2 if gemm.with_accumulation else 1)
    l2_bandwidth = int(min(64.0 * sms, 8e6 / 1.3e3))  # bytes a cycle; 6153 from 97 SMs on
    l1_bandwidth = 128 * sms
    l2 = (k * ((block_m // cluster_n + block_n // cluster_m) * ab) + cd) * blocks // l2_bandwidth
    loads = (block_m + block_n) * ab + (np.maximum(64, block_m) + block_n) * ab
    l1 = (k * loads + (tile + cd)) * blocks // l1_bandwidth

    efficiency = blocks.astype(np.float32) / (waves * sms).astype(np.float32)
    cycles: Ints = (np.maximum(l1, l2).astype(np.float32) / efficiency).astype(np.int64)
    cycles[(cluster_m * cluster_n > 1) & (waves <= 1)] = _WORST  # nothing to share in one wave
    # the first candidates are single tiles of any M, so an excluded one never wins a tie
    cycles[m > largest_m] = _WORST
    return cycles


def interval_ids(gemm: Gemm, values: Ints) -> Ints:
    """Return a number for each value; where it repeats, the config is the same.

    Tiles are 64 rows or multiples of it, but for the small ones at M <= 16 and M <= 32.
    """
    if gemm.swept == "max_k":
        return values  # k enters the cost as it is
    if gemm.gemm_type in ("MGroupedContiguous", "MGroupedContiguousWithPsumLayout"):
        return ceil_div(values, gemm.settings.mk_alignment)
    ids = ceil_div(values, 64) + 2
    if gemm.gemm_type != "MGroupedMasked":
        ids[values <= 32] = 1
        ids[values <= 16] = 0
    return ids
