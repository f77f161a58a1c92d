"""Sees each call of a JIT op before its library does: during a CUDA graph capture, and where "raise" must stop it.

A guard is a kernel put in front of the op's own in torch's dispatcher, and taken away again: no wrapper stays in the
path, and "count" and "warn" put none there outside a capture. While it is there, a size seen before costs one look-up in
a dict. The plan decides: a call whose modelled keys are all resident is let through.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from fxwarm.family import KernelFamily
from fxwarm.monitor import misses
from fxwarm.monitor.misses import Miss
from passes.flatten import BUILTIN

log = logging.getLogger(__name__)

Around = Callable[[list[Miss], Callable[[], Any]], Any]
"""What to do with a call that misses: it gets the misses and the call itself."""

_lock = threading.RLock()
_installed: dict[tuple[str, str], torch.library.Library] = {}


def install(around: Around) -> None:
    """Guard every registered op that a family claims, on the devices of this machine; those guarded already stay."""
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered kernel")
        for overload in _overloads():
            claiming = misses.claiming(overload)
            for device in _devices(claiming):
                name = (overload.name(), device)
                if name not in _installed:
                    try:
                        _installed[name] = _guard(overload, device, claiming, around)
                    except (
                        RuntimeError,
                        AttributeError,
                    ) as error:  # no kernel for this device, an older torch
                        log.debug("fxwarm: no guard on %s for %s: %s", *name, error)


def remove() -> None:
    """Take every guard away."""
    with _lock:
        for library in _installed.values():
            library._destroy()
        _installed.clear()


def _guard(
    overload: Any, device: str, families: list[KernelFamily], around: Around
) -> torch.library.Library:
    kernel = torch.library.get_kernel(overload, device)
    warm: set[object] = set()

    def guarded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        seen = _signature(args), _signature(kwargs.items()) if kwargs else ()
        if seen in warm:
            return kernel.call_boxed(keyset, *args, **kwargs)
        found = misses.misses_of(misses.read(overload, args, kwargs), families)
        if not found:
            warm.add(seen)
            return kernel.call_boxed(keyset, *args, **kwargs)
        result = around(found, lambda: kernel.call_boxed(keyset, *args, **kwargs))
        misses.ran.update((m.device, m.planned.key) for m in found)
        warm.add(seen)
        return result

    library = torch.library.Library(overload.namespace, "FRAGMENT")
    name = overload.name().partition("::")[2]
    library.impl(name, guarded, device, with_keyset=True, allow_override=True)
    return library


def _signature(values: Any) -> tuple[object, ...]:
    return tuple(
        (v.shape, v.dtype, v.stride())
        if isinstance(v, torch.Tensor)
        else _signature(v)
        if isinstance(v, list | tuple)
        else v
        for v in values
    )


def _overloads() -> list[Any]:
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full.partition("::")
        if namespace not in BUILTIN:
            name, _, overload = rest.partition(".")
            try:
                found.append(
                    getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
                )
            except AttributeError:  # registered without a schema
                continue
    return found


def _devices(claiming: list[KernelFamily]) -> list[str]:
    kinds = {kind for family in claiming for kind in getattr(family, "devices", ("cuda",))}
    return [k.upper() for k in sorted(kinds) if k == "cpu" or torch.cuda.is_available()]
