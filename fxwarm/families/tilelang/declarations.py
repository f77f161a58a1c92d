"""Any TileLang kernel behind a custom op, in one declaration.

    from fxwarm.families.tilelang import declare, of

    declare(
        op="mylib::rms_norm",
        factory="mylib.kernels:rms_norm",
        statics=lambda call, target: {
            "hidden": call["x"].dims[1],
            "tiles": of("Min(8, (m + 63)//64)", m=call["x"].dims[0]),
            "eps": call.attr("eps"),
        },
    )

``statics`` are the factory's static arguments by name: numbers, strings, dims of the call, or what ``of`` computes from
them. What follows from a dynamic size is enumerated over every size that the graph can take. A graph knows no SM count,
``target.num_sms`` does. The factory must be importable by name, since worker processes build it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

from fxwarm import exc
from fxwarm.families.tilelang.statics import is_named
from fxwarm.records import Target
from passes.records import Dim, KernelCall


@dataclasses.dataclass(frozen=True)
class Expr:
    """A static that follows from sizes of the call, as text over its symbols."""

    text: str


StaticsOf = Callable[[KernelCall, Target], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Declaration:
    """An op, the factory of the kernel it launches, and how its static arguments follow from a call."""

    op: str
    factory: str
    statics: StaticsOf


_declared: dict[str, Declaration] = {}
_lock = threading.Lock()


def declare(op: str, factory: str, statics: StaticsOf) -> None:
    """Say that the custom op ``op`` ("ns::name") launches the TileLang kernel of ``factory`` ("module:attribute").

    A second declaration of an op replaces the first. Raises ValueError for names that are not written so.
    """
    if op.count("::") != 1:
        raise ValueError(f"{op!r} is no op; write it as 'namespace::name'")
    if factory.count(":") != 1 or not all(factory.split(":")):
        raise ValueError(f"{factory!r} is no factory; write it as 'package.module:attribute'")
    with _lock:
        _declared[op] = Declaration(op, factory, statics)


def undeclare(op: str) -> None:
    """Take a declaration back."""
    with _lock:
        _declared.pop(op, None)


def find(op: str) -> Declaration | None:
    """Return the declaration of ``op``."""
    return _declared.get(op)


OWN = (
    "tile_kernels.mhc.",
    "fxwarm.ops.mhc_kernels:",
    "vllm.model_executor.kernels.mhc.tilelang_kernels:",
)
"""Where the factories lie that this family names itself."""


def check_factory(path: str) -> None:
    """Raise LibraryError for a factory that nobody here named: a plan from a file must not choose what is imported."""
    declared = is_named(path) or any(d.factory == path for d in _declared.values())
    if not declared and not path.startswith(OWN):
        raise exc.LibraryError(
            f"{path!r} was not declared in this process, so it is not imported; "
            "call fxwarm.families.tilelang.declare, or remove the plan that names it"
        )


def of(text: str, **sizes: Dim | int) -> Expr:
    """Return the static that ``text`` computes from ``sizes``, as in ``of("Min(8, (m + 63)//64)", m=call["x"].dims[0])``.

    Integers only; ``//``, ``Min``, ``Max``, ``Mod`` and ``Where(condition, a, b)`` are known. Raises ValueError else.
    """
    from passes import expr

    values = {
        name: expr.parse(size.expr if isinstance(size, Dim) else str(size))
        for name, size in sizes.items()
    }
    found = expr.parse(text)
    return Expr(
        expr.to_text(found.xreplace({expr.symbol(name): value for name, value in values.items()}))
    )
