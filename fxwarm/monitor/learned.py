"""Why something was not warm, and how the stored plan learns of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from fxwarm import receipts, runtime
from fxwarm.monitor import misses, stack
from fxwarm.monitor.event import OURS, UNSURE, JitEvent, Kind
from fxwarm.monitor.misses import Miss
from fxwarm.monitor.stack import Moment, Sight
from fxwarm.records import CompileKey, Planned, WarmPlan
from passes.records import KernelCall, Site

if TYPE_CHECKING:
    from fxwarm.warmup import Warmup

log = logging.getLogger(__name__)


def event_of(miss: Miss, capturing: bool, kind: Kind | None = None, place: str = "") -> JitEvent:
    """Return the event that a call with ``miss`` makes, before it is made; its ``kind`` where that is not known yet."""
    family, call, planned, target, _ = miss
    falls_back = getattr(family, "falls_back", None)
    if kind is None and falls_back is not None and falls_back(planned.key):
        kind = "fallback"
    elif kind is None:
        kind = "build" if family.missing([planned], target) else "load"
    warmup, site, beyond = _nearest(call)
    return JitEvent(
        family.name,
        kind,
        op=call.op,
        key=planned.key,
        shape=", ".join(f"{name}={spec}" for name, spec in call.tensors),
        place=site.place if site is not None and site.place else place or stack.place_of_stack(),
        capturing=capturing,
        missing_from=_missing_from(warmup, planned.key),
        beyond=beyond,
        call=call,
    )


def explain(event: JitEvent, moment: Moment | None = None) -> tuple[JitEvent, str]:
    """Return a watcher's event with what it could not know, and the device of the call.

    That is which call it was, where it stands, and which plan lacks it. ``moment`` is None where the work is done by
    the calling thread.
    """
    if event.library == "dynamo":
        return event, ""
    sights = [stack.here()] if moment is None else moment.sights
    sight, miss = _seen_in(event, sights)
    if moment is None:
        capturing, whose = runtime.is_capturing(), event.whose
    else:
        capturing = sight is not None and sight.capturing
        whose = OURS if moment.mine or miss is not None else UNSURE
    place = event.place or (sight.place if sight is not None else "")
    if not place and whose == OURS and sights:
        place = sights[0].place
    event = msgspec.structs.replace(
        event, place=place, capturing=event.capturing or capturing, whose=whose
    )
    if miss is not None:
        full = event_of(miss, event.capturing, event.kind, place)
        return msgspec.structs.replace(full, seconds=event.seconds, whose=whose), miss.device
    if (
        sight is not None and sight.call is not None
    ):  # it is in a call of the library, of which one kernel is unknown
        needs = [m for m in misses.needs_of(sight.call) if m.family.name == event.library]
        if needs:
            full = event_of(needs[0], event.capturing, event.kind, place)
            shape = f"{full.op}({full.shape})"
            event = msgspec.structs.replace(
                event, shape=shape, place=full.place, beyond=full.beyond, call=full.call
            )
    missing = event.missing_from
    if event.key is not None:
        warmups = [w for w in _warmups() if w.plan is not None and _is_of(w.plan, event.library)]
        missing = _missing_from(warmups[-1] if warmups else None, event.key)
    device = str(sight.call.device) if sight is not None and sight.call is not None else ""
    return (
        msgspec.structs.replace(event, missing_from=missing),
        device or str(runtime.current_device()),
    )


def _seen_in(event: JitEvent, sights: Sequence[Sight]) -> tuple[Sight | None, Miss | None]:
    """Return the thread that is in a call of the event's library, and which of its kernels this is, where that shows."""
    inside = None
    for sight in sights:
        needs = misses.needs_of(sight.call) if sight.call is not None else []
        needs = [m for m in needs if m.family.name == event.library]
        if event.key is not None:
            mine = [m for m in needs if m.planned.key == event.key]
        else:
            named = [m for m in needs if event.op in (m.planned.key.tag, m.planned.key.kernel)]
            mine = named or [m for m in needs if not is_loaded(m.planned.key)]
        if mine and (event.key is not None or len(mine) == 1):
            return sight, mine[0]
        if needs and inside is None:
            inside = sight
    return inside or (sights[0] if len(sights) == 1 else None), None


def is_loaded(key: CompileKey) -> bool:
    """Return whether this process has loaded ``key``, on whatever device."""
    from fxwarm import warmup

    return any(key == each for _, each in (*warmup._resident, *misses.ran))


def with_seconds(event: JitEvent, seconds: float) -> JitEvent:
    """Return ``event`` with the seconds that its call took."""
    return msgspec.structs.replace(event, seconds=seconds)


def united(known: JitEvent, new: JitEvent) -> JitEvent:
    """Return ``known`` with what only ``new``, the same work seen again, says of it."""
    if known.call is None and new.call is not None:
        known, new = new, known
    return msgspec.structs.replace(
        known,
        seconds=max(known.seconds, new.seconds),
        place=known.place or new.place,
        shape=known.shape or new.shape,
        capturing=known.capturing or new.capturing,
        whose=OURS if OURS in (known.whose, new.whose) else UNSURE,
    )


def keep(events: Iterable[JitEvent]) -> None:
    """Add the kernels of ``events`` to the plans that lack them, here and for the next start.

    What no op was seen to call is left out: the next start could not launch it.
    """
    from fxwarm.family import load_families

    families = load_families()
    for event in events:
        if event.call is None or event.key is None or event.library not in families:
            continue
        warmup = _nearest(event.call)[0]
        plan = warmup.plan if warmup is not None else None
        if warmup is None or plan is None:
            log.warning("fxwarm: %s is in no plan, so none can learn of it", event)
            continue
        library = families[event.library].library({})
        found = [
            p
            for p in families[event.library].keys([event.call], plan.target, library)
            if isinstance(p, Planned) and p.key not in plan.keys
        ]
        if found:
            warmup.plan = msgspec.structs.replace(plan, planned=(*plan.planned, *found))
            receipts.learn(plan, found, warmup.options)


def _warmups() -> list[Warmup]:
    from fxwarm.artifacts import pending

    return pending.warmups()


def _is_of(plan: WarmPlan, family: str) -> bool:
    return any(c.family == family for c in plan.shapes.calls)


def _nearest(call: KernelCall) -> tuple[Warmup | None, Site | None, str]:
    """Return the warmup that should have covered ``call``, where it stands in its model, and what is out of range."""
    best: tuple[Warmup | None, Site | None, str] = (None, None, "")
    for warmup in _warmups():
        for planned, site in warmup.shapes.items():
            if (planned.family, planned.op) == (call.family, call.op):
                out = list(_out_of_range(planned, call))
                if not any(other for _, other in out):
                    beyond = "; ".join(text for text, _ in out)
                    if not beyond:
                        return warmup, site, ""
                    best = (warmup, site, beyond)
                elif best[0] is None:
                    best = (warmup, None, "")
    return best


def _out_of_range(planned: KernelCall, call: KernelCall) -> Iterator[tuple[str, bool]]:
    """Yield each size of ``call`` outside ``planned``, in words, and whether it makes it another call altogether."""
    for name, spec in call.tensors:
        if name not in planned or len(planned[name].dims) != len(spec.dims):
            yield f"{name} has another rank", True
            continue
        for at, (want, got) in enumerate(zip(planned[name].dims, spec.dims, strict=True)):
            size = int(got)
            if want.is_static and int(want) != size:
                yield f"{name}.shape[{at}] = {size}, not {want}", True
            elif not want.is_static and not want.lower <= size <= (
                size if want.upper is None else want.upper
            ):
                yield f"{name}.shape[{at}] = {size}, declared {want.lower}..{want.upper}", False


def _missing_from(warmup: Warmup | None, key: CompileKey) -> str:
    plan = warmup.plan if warmup is not None else None
    if plan is None:
        return JitEvent(key.family, "load").missing_from
    name = f"plan {receipts.warm_key(plan)[:8]} ({len(plan)} kernels)"
    if key in plan.keys:
        return f"what was loaded: {name} has it, see its report"
    near = [k for k in plan.keys if (k.family, k.kernel) == (key.family, key.kernel)]
    differs = [
        f"{mine} (planned: {', '.join(dict.fromkeys(k.template[at] for k in near if at < len(k.template)))})"
        for at, mine in enumerate(key.template)
        if near and all(at >= len(k.template) or k.template[at] != mine for k in near)
    ]
    return name + (f": nothing there with {' and '.join(differs)}" if differs else "")
