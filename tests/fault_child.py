"""What the fault tests run in processes of their own: a warmup of real kernels, and ways to spoil it.

The processes are forked from a server that has imported torch already, so each starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo

import fxwarm.family as family_module
from fxwarm import locks, planner, receipts, store, warmup  # noqa: F401 (the server imports them once)
from fxwarm.families.deep_gemm.cache import is_whole_elf
from fxwarm.options import Options
from fxwarm.records import Library, Target
from passes.records import Dim, KernelCall, ShapeSet, Site, Symbol, TensorSpec
from tests import toy_family
from tests.toy_family import Toy, cache_dir, name_of

CPU = torch.device("cpu")


class Careful(Toy):
    """The toy with what its room would have: versions, whole files only, faults on demand."""

    def library(self, wanted: Any) -> Library:
        return Library(
            "toy-jit", os.environ.get("TOY_VERSION", "1.0"), installed=True, module="toy"
        )

    def missing(self, planned: Any, target: Target) -> list[Any]:
        return [
            p
            for p in planned
            if not is_whole_elf(cache_dir() / name_of(*p.key.template) / "kernel.so")
        ]

    def build(self, planned: Any, target: Target, jobs: int) -> Any:
        for p in planned:
            damaged = cache_dir() / name_of(*p.key.template) / "kernel.so"
            with contextlib.suppress(OSError):
                if not is_whole_elf(damaged):
                    damaged.unlink()
            yield from super().build([p], target, jobs)

    def load(self, planned: Any, target: Target, bind: Any) -> Any:
        for p in planned:
            if ",".join(p.key.template) == os.environ.get("TOY_OOM"):
                if os.environ["TOY_OOM_HOW"] == "host":
                    torch.empty(1 << 50, dtype=torch.uint8)
                raise torch.OutOfMemoryError("out of memory: tried to allocate 80 GiB")
            time.sleep(float(os.environ.get("TOY_LOAD_SECONDS", "0")))
            yield from super().load([p], target, bind)


def shapes(widths: tuple[int, ...]) -> ShapeSet:
    """Three kernels a width."""
    rows = Dim("s0", 1, 64, ((1, 64, 1),))
    calls = tuple(
        KernelCall(
            "toy",
            "scale",
            (
                ("x", TensorSpec("float32", (rows, Dim.static(w)))),
                ("w", TensorSpec("float32", (Dim.static(w),))),
            ),
            symbols=(Symbol("s0", 1, 64),),
        )
        for w in widths
    )
    return ShapeSet(calls=calls, sites=(Site(),) * len(calls))


def set_up(env: dict[str, str]) -> None:
    os.environ.update(env)
    sys.path.insert(0, env.get("IMPORT_FROM", "."))
    store._root.cache_clear()
    family_module.register(Careful)
    log = Path(env["OUT"]).with_suffix(".log")
    logging.basicConfig(filename=log, level=logging.INFO, force=True)


def warm_up(widths: tuple[int, ...], **options: Any) -> Any:
    options.setdefault("cache_dir", os.environ["FXWARM_CACHE_DIR"])
    one = warmup.Warmup(shapes(widths), Options(**options), device=CPU)
    return one.finish()


def run_model(widths: tuple[int, ...]) -> None:
    """What the user's calls do: they must be right whatever the warmup did."""
    for w in widths:
        for rows in (1, 16, 5):
            x = torch.arange(rows * w, dtype=torch.float32).reshape(rows, w)
            assert torch.equal(toy_family.scale(x, torch.full((w,), 2.0)), x * 2)


def answer(report: Any, **more: Any) -> None:
    """Leave the report where the test looks for it."""
    done = {"report": report, "events": toy_family.events, "pid": os.getpid(), **more}
    out = Path(os.environ["OUT"])
    out.with_suffix(".tmp").write_bytes(msgspec.json.encode(done))
    out.with_suffix(".tmp").replace(out)


def warm(env: dict[str, str], widths: tuple[int, ...], model: bool = True, **options: Any) -> None:
    set_up(env)
    report = warm_up(widths, **options)
    toy_events = len(toy_family.events)
    if model:
        run_model(widths)
    answer(report, late=toy_family.events[toy_events:])


def hold_lock(env: dict[str, str], name: str) -> None:
    set_up(env)
    with locks.hold(cache_dir() / "locks", name, "a test"):
        answer(None)
        time.sleep(60)


def warm_impatiently(env: dict[str, str], widths: tuple[int, ...]) -> None:
    locks.SAY_AFTER = 0.2
    warm(env, widths)


def warm_with_losing_renames(env: dict[str, str], widths: tuple[int, ...], how: str) -> None:
    """Every other rename is lost: refused, or done by somebody else a moment before."""
    real, count = os.rename, 0

    def rename(source: Any, target: Any, **kw: Any) -> None:
        nonlocal count
        count += 1
        if count % 2:
            if how == "refused":
                raise OSError(errno.ESTALE, "stale file handle")
            if how == "swallowed":
                return
        real(source, target, **kw)

    os.rename = os.replace = rename  # type: ignore[assignment]
    out = env["OUT"]
    set_up(env)
    report = warm_up(widths)
    os.rename = os.replace = real
    os.environ["OUT"] = out
    run_model(widths)
    answer(report)


def warm_as_nobody(env: dict[str, str], widths: tuple[int, ...]) -> None:
    os.setgid(65534)
    os.setuid(65534)
    warm(env, widths)


def interrupted(env: dict[str, str], widths: tuple[int, ...]) -> None:
    """Ctrl-C, then the user tries again in the same process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    set_up(env)
    one = warmup.Warmup(shapes(widths), Options(cache_dir=env["FXWARM_CACHE_DIR"]), device=CPU)
    Path(env["OUT"]).with_suffix(".ready").touch()
    stopped = False
    try:
        one.finish()
    except KeyboardInterrupt:
        stopped = True
    report = one.finish()
    run_model(widths)
    answer(report, stopped=stopped, residents=len(warmup._resident))


def fork_when_warm(env: dict[str, str], widths: tuple[int, ...]) -> None:
    set_up(env)
    warm_up(widths)
    _in_fork(lambda: answer(warm_up(widths), late=_late(widths)))


def fork_while_building(env: dict[str, str], widths: tuple[int, ...]) -> None:
    """A thread builds and another holds the load lock: neither lives in the child."""
    import threading

    set_up(env)
    one = warmup.Warmup(shapes(widths), Options(cache_dir=env["FXWARM_CACHE_DIR"]), device=CPU)
    one.start()
    time.sleep(0.1)
    held = threading.Event()

    def hold() -> None:
        with warmup._load_lock, one._lock:
            held.set()
            time.sleep(60)

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    _in_fork(lambda: answer(one.finish(), late=_late(widths)))


def _late(widths: tuple[int, ...]) -> list[Any]:
    before = len(toy_family.events)
    run_model(widths)
    return toy_family.events[before:]


def _in_fork(function: Any) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            logging.exception("in the forked child")
            os._exit(1)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os._exit(9)


def _preload() -> None:
    """Do once in the server what each process would do first: sympy, torch's own lazy imports. Builds nothing."""
    target = Target("cpu", device="cpu")
    list(Toy().keys(shapes((2,)).calls, target, Toy().library({})))
    toy_family.scale(torch.empty(0, 2), torch.empty(2))


_preload()
