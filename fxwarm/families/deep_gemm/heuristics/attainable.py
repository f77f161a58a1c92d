"""The values a dimension can take, and the first of each interval in which nothing changes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fxwarm.families.deep_gemm.heuristics.arith import Ints

__all__ = ["Values", "first_of_each", "to_sorted"]

Values = Iterable[int] | tuple[int, int] | Ints
"""``(low, high)``, a *tuple*, means every integer from low to high; anything else its elements."""


def to_sorted(values: Values) -> Ints:
    """Return the positive values, sorted and distinct.

    0 is dropped: the library returns before it needs a kernel. Raises ValueError below 0.
    """
    if isinstance(values, tuple):
        if len(values) != 2:
            raise ValueError(f"a tuple is (low, high), not {len(values)} values; give a list")
        low, high = values
        found: Ints = np.arange(low, high + 1, dtype=np.int64)
    elif isinstance(values, range):
        found = np.arange(values.start, values.stop, values.step, dtype=np.int64)
    else:
        raw = values if isinstance(values, np.ndarray) else list(values)
        found = np.asarray(raw, dtype=np.int64).reshape(-1)
    if len(found) > 1 and not bool(np.all(found[1:] > found[:-1])):
        found = np.unique(found)
    if len(found) and found[0] < 0:
        raise ValueError(f"{found[0]} is no size of a dimension; give values from 0 up")
    return found[found > 0]


def first_of_each(ids: Ints, values: Ints) -> Ints:
    """Return the smallest value of each run of equal ids; ``values`` are sorted."""
    new = np.ones(len(ids), np.bool_)
    new[1:] = ids[1:] != ids[:-1]
    return values[new]
