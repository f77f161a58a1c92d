"""Knows which threads of this process are capturing a CUDA graph, without asking CUDA.

A load during a capture can end the engine (deepseek-ai/DeepGEMM#443), and asking from another thread whether one is
open can fail it. So torch's own begin and end of a capture, which are rare, say so. A warmup waits for captures of other
threads, a capture for a warmup that loads, and a monitor looks at each call while one is open.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from fxwarm import exc, runtime

log = logging.getLogger(__name__)

LONGEST = 60.0
"""Seconds after which a capture that never ends is no longer waited for: its thread may have failed in between."""
SAY_AFTER = 5.0

Hook = Callable[[], None]

_open: set[int] = set()
"""Threads in which a capture is open."""
_changed = threading.Condition()
_order = threading.RLock()
"""Held while hooks run, so that the end of one capture does not undo the beginning of the next."""
_hooks: list[tuple[Hook, Hook]] = []
_gates: list[Callable[[], contextlib.AbstractContextManager[Any]]] = []


def is_open(thread: int) -> bool:
    """Return whether ``thread`` captures."""
    return thread in _open


def refuse(what: str) -> None:
    """Raise ColdCaptureError where this thread is capturing: ``what`` would have to load kernels, and is to come later."""
    # where others capture CUDA is not asked: on the legacy stream that is an error of its own
    if is_open(threading.get_ident()) or (not _open and runtime.is_capturing()):
        raise exc.ColdCaptureError(
            f"{what} would load kernels into the CUDA graph that is being captured; call fxwarm.warm_all() before the "
            "capture, or again after it"
        )


def wait() -> float:
    """Wait until no other thread captures; return the seconds that took. Says whom it waits for."""
    begin = said = time.monotonic()
    me = threading.get_ident()
    with _changed:
        while others := _open - {me}:
            _changed.wait(0.2)
            now = time.monotonic()
            if now - begin > LONGEST:
                log.warning("fxwarm: a capture has been open for %.0f s; going on", now - begin)
                _open.difference_update(others)
            elif now - said > SAY_AFTER:
                names = sorted(t.name for t in threading.enumerate() if t.ident in others)
                log.warning("fxwarm: waiting for the graph capture of %s", ", ".join(names))
                said = now
    return time.monotonic() - begin


def closed_by(lock: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """Let no capture begin while somebody else holds what ``lock`` returns."""
    _gates.append(lock)


def listen(on_begin: Hook, on_end: Hook) -> Hook:
    """Call ``on_begin`` before a capture begins and ``on_end`` when the last has ended, until the result is called.

    One that is open already counts from now.
    """
    install()
    if runtime.is_capturing():
        _open.add(threading.get_ident())
    hooks = on_begin, on_end
    _hooks.append(hooks)
    if _open:
        on_begin()
    return lambda: _hooks.remove(hooks)


def install() -> None:
    """Make torch say when a capture begins and ends. A second call does nothing."""
    graph: Any = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end
    if getattr(begin, "_fxwarm", False):
        return

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _enter()
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            _leave()
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _leave()

    capture_begin._fxwarm = True  # type: ignore[attr-defined]
    graph.capture_begin, graph.capture_end = capture_begin, capture_end


def _after_fork() -> None:
    """The captures are the parent's, and so is the thread that may hold the lock."""
    global _changed, _order
    _changed, _order = threading.Condition(), threading.RLock()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)


def _enter() -> None:
    me = threading.get_ident()
    with contextlib.ExitStack() as stack:
        if not _open:
            for gate in _gates:
                stack.enter_context(gate())
        stack.enter_context(_order)
        _open.add(me)
        for on_begin, _ in list(_hooks):
            on_begin()


def _leave() -> None:
    with _order:
        with _changed:
            _open.discard(threading.get_ident())
            _changed.notify_all()
        if not _open:
            for _, on_end in list(_hooks):
                on_end()
