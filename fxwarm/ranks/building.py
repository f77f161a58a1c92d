"""Who builds what: ranks say what they lack, the work is dealt out, and what one cannot launch nobody does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from fxwarm import builds, options
from fxwarm import family as families
from fxwarm.progress import Progress
from fxwarm.ranks.dealing import Facts, Fit, Item, deal
from fxwarm.ranks.party import Party, on
from fxwarm.ranks.tactics import tunes_together
from passes.records import KernelCall

__all__ = ["build", "fit", "state_facts"]

ROUNDS = 4
"""Most times that work is dealt out: once, again for the keys of a rank that died, for caches that were not shared."""


def state_facts(party: Party, *, first: bool = False) -> Facts:
    """Return what this rank says before work is dealt out: what its caches lack, and what came of earlier tries."""
    missing: list[Item] = []
    party.lacking = set()
    libraries: set[str] = set()
    for family, target, items in party.groups(party.work):
        library = family.library({})
        libraries.add(f"{library} {library.fingerprint}".strip())
        try:
            lacking = {p.key for p in family.missing([party.work[i][1] for i in items], target)}
        except Exception as error:
            party.complain(f"{family.name} cannot say what is missing", error)
            continue
        found = [item for item in items if item.key in lacking]
        party.lacking |= set(found)
        built = {p.key for p in families.builds(family, [party.work[i][1] for i in found])}
        found = [item for item in found if item.key in built]
        if target.arch not in getattr(family, "archs", (target.arch,)):
            found = found[:1] if first else []  # this one shows whether the rest is worth its time
        missing += found
    return Facts(
        host=party.meeting.host,
        builds=party.builds,
        missing=tuple(missing),
        tried=tuple(party.tried),
        failed=tuple(party.failed.items()),
        tunes=tuple(sorted({f.name for f, _, _ in party.work.values() if tunes_together(f)})),
        libraries=tuple(sorted(libraries)),
    )


def build(party: Party, mine: Facts) -> dict[int, Facts]:
    """Deal out what is missing and build this rank's share, until nothing is left that anyone could build."""
    for turn in range(ROUNDS):
        facts = party.meeting.exchange(mine)
        party.hosts |= {rank: f.host for rank, f in facts.items()}
        for rank, f in facts.items():
            for item, reason in f.failed:
                if item in party.work:
                    party.failed.setdefault(item, party.said(rank, reason))
        share = deal(facts)
        if turn == 0:
            _note(party, facts, share)
        if not any(share.values()):  # unanimous: all ranks see the same facts
            break
        peers = sum(bool(share[r]) for r, f in facts.items() if f.host == party.meeting.host)
        _build_share(party, share[party.meeting.rank], max(1, peers))
        party.meeting.exchange(len(party.built))  # nobody looks again before all have built
        mine = state_facts(party)
    return facts


def _note(party: Party, facts: Mapping[int, Facts], share: Mapping[int, Sequence[Item]]) -> None:
    total = sum(map(len, share.values()))
    dealt = ", ".join(str(len(items)) for items in share.values())
    party.notes.append(
        f"{total} missing kernels dealt out over {len(facts)} ranks: {dealt}"
        if total
        else f"nothing to build on any of {len(facts)} ranks"
    )
    if len({f.libraries for f in facts.values() if f.libraries}) > 1:
        words = "; ".join(
            f"{party.who(rank)}: {', '.join(f.libraries)}" for rank, f in facts.items()
        )
        party.notes.append(f"the ranks have different libraries: {words}")


def _build_share(party: Party, share: Sequence[Item], peers: int) -> None:
    for family, target, items in party.groups(share):
        one = party.work[items[0]][2]
        jobs = max(1, builds.jobs(one.options) // peers)
        by_key = {item.key: item for item in items}
        party.tried += items
        title = f"building {family.name}"
        begin = time.perf_counter()
        party.meeting.doing = f"{title}, {len(items)} kernels"
        try:
            with (
                options.use(one.options),
                on(one.device),
                Progress(title, len(items)) as progress,
            ):
                for built in family.build([party.work[i][1] for i in items], target, jobs):  # type: ignore[attr-defined]
                    party.built[by_key[built.key]] = built
                    if built.error:
                        party.failed[by_key[built.key]] = party.said(
                            party.meeting.rank, built.error
                        )
                    progress.step(str(built.key), built.seconds, built.error)
                    party.meeting.doing = f"{title}, {progress.done} of {len(items)} kernels"
        except Exception as error:
            party.complain(f"{title} failed", error)
            for item in items:
                if item not in party.built:
                    party.failed[item] = party.said(
                        party.meeting.rank, f"{type(error).__name__}: {error}"
                    )
        seconds = party.seconds.get(id(one), 0.0) + time.perf_counter() - begin
        party.seconds[id(one)] = seconds
    party.meeting.doing = "waiting for the others' kernels"


def fit(party: Party) -> None:
    """Launch all or none: leave out what any rank cannot launch, and take the smallest witness that any rank needs."""
    refused: dict[Item, str] = {}
    smaller: dict[Item, KernelCall] = {}
    party.meeting.doing = "trying what fits"
    for family, target, items in party.groups(party.work):
        fit = getattr(family, "fit", None)
        ready = [item for item in items if item not in party.failed]
        if fit is None or not ready:
            continue
        by_key = {item.key: item for item in ready}
        try:
            for key, answer in fit([party.work[i][1] for i in ready], target).items():
                (refused if isinstance(answer, str) else smaller)[by_key[key]] = answer
        except Exception as error:
            party.complain(f"{family.name} cannot say what fits", error)
    mine = Fit(party.meeting.host, tuple(refused.items()), tuple(smaller.items()))
    fits = party.meeting.exchange(mine)
    # Two folders may hold one kernel: what a rank cannot launch is the same kernel from either.
    known = {(item.kind, item.key): item for item in party.work}
    for rank, one in fits.items():
        for item, reason in one.refused:
            here = known.get((item.kind, item.key))
            if here is not None:
                party.refused.setdefault(here, f"left out on all ranks: {party.said(rank, reason)}")
    for rank, one in fits.items():
        for item, witness in one.smaller:
            here = known.get((item.kind, item.key))
            if here is not None and here not in party.refused:
                _shrink(party, here, witness, rank)


def _shrink(party: Party, item: Item, witness: KernelCall, rank: int) -> None:
    family, planned, one = party.work[item]
    if planned.witness is not None and _elements(witness) < _elements(planned.witness):
        party.work[item] = (family, msgspec.structs.replace(planned, witness=witness), one)
        text = (
            f"{party.who(rank)} has room for {witness} only, so all ranks launch {item.key} with it"
        )
        party.notes.append(text)


def _elements(call: KernelCall) -> int:
    total = 0
    for _, spec in call.tensors:
        size = 1
        for dim in spec.dims:
            size *= dim.lower
        total += size
    return total
