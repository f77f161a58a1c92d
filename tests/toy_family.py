"""A whole kernel family in one file, on a real JIT: C compiled by ``cc``, loaded by ctypes, cached on disk.

``toy::scale(x, w)`` multiplies the rows of x by w. Its kernel is compiled per width and per class of the row count
(1, a multiple of 16, anything else), as Triton's JIT does with integer arguments.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fxwarm.locks import hold
from fxwarm.monitor.event import JitEvent
from fxwarm.monitor.files import seconds_of, watch_cache
from fxwarm.records import Built, CompileKey, Library, Loaded, Planned, Target
from passes import bound
from passes.records import Gap, KernelCall

CLASSES = ("one", "mult16", "other")
events: list[tuple[str, str]] = []
"""What the JIT did in this process: ("build" | "load", kernel)."""
_loaded: dict[str, ctypes.CDLL] = {}


def cache_dir() -> Path:
    return Path(os.environ.get("TOY_CACHE_DIR", os.path.join(tempfile.gettempdir(), "toy_cache")))


def class_of(rows: int) -> str:
    return "one" if rows == 1 else "mult16" if rows % 16 == 0 else "other"


def name_of(width: int, kind: str) -> str:
    return f"scale_{width}_{kind}"


def compile_kernel(name: str) -> Path:
    """The library's own compile: into a private folder, then one rename."""
    entry = cache_dir() / name
    if (entry / "kernel.so").is_file() and (entry / "kernel.so").stat().st_size:
        return entry
    width = int(name.split("_")[1])
    cache_dir().mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=cache_dir(), prefix=".tmp"))
    source = work / "kernel.c"
    source.write_text(
        "void run(const float *x, const float *w, float *out, long rows) {\n"
        f"  for (long i = 0; i < rows; i++) for (long j = 0; j < {width}; j++)\n"
        f"    out[i * {width} + j] = x[i * {width} + j] * w[j];\n}}\n"
    )
    time.sleep(float(os.environ.get("TOY_BUILD_SECONDS", "0")))
    subprocess.run(
        [os.environ.get("TOY_CC", "cc"), "-O1", "-shared", "-fPIC", "-o", str(work / "kernel.so"), str(source)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    with (cache_dir() / "builds.log").open("a") as log:
        log.write(f"{os.getpid()} {name}\n")
    shutil.rmtree(entry, ignore_errors=True)
    try:
        work.rename(entry)
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
    events.append(("build", name))
    return entry


def get_kernel(name: str) -> ctypes.CDLL:
    """What a call does: the loaded kernel, else from disk, else compiled now."""
    if name not in _loaded:
        _loaded[name] = ctypes.CDLL(str(compile_kernel(name) / "kernel.so"))
        events.append(("load", name))
    return _loaded[name]


@torch.library.custom_op("toy::scale", mutates_args=())
def scale(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, out = x.contiguous(), torch.empty_like(x)
    if x.shape[0]:
        kernel = get_kernel(name_of(w.shape[0], class_of(x.shape[0])))
        kernel.run(*(ctypes.c_void_p(t.data_ptr()) for t in (x, w, out)), ctypes.c_long(x.shape[0]))
    return out


@scale.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[1] == w.shape[0])
    return torch.empty_like(x)


class Toy:
    """The family of ``toy::scale``."""

    name = "toy"
    distributions = ("toy-jit",)
    devices = ("cpu", "cuda")

    def match(self, op: Any) -> Iterable[KernelCall | Gap]:
        if op.name == "scale" and op.namespace == "toy":
            yield op.call(self.name, "scale", {"x": op.arguments["x"], "w": op.arguments["w"]})

    def library(self, wanted: Mapping[str, str]) -> Library:
        return Library("toy-jit", wanted.get("toy-jit", "1.0"), installed=True, module=__name__)

    def keys(
        self, calls: Sequence[KernelCall], target: Target, library: Library
    ) -> Iterable[Planned | Gap]:
        for call in calls:
            width, rows = int(call["w"].dims[0]), call["x"].dims[0]
            image = bound.image(call, rows)
            sizes = image.rows[:, 0]
            kinds = np.where(sizes == 1, 0, np.where(sizes % 16 == 0, 1, 2))
            for kind, first in zip(*np.unique(kinds, return_index=True)):
                key = CompileKey(self.name, "scale", (str(width), CLASSES[kind]))
                yield Planned(key, bound.at(call, image.at(int(first))))

    def missing(self, planned: Sequence[Planned], target: Target) -> list[Planned]:
        def whole(p: Planned) -> bool:
            file = cache_dir() / name_of(*p.key.template) / "kernel.so"
            return file.is_file() and file.stat().st_size > 0

        return [p for p in planned if not whole(p)]

    def build(self, planned: Sequence[Planned], target: Target, jobs: int) -> Iterable[Built]:
        for p in planned:
            name, begin = name_of(*p.key.template), time.perf_counter()
            try:
                with hold(cache_dir() / "locks", name, f"toy kernel {name}"):
                    entry = compile_kernel(name)
                yield Built(
                    p.key, time.perf_counter() - begin, (entry / "kernel.so").stat().st_size
                )
            except subprocess.CalledProcessError as error:
                yield Built(
                    p.key, error=f"cc exited with {error.returncode}: {error.stderr.strip()[-200:]}"
                )

    def load(self, planned: Sequence[Planned], target: Target, bind: Any) -> Iterable[Loaded]:
        for p in planned:
            begin = time.perf_counter()
            x = p.witness["x"].dims
            scale(torch.zeros(int(x[0]), int(x[1])), torch.ones(int(x[1])))
            yield Loaded(p.key, time.perf_counter() - begin)

    def watch(self, report: Any) -> Any:
        """Like DeepGEMM, it has no hook: its files tell."""

        def describe(entry: Path, kind: str) -> JitEvent | None:
            if not entry.name.startswith("scale_"):
                return None
            key = CompileKey(self.name, "scale", tuple(entry.name.split("_")[1:]))
            seconds = seconds_of(entry / "kernel.c", entry / "kernel.so") if kind == "build" else 0
            return JitEvent(self.name, kind, entry.name, key=key, seconds=seconds)

        return watch_cache([cache_dir()], "kernel.so", describe, report)

    def cached(self, planned: Sequence[Planned]) -> list[Path]:
        return [cache_dir() / name_of(*p.key.template) / "kernel.so" for p in planned]
