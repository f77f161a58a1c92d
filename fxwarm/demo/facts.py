"""Traces a model of the demo and reads off what engines know it by: (N, K) of linears, (G, N, K, top-k) of experts."""

from __future__ import annotations

import resource
import sys
import time

from fxwarm.demo import models
from fxwarm.demo.layers import ALIGNMENT
from passes.expr import evaluate, parse
from passes.records import KernelCall, Record, ShapeSet


class Weight(Record, frozen=True):
    """One weight shape that a model's GEMMs have; of experts also how many there are and how many a token takes."""

    n: int
    k: int
    groups: int = 0
    top_k: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K), or (G, N, K, top-k) of experts."""
        return (self.groups, self.n, self.k, self.top_k) if self.groups else (self.n, self.k)


class Traced(Record, frozen=True):
    """What tracing a model found, and what it cost."""

    name: str
    title: str
    layers: int
    weights: tuple[Weight, ...]
    shapes: ShapeSet
    seconds: float
    peak_bytes: int
    """Most memory that this process has held so far, what it did before included."""


def trace_model(name: str, tokens: int = 8192, layers: int | None = None) -> Traced:
    """Build the model ``name`` on the meta device and trace it for steps of up to ``tokens`` tokens.

    Raises OptionError for an unknown name or an impossible number of layers.
    """
    import fxwarm

    begin = time.perf_counter()
    model = models.build(name, layers)
    ids = models.token_ids(min(64, tokens))
    shapes = fxwarm.trace(model, ids, max_size=tokens)
    return Traced(
        name=name,
        title=models.find(name).title,
        layers=model.config.num_hidden_layers,  # type: ignore[union-attr,arg-type]
        weights=weights_of(shapes),
        shapes=shapes,
        seconds=time.perf_counter() - begin,
        peak_bytes=peak_bytes(),
    )


def weights_of(shapes: ShapeSet) -> tuple[Weight, ...]:
    """Return each weight shape of the DeepGEMM calls in ``shapes``, in order of first appearance."""
    return tuple(
        dict.fromkeys(_weight(call) for call in shapes.calls if call.family == "deep_gemm")
    )


def _weight(call: KernelCall) -> Weight:
    *groups, n, k = (int(dim) for dim in call["b"].dims)
    if not groups:
        return Weight(n, k)
    rows = parse(call["a"].dims[0].expr)
    # one token takes top-k experts, and each of them gets a padded block to itself
    one = int(evaluate(rows, dict.fromkeys((s.name for s in call.symbols), 1)))
    return Weight(n, k, groups[0], one // ALIGNMENT)


def peak_bytes() -> int:
    """Return the most memory that this process has held resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
