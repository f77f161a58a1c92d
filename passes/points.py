"""The points of a call: every assignment of its symbols that ranges and guards allow, enumerated.

    symbols: s0 in 1..8192, s1 in 1..8192      guards: s0*s1 <= 8192, Mod(s0, 8) == 0
    points:  (8, 1), (8, 2), ..., (8192, 1)    7,262 of them, in lexicographic order

A product that a guard caps is enumerated as the ragged box it is: 8192 x 8192 with the product at most 8192 are 75,108
points, not 67 million.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from passes.expr import LARGEST, evaluate, magnitude, parse, to_text
from passes.records import Symbol

if TYPE_CHECKING:
    import numpy as np
    import sympy

BUDGET = 1 << 20
"""Most points that are ever enumerated: about 10 ms and 8 MiB a symbol. Beyond it only bounds are known."""

Columns = dict[str, "np.ndarray"]
"""One int64 array a symbol, of equal lengths: point i is (columns[s][i] for each symbol s)."""


@functools.lru_cache(16)
def enumerate_points(symbols: tuple[Symbol, ...], guards: tuple[str, ...]) -> Columns | None:
    """Return all points of ``symbols`` that satisfy ``guards``, ordered lexicographically, or None if too many.

    None also where a symbol has no upper bound. A guard over other symbols, or one that cannot be computed, is
    ignored: it could only have taken points away.
    """
    import numpy as np

    largest = reach(symbols)
    if any(most > LARGEST for most in largest.values()):
        return None
    conditions = [
        c for c in map(parse, guards) if names_of(c) <= largest.keys() and is_safe(c, largest)
    ]
    caps = [cap for cap in map(cap_of, conditions) if cap is not None]
    columns: Columns = {}
    count = 1
    for at, added in enumerate(symbols):
        lowest = {s.name: s.lower for s in symbols[at + 1 :]}
        last = np.full(count, added.upper, np.int64)
        for factors, most in caps:
            if added.name not in factors or any(s.lower < 0 for s in symbols if s.name in factors):
                continue
            others: Any = np.ones(count, np.int64)
            for name in factors - {added.name}:
                others = others * (columns[name] if name in columns else lowest[name])
            last = np.where(others > 0, np.minimum(last, most // np.maximum(others, 1)), last)
        counts = np.maximum(last - added.lower + 1, 0)
        count = int(counts.sum())
        if count > BUDGET:
            return None
        before = np.repeat(np.cumsum(counts) - counts, counts)
        columns = {name: np.repeat(column, counts) for name, column in columns.items()}
        columns[added.name] = np.arange(count, dtype=np.int64) - before + added.lower
        for condition in conditions:
            if added.name in names_of(condition) and names_of(condition) <= columns.keys():
                keep = holds(condition, columns)
                columns = {name: column[keep] for name, column in columns.items()}
                count = len(columns[added.name])
    return columns


def select(
    own: Collection[str], symbols: tuple[Symbol, ...], guards: tuple[str, ...]
) -> tuple[tuple[Symbol, ...], tuple[str, ...]]:
    """Return the symbols and guards that say what ``own`` can be, few enough to enumerate if any choice is.

    Guards over ``own`` alone always count. One over further symbols pulls them in if the points still fit the budget,
    else it is left out, which can only add points.
    """
    taken = set(own)
    scopes = {guard: names_of(parse(guard)) for guard in guards}

    def chosen() -> tuple[tuple[Symbol, ...], tuple[str, ...]]:
        return (
            tuple(s for s in symbols if s.name in taken),
            tuple(g for g in guards if scopes[g] <= taken),
        )

    if enumerate_points(*chosen()) is None:
        return chosen()
    refused: set[frozenset[str]] = set()
    while True:
        linked = [scopes[g] - taken for g in guards if scopes[g] & taken and scopes[g] - taken]
        further = min(
            (f for f in linked if f not in refused), key=lambda f: (len(f), sorted(f)), default=None
        )
        if further is None:
            return chosen()
        taken |= further
        if not further <= {s.name for s in symbols} or enumerate_points(*chosen()) is None:
            taken -= further
            refused.add(further)


def cap_of(condition: Any) -> tuple[frozenset[str], int] | None:
    """Return (factors, most) of a condition ``s0*s1 <= 8192`` over distinct symbols, else None."""
    if (
        type(condition).__name__ not in ("LessThan", "StrictLessThan")
        or not condition.rhs.is_Integer
    ):
        return None
    product = condition.lhs
    if not product.is_Mul or not all(f.is_Symbol for f in product.args):
        return None
    most = int(condition.rhs) - (type(condition).__name__ == "StrictLessThan")
    return names_of(product), most


@functools.lru_cache(1 << 14)
def names_of(expr: sympy.Basic) -> frozenset[str]:
    """Return the names of the symbols of ``expr``."""
    return frozenset(s.name for s in expr.free_symbols)  # type: ignore[attr-defined]


def reach(symbols: Iterable[Symbol]) -> dict[str, int]:
    """Return the largest absolute value of each symbol; ``LARGEST`` + 1 where it has no bound."""
    return {
        s.name: LARGEST + 1 if s.upper is None else max(abs(s.lower), abs(s.upper)) for s in symbols
    }


def is_safe(expr: sympy.Basic, largest: dict[str, int]) -> bool:
    """Whether ``expr`` can be computed over arrays: every function is known and int64 cannot wrap around."""
    try:
        to_text(expr)
    except ValueError:
        return False
    return magnitude(expr, largest) <= LARGEST


def holds(condition: sympy.Basic, columns: Columns) -> np.ndarray:
    """Return at which points ``condition`` is true."""
    import numpy as np

    return np.asarray(evaluate(condition, columns), bool)


def bounds(
    expr: Any, symbols: tuple[Symbol, ...], guards: tuple[str, ...]
) -> tuple[int | None, int | None]:
    """Return the least and the greatest value of ``expr`` by interval arithmetic; None where there is no bound.

    A capped product that ``expr`` holds is one quantity: with s0*s1 <= 8192, 128*s0*s1 is at most 2**20.
    """
    import sympy
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    box = {s.name: (s.lower, s.upper) for s in symbols}
    for factors, most in filter(None, map(cap_of, map(parse, guards))):
        product = sympy.Mul(*(s for s in expr.free_symbols if s.name in factors))
        whole = sympy.Symbol("_".join(sorted(factors)), integer=True)
        replaced = expr.subs(product, whole)
        if (
            factors <= names_of(expr)
            and not factors & names_of(replaced)
            and all(box[f][0] >= 0 for f in factors)
        ):
            expr, box = replaced, {**box, whole.name: (math.prod(box[f][0] for f in factors), most)}
    ranges = {}
    for s in expr.free_symbols:
        lower, upper = box[s.name]
        ranges[s] = ValueRanges(
            sympy.Integer(lower), int_oo if upper is None else sympy.Integer(upper)
        )
    found = bound_sympy(expr, ranges)
    return _finite(found.lower, -1), _finite(found.upper, 1)


def _finite(bound: Any, towards: int) -> int | None:
    """Return an interval's end as an integer, rounded outwards; None for every kind of infinity."""
    if bound is None or not bound.is_number or not bound.is_comparable or abs(bound) > LARGEST:
        return None  # int_oo.is_finite is True, so infinity is told by its size
    return int(math.floor(bound) if towards < 0 else math.ceil(bound))
