"""Records of what a graph asks of JIT kernel libraries: dimensions, tensors, calls, gaps, shape sets.

A record holds no node, no tensor and no torch object. It is frozen, hashable and comparable, and goes to JSON
and back with validation, so that equal calls of different graphs, functions and processes are equal records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from passes import runs
from passes.runs import Runs
from passes.table import Table, plural

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")

SCHEMA = 1
"""Number of this file format. A file with another number is refused, never guessed at."""

Scalar = bool | int | float | str | None


class Record(
    msgspec.Struct, frozen=True, cache_hash=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A frozen record that goes to JSON and back.

    The hash is kept: a dim may hold thousands of runs, and a call is looked up once a node.
    """


class Document(Record, frozen=True, omit_defaults=False):
    """A record that is a file of its own and shows itself as a table: in a notebook, a terminal, a log."""

    def table(self) -> Table:
        """Return the record as a table."""
        raise NotImplementedError

    def __rich__(self) -> Any:
        return self.table().__rich__()

    def __str__(self) -> str:
        return str(self.table())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_json(self) -> str:
        """Return the record as JSON text; ``from_json`` reads it back to an equal record."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls: type[T], text: str | bytes) -> T:
        """Read a record that ``to_json`` wrote.

        Raises ValueError, with the reason and what to do, for a truncated file, another schema or a foreign file.
        """
        return decode(text, cls)


class Dim(Record, frozen=True):
    """One dimension (or integer argument): static, or an expression over the symbols of its call.

    ``upper`` is None where nothing bounds it. ``values`` is the exact set of attainable values as
    (first, last, step) runs, or None where it was too large to enumerate: then only the bounds are known, and every
    integer between them must be taken as attainable.
    """

    expr: str
    lower: int
    upper: int | None = None
    values: Runs | None = None

    @classmethod
    def static(cls, value: int) -> Dim:
        """Return the dimension that always has ``value``."""
        return cls(str(value), value, value)

    @property
    def is_static(self) -> bool:
        """Whether the dimension is a plain number in its graph."""
        return self.expr.lstrip("-").isdigit()

    @property
    def is_exact(self) -> bool:
        """Whether the set of attainable values is known, not only its bounds."""
        return self.is_static or self.values is not None

    def __int__(self) -> int:
        if not self.is_static:
            raise ValueError(
                f"{self.expr} is not static: it ranges over {self.lower}..{self.upper}"
            )
        return self.lower

    def attainable(self) -> np.ndarray:
        """Return the attainable values, ascending, as an int64 array.

        Where only bounds are known these are all integers between them. Raises ValueError without an upper bound.
        """
        if self.values is not None:
            return runs.to_array(self.values)
        if self.upper is None:
            raise ValueError(
                f"{self.expr} has no upper bound; give one with max_size or torch._check"
            )
        return runs.to_array(((self.lower, self.upper, 1),))

    def __str__(self) -> str:
        return self.expr


class Symbol(Record, frozen=True):
    """A free size of a call: renamed by first use, with its range. ``upper`` is None where nothing bounds it."""

    name: str
    lower: int
    upper: int | None = None


class TensorSpec(Record, frozen=True):
    """What a kernel sees of a tensor: dtype (torch's name without ``torch.``), dims, and strides unless contiguous."""

    dtype: str
    dims: tuple[Dim, ...]
    strides: tuple[str, ...] = ()
    """Strides in elements, as expressions over the call's symbols. Empty for a contiguous tensor."""

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"


Attr = Scalar | Dim | tuple[Scalar | Dim, ...]


class KernelCall(Record, frozen=True):
    """One distinct call of a JIT kernel: which op of which family, on what tensors, with which arguments.

    ``symbols`` are the free sizes of its dims in order of first use, ``guards`` the conditions on them that the
    graph asserts. A call without symbols is *static*: a witness is one.
    """

    family: str
    op: str
    tensors: tuple[tuple[str, TensorSpec], ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    symbols: tuple[Symbol, ...] = ()
    guards: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> TensorSpec:
        for key, spec in self.tensors:
            if key == name:
                return spec
        raise KeyError(
            f"{self.op} has no tensor {name!r}; it has {', '.join(k for k, _ in self.tensors)}"
        )

    def __contains__(self, name: str) -> bool:
        return any(key == name for key, _ in self.tensors)

    def attr(self, name: str, default: Attr = None) -> Attr:
        """Return the argument ``name``, or ``default`` where the call does not have it."""
        return next((value for key, value in self.attrs if key == name), default)

    def __str__(self) -> str:
        tensors = ", ".join(f"{k}={v}" for k, v in self.tensors)
        attrs = "".join(f", {k}={v}" for k, v in self.attrs if v is not None)
        return f"{self.family}.{self.op}({tensors}{attrs})"


class Site(Record, frozen=True):
    """Where a call stands: how many nodes make it, and the first of them (module path and source line)."""

    count: int = 1
    place: str = ""


class Gap(Record, frozen=True):
    """Something that could not be covered: the op, where it stands in the model, and why."""

    op: str
    reason: str
    place: str = ""
    family: str = ""

    def __str__(self) -> str:
        return f"{self.op}: {self.reason}" + (f" [{self.place}]" if self.place else "")


class UnknownOp(Record, frozen=True):
    """A custom op that no family matched. Not a gap by itself: most custom ops compile nothing at run time."""

    op: str
    count: int = 1
    place: str = ""


class Specialization(Record, frozen=True):
    """An input size that the model fixed while it was traced, and the line that did it."""

    source: str
    size: int
    place: str = ""


class ShapeSet(Document, frozen=True):
    """The kernel calls of a model, the gaps, and what was seen but not understood.

    ``a | b`` unites two sets (graphs, models, ranges), ``a - b`` keeps the calls of ``a`` that ``b`` lacks.
    """

    calls: tuple[KernelCall, ...] = ()
    sites: tuple[Site, ...] = ()
    gaps: tuple[Gap, ...] = ()
    unknown: tuple[UnknownOp, ...] = ()
    specialized: tuple[Specialization, ...] = ()
    kind: str = "fxwarm.ShapeSet"
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if len(self.sites) != len(self.calls):
            raise ValueError(
                f"a shape set needs one site a call: {len(self.calls)} calls, {len(self.sites)} sites"
            )

    @property
    def is_complete(self) -> bool:
        """Whether nothing was left out."""
        return not self.gaps

    def __len__(self) -> int:
        return len(self.calls)

    def __bool__(self) -> bool:
        return bool(self.calls or self.gaps or self.unknown or self.specialized)

    def items(self) -> Iterator[tuple[KernelCall, Site]]:
        """Yield each call with its site."""
        return zip(self.calls, self.sites, strict=True)

    def __or__(self, other: ShapeSet) -> ShapeSet:
        if not isinstance(other, ShapeSet):
            return NotImplemented
        return unite([self, other])

    def __sub__(self, other: ShapeSet) -> ShapeSet:
        if not isinstance(other, ShapeSet):
            return NotImplemented
        theirs = set(other.calls)
        kept = [(c, s) for c, s in self.items() if c not in theirs]
        return ShapeSet(
            calls=tuple(c for c, _ in kept),
            sites=tuple(s for _, s in kept),
            gaps=tuple(g for g in self.gaps if g not in other.gaps),
            unknown=tuple(u for u in self.unknown if u.op not in {o.op for o in other.unknown}),
            specialized=tuple(s for s in self.specialized if s not in other.specialized),
        )

    def table(self) -> Table:
        """Return the set as a table: a row a call, then the gaps."""
        from passes.text import call_lines, place_lines, size_lines

        families = list(dict.fromkeys(call.family for call in self.calls))
        rows = []
        for call, site in self.items():
            name = call.op if len(families) == 1 else f"{call.family}.{call.op}"
            cells = ([name, *place_lines(site.place)], call_lines(call), size_lines(call))
            rows.append((*map("\n".join, cells), str(site.count)))
        notes = [f"gap: {gap}" for gap in self.gaps]
        notes += [
            f"fixed while tracing: {s.source} = {s.size} at {s.place or 'an unknown line'}"
            for s in self.specialized
        ]
        if self.unknown:
            notes.append(
                "custom ops that no family knows: " + ", ".join(u.op for u in self.unknown)
            )
        of = f" of {families[0]}" if len(families) == 1 else ""
        title = f"{plural(len(self), 'kernel call')}{of}, {plural(len(self.gaps), 'gap')}"
        return Table(title, ("call, first place", "tensors", "sizes", "nodes>"), rows, notes)


def unite(sets: Iterable[ShapeSet]) -> ShapeSet:
    """Return the union of shape sets, in order of first appearance.

    Equal calls are one with their counts added, and calls that differ only in ranges that touch are one that has both.
    """
    from passes.union import join_ranges

    calls: dict[KernelCall, Site] = {}
    unknown: dict[str, UnknownOp] = {}
    gaps: dict[Gap, None] = {}
    specialized: dict[Specialization, None] = {}
    for shapes in sets:
        for call, site in shapes.items():
            seen = calls.get(call)
            calls[call] = site if seen is None else Site(seen.count + site.count, seen.place)
        for op in shapes.unknown:
            known = unknown.get(op.op)
            unknown[op.op] = (
                op if known is None else UnknownOp(op.op, known.count + op.count, known.place)
            )
        gaps.update(dict.fromkeys(shapes.gaps))
        specialized.update(dict.fromkeys(shapes.specialized))
    calls = join_ranges(calls)
    return ShapeSet(
        tuple(calls),
        tuple(calls.values()),
        tuple(gaps),
        tuple(unknown.values()),
        tuple(specialized),
    )


def decode(text: str | bytes, cls: type[T]) -> T:
    """Decode JSON ``text`` as ``cls``, a record with the fields ``kind`` and ``schema``.

    Raises ValueError naming what the text is instead and what to do about it.
    """
    name = cls.__name__
    try:
        head = msgspec.json.decode(text, type=_Head)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"this is no {name}: {error}; the file is truncated or not ours, make it again"
        ) from None
    if head.kind != f"fxwarm.{name}":
        raise ValueError(
            f"this is no {name} but {head.kind or 'a foreign file'}; give a file that fxwarm wrote"
        )
    if head.schema != SCHEMA:
        raise ValueError(
            f"this {name} has schema {head.schema}, this fxwarm reads {SCHEMA}; make the file again"
        )
    try:
        return msgspec.json.decode(text, type=cls)
    except (msgspec.ValidationError, RecursionError, ValueError) as error:
        raise ValueError(f"this {name} is damaged: {error}; make the file again") from None


class _Head(msgspec.Struct):
    kind: str = ""
    schema: int = 0
