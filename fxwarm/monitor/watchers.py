"""What tells us of JIT work at no cost per call: hooks of Dynamo, Triton and CuTe, and each family's own ``watch``.

The only file that touches their hooks; each is looked for, and left out with a line in the log where it is not there.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from fxwarm.monitor.event import JitEvent

log = logging.getLogger(__name__)

Report = Callable[..., None]
"""``report(event, before=False)``; raises JitError if ``before`` and the monitor is to stop it."""
Start = Callable[[Report], "Callable[[], None] | None"]

_drains: list[Callable[[], None]] = []
_begun: list[tuple[float, str]] = []
"""When and where the compile began that Dynamo is making now, if it is."""


def sources() -> dict[str, Start]:
    """Return by name what can be watched: called with ``report``, each gives what ends it, or None if there is nothing."""
    from fxwarm.family import load_families

    found: dict[str, Start] = {"dynamo": watch_dynamo, "triton": watch_triton, "cute": watch_cute}
    for name, family in load_families().items():
        if hasattr(family, "watch"):
            found[name] = family.watch
    return found


def is_tracing() -> bool:
    """Return whether Dynamo compiles at this moment: what Inductor builds meanwhile is part of that."""
    return bool(_begun)


def drain() -> None:
    """Read what the operating system has to say now, where a watcher reads in the background."""
    for each in list(_drains):
        each()


def on_drain(function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` at each ``drain``; return what ends that."""
    _drains.append(function)
    return lambda: _drains.remove(function)


def watch_dynamo(report: Report) -> Callable[[], None] | None:
    """Report each frame that Dynamo traces: a new graph is a stall too, whatever its kernels."""
    try:
        from torch._dynamo.callback import callback_handler
    except ImportError as error:
        log.info("fxwarm: recompiles are not watched on this torch: %s", error)
        return None
    begun = _begun

    def is_compile(args: Any) -> bool:
        return getattr(args.callback_trigger, "name", "DYNAMO") in ("DYNAMO", "LAZY_BACKWARD")

    def event(args: Any, place: str, seconds: float = 0.0) -> JitEvent:
        again = str(args.compile_id).rpartition("/")[2] not in ("", "0", "None")
        return JitEvent(
            "dynamo", "retrace" if again else "trace", f"graph {args.compile_id}", place=place, seconds=seconds,
            missing_from="the graphs that were there after warmup",
        )  # fmt: skip

    def start(args: Any) -> None:
        if is_compile(args):
            from fxwarm.monitor.stack import place_of_stack

            begun.append((time.perf_counter(), place_of_stack()))
            report(event(args, begun[-1][1]), before=True)

    def end(args: Any) -> None:
        if is_compile(args) and begun:
            begin, place = begun.pop()
            report(event(args, place, time.perf_counter() - begin))

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)

    def stop() -> None:
        begun.clear()
        for function, functions in ((start, "start_callbacks"), (end, "end_callbacks")):
            if function in getattr(
                callback_handler, functions
            ):  # torch._dynamo.reset() clears them
                getattr(callback_handler, functions).remove(function)

    return stop


def watch_triton(report: Report) -> Callable[[], None] | None:
    """Report each kernel that Triton compiles or reads from its disk cache, if it is imported; other hooks still run."""
    runtime = getattr(getattr(sys.modules.get("triton"), "knobs", None), "runtime", None)
    if runtime is None or not hasattr(runtime, "jit_post_compile_hook"):
        return None
    before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    begun: dict[str, float] = {}

    def event(given: dict[str, Any], seconds: float = 0.0) -> JitEvent:
        name = getattr(given.get("fn"), "name", "") or str(given.get("repr", "a kernel"))
        # the hook also runs where the disk cache had it: from outside the two differ only in time
        return JitEvent(
            "triton", "build", name, shape=str(given.get("repr", ""))[:200], seconds=seconds
        )

    def pre(*args: Any, **given: Any) -> Any:
        begun[str(given.get("key"))] = time.perf_counter()
        if not given.get("is_manual_warmup"):
            report(event(given), before=True)
        return before(*args, **given) if before is not None else None

    def post(*args: Any, **given: Any) -> Any:
        seconds = time.perf_counter() - begun.pop(str(given.get("key")), time.perf_counter())
        if not given.get("is_manual_warmup"):
            report(event(given, seconds))
        return after(*args, **given) if after is not None else None

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = pre, post

    def stop() -> None:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = before, after

    return stop


def watch_cute(report: Report) -> Callable[[], None] | None:
    """Report each function that CuTe DSL compiles, if it is imported: it has no hook, so its one method is wrapped."""
    cutlass = sys.modules.get("cutlass.cutlass_dsl.cutlass") or sys.modules.get(
        "cutlass.cutlass_dsl"
    )
    dsl = getattr(cutlass, "CutlassBaseDSL", None)
    original = getattr(dsl, "compile_and_cache", None)
    if dsl is None or original is None:
        return None

    @functools.wraps(original)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = str(
            kwargs.get("original_function_name")
            or kwargs.get("function_name")
            or (args[2] if len(args) > 2 else "")
        )
        report(JitEvent("cute", "build", name), before=True)
        begin = time.perf_counter()
        result = original(self, *args, **kwargs)
        report(JitEvent("cute", "build", name, seconds=time.perf_counter() - begin))
        return result

    dsl.compile_and_cache = counted

    def stop() -> None:
        dsl.compile_and_cache = original

    return stop
