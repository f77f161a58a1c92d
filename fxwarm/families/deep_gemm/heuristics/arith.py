"""Integer helpers, for ints and numpy arrays alike; names as in DeepGEMM's ``utils/math.hpp``."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ints", "align", "ceil_div", "get_swizzle_mode"]

Ints = NDArray[np.int64]
T = TypeVar("T", int, Ints)


def ceil_div(a: T, b: int) -> T:
    """Return ceil(a / b)."""
    return (a + (b - 1)) // b


def align(a: T, b: int) -> T:
    """Return the smallest multiple of ``b`` that is not below ``a``."""
    return ceil_div(a, b) * b


def get_swizzle_mode(block: int, element_size: int) -> int:
    """Return the widest TMA swizzle, in bytes, of ``block`` elements; 16 means none."""
    return next(mode for mode in (128, 64, 32, 16) if block * element_size % mode == 0)
