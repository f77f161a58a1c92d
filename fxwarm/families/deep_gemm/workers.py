"""Build in NVRTC mode: worker processes launch the witnesses, and the library compiles into its own disk cache.

In that mode the library compiles in process, so no compiler can be stood in for and none can be run beside it. Only
generation A has the mode, and it keeps the same disk cache as with nvcc, under other names: what a worker has compiled
is found there by every process. A compile that fails leaves a cubin of 0 bytes, which the library would take for ever
after; such a kernel, and only that, is compiled by nvcc into the same entry (DeepGEMM#359).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from fxwarm import exc
from fxwarm.families.deep_gemm import cache, inputs, presence, toolchain
from fxwarm.families.deep_gemm.build import build as build_with_nvcc
from fxwarm.families.deep_gemm.cache import Roots
from fxwarm.families.deep_gemm.worker_pool import CONTEXT, Job, Outcome, Pool
from fxwarm.records import Built, CompileKey, Planned, Source

__all__ = ["build", "count"]

log = logging.getLogger(__name__)


def build(planned: Sequence[Planned], job: Job) -> Iterator[Built]:
    """Compile each kernel by a launch in a worker; yield each as it is done, last those that took nvcc.

    What cannot be launched in ``job.memory`` is not yielded: it is left to the load, which knows the model's weights.
    So is what the library refuses, with its own words. A kernel at which a worker dies or hangs fails by name.
    Raises LibraryError if no worker starts. Closing the generator ends the workers.
    """
    clear_damaged(planned, job.where)
    workers, fitting = count(planned, job)
    if len(fitting) < len(planned):
        log.warning(
            "fxwarm: %d of %d kernels are compiled one by one when they are loaded: a worker takes %d bytes of device "
            "memory beside a witness, and fxwarm.memory is %d",
            len(planned) - len(fitting), len(planned), CONTEXT, job.memory,
        )  # fmt: skip
    if not fitting:
        return
    flags: dict[CompileKey, tuple[str, ...]] = {}
    while fitting:
        failed: list[Outcome] = []
        refused: list[Outcome] = []
        for outcome in Pool(fitting, job, workers).run():
            key = outcome.planned.key
            if outcome.lost:
                yield Built(key, outcome.seconds, error=outcome.error)
            elif folder := presence.held([outcome.planned], job.where).get(key):
                yield Built(key, outcome.seconds, (folder / cache.CUBIN).stat().st_size)
            else:
                (failed if key in _damaged(job.where) else refused).append(outcome)
        helped = False
        for built in _with_nvcc(failed, _words(failed, refused), job, planned, flags):
            helped = helped or not built.error
            yield built
        # a call needs its layout kernel first: where that failed, its GEMM was not even tried
        fitting = [o.planned for o in refused] if helped else []
    for outcome in refused:
        log.info("fxwarm: %s is left to the load: %s", outcome.planned.key, outcome.error)


def count(planned: Sequence[Planned], job: Job) -> tuple[int, list[Planned]]:
    """Return how many workers to start, and the kernels that one of them can launch.

    As many as ``job.jobs`` allows and as ``job.memory`` holds, each with its context and the largest of the witnesses.
    """
    needs = [
        (p, CONTEXT + inputs.bytes_of(inputs.legal(p.witness, job.alignment)))
        for p in planned
        if p.witness is not None
    ]
    fitting = [(p, need) for p, need in needs if need <= job.memory]
    largest = max((need for _, need in fitting), default=job.memory + 1)
    workers = min(job.jobs, len(fitting), job.memory // largest)
    return workers, [p for p, _ in fitting]


def clear_damaged(planned: Sequence[Planned], where: Roots) -> None:
    """Remove the damaged entries of these kernels: the library takes what has the right name, whatever is in it."""
    keys = {p.key for p in planned}
    for key, folders in _damaged(where).items():
        for folder in folders if key in keys else ():
            cache.set_aside(folder, where)


def _damaged(where: Roots) -> dict[CompileKey | None, list[Path]]:
    """Return the damaged entries by what their sources instantiate."""
    found: dict[CompileKey | None, list[Path]] = {}
    for name, folder in cache.damaged(where).items():
        found.setdefault(presence.key_of_entry(name, folder), []).append(folder)
    return found


def _with_nvcc(
    failed: Sequence[Outcome],
    said: Mapping[CompileKey, str],
    job: Job,
    planned: Sequence[Planned],
    flags: dict[CompileKey, tuple[str, ...]],
) -> Iterator[Built]:
    """Compile what NVRTC could not, into the entries that NVRTC mode looks up; their sources are the library's own.

    ``flags`` keeps the flags of all of ``planned`` from one time to the next.
    """
    if not failed:
        return
    todo, entries = [], _damaged(job.where)
    try:
        compiler = toolchain.find_compiler(job.where.generation)
        if not flags:
            flags.update(_nvcc_flags(planned, job))
        for outcome in failed:
            key = outcome.planned.key
            if key not in flags:
                yield Built(key, outcome.seconds, error=said[key])
                continue
            log.warning("fxwarm: NVRTC cannot compile %s, nvcc is tried: %s", key, said[key])
            for folder in entries.get(key, ()):  # another process may have mended it
                source = Source(folder.name, (folder / cache.CODE).read_text(), flags[key])
                todo.append(Planned(key, outcome.planned.witness, source))
    except (exc.LibraryError, OSError) as error:
        for key, words in said.items():
            yield Built(key, error=f"{words}; nvcc: {error}")
        return
    for built in build_with_nvcc(todo, job.where, compiler, jobs=job.jobs, timeout=job.timeout):
        both = f"{said[built.key]}; nvcc: {built.error}" if built.error else ""
        yield msgspec.structs.replace(built, error=both)


def _words(failed: Sequence[Outcome], refused: Sequence[Outcome]) -> dict[CompileKey, str]:
    """Return what NVRTC said of each kernel that it could not compile.

    A layout kernel may have been compiled first for the call of another, which then heard the compiler's words.
    """
    heard = next((o.words for o in refused if o.words), "")
    return {o.planned.key: f"NVRTC: {(o.words or heard or o.error)[-2000:]}" for o in failed}


def _nvcc_flags(planned: Sequence[Planned], job: Job) -> dict[CompileKey, tuple[str, ...]]:
    """Return the flags that the library gives to nvcc for each kernel: it is asked, as it would be without NVRTC."""
    from fxwarm.families.deep_gemm.recorder import Recorder

    recorder = Recorder(job.target, job.found)
    try:
        asked = recorder.record([p.witness for p in planned if p.witness is not None])
        return {
            p.key: p.source.flags for p in asked if isinstance(p, Planned) and p.source is not None
        }
    finally:
        recorder.close()
