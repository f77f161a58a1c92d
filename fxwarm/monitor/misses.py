"""Which kernels a call needs that this process has not loaded: the call's own arguments are asked, by each family."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fxwarm.family import KernelFamily, load_families
from fxwarm.records import Library, Planned, Target
from passes.calls import SymTensor
from passes.flatten import OpCall
from passes.records import KernelCall

log = logging.getLogger(__name__)


class Miss(NamedTuple):
    """A kernel that a call needs."""

    family: KernelFamily
    call: KernelCall
    planned: Planned
    target: Target
    device: str


class Arguments(NamedTuple):
    """What a call was given, by schema name, without its tensors: to keep one alive would change the program."""

    overload: Any
    values: Mapping[str, Any]
    device: torch.device


ran: set[tuple[str, object]] = set()
"""(device, key) of what was loaded by calls outside the plans: it is resident since."""
_claiming: dict[Any, tuple[list[KernelFamily], list[KernelFamily]]] = {}
"""By overload: the families there were, and those that recognise it."""


def read(overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a call of ``overload``, defaults filled in."""
    from fxwarm import runtime

    values = {}
    for at, argument in enumerate(overload._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        given = args[at] if at < len(args) else kwargs.get(argument.name, default)
        values[argument.name] = _without_tensors(given)
    return Arguments(overload, values, runtime.device_of([*args, *kwargs.values()]))


def needs_of(given: Arguments, families: list[KernelFamily] | None = None) -> list[Miss]:
    """Return every kernel that a call needs, by the families' models. Never raises: a model may be wrong."""
    overload, found = given.overload, []
    for family in claiming(overload) if families is None else families:
        try:
            name = overload._schema.name.partition("::")[2]
            op = OpCall(overload.namespace, name, given.values, overload)
            target = Target.current(given.device)
            library = family.library({})
            for call in family.match(op):
                if isinstance(call, KernelCall) and isinstance(library, Library):
                    found += [
                        Miss(family, call, p, target, str(given.device))
                        for p in family.keys([call], target, library)
                        if isinstance(p, Planned)
                    ]
        except Exception as error:
            log.debug("fxwarm: cannot say what %s needs: %s", overload, error)
    return found


def misses_of(given: Arguments, families: list[KernelFamily] | None = None) -> list[Miss]:
    """Return what a call needs and this process has not loaded."""
    from fxwarm import warmup

    return [
        m
        for m in needs_of(given, families)
        if not warmup.is_resident(given.device, m.planned.key)
        and (m.device, m.planned.key) not in ran
    ]


def claiming(overload: Any) -> list[KernelFamily]:
    """Return the families that recognise ``overload``."""
    families = list(load_families().values())
    known = _claiming.get(overload)
    if known is None or known[0] != families:  # one was registered since
        known = _claiming[overload] = families, [f for f in families if _claims(f, overload)]
    return known[1]


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


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = None if value.is_contiguous() else tuple(value.stride())
        return SymTensor(
            str(value.dtype).removeprefix("torch."), tuple(value.shape), strides, value.device.type
        )
    return tuple(map(_without_tensors, value)) if isinstance(value, list | tuple) else value
