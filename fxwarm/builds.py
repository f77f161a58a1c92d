"""Builds of one warmup: beside the asking, the families side by side, one failure at a time, and given up at a limit."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from fxwarm import exc
from fxwarm.beside import Beside, Stream
from fxwarm.family import KernelFamily, load_families
from fxwarm.family import builds as family_builds
from fxwarm.options import Options
from fxwarm.planner import OnModelled, OnPlanned
from fxwarm.progress import Progress
from fxwarm.records import Built, CompileKey, Library, Loaded, Planned, Target, WarmPlan

log = logging.getLogger(__name__)

T = TypeVar("T", Built, Loaded)


class Builds:
    """What one warmup builds, and what it found built."""

    def __init__(
        self, options: Options, target: Target | None = None, device: torch.device | None = None
    ) -> None:
        self.options, self.target, self.device = options, target, device
        self.built: list[Built] = []
        self.found: list[CompileKey] = []
        self.seconds = 0.0
        self.gave_up = False
        self.pending: set[CompileKey] = set()
        """What is being built, or waits for a slot."""
        self.moved = 0.0
        """When a build last began or ended."""
        _alive.add(self)

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Return what makes the device the current one of this thread."""
        is_cuda = self.device is not None and self.device.type == "cuda"
        return torch.cuda.device(self.device) if is_cuda else contextlib.nullcontext()

    def is_proven(self, family: KernelFamily) -> bool:
        """Whether the family was seen to work on this architecture; else one key is tried before the rest."""
        assert self.target is not None
        return self.target.arch in getattr(family, "archs", (self.target.arch,))

    def while_planning(self, plan: Callable[[OnPlanned, OnModelled], WarmPlan]) -> WarmPlan:
        """Return what ``plan`` makes; what it names is built while it asks for more."""
        assert self.target is not None
        target, streams = self.target, dict[str, Stream]()
        # each build is waited for, whatever another one raises
        with contextlib.ExitStack() as ends:

            def build_at_once(family: KernelFamily, planned: Planned) -> None:
                if not (hasattr(family, "build") and self.is_proven(family)):
                    return
                if family.name not in streams:
                    stream = Stream(family, target, self.run, self.found.append)
                    streams[family.name] = stream
                    ends.callback(stream.close)
                streams[family.name].put(planned)

            def build_beside(family: KernelFamily, group: Sequence[Planned]) -> None:
                if self.is_proven(family):
                    ends.callback(Beside(lambda: self._build_missing(family, group)).join)

            return plan(build_at_once, build_beside)

    def rest(self, groups: Iterable[tuple[KernelFamily, list[Planned], Library]]) -> None:
        """Build what was not built while the plan was made, the families side by side."""
        tried = {b.key for b in self.built} | set(self.found)
        with contextlib.ExitStack() as ends:
            for family, group, _ in groups:
                left = [p for p in group if p.key not in tried]
                ends.callback(Beside(functools.partial(self._build_missing, family, left)).join)

    def run(self, family: KernelFamily, planned: Iterable[Planned], total: int) -> None:
        """Let ``family`` build ``planned``; note each as it ends."""
        begun: set[CompileKey] = set()
        try:
            with Progress(f"building {family.name}", total) as progress:
                for built in each(
                    lambda rest: family.build(rest, self.target, jobs(self.options)),  # type: ignore[attr-defined]
                    self._note(planned, begun),
                    Built,
                ):
                    if self.gave_up:
                        return
                    self.pending.discard(built.key)
                    self.moved = time.monotonic()
                    self.built.append(built)
                    progress.step(str(built.key), built.seconds, built.error)
        finally:  # what an error cut off is not waited for
            self.pending -= begun

    def give_up_if_stuck(self) -> None:
        """Go on without the compiles that outlasted their limit: a family should end them, and this one did not.

        Warmups share the slots of the process: these may wait for what another one builds.
        """
        limit = 1.25 * self.options.build_timeout + 1
        stuck = set(self.pending)
        if not stuck or time.monotonic() - self.moved <= limit:
            return
        busy = [b for b in list(_alive) if b.pending and not b.gave_up]
        keys = {key for b in busy for key in set(b.pending)}
        limit = max(limit, *(1.25 * _patience(key, self.options) for key in keys))
        if time.monotonic() - max(b.moved for b in (self, *busy)) > limit:
            self.gave_up = True
            reason = f"no compile ended for {limit:.0f} s; raise fxwarm.build_timeout ({self.options.build_timeout:g} s)"
            self.built += [Built(key, limit, error=reason) for key in stuck]
            log.error(
                "fxwarm: going on without %d kernels, first %s: %s",
                len(stuck),
                next(iter(stuck)),
                reason,
            )

    def _build_missing(self, family: KernelFamily, planned: Sequence[Planned]) -> None:
        assert self.target is not None
        with self.on_device():
            missing = family.missing(planned, self.target)
            lacking = {p.key for p in missing}
            self.found += [p.key for p in planned if p.key not in lacking]
            missing = family_builds(family, missing)
            if missing:
                if not self.is_proven(family):
                    # Never seen here: the first key shows whether the rest is worth its time.
                    missing = missing[:1]
                self.run(family, missing, len(missing))

    def _note(self, planned: Iterable[Planned], begun: set[CompileKey]) -> Iterable[Planned]:
        """Keep in mind that these are being built from now, in ``begun`` as well."""

        def note(p: Planned) -> Planned:
            begun.add(p.key)
            self.moved = time.monotonic()
            self.pending.add(p.key)
            return p

        if isinstance(planned, Sequence):
            return [note(p) for p in planned]

        def one_by_one() -> Iterator[Planned]:
            for p in planned:
                yield note(p)

        return one_by_one()


_alive: weakref.WeakSet[Builds] = weakref.WeakSet()


def _after_fork() -> None:
    """What a parent builds is not built in its fork."""
    for one in list(_alive):
        one.pending.clear()


os.register_at_fork(after_in_child=_after_fork)


def jobs(options: Options) -> int:
    """Return how many compiles may run at once: ``fxwarm.jobs``, else as many as this process may use CPUs."""
    return options.jobs or len(os.sched_getaffinity(0))


def each(
    step: Callable[[Any], Iterable[T]], planned: Iterable[Planned], failed: type[T]
) -> Iterator[T]:
    """Yield what ``step`` says of each planned kernel. Where it raises at one, that one failed and the rest go on.

    What is still being asked for comes as an iterator and cannot be gone through again: then the error is raised, as
    are a LibraryError, which concerns all, and the third error in a row.
    """
    if not isinstance(planned, Sequence):
        yield from step(planned)
        return
    rest, in_a_row = list(planned), 0
    while rest:
        try:
            for item in step(rest):
                in_a_row = 0
                rest = [p for p in rest if p.key != item.key]
                yield item
            return
        except exc.LibraryError:
            raise
        except Exception as error:
            in_a_row += 1
            if in_a_row == 3 or not rest:
                raise
            log.debug("fxwarm: %s", rest[0].key, exc_info=True)
            yield failed(rest.pop(0).key, error=f"{type(error).__name__}: {error}")


def _patience(key: CompileKey, options: Options) -> float:
    """Return the seconds that a build may take where its family knows better than the option."""
    asked = getattr(load_families().get(key.family), "patience", None)
    return float(asked(key, jobs(options))) if asked is not None else 0.0
