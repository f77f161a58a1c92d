"""Makes the record of a call: symbols renamed by first use, dims bounded, the guards that matter as text.

    a: "bf16[8*s77, 7168]", out: "bf16[8*s77, 2112]"; s77 in 1..8192, Mod(s77, 8) == 0

    KernelCall(deep_gemm, bf16_gemm_nt, a=bf16[8*s0, 7168], d=bf16[8*s0, 2112],
               symbols=s0 in 1..8192, guards="Mod(s0, 8) == 0")

Two functions that call the same kernel on the same shapes give equal records, whatever torch named their symbols.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from passes.bound import Unbounded, bound_dim, is_contiguous
from passes.expr import rename, to_text
from passes.points import bounds, select
from passes.records import Attr, Dim, KernelCall, Symbol, TensorSpec
from passes.sizes import Range, Sizes

if TYPE_CHECKING:
    import sympy


Size: TypeAlias = "int | sympy.Expr"
Value: TypeAlias = "SymTensor | int | sympy.Expr | float | bool | str | tuple[Value, ...] | None"

MOST_ORDERS = 24
"""Most orders tried for symbols that first appear together; beyond, the order of the graph's inputs stands."""


@dataclasses.dataclass(frozen=True)
class SymTensor:
    """A tensor of a graph: its dtype (torch's name without ``torch.``), sizes, strides, device.

    ``strides`` are in elements, None where the tensor is contiguous. ``placeholder`` is the index of the graph input
    that it is, None where it is computed, or not known.
    """

    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...] | None = None
    device: str = "cpu"
    placeholder: int | None = dataclasses.field(default=None, compare=False)

    @property
    def is_static(self) -> bool:
        """Whether every size is a number."""
        return all(isinstance(size, int) for size in self.shape)


@dataclasses.dataclass(frozen=True)
class _Frame:
    """What a set of expressions is over: the record's symbols and guards, and the text of each expression."""

    symbols: tuple[Symbol, ...]
    guards: tuple[str, ...]
    texts: dict[Any, str]
    origins: dict[str, sympy.Symbol]


class Bounder:
    """Makes the records of one graph, each distinct one once. Adds no guard.

    ``used_max_size`` says which sizes of the calls so far had no bound of their own, in the model's words.
    """

    def __init__(self, sizes: Sizes | None = None) -> None:
        self.sizes = Sizes() if sizes is None else sizes
        self._calls: dict[object, KernelCall] = {}
        self._frames: dict[object, _Frame] = {}
        self._used: dict[str, None] = {}

    @property
    def used_max_size(self) -> tuple[str, ...]:
        """What ``max_size`` had to bound: ``("x.shape[0] <= 8192",)``."""
        return tuple(self._used)

    def call(
        self, family: str, op: str, tensors: Mapping[str, SymTensor], attrs: Mapping[str, Value]
    ) -> KernelCall:
        """Return the record of a call of ``op`` of ``family``.

        Raises Unbounded, a ValueError, where a dim cannot be bounded, naming the size and what to do.
        """
        key = (
            family,
            op,
            tuple(tensors.items()),
            tuple((name, _typed(value)) for name, value in attrs.items()),
        )
        if key not in self._calls:
            self._calls[key] = self._make_call(family, op, tensors, attrs)
        return self._calls[key]

    def dim(self, size: Any) -> Dim:
        """Return ``size`` (an int, SymInt or expression) as a dim of its own."""
        size = self.sizes.size(size)
        return self._dim(size, self._frame((size,), (size,)))

    def _make_call(
        self, family: str, op: str, tensors: Mapping[str, SymTensor], attrs: Mapping[str, Value]
    ) -> KernelCall:
        size = self.sizes.size
        shapes = {name: tuple(map(size, tensor.shape)) for name, tensor in tensors.items()}
        values = {name: self._plain(name, value) for name, value in attrs.items()}
        strides = {name: tuple(map(size, tensor.strides or ())) for name, tensor in tensors.items()}
        strides = {name: () if is_contiguous(shapes[name], s) else s for name, s in strides.items()}
        dims = [d for shape in shapes.values() for d in shape]
        inner = [
            v
            for value in values.values()
            for v in (value if isinstance(value, tuple) else (value,))
        ]
        frame = self._frame((*dims, *inner, *(s for each in strides.values() for s in each)), dims)

        def attr(value: Any) -> Attr:
            if isinstance(value, tuple):
                return tuple(attr(v) for v in value)  # type: ignore[misc]
            return self._dim(value, frame) if hasattr(value, "free_symbols") else value

        return KernelCall(
            family,
            op,
            tuple(
                (
                    name,
                    TensorSpec(
                        tensor.dtype,
                        tuple(self._dim(d, frame) for d in shapes[name]),
                        tuple(frame.texts.get(s) or str(s) for s in strides[name]),
                    ),
                )
                for name, tensor in tensors.items()
            ),
            tuple((name, attr(value)) for name, value in values.items()),
            frame.symbols,
            frame.guards,
        )

    def _plain(self, name: str, value: Any) -> Any:
        """Return an attribute with its expressions simplified. Raises TypeError for what no record can hold."""
        if isinstance(value, tuple | list):
            return tuple(self._plain(name, v) for v in value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if hasattr(value, "node") or hasattr(value, "free_symbols"):
            return self.sizes.size(value)
        raise TypeError(
            f"the attribute {name} is a {type(value).__name__}; give a number, a string or an expression"
        )

    def _dim(self, size: Size, frame: _Frame) -> Dim:
        if isinstance(size, int):
            return Dim.static(size)
        try:
            return bound_dim(frame.texts[size], frame.symbols, frame.guards)
        except Unbounded as error:
            free = [frame.origins[s.name] for s in frame.symbols if s.upper is None]
            free = [s for s in free if s in size.free_symbols]
            if not free:
                raise
            names = ", ".join(map(self.sizes.words, free))
            raise Unbounded(
                f"the size {size} has no upper bound, because the data decide {names}; "
                f"bound {', '.join(map(str, free))} in the model with torch._check(n <= ...)"
            ) from error

    def _frame(self, exprs: Iterable[Any], dims: Iterable[Any]) -> _Frame:
        """Return the frame of ``exprs``, of which ``dims`` are sizes of tensors."""
        found = tuple(dict.fromkeys(e for e in exprs if hasattr(e, "free_symbols")))
        sizes = frozenset(d for d in dims if not isinstance(d, int))
        key = found, sizes
        if key not in self._frames:
            self._frames[key] = self._make_frame(found, sizes)
        return self._frames[key]

    def _make_frame(self, exprs: tuple[Any, ...], dims: frozenset[Any]) -> _Frame:
        own: dict[Any, None] = {}  # in order of first use: a set's order changes with the hash seed
        groups: list[list[Any]] = []  # symbols that first appear together
        for expr in exprs:
            fresh = sorted(expr.free_symbols - own.keys(), key=self.sizes.rank)
            own.update(dict.fromkeys(fresh))
            groups += [fresh] if fresh else []
        ranges = {s: self._make_positive(s, dims) for s in own}
        caps = [cap for cap in self.sizes.caps if cap.symbols <= own.keys()]
        for used in (*(w for s in own for w in ranges[s].capped), *(cap.words for cap in caps)):
            self._used[used] = None

        conditions = list(dict.fromkeys(c for s in own for c in self.sizes.conditions_on(s)))
        further = sorted(
            {s for c in conditions for s in c.free_symbols} - own.keys(), key=self.sizes.rank
        )
        for s in further:
            # what only max_size bounds must not shrink a size of another input: its guards are left out
            with contextlib.suppress(Unbounded):
                found = self.sizes.range(s)
                if not found.capped:
                    ranges[s] = found
        conditions = [cap.condition for cap in caps] + [
            c for c in conditions if c.free_symbols <= ranges.keys()
        ]
        groups.append([s for s in further if s in ranges])
        tried = self._name(sum(map(tuple, groups), ()), exprs, own, ranges, conditions)
        kept = {tried.origins[s.name] for s in tried.symbols}
        conditions = [c for c in conditions if c.free_symbols <= kept]
        groups = [left for g in groups if (left := [s for s in g if s in kept])]

        orders = [list(itertools.permutations(g)) if len(g) > 1 else [tuple(g)] for g in groups]
        if math.prod(map(len, orders)) > MOST_ORDERS:
            orders = [[tuple(g)] for g in groups]
        # torch's names must not show: of the possible orders the one that reads smallest is the canonical one
        frames = [
            self._name(sum(order, ()), exprs, own, ranges, conditions)
            for order in itertools.product(*orders)
        ]
        return min(
            frames,
            key=lambda f: (
                [(s.lower, s.upper or 0) for s in f.symbols],
                list(f.texts.values()),
                f.guards,
            ),
        )

    def _make_positive(self, symbol: Any, dims: frozenset[Any]) -> Range:
        """Return the range of ``symbol``, from 1 if a tensor of the call would be empty at 0: no kernel runs then."""
        found = self.sizes.range(symbol)
        if found.lower == 0 and any(symbol in d.free_symbols and _is_zero(d, symbol) for d in dims):
            return dataclasses.replace(found, lower=1)
        return found

    def _name(
        self,
        order: tuple[Any, ...],
        exprs: tuple[Any, ...],
        own: Collection[Any],
        ranges: Mapping[Any, Range],
        conditions: list[Any],
    ) -> _Frame:
        """Return the frame with the symbols named s0, s1, ... in ``order``."""
        names = {s: f"s{i}" for i, s in enumerate(order)}
        symbols = tuple(Symbol(names[s], ranges[s].lower, ranges[s].upper) for s in order)
        texts = {e: to_text(rename(e, names)) for e in exprs}
        guards = set()
        for condition in conditions:
            renamed = rename(condition, names)
            try:
                if not _is_certain(renamed, symbols):
                    guards.add(to_text(renamed))
            except ValueError:  # a function that we cannot compute: without its guard there are more points, not fewer
                continue
        chosen, relevant = select({names[s] for s in own}, symbols, tuple(sorted(guards)))
        return _Frame(chosen, relevant, texts, {name: s for s, name in names.items()})


def _is_zero(size: Any, symbol: Any) -> bool:
    """Whether ``size`` vanishes where ``symbol`` does."""
    try:
        return bool(size.subs(symbol, 0) == 0)
    except (ZeroDivisionError, AssertionError):
        return False


def _is_certain(condition: Any, symbols: tuple[Symbol, ...]) -> bool:  # noqa: PLR0911
    """Whether ``condition`` holds at every size, so that it need not be recorded."""
    if condition.is_Boolean and not condition.free_symbols:
        return bool(condition == True)  # noqa: E712  (sympy's)
    if not condition.is_Relational:
        return False
    lower, upper = bounds(condition.lhs - condition.rhs, symbols, ())
    match type(condition).__name__:
        case "LessThan":
            return upper is not None and upper <= 0
        case "StrictLessThan":
            return upper is not None and upper < 0
        case "GreaterThan":
            return lower is not None and lower >= 0
        case "StrictGreaterThan":
            return lower is not None and lower > 0
        case "Unequality":
            return (upper is not None and upper < 0) or (lower is not None and lower > 0)
    return False


def _typed(value: Any) -> object:
    """Return a key for an attribute that tells 1, True and 1.0 apart."""
    return tuple(map(_typed, value)) if isinstance(value, tuple | list) else (type(value), value)
