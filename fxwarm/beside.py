"""Work of a warmup beside other work: in a thread of its own, and a queue of kernels that are built as they are named."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Iterable

from fxwarm.family import KernelFamily, builds
from fxwarm.records import CompileKey, Planned, Target


class Beside:
    """Work in a thread of its own, under the options of the warmup that begins it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        # The options are a context variable, which a thread does not inherit.
        inherit = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=inherit, args=(run,), name="fxwarm-beside", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the end. Raises what the work raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class Stream:
    """Builds the kernels of one family while its library is still being asked for more."""

    def __init__(
        self,
        family: KernelFamily,
        target: Target,
        build: Callable[[KernelFamily, Iterable[Planned], int], None],
        found: Callable[[CompileKey], None],
    ) -> None:
        """``build`` builds what an iterator gives until it ends; ``found`` hears of what the cache holds already."""
        self.family, self.target, self._found = family, target, found
        self._queue: queue.SimpleQueue[Planned | None] = queue.SimpleQueue()
        self._beside = Beside(lambda: build(family, iter(self._queue.get, None), 0))

    def put(self, planned: Planned) -> None:
        """Build ``planned``, unless it is there."""
        if self.family.missing([planned], self.target):
            for wanted in builds(self.family, [planned]):
                self._queue.put(wanted)
        else:
            self._found(planned.key)

    def close(self) -> None:
        """Say that nothing more comes, and wait for the builds. Raises what they raised."""
        self._queue.put(None)
        self._beside.join()
