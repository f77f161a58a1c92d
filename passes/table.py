"""Tables that a person can read: rich in a terminal, HTML in a notebook, plain text in a log.

A record shows itself by building one of these; it lives below the records, so that they need nothing above them.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import RenderableType

FOLD = 40
"""Rows shown of a long table; the rest is counted."""

WIDTH = 120
"""Columns of plain text, in a log or a file."""


@dataclass(frozen=True)
class Table:
    """A title, columns (a name ending in ">" is right-aligned, in "|" never broken), rows of text, and lines below.

    A cell may have several lines; in the first column those after the first are set back.
    """

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

    def __rich__(self) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in self.columns:
            justify: Literal["left", "right"] = "right" if column.endswith(">") else "left"
            table.add_column(
                column.rstrip(">|"), justify=justify, overflow="fold", no_wrap=column.endswith("|")
            )
        for first, *rest in self.shown:
            head, _, below = first.partition("\n")
            name = Text.assemble(head, ("\n" + below, "dim")) if below else Text(head)
            table.add_row(name, *map(Text, rest))
        # not as rich's title and caption: those are broken at the width of a narrow table
        return Group(Text(self.title, "bold"), table, *(Text(line, "dim") for line in self.lines))

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        # in a notebook rich would display the table instead of writing it
        Console(file=out, width=WIDTH, color_system=None, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        # currentColor and transparent backgrounds: legible in light and dark themes alike.
        cell = "padding:3px 18px 3px 0;border:none;background:transparent;vertical-align:top;white-space:pre-wrap;"

        def show(text: str, first: bool) -> str:
            head, *below = (html.escape(line) for line in text.split("\n"))
            if first and below:
                return f'{head}<div style="opacity:0.7">{"<br>".join(below)}</div>'
            return "<br>".join((head, *below))

        def row(cells: Sequence[str], tag: str, style: str = "") -> str:
            return "<tr style=\"background:transparent\">" + "".join(
                f'<{tag} style="{cell}{style}{"font-family:monospace;" if c.endswith("|") and tag == "td" else ""}text-align:{"right" if c.endswith(">") else "left"}">'
                f"{show(text.rstrip('>|') if tag == 'th' else text, index == 0)}</{tag}>"
                for index, (text, c) in enumerate(zip(cells, self.columns, strict=True))
            ) + "</tr>"  # fmt: skip

        head = row(self.columns, "th", "border-bottom:1px solid currentColor;")
        body = "".join(row(r, "td") for r in self.shown)
        below = "".join(
            f'<div style="opacity:0.7">{html.escape(line)}</div>' for line in self.lines
        )
        return (
            f"<div><b>{html.escape(self.title)}</b>"
            f'<table style="border-collapse:collapse;color:inherit;font-size:inherit;font-variant-numeric:tabular-nums">'
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
