"""Defines the ops of the namespace ``fxwarm``: schema, fake, CPU reference, CUDA call.

``Library.define`` and ``impl``, not ``torch.library.custom_op``, whose Python layers cost more per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
) -> torch._ops.OpOverload:
    """Define ``fxwarm::<schema>`` and return its overload; harmless where it is defined already.

    ``fake`` checks the arguments and returns empty outputs; ``cpu`` is the reference. Both get every
    argument by name, defaults filled in. ``fake`` also runs before each ``cpu`` call, so that a wrong call
    fails alike in a trace and on a machine without a GPU. ``cuda`` is the hot path: it gets the arguments
    by position as the dispatcher passes them, without trailing ones that have their default.

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
        return packet.default
    names = [argument.name for argument in parsed.arguments]
    defaults = {a.name: a.default_value for a in parsed.arguments if a.has_default_value()}

    def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}

    def call_fake(*args: Any, **kwargs: Any) -> Any:
        return fake(**by_name(args, kwargs))

    def call_cpu(*args: Any, **kwargs: Any) -> Any:
        given = by_name(args, kwargs)
        fake(**given)
        return cpu(**given)

    _library.define(schema, tags=_TAGS)
    _library.impl(name, call_cpu, "CPU")
    _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(full, call_fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
