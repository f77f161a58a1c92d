"""Kernels whose template holds a rounded batch size: MQA metadata and ``einsum("bmk,bnk->mn")``.

Source: DeepGEMM ``smxx_fp8_fp4_paged_mqa_logits.hpp``, ``sm90_fp8_mqa_logits.hpp``,
``sm90_bmk_bnk_mn.hpp``, ``sm100_bmk_bnk_mn.hpp``.
"""

from __future__ import annotations

from fxwarm.families.deep_gemm.heuristics.arith import align, ceil_div
from fxwarm.families.deep_gemm.heuristics.attainable import Values, first_of_each, to_sorted
from fxwarm.families.deep_gemm.heuristics.descriptor import Settings
from fxwarm.families.deep_gemm.heuristics.errors import Unmodelled
from fxwarm.families.deep_gemm.heuristics.kernel import Kernel
from fxwarm.families.deep_gemm.heuristics.versions import Version

__all__ = [
    "aligned_batches",
    "einsum_bmk_bnk_mn_kernels",
    "paged_mqa_logits_metadata_kernels",
]

_DEFAULT = Settings()


def aligned_batches(batches: Values) -> dict[int, int]:
    """Return align(batch, 32) for each batch size, with the smallest batch that has it.

    True of every version on SM90, also where the rest of the template is not known: batches
    1..512 make 16 kernels.
    """
    points = to_sorted(batches)
    return {align(b, 32): b for b in first_of_each(align(points, 32), points).tolist()}


def paged_mqa_logits_metadata_kernels(
    batches: Values, version: Version, settings: Settings = _DEFAULT
) -> dict[Kernel, int]:
    """Return the ``get_paged_mqa_logits_metadata`` kernels on SM90 for pages of 64.

    Raises Unmodelled where the template of a build is not known; ``aligned_batches`` still holds.
    """
    if version.metadata is None or settings.arch != 90:
        raise Unmodelled(
            f"the paged MQA metadata kernel of {version.distribution} {version.number} on "
            f"SM{settings.arch} is not known"
        )
    prefix, arity = version.metadata
    name = f"{prefix}_paged_mqa_logits_metadata"
    return {
        Kernel(
            name.rpartition("::")[2],
            name,
            (str(rows), "256", str(settings.num_sms), "false")[:arity],
            threads=32,
            smem=rows * 4,
        ): batch
        for rows, batch in aligned_batches(batches).items()
    }


def einsum_bmk_bnk_mn_kernels(
    m: int, n: int, k: int, batches: Values, settings: Settings = _DEFAULT
) -> dict[Kernel, int]:
    """Return the kernels of ``einsum("bmk,bnk->mn")``, D fp32: m, n, k are literal.

    The batch decides how often b * k is split: ``split_factor`` blocks of 64 go to one tile.
    """
    if m % 64 or n % 64 or k % 64:
        raise ValueError(f"m={m}, n={n}, k={k} must be multiples of 64: the library asserts")
    tiles = ceil_div(m, 128) * ceil_div(n, 128)
    share = max(settings.num_sms // tiles, 1)
    found: dict[Kernel, int] = {}
    for batch in to_sorted(batches).tolist():
        split_factor = ceil_div(batch * (k // 64), share)
        found.setdefault(_bmn_bnk_mn_gemm(m, n, k, split_factor, settings.arch), batch)
    return found


def _bmn_bnk_mn_gemm(m: int, n: int, k: int, split_factor: int, arch: int) -> Kernel:
    stages = 4  # what the library starts from; it always fits: 4 * 32 KiB
    loads = (128 + 128) * 64 * 2 * stages
    arguments: tuple[int, ...]
    if arch == 90:
        arguments = (m, n, k, 128, 128, 64, split_factor, stages, 128, 256)
        threads, smem = 384, loads + 16 * stages
    else:
        arguments = (m, n, k, 128, 128, 64, split_factor, 128, 128, stages, 128)
        threads, smem = 128, 128 * 128 * 2 + loads + stages * 24 + 2 * 16 + 8 + 4
    # "bmn" is the library's own slip
    name = f"sm{arch}_bmn_bnk_mn_gemm"
    return Kernel(name, f"{name}_impl", tuple(map(str, arguments)), threads, smem)
