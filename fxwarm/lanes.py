"""Which kernel each size of a call needs, as bands over its rows: what a picture of a plan shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fxwarm.records import CompileKey, WarmPlan
from passes.records import Dim, KernelCall
from passes.text import TIMES, fold

SAMPLES = 240
"""Sizes at which a plan is asked, evenly over the log axis: finer than a pixel at 900 pixels."""
Label = Callable[[CompileKey], str]


class Band(NamedTuple):
    """One kernel over a range of sizes."""

    first: int
    last: int
    key: CompileKey


Lane = tuple[str, Sequence[Band]]
"""A row of bands, with its name."""


def lanes_of(plan: WarmPlan, samples: int = SAMPLES) -> list[Lane]:
    """Return the kernels of each call of ``plan`` over its rows, a lane a call and kind of kernel.

    The family's model is asked at ``samples`` sizes; between two that differ it is asked by halving.
    Up to four times as many sizes are all asked.
    """
    from fxwarm.family import load_families

    libraries = {library.distribution: library for library in plan.libraries}
    out: list[Lane] = []
    for call in plan.shapes.calls:
        family = load_families().get(call.family)
        library = next(
            (libraries[d] for d in getattr(family, "distributions", ()) if d in libraries), None
        )
        rows = rows_of(call)
        if family is None or library is None or rows is None:
            continue

        def ask(
            static: KernelCall, family: Any = family, library: Any = library
        ) -> dict[str, CompileKey]:
            found = family.keys([static], plan.target, library)
            return {p.key.kernel: p.key for p in found if hasattr(p, "key")}

        by_kernel = _sweep(call, rows, ask, samples)
        most = max((len({b.key for b in found}) for found in by_kernel.values()), default=0)
        main = [k for k, found in by_kernel.items() if len({b.key for b in found}) == most]
        for kernel, found in by_kernel.items():
            name = f"{call.op}\n{weight_of(call)}".rstrip()
            if kernel in main and len(main) > 1:  # such as the two GEMMs of an MoE layer
                name = f"{name}, {kernel}"
            out.append((name if kernel in main else kernel, found))
    return out


def kernels_over(runs: Sequence[Sequence[int]], keys: Sequence[CompileKey]) -> Iterator[Band]:
    """Yield the bands of a recorded sweep: runs of (first M, last M, index into ``keys``)."""
    for first, last, index in runs:
        yield Band(first, last, keys[index])


def rows_of(call: KernelCall) -> Dim | None:
    """Return the first dimension of a call that varies: its rows."""
    dims = (dim for _, spec in call.tensors for dim in spec.dims)
    return next((dim for dim in dims if not dim.is_static), None)


def weight_of(call: KernelCall) -> str:
    """Return the sizes of the weight of a call: of the tensor ``b``, else of the largest static one."""
    static = [spec for _, spec in call.tensors if all(dim.is_static for dim in spec.dims)]
    static.sort(key=lambda spec: math.prod(map(int, spec.dims)))
    spec = call["b"] if "b" in call else next(reversed(static), None)
    return f" {TIMES} ".join(dim.expr for dim in spec.dims) if spec is not None else ""


def _sweep(
    call: KernelCall, rows: Dim, ask: Callable[[KernelCall], dict[str, CompileKey]], samples: int
) -> dict[str, list[Band]]:
    import numpy as np

    from passes import bound

    image = bound.image(call, rows)
    values = image.rows[:, 0]
    spread = np.geomspace(max(1, int(values[0])), int(values[-1]), samples)
    picks = sorted(
        {
            0,
            len(values) - 1,
            *(int(i) for i in np.searchsorted(values, spread).clip(0, len(values) - 1)),
        }
    )
    if len(values) <= 4 * samples:  # half a millisecond each: half a second at most
        picks = list(range(len(values)))
    known: dict[int, dict[str, CompileKey]] = {}

    def at(index: int) -> dict[str, CompileKey]:
        if index not in known:
            known[index] = ask(bound.at(call, image.at(index)))
        return known[index]

    todo = [*itertools.pairwise(picks)]
    at(picks[0])
    while todo:
        low, high = todo.pop()
        if at(low) != at(high) and high - low > 1:
            middle = (low + high) // 2
            todo += [(low, middle), (middle, high)]
    out: dict[str, list[Band]] = {}
    order = sorted(known)
    for place, index in enumerate(order):
        last = int(values[order[place + 1]]) - 1 if place + 1 < len(order) else int(values[index])
        for kernel, key in known[index].items():
            found = out.setdefault(kernel, [])
            if found and found[-1].key == key and found[-1].last >= int(values[index]) - 1:
                found[-1] = Band(found[-1].first, last, key)
            else:
                found.append(Band(int(values[index]), last, key))
    return out


def label_of(keys: Sequence[CompileKey]) -> Label:
    """Return a short name of a key among ``keys``: the family's own, else the arguments at which they differ."""
    from fxwarm.family import load_families

    distinct = list(dict.fromkeys(keys))
    names: dict[CompileKey, str] = {}
    by_kernel: dict[str, list[CompileKey]] = {}
    for key in distinct:
        by_kernel.setdefault(key.kernel, []).append(key)
    for group in by_kernel.values():
        folded, _ = fold([key.template for key in group])
        for key, text in zip(group, folded, strict=True):
            own = getattr(load_families().get(key.family), "label", None)
            named = own(key) if own is not None else ""
            names[key] = named or " ".join(text.replace(",", " ").split())
    return lambda key: names[key]
