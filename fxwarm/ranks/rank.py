"""Warm a whole group of ranks: deal out the missing kernels, build them once, load them everywhere, agree on tactics.

Everything here runs in ``warm_all(group)`` and nowhere else: ranks trace and recompile on their own, so a compiled
callable that waited for its peers would hang. Between the exchanges each rank works alone; what it finds, errors
included, is data of the next exchange, and what follows is computed alike on every rank from what all said.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fxwarm import exc, options, warmup
from fxwarm.family import KernelFamily
from fxwarm.ranks.building import build, fit, state_facts
from fxwarm.ranks.dealing import Item, Outcome, name_folder
from fxwarm.ranks.meeting import Meeting
from fxwarm.ranks.party import Party, on
from fxwarm.ranks.tactics import tune
from fxwarm.records import Built, Library, Target, WarmReport, digest
from passes.records import Gap

if TYPE_CHECKING:
    from fxwarm.artifacts import WarmCallable
    from fxwarm.warmup import Warmup

log = logging.getLogger(__name__)


def warm_together(
    callables: Sequence[WarmCallable], group: Any, *, builds: bool = True
) -> list[WarmReport]:
    """Make ``callables`` warm together with the other ranks of ``group``; see ``fxwarm.warm_all``."""
    with Meeting(group) as meeting:
        hosts = {meeting.rank: meeting.host}
        return _run(Party(callables, meeting, builds=builds, hosts=hosts))


def _run(party: Party) -> list[WarmReport]:
    party.meeting.doing = "planning"
    for callable_ in party.callables:
        _plan(party, callable_.warmup)
    first = state_facts(party, first=True)
    log.info(
        "fxwarm: rank %d on %s: %d kernels found, %d missing",
        party.meeting.rank,
        party.meeting.host,
        len(party.work) - len(first.missing),
        len(first.missing),
    )
    facts = build(party, first)
    fit(party)
    for name in sorted({name for f in facts.values() for name in f.tunes}):
        tune(party, name)
    party.meeting.doing = "loading"
    errors = [_finish(party, callable_) for callable_ in party.callables]
    _tell(party)
    return _close(party, errors)


def _plan(party: Party, one: Warmup) -> None:
    try:
        one.settle(())
        one.wait()
        if one.plan is None and one._thread is None:
            with options.use(one.options), on(one.device):
                one.plan = one.make_plan()
        _take_stock(party, one)
    except Exception as error:  # data: the others must not wait for a rank that cannot plan
        log.exception("fxwarm: planning failed")
        one._error = one._error or error


def _take_stock(party: Party, one: Warmup) -> None:
    assert one.target is not None
    mine = party.items.setdefault(id(one), [])
    for family, group, library in one.groups():
        where = _folder_of(family, one.target)
        folder = name_folder(where) if where is not None else f"{party.meeting.host}-{family.name}"
        kind = _kind(one.target, library)
        for planned in group:
            item = Item(folder, kind, planned.key)
            mine.append(item)
            party.work.setdefault(item, (family, planned, one))
    for built in one.built:  # in the background, before this
        for item in mine:
            if item.key == built.key and built.error:
                party.failed[item] = built.error


def _finish(party: Party, callable_: WarmCallable) -> Exception | None:
    one = callable_.warmup
    if one.report is None:
        _hand_over(party, one)
    try:
        callable_.make_warm()
    except Exception as error:  # strict: raised when all have heard of it
        return error
    if one.report is None:  # said in the log, and not raised
        party.gaps.append(Gap("warm_all", "a warmup failed on this rank; see its log"))
    return None


def _hand_over(party: Party, one: Warmup) -> None:
    """Give ``one`` what was built for it here and elsewhere, so that it only tunes and loads."""
    items = party.items.get(id(one), [])
    plan = one.plan
    if plan is not None:
        now = {item.key: party.work[item][1] for item in items}
        planned = tuple(now.get(p.key, p) for p in plan.planned)
        plan = msgspec.structs.replace(plan, planned=planned)
    bad = {**party.refused, **party.failed}
    built = {b.key: b for b in one.built}  # in the background, before this
    built |= {i.key: b for i, b in party.built.items() if i in items and party.work[i][2] is one}
    built |= {item.key: Built(item.key, error=bad[item]) for item in items if item in bad}
    found = [i.key for i in items if i.key not in built and i not in party.lacking]
    one.adopt(plan, [*built.values()], found, party.seconds.get(id(one), 0.0))


def _tell(party: Party) -> None:
    reports = [c.warmup.report for c in party.callables if c.warmup.report is not None]
    known = {*party.failed, *party.refused}
    shared = {item.key for item in known}
    failures = [f"{x.key}: {x.error}" for r in reports for x in r.failed if x.key not in shared]
    failures += [str(g.reason) for r in reports for g in r.gaps if g.op in ("warmup", g.family)]
    failures += [str(g.reason) for g in party.gaps if g.op == "warm_all"]
    mine = Outcome(
        host=party.meeting.host,
        built=sum(not b.error for b in party.built.values()),
        loaded=sum(not x.error for r in reports for x in r.loaded),
        seconds=max((r.seconds for r in reports), default=0.0),
        failures=tuple(dict.fromkeys(failures))[:20],
    )
    outcomes = party.meeting.exchange(mine)
    for rank, outcome in outcomes.items():
        if rank != party.meeting.rank:
            party.gaps += [Gap("warm_all", party.said(rank, text)) for text in outcome.failures]
    for rank, why in party.meeting.lost.items():
        party.gaps.append(
            Gap("warm_all", f"rank {rank} was lost, it was {why}; the others went on without it")
        )
    party.notes.append(
        "; ".join(
            f"{party.who(r)}: {o.built} built, {o.loaded} loaded" for r, o in outcomes.items()
        )
    )


def _close(party: Party, errors: Iterable[Exception | None]) -> list[WarmReport]:
    out: list[WarmReport] = []
    for callable_ in party.callables:
        one = callable_.warmup
        if one.report is not None:
            one.report = _complete(party, one, one.report)
            out.append(one.report)
    for error in errors:
        if error is not None:
            raise error
    for report, callable_ in zip(out, party.callables, strict=False):
        if callable_.warmup.options.strict and report.status == "partial":
            raise exc.IncompleteError(warmup.why_partial(report))
    return out


def _complete(party: Party, one: Warmup, report: WarmReport) -> WarmReport:
    items = party.items.get(id(one), [])
    tuned = {t.key: t for t in report.tuned} | {
        i.key: t for i, t in party.tuned.items() if i in items
    }
    gaps = [*report.gaps, *party.gaps]
    return msgspec.structs.replace(
        report,
        tuned=tuple(tuned.values()),
        gaps=tuple(dict.fromkeys(gaps)),
        notes=tuple(dict.fromkeys([*report.notes, *party.notes])),
    )


def _folder_of(family: KernelFamily, target: Target) -> Path | None:
    """Return the folder of the family's disk cache, where the family says."""
    folder = getattr(family, "folder", None)
    return Path(folder(target)) if folder is not None else None


def _kind(target: Target, library: Library) -> str:
    return digest(target.device, target.arch, target.num_sms, target.smem, library)[:16]
