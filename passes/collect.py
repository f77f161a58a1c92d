"""Asks each matcher about each op of a graph, and keeps the calls, the gaps and what nobody claimed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from passes.flatten import OpCall, flatten
from passes.graphs import make_bounder
from passes.records import Gap, KernelCall, ShapeSet, Site, UnknownOp

if TYPE_CHECKING:
    import torch

Matcher = Callable[[OpCall], Iterable[KernelCall | Gap]]
"""What a family knows of an op: the kernel calls it makes. Empty: not mine. Raises ValueError for impossible shapes."""


@dataclasses.dataclass(frozen=True)
class Collected:
    """What ``collect`` found. ``weights`` says, for a call, which graph input each of its static tensors is: argument ->
    index, at the first place that makes the call. ``used_max_size`` are the sizes that only ``max_size`` bounds.
    """

    shapes: ShapeSet
    weights: Mapping[KernelCall, Mapping[str, int]]
    used_max_size: tuple[str, ...]


def collect(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    matchers: Iterable[Matcher],
    *,
    max_size: int = 8192,
    jit_ops: Collection[str] = (),
    ranges: Mapping[Any, Any] | None = None,
    strict: bool = False,
) -> Collected:
    """Return each distinct kernel call in ``gm``, and the custom ops that nobody claimed.

    Graph:
        x: "f8e4m3[s77, 7168]", w: "f8e4m3[2112, 7168]", out: "bf16[s77, 2112]"
        fp8_gemm_nt(x, x_scale, w, w_scale, out)

    Facts:
        KernelCall(deep_gemm, fp8_gemm_nt, a=f8e4m3[s0, 7168], b=f8e4m3[2112, 7168], d=bf16[s0, 2112]), s0 in 1..8192

    Several matchers may claim one op. What a matcher cannot bound, or finds impossible, becomes a gap at the op's place;
    with ``strict`` it is raised, the place in front. An op named in ``jit_ops`` (``op`` or ``namespace::op``) that nobody
    claims is a gap, any other an ``UnknownOp``. ``ranges`` are the ``range_constraints`` of an exported program. The
    graph and its guards are left as they are. Raises ValueError for a ``max_size`` that is no positive int.
    """
    bounder = make_bounder(gm, example_inputs, max_size=max_size, ranges=ranges)
    matchers = tuple(matchers)
    calls: dict[KernelCall, Site] = {}
    gaps: dict[tuple[str, str, str], Gap] = {}
    unknown: dict[str, UnknownOp] = {}
    weights: dict[KernelCall, Mapping[str, int]] = {}
    for op in flatten(gm, bounder):
        claimed = False
        for matcher in matchers:
            for found in _ask(matcher, op, strict):
                claimed = True
                if isinstance(found, Gap):
                    gaps.setdefault((found.op, found.reason, found.family), found)
                    continue
                seen = calls.get(found)
                calls[found] = (
                    Site(1, op.place) if seen is None else Site(seen.count + 1, seen.place)
                )
                weights.setdefault(found, op.bound.get(found, {}))
        if claimed:
            continue
        name = op.qualified_name
        if name in jit_ops or op.name in jit_ops:
            reason = (
                f"no family claims this JIT op{_called_with(op)}; install or write a family for it"
            )
            gap = Gap(name, reason, op.place)
            gaps.setdefault((gap.op, gap.reason, ""), gap)
        else:
            known = unknown.get(name)
            unknown[name] = (
                UnknownOp(name, 1, op.place)
                if known is None
                else UnknownOp(name, known.count + 1, known.place)
            )
    shapes = ShapeSet(
        tuple(calls), tuple(calls.values()), tuple(gaps.values()), tuple(unknown.values())
    )
    return Collected(shapes, weights, bounder.used_max_size)


def _called_with(op: OpCall) -> str:
    """Return the tensors and plain arguments of an op in words: what a family for it would need to know."""
    from passes.calls import SymTensor

    parts = [
        f"{name}={value.dtype}[{', '.join(map(str, value.shape))}]"
        if isinstance(value, SymTensor)
        else f"{name}={value}"
        for name, value in op.arguments.items()
        if isinstance(value, SymTensor | str | int)
    ]
    return f" (called with {', '.join(parts)})" if parts else ""


def _ask(matcher: Matcher, op: OpCall, strict: bool) -> Iterator[KernelCall | Gap]:
    """Yield what ``matcher`` says of ``op``; what it raises becomes a gap, unless ``strict``."""
    try:
        yield from matcher(op)
    except Exception as error:
        if strict and isinstance(error, ValueError):
            raise ValueError(f"{op.place}: {op.qualified_name}: {error}") from error
        if strict:
            raise
        # whatever a family does wrong, the user's model still compiles
        reason = (
            str(error)
            if isinstance(error, ValueError)
            else f"the matcher failed: {error!r}; report it to its author"
        )
        yield Gap(
            op.qualified_name,
            reason,
            op.place,
            getattr(getattr(matcher, "__self__", None), "name", ""),
        )
