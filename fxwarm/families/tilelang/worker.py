"""The child of ``build``: compiles one kernel after the other, as its parent asks, and launches nothing.

One JSON object a line, in on stdin and out on stdout. A process of its own, since elaboration holds the interpreter:
22 mHC kernels elaborate for 3 to 5 s in one thread. It ends with its parent's end of the pipe.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import IO

import msgspec

from fxwarm.records import CompileKey, Target


class Task(msgspec.Struct):
    """One kernel to build."""

    key: CompileKey
    target: Target


class Answer(msgspec.Struct):
    """What became of it."""

    seconds: float = 0.0
    bytes: int = 0
    error: str = ""


def serve(tasks: IO[bytes], answers: IO[bytes]) -> None:
    """Answer every line of ``tasks``."""
    for line in tasks:
        task = msgspec.json.decode(line, type=Task)
        start = time.perf_counter()
        try:
            size = make(task.key, task.target)
            answer = Answer(time.perf_counter() - start, size)
        except Exception as error:
            words = str(error).strip() or type(error).__name__
            answer = Answer(
                time.perf_counter() - start, error=f"{type(error).__name__}: {words[-4000:]}"
            )
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


def make(key: CompileKey, target: Target) -> int:
    """Put the kernel ``key`` on disk and return its size in bytes; one process a kernel, the others find it."""
    from fxwarm import locks
    from fxwarm.families.tilelang import index
    from fxwarm.families.tilelang.compiled import get_kernel

    name = index.path_of(key, target).stem
    with locks.hold(_lock_folder(), name, f"the build of {key}"):
        get_kernel(key, target)
    entry = index.read(key, target)
    return index.size_of(index.folder_of(entry)) if entry is not None else 0


def _lock_folder() -> Path:
    from fxwarm.families.tilelang import index

    return index.root() / "fxwarm" / "locks"


def main() -> None:
    """Serve the parent, with everything that libraries print on stdout sent to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
