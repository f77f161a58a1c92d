"""What a heuristic decides (``Config``) and what the compiler is asked for (``Kernel``)."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Config", "Kernel"]


@dataclass(frozen=True)
class Kernel:
    """One kernel: two with equal tag, name and template are one binary and one cache entry.

    Launch settings ride along and do not take part in equality: the same binary is launched with
    another amount of shared memory when K differs and is not compiled in.
    """

    tag: str
    """Name of the kind, in the cache folder: ``sm90_fp8_gemm_1d2d``."""
    kernel: str
    """Name of the function template: ``sm90_fp8_gemm_1d2d_impl``."""
    template: tuple[str, ...]
    """Its arguments, in the order and spelling of the generated source."""
    threads: int = field(compare=False, default=0)
    smem: int = field(compare=False, default=0)
    """Dynamic shared memory, bytes."""
    cluster: int = field(compare=False, default=1)


@dataclass(frozen=True)
class Config:
    """The outcome of ``get_best_config`` for one M: upstream's ``GemmConfig``, flat."""

    block_m: int
    block_n: int
    block_k: int
    swizzle_a: int
    swizzle_b: int
    swizzle_cd: int
    stages: int
    tma_threads: int
    """On SM100: the threads outside the epilogue."""
    math_threads: int
    """On SM100: the threads of the epilogue."""
    cluster: int
    multicast_a: bool
    """``cluster_n > 1``; in *old* and *mid* ``is_multicast_on_a``."""
    num_sms: int
    smem: int
    last_stages: int = 0
    """*old* and *mid*: K blocks left after full rounds of the pipeline."""
    swap_ab: bool = False
    """SM100 only."""
