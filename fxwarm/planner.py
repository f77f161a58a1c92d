"""From shapes to the kernels they can need: a ShapeSet goes in, a WarmPlan comes out.

Pure unless ``ask`` is set: then a family that can make its installed library name the kernels does so, and where
its model of the library disagrees, the library wins and the difference becomes a note.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from fxwarm import exc
from fxwarm.family import KernelFamily, load_families
from fxwarm.records import Library, Planned, Target, WarmPlan
from passes import runs
from passes.records import Gap, KernelCall, ShapeSet

log = logging.getLogger(__name__)

OnPlanned = Callable[[KernelFamily, Planned], None]
OnModelled = Callable[[KernelFamily, Sequence[Planned]], None]

ONE_BY_ONE = 32
"""Keys with consecutive witness sizes from which on we say that M itself is in the key."""


def make_plan(
    shapes: ShapeSet,
    target: Target,
    libraries: Mapping[str, str] | None = None,
    *,
    ask: bool = False,
    max_keys: int = 4096,
    graph_key: str = "",
    on_planned: OnPlanned | None = None,
    on_modelled: OnModelled | None = None,
) -> WarmPlan:
    """Return every kernel that ``shapes`` can need on ``target``, each once, with a witness.

    ``libraries`` names builds to plan for, as in ``{"sgl-deep-gemm": "0.1.2"}``; the default is what is installed,
    else the newest build that the family knows. ``on_planned`` hears of each kernel that a library names as soon as it
    does, ``on_modelled`` of all kernels of a family that cannot ask its installed library; these families come first.
    Raises LibraryError where a name in ``libraries`` fits no family.
    """
    planned: dict[Planned, None] = {}
    used: list[Library] = []
    gaps, notes = list(shapes.gaps), []
    for family, calls, library in choose(shapes, target, libraries):
        if isinstance(library, exc.LibraryError):
            gaps += [Gap(call.op, str(library), family=family.name) for call in calls]
            continue
        found, family_gaps, family_notes = _plan_family(
            family, calls, target, library, ask=ask, on_planned=on_planned
        )
        extra = getattr(family, "extra", None)
        if extra is not None:
            found += [p for p in extra(target, library) if p not in found]
        if len(found) > max_keys:
            left = len(found) - max_keys
            family_gaps.append(
                Gap(
                    calls[0].op if calls else family.name,
                    f"{len(found)} kernels, {left} more than fxwarm.max_keys={max_keys}: the {left} with the largest "
                    f"sizes are left out; raise fxwarm.max_keys to {len(found)} or lower fxwarm.max_size",
                    family=family.name,
                )
            )
            found = found[:max_keys]
        if on_modelled is not None and library.installed and not _records(family):
            on_modelled(family, found)
        planned.update(dict.fromkeys(found))
        gaps += family_gaps
        notes += family_notes
        used.append(library)
    reference = [call.op for call in shapes.calls if not runs_on(target, call.family)]
    gaps += _silent(
        shapes,
        target,
        planned=[*planned],
        reference=reference,
        gaps=gaps,
        libraries=libraries,
    )
    return WarmPlan(
        target=target,
        libraries=tuple(used),
        planned=tuple(planned),
        gaps=tuple(dict.fromkeys(gaps)),
        reference=tuple(dict.fromkeys(reference)),
        notes=tuple(dict.fromkeys(notes)),
        shapes=shapes,
        graph_key=graph_key,
    )


def choose(
    shapes: ShapeSet, target: Target, libraries: Mapping[str, str] | None = None
) -> list[tuple[KernelFamily, list[KernelCall], Library | exc.LibraryError]]:
    """Return each family that has something to do on ``target``, with its calls and the build to plan for.

    Those that only model come first: what they name can be built while the others ask.
    """
    families = load_families()
    wanted = dict(libraries or {})
    _check_wanted(wanted, families.values())
    chosen: list[tuple[KernelFamily, list[KernelCall], Library | exc.LibraryError]] = []
    for family in sorted(families.values(), key=_records):
        calls = [call for call in shapes.calls if call.family == family.name]
        if not runs_on(target, family.name) or not (calls or hasattr(family, "extra")):
            continue
        try:
            chosen.append((family, calls, family.library(wanted)))
        except exc.LibraryError as error:
            chosen.append((family, calls, error))
    return chosen


def prepare(shapes: ShapeSet, target: Target) -> None:
    """Let each family with calls in ``shapes`` start in the background whatever takes long to ask."""
    for family, calls, library in choose(shapes, target):
        begin = getattr(family, "prepare", None)
        if begin is not None and calls and isinstance(library, Library) and library.installed:
            begin(target, library)


def _records(family: KernelFamily) -> bool:
    """Whether a family can ask its installed library, which takes seconds."""
    return getattr(family, "record", None) is not None


def runs_on(target: Target, name: str) -> bool:
    """Return whether a family has kernels on ``target``; elsewhere its calls run as reference implementations."""
    family = load_families().get(name)
    return family is None or target.device in getattr(family, "devices", ("cuda",))


def _plan_family(
    family: KernelFamily,
    calls: Sequence[KernelCall],
    target: Target,
    library: Library,
    *,
    ask: bool,
    on_planned: OnPlanned | None,
) -> tuple[list[Planned], list[Gap], list[str]]:
    modelled, gaps = _part(family.keys(calls, target, library))
    notes = _one_by_one(modelled)
    record = getattr(family, "record", None)
    if not (ask and record is not None and library.installed and calls):
        return modelled, gaps, notes
    try:
        recorded, asked_gaps = _part(_announced(record(calls, target, library), family, on_planned))
    except exc.LibraryError as error:
        log.warning("fxwarm: %s could not be asked, its model serves: %s", library, error)
        return modelled, [*gaps, Gap(family.name, str(error), family=family.name)], notes
    if recorded:
        drift = getattr(family, "drift", None)
        if drift is not None:
            notes += [str(d) for d in drift(modelled, recorded)]
        # A library may be asked in another order: a plan has the smallest sizes first, which max_keys counts on.
        place = {p: i for i, p in enumerate(modelled)}
        recorded.sort(key=lambda p: place.get(p, len(place)))
        # The library itself answered, so what the model could not say is no gap any more.
        return recorded, asked_gaps, notes
    return modelled, [*gaps, *asked_gaps], notes


def _announced(
    found: Iterable[Planned | Gap], family: KernelFamily, on_planned: OnPlanned | None
) -> Iterator[Planned | Gap]:
    for item in found:
        if on_planned is not None and isinstance(item, Planned):
            on_planned(family, item)
        yield item


def _part(found: Iterable[Planned | Gap]) -> tuple[list[Planned], list[Gap]]:
    planned: dict[Planned, None] = {}
    gaps: list[Gap] = []
    for item in found:
        if isinstance(item, Gap):
            gaps.append(item)
        else:
            planned.setdefault(item)
    return list(planned), gaps


def _check_wanted(wanted: Mapping[str, str], families: Iterable[KernelFamily]) -> None:
    known = {name for family in families for name in family.distributions}
    for name in wanted:
        if name not in known:
            raise exc.LibraryError(f"no family plans for {name!r}; {exc.did_you_mean(name, known)}")


def _silent(
    shapes: ShapeSet,
    target: Target,
    *,
    planned: Sequence[Planned],
    reference: Sequence[str],
    gaps: Sequence[Gap],
    libraries: Mapping[str, str] | None,
) -> list[Gap]:
    """A family whose calls are in the graph and that planned nothing and said nothing: that is never right."""
    spoke = {p.key.family for p in planned} | {g.family for g in gaps}
    quiet = [(c, s) for c, s in shapes.items() if c.family not in spoke and c.op not in reference]
    if not quiet:
        return []
    used = {
        family.name: (family, library) for family, _, library in choose(shapes, target, libraries)
    }
    out = []
    for call, site in quiet:
        family, library = used.get(call.family, (None, None))
        nothing = getattr(family, "needs_nothing", None)
        if (
            nothing is None
            or not isinstance(library, Library)
            or not nothing(call, target, library)
        ):
            reason = f"the family {call.family} planned no kernel and gave no reason; report it"
            out.append(Gap(call.op, reason, site.place, call.family))
    return out


def _one_by_one(planned: Sequence[Planned]) -> list[str]:
    """Say so where the keys of one op follow its rows one by one: then M is in the key, and the set grows with M."""
    rows: dict[str, set[int]] = {}
    for p in planned:
        if p.witness is not None and p.witness.tensors:
            _, spec = p.witness.tensors[0]
            if spec.dims:
                rows.setdefault(p.witness.op, set()).add(spec.dims[0].lower)
    notes = []
    for op, sizes in rows.items():
        for first, last, step in runs.from_array(np.array(sorted(sizes))):
            if step == 1 and last - first >= ONE_BY_ONE:
                # The last one may be the first of many sizes that share a kernel.
                notes.append(f"{op}: M is in the key, one kernel for each of {first}..{last - 1}")
    return notes


def every_size(plan: WarmPlan, family: KernelFamily) -> list[Planned]:
    """Return a planned launch for every attainable size of every call, for those who trust no heuristics."""
    from passes import bound

    library = next(lib for lib in plan.libraries if lib.distribution in family.distributions)
    out = []
    for call in plan.shapes.calls:
        if call.family == family.name:
            exprs = [d.expr for _, spec in call.tensors for d in spec.dims if not d.is_static]
            image = bound.image(call, *dict.fromkeys(exprs))
            for row in range(len(image.rows)):
                found = family.keys([bound.at(call, image.at(row))], plan.target, library)
                out += [p for p in found if isinstance(p, Planned)]
    return out
