"""How records read: tensors, ranges and expressions as people write them, each long expression once under a short name.

a=f8e4m3[128*((127*Min(128, 8*s0) + 8*s0 + 127)//128), 2048]
->  "a f8e4m3[M, 2048]",  "M = 128*ceil((127*min(128, 8*s0) + 8*s0)/128)"
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from passes.records import Dim, KernelCall, TensorSpec

SHORTEST = 8
"""Characters from which on an expression gets a name of its own; ``8*s0`` reads well where it stands."""

TIMES = "\N{MULTIPLICATION SIGN}"

_SHORT = {
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "float8_e8m0fnu": "f8e8m0",
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "int8": "i8",
}


def expr_text(expr: str) -> str:
    """Return an expression as people write it: "(x + 127)//128" is "ceil(x/128)", "Min" is "min"."""
    at = 0
    while (at := expr.find("//", at)) >= 0:
        found = re.match(r"//(\d+)", expr[at:])
        begin = _opening(expr, at - 1) if at and expr[at - 1] == ")" else -1
        if found and begin >= 0:
            inner, tail = expr[begin + 1 : at - 1], f" + {int(found[1]) - 1}"
            if inner.endswith(tail):
                inner = inner.removesuffix(tail)
                if any(c in inner for c in "+- "):
                    inner = f"({inner})"
                expr = f"{expr[:begin]}ceil({inner}/{found[1]}){expr[at + len(found[0]) :]}"
                # "128*(ceil(x/128))" keeps no parentheses of its own
                expr = _unwrap(expr, begin)
                at = begin
        at += 2
    return re.sub(r"\bMin\(", "min(", re.sub(r"\bMax\(", "max(", expr))


def latex(expr: str) -> str:
    """Return an expression as LaTeX, for a notebook: "(x + 127)//128" as a ceiling, other divisions as floors."""
    from sympy.printing.latex import LatexPrinter

    from passes.expr import parse

    class Printer(LatexPrinter):  # type: ignore[misc]
        def _print_FloorDiv(self, node: Any) -> str:
            base, divisor = node.args
            constant, rest = base.as_coeff_Add()
            is_ceiling = divisor.is_Integer and constant and constant == divisor - 1
            kind, shown = ("ceil", rest) if is_ceiling else ("floor", base)
            inner = rf"\frac{{{self._print(shown)}}}{{{self._print(divisor)}}}"
            return rf"\left\l{kind} {inner} \right\r{kind}"

        _print_CleanDiv = _print_FloorDiv

        def _needs_mul_brackets(self, node: Any, **place: bool) -> bool:
            has_own = type(node).__name__ in ("FloorDiv", "CleanDiv")
            return not has_own and bool(super()._needs_mul_brackets(node, **place))

    text: str = Printer().doprint(parse(expr))
    return text


def aliases(call: KernelCall) -> dict[str, str]:
    """Return a short name for each long expression of a call: "M", or "M1", "M2" where there are several."""
    long = [d.expr for d in _dims(call) if not d.is_static and len(d.expr) > SHORTEST]
    distinct = list(dict.fromkeys(long))
    if len(distinct) == 1:
        return {distinct[0]: "M"}
    return {expr: f"M{index}" for index, expr in enumerate(distinct, 1)}


def tensor_text(spec: TensorSpec, names: dict[str, str] | None = None) -> str:
    """Return a tensor as in "f8e4m3[s0, 7168]"; ``names`` stand for expressions."""
    dims = ", ".join((names or {}).get(d.expr, d.expr) for d in spec.dims)
    return f"{_SHORT.get(spec.dtype, spec.dtype)}[{dims}]"


def call_lines(call: KernelCall) -> list[str]:
    """Return the tensors and arguments of a call that say what it is, a line each: no scales, no defaults."""
    names = aliases(call)
    parts = [
        f"{name} {tensor_text(spec, names)}"
        for name, spec in call.tensors
        if not _is_side(name, spec)
    ]
    attrs = [
        (name, names.get(str(value), value))
        for name, value in call.attrs
        if value not in (None, False, (), "")
    ]
    return parts + [f"{name}={_attr_text(value)}" for name, value in attrs]


def shapes_text(call: KernelCall) -> str:
    """Return the shapes of a static call without its scales: "17×2048, 5120×2048, 17×5120"."""
    main = [spec for name, spec in call.tensors if not _is_side(name, spec)]
    return ", ".join(TIMES.join(d.expr for d in spec.dims) or "scalar" for spec in main)


def fold(templates: Sequence[tuple[str, ...]]) -> tuple[list[str], str]:
    """Return the arguments at which the templates of one kernel differ, aligned, and what they have in common.

        [("Major::K", "16", "8"), ("Major::K", "128", "8")]  ->  [" 16", "128"], "K, *, 8"

    Templates of several lengths, or a single one, have nothing folded.
    """
    short = [[part.rsplit("::", 1)[-1] for part in template] for template in templates]
    length = max(map(len, short))
    varying = {i for i in range(length) if len({tuple(row[i : i + 1]) for row in short}) > 1}
    if not varying or len(varying) == length or any(len(row) < length for row in short):
        return [", ".join(row) for row in short], ""
    widths = {i: max(len(row[i]) for row in short) for i in varying}
    rows = ["  ".join(row[i].rjust(widths[i]) for i in sorted(varying)) for row in short]
    return rows, ", ".join("*" if i in varying else part for i, part in enumerate(short[0]))


def range_text(dim: Dim) -> str:
    """Return what a dimension can be: "7168", "1..8192", "1024..81792 (527 values)"."""
    from passes import runs

    if dim.is_static:
        return dim.expr
    upper = "∞" if dim.upper is None else str(dim.upper)
    span = f"{dim.lower}..{upper}"
    if dim.values is None:
        return f"{span} (bounds only)"
    count = runs.size(dim.values)
    dense = dim.upper is not None and count == dim.upper - dim.lower + 1
    return span if dense else f"{span} ({count:,} values)"


def size_lines(call: KernelCall) -> list[str]:
    """Return each symbol of a call, then each expression over them, with its range: "s0: 1..8192", "M = …"."""
    lines = {}
    for s in call.symbols:
        lines[s.name] = f"{s.name}: {s.lower}..{'∞' if s.upper is None else s.upper}"
    names = aliases(call)
    for dim in _dims(call):
        if dim.is_static or (dim.expr in lines and dim.expr in {s.name for s in call.symbols}):
            if not dim.is_static and dim.values is not None:
                lines[dim.expr] = f"{dim.expr}: {range_text(dim)}"
            continue
        if dim.expr in names:
            lines[dim.expr] = (
                f"{names[dim.expr]} = {expr_text(dim.expr)}\n{names[dim.expr]}: {range_text(dim)}"
            )
        else:
            lines[dim.expr] = f"{dim.expr}: {range_text(dim)}"
    return list(lines.values())


def place_lines(place: str) -> list[str]:
    """Return a place in a model as the path of the module, then the line: "model.layers.0", "layers.py:39"."""
    module, _, line = place.partition(" (")
    return [part for part in (module, line.removesuffix(")")) if part]


def _dims(call: KernelCall) -> list[Dim]:
    dims = [dim for _, spec in call.tensors for dim in spec.dims]
    return dims + [value for _, value in call.attrs if hasattr(value, "is_static")]  # type: ignore[misc]


def _attr_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return _SHORT.get(str(value), str(value))


def _is_side(name: str, spec: TensorSpec) -> bool:
    return name.endswith(("_sf", "scale")) or spec.dtype in ("int32", "int64")


def _opening(text: str, closing: int) -> int:
    """Return where the parenthesis opens that ``closing`` closes, or -1."""
    depth = 0
    for index in range(closing, -1, -1):
        depth += (text[index] == ")") - (text[index] == "(")
        if depth == 0:
            return index
    return -1


def _unwrap(text: str, begin: int) -> str:
    """Return ``text`` without parentheses that hold nothing but the call which begins at ``begin``."""
    end = begin + 4
    depth = 0
    for index in range(end, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            end = index
            break
    if (
        begin
        and text[begin - 1] == "("
        and text[end + 1 : end + 2] == ")"
        and text[begin - 2 : begin - 1] in ("*", " ", "(")
    ):
        return text[: begin - 1] + text[begin : end + 1] + text[end + 2 :]
    return text
