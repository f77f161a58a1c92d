"""What a call's dims can be: exact attainable values where the points can be enumerated, bounds where not.

Everything here reads records alone, so it gives the same answer in the process that traced the model and in one that
has only the JSON.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from passes import runs
from passes.expr import LARGEST, evaluate, magnitude, parse, to_text
from passes.points import bounds, enumerate_points, names_of, reach, select
from passes.records import Attr, Dim, KernelCall, Symbol, TensorSpec

if TYPE_CHECKING:
    import numpy as np

MOST_RUNS = 1 << 16
"""Most runs that a record stores for one dim. Products of two bounded symbols have many; kernels' rules have few."""
MOST_INTEGERS = runs.LARGEST
"""Most integers that stand in for a dim of which only bounds are known."""


class Unbounded(ValueError):
    """A dim that cannot be covered: nothing bounds it, or nothing satisfies its conditions. Becomes a Gap."""


@functools.lru_cache(1 << 12)
def bound_dim(text: str, symbols: tuple[Symbol, ...], guards: tuple[str, ...]) -> Dim:
    """Return the dim that ``text`` writes over ``symbols`` under ``guards``.

    ``values`` is the exact set of attainable values, None where more than ``points.BUDGET`` points lead to it. A guard
    over so many symbols that it had to be left out can only have added values. Raises Unbounded without an upper (or
    lower) bound, and where no point satisfies the guards.
    """

    expr = parse(text)
    if expr.is_Integer:
        return Dim.static(int(expr))
    chosen, conditions = select(names_of(expr), symbols, guards)
    columns = enumerate_points(chosen, conditions)
    if columns is not None and magnitude(expr, reach(chosen)) <= LARGEST:
        values = _distinct(evaluate(expr, columns))
        if not len(values):
            ranges = ", ".join(f"{s.lower} <= {s.name} <= {s.upper}" for s in chosen)
            raise Unbounded(
                f"no size within {ranges} satisfies {' and '.join(conditions) or 'its range'}; raise max_size, "
                "or correct the range given to mark_dynamic or torch._check"
            )
        stored = runs.from_array(values)
        return Dim(
            text, int(values[0]), int(values[-1]), stored if len(stored) <= MOST_RUNS else None
        )
    lower, upper = bounds(expr, chosen, conditions)
    if lower is None or upper is None:
        raise Unbounded(
            f"{text} has no {'upper' if upper is None else 'lower'} bound; bound it with torch._check"
        )
    return Dim(text, lower, upper)


def _distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct values, ascending: what np.unique does, but fast for what is ascending already."""
    import numpy as np

    if len(values) < 2:
        return values
    steps = np.diff(values)
    if (steps < 0).any():
        values = np.sort(values)
        steps = np.diff(values)
    return values[np.concatenate(([True], steps > 0))]


class Image:
    """The joint attainable values of some expressions of a call: one row each, and the smallest sizes that lead to it.

    ``rows`` is an int64 array, a column an expression, sorted lexicographically and unique. ``exact`` is False where the
    call could not be enumerated: then the rows are all integers between the bounds of the one expression.
    """

    __slots__ = ("_sizes_of", "exact", "rows")

    def __init__(
        self, rows: np.ndarray, sizes_of: Callable[[int], dict[str, int]], exact: bool
    ) -> None:
        self.rows = rows
        self.exact = exact
        self._sizes_of = sizes_of

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, row: int) -> dict[str, int]:
        """Return the smallest sizes, by symbol, at which the expressions have the values of ``rows[row]``.

        Smallest in the order of the call's symbols. In an image that is not exact the sizes are searched for, and
        ValueError is raised where none are found: the row may be one that no sizes lead to.
        """
        return self._sizes_of(row)


def image(call: KernelCall, *exprs: str | Dim) -> Image:
    """Return the joint attainable values of ``exprs`` over the sizes of ``call``.

        image(call, "s0", "Max(1, 132//s0)").rows   ->   [[1, 132], [2, 66], [3, 44], ...]

    Without expressions the one row is empty. Raises ValueError where the call cannot be enumerated and there are several
    expressions, or one with more than ``MOST_INTEGERS`` integers between its bounds.
    """
    return _image(
        call.symbols, call.guards, tuple(e.expr if isinstance(e, Dim) else e for e in exprs)
    )


@functools.lru_cache(64)
def _image(symbols: tuple[Symbol, ...], guards: tuple[str, ...], texts: tuple[str, ...]) -> Image:
    import numpy as np

    parsed = [parse(text) for text in texts]
    own = frozenset().union(*map(names_of, parsed))
    unknown = own - {s.name for s in symbols}
    if unknown:
        raise ValueError(
            f"{', '.join(texts)}: the call has no symbol {', '.join(sorted(unknown))}; name one that it has"
        )
    domain = symbols, guards
    columns = enumerate_points(*domain)
    if columns is None:  # the sizes that the expressions do not need may be too many
        domain = select(own, symbols, guards)
        columns = enumerate_points(*domain)
    if columns is None or any(magnitude(e, reach(domain[0])) > LARGEST for e in parsed):
        return _interval(symbols, guards, texts)
    count = len(next(iter(columns.values()))) if columns else 1
    rows = np.empty((count, len(parsed)), np.int64)
    for at, expr in enumerate(parsed):
        rows[:, at] = evaluate(expr, columns)
    # stable, last key first: of equal rows the one of the smallest point stays in front
    order = np.lexsort(rows.T[::-1]) if parsed else np.arange(min(count, 1))
    rows = rows[order]
    fresh = np.ones(len(rows), bool)
    fresh[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    rest = {s.name: np.full(count, s.lower, np.int64) for s in symbols if s.name not in columns}
    everything, first = {**columns, **rest}, order[fresh]
    return Image(
        rows[fresh],
        lambda row: {name: int(column[first[row]]) for name, column in everything.items()},
        exact=True,
    )


def _interval(
    symbols: tuple[Symbol, ...], guards: tuple[str, ...], texts: tuple[str, ...]
) -> Image:
    """Return all integers between the bounds of the one expression."""
    if len(texts) != 1:
        raise ValueError(
            f"{', '.join(texts)} cannot be enumerated together; give their sizes smaller upper bounds"
        )
    dim = bound_dim(texts[0], symbols, guards)
    if dim.upper is None or dim.upper - dim.lower >= MOST_INTEGERS:
        raise ValueError(
            f"{dim} ranges over {dim.lower}..{dim.upper}, too many to list; give it a smaller upper bound"
        )
    values = runs.to_array(((dim.lower, dim.upper, 1),))
    return Image(
        values.reshape(-1, 1),
        lambda row: _solve(parse(texts[0]), int(values[row]), symbols, guards),
        exact=False,
    )


def _solve(
    expr: Any, value: int, symbols: tuple[Symbol, ...], guards: tuple[str, ...]
) -> dict[str, int]:
    """Return sizes at which ``expr`` is ``value``: from the last symbol on, each as large as it may be.

    Finds them where the expression grows with its symbols, as numbers of rows do, and the guards do not interfere.
    """
    sizes = {s.name: s.lower for s in symbols}
    for s in reversed(symbols):
        if s.name not in names_of(expr):
            continue
        low, high = s.lower, value if s.upper is None else s.upper
        while low < high:
            middle = (low + high + 1) // 2
            if int(evaluate(expr, {**sizes, s.name: middle})) <= value:
                low = middle
            else:
                high = middle - 1
        sizes[s.name] = low
    if int(evaluate(expr, sizes)) != value or not all(evaluate(parse(g), sizes) for g in guards):
        raise ValueError(
            f"no sizes were found at which {to_text(expr)} is {value}; give them smaller upper bounds"
        )
    return sizes


def at(call: KernelCall, sizes: Mapping[str, int]) -> KernelCall:
    """Return ``call`` at ``sizes``: the static call that a graph of these sizes would make.

    Every dim is a number, strides are numbers (none where the tensor is contiguous at these sizes, which a tensor with
    a dim of size 1 may be), and there are no symbols or guards. Raises ValueError for a symbol without a size.
    """
    missing = [s.name for s in call.symbols if s.name not in sizes]
    if missing:
        raise ValueError(f"{call} needs a size for {', '.join(missing)}")

    def number(text: str) -> int:
        return int(evaluate(parse(text), sizes)) if not text.isdigit() else int(text)

    def tensor(spec: TensorSpec) -> TensorSpec:
        dims = tuple(number(d.expr) for d in spec.dims)
        strides = tuple(number(s) for s in spec.strides)
        static = tuple(map(Dim.static, dims))
        return TensorSpec(
            spec.dtype, static, () if is_contiguous(dims, strides) else tuple(map(str, strides))
        )

    def attr(value: Attr) -> Attr:
        if isinstance(value, tuple):
            return tuple(number(v.expr) if isinstance(v, Dim) else v for v in value)
        return number(value.expr) if isinstance(value, Dim) else value

    return msgspec.structs.replace(
        call,
        tensors=tuple((name, tensor(spec)) for name, spec in call.tensors),
        attrs=tuple((name, attr(value)) for name, value in call.attrs),
        symbols=(),
        guards=(),
    )


def is_contiguous(dims: tuple[Any, ...], strides: tuple[Any, ...]) -> bool:
    """Whether a tensor of these dims and strides (ints or expressions) is contiguous at every size; adds no guard.

    As torch has it, the stride of a dim of size 1 does not count, and an empty tensor is contiguous. Decided
    conservatively: a dynamic dim may be 1 in one graph and 7 in the next, so its stride counts, and a stride that only
    a guard could prove equal is not.
    """
    if any(isinstance(d, int) and d == 0 for d in dims):
        return True
    expected: Any = 1
    for dim, stride in zip(reversed(dims), reversed(strides), strict=False):
        if isinstance(dim, int) and dim == 1:
            continue
        if stride != expected and not _equal(stride, expected):
            return False
        expected = dim * expected
    return True


def _equal(one: Any, other: Any) -> bool:
    """Whether two strides are the same expression. torch writes Max(1, u0) where u0 may be 0: the same, if not empty."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    import sympy

    def plain(value: Any) -> Any:
        value = sympy.sympify(value)
        return value.replace(
            lambda e: type(e).__name__ == "Max" and len(e.args) == 2 and sympy.S.One in e.args,
            lambda e: next(a for a in e.args if a != 1),
        )

    return bool(sympy.expand(plain(one) - plain(other)) == 0)
