"""What ranks tell each other, and what each computes from it alike: who builds what, and which tactic is used.

Pure but for ``name_folder``: every rank gets the same answer from the same facts, without talking.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from fxwarm.records import CompileKey, Tuned
from passes.records import Gap, KernelCall, Record

K = TypeVar("K", bound=Hashable)

TOKEN = ".fxwarm-folder"


class Item(Record, frozen=True, order=True):
    """One kernel of one kind of device and library in one cache folder: what exactly one rank is to build."""

    folder: str
    """Name of the cache folder, the same on every rank that sees this folder."""
    kind: str
    """Digest of the device and the library. Ranks with other devices plan for their own."""
    key: CompileKey


class Facts(Record, frozen=True, omit_defaults=False):
    """What a rank knows before work is dealt out."""

    host: str
    builds: bool = True
    """Whether this rank may be given kernels to build."""
    missing: tuple[Item, ...] = ()
    tried: tuple[Item, ...] = ()
    """What this rank has tried to build, whatever came of it."""
    failed: tuple[tuple[Item, str], ...] = ()
    tunes: tuple[str, ...] = ()
    """Families with entries that this rank can tune together with others."""
    libraries: tuple[str, ...] = ()


class Fit(Record, frozen=True, omit_defaults=False):
    """What a rank says about launching: kernels that it cannot launch, or only with a smaller witness."""

    host: str
    refused: tuple[tuple[Item, str], ...] = ()
    smaller: tuple[tuple[Item, KernelCall], ...] = ()


class Held(Record, frozen=True, omit_defaults=False):
    """The tuned entries that a rank wants of one family, with the choice that its table holds, or ""."""

    entries: tuple[tuple[Item, str], ...] = ()


class Timings(Record, frozen=True, omit_defaults=False):
    """Seconds of each candidate of each entry on one rank, or why there are none."""

    entries: tuple[tuple[Item, tuple[tuple[str, float], ...]], ...] = ()
    error: str = ""


class Outcome(Record, frozen=True, omit_defaults=False):
    """How a rank's warmup ended."""

    host: str
    built: int = 0
    loaded: int = 0
    seconds: float = 0.0
    failures: tuple[str, ...] = ()


def deal(facts: Mapping[int, Facts]) -> dict[int, list[Item]]:
    """Return what each rank is to build: pure, so that every rank computes the same split from the same facts.

    A key goes to the rank with the least work among those that lack it in its folder; a rank that does not build gets
    one only where no other can. Failed keys, and those that a rank tried and still lacks, are left alone.
    """
    share: dict[int, list[Item]] = {rank: [] for rank in sorted(facts)}
    closed = {item for f in facts.values() for item, _ in f.failed}
    closed |= {item for f in facts.values() for item in set(f.tried) & set(f.missing)}
    lacking: dict[Item, list[int]] = {}
    for rank in share:
        for item in facts[rank].missing:
            lacking.setdefault(item, []).append(rank)
    for item in sorted(lacking.keys() - closed):
        able = [rank for rank in lacking[item] if facts[rank].builds] or lacking[item]
        share[min(able, key=lambda rank: (len(share[rank]), rank))].append(item)
    return share


def agree(timings: Mapping[int, Mapping[K, Mapping[str, float]]]) -> dict[K, tuple[str, str]]:
    """Return (choice, how it was made) for each entry from the seconds of each candidate on each rank: pure.

    The best mean time among the candidates that every measuring rank timed; where there is no such candidate, the best
    of the lowest rank. Equal times give the first name, so the same timings give the same choice again.
    """
    ranks = sorted(timings)
    chosen: dict[K, tuple[str, str]] = {}
    for entry in dict.fromkeys(entry for rank in ranks for entry in timings[rank]):
        found = [(rank, timings[rank][entry]) for rank in ranks if timings[rank].get(entry)]
        if not found:
            continue
        common = set.intersection(*(set(times) for _, times in found))
        if common:
            mean = {name: sum(times[name] for _, times in found) / len(found) for name in common}
            chosen[entry] = (min(mean, key=lambda name: (mean[name], name)), "best mean time")
        else:
            rank, times = found[0]
            chosen[entry] = (
                min(times, key=lambda name: (times[name], name)),
                f"choice of rank {rank}",
            )
    return chosen


def tuned_alone(family: str, tuned: Iterable[Tuned]) -> list[Gap]:
    """Return the gap of a family of which this process measured entries that its peers may have measured otherwise."""
    import torch.distributed as dist

    measured = sum(not t.found and not t.error for t in tuned)
    peers = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not measured or not peers:
        return []
    reason = (
        f"rank {dist.get_rank()} tuned {measured} entries alone, so tactics may differ between ranks; "
        "call fxwarm.warm_all(group) before the first call"
    )
    return [Gap(family, reason, family=family)]


def name_folder(folder: Path) -> str:
    """Return a name of ``folder`` that every process gives it, on whatever host, and no other folder has.

    A token file in it, made in one atomic step, with the inode: a token that was copied along with the folder is
    another folder's. Where it cannot be written, the host and the inode.
    """
    token = folder / TOKEN
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if not token.exists():
            own = folder / f"{TOKEN}.{uuid.uuid4().hex}"
            own.write_text(uuid.uuid4().hex)
            with contextlib.suppress(FileExistsError):
                os.link(own, token)
            own.unlink()
    try:
        return f"{token.read_text()[:64]}-{folder.stat().st_ino}"
    except (OSError, UnicodeDecodeError):
        pass
    try:
        status = folder.stat()
        return f"{os.uname().nodename}-{status.st_dev}-{status.st_ino}"
    except OSError:
        return f"{os.uname().nodename}-{folder}"
