"""Which caches this start could use, by name: one that is kept helps little when the others are lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from fxwarm import artifacts, caches, family, store, warmup
from fxwarm.backend import fxwarm as backend
from fxwarm.records import Built, CompileKey, Library, Loaded, Planned
from tests import toy_family  # noqa: F401 (defines toy::scale)

FOLDERS = {
    "deep_gemm": ("DG_JIT_CACHE_DIR", "cache/kernel.toy.{}"),
    "flashinfer": ("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer/1/90a/cached_ops/{}"),
    "tilelang": ("TILELANG_CACHE_DIR", "1/linux/kernels/{}"),
}
ROOTS = ("deep_gemm", "flashinfer", "tilelang", "torch", "fxwarm")


class OnDisk:
    """A family whose kernel is a file where the real library of that name keeps its own."""

    devices = ("cpu",)

    def __init__(self, name: str) -> None:
        self.name, self.distributions = name, (f"{name}-toy",)

    def match(self, op):
        if (op.namespace, op.name) == ("toy", "scale"):
            yield op.call(self.name, "scale", {"x": op.arguments["x"], "w": op.arguments["w"]})

    def library(self, wanted):
        return Library(self.distributions[0], "1.0", installed=True, module="toy")

    def keys(self, calls, target, library):
        return [Planned(CompileKey(self.name, kernel), calls[0]) for kernel in ("one", "two")]

    def file(self, key):
        variable, place = FOLDERS[self.name]
        return Path(os.environ[variable], place.format(key.kernel), "kernel.so")

    def missing(self, planned, target):
        return [p for p in planned if not self.file(p.key).is_file()]

    def build(self, planned, target, jobs):
        for p in planned:
            self.file(p.key).parent.mkdir(parents=True)
            self.file(p.key).write_bytes(b"binary")
            yield Built(p.key, 0.1, 6)

    def load(self, planned, target, bind):
        return [Loaded(p.key) for p in planned]

    def cached(self, planned):
        return [self.file(p.key) for p in planned]


class Model(torch.nn.Module):
    def forward(self, x, w):
        return torch.ops.toy.scale(x + 1, w)


@pytest.fixture
def start(fresh, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(fresh / "flashinfer"))
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(fresh / "tensorrt_llm"))
    for name in FOLDERS:
        family.register(OnDisk(name), replace=True)

    @torch.no_grad()
    def run() -> caches.Status:
        """What a new process does with the caches there are."""
        warmup._resident.clear()
        artifacts.pending.clear()
        store._root.cache_clear()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.compile(Model(), backend=backend)(torch.ones(5, 8), torch.ones(8))
        return caches.examine()

    yield run
    warmup._resident.clear()
    artifacts.pending.clear()
    for name in FOLDERS:
        family.unregister(name)


def test_the_caches_that_were_lost_show_as_misses_by_name(start, fresh):
    """ai-dynamo/dynamo#10695"""
    first = {root.name: (root.hits, root.misses) for root in start().roots}
    assert first == {name: (0, 2 if name in FOLDERS else 1) for name in ROOTS}
    for name in ("deep_gemm", "flashinfer", "tilelang", "fxwarm"):
        shutil.rmtree(fresh / name)
    status = start()
    assert {root.name for root in status.roots if root.misses} == {*ROOTS} - {"torch"}
    roots = {root.name: root for root in status.roots}
    assert (roots["torch"].hits, roots["torch"].misses) == (1, 0)
    assert all(root.entries and root.bytes for root in roots.values()), "size and entries of each"
    assert status.is_of_this_start
    assert "deep_gemm: 2 of 2 were not there" in str(status.table())


def test_with_all_kept_there_are_no_misses(start):
    start()
    status = start()
    assert {root.name: root.misses for root in status.roots} == dict.fromkeys(ROOTS, 0)
    assert {root.name: root.hits for root in status.roots} == {
        name: 2 if name in FOLDERS else 1 for name in ROOTS
    }
