"""Fills the tuner's table once, proves by look-up that every bucket is in it, and keeps it for the next start.

One call tunes every bucket of ``cutlass_fused_moe``, whatever its own tokens; a GEMM's buckets come from the call's
own rows, so that call has the most. What the library drops in silence (memory that ran out) shows in the look-up.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxwarm import exc
from fxwarm.families.flashinfer import cache, upstream
from fxwarm.families.flashinfer.buckets import bucket_of
from fxwarm.families.flashinfer.keys import rows_of, with_rows
from fxwarm.families.flashinfer.library import installed_version
from fxwarm.families.flashinfer.tensors import run
from fxwarm.families.flashinfer.tuner_key import Entry, entries_at, is_tuned
from fxwarm.families.flashinfer.versions import NEWEST, find_version
from fxwarm.family import Bind
from fxwarm.records import Planned, Tuned
from passes.records import Gap, KernelCall

__all__ = ["card", "current_limit", "device", "entry_of", "limit_of", "tune", "verify"]

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

DEFAULT_LIMIT = 8192
"""``tune_max_num_tokens`` of a call that gives none."""
_largest = 1
"""The limit in force in this process. It only grows: what was tuned on the grid below it stays right."""


def limit_of(planned: Sequence[Planned]) -> int:
    """Return the one ``tune_max_num_tokens`` that serves every planned MoE layer: the largest bucket of any."""
    rows = [
        int(rows_of(p.witness))
        for p in planned
        if p.witness is not None and p.witness.op != "bmm_fp8"
    ]
    return max([bucket_of(r) for r in rows if r > 0], default=1)


def tune(planned: Sequence[Planned], arch: str, bind: Bind) -> Iterator[Tuned]:
    """Yield each planned entry of the tuner's table: found in a stored file, measured now, or why it is not there.

    Runs on the current device, with the library's modules already built. Draws random inputs.
    """
    wanted = [p for p in planned if is_tuned(p.key) and p.witness is not None]
    if not wanted:
        return
    try:
        upstream.load()
        absent = _absent(planned, arch)
        if absent:
            raise exc.LibraryError(
                f"module {', '.join(absent)} is not built, so nothing can be tuned with it"
            )
        path = cache.tactics_path(wanted, arch, card())
        with upstream.undisturbed():
            _set_limit(wanted)
            _read(path)
    except Exception as error:  # a module that does not load is the same news as one that is absent
        log.debug("fxwarm: nothing can be tuned", exc_info=True)
        yield from (Tuned(p.key, error=_said(error)) for p in wanted)
        return
    before = len(upstream.tuner().profiling_cache)
    for group in _groups(wanted):
        with upstream.undisturbed():
            found = _tune_group(group, arch, bind)
        yield from found
    if len(upstream.tuner().profiling_cache) > before and _keeps():
        _save(path)


def verify(planned: Sequence[Planned], arch: str) -> list[Gap]:
    """Return a gap for each planned entry that a call would not find now, at its bucket and at its witness."""
    wanted = [p for p in planned if is_tuned(p.key) and p.witness is not None]
    gaps: list[Gap] = []
    with contextlib.suppress(exc.LibraryError):
        for p in wanted:
            assert p.witness is not None
            rows = int(rows_of(p.witness))
            if not all(_is_covered(p, arch, n) for n in {rows, bucket_of(rows)}):
                gaps.append(
                    Gap(
                        p.witness.op,
                        f"{p.key.kernel} finds no tuned entry at {rows} tokens and runs its default tactic: it could "
                        "not be tuned, or another file or tune_max_num_tokens came into force; use one for all layers",
                        family=p.key.family,
                    )
                )
    return gaps


def entry_of(planned: Planned, arch: str) -> Entry:
    """Return the tuner's entry that a planned key names."""
    assert planned.witness is not None
    number = installed_version()
    version = (
        find_version(number, installed=True) if number else find_version(NEWEST, installed=False)
    )
    bucket = bucket_of(int(rows_of(planned.witness)))
    entries = entries_at(planned.witness, bucket, arch, version)
    return next(e for e in entries if e.op == planned.key.tag)


def _tune_group(group: Sequence[Planned], arch: str, bind: Bind) -> list[Tuned]:
    lacking = {p.key for p in group if not _is_covered(p, arch)}
    begin, error, said = time.perf_counter(), "", []
    if lacking:
        with upstream.watch() as said:
            error = _measure(group, bind)
    seconds = (time.perf_counter() - begin) / max(1, len(lacking))
    kept = {p.key for p in group if _is_covered(p, arch)}
    why = error or next((line for line in said if "OOM" in line), "the library stored no tactic")
    lost = f"{len(kept)} of {len(group)} buckets were kept: {why}; free device memory or lower the range, and retry"
    return [
        Tuned(p.key, found=True)
        if p.key not in lacking
        else Tuned(p.key, seconds, error="" if p.key in kept else lost)
        for p in group
    ]


def _measure(group: Sequence[Planned], bind: Bind) -> str:
    """Make the one call that tunes all buckets of a group; return what went wrong, "" if nothing."""
    import torch

    witnesses = [p.witness for p in group if p.witness is not None]
    rows = [int(rows_of(w)) for w in witnesses]
    call = witnesses[0] if _is_moe(witnesses[0]) else with_rows(witnesses[0], bucket_of(max(rows)))
    try:
        with upstream.autotune():
            run(call, device(), bind, _largest if _is_moe(call) else None)
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return f"out of device memory: {str(error).splitlines()[0]}"
    except Exception as error:
        log.debug("fxwarm: tuning %s", call, exc_info=True)
        return _said(error)
    return ""


def _is_covered(planned: Planned, arch: str, tokens: int | None = None) -> bool:
    entry = entry_of(planned, arch)
    shapes = [shape for _, shape in entry.profile]
    if tokens is not None:
        assert planned.witness is not None
        at = 1 if planned.witness.op == "bmm_fp8" else 0
        shapes[0] = tuple(tokens if i == at else d for i, d in enumerate(shapes[0]))
    return upstream.covers(entry, [tuple(max(d, 0) for d in shape) for shape in shapes])


def _set_limit(wanted: Sequence[Planned]) -> None:
    global _largest
    moe = [p for p in wanted if p.witness is not None and _is_moe(p.witness)]
    if moe:
        _largest = max(_largest, limit_of(moe))
        given = {
            p.witness.attr("tune_max_num_tokens", DEFAULT_LIMIT)
            for p in moe
            if p.witness is not None
        }
        upstream.pin_limit(_largest, [t for t in given if isinstance(t, int)])


def current_limit(call: KernelCall) -> int | None:
    """Return the limit that a plain call must pass, None for an op that has none."""
    return _largest if _is_moe(call) else None


def device() -> torch.device:
    """Return the device that is current: the CPU where there is no other."""
    import torch

    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _groups(wanted: Sequence[Planned]) -> list[list[Planned]]:
    """Return the entries that one call tunes together: equal shapes and options, any tokens."""
    groups: dict[KernelCall, list[Planned]] = {}
    for p in wanted:
        assert p.witness is not None
        groups.setdefault(with_rows(p.witness, 0), []).append(p)
    return list(groups.values())


def _absent(planned: Sequence[Planned], arch: str) -> list[str]:
    from fxwarm.families.flashinfer.keys import MODULE

    names = [p.key.kernel for p in planned if p.key.tag == MODULE]
    return [name for name in names if cache.find_module(name, arch) is None]


def _read(path: Path) -> None:
    for file in cache.tactics_files(path):
        try:
            upstream.tuner().load_configs(str(file))
        except (OSError, ValueError, TypeError, IndexError, AttributeError) as error:
            log.warning("fxwarm: ignoring tactics file %s: %s", file, error)


def _save(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        upstream.tuner().save_configs(str(path))
    except OSError as error:
        log.warning("fxwarm: could not write %s, the next start tunes again: %s", path, error)


def _keeps() -> bool:
    """Whether a stored entry tells options apart. Before 0.6.18 layers of equal shapes collided in the file."""
    return find_version(installed_version(), installed=True).options_in_key


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, exc.LibraryError) else f"{type(error).__name__}: {error}"


def _is_moe(call: KernelCall) -> bool:
    return call.op == "cutlass_fused_moe"


def card() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
