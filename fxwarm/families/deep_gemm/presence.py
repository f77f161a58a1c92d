"""Which planned kernels the library's cache holds, and which of its entries nobody planned."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from fxwarm.families.deep_gemm import cache
from fxwarm.families.deep_gemm.cache import Roots
from fxwarm.families.deep_gemm.match import FAMILY
from fxwarm.families.deep_gemm.source import key_in, tag_of
from fxwarm.records import CompileKey, Planned
from passes.records import Gap

__all__ = ["held", "key_of_entry", "unplanned"]


def held(planned: Sequence[Planned], where: Roots) -> dict[CompileKey, Path]:
    """Return the folder of each planned kernel that the cache holds whole.

    A recorded kernel by the name of its entry, which stands for source, flags and compiler. A
    modelled one by what the sources in the cache instantiate: where several do, compiled with
    other flags or headers, the library may still compile its own, which ``verify`` then shows.
    """
    found: dict[CompileKey, Path] = {}
    modelled = {p.key for p in planned if p.source is None}
    for p in planned:
        if p.source is not None and (folder := cache.find(where, p.source.entry)) is not None:
            found[p.key] = folder
    if modelled:
        tags = {key.tag for key in modelled}
        for name, folder in cache.entries(where).items():
            if tag_of(name) in tags and (key := key_of_entry(name, folder)) in modelled:
                assert key is not None
                found.setdefault(key, folder)
    return found


def unplanned(new: Mapping[str, Path], planned: Sequence[Planned]) -> list[Gap]:
    """Return a gap for each of ``new`` entries that is none of ``planned``."""
    names = {p.source.entry for p in planned if p.source is not None}
    keys = {p.key for p in planned}
    gaps = []
    for name, folder in sorted(new.items()):
        key = key_of_entry(name, folder)
        if name not in names and key not in keys:
            gaps.append(
                Gap(
                    tag_of(name),
                    f"the library compiled {key or name}, which was not planned (or another process "
                    "that shares its cache did); report it with the shapes of your model",
                    family=FAMILY,
                )
            )
    return gaps


def key_of_entry(name: str, folder: Path) -> CompileKey | None:
    """Return the key of an entry by its source, None for a source that cannot be read."""
    try:
        return _key(name, folder, (folder / cache.CODE).stat().st_mtime_ns)
    except (OSError, ValueError):
        return None


@functools.lru_cache(maxsize=4096)
def _key(name: str, folder: Path, changed: int) -> CompileKey:
    del changed
    return key_in((folder / cache.CODE).read_text(), tag_of(name))
