"""Defines the ops of the namespace ``fxwarm``: schema, fake, CPU reference, CUDA call.

``Library.define`` and ``impl``, not ``torch.library.custom_op``: a mutating op of nine arguments that does
nothing took 2.3 against 28 us a call under inference_mode, 5 against 70 with grad enabled (torch 2.13, CPU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

NAMESPACE = "fxwarm"

# A fragment: several modules define into the namespace. It lives as long as the kernels in it, whose
# globals refer to it, so a reload or a second import unregisters nothing.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

# The strides that the graph shows are those that the library sees: at M=1 another stride of a_sf is
# another scale-layout kernel of DeepGEMM.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def define_op(
    schema: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    by_name: bool = False,
) -> torch._ops.OpOverload:
    """Define ``fxwarm::<schema>`` and return its overload; harmless where it is defined already.

    ``fake`` checks the arguments and returns empty outputs; it also runs before each ``cpu`` call, so that
    a wrong call fails alike in a trace and on a machine without a GPU, and never before ``cuda``. All get
    the arguments by position, as the dispatcher passes them: without trailing ones that have their
    default. With ``by_name``, ``fake`` and ``cpu`` get each argument by name, defaults filled in.

    Raises RuntimeError where the op exists with another schema.
    """
    name = schema[: schema.index("(")]
    full = f"{NAMESPACE}::{name}"
    parsed = torch._C.parse_schema(f"{NAMESPACE}::{schema}")
    packet = getattr(getattr(torch.ops, NAMESPACE), name, None)
    if packet is not None:
        found = packet.default._schema
        if found != parsed:
            raise RuntimeError(
                f"{full} is already defined as {found}; two versions of fxwarm are in this process: "
                "start a new one"
            )
        return cast(torch._ops.OpOverload, packet.default)
    if by_name:
        fake, cpu = _by_name(parsed, fake), _by_name(parsed, cpu)

    def checked(*args: Any, **kwargs: Any) -> Any:
        fake(*args, **kwargs)
        return cpu(*args, **kwargs)

    _library.define(schema, tags=_TAGS)
    _library.impl(name, checked, "CPU")
    _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(full, fake, lib=_library)
    return cast(torch._ops.OpOverload, getattr(getattr(torch.ops, NAMESPACE), name).default)


def _by_name(schema: torch._C.FunctionSchema, function: Callable[..., Any]) -> Callable[..., Any]:
    names = [argument.name for argument in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**{**defaults, **dict(zip(names, args, strict=False)), **kwargs})

    return call
