"""What this process has compiled or loaded, for ``warm_all`` and for reports, without keeping a model alive.

A process that compiles without end drops its models one after the other. Their callables, and the graphs and weights
that these hold, go with them; the warmups stay, for they are records only: shapes, plan, report.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxwarm.artifacts import WarmCallable
    from fxwarm.warmup import Warmup


class Pending:
    """Warm callables in the order in which they were made. Iterating gives those whose model is still held."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[WarmCallable], Warmup]] = []
        self._kept: list[WarmCallable] = []

    def add(self, warm: WarmCallable, *, keep: bool = False) -> None:
        """Note ``warm``; with ``keep`` hold it as well, for where nobody else does."""
        self._made.append((weakref.ref(warm), warm.warmup))
        if keep:
            self._kept.append(warm)

    def __iter__(self) -> Iterator[WarmCallable]:
        return iter([warm for ref, _ in list(self._made) if (warm := ref()) is not None])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: int) -> WarmCallable:
        return list(self)[index]

    def warmups(self) -> list[Warmup]:
        """Return every warmup of this process, also of models that are gone."""
        return [warmup for _, warmup in list(self._made)]

    def clear(self) -> None:
        """Forget everything, as a new process would."""
        self._made.clear()
        self._kept.clear()
