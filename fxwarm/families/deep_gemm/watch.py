"""DeepGEMM after warmup, seen through its cache: a new entry is a build, an opened cubin a first load.

Its C++ side has no hook, and this costs its calls nothing. What it cannot see: which process did it, where several
share a cache, and the call that asked; an entry that appears and is loaded in one go is one build. Fxwarm's own
looks at the cache open files too, so whatever is opened while a warmup works, or just after, does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fxwarm.families.deep_gemm import presence
from fxwarm.families.deep_gemm.cache import CODE, CUBIN, Roots
from fxwarm.families.deep_gemm.match import FAMILY
from fxwarm.families.deep_gemm.source import tag_of
from fxwarm.monitor.event import JitEvent, Kind
from fxwarm.monitor.files import FolderWatch
from fxwarm.monitor.watchers import on_drain

__all__ = ["watch"]

_WAIT = 2.0
"""Seconds to wait for a new entry's files: generation A renames a whole folder, B may write into it."""


def watch(roots: Roots, report: Callable[..., None]) -> Callable[[], None]:
    """Report builds and first loads from ``roots`` until the function that is returned is called."""

    def told(entry: Path, file: str) -> None:
        if file not in ("", CUBIN):
            return
        try:
            tag = tag_of(entry.name)
        except ValueError:
            return
        key = _key(entry, 0.0 if file else _WAIT)
        kind: Kind = "load" if file else "build"
        report(
            JitEvent(FAMILY, kind, tag, key=key, shape=f"an unknown call ({entry.name})"),
            outside=True,
        )

    files = FolderWatch([root / "cache" for root in roots.all], told)
    forget = on_drain(files.drain)

    def stop() -> None:
        forget()
        files.stop()

    return stop


def _key(entry: Path, wait: float) -> Any:
    end = time.monotonic() + wait
    while not (entry / CODE).is_file() and time.monotonic() < end:
        time.sleep(0.01)
    return presence.key_of_entry(entry.name, entry)
