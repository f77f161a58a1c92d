"""The plan in torch's ``aot_compile`` artifacts: written as JSON bytes, read by a hook on torch's own reader.

Torch pickles the name of the class that reads an artifact. It is torch's own, and the parcel is one more attribute of
torch's cache entry, so the artifact also loads where fxwarm is not installed. Where fxwarm is imported, in whichever
order with torch, the reader returns a warm callable. Importing this module imports no torch.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import logging
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

log = logging.getLogger(__name__)

FIELD = "fxwarm_parcel"
"""The attribute of torch's cache entry that holds the parcel."""

MODULE = "torch._dynamo.aot_compile_types"

_missed: list[tuple[weakref.ref[Any], bytes]] = []
"""What torch loaded before this process imported fxwarm, with its parcel."""


class Carrier:
    """Inductor's callable as torch's writer wants it; the entry that it gives also holds the parcel."""

    def __init__(self, inner: Any, parcel: bytes) -> None:
        self.inner = inner
        self.parcel = parcel

    def serialize(self) -> Any:
        """Return a copy of Inductor's cache entry: torch keeps the original in its own cache."""
        entry = copy.copy(self.inner.serialize())
        setattr(entry, FIELD, self.parcel)
        return entry


def parcel_of(loaded: Any) -> bytes | None:
    """Return the parcel of what torch's reader returned; None where it carries none."""
    try:
        parcel = getattr(loaded.compiled_fn.serialize(), FIELD, None)
    except Exception as error:  # it cannot be saved again, so it did not come from an artifact
        log.debug("fxwarm: no cache entry: %s", error)
        return None
    return parcel if isinstance(parcel, bytes) else None


def install() -> None:
    """Hook torch's reader, now or as soon as torch imports it, which ``import torch`` alone does not."""
    module = sys.modules.get(MODULE)
    if module is None:
        sys.meta_path.insert(0, _AfterImport(MODULE, hook))
    else:
        hook(module)


def hook(module: ModuleType) -> None:
    """Let the reader in ``module`` return warm callables; say what it has read before, which stays cold."""
    try:
        reader = module.BundledAOTAutogradSerializableCallable
        original = reader.deserialize_compile_artifacts.__func__
    except AttributeError as error:
        log.info("fxwarm: the plan of an aot_compile artifact cannot be read here: %s", error)
        return
    if getattr(original, "_fxwarm", False):
        return

    @functools.wraps(original)  # torch pickles it by its name
    def deserialize_compile_artifacts(cls: Any, data: bytes) -> Any:
        loaded = original(cls, data)
        parcel = parcel_of(loaded)
        if parcel is None:
            return loaded
        from fxwarm.artifacts import restore

        return restore(loaded, parcel)

    deserialize_compile_artifacts._fxwarm = True  # type: ignore[attr-defined]
    reader.deserialize_compile_artifacts = classmethod(deserialize_compile_artifacts)
    _note_missed(reader)


def _note_missed(reader: type) -> None:
    for found in gc.get_referrers(reader):  # its instances; 25 ms, where Dynamo came before fxwarm
        if type(found) is reader and (parcel := parcel_of(found)) is not None:
            _missed.append((weakref.ref(found), parcel))
    if _missed:
        log.warning(
            "fxwarm: not warmed: %d aot_compile graphs that were loaded before; import fxwarm before loading, or call "
            "fxwarm.warm_all()",
            len(_missed),
        )


def take_missed() -> list[bytes]:
    """Return, once, the parcels of what was loaded before fxwarm was imported and is still held."""
    found = [parcel for ref, parcel in _missed if ref() is not None]
    _missed.clear()
    return found


class _AfterImport:
    """A finder that finds ``name`` as the others do, and calls ``act`` with the module once it has run."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.act = act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        if self in sys.meta_path:  # once, and not in the search below
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self.act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
