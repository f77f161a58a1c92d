"""One piece of JIT work that happened after warmup, as a record, and how serious it is."""

from __future__ import annotations

from typing import Literal

from fxwarm.records import CompileKey
from passes.records import KernelCall, Record

Kind = Literal["build", "load", "tune", "fallback", "trace", "retrace"]
"""A compile; a first load; a measurement; a tuned op that ran its default because no entry fits; new code
traced by Dynamo; known code traced again, for another size or setting."""

NO_PLAN = "no plan of this process"
OURS, UNSURE = "this process", "this process or another that shares its cache"


class JitEvent(Record, frozen=True, omit_defaults=False):
    """What one library did in the hot path: which kernel, for which call, where, for how long, and why it was not warm."""

    library: str
    """The family's name; "triton", "cute" and "dynamo" for those."""
    kind: Kind
    op: str = ""
    """The op of the call where it is known, else the name of the kernel or of the traced code."""
    key: CompileKey | None = None
    shape: str = ""
    """The tensors of the call, as in "x=float32[33, 8], w=float32[8]"; empty where no thread was seen in a call."""
    place: str = ""
    """The first line of the model (from the plan) or of the stack that is not torch's."""
    seconds: float = 0.0
    """How long the call took that did it; of a build seen from outside the compile; 0 where it was stopped, and for a
    load seen from outside: its end is not told."""
    capturing: bool = False
    """Whether a stream was being captured: the worst class, for it can end the engine."""
    missing_from: str = NO_PLAN
    """The plan that should have had it, and the nearest thing that it does have."""
    beyond: str = ""
    """The size that is out of the declared range, as in "x.shape[0] = 9000, declared 1..8192"."""
    whose: str = OURS
    """Who did it, where only the cache was seen and others share it."""
    call: KernelCall | None = None
    """The static call, where the op was seen: what ``fxwarm.learn`` adds to the plan."""

    @property
    def severity(self) -> int:
        """3 during a capture, 2 for a compile, a measurement or a trace, 1 for a load or a fallback."""
        return (
            3 if self.capturing else 2 if self.kind in ("build", "tune", "trace", "retrace") else 1
        )

    @property
    def identity(self) -> tuple[str, object]:
        """What makes two events the same piece of work."""
        return self.library, self.key or (self.kind, self.op, self.shape, self.place)

    def __str__(self) -> str:
        name = (
            f"{self.op} {self.key}"
            if self.key is not None and str(self.key) != self.op
            else self.op
        )
        text = f"{self.library} {self.kind}{' during a graph capture' if self.capturing else ''}: {name}"
        text += f" for {self.shape}" if self.shape else ""
        text += f" at {self.place}" if self.place else ""
        text += f", {self.seconds:.3f} s" if self.seconds else ""
        text += f", by {self.whose}" if self.whose != OURS else ""
        if self.beyond:
            return f"{text}; beyond the declared range: {self.beyond}; raise fxwarm.max_size or mark the range"
        return f"{text}; missing from {self.missing_from}"
