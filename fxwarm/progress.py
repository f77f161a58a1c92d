"""Progress of long work: a bar on a terminal, a log line a step elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

_lock = threading.Lock()
_bar: Any = None
"""The one bar of the terminal: families build side by side, a line each."""
_lines = 0


class Progress:
    """Counts steps towards ``total``; 0 if nobody knows how many they will be. One step alone shows no bar."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done = title, total, 0
        self._begin = time.perf_counter()
        self._line: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and self.total != 1:
            self._line = _add_line(self.title, self.total)
        return self

    def step(self, what: str, seconds: float, error: str = "") -> None:
        """Count one step, done in ``seconds`` or failed with ``error``."""
        self.done += 1
        self.total = max(self.total, self.done)  # a stream does not know how many it will be
        if self._line is not None:
            _bar.advance(self._line)
        level = logging.ERROR if error else logging.INFO
        outcome = f"failed: {error}" if error else f"{seconds:.1f} s"
        log.log(level, "fxwarm: %s %d/%d %s: %s", self.title, self.done, self.total, what, outcome)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._line is not None:
            _remove_line(self._line)
        seconds = time.perf_counter() - self._begin
        log.info("fxwarm: %s: %d of %d in %.1f s", self.title, self.done, self.total, seconds)


def _add_line(title: str, total: int) -> Any:
    global _bar, _lines
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    with _lock:
        if not _lines:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            _bar = Bar(*columns, console=Console(stderr=True), transient=True)
            _bar.start()
        _lines += 1
        return _bar.add_task(title, total=total or None)


def _remove_line(line: Any) -> None:
    global _lines
    with _lock:
        _lines -= 1
        if not _lines:
            _bar.stop()
