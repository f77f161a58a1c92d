"""What this start found in each cache, and what it had to make: kernels by family, torch's graphs, plans of our own."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxwarm.warmup import Warmup

Counts = tuple[Counter[str], Counter[str]]
"""Hits and misses by the name of a cache."""

_TORCH = (  # where AOTAutograd's cache answers, Inductor's is not asked
    ("aot_autograd", "autograd_cache_hit", "autograd_cache_miss"),
    ("inductor", "fxgraph_cache_hit", "fxgraph_cache_miss"),
)


def counts(warmups: Iterable[Warmup] | None = None) -> Counts | None:
    """Return hits and misses of the warmups of this process, None where none has finished.

    A kernel is a hit where it was on disk or in the tuner's file when its warmup looked; one that several models need is
    counted once. A plan is one where its receipt was believed.
    """
    if warmups is None:
        artifacts = sys.modules.get("fxwarm.artifacts")
        warmups = artifacts.pending.warmups() if artifacts is not None else ()
    done = [w for w in warmups if w.report is not None and w.report.plan_key]
    if not done:
        return None
    hits: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    for warmup in done:
        (hits if warmup.is_stored else misses)["fxwarm"] += 1
    reports = [w.report for w in done if w.report is not None]
    found = {key for r in reports for key in r.found} | {
        t.key for r in reports for t in r.tuned if t.found
    }
    made = {x.key for r in reports for x in (*r.built, *r.tuned, *r.loaded)} - found
    hits.update(key.family for key in found)
    misses.update(key.family for key in made)
    for counter, hit, miss in _TORCH:
        seen = _counters(counter)
        if seen[hit] or seen[miss]:
            hits["torch"], misses["torch"] = seen[hit], seen[miss]
            break
    return hits, misses


def _counters(name: str) -> Counter[str]:
    utils = sys.modules.get("torch._dynamo.utils")
    return Counter(getattr(utils, "counters", {}).get(name, {}))
