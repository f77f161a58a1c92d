"""Warm keys and receipts: how the next start knows that there is nothing to record and nothing to build.

The warm key names what a plan depends on: torch's key of the graph, the calls with their ranges, the target, torch and
the libraries. The planned keys are found under it, not part of it. A receipt is the report of a complete warmup with
the cache files it stands on; it spares building, never loading.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from fxwarm import planner, store
from fxwarm.options import Options
from fxwarm.records import Entry, Library, Target, WarmPlan, WarmReport, digest
from passes.records import SCHEMA, ShapeSet

if TYPE_CHECKING:
    from fxwarm.warmup import Warmup

log = logging.getLogger(__name__)


def warm_key(plan: WarmPlan) -> str:
    """Return the warm key of ``plan``."""
    return key_of(plan.shapes, plan.target, plan.libraries, plan.graph_key)


def key_of(shapes: ShapeSet, target: Target, libraries: tuple[Library, ...], graph_key: str) -> str:
    """Return the name of everything that a plan depends on: 32 hex digits.

    The name of the target is left out: an H100 with as many SMs asks for the same kernels as an H200.
    """
    device = (target.device, target.arch, target.num_sms, target.smem)
    return digest(graph_key, shapes.calls, device, libraries, str(torch.__version__), SCHEMA)


def stored_plan(warmup: Warmup) -> WarmPlan | None:
    """Return the plan that an earlier process completed for the same graph, target and libraries, or None.

    It is believed only if its receipt is there and every file that the receipt names is whole.
    """
    shapes, target = warmup.shapes, warmup.target
    if not shapes.calls or target is None:
        return None
    chosen = [library for _, _, library in planner.choose(shapes, target, warmup.libraries)]
    libraries = tuple(library for library in chosen if isinstance(library, Library))
    if len(libraries) < len(chosen):
        return None
    key = key_of(shapes, target, libraries, warmup.graph_key)
    if warmup.offered is not None and warm_key(warmup.offered) == key:
        log.info("fxwarm: the plan that came with the model fits: %d kernels", len(warmup.offered))
        return warmup.offered
    folder = store.root(warmup.options.cache_dir)
    receipt = store.read(store.path_of(folder, key, "receipt"), WarmReport)
    if receipt is None or receipt.plan_key != key:
        return None
    damaged = [reason for entry in receipt.entries if (reason := check_entry(entry))]
    if damaged:
        log.warning("fxwarm: receipt %s is stale: %s", key, "; ".join(damaged[:3]))
    plan = store.read(store.path_of(folder, key, "plan"), WarmPlan)
    if plan is None or warm_key(plan) != key:
        return None
    log.info("fxwarm: plan %s of an earlier start: %d kernels", key, len(plan))
    return plan


def keep(plan: WarmPlan, report: WarmReport, options: Options) -> WarmReport:
    """Store the plan, and the receipt if the warmup was complete; return the report with its cache entries."""
    if not plan.planned or not report.plan_key:
        return report
    folder = store.root(options.cache_dir)
    store.write(store.path_of(folder, report.plan_key, "plan"), plan.to_json())
    if report.failed or report.absent:
        return report
    report = msgspec.structs.replace(report, entries=entries(plan))
    store.write(store.path_of(folder, report.plan_key, "receipt"), report.to_json())
    return report


def entries(plan: WarmPlan) -> tuple[Entry, ...]:
    """Return the cache files that hold the plan's kernels, with sizes and hashes."""
    from fxwarm.warmup import by_family

    out = []
    for family, group in by_family(plan.planned):
        cached = getattr(family, "cached", None)
        for path in cached(group) if cached is not None else ():
            data = Path(path).read_bytes()
            out.append(Entry(str(path), len(data), hashlib.sha256(data).hexdigest()))
    return tuple(out)


def check_entry(entry: Entry, *, whole: bool = False) -> str:
    """Return what is wrong with a file that a receipt names, or "". ``whole`` compares the hash, not only the size."""
    path = Path(entry.path)
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{path.parent.name}/{path.name} has {size} bytes, not {entry.bytes}"
        if whole and hashlib.sha256(path.read_bytes()).hexdigest() != entry.sha256:
            return f"{path.parent.name}/{path.name} has other contents"
    except OSError as error:
        return f"{path.parent.name}/{path.name}: {error.strerror}"
    return ""
