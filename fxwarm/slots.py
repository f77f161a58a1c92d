"""How many compiles run at once in this process, whoever starts them.

Families build side by side, and so do the graphs of a model. Each keeps to its ``jobs``; together they keep to them
here, so that a machine that has room for 16 compiles never runs 32.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_changed = threading.Condition()
_taken = 0


@contextlib.contextmanager
def take(jobs: int, count: int = 1) -> Iterator[None]:
    """Hold ``count`` of ``jobs`` slots; wait until so many are free. More than there are is all of them."""
    global _taken
    count = min(count, jobs)
    with _changed:
        _changed.wait_for(lambda: _taken + count <= jobs)
        _taken += count
    try:
        yield
    finally:
        with _changed:
            _taken -= count
            _changed.notify_all()


def _after_fork() -> None:
    """What a parent compiles does not run in its fork."""
    global _changed, _taken
    _changed, _taken = threading.Condition(), 0


os.register_at_fork(after_in_child=_after_fork)
