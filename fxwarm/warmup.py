"""Runs a plan: build what is missing in parallel, tune, load each kernel once, verify, report.

Building needs no tensor and no launch, so it happens in a background thread while Inductor compiles. Tuning and
loading launch kernels: they happen in the thread of the first call, synchronously, under no modes, once per process
and device.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fxwarm import captures, exc, options, receipts
from fxwarm.builds import Builds, each
from fxwarm.family import Bind, KernelFamily, by_family, load_families, not_installed
from fxwarm.family import builds as family_builds
from fxwarm.options import Options, resolve
from fxwarm.planner import OnModelled, OnPlanned, every_size, make_plan, runs_on
from fxwarm.ranks import dealing
from fxwarm.records import (
    Built,
    CompileKey,
    Library,
    Loaded,
    Planned,
    Target,
    Tuned,
    WarmPlan,
    WarmReport,
)
from fxwarm.runtime import current_device, device_of, memory, quiet
from passes.records import Gap, KernelCall, ShapeSet

log = logging.getLogger(__name__)


_resident: set[tuple[str, CompileKey]] = set()
"""What this process has loaded: (device, key). The libraries keep loaded kernels for good."""
_at_work: set[object] = set()
"""The warmups that plan, build or load at this moment, in whatever thread."""
_load_lock = threading.RLock()
"""The libraries' own maps have no locks: one thread loads at a time."""


captures.closed_by(lambda: _load_lock)


def no_weights(call: KernelCall) -> None:
    """Bind nothing: witnesses run on synthetic tensors."""


def _after_fork() -> None:
    """Give a forked child locks of its own: a thread that held one exists in its parent only."""
    global _load_lock
    _load_lock = threading.RLock()
    _at_work.clear()
    for warmup in list(_alive):
        warmup._lock = threading.RLock()


_alive: weakref.WeakSet[Warmup] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)


class Warmup:
    """One plan on its way from cold to warm, on one device of this process.

    ``start`` plans and builds in the background, ``finish`` waits and makes it warm. Both may be called again.
    """

    def __init__(
        self,
        shapes: ShapeSet,
        options: Options,
        *,
        device: torch.device | None = None,
        target: Target | None = None,
        plan: WarmPlan | None = None,
        offered: WarmPlan | None = None,
        graph_key: str = "",
    ) -> None:
        """Warm ``shapes`` on ``device``; where it is not known yet, ``settle`` tells.

        ``plan`` is run as it is. ``offered`` came with a saved model: it is used if it fits what is installed here.
        """
        self.shapes, self.options, self.graph_key = shapes, options, graph_key
        self.plan, self.offered = plan, offered
        self.libraries: Mapping[str, str] = {}
        self.report: WarmReport | None = None
        self._builds = Builds(options, target, device)
        self._absent: dict[str, str] = {}
        self._error: BaseException | None = None
        self.is_stored = False
        """Whether the plan is that of an earlier start, by its receipt."""
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._prepared = False
        _alive.add(self)

    @property
    def device(self) -> torch.device | None:
        """The device to be warm on, None until it is known."""
        return self._builds.device

    @property
    def target(self) -> Target | None:
        """What the kernels are for, None until the device is known."""
        return self._builds.target

    @property
    def is_warm(self) -> bool:
        """Whether ``finish`` has run."""
        return self.report is not None

    def settle(self, args: tuple[Any, ...]) -> None:
        """Take the device from ``args`` where it is not known yet."""
        if self._builds.device is None:
            self._builds.device = device_of(args)
        if self._builds.target is None:
            self._builds.target = Target.current(self._builds.device)

    def start(self, graph_key: str = "") -> None:
        """Begin to plan and build in the background. A second call does nothing."""
        with self._lock:
            if self._thread is not None or self.report is not None:
                return
            self.settle(())
            captures.install()
            self.graph_key = graph_key or self.graph_key
            self._thread = threading.Thread(target=self._prepare, name="fxwarm-build", daemon=True)
            self._thread.start()

    def finish(self, bind: Bind = no_weights) -> WarmReport:
        """Wait for the builds, then tune, load and verify; return the report. Synchronous on the device.

        Waits for graph captures of other threads. Raises ColdCaptureError while this thread captures: it may be called
        again afterwards. Raises IncompleteError if ``strict`` is set and something could not be warmed.
        """
        with self._lock:
            if self.report is None:
                begin = time.perf_counter()
                captures.refuse("this warmup")
                captures.wait()
                self.start()
                self._import_libraries()
                self.wait()
                if not self._prepared and self._error is None and not self._builds.gave_up:
                    self._prepare()  # its thread was left behind in the parent of this process
                if self._error is not None and not isinstance(self._error, Exception):
                    raise self._error
                self.report = self._make_warm(bind, begin)
                _say(self.report)
        if self.options.strict and self.report.status == "partial":
            raise exc.IncompleteError(why_partial(self.report))
        return self.report

    @property
    def built(self) -> tuple[Built, ...]:
        """What was built so far, in the background or by others."""
        return tuple(self._builds.built)

    def groups(self) -> Iterator[tuple[KernelFamily, list[Planned], Library]]:
        """Yield what the plan has of each family that is installed here; note the others for the report."""
        for family, group in by_family(self.plan.planned if self.plan is not None else ()):
            library = family.library(self.libraries)
            if library.installed:
                yield family, group, library
            else:
                self._absent[family.name] = (
                    f"{library}: install it to warm {len(group)} kernels of {family.name}"
                )

    def adopt(
        self,
        plan: WarmPlan | None,
        built: Sequence[Built],
        found: Sequence[CompileKey],
        seconds: float,
    ) -> None:
        """Take what was built for this warmup elsewhere, in ``seconds``: ``finish`` then only tunes and loads."""
        with self._lock:
            self.plan, self._builds.built, self._builds.found = plan, [*built], [*found]
            self._builds.seconds += seconds
            self._prepared = True
            if self._thread is None:
                self._thread = threading.Thread(name="fxwarm-adopted")  # never runs

    def wait(self) -> None:
        """Wait until what ``start`` began is done."""
        thread = self._thread
        while thread is not None and thread.is_alive() and not self._builds.gave_up:
            thread.join(0.2)  # in slices, so that Ctrl-C arrives
            self._builds.give_up_if_stuck()

    def _import_libraries(self) -> None:
        """Import what the load will need while the builds run; this is the thread that would do it after them."""
        assert self.target is not None
        families = load_families()
        for name in dict.fromkeys(call.family for call in self.shapes.calls):
            imports = getattr(families.get(name), "import_library", None)
            if imports is not None and runs_on(self.target, name):
                with contextlib.suppress(Exception):  # the load says it
                    imports()

    def _prepare(self) -> None:
        try:
            captures.wait()
            with self._working(), self._builds.on_device():
                self._plan_and_build()
        except BaseException as error:
            log.debug("fxwarm: warmup failed while building", exc_info=True)
            self._error = error
        finally:
            self._prepared = True

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        from fxwarm.monitor import watchers  # imports this module

        token = object()
        _at_work.add(token)
        try:
            with options.use(self.options):
                yield
        finally:
            watchers.drain()  # what a watcher is told late would look like work of the model's
            _at_work.discard(token)

    def make_plan(
        self,
        on_planned: OnPlanned | None = None,
        on_modelled: OnModelled | None = None,
    ) -> WarmPlan:
        """Return the plan of an earlier start whose receipt holds, else a new one; with what was learned since.

        ``on_planned`` and ``on_modelled`` hear of kernels as ``planner.make_plan`` names them.
        """
        assert self.target is not None
        plan = receipts.stored_plan(self)
        self.is_stored = plan is not None and plan is not self.offered
        if plan is None:
            plan = make_plan(
                self.shapes,
                self.target,
                self.libraries,
                ask=True,
                max_keys=self.options.max_keys,
                graph_key=self.graph_key,
                on_planned=on_planned,
                on_modelled=on_modelled,
            )
        return receipts.with_learned(plan, self.options)

    def _plan_and_build(self) -> None:
        begin = time.perf_counter()
        assert self.target is not None
        if self.plan is None:
            self.plan = self._builds.while_planning(self.make_plan)
        self._builds.rest(self.groups())
        self._builds.seconds = time.perf_counter() - begin

    def _make_warm(self, bind: Bind, begin: float) -> WarmReport:
        assert self.target is not None
        assert self.device is not None
        loaded: list[Loaded] = []
        tuned: list[Tuned] = []
        gaps: list[Gap] = []
        plan = self.plan  # not `or`: an empty plan is falsy, and its gaps count
        if plan is None:
            plan = WarmPlan(self.target, shapes=self.shapes, graph_key=self.graph_key)
        if self._error is not None:
            gaps.append(Gap("warmup", f"{type(self._error).__name__}: {self._error}"))
        with self._working(), _load_lock, quiet(self.device), memory(self.device) as used:
            failed = {b.key for b in self._builds.built if b.error}
            for family, group in by_family(plan.planned):
                if family.name in self._absent:
                    continue
                try:
                    tune = getattr(family, "tune", None)
                    if tune is not None:
                        here = list(tune(group, bind))
                        tuned += here
                        gaps += dealing.tuned_alone(family.name, here)
                    wanted = [
                        p
                        for p in group
                        if p.key not in failed and not is_resident(self.device, p.key)
                    ]
                    loaded += self._load(family, wanted, bind)
                    if self.options.coverage == "full":
                        loaded += self._load(family, every_size(plan, family), bind)
                    verify = getattr(family, "verify", None)
                    if verify is not None:
                        gaps += verify(group)
                except Exception as error:
                    log.exception("fxwarm: %s", family.name)
                    gaps.append(
                        Gap(family.name, f"{type(error).__name__}: {error}", family=family.name)
                    )
        report = WarmReport(
            plan_key=receipts.warm_key(plan),
            target=self.target,
            libraries=plan.libraries,
            built=tuple(self._builds.built),
            found=tuple(self._builds.found),
            loaded=tuple(loaded),
            tuned=tuple(tuned),
            gaps=tuple(dict.fromkeys([*plan.gaps, *gaps])),
            reference=plan.reference,
            absent=tuple(self._absent.values()),
            notes=tuple(filter(None, (*plan.notes, not_installed(plan)))),
            specialized=plan.shapes.specialized,
            seconds=time.perf_counter() - begin,
            build_seconds=self._builds.seconds,
            peak_bytes=used["peak"],
            kept_bytes=used["kept"],
        )
        return receipts.keep(plan, report, self.options)

    def _load(self, family: KernelFamily, wanted: Sequence[Planned], bind: Bind) -> list[Loaded]:
        assert self.target is not None
        out: list[Loaded] = []
        canary = not self._builds.is_proven(family)
        for group in [wanted[:1], wanted[1:]] if canary else [wanted]:
            for item in each(lambda rest: family.load(rest, self.target, bind), group, Loaded):  # type: ignore[arg-type]
                out.append(item)
                if not item.error:
                    _resident.add((str(self.device), item.key))
                captures.wait()
            if not canary or len(out) != 1:
                continue
            if out[0].error:
                raise exc.LibraryError(
                    f"{family.name} does not work on {self.target.name} ({self.target.arch}): {out[0].error}; "
                    f"its other {len(wanted) - 1} kernels are left alone"
                )
            rest = family_builds(family, family.missing(wanted[1:], self.target))
            if rest:
                self._builds.run(family, rest, len(rest))
        return out


def switched_off(options: Options, device: torch.device) -> Warmup:
    """Return a warmup that has nothing to do because ``fxwarm.coverage`` is "off"; its report says so."""
    warmup = Warmup(ShapeSet(), options, device=device, target=Target.current(device))
    assert warmup.target is not None
    warmup.report = WarmReport("", warmup.target, skipped="off")
    return warmup


def run(
    plan: WarmPlan, options: Options | None = None, device: Any = None, bind: Bind = no_weights
) -> WarmReport:
    """Make ``plan`` warm on ``device`` (by default the current one of the plan's kind) and return the report."""
    where = torch.device(device) if device is not None else current_device(plan.target.device)
    warmup = Warmup(plan.shapes, options or resolve(), device=where, target=plan.target, plan=plan)
    return warmup.finish(bind)


def is_resident(device: torch.device, key: CompileKey) -> bool:
    """Return whether this process has loaded ``key`` on ``device``."""
    return (str(device), key) in _resident


def is_at_work() -> bool:
    """Return whether any warmup plans, builds or loads at this moment."""
    return bool(_at_work)


def _say(report: WarmReport) -> None:
    level = logging.WARNING if report.status == "partial" else logging.INFO
    log.log(
        level,
        "fxwarm: %s: %d built in %.1f s, %d found, %d loaded, %d tuned, %d failed, %d gaps; %.2f s on the first call%s",
        report.status,
        sum(not b.error for b in report.built),
        report.build_seconds,
        len(report.found),
        sum(not x.error for x in report.loaded),
        len(report.tuned),
        len(report.failed),
        len(report.gaps),
        report.seconds,
        "; " + why_partial(report) if report.status == "partial" else "",
    )


def why_partial(report: WarmReport) -> str:
    reasons = [f"{type(x).__name__.lower()} {x.key}: {x.error}" for x in report.failed]
    reasons += [str(gap) for gap in report.gaps]
    reasons += list(report.absent)
    more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
    return "not everything is warm: " + "; ".join(reasons[:3]) + more + "; see fxwarm.reports()[-1]"
