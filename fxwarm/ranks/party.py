"""What one rank knows while a group warms together, in one place for all steps of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fxwarm.family import KernelFamily
from fxwarm.ranks.dealing import Item
from fxwarm.ranks.meeting import Meeting
from fxwarm.records import Built, Planned, Target, Tuned
from passes.records import Gap

if TYPE_CHECKING:
    from fxwarm.artifacts import WarmCallable
    from fxwarm.warmup import Warmup

log = logging.getLogger(__name__)


@dataclass
class Party:
    """This rank's side of one ``warm_all(group)``."""

    callables: Sequence[WarmCallable]
    meeting: Meeting
    builds: bool = True
    """Whether this rank may be given kernels to build."""
    work: dict[Item, tuple[KernelFamily, Planned, Warmup]] = field(default_factory=dict)
    """Everything that this rank plans, by item."""
    items: dict[int, list[Item]] = field(default_factory=dict)
    """The same by warmup."""
    built: dict[Item, Built] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    """How long this rank built, by the warmup whose options it took."""
    lacking: set[Item] = field(default_factory=set)
    """What this rank's caches lacked when it looked last."""
    tried: list[Item] = field(default_factory=list)
    failed: dict[Item, str] = field(default_factory=dict)
    refused: dict[Item, str] = field(default_factory=dict)
    tuned: dict[Item, Tuned] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hosts: dict[int, str] = field(default_factory=dict)

    def groups(self, items: Iterable[Item]) -> list[tuple[KernelFamily, Target, list[Item]]]:
        """Return ``items`` by family, device and library."""
        groups: dict[tuple[str, str], list[Item]] = {}
        for item in items:
            groups.setdefault((item.key.family, item.kind), []).append(item)
        out = []
        for group in groups.values():
            family, _, one = self.work[group[0]]
            assert one.target is not None
            out.append((family, one.target, group))
        return out

    def complain(self, what: str, error: Exception) -> None:
        """Keep an error of this rank as a gap: the others must not wait for it."""
        log.error("fxwarm: %s", what, exc_info=error)
        self.gaps.append(Gap("warm_all", f"{what}: {type(error).__name__}: {error}"))

    def who(self, rank: int) -> str:
        """Return what a reader calls ``rank``."""
        return f"rank {rank} on {self.hosts.get(rank, 'an unknown host')}"

    def said(self, rank: int, reason: str) -> str:
        """Return ``reason`` with the rank that gave it."""
        return reason if reason.startswith("rank ") else f"{self.who(rank)}: {reason}"


def on(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Make ``device`` the current one, where it is a CUDA device."""
    return (
        torch.cuda.device(device)
        if device is not None and device.type == "cuda"
        else contextlib.nullcontext()
    )
