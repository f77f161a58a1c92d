"""The same tactics on every rank: timings are exchanged, and each rank computes the same choice from them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fxwarm import exc, options, runtime, warmup
from fxwarm.family import KernelFamily
from fxwarm.ranks.dealing import Held, Item, Timings, agree
from fxwarm.ranks.party import Party
from fxwarm.records import CompileKey
from passes.records import Gap

if TYPE_CHECKING:
    from fxwarm.warmup import Warmup

__all__ = ["tune", "tunes_together"]


def tune(party: Party, name: str) -> None:
    """Make the tuned entries of family ``name`` the same on every rank that wants them."""
    party.meeting.doing = f"tuning {name}"
    mine = _shared_items(party, name)
    open_ = _vote(party, name, mine)
    if not open_:
        return
    asked: list[bool] = []
    named = {here.key: item for item, all_ in mine.items() for here in all_}

    def reduce(
        timings: Mapping[CompileKey, Mapping[str, float]], error: str = ""
    ) -> dict[CompileKey, str]:
        if asked:
            raise exc.FamilyError(f"{name}.tune called reduce twice; hand over all timings at once")
        asked.append(True)
        entries = {
            named[key]: tuple(times.items()) for key, times in timings.items() if key in named
        }
        heard = party.meeting.exchange(Timings(tuple(entries.items()), error))
        _hear(party, name, heard)
        chosen = agree({r: {i: dict(t) for i, t in h.entries} for r, h in heard.items()})
        ways = [how for _, how in chosen.values()]
        counts = ", ".join(f"{ways.count(way)} by {way}" for way in sorted(set(ways)))
        party.notes.append(
            f"{len(chosen)} tuned entries of {name} agreed over {len(heard)} ranks: {counts or 'none'}"
        )
        return {key: chosen[item][0] for key, item in named.items() if item in chosen}

    error = ""
    wanted = [here for item, all_ in mine.items() if item in open_ for here in all_]
    try:
        if wanted:
            family, _, one = party.work[wanted[0]]
            planned = [party.work[here][1] for here in wanted]
            with _ready(one):
                for tuned in family.tune(planned, warmup.no_weights, reduce=reduce):  # type: ignore[attr-defined]
                    party.tuned |= {here: tuned for here in wanted if here.key == tuned.key}
    except Exception as problem:
        party.complain(f"{name} was not tuned", problem)
        error = f"{type(problem).__name__}: {problem}"
    if not asked:  # the others are in this exchange, whatever happened here
        reduce({}, error)


def _shared_items(party: Party, name: str) -> dict[Item, list[Item]]:
    """Return this rank's items of a family by what all ranks call them: a key may hold the rank, a folder is local."""
    found: dict[Item, list[Item]] = {}
    for here, (family, _, _) in party.work.items():
        if family.name == name:
            common = getattr(family, "common", lambda key: key)
            found.setdefault(Item("", here.kind, common(here.key)), []).append(here)
    return found


@contextlib.contextmanager
def _ready(one: Warmup) -> Iterator[None]:
    device = one.device or torch.device("cpu")
    with options.use(one.options), warmup._load_lock, runtime.quiet(device):
        yield


def _vote(party: Party, name: str, mine: Mapping[Item, Sequence[Item]]) -> set[Item]:
    """Return the entries to be tuned: those whose stored choice is not the same on every rank that wants them."""
    held: Mapping[CompileKey, str] = {}
    planned = [party.work[here] for all_ in mine.values() for here in all_]
    if planned:
        family, _, one = planned[0]
        try:
            with _ready(one):
                held = family.tactics([p for _, p, _ in planned])  # type: ignore[attr-defined]
        except Exception as error:
            party.complain(f"{name}'s stored tactics cannot be read", error)
    tuned = {item: all_ for item, all_ in mine.items() if _is_tuned(party, all_[0])}
    votes = party.meeting.exchange(
        Held(tuple((item, held.get(here.key, "")) for item, all_ in tuned.items() for here in all_))
    )
    choices: dict[Item, set[str]] = {}
    for vote in votes.values():
        for item, choice in vote.entries:
            choices.setdefault(item, set()).add(choice)
    open_ = {item for item, found in choices.items() if len(found) > 1 or "" in found}
    if choices and not open_:
        party.notes.append(
            f"{len(choices)} stored tactics of {name} are the same on {len(votes)} ranks: nothing tuned"
        )
    return open_


def _is_tuned(party: Party, here: Item) -> bool:
    """Whether an item is tuned at all: a family may have keys that are only built."""
    family, planned, _ = party.work[here]
    asked = getattr(family, "falls_back", None)
    return asked is None or bool(asked(planned.key))


def _hear(party: Party, name: str, heard: Mapping[int, Timings]) -> None:
    for rank, one in heard.items():
        if one.error and rank != party.meeting.rank:
            party.gaps.append(
                Gap(name, f"{party.who(rank)} did not tune: {one.error}", family=name)
            )


def tunes_together(family: KernelFamily) -> bool:
    """Whether ``family`` can tune with other ranks."""
    tune = getattr(family, "tune", None)
    return (
        tune is not None
        and hasattr(family, "tactics")
        and "reduce" in inspect.signature(tune).parameters
    )
