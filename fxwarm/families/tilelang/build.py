"""Build kernels into TileLang's disk cache in parallel: nothing launched, no GPU needed.

A server imports TileLang once and forks for each kernel (``worker``). A fork that dies or exceeds the limit costs its
kernel, not the others.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator

import msgspec

from fxwarm import options, slots
from fxwarm.families.tilelang.worker import Answer, Task
from fxwarm.records import Built, CompileKey, Planned, Target

START = 120.0
"""Seconds for the imports of the server: 8 s was the slowest start."""
IDLE = 300.0
"""Seconds after which a server that was started ahead, and got no task, is ended. DeepSeek-V3 is traced in 50 s on 2 CPUs."""

_OTHERS = ("CUDA_MODULE_LOADING", "MAX_JOBS", "TORCHINDUCTOR_", "TRITON_", "DG_", "DJ_")
"""Beginnings of variables that no TileLang build reads, and that others set while they work."""
_BY_IMPORT = ("TVM_LIBRARY_PATH", "TL_CUTLASS_PATH", "TL_TEMPLATE_PATH")
"""Variables that the import of TileLang sets, in a server as in its parent."""
_OWN_PATH = os.path.join("tilelang", "3rdparty")
"""Part of what it adds to ``sys.path``."""

_ahead: queue.SimpleQueue[_Server] = queue.SimpleQueue()
"""At most one server that imports, or has imported, and waits for tasks."""


def prepare() -> None:
    """Start the server in the background, so that it has imported TileLang when the first kernel is known."""
    if _ahead.empty():
        server = _Server()
        _ahead.put(server)
        timer = threading.Timer(IDLE, _end_idle, (server,))
        timer.daemon = True
        timer.start()


def _take_server() -> _Server:
    """Return the server that was started ahead, or a new one."""
    while True:
        try:
            server = _ahead.get_nowait()
        except queue.Empty:
            return _Server()
        if server.is_current():
            return server
        server.end()


def _end_idle(server: _Server) -> None:
    with contextlib.suppress(queue.Empty):
        waiting = _ahead.get_nowait()
        if waiting is server:
            server.end()
        else:  # a later one, with a time of its own
            _ahead.put(waiting)


def _end_ahead() -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            _ahead.get_nowait().end()


def _forget() -> None:
    """In a fork: the server is the parent's."""
    global _ahead
    _ahead = queue.SimpleQueue()


atexit.register(_end_ahead)
os.register_at_fork(after_in_child=_forget)


def build(
    planned: Iterable[Planned], target: Target, jobs: int, limit: float | None = None
) -> Iterator[Built]:
    """Compile each of ``planned`` for ``target``, at most ``jobs`` at a time; yield them as they finish.

    ``limit`` is how many seconds one kernel may take, by default ``fxwarm.build_timeout``. The target is given
    explicitly, so a machine without a GPU builds what a GPU loads. Closing the iterator stops it.
    """
    left = dict.fromkeys(p.key for p in planned)
    if not left:
        return
    limit = options.active().build_timeout if limit is None else limit
    server = _take_server()
    feeder = threading.Thread(
        target=server.feed,
        args=([Task(key, target, limit) for key in left], level(len(left), max(1, jobs))),
        name="fxwarm-tilelang",
        daemon=True,
    )
    try:
        feeder.start()
        while left:
            answer = server.answer(START + limit)
            if answer is None:
                words = server.last_words()
                yield from (Built(key, error=words) for key in left)
                return
            left.pop(answer.key)
            yield Built(answer.key, answer.seconds, answer.bytes, answer.error)
    finally:
        server.end()
        feeder.join()


def level(count: int, jobs: int) -> int:
    """Return how many of ``count`` kernels to compile at once where ``jobs`` are meant to, unless the user said so.

    They cost alike: 23 on 16 CPUs would run as 16, and then 7 with 9 CPUs idle. Up to half as many again share the CPUs
    instead, where that spares a wave.
    """
    at_once = -(-count // max(1, count // jobs))
    return at_once if not options.active().jobs and jobs < at_once <= 1.5 * jobs else jobs


class _Server:
    """The child process, and the tasks that it works on."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in end)
        self._environ, self._paths = _environ(), [*sys.path]
        self._process = _start(self._errors.fileno())
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._running: dict[CompileKey, contextlib.ExitStack] = {}
        self._ended = self._stuck = False
        self._handed = time.monotonic()
        """When the last task was."""
        self._reader = threading.Thread(target=self._read, name="fxwarm-tilelang-read", daemon=True)
        self._reader.start()

    def is_current(self) -> bool:
        """Whether it still runs, under the environment of this moment: cache folders are in it."""
        here, there = _environ(), self._environ
        # what its own import set is no difference; a path that was the user's already is
        same = {n: v for n, v in here.items() if n in there or n not in _BY_IMPORT} == there
        added = [p for p in sys.path if p not in self._paths and _OWN_PATH not in p]
        return self._process.poll() is None and same and not added

    def feed(self, tasks: list[Task], jobs: int) -> None:
        """Hand out each task when there is a slot for it."""
        assert self._process.stdin is not None
        for task in tasks:
            slot = contextlib.ExitStack()
            slot.enter_context(slots.take(jobs))
            self._handed = time.monotonic()
            self._running[task.key] = slot
            if self._ended:
                slot.close()
                return
            try:
                self._process.stdin.write(msgspec.json.encode(task) + b"\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):
                slot.close()
                return

    def answer(self, patience: float) -> Answer | None:
        """Return the next answer; None where the server ended, or is silent for ``patience`` seconds while it works."""
        wait = patience
        while True:
            try:
                return self._answers.get(timeout=wait)
            except queue.Empty:
                # where nothing runs the slots are taken by others; what runs may have got its slot just now
                wait = self._handed + patience - time.monotonic() if self._running else patience
                if wait <= 0:
                    self._stuck = True
                    return None

    def last_words(self) -> str:
        """Return how the server ended, with the end of what it printed."""
        if self._stuck:
            return "the TileLang server says nothing; look for a process that hangs in an import"
        code = self._process.wait()
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        return (
            f"the worker ended with {code}: {self._errors.read().decode(errors='replace').strip()}"
        )

    def end(self) -> None:
        """End the server with all its compilers."""
        self._ended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = msgspec.json.decode(line, type=Answer)
            self._running.pop(answer.key).close()
            self._answers.put(answer)
        for slot in list(self._running.values()):
            slot.close()
        self._answers.put(None)


def _environ() -> dict[str, str]:
    """Return the environment as far as a build can depend on it; the server gets ``sys.path`` in its own way."""
    known = (*_OTHERS, "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(known)}


def _start(errors: int) -> subprocess.Popen[bytes]:
    paths = [os.getcwd() if p == "" else p for p in sys.path]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",  # no context: it costs time and device memory, and builds need none
        "OMP_NUM_THREADS": "1",  # no thread pool, or it could not fork
        "OPENBLAS_NUM_THREADS": "1",
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
