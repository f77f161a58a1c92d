"""DeepGEMM as a ``KernelFamily``: wires the modules of this room together."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fxwarm import exc
from fxwarm.families.deep_gemm import cache, library, match, presence, toolchain
from fxwarm.records import Built, CompileKey, Library, Loaded, Planned, Target
from passes.records import Gap, KernelCall

if TYPE_CHECKING:
    from passes.flatten import OpCall

__all__ = ["DeepGemm"]

log = logging.getLogger(__name__)


class DeepGemm:
    """DeepGEMM, whatever its distribution: sgl-deep-gemm, tokenspeed-deepgemm, upstream, vendored.

    ``memory`` is the device memory that loading may use at once, in bytes, and ``timeout`` the
    seconds that one compile may take; None takes ``fxwarm.memory`` and ``fxwarm.build_timeout``.
    """

    name = "deep_gemm"
    distributions = library.DISTRIBUTIONS
    devices = ("cuda",)
    activations = (
        "a", "a_sf", "c", "d", "sqr_sum", "grouped_layout", "masked_m", "ks", "q", "q_sf",
        "kv", "kv_sf", "kv_cache", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "context_lens", "block_table",
        "schedule_meta", "indices",
    )  # fmt: skip
    archs = ("sm_90a",)
    """Seen to work on an H200; the rules for SM100 were checked against compiled code only."""

    def __init__(self, memory: int | None = None, timeout: float | None = None) -> None:
        self.memory, self.timeout = memory, timeout
        self._before: frozenset[str] | None = None
        self._late = ""
        """What to say of a kernel that does not load after the library was told of another cache, maybe too late."""
        self._built: set[str] = set()
        """Entries that other graphs' builds may add while one graph is verified."""

    def __repr__(self) -> str:
        return "DeepGemm()"

    def match(self, op: OpCall) -> Iterable[KernelCall | Gap]:
        """Return the DeepGEMM calls that ``op`` makes; see ``match``."""
        return match.match(op)

    def library(self, wanted: Mapping[str, str]) -> Library:
        """Return the build to plan for. Raises LibraryError for an unknown wanted version."""
        return library.find_library(wanted)

    def keys(
        self, calls: Sequence[KernelCall], target: Target, library: Library
    ) -> Iterable[Planned | Gap]:
        """Return each kernel that ``calls`` can need, by the modelled heuristics."""
        return _modelled(tuple(calls), target, library)

    def needs_nothing(self, call: KernelCall, target: Target, library: Library) -> bool:
        """Return whether the library serves ``call`` without a kernel of its own (dense bf16 by cuBLASLt)."""
        from fxwarm.families.deep_gemm.keys import goes_to_cublaslt

        return goes_to_cublaslt(call, target, library)

    def prepare(self, target: Target, library: Library) -> None:
        """Start the recorder's child in the background; a failure shows when it is asked."""
        if target.device != "cuda" or not library.installed:
            return
        if toolchain.uses_nvrtc(_generation(library)):
            return  # nobody will ask
        from fxwarm.families.deep_gemm.recorder import recorder_for

        recorder = recorder_for(target, library)

        def start() -> None:
            try:
                recorder.start()
            except Exception as error:
                log.debug("fxwarm: the recorder did not start: %s", error)

        threading.Thread(target=start, name="fxwarm-recorder", daemon=True).start()

    def record(
        self, calls: Sequence[KernelCall], target: Target, library: Library
    ) -> Iterable[Planned | Gap]:
        """Yield each kernel that the library itself asks for. Raises LibraryError if it cannot say.

        Nothing is yielded where it compiles through NVRTC: there the model serves, and workers build.
        """
        from fxwarm.families.deep_gemm.build import by_cost
        from fxwarm.families.deep_gemm.recorder import recorder_for
        from fxwarm.families.mhc import splits

        if toolchain.uses_nvrtc(_generation(library)):
            log.info("fxwarm: DG_JIT_USE_NVRTC is set: DeepGEMM's kernels are planned by the model")
            return
        modelled = [p for p in self.keys(calls, target, library) if isinstance(p, Planned)]
        resolved = [splits.resolve(call, target.num_sms) for call in calls]
        recorder = recorder_for(target, library)
        yield from recorder.record(resolved, memory=self._memory(), first=by_cost(modelled))

    def label(self, key: CompileKey) -> str:
        """Return what a picture calls the kernel: its tile (block_m by block_n), its splits, or its name."""
        from fxwarm.families.deep_gemm.build import BLOCKS

        if "prenorm" in key.kernel and len(key.template) > 5:
            return f"{key.template[5]} splits"
        for kind, (m, n) in BLOCKS.items():
            if kind in key.kernel and len(key.template) > n:
                return f"{key.template[m]}\N{MULTIPLICATION SIGN}{key.template[n]}"
        return key.kernel

    def drift(self, modelled: Sequence[Planned], recorded: Sequence[Planned]) -> list[str]:
        """Return where the model and the library disagree."""
        from fxwarm.families.deep_gemm.recorder import compare

        return compare(modelled, recorded)

    def missing(self, planned: Sequence[Planned], target: Target) -> list[Planned]:
        """Return those that the library's disk cache lacks, or holds damaged."""
        found = presence.held(planned, self._roots())
        return [p for p in planned if p.key not in found]

    def folder(self, target: Target) -> Path:
        """Return the folder that new entries go to."""
        return self._roots().write

    def cached(self, planned: Sequence[Planned]) -> list[Path]:
        """Return the binaries of the library's cache that hold these kernels."""
        found = presence.held(planned, self._roots())
        return [found[p.key] / cache.CUBIN for p in planned if p.key in found]

    def build(self, planned: Iterable[Planned], target: Target, jobs: int) -> Iterator[Built]:
        """Compile recorded sources into the library's cache, also while they are still recorded; see ``build``.

        Kernels without a source are left to ``load``, which makes the library compile them; in NVRTC mode, where
        none has one, to ``workers``.
        """
        from fxwarm.families.deep_gemm.build import TIMEOUT, build

        found = library.find_library({})
        generation = _generation(found)
        if toolchain.uses_nvrtc(generation):
            yield from self._build_by_workers([*planned], target, found, jobs)
            return
        if isinstance(planned, Sequence) and not any(p.source for p in planned):
            return
        sourced = self._sourced(planned)
        try:
            compiler = toolchain.find_compiler(generation)
            toolchain.check(compiler, target.arch or "sm_90a", generation)
            needed = toolchain.needs_cuobjdump(library.heuristics_of(found))
            toolchain.check_cuobjdump(compiler, needed=needed)
        except exc.LibraryError as error:
            for p in sourced:
                yield Built(p.key, error=str(error))
            return
        where = self._writable(generation)
        timeout = self.timeout or _option("build_timeout", TIMEOUT)
        ready = [*sourced] if isinstance(planned, Sequence) else sourced
        yield from build(ready, where, compiler, jobs=jobs, timeout=timeout)

    def _build_by_workers(
        self, planned: Sequence[Planned], target: Target, found: Library, jobs: int
    ) -> Iterator[Built]:
        from fxwarm.families.deep_gemm import worker_pool, workers
        from fxwarm.families.deep_gemm.build import TIMEOUT

        generation = _generation(found)
        job = worker_pool.Job(
            target,
            found,
            self._writable(generation),
            jobs,
            self._memory(),
            self.timeout or _option("build_timeout", TIMEOUT),
            _alignment(found.module),
        )
        left = {p.key: p for p in planned}
        try:
            for built in workers.build(planned, job):
                one = left.pop(built.key, None)
                if one is None:  # a kernel may have had several damaged entries
                    continue
                mine = presence.held([one], job.where)
                self._built.update(folder.name for folder in mine.values())
                yield built
        except exc.LibraryError as error:
            yield from (Built(key, error=str(error)) for key in left)

    def _writable(self, generation: str) -> cache.Roots:
        """Return the cache that the library will write to: where it cannot, it is told of another.

        It reads the variable at its first JIT. Nothing shows whether that has been, once it is imported.
        """
        given = self._roots(generation)
        where = cache.writable(given)
        if where != given:
            if library.live_module(library.module_name() or ""):
                self._late = (
                    f"DeepGEMM may have taken {given.write}, which cannot be written, before fxwarm named another "
                    "folder: set DG_JIT_CACHE_DIR to one that can be written before its first call"
                )
            os.environ.update(cache.environment(where))
        return where

    def _sourced(self, planned: Iterable[Planned]) -> Iterator[Planned]:
        for p in planned:
            if p.source is not None:
                self._built.add(p.source.entry)
                yield p

    def load(self, planned: Sequence[Planned], target: Target, bind: Any) -> Iterator[Loaded]:
        """Launch each kernel's witness once on the current device; see ``load``."""
        from fxwarm.families.deep_gemm.load import load

        name = library.module_name()
        if name is None:
            words = "DeepGEMM is not installed here; install sgl-deep-gemm or another build of it"
            yield from (Loaded(p.key, error=words) for p in planned)
            return
        if self.missing(planned, target):
            self._writable(_generation(library.find_library({})))  # what is left it compiles itself
        if self._before is None:
            self._before = frozenset(cache.entries(self._roots()))
        try:
            module = importlib.import_module(name)
        except Exception as error:
            words = (
                f"{name} does not import ({type(error).__name__}: {error}); it wants a CUDA toolkit "
                "even for kernels that are cached: set CUDA_HOME before the program starts"
            )
            yield from (Loaded(p.key, error=words) for p in planned)
            return
        for loaded in load(
            planned, module, bind, memory=self._memory(), alignment=_alignment(name)
        ):
            late = f"; {self._late}" if loaded.error and self._late else ""
            yield msgspec.structs.replace(loaded, error=loaded.error + late)

    def verify(self, planned: Sequence[Planned]) -> list[Gap]:
        """Return a gap for each entry that came into the cache since loading began, unplanned."""
        if self._before is None:
            return []
        known, self._before = self._before | self._built, None
        new = {n: f for n, f in cache.entries(self._roots()).items() if n not in known}
        return presence.unplanned(new, planned)

    def watch(self, report: Callable[..., None]) -> Callable[[], None] | None:
        """Report builds and first loads after warmup; None where the library is not imported. See ``watch``."""
        from fxwarm.families.deep_gemm.watch import watch

        name = library.module_name()
        return watch(self._roots(), report) if name is not None and name in sys.modules else None

    def _roots(self, generation: str | None = None) -> cache.Roots:
        return cache.roots(generation or _generation(library.find_library({})))

    def _memory(self) -> int:
        given = self.memory or int(_option("memory", 0))
        if given:
            return given
        import torch

        if not torch.cuda.is_available():
            return 1 << 30
        return int(torch.cuda.mem_get_info()[0]) // 2


@functools.lru_cache(maxsize=8)
def _modelled(
    calls: tuple[KernelCall, ...], target: Target, library: Library
) -> tuple[Planned | Gap, ...]:
    """What the model says, once for the plan and once for the order in which the library is asked."""
    from fxwarm.families.deep_gemm.keys import keys

    return tuple(keys(calls, target, library))


def _generation(found: Library) -> str:
    return dict(found.settings).get("generation", "A")


def _alignment(module: str) -> int:
    return int(library.live_settings(module).get("mk_alignment", "128"))


def _option(name: str, default: float) -> float:
    from fxwarm import options

    return float(getattr(options.active(), name, default) or default)
