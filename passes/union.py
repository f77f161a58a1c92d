"""Makes one call of those that differ only in the range of their sizes.

    fp8_gemm_nt(a=f8e4m3[s0, 7168], ...), s0 in 1..32     the compile ranges of one model,
    fp8_gemm_nt(a=f8e4m3[s0, 7168], ...), s0 in 33..64    or a draft and its target

    fp8_gemm_nt(a=f8e4m3[s0, 7168], ...), s0 in 1..64

Ranges that touch become one. Ranges with a hole between them stay two calls, since nothing says that the sizes in the
hole occur. Of calls with several symbols one goes only where the other has all of it: a union of boxes is no box.
So the result covers what its parts cover and no more, and depends neither on their order nor on how they are grouped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from passes import runs
from passes.runs import Runs

if TYPE_CHECKING:
    from passes.records import Dim, KernelCall, Site, Symbol


def join_ranges(calls: Mapping[KernelCall, Site]) -> dict[KernelCall, Site]:
    """Return ``calls`` with those joined that differ only in ranges; their nodes are added up.

    A joined call stands where the first of its parts stood.
    """
    groups: dict[object, list[KernelCall]] = {}
    for call in calls:
        if call.symbols:
            groups.setdefault(_form(call), []).append(call)
    becomes: dict[KernelCall, KernelCall] = {}
    for group in groups.values():
        for part in _parts(group) if len(group) > 1 else ():
            becomes.update(dict.fromkeys(part, _join(part)))
    if not becomes:
        return dict(calls)
    out: dict[KernelCall, Site] = {}
    for call, site in calls.items():
        joined = becomes.get(call, call)
        seen = out.get(joined)
        out[joined] = (
            site if seen is None else msgspec.structs.replace(seen, count=seen.count + site.count)
        )
    return out


def _form(call: KernelCall) -> object:
    """Return all of a call but the ranges: equal where two calls differ only in them."""
    return (
        call.family,
        call.op,
        tuple((n, t.dtype, tuple(d.expr for d in t.dims), t.strides) for n, t in call.tensors),
        tuple((n, _form_of(v)) for n, v in call.attrs),
        tuple(s.name for s in call.symbols),
        call.guards,
    )


def _form_of(value: Any) -> object:
    if isinstance(value, tuple):
        return tuple(map(_form_of, value))
    return ("dim", value.expr) if hasattr(value, "expr") else (type(value), value)


def _parts(group: list[KernelCall]) -> list[list[KernelCall]]:
    """Return the calls of a group that become one."""
    if len(group[0].symbols) > 1:
        return _nested(group)
    parts: list[list[KernelCall]] = []
    reached: int | None = 0
    for call in sorted(group, key=lambda c: c.symbols[0].lower):
        (symbol,) = call.symbols
        if parts and (reached is None or symbol.lower <= reached + 1):
            parts[-1].append(call)
            reached = _most(reached, symbol.upper)
        else:
            parts.append([call])
            reached = symbol.upper
    return [part for part in parts if len(part) > 1]


def _nested(group: list[KernelCall]) -> list[list[KernelCall]]:
    """Return the calls with sizes that no other call has all of, and behind them those that they have all of."""
    boxes = dict.fromkeys(call.symbols for call in group)
    greatest = [b for b in boxes if not any(o != b and _has(o, b) for o in boxes)]
    parts = {box: [call for call in group if call.symbols == box] for box in greatest}
    for call in group:
        if call.symbols not in parts:
            parts[next(b for b in greatest if _has(b, call.symbols))].append(call)
    return [part for part in parts.values() if len(part) > 1]


def _has(outer: tuple[Symbol, ...], inner: tuple[Symbol, ...]) -> bool:
    return all(
        o.lower <= i.lower and (o.upper is None or (i.upper is not None and i.upper <= o.upper))
        for o, i in zip(outer, inner, strict=True)
    )


def _join(part: list[KernelCall]) -> KernelCall:
    first = part[0]
    symbols = first.symbols
    if len(symbols) > 1:
        part = [call for call in part if call.symbols == symbols]
    else:
        lower = min(c.symbols[0].lower for c in part)
        upper = _most(*(c.symbols[0].upper for c in part))
        symbols = (msgspec.structs.replace(symbols[0], lower=lower, upper=upper),)
    tensors = tuple(
        (
            name,
            msgspec.structs.replace(
                spec,
                dims=tuple(
                    _join_dims([c.tensors[at][1].dims[i] for c in part])
                    for i in range(len(spec.dims))
                ),
            ),
        )
        for at, (name, spec) in enumerate(first.tensors)
    )
    attrs = tuple(
        (name, _join_attrs([c.attrs[at][1] for c in part]))
        for at, (name, _) in enumerate(first.attrs)
    )
    return msgspec.structs.replace(first, tensors=tensors, attrs=attrs, symbols=symbols)


def _join_attrs(values: list[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(_join_attrs(list(each)) for each in zip(*values, strict=True))
    return _join_dims(values) if hasattr(values[0], "expr") else values[0]


def _join_dims(dims: list[Dim]) -> Dim:
    """Return the dim that takes the values of all; only bounds are known of it if that holds for one of them."""
    first = dims[0]
    if first.is_static:
        return first
    known = [d.values for d in dims if d.values is not None]
    return msgspec.structs.replace(
        first,
        lower=min(d.lower for d in dims),
        upper=_most(*(d.upper for d in dims)),
        values=_join_values(known) if len(known) == len(dims) else None,
    )


def _join_values(values: Iterable[Runs]) -> Runs:
    import numpy as np

    return runs.from_array(np.unique(np.concatenate([runs.to_array(v) for v in values])))


def _most(*uppers: int | None) -> int | None:
    return None if None in uppers else max(u for u in uppers if u is not None)
