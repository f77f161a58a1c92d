"""TileLang: kernels written in Python, compiled for each set of static arguments at their first call.

In the order of a warmup:

    match    -> which mHC (or declared) op is it, and what decides its kernels
    keys     -> every set of statics that the token counts can lead to
    missing  -> which of them the disk cache lacks, without elaborating anything
    build    -> compile those in worker processes, nothing launched
    load     -> put each where its factory looks first, and launch it once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fxwarm.families.tilelang.declarations import check_factory, declare, of, undeclare
from fxwarm.families.tilelang.statics import FAMILY

if TYPE_CHECKING:
    from pathlib import Path

    from fxwarm.records import Built, CompileKey, Library, Loaded, Planned, Target
    from passes.records import Gap, KernelCall

__all__ = ["TileLang", "declare", "of", "undeclare"]


class TileLang:
    """The family of TileLang kernels: mHC ops (fxwarm's and vLLM's), and whatever ``declare`` names."""

    name = FAMILY
    distributions = ("tilelang", "tile-kernels")
    archs = ("", "sm_90a")
    """Seen to work: the CPU, and Hopper on an H200."""

    def __init__(self) -> None:
        self._targets: dict[CompileKey, Target] = {}

    @property
    def devices(self) -> tuple[str, ...]:
        """Where these ops compile; on a CPU without TileLang they run as references."""
        from fxwarm.ops.mhc_factories import has_tilelang

        return ("cuda", "cpu") if has_tilelang() else ("cuda",)

    def match(self, op: Any) -> Iterable[KernelCall | Gap]:
        """Return the TileLang calls that ``op`` makes; empty if it is none of ours."""
        from fxwarm.families.tilelang.match import match

        return match(op)

    def library(self, wanted: Mapping[str, str]) -> Library:
        """Return the TileLang to plan for."""
        from fxwarm.families.tilelang.library import get_library

        return get_library(wanted)

    def keys(
        self, calls: Sequence[KernelCall], target: Target, library: Library
    ) -> Iterator[Planned | Gap]:
        """Yield each kernel that ``calls`` can need."""
        from fxwarm.families.tilelang.keys import keys

        return keys(calls, target, library)

    def label(self, key: CompileKey) -> str:
        """Return what a picture calls a pre-norm kernel: its splits. The others are told apart by their arguments."""
        from fxwarm.families.tilelang.statics import statics_of

        return f"{statics_of(key)['n_splits']} splits" if "pre_big_fuse" in key.kernel else ""

    def needs_nothing(self, call: KernelCall, target: Target, library: Library) -> bool:
        """Return whether ``call`` runs as a reference: TileKernels' functions have no kernel for a CPU."""
        from fxwarm.families.tilelang.plain import NAMES

        return target.device == "cpu" and call.op in NAMES

    def prepare(self, target: Target, library: Library) -> None:
        """Start what builds in the background: its imports take seconds."""
        if library.installed:
            from fxwarm.families.tilelang.build import prepare

            prepare()

    def import_library(self) -> None:
        """Import TileLang, 1.8 s after torch."""
        import tilelang  # noqa: F401

    def missing(self, planned: Sequence[Planned], target: Target) -> list[Planned]:
        """Return those that the disk lacks, holds torn, or holds without our index knowing. Reads small files only."""
        from fxwarm.families.tilelang import index

        self._note(planned, target)

        def held(one: Planned) -> bool:
            entry = index.read(one.key, target)
            return entry is not None and index.size_of(index.folder_of(entry)) > 0

        return [one for one in planned if not held(one)]

    def build(self, planned: Sequence[Planned], target: Target, jobs: int) -> Iterator[Built]:
        """Compile kernels into TileLang's disk cache in ``jobs`` worker processes; needs no GPU."""
        from fxwarm.families.tilelang.build import build

        self._note(planned, target)
        return build(planned, target, jobs)

    def load(
        self, planned: Sequence[Planned], target: Target, bind: object = None
    ) -> Iterator[Loaded]:
        """Make each kernel resident on the current device, launched once with one token of zeros."""
        from fxwarm.families.tilelang.load import load

        self._note(planned, target)
        return load(planned, target)

    def verify(self, planned: Sequence[Planned], *, elaborate: bool = False) -> list[Gap]:
        """Return those that a call would not find at once, or that another kernel answers for."""
        from fxwarm.families.tilelang.verify import verify

        return verify(planned, self._targets, elaborate=elaborate)

    def cached(self, planned: Sequence[Planned]) -> list[Path]:
        """Return the files that hold these kernels, and our index entries of them."""
        from fxwarm.families.tilelang.verify import files

        return files(planned, self._targets)

    def watch(self, report: Callable[..., None]) -> Callable[[], None] | None:
        """Report builds and loads after warmup, builds before they begin; None where TileLang is not imported."""
        from fxwarm.families.tilelang.watch import watch

        return watch(report)

    def _note(self, planned: Sequence[Planned], target: Target) -> None:
        for one in planned:
            check_factory(one.key.tag)
        self._targets.update((one.key, target) for one in planned)
