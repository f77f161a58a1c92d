"""The compiled callable that warms itself, and how its plan travels with what torch saves.

What goes into torch's artifacts beside torch's own bytes is JSON: a header line, the plan's length, the plan.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxwarm import exc
from fxwarm.records import WarmReport
from fxwarm.warmup import Warmup, is_capturing
from passes.records import KernelCall

log = logging.getLogger(__name__)

try:
    from torch._dynamo.aot_compile_types import SerializableCallable as _Base
except ImportError:  # then aot_compile cannot carry the plan; everything else works
    _Base = object  # type: ignore[assignment,misc]


class WarmCallable(_Base):
    """What the backend returns: Inductor's callable, warmed before its first result.

    After that a call costs one attribute look-up more than Inductor's.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        warmup: Warmup,
        weights: Mapping[KernelCall, Mapping[str, int]] | None = None,
    ) -> None:
        self.inner = inner
        self.warmup = warmup
        self.weights = dict(weights or {})
        self._lock = threading.RLock()
        self._run: Callable[..., Any] = self._first if warmup.options.when != "manual" else inner
        pending.append(self)

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def _first(self, *args: Any) -> Any:
        if any(isinstance(a, torch._subclasses.FakeTensor) for a in args):
            return self.inner(*args)
        if is_capturing() and not self.warmup.is_warm:
            message = (
                "fxwarm: a CUDA graph is being captured and this model is cold, so kernels may be compiled or loaded "
                "inside the capture; call fxwarm.warm_all() before it"
            )
            if self.warmup.options.strict:
                raise exc.ColdCaptureError(message)
            log.error(message)
            return self.inner(*args)
        self.make_warm(args)
        return self.inner(*args)

    def make_warm(self, args: tuple[Any, ...] = ()) -> WarmReport | None:
        """Make the plan warm now, with the weights in ``args`` where given; return the report.

        A failure is reported and the model still runs, unless ``strict``.
        """
        with self._lock:
            try:
                report = self.warmup.finish(self._bind(args))
            except exc.FxwarmError:
                raise
            except Exception as error:
                if self.warmup.options.strict:
                    raise
                log.exception("fxwarm: warmup failed, the model runs cold: %s", error)
                report = None
            self._run = self.inner
            return report

    def _bind(self, args: tuple[Any, ...]) -> Callable[[KernelCall], dict[str, Any] | None]:
        def bind(witness: KernelCall) -> dict[str, Any] | None:
            for call, places in self.weights.items():
                if (call.family, call.op) == (witness.family, witness.op) and all(
                    name in witness and witness[name] == call[name] for name in places
                ):
                    return {name: args[i] for name, i in places.items() if i < len(args)}
            return None

        return bind


pending: list[WarmCallable] = []
"""Every warm callable of this process, for ``warm_all``."""
