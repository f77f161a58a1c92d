"""The laws that every kernel family must keep. A new family's test is one call of ``check_family``.

*Coverage*: the kernel that any attainable size needs is among the keys. *Economy*: no key twice, and each witness leads
back to its key. *Monotone*: a wider range never loses a key. *Purity*: keys are JSON scalars, and planning imports no
kernel library. *Idempotence*: what is loaded is not missing, and loading twice builds nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import msgspec

from fxwarm.family import KernelFamily, check
from fxwarm.records import CompileKey, Library, Planned, Target
from passes import bound, runs
from passes.records import Dim, Gap, KernelCall, TensorSpec

LIBRARIES = ("deep_gemm", "flashinfer", "tilelang", "tile_kernels", "triton.runtime")


def check_family(
    family: object,
    calls: Sequence[KernelCall],
    target: Target | None = None,
    *,
    library: Library | None = None,
    samples: int = 50,
    load: bool = False,
) -> tuple[CompileKey, ...]:
    """Hold ``family`` to the laws over ``calls``, on ``target`` (an H200 by default); return the planned keys.

    ``samples`` random sizes and ranges are drawn a call (by hypothesis, so a failure shrinks). With ``load`` the
    kernels are built and loaded for real on this machine. Raises AssertionError naming the law, the call, the size.
    """
    fam = check(family)
    target = target or Target.named("h200")
    library = library or fam.library({})
    before = _imported()
    planned = _keys(fam, calls, target, library)
    assert _imported() <= before, f"purity: planning imported {sorted(_imported() - before)}"
    assert planned, f"{fam.name} planned nothing for {len(calls)} calls on {target.name}"
    _check_keys(fam, planned, target, library)
    for call in calls:
        _check_call(fam, call, target, library, samples)
    if load:
        _check_load(fam, planned, target)
    return tuple(p.key for p in planned)


def restrict(call: KernelCall, upper: int) -> KernelCall:
    """Return ``call`` with each of its sizes bounded by ``upper`` as well: a narrower range of the same call."""
    symbols = tuple(
        msgspec.structs.replace(
            s, upper=max(s.lower, min(upper, s.upper if s.upper is not None else upper))
        )
        for s in call.symbols
    )
    call = msgspec.structs.replace(call, symbols=symbols)

    def narrow(dim: Dim) -> Dim:
        if dim.is_static:
            return dim
        values = bound.image(call, dim.expr).rows[:, 0]
        return Dim(dim.expr, int(values.min()), int(values.max()), runs.from_array(values))

    tensors = tuple(
        (name, TensorSpec(spec.dtype, tuple(map(narrow, spec.dims)), spec.strides))
        for name, spec in call.tensors
    )
    attrs = tuple(
        (name, narrow(value) if isinstance(value, Dim) else value) for name, value in call.attrs
    )
    return msgspec.structs.replace(call, tensors=tensors, attrs=attrs)


def _keys(
    family: KernelFamily, calls: Sequence[KernelCall], target: Target, library: Library
) -> list[Planned]:
    return [p for p in family.keys(calls, target, library) if not isinstance(p, Gap)]


def _check_keys(
    family: KernelFamily, planned: Sequence[Planned], target: Target, library: Library
) -> None:
    keys = [p.key for p in planned]
    assert len(keys) == len(set(keys)), "economy: a key is planned twice"
    for p in planned:
        again = msgspec.json.decode(msgspec.json.encode(p.key), type=CompileKey)
        assert again == p.key, f"purity: {p.key} does not survive JSON"
        if p.witness is not None:
            assert not p.witness.symbols, (
                f"economy: the witness of {p.key} is not static: {p.witness}"
            )
            found = {q.key for q in _keys(family, [p.witness], target, library)}
            assert p.key in found, (
                f"economy: the witness {p.witness} of {p.key} leads to {_names(found)}"
            )


def _check_call(
    family: KernelFamily, call: KernelCall, target: Target, library: Library, samples: int
) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    exprs = list(dict.fromkeys(d.expr for d in _dims(call) if not d.is_static))
    if not exprs:
        return
    keys = {p.key for p in _keys(family, [call], target, library)}
    image = bound.image(call, *exprs)
    assert len(image.rows), f"{call} has no attainable size"
    largest = max(int(s.upper or s.lower) for s in call.symbols) if call.symbols else 1

    @settings(max_examples=samples, deadline=None, database=None)
    @given(row=st.integers(0, len(image.rows) - 1))
    def coverage(row: int) -> None:
        static = bound.at(call, image.at(row))
        lost = {p.key for p in _keys(family, [static], target, library)} - keys
        assert not lost, f"coverage: {static} needs {_names(lost)}, which the plan of {call} lacks"

    @settings(max_examples=max(1, samples // 5), deadline=None, database=None)
    @given(upper=st.integers(1, largest))
    def monotone(upper: int) -> None:
        narrow = {p.key for p in _keys(family, [restrict(call, upper)], target, library)}
        assert narrow <= keys, (
            f"monotone: up to {upper} needs {_names(narrow - keys)}, up to {largest} does not"
        )

    coverage()
    if image.exact:
        monotone()


def _check_load(family: KernelFamily, planned: Sequence[Planned], target: Target) -> None:
    build = getattr(family, "build", None)
    if build is not None:
        failed = [b for b in build(family.missing(planned, target), target, 2) if b.error]
        assert not failed, f"build: {failed[0].key}: {failed[0].error}"
    failed_loads = [x for x in family.load(planned, target, lambda call: None) if x.error]
    assert not failed_loads, f"load: {failed_loads[0].key}: {failed_loads[0].error}"
    missing = family.missing(planned, target)
    assert not missing, f"idempotence: {missing[0].key} is loaded and still missing"


def _names(keys: Iterable[CompileKey]) -> str:
    return ", ".join(sorted(map(str, keys))) or "nothing"


def _dims(call: KernelCall) -> Iterable[Dim]:
    for _, spec in call.tensors:
        yield from spec.dims
    for _, value in call.attrs:
        if isinstance(value, Dim):
            yield value


def _imported() -> set[str]:
    return {name for name in sys.modules if name in LIBRARIES}
