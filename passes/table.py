"""Tables that a person can read: rich in a terminal, HTML in a notebook, plain text in a log.

A record shows itself by building one of these; it lives below the records, so that they need nothing above them.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.table

    from passes.records import Dim, KernelCall, TensorSpec

FOLD = 40
"""Rows shown of a long table; the rest is counted."""

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


@dataclass(frozen=True)
class Table:
    """A title, columns (a name ending in ">" is right-aligned), rows of text, and lines below."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str] = field(default=())

    @property
    def shown(self) -> Sequence[tuple[str, ...]]:
        """The rows that are shown: all, or the first ``FOLD`` of a long table."""
        return self.rows[:FOLD]

    @property
    def lines(self) -> list[str]:
        """The lines below the table, with the count of folded rows first."""
        left = len(self.rows) - len(self.shown)
        return [*([f"… and {left} more rows"] if left else []), *self.notes]

    def __rich__(self) -> rich.table.Table:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=self.title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            caption="\n".join(self.lines) or None,
            caption_justify="left",
            pad_edge=False,
        )
        for column in self.columns:
            name = column.removesuffix(">")
            table.add_column(name, justify="right" if column.endswith(">") else "left", overflow="fold")
        for row in self.shown:
            table.add_row(*map(Text, row))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=160, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        # currentColor and transparent backgrounds: legible in light and dark themes alike.
        cell = "padding:2px 12px 2px 0;border:none;background:transparent;vertical-align:top;"

        def row(cells: Sequence[str], tag: str, style: str = "") -> str:
            return "<tr>" + "".join(
                f'<{tag} style="{cell}{style}text-align:{"right" if c.endswith(">") else "left"}">'
                f"{html.escape(text.removesuffix('>') if tag == 'th' else text)}</{tag}>"
                for text, c in zip(cells, self.columns)
            ) + "</tr>"  # fmt: skip

        head = row(self.columns, "th", "border-bottom:1px solid currentColor;")
        body = "".join(row(r, "td") for r in self.shown)
        below = "".join(f'<div style="opacity:0.75">{html.escape(line)}</div>' for line in self.lines)
        return (
            f"<div><b>{html.escape(self.title)}</b>"
            f'<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
            f"<thead>{head}</thead><tbody>{body}</tbody></table>{below}</div>"
        )


def plural(count: int, noun: str) -> str:
    """Return "1 kernel" or "36 kernels"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def size(count: float) -> str:
    """Return a number of bytes as people write it: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def tensor_text(spec: TensorSpec) -> str:
    """Return a tensor as in "f8e4m3[s0, 7168]"."""
    return f"{_SHORT.get(spec.dtype, spec.dtype)}[{', '.join(d.expr for d in spec.dims)}]"


def call_text(call: KernelCall) -> str:
    """Return the tensors and arguments of a call that say what it is: no scales, no defaults."""
    parts = [f"{name} {tensor_text(spec)}" for name, spec in call.tensors if not _is_side(name, spec)]
    parts += [f"{name}={value}" for name, value in call.attrs if value not in (None, False, (), "")]
    return "  ".join(parts)


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


def sizes_text(call: KernelCall) -> str:
    """Return each dynamic dimension of a call with its range, once: "s0: 1..8192"."""
    seen: dict[str, str] = {}
    for _, spec in call.tensors:
        for dim in spec.dims:
            if not dim.is_static:
                seen.setdefault(dim.expr, f"{dim.expr}: {range_text(dim)}")
    return "; ".join(seen.values())


def _is_side(name: str, spec: TensorSpec) -> bool:
    return name.endswith(("_sf", "scale")) or spec.dtype in ("int32", "int64")
