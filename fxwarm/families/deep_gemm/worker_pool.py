"""The worker processes of one build, each with a thread that hands it one witness at a time."""

from __future__ import annotations

import collections
import logging
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fxwarm import exc, slots
from fxwarm.families.deep_gemm import cache, device, inputs, library
from fxwarm.families.deep_gemm.build import by_cost
from fxwarm.families.deep_gemm.cache import Roots
from fxwarm.families.deep_gemm.child import Child, Silence
from fxwarm.records import Library, Planned, Target

__all__ = ["CONTEXT", "Job", "Outcome", "Pool"]

log = logging.getLogger(__name__)

CONTEXT = 640 << 20
"""Bytes of device memory that a worker takes beside its tensors: 0.5 GiB of context (H200), 32 MiB of workspace."""
START = 180.0
"""Seconds that a worker may take to import torch and the library and to open the device."""


class Job(NamedTuple):
    """What all workers of one build have in common."""

    target: Target
    found: Library
    where: Roots
    jobs: int
    memory: int
    """Bytes of device memory that they may take together."""
    timeout: float
    """Seconds for one kernel."""
    alignment: int = inputs.ALIGNMENT


class Outcome(NamedTuple):
    planned: Planned
    seconds: float = 0.0
    error: str = ""
    words: str = ""
    """What the compiler said."""
    lost: bool = False
    """The worker did not survive it, so nobody else is to try."""


class Pool:
    """``workers`` processes that launch the witnesses of ``planned``, those that take longest to compile first."""

    def __init__(self, planned: Sequence[Planned], job: Job, workers: int) -> None:
        self.job, self._size = job, workers
        self._todo = collections.deque(by_cost(planned))
        self._done: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        self._errors: list[exc.LibraryError] = []
        self._children: dict[int, Child] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._settings = library.settings_to_repeat(job.found)
        self._room = Path(tempfile.mkdtemp(prefix="fxwarm-deep_gemm-"))
        self._environ = device.child_environment(job.target.device) | cache.environment(job.where)
        self._environ["TMPDIR"] = str(self._room)  # precompiled headers go there, and with it

    def run(self) -> Iterator[Outcome]:
        """Yield what became of each kernel. Raises LibraryError if no worker starts; ends all at the end."""
        threads = [
            threading.Thread(target=self._serve, args=(i,), name="fxwarm-worker", daemon=True)
            for i in range(self._size)
        ]
        for thread in threads:
            thread.start()
        try:
            left = len(threads)
            while left:
                outcome = self._done.get()
                if outcome is None:
                    left -= 1
                else:
                    yield outcome
            if self._todo and self._errors:
                raise self._errors[0]
        finally:
            self._stop()
            for thread in threads:
                thread.join()
            shutil.rmtree(self._room, ignore_errors=True)

    def _serve(self, place: int) -> None:
        try:
            while self._todo and not self._stopped:
                child = self._children.get(place) or self._start(place)
                try:
                    planned = self._todo.popleft()
                except IndexError:  # another worker was faster
                    return
                with slots.take(self.job.jobs):
                    outcome = self._ask(child, planned)
                if outcome.lost:
                    self._end(place, 0.0)
                self._done.put(outcome)
        except exc.LibraryError as error:  # it did not start: the others go on with what is left
            log.debug("fxwarm: a worker did not start: %s", error)
            self._errors.append(error)
        finally:
            self._end(place)
            self._done.put(None)

    def _start(self, place: int) -> Child:
        job = self.job
        with self._lock:
            if self._stopped:
                raise exc.LibraryError("the build was ended")
            child = self._children[place] = Child(
                "worker_child",
                {"module": job.found.module, "device": job.target.device},
                room=self._room,
                environ=self._environ,
                found=job.found,
                task=f"compiles kernels of {job.found}",
                name=f"worker{place}",
            )
        child.answer(START, "to start")
        return child

    def _ask(self, child: Child, planned: Planned) -> Outcome:
        job, begin = self.job, time.monotonic()
        request = {
            "witness": msgspec.to_builtins(planned.witness),
            "settings": self._settings,
            "alignment": job.alignment,
            "memory": job.memory // self._size - CONTEXT,
        }
        try:
            child.send(request)
            answer: dict[str, Any] = child.answer(job.timeout, "at a kernel")
        except Silence:
            words = f"its launch in a worker took more than {job.timeout:.0f} s; raise fxwarm.build_timeout"
            return Outcome(planned, time.monotonic() - begin, words, lost=True)
        except exc.LibraryError as error:
            return Outcome(planned, time.monotonic() - begin, str(error), lost=True)
        lost = not answer["usable"]
        return Outcome(planned, answer["seconds"], answer["error"], answer["words"], lost)

    def _end(self, place: int, grace: float = 5.0) -> None:
        with self._lock:
            child = self._children.pop(place, None)
        if child is not None:
            child.end(grace)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            places = list(self._children)
        for place in places:
            self._end(place, 0.0)
