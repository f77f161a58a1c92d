"""Expressions over sizes as text: a safe parser, a canonical printer, and the one evaluator over arrays.

    parse("128*((8*s0 + 16256)//128)")  ->  128*FloorDiv(s0 + 2032, 16)
    to_text(_)                          ->  "128*((s0 + 2032)//16)"
    evaluate(_, {"s0": [1, 2, 65]})     ->  [16256, 16256, 16768]

The text is Python over integers: ``//`` rounds down, ``/`` is exact until ``floor`` or ``ceiling`` takes it. It reads
back to an equal expression. Symbols of a parsed expression are plain integers: that they are sizes is said by the
ranges of a record, never assumed, so torch's simplifications cannot use what a later reader does not know.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from passes.functions import vocabulary

if TYPE_CHECKING:
    import numpy as np
    import sympy

LONGEST = 20_000
"""Most characters of a text. A rule for num_splits over a padded MoE batch has 150."""
DEEPEST = 100
"""Most levels of nesting: far below Python's recursion limit, which sympy would meet first."""
LARGEST = 1 << 62
"""Most that an intermediate result may be, so that int64 never wraps around."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RELATIONS = {
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
}
_OPERATORS = {"Eq": "Eq", "NotEq": "Ne", "Lt": "Lt", "LtE": "Le", "Gt": "Gt", "GtE": "Ge"}
_ADD, _MUL, _POW, _ATOM = 2, 3, 4, 5  # how tightly a piece of text binds; 1 is a comparison


def symbol(name: str) -> sympy.Symbol:
    """Return the symbol ``name`` of a record: an integer, of which nothing else is assumed."""
    import sympy

    return sympy.Symbol(name, integer=True)


@functools.lru_cache(1 << 14)
def parse(text: str) -> sympy.Expr:
    """Return the expression (or the condition) that ``text`` writes.

    A whitelist over Python's syntax tree: nothing is evaluated, so text of any origin is safe to read. Raises
    ValueError, naming the part, for all but integers, floats, symbols, arithmetic, comparisons and known functions.
    """
    if len(text) > LONGEST:
        raise ValueError(
            f"the expression {text[:40]}... has {len(text)} characters; at most {LONGEST} are read"
        )
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _build(tree.body, 0)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(
            f"{text[:80]!r} is no expression over sizes; write one such as '128*((s0 + 127)//128)'"
        ) from None
    except (ZeroDivisionError, AssertionError, TypeError, ArithmeticError, AttributeError) as error:
        raise ValueError(
            f"{text[:80]!r} has no value: {error or type(error).__name__}; correct the expression"
        ) from None


def _build(node: ast.expr, depth: int) -> Any:  # noqa: PLR0911
    """Return the sympy expression of one syntax node. Raises ValueError for what is not on the list."""
    import sympy

    if depth > DEEPEST:
        raise ValueError(f"the expression is nested more than {DEEPEST} deep; write it flatter")
    make = vocabulary().make
    match node:
        case ast.Constant(value=bool() as value):
            return sympy.true if value else sympy.false
        case ast.Constant(value=int() as value) if abs(value) <= LARGEST:
            return sympy.Integer(value)
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return sympy.Float(value)
        case ast.Name(id=name) if _NAME.fullmatch(name) and name not in make and "__" not in name:
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _build(operand, depth + 1)
        case ast.BinOp(left=left, op=operator, right=right):
            return _small(_combine(operator, _build(left, depth + 1), _build(right, depth + 1)))
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if (
            type(operator).__name__ in _OPERATORS
        ):
            made = make[_OPERATORS[type(operator).__name__]]
            return made(_build(left, depth + 1), _build(right, depth + 1))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in make:
            return _small(make[name](*(_build(arg, depth + 1) for arg in args)))
    what = ast.unparse(node) if depth else type(node).__name__
    raise ValueError(
        f"{what[:80]!r} does not belong in an expression over sizes; known functions: {', '.join(make)}"
    )


def _combine(operator: ast.operator, left: Any, right: Any) -> Any:  # noqa: PLR0911
    """Return ``left operator right``."""
    import sympy

    make = vocabulary().make
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv():
            return make["FloorDiv"](left, right)
        case ast.Mod():
            return make["PythonMod"](left, right)
        case ast.Div():
            if right.is_zero:
                raise ZeroDivisionError("division by zero")
            return left / right
        case ast.Pow() if isinstance(right, sympy.Integer) and 0 <= right <= 63:
            return left**right
    raise ValueError(
        f"{type(operator).__name__} does not belong in an expression; powers have exponents 0 to 63"
    )


def _small(expr: Any) -> Any:
    """Return ``expr``, unless it is a number that int64 cannot hold: towers of powers must not be computed."""
    if getattr(expr, "is_number", False) and not (expr.is_finite and abs(expr) <= LARGEST):
        raise ValueError("a number of the expression is infinite or beyond 2**62; no size is")
    return expr


def to_text(expr: sympy.Basic) -> str:
    """Return the canonical text of ``expr``, the way people write it; ``parse`` reads it back.

    The order of terms follows the text alone, so neither sympy's version nor hashing changes it. Raises ValueError for
    a function that is not on the list.
    """
    return _print(expr)[0]


def _print(expr: Any) -> tuple[str, int]:  # noqa: PLR0911, PLR0912
    """Return the text of ``expr`` and how tightly it binds."""
    name = type(expr).__name__
    if expr.is_Symbol:
        return expr.name, _ATOM
    if expr.is_Integer:
        return str(int(expr)), _ATOM if expr >= 0 else _ADD
    if expr.is_Add:
        terms = sorted(expr.args, key=_rank)
        text = " + ".join(_print(term)[0] for term in terms)
        return text.replace("+ -", "- "), _ADD
    if expr.is_Mul or expr.is_Rational:
        return _print_product(expr)
    if expr.is_Float:
        return repr(float(expr)), _ATOM if expr >= 0 else _ADD
    if name in (
        "FloorDiv",
        "CleanDiv",
    ):  # the same value: that nothing is left over is no use to a reader
        return "//".join(_wrap(arg, _ATOM) for arg in expr.args), _MUL
    if name in _RELATIONS:
        return f" {_RELATIONS[name]} ".join(_print(arg)[0] for arg in expr.args), 1
    if name == "Pow" and expr.exp.is_Integer and expr.exp > 0:
        return f"{_wrap(expr.base, _ATOM)}**{expr.exp}", _POW
    if name == "Pow" and expr.exp.is_Integer:
        return _print_product(expr)
    if name == "Pow" and expr.exp.is_integer:
        return f"PowByNatural({_print(expr.base)[0]}, {_print(expr.exp)[0]})", _ATOM
    if name in ("BooleanTrue", "BooleanFalse"):
        return name.removeprefix("Boolean"), _ATOM
    if name == "Identity":
        return _print(expr.args[0])
    if name in vocabulary().make:
        ordered = (
            sorted(expr.args, key=_rank_number_first)
            if name in ("Max", "Min", "And", "Or")
            else expr.args
        )
        return f"{name}({', '.join(_print(arg)[0] for arg in ordered)})", _ATOM
    raise ValueError(
        f"{name}({', '.join(map(str, expr.args))}) is no function over sizes; pass its result instead"
    )


def _print_product(expr: Any) -> tuple[str, int]:
    """Return the text of a product: its number first, then symbols, then the rest; what divides comes last."""
    import sympy

    number, factors = expr.as_coeff_mul(rational=True) if expr.is_Mul else (sympy.S.One, (expr,))
    if expr.is_Rational:
        number, factors = expr, ()
    above = [f for f in factors if not (f.is_Pow and f.exp.is_Integer and f.exp < 0)]
    below = [f.base**-f.exp for f in factors if f.is_Pow and f.exp.is_Integer and f.exp < 0]
    top = [_wrap(f, _POW) for f in sorted(above, key=lambda f: (not f.is_Symbol, _print(f)[0]))]
    if abs(number.p) != 1 or not top:
        top.insert(0, str(abs(number.p)))
    bottom = ([str(number.q)] if number.q != 1 else []) + sorted(_wrap(f, _POW) for f in below)
    text = ("-" if number.p < 0 else "") + "*".join(top)
    if bottom:
        text += f"/{bottom[0]}" if len(bottom) == 1 else f"/({'*'.join(bottom)})"
    return text, _MUL if number.p >= 0 else _ADD


def _wrap(expr: Any, least: int) -> str:
    """Return the text of ``expr``, in parentheses if it binds less tightly than ``least``."""
    text, binds = _print(expr)
    return text if binds >= least else f"({text})"


def _rank(term: Any) -> tuple[bool, int, str]:
    """Order the terms of a sum: higher degree first, numbers last."""
    degree = sum(int(f.exp) if f.is_Pow and f.exp.is_Integer else 1 for f in term.as_coeff_mul()[1])
    return bool(term.is_number), -degree, _print(term)[0].lstrip("-")


def _rank_number_first(term: Any) -> tuple[bool, str]:
    return not term.is_number, _print(term)[0]


def rename(expr: sympy.Basic, names: Mapping[sympy.Symbol, str]) -> sympy.Basic:
    """Return ``expr`` over the symbols of a record: each renamed, and stripped of what its graph assumed of it."""
    return expr.xreplace({old: symbol(new) for old, new in names.items()})


def evaluate(expr: sympy.Basic, sizes: Mapping[str, Any]) -> np.ndarray:
    """Return the value of ``expr`` at every point of ``sizes``: one int64 array (or number) a symbol, by name.

    The result is int64, or bool for a condition. Where the expression divides by zero it has no meaning and the value
    is arbitrary. Raises ValueError for an unknown function, a missing symbol, or a value that is no integer.
    """
    import numpy as np

    compiled, names = _compiled(expr)
    missing = [name for name in names if name not in sizes]
    if missing:
        raise ValueError(f"{to_text(expr)} needs a value for {', '.join(missing)}")
    columns = {name: np.asarray(value) for name, value in sizes.items()}
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        value = np.asarray(compiled(*(columns[name] for name in names)))
    if value.dtype.kind == "f":
        rounded = np.rint(value)
        if not np.array_equal(rounded, value):
            raise ValueError(f"{to_text(expr)} takes values that are no integers; round it")
        value = rounded
    if value.dtype != bool:
        value = value.astype(np.int64)
    shape = np.broadcast_shapes(*(column.shape for column in columns.values()))
    return value if value.shape == shape else np.broadcast_to(value, shape)


@functools.lru_cache(1 << 12)
def _compiled(expr: sympy.Basic) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return ``expr`` as a function over arrays, and the order of its arguments."""
    import sympy

    symbols = sorted(expr.free_symbols, key=lambda s: s.name)
    # floor(s0/3 + 1/3) in floating point can land on the wrong side: in integers it cannot
    exact = expr.replace(sympy.floor, _floor).replace(sympy.ceiling, lambda x: -_floor(-x))
    # the printer is ours, and so are the names that it prints: sympy prints torch's Max as its own
    return sympy.lambdify(symbols, exact, modules=[vocabulary().run], printer=to_text), tuple(
        s.name for s in symbols
    )


def _floor(number: Any) -> Any:
    """Return the floor of a quotient of integers as an integer division."""
    import sympy

    above, below = sympy.fraction(sympy.together(number))
    return vocabulary().make["FloorDiv"](above, below)


def magnitude(expr: Any, largest: Mapping[str, int]) -> int:  # noqa: PLR0911
    """Return a bound on the absolute value of ``expr`` and of all that it is computed from.

    ``largest`` is such a bound for each symbol. At most ``LARGEST`` means that ``evaluate`` cannot wrap around.
    """
    if expr.is_Symbol:
        return largest[expr.name]
    if expr.is_Rational:
        return max(abs(int(expr.p)), int(expr.q))
    if not expr.args:
        return 1
    parts = [max(1, magnitude(arg, largest)) for arg in expr.args]
    if expr.is_Add:
        return sum(parts)
    if expr.is_Mul:
        return math.prod(parts)
    if type(expr).__name__ in ("Pow", "PowByNatural"):
        return int(parts[0] ** min(parts[1], 64))
    return max(parts)
