"""Nothing JITs after warmup: counts, names or stops whatever does.

    with fxwarm.no_jit("count") as seen:
        serve()
    assert not seen, seen

*Watchers* are told by the libraries themselves (hooks on what they do rarely, or the operating system's notice that a
file of a cache was made or opened) and cost nothing per call: which op, which shapes and where is read from the stack at
that moment. *Guards* see each call of a JIT op before its library does. They cost a look-up per call, and are there only
while a CUDA graph is being captured, and for "raise", which must stop a call before its work begins.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

from fxwarm import captures, exc, options, runtime, warmup
from fxwarm.monitor import learned, misses, watchers
from fxwarm.monitor.event import OURS, JitEvent
from fxwarm.monitor.stack import Moment
from passes.table import Table

log = logging.getLogger(__name__)

Mode = Literal["count", "warn", "raise"]

_lock = threading.RLock()
_active: list[Seen] = []
_stops: dict[str, Callable[[], None]] = {}
_inside = threading.local()
"""The kernel that a guarded call of this thread is making now: what a watcher sees meanwhile is the same work."""


class Seen:
    """The JIT work that one monitor saw, in order, each piece once. Reads like a list of ``JitEvent``."""

    def __init__(self, mode: Mode = "count", *, calls: bool = False, learn: bool = False) -> None:
        self.mode, self.calls, self.learn = mode, calls, learn
        self.error: exc.JitError | None = None
        """What was raised last, if anything."""
        self.raised: set[tuple[str, object]] = set()
        """What was raised when it happened."""
        self._events: dict[tuple[str, object], JitEvent] = {}

    @property
    def events(self) -> list[JitEvent]:
        """The events so far. Waits until what the operating system has to say has been read."""
        watchers.drain()
        return list(self._events.values())

    @property
    def count(self) -> int:
        """How many pieces of JIT work were seen."""
        return len(self.events)

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """How many, by (library, kind)."""
        return dict(Counter((e.library, e.kind) for e in self.events))

    def add(self, event: JitEvent) -> bool:
        """Keep ``event``; return whether it was new. What is known of the same work already gains what it lacked."""
        known = self._events.get(event.identity)
        self._events[event.identity] = event if known is None else learned.united(known, event)
        return known is None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[JitEvent]:
        return iter(self.events)

    def __getitem__(self, index: int) -> JitEvent:
        return self.events[index]

    def table(self) -> Table:
        """Return the events as a table, the worst first."""
        rows = [
            (e.library, e.kind, e.op, str(e.key or ""), e.shape, f"{e.seconds:.3f}", e.place)
            for e in sorted(self.events, key=lambda e: -e.severity)
        ]
        title = f"{len(rows)} builds, loads, tunings or traces after warmup"
        return Table(title, ("library", "kind", "op", "kernel", "shape", "s>", "place"), rows, [])

    def __rich__(self) -> Any:
        return self.table().__rich__()

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


@contextlib.contextmanager
def no_jit(
    mode: Mode = "warn", *, calls: bool | None = None, learn: bool = False
) -> Iterator[Seen]:
    """Watch what runs inside for builds, loads, tunings and traces; yield what was seen.

    "count" keeps quiet, "warn" logs one line each; both cost a call nothing. "raise" raises JitError before the work
    begins, in the call that would do it, for which it looks at each call of a JIT op (a few us each). With
    ``calls=False`` it looks at none: TileLang, Triton, CuTe, FlashInfer, Dynamo and whatever falls into a capture are
    still stopped before the work, DeepGEMM's C++ side is told on leaving. ``learn`` adds what was seen to the stored
    plan, so that the next start covers it.

    Raises OptionError for another mode.
    """
    if mode not in get_args(Mode):
        raise exc.OptionError(f"no_jit mode is {mode!r}; give 'count', 'warn' or 'raise'")
    seen = Seen(mode, calls=mode == "raise" if calls is None else calls, learn=learn)
    _start(seen)
    try:
        try:
            yield seen
        except Exception as error:
            if seen.error is not None and error is not seen.error and str(seen.error) in str(error):
                raise seen.error from error  # Dynamo wraps what a hook of its own raises
            raise
        late = [e for e in seen.events if mode == "raise" and e.identity not in seen.raised]
        if late:  # seen from outside, when it was done already
            raise exc.JitError(f"{late[0]}; {len(late)} in all")
    finally:
        watchers.drain()
        _stop(seen)
        if learn:
            learned.keep(list(seen._events.values()))


def watch_process(settings: options.Options) -> None:
    """Watch from now to the end of the process, as ``fxwarm.monitor`` and ``fxwarm.learn`` say. Called after a warmup.

    A second call only looks for libraries and ops that came since. "count", "warn" and learning add nothing to a call.
    """
    if settings.monitor == "off" and not settings.learn:
        return
    mode: Mode = "count" if settings.monitor == "off" else settings.monitor
    with _lock:
        mine = next((s for s in _active if s is _process), None)
        if mine is None:
            _process.mode, _process.learn = mode, settings.learn
            _process.calls = mode == "raise"
            _start(_process)
        else:
            _refresh()


_process = Seen()


def events() -> list[JitEvent]:
    """Return what ``fxwarm.monitor`` has seen in this process since its first warmup."""
    return _process.events


def stop_process() -> None:
    """End what ``watch_process`` began, and forget what it saw."""
    with _lock:
        if _process in _active:
            _stop(_process)
        _process._events.clear()


def report(event: JitEvent, before: bool = False, moment: Moment | None = None) -> None:
    """Take one event from a watcher. ``before``: the work has not begun, so "raise" can stop it.

    ``moment``: it was seen from another thread, and this is what the threads did then. Whatever a warmup does is its
    job, and no event.
    """
    if options.is_active() or not _active:
        return
    if moment is not None and (
        warmup.is_at_work() or (event.key is not None and learned.is_loaded(event.key))
    ):
        return
    if moment is None and getattr(_inside, "depth", 0) > 0 and not before:
        return  # the guard around this call reports it
    if watchers.is_tracing() and event.library != "dynamo":
        return
    event, device = learned.explain(event, moment)
    if not before or any(s.mode == "raise" for s in _active):
        _tell(event, before)
    if moment is not None and event.key is not None and event.whose == OURS:
        misses.ran.add((device, event.key))


def _tell(event: JitEvent, before: bool) -> None:
    stop = False
    for seen in list(_active):
        if seen is _process and event.kind == "trace":
            continue  # a process may compile another model; the same code again is the stall
        if seen.add(event):
            if seen.mode == "warn":
                log.warning("fxwarm: %s", event)
            if seen.learn and seen is _process:
                learned.keep([event])
        # a process-wide monitor never stops Dynamo: that would cost the user the model
        stop |= (
            before and seen.mode == "raise" and not (seen is _process and event.library == "dynamo")
        )
    if stop:
        error = exc.JitError(str(event))
        for seen in _active:
            seen.error = error
            seen.raised.add(event.identity)
        raise error


def _around(misses: list[Any], call: Callable[[], Any]) -> Any:
    """Run a call that needs kernels which this process has not loaded: name them, and stop it if asked."""
    if options.is_active():
        return call()
    capturing = runtime.is_capturing()
    found = [learned.event_of(miss, capturing) for miss in misses]
    if not (capturing or any(s.calls for s in _active)):
        return call()
    if capturing or any(s.mode == "raise" for s in _active):
        for event in found:
            _tell(event, before=True)
    begin = time.perf_counter()
    _inside.depth = getattr(_inside, "depth", 0) + 1
    try:
        return call()
    finally:
        _inside.depth -= 1
        seconds = time.perf_counter() - begin
        for event in found:
            _tell(learned.with_seconds(event, seconds), before=False)


def _start(seen: Seen) -> None:
    with _lock:
        _active.append(seen)
        _refresh()


def _refresh() -> None:
    from fxwarm.monitor import guards

    for name, start in watchers.sources().items():
        if name not in _stops:
            try:
                stop = start(report)
                if stop is not None:
                    _stops[name] = stop
            except Exception as error:
                log.warning("fxwarm: %s cannot be watched: %s", name, error)
    if "captures" not in _stops:
        _stops["captures"] = captures.listen(lambda: guards.install(_around), _unguard)
    if any(s.calls for s in _active):
        guards.install(_around)


def _unguard() -> None:
    from fxwarm.monitor import guards

    with _lock:
        if not any(s.calls for s in _active):
            guards.remove()


def _stop(seen: Seen) -> None:
    with _lock:
        _active.remove(seen)
        _unguard()
        if not _active:
            for stop in _stops.values():
                stop()
            _stops.clear()
