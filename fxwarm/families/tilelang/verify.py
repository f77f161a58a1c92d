"""After the fact: is each kernel where a call looks first, and is it the kernel of its key?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fxwarm import exc
from fxwarm.families.tilelang import index, jit
from fxwarm.families.tilelang.load import is_resident
from fxwarm.families.tilelang.statics import FAMILY, factory_of, statics_of
from fxwarm.records import CompileKey, Planned, Target
from passes.records import Gap


def verify(
    planned: Sequence[Planned], targets: Mapping[CompileKey, Target], *, elaborate: bool = False
) -> list[Gap]:
    """Return a gap for each of ``planned`` that a call would not find, or that has another kernel's name.

    With ``elaborate`` the factory's Python is run again for each, 0.15 s an mHC kernel: then nothing that we remember
    is believed.
    """
    gaps = []
    for one in planned:
        try:
            reason = _why_not(one.key, targets.get(one.key), elaborate)
        except exc.LibraryError as error:
            reason = str(error)
        if reason:
            gaps.append(Gap(str(one.key), reason, family=FAMILY))
    return gaps


def _why_not(key: CompileKey, target: Target | None, elaborate: bool) -> str:
    if not is_resident(key):
        return "not resident: the first call will elaborate it, and may compile; load it"
    factory, statics = jit.get(factory_of(key)), statics_of(key)
    kernel = jit.level_one(factory, statics) if jit.is_lazy(factory, statics) else None
    if kernel is None or target is None or not jit.key_of(kernel):
        return ""
    prim_func = jit.elaborate(factory, statics) if elaborate else kernel.prim_func
    disk_key, _ = jit.disk_key(factory, prim_func, target)
    if disk_key != jit.key_of(kernel):
        return f"a kernel of another key answers ({jit.key_of(kernel)[:12]}, not {disk_key[:12]}); clear TileLang's cache"
    return ""


def files(planned: Sequence[Planned], targets: Mapping[CompileKey, Target]) -> list[Path]:
    """Return the files of the library's cache that hold ``planned``, and ours that lead there."""
    found: list[Path] = []
    for one in planned:
        target = targets.get(one.key)
        entry = index.read(one.key, target) if target is not None else None
        if target is None or entry is None:
            continue
        folder = index.folder_of(entry)
        found += [
            index.path_of(one.key, target),
            *sorted(p for p in folder.glob("*") if p.is_file()),
        ]
    return found
