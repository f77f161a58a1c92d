"""Sets of integers as (first, last, step) runs: short to store, exact, and equal when the sets are."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Runs = tuple[tuple[int, int, int], ...]

LARGEST = 1 << 24
"""Most values that ``to_array`` makes: 128 MiB of int64, sixteen times what is ever enumerated."""


def from_array(values: np.ndarray) -> Runs:
    """Return the runs of ``values``, ascending and distinct integers.

    Greedy from the left, so equal sets give equal runs. A run of one value has step 1.
    """
    import numpy as np

    steps = np.diff(values)
    changes = (np.flatnonzero(np.diff(steps)) + 1).tolist()  # indices at which another step begins
    out: list[tuple[int, int, int]] = []
    start, last = 0, len(values) - 1
    while start <= last:
        at = bisect.bisect_right(changes, start)
        end = min(changes[at] if at < len(changes) else last, last)
        out.append((int(values[start]), int(values[end]), int(steps[start]) if end > start else 1))
        start = end + 1
    return tuple(out)


def to_array(runs: Runs) -> np.ndarray:
    """Return the values of ``runs`` as an int64 array, in the order of the runs.

    Raises ValueError beyond ``LARGEST`` values: no set of ours is so large, a crafted file may be.
    """
    import numpy as np

    if any(step < 1 or last < first for first, last, step in runs) or size(runs) > LARGEST:
        raise ValueError(
            f"the runs {runs[:3]}... are not ascending or hold more than {LARGEST} values"
        )
    parts = [np.arange(first, last + 1, step, dtype=np.int64) for first, last, step in runs]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def size(runs: Runs) -> int:
    """Return how many values ``runs`` hold, without making them."""
    return sum((last - first) // step + 1 for first, last, step in runs)
