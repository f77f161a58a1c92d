"""Tuning with other ranks: each measures all, the group decides on one tactic an entry, and each keeps that.

Ranks of one model have keys that differ in the rank alone (0.6.18 and 0.7.0 hold it), and that rank does not change
what a tactic is: ``common`` is the key without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from fxwarm import exc
from fxwarm.families.flashinfer import stored, tuner, tuning
from fxwarm.families.flashinfer.library import installed_version
from fxwarm.families.flashinfer.tuner_key import RANKS, is_tuned
from fxwarm.family import Bind
from fxwarm.records import CompileKey, Planned, Tuned

__all__ = ["common", "tactics", "tune"]

Reduce = Callable[[Mapping[CompileKey, Mapping[str, float]]], Mapping[CompileKey, str]]
"""Seconds of each tactic of each entry here -> the tactic that all ranks take."""


def common(key: CompileKey) -> CompileKey:
    """Return ``key`` as every rank of the model has it."""
    if not is_tuned(key):
        return key
    kept = tuple(part for part in key.template if part.partition("=")[0] not in RANKS)
    return msgspec.structs.replace(key, template=kept)


def tactics(planned: Sequence[Planned], arch: str) -> dict[CompileKey, str]:
    """Return what this rank's table and files hold for the planned entries. Raises LibraryError as ``tuning.prepare``."""
    wanted = stored.tuned_of(planned)
    if not wanted:
        return {}
    tuning.prepare(planned, arch)
    found = {p.key: stored.held(p, arch) for p in wanted}
    return {key: tactic for key, tactic in found.items() if tactic is not None}


def tune(planned: Sequence[Planned], arch: str, bind: Bind, reduce: Reduce) -> Iterator[Tuned]:
    """Measure every planned entry, whatever is stored; ``reduce`` turns all ranks' seconds into one tactic an entry.

    A bucket for which this rank had no memory gets the tactic of those that had.
    """
    if not stored.tells_options_apart():
        raise exc.LibraryError(
            f"flashinfer-python {installed_version()} does not tell layers of equal shapes apart in what it stores, so "
            "ranks cannot agree on it; install 0.6.18 or later"
        )
    wanted = stored.tuned_of(planned)
    tuning.prepare(planned, arch)
    entries = {p.key: stored.entry_of(p, arch) for p in wanted}
    begin, errors = time.perf_counter(), []
    with tuner.undisturbed(), tuner.timings() as heard:
        for group in tuning.groups(wanted):
            errors.append(tuning.measure(group, bind))
    seconds = (time.perf_counter() - begin) / max(1, len(wanted))
    measured = {key: heard.get(entry.file_key, {}) for key, entry in entries.items()}
    chosen = reduce({key: times for key, times in measured.items() if times})
    tuner.put(
        {entries[k].file_key: (entries[k].runner, v) for k, v in chosen.items() if k in entries}
    )
    stored.keep(stored.path_of(planned, arch), also=True)
    why = next(filter(None, errors), "no rank could measure it")
    for p in wanted:
        error = "" if stored.held(p, arch) is not None else why
        yield Tuned(p.key, seconds, error=error)
