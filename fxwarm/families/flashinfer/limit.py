"""The one ``tune_max_num_tokens`` of this process: FlashInfer keeps a single value, so ours serves every layer.

It is the largest bucket that any planned layer needs, so below 256 a power of two; see ``buckets``.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxwarm.families.flashinfer import tuner
from fxwarm.families.flashinfer.buckets import bucket_of
from fxwarm.families.flashinfer.keys import rows_of
from fxwarm.records import Planned
from passes.records import KernelCall

__all__ = ["current_limit", "is_moe", "limit_of", "set_limit"]

DEFAULT_LIMIT = 8192
"""``tune_max_num_tokens`` of a call that gives none."""
_largest = 1
"""The limit in force in this process. It only grows: what was tuned on the grid below it stays right."""


def is_moe(call: KernelCall) -> bool:
    """Whether ``call`` is of the op that the limit is for."""
    return call.op == "cutlass_fused_moe"


def limit_of(planned: Sequence[Planned]) -> int:
    """Return the one ``tune_max_num_tokens`` that serves every planned MoE layer: the largest bucket of any."""
    rows = [
        int(rows_of(p.witness))
        for p in planned
        if p.witness is not None and p.witness.op != "bmm_fp8"
    ]
    return max([bucket_of(r) for r in rows if r > 0], default=1)


def set_limit(wanted: Sequence[Planned]) -> None:
    """Put the limit of the planned MoE layers in force, unless a larger one is."""
    global _largest
    moe = [p for p in wanted if p.witness is not None and is_moe(p.witness)]
    if moe:
        _largest = max(_largest, limit_of(moe))
        given = {
            p.witness.attr("tune_max_num_tokens", DEFAULT_LIMIT)
            for p in moe
            if p.witness is not None
        }
        tuner.pin_limit(_largest, [t for t in given if isinstance(t, int)])


def current_limit(call: KernelCall) -> int | None:
    """Return the limit that a plain call must pass, None for an op that has none."""
    return _largest if is_moe(call) else None
