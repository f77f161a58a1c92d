"""Builds modules through the library's own specs, with no more jobs at a time than memory allows."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fxwarm import exc, slots
from fxwarm.beside import Beside
from fxwarm.families.flashinfer import upstream
from fxwarm.families.flashinfer.keys import MODULE
from fxwarm.families.flashinfer.library import nvcc
from fxwarm.records import Built, Planned

__all__ = ["available_bytes", "build", "jobs_that_fit", "patience", "shorten"]

_GIB = 1 << 30
# nvcc's peak for one translation unit: 7.5 GB was measured for fused_moe_90 (0.6.18.post1, nvcc 13.0); the other
# modules stayed below 3
_PEAK = {"fused_moe": int(7.5 * _GIB)}
_PEAK_ELSEWHERE = 3 * _GIB
_SOURCES = 247
_SECONDS = 157
"""CPU seconds of one translation unit of fused_moe_90; those of the other modules took up to 60."""
_environment = threading.Lock()
"""Held by who has set MAX_JOBS: nobody else is to take it for the user's."""
_TELLING = re.compile(r"\berror\b|fatal|undefined reference|cannot find", re.IGNORECASE)


def build(planned: Sequence[Planned], jobs: int) -> Iterator[Built]:
    """Build each planned module that is missing, small ones side by side, ``jobs`` translation units at a time.

    Tuned entries and block-scale kernels are nothing that can be built ahead: they are left to ``tune`` and ``load``.
    """
    wanted = [p for p in planned if p.key.tag == MODULE]
    large = [p for p in wanted if p.key.kernel.startswith("fused_moe")]
    small = [p for p in wanted if p not in large]
    for group in (small, *([p] for p in large)):
        if group:
            yield from _build_group(group, jobs)


def _build_group(group: Sequence[Planned], jobs: int) -> Iterator[Built]:
    """Build modules side by side, a ninja each; yield them as they finish."""
    with _environment:
        fitting = min(jobs_that_fit(p.key.kernel, jobs, available_bytes()) for p in group)
        workers = min(len(group), fitting)
        todo, done = collections.deque(group), queue.SimpleQueue[Built]()

        def run() -> None:
            with contextlib.suppress(IndexError):  # none is left
                while True:
                    done.put(_build_one(todo.popleft()))

        with (
            slots.take(jobs, fitting),
            _max_jobs(max(1, fitting // workers)),
            contextlib.ExitStack() as ends,
        ):
            for _ in range(workers):
                ends.callback(Beside(run).join)
            ends.callback(todo.clear)
            for _ in group:
                yield done.get()


def _build_one(planned: Planned) -> Built:
    begin = time.perf_counter()
    try:
        size = _build(planned.key.kernel)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        text = str(upstream.not_writable(error))
        return Built(planned.key, time.perf_counter() - begin, error=text)
    except Exception as error:
        return Built(planned.key, time.perf_counter() - begin, error=shorten(error))
    return Built(planned.key, time.perf_counter() - begin, size)


def jobs_that_fit(name: str, jobs: int, memory: int) -> int:
    """Return how many translation units of module ``name`` may compile at once in ``memory`` bytes: at least one."""
    peak = next((size for start, size in _PEAK.items() if name.startswith(start)), _PEAK_ELSEWHERE)
    named = os.environ.get("MAX_JOBS", "")
    most = min(jobs, int(named)) if named.isdigit() and int(named) else jobs
    return max(1, min(most, memory // peak))


def patience(name: str, jobs: int) -> float:
    """Return the seconds after which the build of ``name`` counts as stuck: 4 times what its sources should take."""
    count = _SOURCES if name.startswith("fused_moe") else 8
    return 4 * _SECONDS * -(-count // jobs_that_fit(name, jobs, available_bytes()))


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may still take: of the machine, or of its container where that is less."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(
            int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
        )
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            found.append(int((root / limit).read_text()) - int((root / used).read_text()))
    return max(0, min(found, default=8 * _GIB))


def _build(name: str) -> int:
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        raise exc.LibraryError(
            f"FLASHINFER_DISABLE_JIT is set, so {name} cannot be built; unset it, or install flashinfer-jit-cache"
        )
    spec = upstream.make_spec(
        name
    )  # once: that of fused_moe_90 writes 247 sources, 5 s on two cores
    if not spec.is_aot:
        if shutil.which("ninja") is None:
            raise exc.LibraryError(
                f"ninja is not on PATH, so {name} cannot be built; pip install ninja"
            )
        if not nvcc():
            raise exc.LibraryError(
                f"there is no nvcc, so {name} cannot be built; set CUDA_HOME to a CUDA toolkit"
            )
        spec.build(need_lock=True)
    built = Path(spec.get_library_path())
    if not built.is_file() or not built.stat().st_size:
        raise exc.LibraryError(
            f"ninja ended well but left no {name}.so; see flashinfer_jit.log in the workspace"
        )
    return built.stat().st_size


@contextlib.contextmanager
def _max_jobs(number: int) -> Iterator[None]:
    """Set MAX_JOBS, which the library reads when it starts ninja, while modules are built."""
    before = os.environ.get("MAX_JOBS")
    os.environ["MAX_JOBS"] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ["MAX_JOBS"]
        else:
            os.environ["MAX_JOBS"] = before


def shorten(error: Exception) -> str:
    """Return the compiler's own words: of ninja's output, long command lines, the lines that say what failed."""
    lines = str(error).splitlines() or [""]
    telling = [line for line in lines if line.startswith("FAILED") or _TELLING.search(line)]
    chosen = lines[:1] + (telling or lines[1:])[:8]
    return f"{type(error).__name__}: " + "\n".join(line[:300] for line in chosen)
