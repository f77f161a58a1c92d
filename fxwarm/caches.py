"""What lies in the caches that a warm start stands on: entries, sizes, and which stored plans use them.

Five roots, and keeping one of them helps little when the four others are lost (ai-dynamo/dynamo#10695): DeepGEMM's,
FlashInfer's, TileLang's, torch.compile's, and our own plans and receipts.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from fxwarm import this_start
from fxwarm.records import WarmPlan, WarmReport
from passes.table import Table, size

T = TypeVar("T")

NAMES = ("deep_gemm", "flashinfer", "tilelang", "torch", "fxwarm")


class CacheEntry(msgspec.Struct):
    """One kernel, module or folder of a cache."""

    name: str
    path: str
    bytes: int
    plans: list[str]
    """Warm keys of the stored plans that use it."""


class Root(msgspec.Struct):
    """One cache: where it is, what is in it, and what the stored plans miss in it."""

    name: str
    paths: list[str]
    entries: list[CacheEntry]
    hits: int = 0
    """What this start found there. In a process that has warmed nothing: files that the receipts name (for torch: graphs
    of the stored plans) and that are there."""
    misses: int = 0
    """What this start had to make; else what the receipts name and is not there: the next start makes it again."""

    @property
    def bytes(self) -> int:
        """Size of all entries."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def unused(self) -> list[CacheEntry]:
        """Entries that no stored plan uses."""
        return [entry for entry in self.entries if not entry.plans]


class Status(msgspec.Struct):
    """All roots, and the keys of the stored plans."""

    roots: list[Root]
    plans: list[str]
    is_of_this_start: bool = False
    """Whether hits and misses are those of the warmups of this process."""

    def table(self) -> Table:
        """Return a row a root, largest facts first."""
        rows = [
            (
                "\n".join((root.name, *root.paths)),
                f"{len(root.entries):,}",
                size(root.bytes),
                f"{len(root.entries) - len(root.unused):,}" if root.name != "torch" else "",
                str(root.hits) if root.hits or root.misses else "",
                str(root.misses) if root.hits or root.misses else "",
            )
            for root in self.roots
        ]
        words = (
            "were not there, and made by this start; keep this folder for the next"
            if self.is_of_this_start
            else "are lost; the next start makes them again, unless this folder is kept too"
        )
        notes = [
            f"{root.name}: {root.misses} of {root.hits + root.misses} {words}"
            for root in self.roots
            if root.misses
        ]
        title = (
            f"caches of {len(self.plans)} stored plans, {size(sum(r.bytes for r in self.roots))}"
        )
        columns = ("cache", "entries>", "size>", "used by plans>", "hits>", "misses>")
        return Table(title, columns, rows, notes)


def examine(environ: Mapping[str, str] = os.environ) -> Status:
    """Look at every cache of this user, with the folders that ``environ`` names; nothing is imported or changed."""
    from fxwarm import store

    own = store.root(environ.get("FXWARM_CACHE_DIR", ""))
    plans = _stored(own, "plan", WarmPlan)
    receipts = _stored(own, "receipt", WarmReport)
    users: dict[str, list[str]] = {}
    for key, receipt in receipts.items():
        for entry in receipt.entries:
            users.setdefault(os.path.realpath(entry.path), []).append(key)
    roots = [
        _library("deep_gemm", *_deep_gemm(environ), users),
        _library("flashinfer", *_flashinfer(environ), users),
        _library("tilelang", *_tilelang(environ), users),
        _torch(own, environ, plans),
        _own(own, plans, receipts),
    ]
    counted = this_start.counts()
    if counted is not None:
        for root in roots:
            root.hits, root.misses = (found[root.name] for found in counted)
    return Status(roots, sorted(plans), is_of_this_start=counted is not None)


def remove(
    entries: Iterable[CacheEntry], done: Callable[[CacheEntry], None] = lambda entry: None
) -> int:
    """Delete entries; return the bytes that became free. A link is removed, never what it points to.

    Each is renamed first, so that no library sees half an entry. Raises OSError where that is not allowed.
    """
    freed = 0
    for entry in entries:
        path = Path(entry.path)
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            aside = path.with_name(f".removed-{uuid.uuid4().hex}")
            path.rename(aside)
            shutil.rmtree(aside)
        freed += entry.bytes
        done(entry)
    return freed


Kernels = tuple[list[Path], list[Path]]
"""Folders of a cache, and the entries in them."""


def _deep_gemm(environ: Mapping[str, str]) -> Kernels:
    from fxwarm.families.deep_gemm import cache

    folders: dict[Path, None] = {}
    for generation in ("A", "B"):
        folders.update(dict.fromkeys(cache.roots(generation, environ).all))
    found = [folder for folder in folders if folder.is_dir()]
    return found, [entry for folder in found for entry in _children(folder / "cache")]


def _flashinfer(environ: Mapping[str, str]) -> Kernels:
    home = environ.get("HOME") or os.path.expanduser("~")
    base = Path(environ.get("FLASHINFER_WORKSPACE_BASE") or home, ".cache", "flashinfer")
    block = Path(environ.get("TRTLLM_DG_CACHE_DIR") or Path(home, ".tensorrt_llm"))
    modules = [
        entry
        for version in _children(base)
        for archs in _children(version)
        for kind in ("cached_ops", "fxwarm")
        for entry in _children(archs / kind)
    ]
    found = [folder for folder in (base, block) if folder.is_dir()]
    return found, [*modules, *_children(block / "cache")]


def _tilelang(environ: Mapping[str, str]) -> Kernels:
    home = environ.get("HOME") or os.path.expanduser("~")
    base = Path(environ.get("TILELANG_CACHE_DIR") or Path(home, ".tilelang", "cache"))
    kernels = [
        entry
        for version in _children(base)
        for platform in _children(version)
        for entry in _children(platform / "kernels")
    ]
    return [base] if base.is_dir() else [], kernels


def _library(
    name: str, folders: list[Path], entries: list[Path], users: Mapping[str, list[str]]
) -> Root:
    found = []
    for path in entries:
        real = os.path.realpath(path)
        plans = {
            key
            for file, keys in users.items()
            for key in keys
            if file == real or file.startswith(real + os.sep)
        }
        found.append(CacheEntry(path.name, str(path), _size(path), sorted(plans)))
    tops = [os.path.realpath(folder) + os.sep for folder in folders] or _tops(name)
    mine = [file for file in users if any(file.startswith(top) for top in tops)]
    hits = sum(os.path.exists(file) for file in mine)
    return Root(name, [str(folder) for folder in folders], found, hits, len(mine) - hits)


def _tops(name: str) -> list[str]:
    """Return where files of a lost cache would lie."""
    home = os.path.expanduser("~")
    folders = {
        "deep_gemm": [
            os.environ.get("DG_JIT_CACHE_DIR", "").split(":")[0],
            f"{home}/.deep_gemm",
            f"{home}/.dj",
        ],
        "flashinfer": [os.environ.get("FLASHINFER_WORKSPACE_BASE", home) + "/.cache/flashinfer"],
        "tilelang": [os.environ.get("TILELANG_CACHE_DIR", f"{home}/.tilelang/cache")],
    }
    return [os.path.realpath(folder) + os.sep for folder in folders[name] if folder]


def _torch(own: Path, environ: Mapping[str, str], plans: Mapping[str, WarmPlan]) -> Root:
    """Return Inductor's folder without ours, which lies in it by default."""
    from fxwarm import store

    given = environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    base = Path(given or os.path.dirname(store._beside_inductor()))
    entries = [
        CacheEntry(path.name, str(path), _size(path), [])
        for path in _children(base)
        if path.resolve() != own.resolve()
    ]
    keys = [plan.graph_key for plan in plans.values() if plan.graph_key[:1] in ("a", "f")]
    hits = sum(_has_graph(base, key) for key in keys)
    return Root("torch", [str(base)] if base.is_dir() else [], entries, hits, len(keys) - hits)


def _has_graph(base: Path, key: str) -> bool:
    return (base / "aotautograd" / key).exists() or (base / "fxgraph" / key[1:3] / key).exists()


def _own(own: Path, plans: Mapping[str, WarmPlan], receipts: Mapping[str, WarmReport]) -> Root:
    entries = [
        CacheEntry(path.name, str(path), _size(path), [path.name] if path.name in plans else [])
        for path in _children(own)
    ]
    hits = sum(key in receipts for key in plans)
    return Root("fxwarm", [str(own)], entries, hits, len(plans) - hits)


def _stored(own: Path, what: str, cls: type[T]) -> dict[str, T]:
    from fxwarm import store

    found: dict[str, T] = {}
    for folder in _children(own):
        record = store.read(folder / f"{what}.json", cls) if folder.is_dir() else None
        if record is not None:
            found[folder.name] = record
    return found


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _size(path: Path) -> int:
    """Return the bytes of a file or of all files below a folder; links are not followed."""
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        with os.scandir(path) as inside:
            return sum(_size(Path(entry.path)) for entry in inside)
    except OSError:
        return 0


def select(status: Status, names: Collection[str]) -> list[CacheEntry]:
    """Return the entries of the named roots that no stored plan uses."""
    return [entry for root in status.roots if root.name in names for entry in root.unused]
