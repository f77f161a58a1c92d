"""Sees each call of a JIT op before its library does, while a monitor wants that; costs nothing otherwise.

A guard is a kernel put in front of the op's own in torch's dispatcher, and taken away again: no wrapper stays in the
path. While it is there, a size seen before costs one look-up in a dict. The plan decides: a call whose modelled keys
are all resident is let through.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fxwarm.family import KernelFamily, load_families
from fxwarm.records import Library, Planned, Target
from passes.calls import SymTensor
from passes.flatten import BUILTIN, OpCall
from passes.records import KernelCall

log = logging.getLogger(__name__)


class Miss(NamedTuple):
    """A call that needs a kernel which this process has not loaded."""

    family: KernelFamily
    call: KernelCall
    planned: Planned
    target: Target
    device: str


Around = Callable[[list[Miss], Callable[[], Any]], Any]
"""What to do with a call that misses: it gets the misses and the call itself."""

_lock = threading.RLock()
_ran: set[tuple[str, object]] = set()
"""(device, key) of what a guarded call needed beyond the plans: it is resident since."""
_installed: dict[tuple[str, str], torch.library.Library] = {}


def install(around: Around) -> None:
    """Guard every registered op that a family claims, on the devices of this machine; those guarded already stay."""
    families = list(load_families().values())
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered kernel")
        for overload in _overloads():
            claiming = [f for f in families if _claims(f, overload)]
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
        misses = misses_of(overload, families, args, kwargs)
        if not misses:
            warm.add(seen)
            return kernel.call_boxed(keyset, *args, **kwargs)
        result = around(misses, lambda: kernel.call_boxed(keyset, *args, **kwargs))
        _ran.update((m.device, m.planned.key) for m in misses)
        warm.add(seen)
        return result

    library = torch.library.Library(overload.namespace, "FRAGMENT")
    name = overload.name().partition("::")[2]
    library.impl(name, guarded, device, with_keyset=True, allow_override=True)
    return library


def misses_of(
    overload: Any, families: list[KernelFamily], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Miss]:
    """Return the kernels that this call needs and this process has not loaded. Never raises: a model may be wrong."""
    from fxwarm import runtime, warmup

    arguments = {}
    for at, argument in enumerate(overload._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        arguments[argument.name] = _read(
            args[at] if at < len(args) else kwargs.get(argument.name, default)
        )
    device = runtime.device_of([*args, *kwargs.values()])
    found = []
    for family in families:
        try:
            op = OpCall(
                overload.namespace, overload._schema.name.partition("::")[2], arguments, overload
            )
            target = Target.current(device)
            library = family.library({})
            for call in family.match(op):
                if isinstance(call, KernelCall) and isinstance(library, Library):
                    found += [
                        Miss(family, call, p, target, str(device))
                        for p in family.keys([call], target, library)
                        if isinstance(p, Planned)
                        and not warmup.is_resident(device, p.key)
                        and (str(device), p.key) not in _ran
                    ]
        except Exception as error:
            log.debug("fxwarm: cannot say what %s needs: %s", overload, error)
    return found


def _read(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = None if value.is_contiguous() else tuple(value.stride())
        return SymTensor(
            str(value.dtype).removeprefix("torch."), tuple(value.shape), strides, value.device.type
        )
    return tuple(map(_read, value)) if isinstance(value, list | tuple) else value


def _signature(values: Any) -> tuple[object, ...]:
    return tuple(
        (v.shape, v.dtype, v.stride())
        if isinstance(v, torch.Tensor)
        else _signature(v)
        if isinstance(v, list | tuple)
        else v
        for v in values
    )


class _Probe(Mapping[str, Any]):
    """Arguments that nobody may read: a family that tries knows the op's name."""

    def __getitem__(self, name: str) -> Any:
        raise LookupError(name)

    def __iter__(self) -> Iterator[str]:
        raise LookupError

    def __len__(self) -> int:
        raise LookupError


def _claims(family: KernelFamily, overload: Any) -> bool:
    name = overload._schema.name.partition("::")[2]
    try:
        return any(True for _ in family.match(OpCall(overload.namespace, name, _Probe(), overload)))
    except Exception:
        return True


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
