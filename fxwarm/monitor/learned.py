"""Why something was not warm, and how the stored plan learns of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from fxwarm import receipts, store
from fxwarm.monitor.event import JitEvent
from fxwarm.records import CompileKey, Planned, WarmPlan
from passes.records import KernelCall, Site

if TYPE_CHECKING:
    from fxwarm.monitor.guards import Miss
    from fxwarm.warmup import Warmup

log = logging.getLogger(__name__)

_NOT_THE_MODEL = (
    "torch",
    "fxwarm",
    "passes",
    "contextlib",
    "threading",
    "functools",
    "triton",
    "tilelang",
)


def event_of(miss: Miss, capturing: bool) -> JitEvent:
    """Return the event that a call with ``miss`` makes, before it is made."""
    family, call, planned, target, _ = miss
    falls_back = getattr(family, "falls_back", None)
    if falls_back is not None and falls_back(planned.key):
        kind = "fallback"
    else:
        kind = "build" if family.missing([planned], target) else "load"
    shape = ", ".join(f"{name}={spec}" for name, spec in call.tensors)
    warmup, site, beyond = _nearest(call)
    place = site.place if site is not None and site.place else place_of_stack()
    return JitEvent(
        family.name,
        kind,  # type: ignore[arg-type]
        op=call.op,
        key=planned.key,
        shape=shape,
        place=place,
        capturing=capturing,
        missing_from=_missing_from(warmup, planned.key),
        beyond=beyond,
        call=call,
    )


def explain(event: JitEvent) -> JitEvent:
    """Return a watcher's event with what it could not know: the place, and which plan lacks it."""
    from fxwarm.runtime import is_capturing

    if event.library == "dynamo":
        return event
    missing = event.missing_from
    if event.key is not None:
        warmups = [w for w in _warmups() if w.plan is not None and _is_of(w.plan, event.library)]
        missing = _missing_from(warmups[-1] if warmups else None, event.key)
    place = event.place or place_of_stack()
    return msgspec.structs.replace(
        event, place=place, missing_from=missing, capturing=event.capturing or is_capturing()
    )


def with_seconds(event: JitEvent, seconds: float) -> JitEvent:
    """Return ``event`` with the seconds that its call took."""
    return msgspec.structs.replace(event, seconds=seconds)


def keep(events: Iterable[JitEvent]) -> None:
    """Add the kernels of ``events`` to the stored plans that lack them. What the next start cannot launch is left out."""
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
            folder = store.root(warmup.options.cache_dir)
            store.write(
                store.path_of(folder, receipts.warm_key(plan), "plan"), warmup.plan.to_json()
            )


def _warmups() -> list[Warmup]:
    from fxwarm.artifacts import pending

    return [c.warmup for c in pending]


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


def place_of_stack() -> str:
    """Return the innermost line of this thread that belongs to the user's program."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        file = frame.f_code.co_filename
        if (
            module.partition(".")[0] not in _NOT_THE_MODEL
            and "torchinductor" not in file
            and file[:1] != "<"
        ):
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
