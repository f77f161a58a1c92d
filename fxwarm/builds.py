"""Builds: beside the asking and beside other families, one failure at a time, as many at once as there is room for."""

from __future__ import annotations

import contextvars
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from fxwarm import exc
from fxwarm.family import KernelFamily, builds
from fxwarm.options import Options
from fxwarm.records import Built, CompileKey, Loaded, Planned, Target

log = logging.getLogger(__name__)

T = TypeVar("T", Built, Loaded)


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


def jobs(options: Options) -> int:
    """Return how many compiles may run at once: ``fxwarm.jobs``, else as many as this process may use CPUs."""
    return options.jobs or len(os.sched_getaffinity(0))


def each(
    step: Callable[[Any], Iterable[T]], planned: Iterable[Planned], failed: type[T]
) -> Iterator[T]:
    """Yield what ``step`` says of each planned kernel. Where it raises at one, that one failed and the rest go on.

    What is still being asked for comes as an iterator and cannot be gone through again: then the error is raised, as
    are a LibraryError, which concerns all, and the third error in a row.
    """
    if not isinstance(planned, Sequence):
        yield from step(planned)
        return
    rest, in_a_row = list(planned), 0
    while rest:
        try:
            for item in step(rest):
                in_a_row = 0
                rest = [p for p in rest if p.key != item.key]
                yield item
            return
        except exc.LibraryError:
            raise
        except Exception as error:
            in_a_row += 1
            if in_a_row == 3 or not rest:
                raise
            log.debug("fxwarm: %s", rest[0].key, exc_info=True)
            yield failed(rest.pop(0).key, error=f"{type(error).__name__}: {error}")
