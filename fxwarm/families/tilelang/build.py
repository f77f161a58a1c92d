"""Build kernels into TileLang's disk cache in parallel: nothing launched, no GPU needed.

Each worker is a process that takes the next key when it is done. A worker that dies or exceeds the limit costs its key,
not the others.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec

from fxwarm.families.tilelang.worker import Answer, Task
from fxwarm.records import Built, Planned, Target

LIMIT = 300.0
"""Seconds for one kernel with the start of its worker: 6.9 s was the slowest mHC kernel, 4 s the slowest start."""


def build(
    planned: Sequence[Planned], target: Target, jobs: int, limit: float = LIMIT
) -> Iterator[Built]:
    """Compile each of ``planned`` for ``target``, at most ``jobs`` at a time; yield them as they finish.

    The target is given explicitly, so a machine without a GPU builds what a GPU loads. Closing the iterator stops it.
    """
    tasks: queue.SimpleQueue[Planned] = queue.SimpleQueue()
    for one in planned:
        tasks.put(one)
    results: queue.SimpleQueue[Built] = queue.SimpleQueue()
    workers = [
        _Worker(tasks, results, target, limit) for _ in range(max(1, min(jobs, len(planned))))
    ]
    try:
        for worker in workers:
            worker.start()
        for _ in planned:
            yield results.get()
    finally:
        for worker in workers:
            worker.stop()


class _Worker(threading.Thread):
    """A thread that feeds one child process."""

    def __init__(
        self,
        tasks: queue.SimpleQueue[Planned],
        results: queue.SimpleQueue[Built],
        target: Target,
        limit: float,
    ) -> None:
        super().__init__(name="fxwarm-tilelang", daemon=True)
        self.tasks, self.results, self.target, self.limit = tasks, results, target, limit
        self.child: subprocess.Popen[bytes] | None = None
        self.errors: IO[bytes] | None = None
        self.stopped = False

    def run(self) -> None:
        while not self.stopped:
            try:
                one = self.tasks.get_nowait()
            except queue.Empty:
                break
            try:
                answer = self._ask(Task(one.key, self.target))
            except Exception as error:
                answer = Answer(error=f"{type(error).__name__}: {error}")
            self.results.put(Built(one.key, answer.seconds, answer.bytes, answer.error))
        self._end()

    def stop(self) -> None:
        self.stopped = True
        child = self.child
        if child is not None:
            _kill(child)

    def _ask(self, task: Task) -> Answer:
        if self.child is None:
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in _end)
            self.child = _start(self.errors)
        child, late = self.child, threading.Event()
        assert child.stdin is not None
        assert child.stdout is not None

        def give_up() -> None:
            late.set()
            _kill(child)

        timer = threading.Timer(self.limit, give_up)
        timer.daemon = True
        timer.start()
        try:
            child.stdin.write(msgspec.json.encode(task) + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            timer.cancel()
        if line:
            return msgspec.json.decode(line, type=Answer)
        words = f"no answer within {self.limit:.0f} s" if late.is_set() else self._last_words()
        self._end()
        return Answer(self.limit if late.is_set() else 0.0, error=words)

    def _last_words(self) -> str:
        code = self.child.wait() if self.child is not None else None
        assert self.errors is not None
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - 2000))
        return (
            f"the worker ended with {code}: {self.errors.read().decode(errors='replace').strip()}"
        )

    def _end(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            try:
                child.wait(2.0)
            except subprocess.TimeoutExpired:
                _kill(child)
                child.wait()
        if self.errors is not None:
            self.errors.close()
            self.errors = None


def _start(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    paths = [os.getcwd() if p == "" else p for p in sys.path]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",  # no context: it costs time and device memory, and builds need none
        "OMP_NUM_THREADS": "1",
        "TILELANG_PRINT_ON_COMPILATION": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "fxwarm.families.tilelang.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=env,
        start_new_session=True,  # so that its compilers end with it
    )


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
