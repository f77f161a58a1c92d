"""The server of ``build``: imports TileLang once, then compiles each kernel in a fork of itself; launches nothing.

One JSON object a line: tasks on stdin, answers on stdout as kernels are done, in any order. A fork begins with all
imports made, 2 s of a core that 16 processes would each pay; it must be a process, since elaborating and lowering hold
the interpreter. The server has one thread and no CUDA, so that it may fork. It ends, and all its compilers with it, when
its parent closes the pipe.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import tempfile
import time
from typing import IO, NoReturn

import msgspec

from fxwarm.families.tilelang.statics import factory_of
from fxwarm.records import CompileKey, Target


class Task(msgspec.Struct):
    """One kernel to build, and after how many seconds it is given up."""

    key: CompileKey
    target: Target
    limit: float


class Answer(msgspec.Struct):
    """What became of it."""

    key: CompileKey
    seconds: float = 0.0
    bytes: int = 0
    error: str = ""


class _Child:
    """One fork, seen from the server: what it says comes through ``pipe``, what it prints goes to ``words``."""

    def __init__(self, task: Task) -> None:
        self.task, self.begin, self.said, self.late = task, time.monotonic(), b"", False
        self.words = tempfile.TemporaryFile()  # noqa: SIM115 (closed in answer)
        self.pipe, end = os.pipe()
        gc.freeze()  # or a fork that looks for garbage copies the pages of all imports
        self.pid = os.fork()
        if not self.pid:
            self._compile(end)
        os.close(end)

    def _compile(self, end: int) -> NoReturn:
        """In the fork: build, say so, and never come back to the server's loop."""
        code = 1
        gc.enable()
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a compiler must not read the tasks
            os.dup2(self.words.fileno(), 1)
            os.dup2(1, 2)
            with os.fdopen(end, "wb") as pipe:
                pipe.write(msgspec.json.encode(compile_one(self.task)))
            code = 0
        finally:
            os._exit(code)

    def answer(self) -> Answer:
        """Return what the fork said, or what ended it."""
        os.close(self.pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with self.words, contextlib.suppress(msgspec.DecodeError):
            self.words.seek(max(0, self.words.seek(0, os.SEEK_END) - 2000))
            words = self.words.read().decode(errors="replace").strip()
            if not self.late:
                return msgspec.json.decode(self.said, type=Answer)
        seconds = time.monotonic() - self.begin
        reason = f"no answer within {self.task.limit:.0f} s; raise fxwarm.build_timeout"
        return Answer(
            self.task.key,
            seconds,
            error=reason if self.late else f"the worker ended with {status}: {words}",
        )

    def give_up(self) -> None:
        """End the fork and its compilers."""
        import psutil  # type: ignore[import-untyped]  # TileLang needs it too

        self.late = True
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            for one in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.Error):
                    one.kill()


def serve(tasks: int, answers: IO[bytes]) -> None:
    """Fork for each line of ``tasks``, and answer it when the fork is done. The parent says how many run at once."""
    from fxwarm.families.tilelang import jit

    unread = b""
    with selectors.DefaultSelector() as ready:
        ready.register(tasks, selectors.EVENT_READ)
        while True:
            children = [key.data for key in ready.get_map().values() if key.data is not None]
            waiting = [c.begin + c.task.limit for c in children if not c.late]
            wait = max(0.0, min(waiting) - time.monotonic()) if waiting else None
            for key, _ in ready.select(wait):
                data = os.read(key.fd, 1 << 16)
                if key.fd == tasks:
                    if not data:
                        return
                    *lines, unread = (unread + data).split(b"\n")
                    for line in lines:
                        task = msgspec.json.decode(line, type=Task)
                        with contextlib.suppress(Exception):  # the fork says it
                            jit.get(factory_of(task.key))
                        child = _Child(task)
                        ready.register(child.pipe, selectors.EVENT_READ, child)
                elif data:
                    key.data.said += data
                else:
                    ready.unregister(key.fd)
                    answers.write(msgspec.json.encode(key.data.answer()) + b"\n")
                    answers.flush()
            for child in children:
                if not child.late and time.monotonic() >= child.begin + child.task.limit:
                    child.give_up()


def compile_one(task: Task) -> Answer:
    """Build one kernel in this process."""
    start = time.perf_counter()
    try:
        size, error = make(task.key, task.target), ""
    except Exception as failure:
        size = 0
        error = (
            f"{type(failure).__name__}: {(str(failure).strip() or type(failure).__name__)[-4000:]}"
        )
    return Answer(task.key, time.perf_counter() - start, size, error)


def make(key: CompileKey, target: Target) -> int:
    """Put the kernel ``key`` on disk and return its size in bytes; one process a kernel, the others find it."""
    from fxwarm import locks
    from fxwarm.families.tilelang import index
    from fxwarm.families.tilelang.compiled import get_kernel

    name = index.path_of(key, target).stem
    with locks.hold(index.root() / "fxwarm" / "locks", name, f"the build of {key}"):
        get_kernel(key, target)
    entry = index.read(key, target)
    return index.size_of(index.folder_of(entry)) if entry is not None else 0


def main() -> None:
    """Serve the parent, with everything that libraries print on stdout sent to stderr."""
    # What is imported stays: to look for garbage in it takes one of 7 s.
    gc.disable()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(Exception):  # every task says so, too
        import tilelang  # noqa: F401  (before the first task comes)
    serve(0, answers)
    os.killpg(0, signal.SIGKILL)  # what still compiles, nobody waits for


if __name__ == "__main__":
    main()
