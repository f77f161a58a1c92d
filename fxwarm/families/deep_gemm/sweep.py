"""A collected call as the recorder's child can read it: plain numbers, and which of them vary.

Call:
    fp8_gemm_nt(a=float8_e4m3fn[s0, 7168], ..., d=bfloat16[s0, 2112]), 1 <= s0 <= 8192

Sweep:
    {"op": "fp8_gemm_nt", "tensors": {"a": ["float8_e4m3fn", [["$", 0], 7168], [7168, 1]], ...},
     "attrs": {}, "rows": [[1], [2], ..., [8192]]}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fxwarm.families.deep_gemm import shapes
from fxwarm.families.deep_gemm.buffers import is_in_place, unread_in
from fxwarm.families.deep_gemm.describe import place_of
from fxwarm.families.deep_gemm.inputs import ITEM
from fxwarm.families.deep_gemm.keys import image_of, strides_of, witness_at
from fxwarm.families.deep_gemm.match import FAMILY
from passes import bound
from passes.records import Dim, Gap, KernelCall

if TYPE_CHECKING:
    from passes.bound import Image

__all__ = ["MOST_CALLS", "Sweep", "make_sweep", "thin", "within"]

MOST_CALLS = 1_000_000
"""Calls of one request beyond which only one M of each interval is asked: 50 s at 50 us each."""
FLIPS = (63, 64, 127, 128, 255, 256, 511, 512)
"""M at which builds of 2025 change inside an interval of 16."""


class Sweep(NamedTuple):
    """One call with the points at which it is to be made."""

    call: KernelCall
    image: Image
    points: np.ndarray
    """Indices of the image's rows, those with M > 0."""
    tensors: dict[str, Any]
    attrs: dict[str, Any]
    literal_m: bool
    """Whether M itself is in the kernel, so that no point may be left out."""

    def request(self) -> dict[str, Any]:
        """Return the call in the child's words."""
        rows = self.image.rows[self.points].tolist()
        return {"op": self.call.op, "tensors": self.tensors, "attrs": self.attrs, "rows": rows}

    def real_bytes(self) -> np.ndarray:
        """Return, for each point, the device memory that its tensors must really have.

        The others are only pretended where they are large: nothing but a kernel that does nothing touches them.
        """
        rows = self.image.rows[self.points]

        def column(value: Any) -> Any:
            return rows[:, value[1]] if isinstance(value, list) else value

        total = np.zeros(len(rows), np.int64)
        free = unread_in(self.call.op, self.tensors, self.attrs)
        free = (*free, "c") if is_in_place(self.tensors) else free
        for name, (dtype, dims, strides) in self.tensors.items():
            if name not in free:
                steps = sum((column(d) - 1) * column(s) for d, s in zip(dims, strides, strict=True))
                total += (1 + steps) * ITEM.get(dtype, 8)
        return total

    def witness(self, row: int) -> KernelCall:
        """Return the static call at one row of the request."""
        return witness_at(self.call, self.image, int(self.points[row]))()

    def m_at(self, row: int) -> int:
        """Return M at one row of the request."""
        return int(self.image.rows[self.points[row], 0])


SIZELESS = ("fp8_mqa_logits", "fp8_paged_mqa_logits")
"""Ops whose kernels no size decides: heads, head dim, block sizes and dtypes do, in both generations."""


def make_sweep(call: KernelCall) -> Sweep:
    """Return every attainable point of ``call``. Raises ValueError where they cannot be listed."""
    if call.op in SIZELESS:
        smallest = bound.at(call, {symbol.name: symbol.lower for symbol in call.symbols})
        assert isinstance(smallest, KernelCall)
        call = smallest
    columns: dict[str, int] = {_rows_of(call): 0}

    def number(expr: str) -> Any:
        if expr.lstrip("-").isdigit():
            return int(expr)
        return ["$", columns.setdefault(expr, len(columns))]

    def attribute(value: Any) -> Any:
        if isinstance(value, Dim):
            return number(value.expr)
        return [attribute(v) for v in value] if isinstance(value, tuple) else value

    tensors = {
        name: [
            spec.dtype,
            [number(d.expr) for d in spec.dims],
            [number(s) for s in strides_of(spec)],
        ]
        for name, spec in call.tensors
    }
    attrs = {name: attribute(value) for name, value in call.attrs}
    image = image_of(call, *columns)
    points = np.flatnonzero(image.rows[:, 0] > 0)
    dims = call.attr("compiled_dims")
    literal = "m" in str(dims) if dims is not None else call.op.endswith(("_tn", "_tt"))
    return Sweep(call, image, points, tensors, attrs, literal)


def thin(sweep: Sweep) -> Sweep:
    """Return the sweep with the smallest M of each interval in which no choice changes.

    Every breakpoint of every known version is a multiple of 16 or one of ``FLIPS``; what else
    varies (splits, expected rows) keeps all its values, in the same intervals.
    """
    if sweep.literal_m:
        return sweep
    rows = sweep.image.rows[sweep.points]
    flip = np.where(np.isin(rows[:, 0], FLIPS), rows[:, 0], 0)
    others = [_interval(sweep, rows, at) for at in _deciding(sweep)]
    ids = np.column_stack([-(-rows[:, 0] // 16), flip, *others])
    _, first = np.unique(ids, axis=0, return_index=True)
    return sweep._replace(points=sweep.points[np.sort(first)])


def within(sweeps: Sequence[Sweep], memory: int) -> tuple[list[Sweep], list[Gap]]:
    """Return the sweeps cut to ``memory`` bytes of device memory together, and a gap for each that lost sizes.

    Where they do not fit, the smallest M of each interval is asked, and only those that fit.
    """
    needs = [int(s.real_bytes().max(initial=0)) for s in sweeps]
    if sum(needs) <= memory:
        return [*sweeps], []
    kept, gaps = [], []
    for full, need in zip(sweeps, needs, strict=True):
        share = memory * need // sum(needs)
        one = thin(full)
        fits = one.real_bytes() <= share
        if not fits.all():
            first = int(one.image.rows[one.points[~fits], 0].min())
            reason = (
                f"{full.call}: from M={first} up it is not asked, since its scales and the like would take {need} "
                f"bytes, and fxwarm.memory leaves {share}; raise fxwarm.memory"
            )
            gaps.append(Gap(full.call.op, reason, family=FAMILY))
        kept.append(one._replace(points=one.points[fits]))
    return kept, gaps


def _deciding(sweep: Sweep) -> list[int]:
    """Return the columns that attributes read: they decide beside M."""
    found: list[int] = []
    for value in sweep.attrs.values():
        for part in value if isinstance(value, list) and value[:1] != ["$"] else [value]:
            if isinstance(part, list) and part[:1] == ["$"]:
                found.append(part[1])
    return found


def _interval(sweep: Sweep, rows: np.ndarray, column: int) -> np.ndarray:
    exact = ["$", column] == sweep.attrs.get("num_splits")
    found: np.ndarray = rows[:, column] if exact else -(-rows[:, column] // 16)
    return found


def _rows_of(call: KernelCall) -> str:
    where = shapes.form(call.op, dict(call.attrs))
    if where is not None:
        return place_of(call, where.m).expr
    return call.tensors[0][1].dims[0].expr
