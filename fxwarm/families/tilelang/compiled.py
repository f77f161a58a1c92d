"""One kernel from its key: from disk by our index, else elaborated, else compiled."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from fxwarm import exc
from fxwarm.families.tilelang import index, jit
from fxwarm.families.tilelang.statics import factory_of, statics_of
from fxwarm.records import CompileKey, Target

log = logging.getLogger(__name__)

_believed: dict[tuple[str, str, str], bool] = {}
"""Whether the index holds of a factory, by its path and the target, in this process."""


class Kernel(NamedTuple):
    """A compiled kernel and what it was made from."""

    factory: Any
    statics: dict[str, Any]
    prim_func: Any
    jit_kernel: Any


def get_kernel(key: CompileKey, target: Target) -> Kernel:
    """Return the kernel of ``key``, compiled for ``target`` and stored on disk, and remember it in the index.

    Elaborates only what the index does not know. Raises LibraryError for a factory that is not there or takes other
    arguments, and whatever the compiler raises.
    """
    factory, statics = jit.get(factory_of(key)), statics_of(key)
    lazy = jit.is_lazy(factory, statics)
    prim_func, disk_key = _remembered(key, factory, target) if lazy else (None, "")
    if prim_func is None:
        prim_func = jit.elaborate(factory, statics)
        disk_key, _ = jit.disk_key(factory, prim_func, target)
        index.write(key, target, disk_key, jit.to_json(prim_func))
    kernel = jit.compile(factory, prim_func, target)
    if jit.key_of(kernel) not in ("", disk_key):  # empty: the library's cache is switched off
        raise exc.LibraryError(f"TileLang filed {key} under another name than it gave; report it")
    return Kernel(factory, statics, prim_func, kernel)


def _remembered(key: CompileKey, factory: Any, target: Target) -> tuple[Any, str]:
    """Return the TIR of ``key`` and its disk key from the index, or (None, "").

    The first of each factory in a process is elaborated all the same, 0.15 s: where an edit outside the factory's
    module made all entries stale, it shows there, and none is believed.
    """
    entry = index.read(key, target)
    if entry is None or not _is_believed(key, factory, target, entry):
        return None, ""
    try:
        prim_func = jit.from_json(entry.read_tir())
        disk_key, _ = jit.disk_key(factory, prim_func, target)
    except Exception as error:  # TVM's own errors have no common base
        log.info(
            "fxwarm: what was remembered of %s cannot be read, it is made again: %s", key, error
        )
        return None, ""
    return (prim_func, disk_key) if disk_key == entry.disk_key else (None, "")


def _is_believed(key: CompileKey, factory: Any, target: Target, entry: index.Entry) -> bool:
    which = factory_of(key), target.device, target.arch
    if which not in _believed:
        disk_key, _ = jit.disk_key(factory, jit.elaborate(factory, statics_of(key)), target)
        _believed[which] = disk_key == entry.disk_key
        if not _believed[which]:
            log.warning(
                "fxwarm: %s makes another kernel than before; its stored kernels are not used",
                which[0],
            )
    return _believed[which]
