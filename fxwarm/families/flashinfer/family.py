"""The family: what the rest of fxwarm sees of this room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxwarm.families.flashinfer import cache, keys
from fxwarm.families.flashinfer.library import DISTRIBUTION, find_library
from fxwarm.families.flashinfer.match import FAMILY, match
from fxwarm.families.flashinfer.tuner_key import bucket_in, is_tuned
from fxwarm.records import Built, CompileKey, Library, Loaded, Planned, Target, Tuned
from passes.records import Gap, KernelCall

if TYPE_CHECKING:
    from fxwarm.families.flashinfer.together import Reduce
    from fxwarm.family import Bind

__all__ = ["FlashInfer"]


class FlashInfer:
    """FlashInfer's fused MoE on SM90, ``mono_moe`` and ``bmm_fp8``; SM100's MoE ops are planned and keyed, not run."""

    name = FAMILY
    distributions = (DISTRIBUTION,)
    devices = ("cuda",)
    activations = (
        "input", "token_selected_experts", "token_final_scales", "input_sf", "A", "A_scale", "activations_in",
        "router_logits", "routing_logits", "hidden_states", "hidden_states_scale", "x", "a", "a_sf",
    )  # fmt: skip

    def __init__(self) -> None:
        self._arch = "sm_90a"
        self._strange: set[str] = set()
        self._loaded: set[str] = set()

    def match(self, op: Any) -> Iterable[KernelCall | Gap]:
        """Return the calls of FlashInfer that ``op`` makes; pure."""
        return match(op)

    def library(self, wanted: Mapping[str, str]) -> Library:
        """Return the build to plan for. Raises LibraryError for a named version that is unknown and absent."""
        return find_library(wanted)

    def keys(
        self, calls: Sequence[KernelCall], target: Target, library: Library
    ) -> Iterable[Planned | Gap]:
        """Return each module, tuned entry and kernel that ``calls`` can need; pure."""
        return keys.keys(calls, target, library)

    def missing(self, planned: Sequence[Planned], target: Target) -> list[Planned]:
        """Return those whose shared object, stored tactic or cubin is not on disk."""
        self._arch = target.arch or self._arch
        tactics: set[str] | None = None
        lacking = []
        for p in planned:
            if p.key.tag == keys.MODULE:
                here = cache.find_module(p.key.kernel, target.arch) is not None
            elif is_tuned(p.key):
                from fxwarm.families.flashinfer import stored

                if tactics is None:
                    path = stored.path_of(planned, self._arch)
                    tactics = cache.read_tactics(cache.tactics_files(path))
                here = p.witness is not None and stored.entry_of(p, target.arch).file_key in tactics
            else:
                here = cache.block_kernel(p.key.tag).is_file()
            if not here:
                lacking.append(p)
        return lacking

    def build(self, planned: Sequence[Planned], target: Target, jobs: int) -> Iterable[Built]:
        """Build modules by ninja, with as many jobs as memory allows; launch nothing."""
        from fxwarm.families.flashinfer import modules

        return modules.build(planned, jobs)

    def label(self, key: CompileKey) -> str:
        """Return what a picture calls a tuned entry: its bucket. The rest is told apart by its arguments."""
        return str(bucket_in(key)) if is_tuned(key) else ""

    def builds(self, key: CompileKey) -> bool:
        """Return whether ``build`` makes ``key``: modules alone. The rest is tuned, or compiled at its first call."""
        return key.tag == keys.MODULE

    def patience(self, key: CompileKey, jobs: int) -> float:
        """Return how long the build of a module may take, in seconds."""
        from fxwarm.families.flashinfer import modules

        return modules.patience(key.kernel, jobs)

    def folder(self, target: Target) -> Path:
        """Return where modules lie: ranks that see this folder share them."""
        return cache.workspace(target.arch)

    def tune(
        self, planned: Sequence[Planned], bind: Bind, reduce: Reduce | None = None
    ) -> Iterable[Tuned]:
        """Fill the tuner's table, or read what an earlier start stored. With ``reduce``, together with other ranks."""
        from fxwarm.families.flashinfer import together, tuning

        if reduce is not None:
            return together.tune(planned, self._arch, bind, reduce)
        return tuning.tune(planned, self._arch, bind)

    def tactics(self, planned: Sequence[Planned]) -> Mapping[CompileKey, str]:
        """Return the tactic, as JSON, that is held for each planned entry."""
        from fxwarm.families.flashinfer import together

        return together.tactics(planned, self._arch)

    def common(self, key: CompileKey) -> CompileKey:
        """Return ``key`` as every rank of a model has it: without the rank."""
        from fxwarm.families.flashinfer import together

        return together.common(key)

    def load(self, planned: Sequence[Planned], target: Target, bind: Bind) -> Iterable[Loaded]:
        """Open each module and make each distinct call once."""
        from fxwarm.families.flashinfer.load import is_block_scale, load_kernels

        self._arch = target.arch or self._arch
        self._loaded |= {p.key.tag for p in planned}
        before = cache.block_kernels() if any(map(is_block_scale, planned)) else set()
        yield from load_kernels(planned, target.arch, bind)
        if any(map(is_block_scale, planned)):
            self._strange |= cache.block_kernels() - before - {p.key.tag for p in planned}

    def verify(self, planned: Sequence[Planned]) -> list[Gap]:
        """Return a gap for each tuned entry that a call would not find, and each kernel compiled beside the plan."""
        from fxwarm.families.flashinfer import tuning

        gaps = tuning.verify(planned, self._arch)
        for name in sorted(self._strange - {p.key.tag for p in planned}):
            gaps.append(
                Gap(
                    FAMILY,
                    f"the library compiled {name}, which was not planned; report it",
                    family=FAMILY,
                )
            )
        return gaps

    def cached(self, planned: Sequence[Planned]) -> list[Path]:
        """Return the shared objects, the tactics file and the cubins that hold these kernels."""
        from fxwarm.families.flashinfer import stored

        found: dict[Path, None] = {}
        for p in planned:
            if p.key.tag == keys.MODULE:
                path = cache.find_module(p.key.kernel, self._arch)
            elif is_tuned(p.key):
                path = stored.path_of(planned, self._arch)
            else:
                path = cache.block_kernel(p.key.tag)
            if path is not None and path.is_file():
                found[path] = None
        return list(found)

    def watch(self, report: Callable[..., None]) -> Callable[[], None] | None:
        """Report builds and loads after warmup; None where the library is not imported. See ``watch``."""
        from fxwarm.families.flashinfer.watch import watch

        return watch(report, self._loaded)

    def falls_back(self, key: CompileKey) -> bool:
        """Return whether a call that lacks ``key`` runs a default tactic instead of compiling."""
        return is_tuned(key)
