"""Progress of long work: a bar on a terminal, a log line a step elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

log = logging.getLogger(__name__)


class Progress:
    """Counts steps towards ``total``. Says nothing where nothing takes long."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done = title, total, 0
        self._begin = time.perf_counter()
        self._bar = None
        if sys.stderr.isatty() and total > 1:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def step(self, what: str, seconds: float, error: str = "") -> None:
        """Count one step, done in ``seconds`` or failed with ``error``."""
        self.done += 1
        self.total = max(self.total, self.done)  # a stream does not know how many it will be
        if self._bar is not None:
            self._bar.advance(self._task)
        level = logging.ERROR if error else logging.INFO
        outcome = f"failed: {error}" if error else f"{seconds:.1f} s"
        log.log(level, "fxwarm: %s %d/%d %s: %s", self.title, self.done, self.total, what, outcome)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        seconds = time.perf_counter() - self._begin
        log.info("fxwarm: %s: %d of %d in %.1f s", self.title, self.done, self.total, seconds)
