"""DeepGEMM after warmup, seen through its cache: a new entry is a build, an opened cubin a first load.

Its C++ side has no hook, and this costs its calls nothing. Which call it was is read from the stack of the thread that
is in it at that moment: a compile takes seconds, and compile and load run without the GIL (sgl-deep-gemm, tokenspeed
2.8.2; upstream's pybind build holds it, and its short loads may be over before anybody looks). An entry that appears
and is loaded in one go is one build.

Others may share the cache. Where the system does not say who did it, generation A's own folder for a compile does,
``tmp/<pid>-<random>``; what came from elsewhere than ``tmp`` a warmup published.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from fxwarm.families.deep_gemm import presence
from fxwarm.families.deep_gemm.cache import CODE, CUBIN, Roots
from fxwarm.families.deep_gemm.match import FAMILY
from fxwarm.families.deep_gemm.source import tag_of
from fxwarm.monitor.event import JitEvent, Kind
from fxwarm.monitor.files import seconds_of, watch_cache
from fxwarm.monitor.notify import Notice

__all__ = ["watch"]

_WAIT = 2.0
"""Seconds to wait for a new entry's files: generation A renames a whole folder, B may write into it."""


def watch(roots: Roots, report: Callable[..., None]) -> Callable[[], None]:
    """Report builds and first loads from ``roots`` until the function that is returned is called."""

    def describe(entry: Path, kind: Kind) -> JitEvent | None:
        try:
            if entry.parent.name != "cache":
                return None
            tag = tag_of(entry.name)
        except ValueError:
            return None
        end = time.monotonic() + (_WAIT if kind == "build" else 0)
        while not (entry / CODE).is_file() and time.monotonic() < end:
            time.sleep(0.01)
        key = presence.key_of_entry(entry.name, entry)
        seconds = seconds_of(entry / CODE, entry / CUBIN) if kind == "build" else 0.0
        return JitEvent(FAMILY, kind, tag, key=key, seconds=seconds)

    def is_mine(notice: Notice) -> bool | None:
        if notice.mine is not None or notice.source is None:
            return notice.mine
        if not notice.source:
            return False
        return notice.source.startswith(f"{os.getpid()}-") if roots.generation == "A" else None

    with contextlib.suppress(OSError):  # it may be read-only
        (roots.write / "tmp").mkdir(parents=True, exist_ok=True)
    return watch_cache(
        [root / "cache" for root in roots.all],
        CUBIN,
        describe,
        report,
        beside=[roots.write / "tmp"],
        is_mine=is_mine,
    )
