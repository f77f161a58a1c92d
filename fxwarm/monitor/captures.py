"""Knows which threads are capturing a CUDA graph, and looks at each call of a JIT op while one is.

A capture is rare and is not the hot path: its replays pass no op. So what would load a kernel in it, which can end the
engine (deepseek-ai/DeepGEMM#443), is told, or stopped, before the library is called, and costs nothing elsewhere.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from fxwarm import runtime

_open: set[int] = set()
"""Threads in which a capture is open."""


def is_open(thread: int) -> bool:
    """Return whether ``thread`` captures. Asks no CUDA: from another thread that could fail the capture."""
    return thread in _open


def watch(on_begin: Callable[[], None], on_end: Callable[[], None]) -> Callable[[], None]:
    """Call ``on_begin`` before a capture begins and ``on_end`` when the last has ended, until the result is called.

    One that is open already in this thread counts from now.
    """
    graph: Any = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _enter(on_begin)
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            _leave(on_end)
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _leave(on_end)

    own = {name: vars(graph).get(name) for name in ("capture_begin", "capture_end")}
    graph.capture_begin, graph.capture_end = capture_begin, capture_end
    if runtime.is_capturing():
        _enter(on_begin)

    def stop() -> None:
        for name, function in own.items():
            if function is None:  # inherited from torch's C++ class
                delattr(graph, name)
            else:
                setattr(graph, name, function)
        _open.clear()

    return stop


def _enter(on_begin: Callable[[], None]) -> None:
    _open.add(threading.get_ident())
    on_begin()


def _leave(on_end: Callable[[], None]) -> None:
    _open.discard(threading.get_ident())
    if not _open:
        on_end()
