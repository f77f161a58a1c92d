"""Which call a thread is in at this moment, read from its Python stack: asked when something happened, never before.

torch keeps one Python frame a call of an op, ``OpOverload.__call__``, and in it the op and its arguments; what the op's
C++ does below can be seen from another thread, for a compile takes seconds and a load runs without the GIL.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from fxwarm import captures
from fxwarm.monitor import misses
from fxwarm.monitor.misses import Arguments
from passes.flatten import BUILTIN

_NOT_THE_MODEL = (
    "torch",
    "fxwarm",
    "passes",
    "contextlib",
    "threading",
    "functools",
    "triton",
    "tilelang",
    "flashinfer",
    "cutlass",
    "deep_gemm",
)
_OVERLOAD = torch._ops.OpOverload.__call__.__code__
_PACKET = torch._ops.OpOverloadPacket.__call__.__code__


class Sight(NamedTuple):
    """What one thread is doing."""

    thread: int
    call: Arguments | None
    """The innermost call of an op that a family claims."""
    place: str
    """The innermost line of the user's program, outside of the op."""
    capturing: bool = False


class Moment(NamedTuple):
    """What is known of a thing seen from outside: what the threads did then, and whether this process did it."""

    sights: list[Sight]
    mine: bool | None


def here() -> Sight:
    """Return what the calling thread is doing."""
    return _see(threading.get_ident(), sys._getframe(1))


def sights() -> list[Sight]:
    """Return what each thread of this process but the calling one is doing, those in a JIT op first, then the main one."""
    main, mine = threading.main_thread().ident, threading.get_ident()
    found = [
        _see(thread, frame) for thread, frame in sys._current_frames().items() if thread != mine
    ]
    return sorted(found, key=lambda s: (s.call is None, s.thread != main))


def _see(thread: int, frame: FrameType) -> Sight:
    for each in _outwards(frame):
        if each.f_code in (_OVERLOAD, _PACKET) and (call := _call_in(each)) is not None:
            # what is further in is the library's
            return Sight(thread, call, _place(each), captures.is_open(thread))
    return Sight(thread, None, _place(frame), captures.is_open(thread))


def place_of_stack() -> str:
    """Return the innermost line of this thread that belongs to the user's program."""
    return _place(sys._getframe(1))


def _place(frame: FrameType) -> str:
    for each in _outwards(frame):
        if _is_the_users(each):
            return f"{each.f_code.co_filename}:{each.f_lineno} in {each.f_code.co_name}"
    return ""


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _call_in(frame: FrameType) -> Arguments | None:
    given: dict[str, Any] = frame.f_locals
    op: Any = given.get("self")
    if isinstance(op, torch._ops.OpOverloadPacket):
        names = op.overloads()
        op = getattr(op, "default" if "default" in names else names[0]) if names else None
    if op is None or op.namespace in BUILTIN or not misses.claiming(op):
        return None
    try:
        return misses.read(op, given.get("args", ()), given.get("kwargs", {}))
    except Exception:  # another thread's objects, in whatever state they are
        return None


def _is_the_users(frame: FrameType) -> bool:
    module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    return (
        module.partition(".")[0] not in _NOT_THE_MODEL
        and "torchinductor" not in file
        and file[:1] != "<"
    )
