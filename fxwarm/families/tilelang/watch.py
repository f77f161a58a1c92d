"""TileLang after warmup: each kernel object it makes is a build, or a read from its disk cache."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from fxwarm.families.tilelang import jit
from fxwarm.families.tilelang.statics import FAMILY
from fxwarm.monitor.event import JitEvent

__all__ = ["watch"]


def watch(report: Callable[..., None]) -> Callable[[], None] | None:
    """Report builds (before they begin) and loads until the function that is returned is called; None without TileLang."""
    if "tilelang.jit" not in sys.modules:
        return None
    jit.watch()  # its counting goes first, so that taking ours away leaves it
    from tilelang.jit.kernel import JITKernel

    counted = JITKernel.__init__

    @functools.wraps(counted)
    def named(self: Any, func: Any = None, *args: Any, **kwargs: Any) -> None:
        stored = kwargs.get("from_database", len(args) > 6 and args[6])
        event = JitEvent(FAMILY, "load" if stored else "build", _name(func))
        if not stored:
            report(event, before=True)
        begin = time.perf_counter()
        counted(self, func, *args, **kwargs)
        seconds = time.perf_counter() - begin
        report(JitEvent(FAMILY, event.kind, event.op, shape=_shape(self), seconds=seconds))

    JITKernel.__init__ = named

    def stop() -> None:
        if JITKernel.__init__ is named:
            JITKernel.__init__ = counted

    return stop


def _name(func: Any) -> str:
    attrs = getattr(func, "attrs", None)
    name = attrs.get("global_symbol") if attrs is not None else None
    return str(name or "a kernel")


def _shape(kernel: Any) -> str:
    try:
        return ", ".join(f"{p.dtype}{list(p.shape)}" for p in kernel.params)
    except (AttributeError, TypeError):
        return ""
