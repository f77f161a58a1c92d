"""Locks between processes: one builder per key, and a word about who holds it while the others wait.

The lock is the operating system's (``filelock``: flock), so it dies with its holder. The text inside the lock file
only says who that is; it is never what decides.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

SAY_AFTER = 5.0
"""Seconds between two lines that say whom we wait for."""


@contextlib.contextmanager
def hold(folder: Path, name: str, what: str) -> Iterator[bool]:
    """Hold the lock ``name`` in ``folder`` for ``what``; yield whether somebody else held it meanwhile.

    A caller that had to wait looks again before it works: the other may have done it. Raises OSError where
    ``folder`` cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:200]}.lock"
    lock = FileLock(path)
    start, waited = time.monotonic(), False
    while True:
        try:
            lock.acquire(timeout=SAY_AFTER if waited else 0.0, poll_interval=0.02)
            break
        except Timeout:
            if waited:
                seconds = time.monotonic() - start
                log.warning(
                    "waiting %.0f s for %s: %s", seconds, what, holder(path) or "holder unknown"
                )
            waited = True
    try:
        with contextlib.suppress(OSError):  # a full disk must not cost us the lock
            path.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
        yield waited
    finally:
        lock.release()


def holder(path: Path) -> str:
    """Return who wrote the lock file ``path`` last, as in "pid 17 on node3"; empty where nobody can say."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()[:200]
    return ""
