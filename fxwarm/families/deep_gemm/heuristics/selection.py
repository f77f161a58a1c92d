"""Which kernels a call can need: the heuristic at one value of each interval, not at every M."""

from __future__ import annotations

from fxwarm.families.deep_gemm.heuristics import sm90, sm100, waves
from fxwarm.families.deep_gemm.heuristics.arith import Ints
from fxwarm.families.deep_gemm.heuristics.attainable import Values, first_of_each, to_sorted
from fxwarm.families.deep_gemm.heuristics.descriptor import Gemm
from fxwarm.families.deep_gemm.heuristics.errors import Unmodelled
from fxwarm.families.deep_gemm.heuristics.kernel import Config, Kernel
from fxwarm.families.deep_gemm.heuristics.template import generate
from fxwarm.families.deep_gemm.heuristics.versions import Version

__all__ = ["gemm_kernels", "get_best_config", "interval_firsts", "kernel_at"]

_CHUNK = 1024


def gemm_kernels(gemm: Gemm, values: Values, version: Version) -> dict[Kernel, int]:
    """Return each kernel that the call can need, with its witness.

    ``values`` are the attainable values of ``gemm.swept``: M, ``expected_m`` or max(ks). They are
    intersected with the intervals in which the choice is constant. The witness is the smallest
    attainable value that makes the library pick the kernel; kernels come in order of witness.

    (2112, 7168) dense, 132 SMs, M in 1..8192: 24 kernels from 130 evaluations.

    Raises Unmodelled where this version's choice is not known, ValueError for a negative value.
    """
    points = interval_firsts(gemm, values, version)
    found: dict[Kernel, int] = {}
    for value, kernel in zip(points.tolist(), _kernels(gemm, points, version), strict=True):
        found.setdefault(kernel, value)
    return found


def kernel_at(gemm: Gemm, value: int, version: Version) -> Kernel:
    """Return the kernel at one value of the swept dimension; raises as ``gemm_kernels``."""
    points = to_sorted([value])
    if not len(points):
        raise ValueError("at 0 the library returns without a kernel")
    return _kernels(gemm, points, version)[0]


def get_best_config(gemm: Gemm, values: Ints, version: Version) -> list[Config]:
    """Return the config at each of ``values``, by the heuristics of the device and version."""
    if len(values) > _CHUNK:  # the cost is a table of values by some 200 candidates
        parts = [values[i : i + _CHUNK] for i in range(0, len(values), _CHUNK)]
        return [c for part in parts for c in get_best_config(gemm, part, version)]
    if gemm.settings.arch == 100:
        return sm100.get_best_config(gemm, values, version)
    if version.heuristics == "new":
        return sm90.get_best_config(gemm, values)
    return waves.get_best_config(gemm, values, old=version.heuristics == "old")


def interval_firsts(gemm: Gemm, values: Values, version: Version) -> Ints:
    """Return the smallest attainable value of each interval in which the kernel is constant."""
    points = to_sorted(values)
    if gemm.swept == "m" and gemm.compiles_m:
        return points  # M is literal: every value is a kernel of its own
    if gemm.settings.arch == 100:
        ids = sm100.interval_ids(gemm, points)
    elif version.heuristics == "new":
        ids = sm90.interval_ids(gemm, points)
    else:
        ids = waves.interval_ids(gemm, points)
    return first_of_each(ids, points)


def _kernels(gemm: Gemm, points: Ints, version: Version) -> list[Kernel]:
    if gemm.swept != "m" and gemm.compiles_m and gemm.m is None:
        raise Unmodelled(f"{gemm.tag} compiles M in, but M is not given")
    made: dict[tuple[Config, int], Kernel] = {}
    kernels: list[Kernel] = []
    configs = get_best_config(gemm, points, version)
    for value, config in zip(points.tolist(), configs, strict=True):
        m = (value if gemm.swept == "m" else gemm.m or 0) if gemm.compiles_m else 0
        kernel = made.get((config, m))
        if kernel is None:
            kernel = made[config, m] = generate(gemm, config, m, version)
        kernels.append(kernel)
    return kernels
