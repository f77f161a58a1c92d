"""What a graph says of its sizes: the range of each symbol, the guards over them, and where ``max_size`` comes in.

    x: "bf16[s77, s27, 7168]", s77 and s27 in [2, int_oo], guard Eq(Mod(s77, 8), 0), max_size=8192

    s77 in 1..8192, s27 in 1..8192, s77*s27 <= 8192, Mod(s77, 8) == 0

Only reads that add no guard to the ShapeEnv: ``node.expr``, ``simplify``, ``var_to_range`` and lists. A SymInt is never
compared, and never made an int.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from passes.bound import Unbounded
from passes.places import name_of

if TYPE_CHECKING:
    import sympy
    import torch
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

Size: TypeAlias = "int | sympy.Expr"

NO_BOUND = (1 << 31) - 1
"""An upper bound from here on is the width of an index and bounds nothing: torch gives u0 <= 2**63 - 2."""


@dataclasses.dataclass(frozen=True)
class Range:
    """What a symbol can be. ``capped`` are the sizes that ``max_size`` had to bound for that, in the model's words."""

    lower: int
    upper: int | None
    capped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Cap:
    """A product of leading sizes of one input that ``max_size`` bounds: batch times sequence is a number of tokens."""

    symbols: frozenset[sympy.Symbol]
    condition: sympy.Basic
    words: str


def check_max_size(max_size: object) -> int:
    """Return ``max_size`` if it is an integer of at least 1. Raises ValueError naming what it is instead."""
    if isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1:
        raise ValueError(
            f"max_size={max_size!r} is no size; give the largest number of tokens, an int such as 8192"
        )
    return max_size


class Sizes:
    """The sizes of one graph. Without a ShapeEnv there are only numbers."""

    def __init__(
        self,
        shape_env: ShapeEnv | None = None,
        *,
        max_size: int = 8192,
        inputs: Mapping[str, torch.Tensor | torch.SymInt | Any] | None = None,
        ranges: Mapping[sympy.Symbol, Any] | None = None,
        pins: Mapping[sympy.Symbol, int] | None = None,
    ) -> None:
        """Read ``shape_env``.

        ``inputs`` are the fake values of the graph's placeholders by name, ``ranges`` the ``range_constraints`` of an exported
        program (they win: the ShapeEnv says [2, ...] where the user said 1), ``pins`` the symbols that stand for a
        weight's size and so have one value.
        """
        self.max_size = check_max_size(max_size)
        self._env = shape_env
        self._pins = _numbers(pins or {})
        self._given = dict(ranges or {})
        self._simple: dict[sympy.Basic, Any] = {}
        self._ranges: dict[sympy.Symbol, Range] = {}
        self._conditions = self._read_conditions()
        shapes = [self._read_input(value) for value in (inputs or {}).values()]
        self._inputs: dict[sympy.Symbol, str] = {}  # where each first appears, in order
        for (name, value), (shape, _) in zip((inputs or {}).items(), shapes, strict=True):
            for dim, size in enumerate(shape):
                words = f"{name}.shape[{dim}]" if hasattr(value, "shape") else name
                for symbol in sorted(_symbols(size), key=str):
                    self._inputs.setdefault(symbol, words)
        self.caps = self._make_caps(shapes)

    def size(self, value: Any) -> Any:
        """Return an int, SymInt or expression as an int or a simplified expression; adds no guard.

        Raises ValueError for a size that has no expression (the ragged dim of a nested tensor).
        """
        if type(value) is int:
            return value
        expr = value
        if hasattr(value, "node"):
            expr = getattr(value.node, "expr", None)
            if expr is None:
                raise ValueError(
                    f"the size {value} is the ragged dim of a nested tensor; pass its values instead"
                )
        if isinstance(expr, int):
            return int(expr)
        if expr not in self._simple:
            self._simple[expr] = self._simplify(expr)
        return self._simple[expr]

    def _simplify(self, expr: Any) -> Any:
        if self._env is not None and expr.free_symbols:
            expr = self._env.simplify(expr)
        if self._pins and expr.free_symbols & self._pins.keys():
            expr = expr.xreplace(self._pins)
        return int(expr) if expr.is_Integer else expr

    def range(self, symbol: sympy.Symbol) -> Range:
        """Return what ``symbol`` can be: its range, widened to batch one, and bounded by ``max_size`` if it is an input.

        A lower bound of 2 is torch's 0/1 specialisation: batch one gets a graph of its own, and its kernels should be
        warm before that exists. A number that the model is given, without bounds, counts from 0. Raises Unbounded for an
        input that ``max_size`` excludes.
        """
        if symbol not in self._ranges:
            self._ranges[symbol] = Range(
                0, None
            )  # while its conditions are read: they may lead back to it
            self._ranges[symbol] = self._make_range(symbol)
        found = self._ranges[symbol]
        if found.upper is not None and found.upper < found.lower:
            raise Unbounded(
                f"{self.words(symbol)} is at least {found.lower}, more than max_size={self.max_size}; "
                "raise max_size, or give the size an upper bound with torch._check or mark_dynamic(min=, max=)"
            )
        return found

    def _make_range(self, symbol: sympy.Symbol) -> Range:
        given = self._given.get(symbol)
        known = given if given is not None else self._env and self._env.var_to_range.get(symbol)
        lower = _number(known.lower) if known else None
        upper = _number(known.upper) if known else None
        lower = 0 if lower is None else lower
        if lower == 2 and given is None and not is_unbacked(symbol):
            lower = 1
        if upper is not None and upper < NO_BOUND:
            return Range(lower, upper)
        upper, capped = self._bound_by_conditions(symbol)
        if (upper is None or capped) and self.is_input(symbol):
            return Range(lower, self.max_size, (f"{self.words(symbol)} <= {self.max_size}",))
        return Range(lower, upper, capped)

    def _bound_by_conditions(self, symbol: sympy.Symbol) -> tuple[int | None, tuple[str, ...]]:
        """Return the least upper bound that a linear condition gives: u0 <= 2*s77, with s77 at most 8192."""
        import sympy
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

        best: tuple[int | None, tuple[str, ...]] = None, ()
        for condition in self.conditions_on(symbol):
            if type(condition).__name__ in ("LessThan", "StrictLessThan"):
                over = condition.lhs - condition.rhs
            elif type(condition).__name__ in ("GreaterThan", "StrictGreaterThan"):
                over = condition.rhs - condition.lhs
            else:
                continue
            factor = sympy.expand(over).coeff(symbol)
            rest = sympy.expand(over - factor * symbol)
            if not factor.is_Integer or factor <= 0 or symbol in rest.free_symbols:
                continue
            box, capped = {}, []  # type: ignore[var-annotated]
            for other in rest.free_symbols:
                found = self._ranges_of(other)
                top = int_oo if found.upper is None else sympy.Integer(found.upper)
                box[other] = ValueRanges(
                    sympy.Integer(min(found.lower, found.upper or found.lower)), top
                )
                capped += found.capped
            most = _number(bound_sympy(-rest, box).upper)
            if (
                most is not None
                and most < NO_BOUND
                and (best[0] is None or most // int(factor) < best[0])
            ):
                best = most // int(factor), tuple(dict.fromkeys(capped))
        return best

    def is_input(self, symbol: sympy.Symbol) -> bool:
        """Whether ``symbol`` is a size that the caller chooses, not one that the data decide."""
        return symbol in self._inputs or not is_unbacked(symbol)

    def rank(self, symbol: sympy.Symbol) -> tuple[int, str]:
        """Order symbols as the inputs of the graph do, which torch's names do not."""
        order = list(self._inputs)
        return order.index(symbol) if symbol in order else len(order), str(symbol)

    def words(self, symbol: sympy.Symbol) -> str:
        """Return where ``symbol`` comes from, in the model's words: x.shape[0]."""
        sources = getattr(self._env, "var_to_sources", {}).get(symbol)
        # torch keeps no source of what mark_unbacked marked
        return name_of(sources[0]) if sources else self._inputs.get(symbol, str(symbol))

    def conditions_on(self, symbol: sympy.Symbol) -> list[sympy.Basic]:
        """Return the guards and the torch._check conditions that mention ``symbol``."""
        return self._conditions.get(symbol, [])

    def _read_conditions(self) -> dict[sympy.Symbol, list[sympy.Basic]]:
        env = self._env
        if env is None:
            return {}
        found = [guard.expr for guard in env.guards]
        for asserts in getattr(env, "deferred_runtime_asserts", {}).values():
            found += [deferred.expr for deferred in asserts]
        by_symbol: dict[sympy.Symbol, list[sympy.Basic]] = {}
        for condition in dict.fromkeys(found):
            # replaced, not simplified: with Eq(s27, 16) known, the guard that says so must not mention s27 any more
            simple = env.replace(condition).xreplace(self._pins)
            for symbol in simple.free_symbols:
                by_symbol.setdefault(symbol, []).append(simple)
        return by_symbol

    def _read_input(self, value: Any) -> tuple[tuple[Any, ...], bool]:
        """Return the sizes of a placeholder, and whether its last dim is a feature dim (never part of a batch)."""
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            local = getattr(value, "_local_tensor", value)
            sizes = tuple(
                self.size(d)
                for d in local.shape
                if getattr(getattr(d, "node", d), "expr", d) is not None
            )
            return sizes, bool(value.dtype.is_floating_point)
        return (
            ((self.size(value),), True)
            if hasattr(value, "node") and hasattr(value.node, "expr")
            else ((), True)
        )

    def _make_caps(self, shapes: list[tuple[tuple[Any, ...], bool]]) -> tuple[Cap, ...]:
        """Return a cap for each input that begins with two or more distinct symbols of which one has no bound."""
        import sympy

        caps: dict[frozenset[sympy.Symbol], Cap] = {}
        for shape, last_is_feature in shapes:
            leading: list[sympy.Symbol] = []
            for size in shape[: len(shape) - last_is_feature]:
                if isinstance(size, int) or not size.is_Symbol or size in leading:
                    break
                leading.append(size)
            key = frozenset(leading)
            if (
                len(leading) < 2
                or key in caps
                or not any(self._ranges_of(s).capped for s in leading)
            ):
                continue
            words = f"{'*'.join(map(self.words, leading))} <= {self.max_size}"
            condition = sympy.Le(sympy.Mul(*leading), self.max_size)
            least = math.prod(max(1, self._ranges_of(s).lower) for s in leading)
            if least <= self.max_size:  # else one size alone exceeds it, and range() says so
                caps[key] = Cap(key, condition, words)
        return tuple(caps.values())

    def _ranges_of(self, symbol: sympy.Symbol) -> Range:
        try:
            return self.range(symbol)
        except Unbounded:
            return self._ranges[symbol]


def is_unbacked(symbol: sympy.Symbol) -> bool:
    """Whether torch has no example value for ``symbol``."""
    from torch.utils._sympy import symbol as kinds

    return bool(kinds.symbol_is_type(symbol, kinds.SymT.UNBACKED_INT))


def _numbers(pins: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, Any]:
    if not pins:
        return {}
    import sympy

    return {symbol: sympy.Integer(number) for symbol, number in pins.items()}


def _symbols(size: Any) -> frozenset[Any]:
    return frozenset() if isinstance(size, int) else frozenset(size.free_symbols)


def _number(bound: Any) -> int | None:
    """Return the end of a torch range as an int, None for an infinity (which is_finite, in torch's int_oo)."""
    return (
        int(bound) if bound is not None and (isinstance(bound, int) or bound.is_Integer) else None
    )
