"""Fills the tuner's table once, proves by look-up that every bucket is in it, and keeps it for the next start.

One call tunes every bucket of ``cutlass_fused_moe``, whatever its own tokens; a GEMM's buckets come from the call's
own rows, so that call has the most. What the library drops in silence (memory that ran out) shows in the look-up.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fxwarm import exc
from fxwarm.families.flashinfer import cache, limit, stored, tuner, upstream
from fxwarm.families.flashinfer.buckets import bucket_of
from fxwarm.families.flashinfer.entries import module_of
from fxwarm.families.flashinfer.keys import DELAY, rows_of, with_rows
from fxwarm.families.flashinfer.stored import held
from fxwarm.families.flashinfer.tensors import run
from fxwarm.family import Bind
from fxwarm.records import Planned, Tuned
from passes.records import Gap, KernelCall

__all__ = ["device", "groups", "measure", "prepare", "said", "tune", "verify"]

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def tune(planned: Sequence[Planned], arch: str, bind: Bind) -> Iterator[Tuned]:
    """Yield each planned entry of the tuner's table: found in a stored file, measured now, or why it is not there.

    Runs on the current device, with the library's modules already built. Draws random inputs.
    """
    wanted = stored.tuned_of(planned)
    if not wanted:
        return
    try:
        prepare(planned, arch)
    except Exception as error:  # a module that does not load is the same news as one that is absent
        log.debug("fxwarm: nothing can be tuned", exc_info=True)
        yield from (Tuned(p.key, error=said(error)) for p in wanted)
        return
    before = len(tuner.tuner().profiling_cache)
    for group in groups(wanted):
        with tuner.undisturbed():
            found = _tune_group(group, arch, bind)
        yield from found
    if len(tuner.tuner().profiling_cache) > before:
        stored.keep(stored.path_of(planned, arch))


def prepare(planned: Sequence[Planned], arch: str) -> None:
    """Import the library, put the limit in force, and read what is stored if anything is not held yet.

    Raises LibraryError where the library, or a module that the entries need, is not there.
    """
    upstream.load()
    wanted = stored.tuned_of(planned)
    needed = {module_of(p.witness.op, arch): None for p in wanted if p.witness is not None}
    absent = [name for name in (*needed, DELAY) if cache.find_module(name, arch) is None]
    if absent:
        raise exc.LibraryError(
            f"module {', '.join(absent)} is not built, so nothing can be tuned with it"
        )
    with tuner.undisturbed():
        limit.set_limit(wanted)
        if any(held(p, arch) is None for p in wanted):
            stored.read(stored.path_of(planned, arch))


def verify(planned: Sequence[Planned], arch: str) -> list[Gap]:
    """Return a gap for each planned entry that a call would not find now, at its bucket and at its witness."""
    gaps: list[Gap] = []
    with contextlib.suppress(exc.LibraryError):
        for p in stored.tuned_of(planned):
            assert p.witness is not None
            rows = int(rows_of(p.witness))
            if any(held(p, arch, n) is None for n in {rows, bucket_of(rows)}):
                gaps.append(
                    Gap(
                        p.witness.op,
                        f"{p.key.kernel} finds no tuned entry at {rows} tokens and runs its default tactic: it could "
                        "not be tuned, or another file or tune_max_num_tokens came into force; use one for all layers",
                        family=p.key.family,
                    )
                )
    return gaps


def _tune_group(group: Sequence[Planned], arch: str, bind: Bind) -> list[Tuned]:
    lacking = {p.key for p in group if held(p, arch) is None}
    begin, error, warned = time.perf_counter(), "", []
    if lacking:
        with tuner.watch() as warned:
            error = measure(group, bind)
    seconds = (time.perf_counter() - begin) / max(1, len(lacking))
    kept = {p.key for p in group if held(p, arch) is not None}
    why = error or next((line for line in warned if "OOM" in line), "the library stored no tactic")
    lost = f"{len(kept)} of {len(group)} buckets were kept: {why}; free device memory or lower the range, and retry"
    return [
        Tuned(p.key, found=True)
        if p.key not in lacking
        else Tuned(p.key, seconds, error="" if p.key in kept else lost)
        for p in group
    ]


def measure(group: Sequence[Planned], bind: Bind) -> str:
    """Make the one call that tunes all buckets of a group; return what went wrong, "" if nothing."""
    import torch

    witnesses = [p.witness for p in group if p.witness is not None]
    rows = [int(rows_of(w)) for w in witnesses]
    call = witnesses[0]
    if not limit.is_moe(call):
        call = with_rows(call, bucket_of(max(rows)))
    try:
        with tuner.autotune():
            run(call, device(), bind, limit.current_limit(call))
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return f"out of device memory: {str(error).splitlines()[0]}"
    except Exception as error:
        log.debug("fxwarm: tuning %s", call, exc_info=True)
        return said(error)
    return ""


def groups(wanted: Sequence[Planned]) -> list[list[Planned]]:
    """Return the entries that one call tunes together: equal shapes and options, any tokens."""
    found: dict[KernelCall, list[Planned]] = {}
    for p in wanted:
        assert p.witness is not None
        found.setdefault(with_rows(p.witness, 0), []).append(p)
    return list(found.values())


def device() -> torch.device:
    """Return the device that is current: the CPU where there is no other."""
    import torch

    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def said(error: Exception) -> str:
    """Return what ``error`` is, in one line."""
    return str(error) if isinstance(error, exc.LibraryError) else f"{type(error).__name__}: {error}"
