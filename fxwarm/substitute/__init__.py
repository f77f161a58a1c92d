"""Plain calls of kernel libraries become ops of the graph while fxwarm traces, and nowhere else.

User's code:
    deep_gemm.fp8_gemm_nt((x, x_sf), (w, w_sf), d)

Graph:
    fxwarm.fp8_gemm_nt(x, x_sf, w, w_sf, d)

A Python, pybind or tvm-ffi function breaks Dynamo's graph and vanishes from it. For the very object that the library
exports, under whatever name the user's code holds it, Dynamo is given our op instead, which calls that function. No
library is changed and nothing is patched in code that runs: ``backend="inductor"`` and eager code see the original.
What no op can express is left to the original and becomes a gap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fxwarm.records import Target
from fxwarm.substitute import device, dynamo, transformers
from fxwarm.substitute.functions import take_refusals

__all__ = ["install", "mark", "questions", "remove", "take_refusals"]


def install() -> bool:
    """Let Dynamo show library calls to fxwarm; return whether this torch allows it. Harmless when repeated."""
    return dynamo.install()


def remove() -> None:
    """Take ``install`` back: what is compiled stays as it is, later traces see the original functions."""
    dynamo.remove()


def mark(backend: Callable[..., Any]) -> None:
    """Make library calls visible while torch.compile traces for ``backend``, a function of one's own around fxwarm's."""
    setattr(backend, dynamo.MARK, True)


@contextlib.contextmanager
def questions(target: Target | str | None) -> Iterator[list[str]]:
    """Answer what host code asks about its device from ``target`` until the end of the block.

    Yields the questions that were answered with no for want of a target and a GPU; each has become a gap. Raises
    UnknownTargetError, and ValueError for a target that is no GPU.
    """
    if target is None:
        with transformers.note_questions() as denied:
            yield denied
        return
    found = Target.named(target) if isinstance(target, str) else target
    with device.answer_for(found), transformers.answer_for(found):
        yield []
