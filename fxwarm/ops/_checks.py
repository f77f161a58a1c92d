"""Checks of a call's tensors, for fakes: a contradiction raises with both shapes, a symbol is resolved.

A dimension that a weight decides (K, N, groups) is asserted, so that a symbolic one becomes the weight's
number. One that the batch decides (M) is only compared where both sizes are known, so it gets no guard.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from fxwarm.exc import ShapeMismatchError

Size = Any
"""An int or a SymInt."""


def describe(tensor: torch.Tensor) -> str:
    """Return the dtype and shape of ``tensor``, as in ``bfloat16[s77, 2112]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def check_dtype(op: str, name: str, tensor: torch.Tensor, allowed: Collection[torch.dtype]) -> None:
    """Raise ShapeMismatchError unless the dtype of ``tensor`` is one of ``allowed``."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ShapeMismatchError(f"{op}: {name} is {describe(tensor)}; give it as {names}")


def check_rank(op: str, name: str, tensor: torch.Tensor, form: str) -> None:
    """Raise ShapeMismatchError unless ``tensor`` has as many dims as ``form``, such as "[G, N, K]"."""
    if tensor.dim() != form.count(",") + 1:
        raise ShapeMismatchError(f"{op}: {name} is {describe(tensor)}; give it as {form}")


def check_shape(
    op: str,
    name: str,
    tensor: torch.Tensor,
    wanted: Sequence[Size],
    because: str,
    *,
    rows: Collection[int] = (),
) -> None:
    """Raise ShapeMismatchError unless ``tensor`` has the shape ``wanted``, which ``because`` explains.

    ``rows`` are the dims that the batch decides: never guarded on.
    """

    def message() -> str:
        sizes = ", ".join(map(str, wanted))
        return f"{op}: {name} is {describe(tensor)}, but {because} needs [{sizes}]; make them agree"

    if tensor.dim() != len(wanted):
        raise ShapeMismatchError(message())
    for dim, (have, want) in enumerate(zip(tensor.shape, wanted, strict=True)):
        if isinstance(have, int) and isinstance(want, int):
            if have != want:
                raise ShapeMismatchError(message())
        elif dim in rows:
            if _known_to_differ(have, want):
                raise ShapeMismatchError(message())
        else:
            try:
                torch._check_value(have == want, message)
            except ValueError as error:
                raise ShapeMismatchError(str(error)) from None


def _known_to_differ(have: Any, want: Any) -> bool:
    """Return whether two sizes differ for certain; adds no guard on a symbolic one."""
    # Imported here: it brings sympy, three quarters of a second that `import fxwarm` must not cost.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(have != want))
