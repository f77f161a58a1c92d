"""The tuned entries of a plan: which entry a key names, what is held for it now, and the file that keeps them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from fxwarm.families.flashinfer import cache, tuner
from fxwarm.families.flashinfer.buckets import bucket_of
from fxwarm.families.flashinfer.entries import ENTRIES
from fxwarm.families.flashinfer.keys import rows_of
from fxwarm.families.flashinfer.library import installed_version
from fxwarm.families.flashinfer.tuner_key import Entry, entries_at, is_tuned
from fxwarm.families.flashinfer.versions import NEWEST, find_version
from fxwarm.records import Planned

__all__ = ["card", "entry_of", "held", "keep", "path_of", "read", "tells_options_apart", "tuned_of"]

log = logging.getLogger(__name__)


def tuned_of(planned: Iterable[Planned]) -> list[Planned]:
    """Return those that are entries of the tuner's table."""
    return [p for p in planned if is_tuned(p.key) and p.witness is not None]


def entry_of(planned: Planned, arch: str) -> Entry:
    """Return the tuner's entry that a planned key names."""
    assert planned.witness is not None
    number = installed_version()
    version = (
        find_version(number, installed=True) if number else find_version(NEWEST, installed=False)
    )
    bucket = bucket_of(int(rows_of(planned.witness)))
    entries = entries_at(planned.witness, bucket, arch, version)
    return next(e for e in entries if e.op == planned.key.tag)


def held(planned: Planned, arch: str, tokens: int | None = None) -> str | None:
    """Return the tactic, as JSON, that a call finds now with ``tokens`` rows (by default its bucket's); None: none."""
    assert planned.witness is not None
    entry = entry_of(planned, arch)
    shapes = [shape for _, shape in entry.profile]
    if tokens is not None:
        at = ENTRIES[planned.witness.op].rows[0][1]
        shapes[0] = tuple(tokens if i == at else d for i, d in enumerate(shapes[0]))
    return tuner.find(entry, [tuple(max(d, 0) for d in shape) for shape in shapes])


def path_of(planned: Sequence[Planned], arch: str) -> Path:
    """Return the tactics file of these entries on this card, for this rank."""
    return cache.tactics_path(tuned_of(planned), arch, card())


def read(path: Path) -> None:
    """Give the library what ``path`` holds, and what other plans' files of this card and rank hold."""
    for file in cache.tactics_files(path):
        try:
            tuner.tuner().load_configs(str(file))
        except (OSError, ValueError, TypeError, IndexError, AttributeError) as error:
            log.warning("fxwarm: ignoring tactics file %s: %s", file, error)


def keep(path: Path, *, also: bool = False) -> None:
    """Write the library's table to ``path``; ``also`` into the other files of this card and rank, which hold older ones.

    Not before 0.6.18: there a stored entry does not tell options apart, and layers of equal shapes collided.
    """
    if not tells_options_apart():
        return
    for file in dict.fromkeys([path, *(cache.tactics_files(path) if also else [])]):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            tuner.tuner().save_configs(str(file))
        except OSError as error:
            log.warning("fxwarm: could not write %s, the next start tunes again: %s", file, error)


def tells_options_apart() -> bool:
    """Whether a stored entry of the installed release holds the options of its layer."""
    return find_version(installed_version(), installed=True).options_in_key


def card() -> str:
    """Return the name of the current device, as the library writes it into its files."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
