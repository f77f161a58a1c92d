"""What the processes of tests/fxwarm/test_ranks.py run: toy kernels, made slow, tuned, short of memory, or broken."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fxwarm
from fxwarm import artifacts, family
from fxwarm import warmup as warmups
from fxwarm.options import resolve
from fxwarm.ranks import meeting
from fxwarm.records import CompileKey, Planned, Target, Tuned, WarmReport
from fxwarm.warmup import Warmup
from passes.bound import bound_dim
from passes.records import Dim, KernelCall, ShapeSet, Site, Symbol, TensorSpec
from tests import toy_family
from tests.toy_family import Toy, cache_dir


class RankToy(Toy):
    """The toy family, saying where its cache is."""

    def keys(self, *args: Any) -> Iterator[Any]:
        if os.environ.get("TOY_PLAN_FAILS"):
            raise RuntimeError("no plan here")
        return super().keys(*args)

    def build(self, *args: Any) -> Iterator[Any]:
        if os.environ.get("TOY_INTERRUPTED"):
            raise KeyboardInterrupt
        return super().build(*args)

    def folder(self, target: Target) -> Path:
        return cache_dir()


class Short(RankToy):
    """Cannot launch more than TOY_ROWS rows; its kernel of class ``other`` is not launchable where TOY_REFUSES is set."""

    def fit(self, planned: Sequence[Planned], target: Target) -> dict[CompileKey, KernelCall | str]:
        limit, out = int(os.environ.get("TOY_ROWS", "1000000")), {}
        for p in planned:
            rows, width = (int(d) for d in p.witness["x"].dims)
            if p.key.template[1] == os.environ.get("TOY_REFUSES"):
                out[p.key] = f"no input for {p.key}"
            elif rows > limit:
                found = next((r for r in (2048, 1024, 512) if r <= limit), None)
                out[p.key] = call(width, found) if found else f"{limit} rows are too few"
        return out


class Tuned_(RankToy):
    """Chooses one of three variants per kernel by seconds that differ from rank to rank."""

    def _path(self) -> Path:
        return cache_dir() / f"tactics-{dist.get_rank()}.json"

    def tactics(self, planned: Sequence[Planned]) -> dict[CompileKey, str]:
        table = json.loads(self._path().read_text()) if self._path().exists() else {}
        return {p.key: table[str(p.key)] for p in planned if str(p.key) in table}

    def tune(
        self,
        planned: Sequence[Planned],
        bind: Any,
        reduce: Callable[[Mapping[CompileKey, Mapping[str, float]]], Mapping[CompileKey, str]]
        | None = None,
    ) -> Iterator[Tuned]:
        held = {} if reduce else self.tactics(planned)
        timings = {p.key: self._time(i) for i, p in enumerate(planned) if p.key not in held}
        if os.environ.get("TOY_TUNE_FAILS") == str(dist.get_rank()):
            raise RuntimeError("no timer here")
        local = {key: min(times, key=times.__getitem__) for key, times in timings.items()}
        chosen = reduce(timings) if reduce else local
        cache_dir().mkdir(parents=True, exist_ok=True)
        table = json.loads(self._path().read_text()) if self._path().exists() else {}
        self._path().write_text(json.dumps(table | {str(k): v for k, v in chosen.items()}))
        yield from (Tuned(p.key, 0.001, found=p.key in held) for p in planned)

    def _time(self, index: int) -> dict[str, float]:
        best = (index + dist.get_rank()) % 3  # noise: each rank has another favourite
        return {
            name: 1.0 + 0.1 * ((i - best) % 3) + 0.001 * i for i, name in enumerate(("a", "b", "c"))
        }


MODELS: list[artifacts.WarmCallable] = []
"""Somebody must hold them."""
FAMILIES = {"toy": RankToy, "short": Short, "tuned": Tuned_}


def call(width: int, rows: int | None = None, most: int = 8192) -> KernelCall:
    """``toy::scale`` at ``rows`` rows, or at 1..most."""
    symbols = () if rows else (Symbol("s0", 1, most),)
    m = Dim.static(rows) if rows else bound_dim("s0", symbols, ())
    x, w = (m, Dim.static(width)), (Dim.static(width),)
    tensors = (("x", TensorSpec("float32", x)), ("w", TensorSpec("float32", w)))
    return KernelCall("toy", "scale", tensors, (), symbols)


def publish_slowly(name: str) -> Path:
    """Two files an entry, each written in two parts; then one rename."""
    entry = cache_dir() / name
    if entry.is_dir():
        return entry
    cache_dir().mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=cache_dir(), prefix=".tmp"))
    (work / "kernel.c").write_text(
        "void run(const float *x, const float *w, float *out, long rows) {}\n"
    )
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", work / "whole.so", work / "kernel.c"], check=True
    )
    data = (work / "whole.so").read_bytes()
    for file in ("kernel.so", "kernel.info"):
        with (work / file).open("wb") as out:
            out.write(data[:100])
            out.flush()
            time.sleep(0.3)
            out.write(data[100:])
    with (cache_dir() / "builds.log").open("a") as log:
        log.write(f"{os.getpid()} {name}\n")
    try:
        work.rename(entry)
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
    toy_family.events.append(("build", name))
    return entry


def add(calls: Sequence[KernelCall]) -> Warmup:
    """Register a compiled callable with these calls, as the backend would."""
    warmup = Warmup(
        ShapeSet(calls=tuple(calls), sites=(Site(),) * len(calls)),
        resolve({"when": "manual"}),
        device=torch.device("cpu"),
        target=Target(**json.loads(os.environ["TOY_TARGET"]))
        if "TOY_TARGET" in os.environ
        else None,
    )
    MODELS.append(artifacts.WarmCallable(run_all(calls), warmup))
    return warmup


def run_all(calls: Sequence[KernelCall]) -> Callable[..., Any]:
    def inner(*args: Any) -> None:
        for one in calls:
            width, most = int(one["w"].dims[0]), one["x"].dims[0].upper or 1
            for rows in {1, min(7, most), min(16, most)} if one.symbols else ():
                torch.ops.toy.scale(torch.ones(rows, width), torch.ones(width))

    return inner


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Make every way of talking to another rank raise."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a compiled callable talked to its peers")

    names = [n for n in dir(dist) if n.startswith(("all_", "broadcast", "barrier", "gather", "monitored", "reduce", "send", "recv", "scatter", "new_group"))]  # fmt: skip
    kept = {n: getattr(dist, n) for n in names if callable(getattr(dist, n))}
    original = meeting.Meeting.__init__
    try:
        for name in kept:
            setattr(dist, name, refuse)
        meeting.Meeting.__init__ = refuse  # type: ignore[method-assign]
        yield
    finally:
        for name, value in kept.items():
            setattr(dist, name, value)
        meeting.Meeting.__init__ = original  # type: ignore[method-assign]


def said(report: WarmReport) -> list[str]:
    return [*map(str, report.gaps), *(f"{x.key}: {x.error}" for x in report.failed), *report.notes]


def start(rank: int, world: int, port: int, plan: Mapping[str, Any]) -> None:
    """One rank: join, run the plan's scenes one after the other, and write what each showed."""
    os.environ.update(plan.get("env", {}))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=plan.get("group_timeout_s", 60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    meeting.SILENCE, meeting.SAY_AFTER = plan.get("silence", 15.0), 1.0
    socket.gethostname = lambda: f"node{rank}"
    logging.getLogger("fxwarm").addHandler(LOG)
    logging.getLogger("fxwarm").setLevel(logging.INFO)
    for name, scene in plan["scenes"].items():
        found = play(rank, name, scene, Path(plan["out"]))
        Path(plan["out"], f"{name}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def play(rank: int, name: str, scene: Mapping[str, Any], out: Path) -> dict[str, Any]:
    env = {k: (v[rank] if isinstance(v, list) else v) for k, v in scene.get("env", {}).items()}
    env.setdefault("TOY_CACHE_DIR", str(out / f"{name}-cache"))
    os.environ.update({"FXWARM_CACHE_DIR": str(out / f"{name}-plans-{rank}"), **env})
    toy_family._loaded.clear()
    toy_family.events.clear()
    artifacts.pending.clear()
    MODELS.clear()
    warmups._resident.clear()
    family.register(FAMILIES[scene.get("family", "toy")], replace=True)
    toy_family.compile_kernel = publish_slowly if scene.get("slowly") else COMPILE
    if "dies" in scene and scene["dies"] == rank:
        toy_family.compile_kernel = die
    if "copy" in scene and rank == 1:
        copy(*scene["copy"])
    if "copy" in scene or scene.get("at_once"):
        dist.barrier()
    time.sleep(scene.get("late", {}).get(str(rank), 0))
    LOG.lines.clear()
    widths = scene["widths"]
    widths = widths[rank] if isinstance(widths[0], list) else widths
    warmup = add([call(w, scene.get("rows"), scene.get("most", 8192)) for w in widths])
    begin = time.perf_counter()
    if scene.get("group", True):
        (report,) = fxwarm.warm_all(dist.group.WORLD, builds=rank not in scene.get("excluded", ()))
    else:
        (report,) = fxwarm.warm_all()
    seconds, events = time.perf_counter() - begin, list(toy_family.events)
    toy_family.events.clear()
    if scene.get("serves", True):
        with no_collectives():
            MODELS[0]()
    planned = warmup.plan.planned if warmup.plan is not None else ()
    tactics = Tuned_().tactics(planned) if scene.get("family") == "tuned" else {}
    for key in env:
        os.environ.pop(key)
    return {
        "seconds": seconds,
        "ended": time.time(),
        "pid": os.getpid(),
        "builds": [n for what, n in events if what == "build"],
        "loads": [n for what, n in events if what == "load"],
        "jit_after": [n for what, n in toy_family.events],
        "status": report.status,
        "build_seconds": report.build_seconds,
        "said": said(report),
        "log": list(LOG.lines),
        "witness": {str(p.key): int(p.witness["x"].dims[0]) for p in planned},
        "loaded": [str(x.key) for x in report.loaded if not x.error],
        "tuned": [[str(t.key), t.found] for t in report.tuned],
        "plan_key": report.plan_key,
        "tactics": {str(k): v for k, v in tactics.items()},
    }


def copy(source: str, to: str, drop: int) -> None:
    """Copy a whole cache folder, then remove ``drop`` entries."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to)
    for entry in sorted(Path(to).glob("scale_*"))[:drop]:
        shutil.rmtree(entry)


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


LOG = Lines()


def die(name: str) -> Path:
    os.kill(os.getpid(), 9)
    raise AssertionError


COMPILE = toy_family.compile_kernel
