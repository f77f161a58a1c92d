"""Warm keys and receipts: how the next start knows that there is nothing to record and nothing to build.

The warm key names what a plan depends on: torch's key of the graph, the calls with their ranges, the target, torch and
the libraries. The planned keys are found under it, not part of it. A receipt is the report of a complete warmup with
the cache files it stands on; it spares building, never loading.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from fxwarm import planner, store
from fxwarm.options import Options
from fxwarm.records import Entry, Library, Planned, Target, WarmPlan, WarmReport, digest
from passes.records import SCHEMA, ShapeSet

if TYPE_CHECKING:
    from fxwarm.warmup import Warmup

log = logging.getLogger(__name__)


def warm_key(plan: WarmPlan) -> str:
    """Return the warm key of ``plan``."""
    return key_of(plan.shapes, plan.target, plan.libraries, plan.graph_key)


def key_of(shapes: ShapeSet, target: Target, libraries: tuple[Library, ...], graph_key: str) -> str:
    """Return the name of everything that a plan depends on: 32 hex digits.

    The first half names the calls, in any order; the second the graph, the device and the libraries. So what was kept
    for the same calls and other libraries is found, and said. The name of the target is left out: an H100 with as many
    SMs asks for the same kernels as an H200.
    """
    device = (target.device, target.arch, target.num_sms, target.smem)
    return (
        _key_of_calls(shapes)
        + digest(graph_key, device, libraries, str(torch.__version__), SCHEMA)[:16]
    )


def _key_of_calls(shapes: ShapeSet) -> str:
    calls = sorted(msgspec.json.encode(call).decode() for call in shapes.calls)
    return digest(calls)[:16]


def knows(shapes: ShapeSet, options: Options) -> bool:
    """Whether an earlier process completed a warmup of the same calls, on whatever device, with whatever libraries."""
    return any(store.root(options.cache_dir).glob(f"{_key_of_calls(shapes)}*/receipt.json"))


def stored_plan(warmup: Warmup) -> WarmPlan | None:
    """Return the plan that an earlier process completed for the same graph, target and libraries, or None.

    It is believed only if its receipt is there and every file that the receipt names is whole.
    """
    shapes, target = warmup.shapes, warmup.target
    if not shapes.calls or target is None:
        return None
    chosen = [library for _, _, library in planner.choose(shapes, target, warmup.libraries)]
    libraries = tuple(library for library in chosen if isinstance(library, Library))
    if len(libraries) < len(chosen):
        return None
    key = key_of(shapes, target, libraries, warmup.graph_key)
    folder = store.root_with(key, warmup.options.cache_dir)
    receipt = store.read(store.path_of(folder, key, "receipt"), WarmReport)
    if receipt is not None and receipt.plan_key != key:
        log.warning(
            "fxwarm: the receipt of %s is of %s; it is not used", key, receipt.plan_key or "nothing"
        )
        receipt = None
    damaged = {
        entry: why for entry in (receipt.entries if receipt else ()) if (why := check_entry(entry))
    }
    if damaged:
        log.warning("fxwarm: receipt %s is stale: %s", key, "; ".join([*damaged.values()][:3]))
        ours = store.read(store.path_of(folder, key, "plan"), WarmPlan)
        # The receipt is a file that somebody may have written: only what the families themselves name is touched.
        named = set(_files(ours)) if ours is not None and warm_key(ours) == key else set()
        _set_aside(entry for entry in damaged if entry.path in named)
    if warmup.offered is not None and warm_key(warmup.offered) == key:
        log.info("fxwarm: the plan that came with the model fits: %d kernels", len(warmup.offered))
        return warmup.offered
    if receipt is None:
        _say_why(folder, key, target, libraries)
        return None
    plan = store.read(store.path_of(folder, key, "plan"), WarmPlan)
    if plan is None or warm_key(plan) != key:
        log.info("fxwarm: the receipt %s has no plan beside it; planning again", key)
        return None
    log.info("fxwarm: plan %s of an earlier start: %d kernels", key, len(plan))
    # The gaps are those of the graph at hand: a plan that has others gets no receipt.
    return msgspec.structs.replace(plan, shapes=shapes, gaps=shapes.gaps)


def learn(plan: WarmPlan, planned: Iterable[Planned], options: Options) -> None:
    """Keep kernels that ``plan`` lacks and a monitor saw: whoever warms the same shapes again adds them to its plan."""
    folder, key = store.root(options.cache_dir), warm_key(plan)
    path = store.path_of(folder, key, "learned")
    with store.alone(folder, key):
        known = store.read(path, WarmPlan)
        learned = dict.fromkeys((*(known.planned if known is not None else ()), *planned))
        store.write(path, msgspec.structs.replace(plan, planned=tuple(learned), gaps=()).to_json())


def with_learned(plan: WarmPlan, options: Options) -> WarmPlan:
    """Return ``plan`` with what was learned for it since it was made."""
    if not plan.shapes.calls:
        return plan
    key = warm_key(plan)
    folder = store.root_with(key, options.cache_dir)
    learned = store.read(store.path_of(folder, key, "learned"), WarmPlan)
    if learned is None or warm_key(learned) != key:
        return plan
    more = [p for p in learned.planned if p.key not in plan.keys]
    if more:
        log.info("fxwarm: plan %s has learned %d kernels since", key, len(more))
    return msgspec.structs.replace(plan, planned=(*plan.planned, *more))


def _say_why(folder: Path, key: str, target: Target, libraries: tuple[Library, ...]) -> None:
    """Say in which way the newest receipt for the same calls does not fit, where there is one."""
    others = sorted(folder.glob(f"{key[:16]}*/receipt.json"), key=_age)
    other = store.read(others[0], WarmReport) if others else None
    if other is None:
        return
    reasons = []
    if other.target != target:
        reasons.append(
            f"it is for {other.target.name} ({other.target.arch or other.target.device}), not {target.name}"
        )
    theirs = {library.distribution: library for library in other.libraries}
    for mine in libraries:
        old = theirs.get(mine.distribution)
        if old is None:
            reasons.append(f"it has no {mine.distribution}")
        elif old.version != mine.version:
            reasons.append(f"it is for {old}, not {mine.version}")
        elif old != mine:
            names = [
                n
                for n in ("fingerprint", "settings", "environment")
                if getattr(old, n) != getattr(mine, n)
            ]
            reasons.append(f"the {' and '.join(names) or 'place'} of {mine} changed")
    reason = "; ".join(reasons) or "it is of another graph, or of another torch"
    log.info(
        "fxwarm: the receipt %s for the same calls is not used: %s", others[0].parent.name, reason
    )


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # gone since it was listed
        return 0.0


def _set_aside(damaged: Iterable[Entry]) -> None:
    """Remove files that were cut short, so that the libraries, which look at names only, count them as missing.

    A longer one is somebody's rebuild, or a tactics file that grew: it stays.
    """
    for entry in damaged:
        path = Path(entry.path)
        try:
            if path.stat().st_size < entry.bytes:
                path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("fxwarm: %s is damaged and cannot be removed: %s", path, error.strerror)


def keep(plan: WarmPlan, report: WarmReport, options: Options) -> WarmReport:
    """Store the plan, and the receipt if the warmup was complete; return the report with its cache entries.

    What the graph itself leaves open (an op that nobody claims) does not spoil a receipt; any other gap does.
    """
    if not plan.planned or not report.plan_key:
        return report
    folder = store.root(options.cache_dir)
    with store.alone(folder, report.plan_key):
        return _keep(plan, report, folder)


def _keep(plan: WarmPlan, report: WarmReport, folder: Path) -> WarmReport:
    store.write(store.path_of(folder, report.plan_key, "plan"), plan.to_json())
    if report.failed or report.absent or not set(report.gaps) <= set(plan.shapes.gaps):
        return report
    path = store.path_of(folder, report.plan_key, "receipt")
    try:
        files = _files(plan)
        kept = (
            None
            if report.built or any(not t.found for t in report.tuned)
            else store.read(path, WarmReport)
        )
        if (
            kept is not None
            and [e.path for e in kept.entries] == files
            and not any(map(check_entry, kept.entries))
        ):
            return msgspec.structs.replace(report, entries=kept.entries)
        report = msgspec.structs.replace(report, entries=tuple(map(_entry, files)))
    except OSError as error:  # a file vanished, or a network disk lost its handle
        log.warning("fxwarm: no receipt, the next start looks again: %s", error)
        return report
    store.write(path, report.to_json())
    return report


def changed(plan: WarmPlan, options: Options) -> list[str]:
    """Return what is wrong with the files that the receipt of ``plan`` names, their contents compared; reads them all."""
    key = warm_key(plan)
    folder = store.root_with(key, options.cache_dir)
    receipt = store.read(store.path_of(folder, key, "receipt"), WarmReport)
    if receipt is None or receipt.plan_key != key:
        return []
    return [why for entry in receipt.entries if (why := check_entry(entry, whole=True))]


def _files(plan: WarmPlan) -> list[str]:
    """Return the cache files that hold the plan's kernels."""
    from fxwarm.family import by_family

    found: dict[str, None] = {}
    for family, group in by_family(plan.planned):
        cached = getattr(family, "cached", None)
        found.update((str(path), None) for path in (cached(group) if cached is not None else ()))
    return list(found)


def _entry(path: str) -> Entry:
    data = Path(path).read_bytes()
    return Entry(path, len(data), hashlib.sha256(data).hexdigest())


def check_entry(entry: Entry, *, whole: bool = False) -> str:
    """Return what is wrong with a file that a receipt names, or "". ``whole`` compares the hash, not only the size."""
    path = Path(entry.path)
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{path.parent.name}/{path.name} has {size} bytes, not {entry.bytes}"
        if whole and hashlib.sha256(path.read_bytes()).hexdigest() != entry.sha256:
            return f"{path.parent.name}/{path.name} has other contents"
    except OSError as error:
        return f"{path.parent.name}/{path.name}: {error.strerror}"
    return ""
