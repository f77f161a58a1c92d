"""Compile recorded sources with the real nvcc, in parallel, straight into the library's cache.

Nothing is launched and no library is imported: a source, its flags and its entry's name are all it
takes. One builder an entry across processes: the others wait for it and use what it made.
Qwen3-30B-A3B-FP8: 36 kernels in 11.0 s on 16 cores, 130 s one after the other (H200, nvcc 13.0).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fxwarm import exc, locks, slots
from fxwarm.families.deep_gemm import cache, toolchain
from fxwarm.families.deep_gemm.cache import Roots
from fxwarm.families.deep_gemm.toolchain import Compiler
from fxwarm.records import Built, CompileKey, Planned, Source

__all__ = ["build", "by_cost"]

log = logging.getLogger(__name__)

TIMEOUT = 300.0
"""Seconds after which one compile is given up: the slowest seen took 8.1 s (H200, nvcc 13.0)."""
_KINDS = {"B": ("--cubin", "--output-file"), "A": ("-cubin", "-o")}
BLOCKS = {"1d2d": (5, 6), "1d1d": (4, 5), "bf16_gemm": (6, 7)}
"""Where block_m and block_n stand in the templates of the slow kernels."""
SLOW_BLOCK_N = {160: 3.5, 192: 2.2, 96: 1.3}
"""Seconds that kernels of these block_n take beyond the others, which take 2.5 to 4 (36 kernels of Qwen3-30B-A3B-FP8,
sgl-deep-gemm 0.1.5.post1, nvcc 13.0: 7.9, 6.3 and 4.5 s at most; a layout kernel takes 0.7)."""


def build(
    planned: Iterable[Planned],
    where: Roots,
    compiler: Compiler,
    *,
    jobs: int,
    timeout: float = TIMEOUT,
) -> Iterator[Built]:
    """Build every source, the slowest first, ``jobs`` at a time; yield each as it is done.

    ``planned`` may still be growing (the recorder names kernels one by one): what is known is built
    meanwhile. An error says what the compiler said; the others go on. A compiler that is too old for
    an architecture is refused before anything runs. Closing the generator ends what still runs.
    """
    work = Work(where, compiler, timeout)
    todo: queue.PriorityQueue[tuple[float, int, Planned | None]] = queue.PriorityQueue()
    done: queue.SimpleQueue[Built | BaseException | None] = queue.SimpleQueue()

    def feed() -> None:
        try:
            if isinstance(planned, Sequence):
                for place, p in enumerate(_own_start(by_cost(planned))):
                    todo.put((0.0, place, p))
            else:
                for place, p in enumerate(planned):
                    todo.put((-_cost(p.key), place, p))
        except BaseException as error:  # it is the caller's iterable: the caller hears of it
            done.put(error)
        finally:
            for worker in range(jobs):
                todo.put((math.inf, worker, None))

    def run() -> None:
        while (p := todo.get()[2]) is not None:
            with slots.take(jobs):
                built = _build_one(p, work)
            done.put(built)
        done.put(None)

    jobs = max(1, jobs)
    threads = [threading.Thread(target=run, name="fxwarm-nvcc", daemon=True) for _ in range(jobs)]
    for thread in (threading.Thread(target=feed, name="fxwarm-feed", daemon=True), *threads):
        thread.start()
    try:
        left = jobs
        while left:
            item = done.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        work.stop()
        for worker in range(jobs):
            todo.put((-math.inf, worker, None))
        for thread in threads:
            thread.join()


def _build_one(planned: Planned, work: Work) -> Built:
    if planned.source is None:
        return Built(planned.key, error="no source was recorded; it is compiled when it is loaded")
    flag = next((f for f in planned.source.flags if f.startswith("--gpu-architecture=")), "")
    try:
        toolchain.check(work.compiler, flag.partition("=")[2] or "sm_90a", work.where.generation)
    except exc.LibraryError as error:
        return Built(planned.key, error=str(error))
    try:
        return work.build(planned.key, planned.source)
    except Exception as error:  # a worker must not end before its turn is told
        return Built(planned.key, error=f"{type(error).__name__}: {error}")


def by_cost(planned: Sequence[Planned]) -> list[Planned]:
    """Return the kernels, those that take longest to compile first."""
    return sorted(planned, key=lambda p: -_cost(p.key))


def _cost(key: CompileKey) -> float:
    """Return about how many CPU seconds nvcc takes: what ends last has to begin first."""
    for kind, (m, n) in BLOCKS.items():
        if kind in key.kernel and len(key.template) > n:
            try:
                block_m, block_n = int(key.template[m]), int(key.template[n])
            except ValueError:
                return 0.0
            slow = SLOW_BLOCK_N.get(block_n, 0.0) if kind == "1d2d" else 0.0
            return 2.5 + block_m * block_n / 30_000 + slow
    return 0.0


def _own_start(planned: Sequence[Planned]) -> list[Planned]:
    """Ranks of one machine begin at different kernels, so that they do not wait for each other."""
    rank, ranks = (
        int(os.environ.get(n, d)) for n, d in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    at = len(planned) * rank // max(ranks, 1) if 0 <= rank < ranks else 0
    return [*planned[at:], *planned[:at]]


class Work:
    """The compiles of one ``build``: what runs now, so that all of it can be ended."""

    def __init__(self, where: Roots, compiler: Compiler, timeout: float) -> None:
        self.where, self.compiler, self.timeout = where, compiler, timeout
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def build(self, key: CompileKey, source: Source) -> Built:
        """Build one entry under its lock, unless it is there by then."""
        begin = time.perf_counter()

        def built(error: str = "") -> Built:
            folder = None if error else cache.find(self.where, source.entry)
            size = (folder / cache.CUBIN).stat().st_size if folder is not None else 0
            return Built(key, time.perf_counter() - begin, size, error)

        if self._stopped:
            return built("the build was ended before this kernel's turn")
        try:
            if cache.find(self.where, source.entry) is not None:
                return built()
            with locks.hold(self.where.write / "fxwarm", source.entry, str(key)):
                if cache.find(self.where, source.entry) is not None:
                    return built()  # another process made it while we waited
                with cache.scratch(self.where) as room:
                    error = self._compile(room, source)
                    if not error:
                        cache.publish(room / "entry", source.entry, self.where)
                return built(error)
        except OSError as error:
            return built(
                f"{self.where.write} cannot be written ({error}); make room there, or set "
                "DG_JIT_CACHE_DIR to another folder"
            )

    def stop(self) -> None:
        """End every running compile with all its children."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _kill(process)

    def _compile(self, room: Path, source: Source) -> str:
        """Compile into ``room/entry``; return the error, empty on success."""
        entry, empty = room / "entry", room / "cwd"
        entry.mkdir()
        empty.mkdir()  # files of the working folder could shadow standard headers
        code, cubin = entry / cache.CODE, entry / cache.CUBIN
        code.write_text(source.code)
        kind, output = _KINDS[self.where.generation]
        command = [str(self.compiler.path), str(code), kind, output, str(cubin), *source.flags]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=empty,
            start_new_session=True,
        )
        with self._lock:
            self._running.add(process)
            stopped = self._stopped
        try:
            if stopped:
                _kill(process)
            words, _ = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            return (
                f"{self.compiler} took more than {self.timeout:.0f} s; raise fxwarm.build_timeout"
            )
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode:
            return f"{self.compiler} gave exit code {process.returncode}: {words.strip()[-2000:]}"
        if not cache.is_whole_elf(cubin):
            return f"{self.compiler} succeeded but wrote no whole cubin; is the disk full?"
        return ""


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
