"""A process in which nothing was compiled or warmed yet: what a test that warms begins with."""

from __future__ import annotations

from fxwarm import artifacts, warmup
from tests import toy_family


def forget() -> None:
    """Forget what the toy library has loaded, and what fxwarm knows of it."""
    toy_family._loaded.clear()
    toy_family.events.clear()
    warmup._resident.clear()
    artifacts.pending.clear()
