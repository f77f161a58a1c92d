"""SM100 heuristics, *new*: block sizes by rules of preference.

Checked in config only, against the compiled function (3,015 points), never run on a Blackwell.
Source: DeepGEMM ``csrc/jit_kernels/heuristics/sm100.hpp``.
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
from fxwarm.families.deep_gemm.heuristics.versions import Version

__all__ = [
    "get_best_config",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "interval_ids",
]

SMEM_CAPACITY = 232448
_MAX_STAGES = 32
_TENSOR_COLUMNS = 512
_M_RANGES = ((32, 0, 32), (64, 32, 64), (128, 64, 2**31 - 1))
"""Without swap: block_m for M in (low, high]."""


class _Tile(NamedTuple):
    swap_ab: bool
    block_m: int
    block_n: int
    cluster_m: int
    cluster_n: int


def get_best_config(gemm: Gemm, values: Ints, version: Version) -> list[Config]:
    """Return the config that the library picks at each value of the swept dimension."""
    late = _late(version)
    if gemm.gemm_type.startswith("MGrouped"):
        return [_grouped_config(gemm, late)] * len(values)
    configs, table = _table(gemm, late)
    m = np.full_like(values, gemm.m or 0) if gemm.swept == "max_k" else values
    return [configs[i] for i in np.argmin(_rank(gemm, m.reshape(-1, 1), table), axis=1).tolist()]


def _late(version: Version) -> bool:
    if version.heuristics != "new" or version.late_tensor_memory is None:
        raise Unmodelled(
            f"the SM100 tensor-memory rule of {version.distribution} {version.number} is not known"
        )
    return version.late_tensor_memory


def _grouped_config(gemm: Gemm, late: bool) -> Config:
    """Return the one config of an m-grouped call: it depends on no M."""
    cluster = 2 if ceil_div(gemm.n, 128) % 2 == 0 and gemm.settings.num_sms % 2 == 0 else 1
    return _config(gemm, _Tile(True, gemm.settings.mk_alignment, 128, 1, cluster), late)


@lru_cache(maxsize=128)
def _table(gemm: Gemm, late: bool) -> tuple[tuple[Config, ...], Ints]:
    """Return the configs in order, and [6, candidates]: low M, high M,
    cluster_m, cluster size, block_m, block_n."""
    settings = gemm.settings
    whole = (0, 2**31 - 1)
    m_step = math.lcm(16, settings.block_m_multiple_of)
    n_step = math.lcm(32, settings.block_n_multiple_of)
    wide = [16] if 16 % settings.block_n_multiple_of == 0 else []
    wide += range(n_step, (128 if gemm.k <= 256 else 256) + 1, n_step)
    plain = [(bm, low, high, bn) for bm, low, high in _M_RANGES for bn in wide]
    swapped = [(bm, *whole, 128) for bm in range(m_step, 257, m_step)]
    need_128 = "K" in (gemm.major_a, gemm.major_b)
    configs: list[Config] = []
    rows: list[tuple[int, ...]] = []
    for swap, tiles in ((False, plain), (True, swapped)):
        for cluster in (1, 2):
            cluster_m, cluster_n = (1, cluster) if swap else (cluster, 1)
            for block_m, low, high, block_n in tiles:
                tile = _Tile(swap, block_m, block_n, cluster_m, cluster_n)
                if not _is_legal(gemm, tile, late):
                    continue
                config = _config(gemm, tile, late)
                if need_128 and (config.swizzle_a, config.swizzle_b) != (128, 128):
                    continue
                configs.append(config)
                rows.append((low, high, cluster_m, cluster, block_m, block_n))
    if not configs:
        raise Unmodelled(f"{gemm.tag} with n={gemm.n}, k={gemm.k} has no legal tile")
    return tuple(configs), np.array(rows, np.int64).T


def _is_legal(gemm: Gemm, tile: _Tile, late: bool) -> bool:
    swap, block_m, block_n, cluster_m, cluster_n = tile
    if gemm.settings.num_sms % (cluster_m * cluster_n):
        return False
    if block_m // cluster_n % (64 if gemm.major_a == "MN" else 8):
        return False
    if block_n // cluster_m % (64 if gemm.major_b == "MN" else 8):
        return False
    if ceil_div(gemm.n, block_n) % cluster_n:
        return False
    scales = align(block_m, 128) // 32 + align(block_n, 128) // 32 if gemm.ab_dtype == "fp8" else 0
    accumulator = (block_m if swap else block_n) * (1 if late else 2)
    return accumulator + scales <= _TENSOR_COLUMNS


def _config(gemm: Gemm, tile: _Tile, late: bool) -> Config:
    swap, block_m, block_n, cluster_m, cluster_n = tile
    load_m, load_n = block_m // cluster_n, block_n // cluster_m
    size = gemm.ab_size
    swizzle_cd = get_swizzle_mode(block_n, gemm.d_size)
    # store tiles: 16 rows when swapped, two buffers each
    cd = 16 * block_n * gemm.d_size * 2 if swap else min(128, block_m) * swizzle_cd * 2
    barriers = _MAX_STAGES * 8 * 3 + 2 * 8 * 2 + 8 + (16 if late else 0)
    fixed = cd + barriers + 4
    stage = (load_m + load_n) * gemm.block_k * size
    if gemm.kernel_type == "1D1D":
        stage += (align(block_m, 128) + align(block_n, 128)) * 4
    stages = min(max(SMEM_CAPACITY - fixed, 0) // stage, _MAX_STAGES)
    return Config(
        block_m,
        block_n,
        gemm.block_k,
        get_swizzle_mode(gemm.block_k if gemm.major_a == "K" else load_m, size),
        get_swizzle_mode(gemm.block_k if gemm.major_b == "K" else load_n, size),
        swizzle_cd,
        stages,
        tma_threads=128,
        math_threads=128,
        cluster=cluster_m * cluster_n,
        multicast_a=cluster_n > 1,
        num_sms=gemm.settings.num_sms,
        smem=fixed + stages * stage,
        swap_ab=swap,
    )


def _rank(gemm: Gemm, m: Ints, table: Ints) -> Ints:
    """Return the library's order of preference as one number, [m, candidates]; least is best.

    One wave; the larger cluster; fewer waves; a fuller last wave; smaller bm + bn; smaller
    bm * bn. Mixed radix, 62 bits in all; up to 512 SMs and 2^24 waves.
    """
    low, high, cluster_m, cluster, block_m, block_n = table
    sms = gemm.settings.num_sms
    rows = -(-m // block_m)
    blocks = rows * -(-gemm.n // block_n) * gemm.expected_groups
    waves = -(-blocks // sms)
    util = np.where(blocks % sms == 0, sms, blocks % sms)
    rank: Ints = (waves != 1).astype(np.int64)
    rank = rank * 2 + (2 - cluster)
    rank = rank * 2**24 + waves
    rank = rank * 2**9 + (sms - util)
    rank = rank * 2**10 + block_m + block_n
    rank = rank * 2**17 + block_m * block_n
    rank[(m <= low) | (m > high) | (rows % cluster_m != 0)] = np.iinfo(np.int64).max
    return rank


def interval_ids(gemm: Gemm, values: Ints) -> Ints:
    """Return a number for each value; where it repeats, the config is the same: ceil(m / 16)."""
    if gemm.gemm_type.startswith("MGrouped") or gemm.swept == "max_k":
        return np.zeros_like(values)
    return ceil_div(values, 16)


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None, arch: int, version: Version
) -> int:
    """Return the alignment, in rows, that the library would like for ``expected_m`` a group.

    Raises Unmodelled for an SM100 version whose steps are not known.
    """
    if arch != 100:
        return 128
    if version.mk_steps is None:
        raise Unmodelled(
            f"the SM100 alignment of {version.distribution} {version.number} is not known"
        )
    rows, step = version.mk_steps
    while step and expected_m is not None and rows > 32 and rows - step >= expected_m:
        rows -= step
    return rows
