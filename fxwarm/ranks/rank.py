"""Warm a whole group of ranks: deal out the missing kernels, build them once, load them everywhere, agree on tactics.

Everything here runs in ``warm_all(group)`` and nowhere else: ranks trace and recompile on their own, so a compiled
callable that waited for its peers would hang. Between the exchanges each rank works alone; what it finds, errors
included, is data of the next exchange, and what follows is computed alike on every rank from what all said.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from fxwarm import builds, exc, options, receipts, runtime, warmup
from fxwarm.family import KernelFamily, by_family
from fxwarm.planner import make_plan
from fxwarm.progress import Progress
from fxwarm.ranks.dealing import Facts, Fit, Held, Item, Outcome, Timings, agree, deal, name_folder
from fxwarm.ranks.meeting import Meeting
from fxwarm.records import (
    Built,
    CompileKey,
    Library,
    Planned,
    Target,
    Tuned,
    WarmPlan,
    WarmReport,
    digest,
)
from passes.records import Gap, KernelCall

if TYPE_CHECKING:
    from fxwarm.artifacts import WarmCallable
    from fxwarm.warmup import Warmup

log = logging.getLogger(__name__)

ROUNDS = 4
"""Most times that work is dealt out: once, again for the keys of a rank that died, for caches that were not shared."""


def warm_together(
    callables: Sequence[WarmCallable], group: Any, *, builds: bool = True
) -> list[WarmReport]:
    """Make ``callables`` warm together with the other ranks of ``group``; see ``fxwarm.warm_all``."""
    with Meeting(group) as meeting:
        return _Party(callables, meeting, builds=builds).run()


class _Party:
    """This rank's side of one ``warm_all(group)``."""

    def __init__(
        self, callables: Sequence[WarmCallable], meeting: Meeting, *, builds: bool
    ) -> None:
        self.callables, self.meeting, self.builds = callables, meeting, builds
        self.work: dict[Item, tuple[KernelFamily, Planned, Warmup]] = {}
        """Everything that this rank plans, by item."""
        self.items: dict[int, list[Item]] = {}
        """The same by warmup."""
        self.built: dict[Item, Built] = {}
        self.lacking: set[Item] = set()
        """What this rank's caches lacked when it looked last."""
        self.tried: list[Item] = []
        self.failed: dict[Item, str] = {}
        self.refused: dict[Item, str] = {}
        self.tuned: dict[Item, Tuned] = {}
        self.gaps: list[Gap] = []
        self.notes: list[str] = []
        self.hosts: dict[int, str] = {meeting.rank: meeting.host}

    def run(self) -> list[WarmReport]:
        self.meeting.doing = "planning"
        for callable_ in self.callables:
            self._plan(callable_.warmup)
        first = self._facts(first=True)
        log.info(
            "fxwarm: rank %d on %s: %d kernels found, %d missing",
            self.meeting.rank,
            self.meeting.host,
            len(self.work) - len(first.missing),
            len(first.missing),
        )
        facts = self._build_rounds(first)
        self._fit()
        for name in sorted({name for f in facts.values() for name in f.tunes}):
            self._tune(name)
        self.meeting.doing = "loading"
        errors = [self._finish(callable_) for callable_ in self.callables]
        self._tell()
        return self._close(errors)

    # Planning: local

    def _plan(self, one: Warmup) -> None:
        try:
            one.settle(())
            one.wait()
            if one.plan is None and one._thread is None:
                with options.use(one.options), _on(one.device):
                    one.plan = _make_plan(one)
            self._take_stock(one)
        except Exception as error:  # data: the others must not wait for a rank that cannot plan
            log.exception("fxwarm: planning failed")
            one._error = one._error or error

    def _take_stock(self, one: Warmup) -> None:
        assert one.target is not None
        mine = self.items.setdefault(id(one), [])
        for family, group in by_family(one.plan.planned if one.plan is not None else ()):
            library = family.library(one.libraries)
            if not library.installed:
                one._absent[family.name] = (
                    f"{library}: install it to warm {len(group)} kernels of {family.name}"
                )
                continue
            where = _folder_of(family, one.target)
            folder = (
                name_folder(where) if where is not None else f"{self.meeting.host}-{family.name}"
            )
            kind = _kind(one.target, library)
            for planned in group:
                item = Item(folder, kind, planned.key)
                mine.append(item)
                self.work.setdefault(item, (family, planned, one))
        for built in one._built:  # in the background, before this
            for item in mine:
                if item.key == built.key and built.error:
                    self.failed[item] = built.error

    def _facts(self, *, first: bool = False) -> Facts:
        missing: list[Item] = []
        self.lacking = set()
        libraries: set[str] = set()
        for family, target, items in self._groups(self.work):
            library = family.library({})
            libraries.add(f"{library} {library.fingerprint}".strip())
            try:
                lacking = {p.key for p in family.missing([self.work[i][1] for i in items], target)}
            except Exception as error:
                self._complain(f"{family.name} cannot say what is missing", error)
                continue
            found = [item for item in items if item.key in lacking]
            self.lacking |= set(found)
            if target.arch not in getattr(family, "archs", (target.arch,)):
                found = (
                    found[:1] if first else []
                )  # this one shows whether the rest is worth its time
            if hasattr(family, "build"):
                missing += found
        return Facts(
            host=self.meeting.host,
            builds=self.builds,
            missing=tuple(missing),
            tried=tuple(self.tried),
            failed=tuple(self.failed.items()),
            tunes=tuple(sorted({f.name for f, _, _ in self.work.values() if _tunes_together(f)})),
            libraries=tuple(sorted(libraries)),
        )

    # Building: dealt out

    def _build_rounds(self, mine: Facts) -> dict[int, Facts]:
        for turn in range(ROUNDS):
            facts = self.meeting.exchange(mine)
            self.hosts |= {rank: f.host for rank, f in facts.items()}
            for rank, f in facts.items():
                for item, reason in f.failed:
                    if item in self.work:
                        self.failed.setdefault(item, self._said(rank, reason))
            share = deal(facts)
            if turn == 0:
                self._note(facts, share)
            if not any(share.values()):  # unanimous: all ranks see the same facts
                break
            peers = sum(bool(share[r]) for r, f in facts.items() if f.host == self.meeting.host)
            self._build(share[self.meeting.rank], max(1, peers))
            self.meeting.exchange(len(self.built))  # nobody looks again before all have built
            mine = self._facts()
        return facts

    def _note(self, facts: Mapping[int, Facts], share: Mapping[int, Sequence[Item]]) -> None:
        total = sum(map(len, share.values()))
        dealt = ", ".join(str(len(items)) for items in share.values())
        self.notes.append(
            f"{total} missing kernels dealt out over {len(facts)} ranks: {dealt}"
            if total
            else f"nothing to build on any of {len(facts)} ranks"
        )
        if len({f.libraries for f in facts.values() if f.libraries}) > 1:
            words = "; ".join(
                f"{self._who(rank)}: {', '.join(f.libraries)}" for rank, f in facts.items()
            )
            self.notes.append(f"the ranks have different libraries: {words}")

    def _build(self, share: Sequence[Item], peers: int) -> None:
        for family, target, items in self._groups(share):
            one = self.work[items[0]][2]
            jobs = max(1, builds.jobs(one.options) // peers)
            by_key = {item.key: item for item in items}
            self.tried += items
            title = f"building {family.name}"
            self.meeting.doing = f"{title}, {len(items)} kernels"
            try:
                with (
                    options.use(one.options),
                    _on(one.device),
                    Progress(title, len(items)) as progress,
                ):
                    for built in family.build([self.work[i][1] for i in items], target, jobs):  # type: ignore[attr-defined]
                        self.built[by_key[built.key]] = built
                        if built.error:
                            self.failed[by_key[built.key]] = self._said(
                                self.meeting.rank, built.error
                            )
                        progress.step(str(built.key), built.seconds, built.error)
                        self.meeting.doing = f"{title}, {progress.done} of {len(items)} kernels"
            except Exception as error:
                self._complain(f"{title} failed", error)
                for item in items:
                    if item not in self.built:
                        self.failed[item] = self._said(
                            self.meeting.rank, f"{type(error).__name__}: {error}"
                        )
        self.meeting.doing = "waiting for the others' kernels"

    # Launching: all or none

    def _fit(self) -> None:
        refused: dict[Item, str] = {}
        smaller: dict[Item, KernelCall] = {}
        self.meeting.doing = "trying what fits"
        for family, target, items in self._groups(self.work):
            fit = getattr(family, "fit", None)
            ready = [item for item in items if item not in self.failed]
            if fit is None or not ready:
                continue
            by_key = {item.key: item for item in ready}
            try:
                for key, answer in fit([self.work[i][1] for i in ready], target).items():
                    (refused if isinstance(answer, str) else smaller)[by_key[key]] = answer
            except Exception as error:
                self._complain(f"{family.name} cannot say what fits", error)
        mine = Fit(self.meeting.host, tuple(refused.items()), tuple(smaller.items()))
        fits = self.meeting.exchange(mine)
        # Two folders may hold one kernel: what a rank cannot launch is the same kernel from either.
        known = {(item.kind, item.key): item for item in self.work}
        for rank, one in fits.items():
            for item, reason in one.refused:
                here = known.get((item.kind, item.key))
                if here is not None:
                    self.refused.setdefault(
                        here, f"left out on all ranks: {self._said(rank, reason)}"
                    )
        for rank, one in fits.items():
            for item, witness in one.smaller:
                here = known.get((item.kind, item.key))
                if here is not None and here not in self.refused:
                    self._shrink(here, witness, rank)

    def _shrink(self, item: Item, witness: KernelCall, rank: int) -> None:
        family, planned, one = self.work[item]
        if planned.witness is not None and _elements(witness) < _elements(planned.witness):
            self.work[item] = (family, msgspec.structs.replace(planned, witness=witness), one)
            text = f"{self._who(rank)} has room for {witness} only, so all ranks launch {item.key} with it"
            self.notes.append(text)

    # Tuning: the same tactics on every rank

    def _tune(self, name: str) -> None:
        self.meeting.doing = f"tuning {name}"
        mine = {Item("", i.kind, i.key): i for i, (f, _, _) in self.work.items() if f.name == name}
        open_ = self._vote(name, mine)
        if not open_:
            return
        asked: list[bool] = []

        def reduce(
            timings: Mapping[CompileKey, Mapping[str, float]], error: str = ""
        ) -> dict[CompileKey, str]:
            if asked:
                raise exc.FamilyError(
                    f"{name}.tune called reduce twice; hand over all timings at once"
                )
            asked.append(True)
            named = {item.key: item for item in mine}
            entries = tuple(
                (named[key], tuple(times.items())) for key, times in timings.items() if key in named
            )
            heard = self.meeting.exchange(Timings(entries, error))
            self._hear(name, heard)
            chosen = agree({r: {i: dict(t) for i, t in h.entries} for r, h in heard.items()})
            ways = [how for _, how in chosen.values()]
            counts = ", ".join(f"{ways.count(way)} by {way}" for way in sorted(set(ways)))
            self.notes.append(
                f"{len(chosen)} tuned entries of {name} agreed over {len(heard)} ranks: {counts or 'none'}"
            )
            return {item.key: choice for item, (choice, _) in chosen.items() if item in mine}

        error = ""
        wanted = [self.work[mine[item]][1] for item in mine if item in open_]
        try:
            if wanted:
                family, _, one = self.work[next(iter(mine.values()))]
                with (
                    options.use(one.options),
                    warmup._load_lock,
                    runtime.quiet(one.device or torch.device("cpu")),
                ):
                    for tuned in family.tune(wanted, warmup.no_weights, reduce=reduce):  # type: ignore[attr-defined]
                        self.tuned |= {mine[i]: tuned for i in mine if i.key == tuned.key}
        except Exception as problem:
            self._complain(f"{name} was not tuned", problem)
            error = f"{type(problem).__name__}: {problem}"
        if not asked:  # the others are in this exchange, whatever happened here
            reduce({}, error)

    def _vote(self, name: str, mine: Mapping[Item, Item]) -> set[Item]:
        """Return the entries to be tuned: those whose stored choice is not the same on every rank that wants them."""
        held: Mapping[CompileKey, str] = {}
        if mine:
            family = self.work[next(iter(mine.values()))][0]
            try:
                held = family.tactics([self.work[i][1] for i in mine.values()])  # type: ignore[attr-defined]
            except Exception as error:
                self._complain(f"{name}'s stored tactics cannot be read", error)
        votes = self.meeting.exchange(Held(tuple((item, held.get(item.key, "")) for item in mine)))
        choices: dict[Item, set[str]] = {}
        for vote in votes.values():
            for item, choice in vote.entries:
                choices.setdefault(item, set()).add(choice)
        open_ = {item for item, found in choices.items() if len(found) > 1 or "" in found}
        if choices and not open_:
            self.notes.append(
                f"{len(choices)} stored tactics of {name} are the same on {len(votes)} ranks: nothing tuned"
            )
        return open_

    def _hear(self, name: str, heard: Mapping[int, Timings]) -> None:
        for rank, one in heard.items():
            if one.error and rank != self.meeting.rank:
                self.gaps.append(
                    Gap(name, f"{self._who(rank)} did not tune: {one.error}", family=name)
                )

    # Loading: local

    def _finish(self, callable_: WarmCallable) -> Exception | None:
        one = callable_.warmup
        if one.report is None:
            self._hand_over(one)
        try:
            callable_.make_warm()
        except Exception as error:  # strict: raised when all have heard of it
            return error
        if one.report is None:  # said in the log, and not raised
            self.gaps.append(Gap("warm_all", "a warmup failed on this rank; see its log"))
        return None

    def _hand_over(self, one: Warmup) -> None:
        """Give ``one`` what was built for it here and elsewhere, so that it only tunes and loads."""
        items = self.items.get(id(one), [])
        if one.plan is not None:
            now = {item.key: self.work[item][1] for item in items}
            planned = tuple(now.get(p.key, p) for p in one.plan.planned)
            one.plan = msgspec.structs.replace(one.plan, planned=planned)
        bad = {**self.refused, **self.failed}
        built = {b.key: b for b in one._built}  # in the background, before this
        built |= {i.key: b for i, b in self.built.items() if i in items and self.work[i][2] is one}
        built |= {item.key: Built(item.key, error=bad[item]) for item in items if item in bad}
        one._built = list(built.values())
        one._found = [i.key for i in items if i.key not in built and i not in self.lacking]
        one._prepared = True
        if one._thread is None:
            one._thread = threading.Thread(name="fxwarm-ranks")  # never runs: all is prepared

    # The end: every rank says how it went

    def _tell(self) -> None:
        reports = [c.warmup.report for c in self.callables if c.warmup.report is not None]
        known = {*self.failed, *self.refused}
        shared = {item.key for item in known}
        failures = [f"{x.key}: {x.error}" for r in reports for x in r.failed if x.key not in shared]
        failures += [str(g.reason) for r in reports for g in r.gaps if g.op in ("warmup", g.family)]
        failures += [str(g.reason) for g in self.gaps if g.op == "warm_all"]
        mine = Outcome(
            host=self.meeting.host,
            built=sum(not b.error for b in self.built.values()),
            loaded=sum(not x.error for r in reports for x in r.loaded),
            seconds=max((r.seconds for r in reports), default=0.0),
            failures=tuple(dict.fromkeys(failures))[:20],
        )
        outcomes = self.meeting.exchange(mine)
        for rank, outcome in outcomes.items():
            if rank != self.meeting.rank:
                self.gaps += [Gap("warm_all", self._said(rank, text)) for text in outcome.failures]
        for rank, why in self.meeting.lost.items():
            self.gaps.append(
                Gap(
                    "warm_all", f"rank {rank} was lost, it was {why}; the others went on without it"
                )
            )
        self.notes.append(
            "; ".join(
                f"{self._who(r)}: {o.built} built, {o.loaded} loaded" for r, o in outcomes.items()
            )
        )

    def _close(self, errors: Iterable[Exception | None]) -> list[WarmReport]:
        out: list[WarmReport] = []
        for callable_ in self.callables:
            one = callable_.warmup
            if one.report is not None:
                one.report = self._complete(one, one.report)
                out.append(one.report)
        for error in errors:
            if error is not None:
                raise error
        for report, callable_ in zip(out, self.callables, strict=False):
            if callable_.warmup.options.strict and report.status == "partial":
                raise exc.IncompleteError(warmup._why_partial(report))
        return out

    def _complete(self, one: Warmup, report: WarmReport) -> WarmReport:
        items = self.items.get(id(one), [])
        tuned = {t.key: t for t in report.tuned} | {
            i.key: t for i, t in self.tuned.items() if i in items
        }
        gaps = [*report.gaps, *self.gaps]
        return msgspec.structs.replace(
            report,
            tuned=tuple(tuned.values()),
            gaps=tuple(dict.fromkeys(gaps)),
            notes=tuple(dict.fromkeys([*report.notes, *self.notes])),
        )

    # Small things

    def _groups(self, items: Iterable[Item]) -> list[tuple[KernelFamily, Target, list[Item]]]:
        """Return ``items`` by family, device and library."""
        groups: dict[tuple[str, str], list[Item]] = {}
        for item in items:
            groups.setdefault((item.key.family, item.kind), []).append(item)
        out = []
        for group in groups.values():
            family, _, one = self.work[group[0]]
            assert one.target is not None
            out.append((family, one.target, group))
        return out

    def _complain(self, what: str, error: Exception) -> None:
        log.error("fxwarm: %s", what, exc_info=error)
        self.gaps.append(Gap("warm_all", f"{what}: {type(error).__name__}: {error}"))

    def _who(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts.get(rank, 'an unknown host')}"

    def _said(self, rank: int, reason: str) -> str:
        return reason if reason.startswith("rank ") else f"{self._who(rank)}: {reason}"


def _folder_of(family: KernelFamily, target: Target) -> Path | None:
    """Return the folder of the family's disk cache, where the family says."""
    folder = getattr(family, "folder", None)
    return Path(folder(target)) if folder is not None else None


def _make_plan(one: Warmup) -> WarmPlan:
    """Return the plan of ``one`` as its own start would make it."""
    assert one.target is not None
    stored = receipts.stored_plan(one)
    if stored is not None:
        return stored
    return make_plan(
        one.shapes,
        one.target,
        one.libraries,
        ask=True,
        max_keys=one.options.max_keys,
        graph_key=one.graph_key,
    )


def _kind(target: Target, library: Library) -> str:
    return digest(target.device, target.arch, target.num_sms, target.smem, library)[:16]


def _tunes_together(family: KernelFamily) -> bool:
    tune = getattr(family, "tune", None)
    return (
        tune is not None
        and hasattr(family, "tactics")
        and "reduce" in inspect.signature(tune).parameters
    )


def _elements(call: KernelCall) -> int:
    total = 0
    for _, spec in call.tensors:
        size = 1
        for dim in spec.dims:
            size *= dim.lower
        total += size
    return total


def _on(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    return (
        torch.cuda.device(device)
        if device is not None and device.type == "cuda"
        else contextlib.nullcontext()
    )
