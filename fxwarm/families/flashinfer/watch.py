"""FlashInfer after warmup: builds (stopped by its own tripwire, or counted), and kernels that its C++ compiles.

Its tuner's misses are looked up per call by a guard, since its own counter does not count them; see ``monitor``.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fxwarm.families.flashinfer import cache
from fxwarm.families.flashinfer.match import FAMILY
from fxwarm.monitor.event import JitEvent
from fxwarm.monitor.files import FolderWatch
from fxwarm.monitor.watchers import on_drain

__all__ = ["watch"]


def watch(report: Callable[..., None], loaded: set[str]) -> Callable[[], None] | None:
    """Report what is built or opened for the first time until the function returned is called; None if not imported.

    ``loaded`` are the names of the block-scale kernels that warmups made resident.
    """
    core = sys.modules.get("flashinfer.jit.core")
    spec = getattr(core, "JitSpec", None)
    if spec is None:
        return None
    undo = [
        _watch_method(spec, name, kind, report)
        for name, kind in (("build", "build"), ("load", "load"))
    ]
    undo.append(_watch_block_kernels(report, loaded))

    def stop() -> None:
        for each in undo:
            each()

    return stop


def _watch_method(
    spec: Any, name: str, kind: Any, report: Callable[..., None]
) -> Callable[[], None]:
    original = getattr(spec, name, None)
    if original is None:
        return lambda: None

    @functools.wraps(original)
    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        op = str(getattr(self, "name", "a module"))
        if kind == "build" and _is_built(self):  # ninja is asked anyway, and does nothing
            return original(self, *args, **kwargs)
        report(JitEvent(FAMILY, kind, op), before=True)
        begin = time.perf_counter()
        result = original(self, *args, **kwargs)
        report(JitEvent(FAMILY, kind, op, seconds=time.perf_counter() - begin))
        return result

    setattr(spec, name, named)
    return lambda: setattr(spec, name, original)


def _is_built(spec: Any) -> bool:
    try:
        return Path(spec.get_library_path()).stat().st_size > 0
    except (OSError, AttributeError, TypeError):
        return False


def _watch_block_kernels(report: Callable[..., None], loaded: set[str]) -> Callable[[], None]:
    def told(entry: Path, file: str) -> None:
        if entry.name not in loaded and (not file or file.endswith(".cubin")):
            report(JitEvent(FAMILY, "load" if file else "build", entry.name), outside=True)

    files = FolderWatch([cache._block_cache()], told)
    forget = on_drain(files.drain)

    def stop() -> None:
        forget()
        files.stop()

    return stop
