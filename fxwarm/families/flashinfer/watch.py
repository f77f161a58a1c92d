"""FlashInfer after warmup: builds, measurements, calls that find no tuned entry, and kernels that its C++ compiles.

All by what the library does only then, at no cost per call. A call that finds no tuned entry is silent and uncounted
(``stats.cache_misses`` stays 0), but its tuner then writes a debug line, and none on a hit: that line is the hook.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from fxwarm.families.flashinfer import cache
from fxwarm.families.flashinfer.match import FAMILY
from fxwarm.monitor.event import JitEvent, Kind
from fxwarm.monitor.files import watch_cache

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
        _watch_method(each, name, name, report)
        for each in (
            spec,
            *spec.__subclasses__(),
        )  # abstract since 0.6.18: each toolchain has its own
        for name in ("build", "load")
        if name in vars(each) and not getattr(vars(each)[name], "__isabstractmethod__", False)
    ]
    undo.append(_watch_block_kernels(report, loaded))
    undo += _watch_tuner(report)

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
    def describe(entry: Path, kind: Kind) -> JitEvent | None:
        return None if entry.name in loaded else JitEvent(FAMILY, kind, entry.name)

    folder = cache._block_cache()
    return watch_cache([folder], cache.block_kernel("x").name, describe, report)


_MISS = "Using fallback tactic"


class _Log:
    """The tuner's logger with an ear for the line that it writes where no entry fits."""

    def __init__(self, logger: Any, heard: Callable[[FrameType], None]) -> None:
        self._logger, self._heard = logger, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def debug(self, message: Any, *args: Any, **kwargs: Any) -> None:
        self._logger.debug(message, *args, **kwargs)
        if _MISS in str(message):
            self._heard(sys._getframe(1))


def _watch_tuner(report: Callable[..., None]) -> list[Callable[[], None]]:
    """Report each call that runs its default tactic, and each measurement outside a warmup."""
    names = ("flashinfer.autotuner.autotuner", "flashinfer.autotuner")  # a package from 0.6.17 on
    module: Any = next((sys.modules[name] for name in names if name in sys.modules), None)
    if not (hasattr(module, "AutoTuner") and hasattr(module, "logger")):
        return []
    original = module.logger

    def missed(frame: FrameType) -> None:
        op, shape = _call_in(frame)
        report(JitEvent(FAMILY, "fallback", op, shape=shape), before=True)
        report(JitEvent(FAMILY, "fallback", op, shape=shape))

    module.logger = _Log(original, missed)
    return [
        lambda: setattr(module, "logger", original),
        _watch_measuring(module.AutoTuner, report),
    ]


def _watch_measuring(tuner: Any, report: Callable[..., None]) -> Callable[[], None]:
    original = getattr(tuner, "_profile_single_kernel", None)
    if original is None:
        return lambda: None

    @functools.wraps(original)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        op, shape = _call_in(sys._getframe(1))
        report(JitEvent(FAMILY, "tune", op, shape=shape), before=True)
        begin = time.perf_counter()
        result = original(self, *args, **kwargs)
        seconds = time.perf_counter() - begin
        report(JitEvent(FAMILY, "tune", op, shape=shape, seconds=seconds))
        return result

    tuner._profile_single_kernel = measured

    def stop() -> None:
        tuner._profile_single_kernel = original

    return stop


def _call_in(frame: FrameType | None) -> tuple[str, str]:
    """Return the op and the shapes that the tuner works on, from the frame of its ``choose_one``."""
    while frame is not None:
        given = frame.f_locals
        if "custom_op" in given:
            shapes = given.get("input_shapes") or [
                tuple(getattr(t, "shape", ())) for t in given.get("inputs") or ()
            ]
            return str(given["custom_op"]), ", ".join(map(str, shapes))
        frame = frame.f_back
    return "a tuned op", ""
