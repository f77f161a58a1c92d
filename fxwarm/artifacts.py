"""The compiled callable that warms itself, and how its plan travels with what torch saves.

What we put into torch's artifacts is JSON bytes: a ``Parcel``. It is one more attribute of what torch itself saves (the
cache entry of ``aot_compile``, the artifact of ``caching_precompile``), which a process without fxwarm ignores.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from fxwarm import aot_artifacts, exc, monitor
from fxwarm.options import Options
from fxwarm.pending import Pending
from fxwarm.records import WarmPlan, WarmReport
from fxwarm.runtime import is_capturing
from fxwarm.warmup import Warmup
from passes.records import SCHEMA, KernelCall, Record, ShapeSet, decode

log = logging.getLogger(__name__)

try:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as _Bundled
    from torch._dynamo.aot_compile_types import SerializableCallable as _Base
except ImportError as _error:  # then aot_compile cannot carry the plan; everything else works
    log.info("no aot_compile on torch %s: %s", torch.__version__, _error)
    _Base, _Bundled = object, None  # type: ignore[assignment,misc]

pending = Pending()
"""Every warm callable of this process, for ``warm_all``."""


class Parcel(Record, frozen=True, omit_defaults=False):
    """What travels with a compiled model: all that the loading process needs to warm it."""

    shapes: ShapeSet
    options: Options
    graph_key: str = ""
    plan: WarmPlan | None = None
    weights: tuple[tuple[int, tuple[tuple[str, int], ...]], ...] = ()
    """For each call (by its index in the shapes) its weights' names and argument positions."""
    kind: str = "fxwarm.Parcel"
    schema: int = SCHEMA


class _TorchsOwn:
    """Torch's own reader, as it is now: torch pickles its name, so an artifact loads in a process without fxwarm."""

    def __get__(self, instance: Any, owner: type) -> Callable[[bytes], Any]:
        assert _Bundled is not None
        return _Bundled.deserialize_compile_artifacts


class WarmCallable(_Base):
    """What the backend returns: Inductor's callable, warmed before its first result.

    After that a call costs one attribute look-up more than Inductor's.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        warmup: Warmup,
        weights: Mapping[KernelCall, Mapping[str, int]] | None = None,
        *,
        register: bool = True,
        keep: bool = False,
    ) -> None:
        """Wrap ``inner``. ``register`` it for ``warm_all``, and ``keep`` it there where nobody else holds it."""
        self.inner = inner
        self.warmup = warmup
        self.weights = dict(weights or {})
        self.after: WarmCallable | None = None
        """What showed only after Dynamo (a backward, an op taken apart): warmed together with this."""
        self._lock = threading.RLock()
        self._run: Callable[..., Any] = self._first if warmup.options.when != "manual" else inner
        if register:
            pending.add(self, keep=keep)

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
        self._make_warm(args)
        result = self.inner(*args)
        monitor.watch_process(self.warmup.options)
        return result

    def make_warm(self, args: tuple[Any, ...] = ()) -> WarmReport | None:
        """Make the plan warm now, with the weights in ``args`` where given; return the report.

        A failure is reported and the model still runs, unless ``strict``.
        """
        report = self._make_warm(args)
        monitor.watch_process(self.warmup.options)
        return report

    def _make_warm(self, args: tuple[Any, ...]) -> WarmReport | None:
        with self._lock:
            try:
                self.warmup.settle(args)
                report = self.warmup.finish(self._bind(args))
                if self.after is not None:
                    self.after.make_warm(args)
            except exc.ColdCaptureError as error:
                if self.warmup.options.strict:
                    raise
                log.error("fxwarm: %s", error)
                return None  # the next call tries again
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

    def pack(self) -> bytes:
        """Return the parcel of this callable as JSON bytes."""
        self.warmup.wait()
        shapes, plan = self.warmup.shapes, self.warmup.plan
        if self.after is not None:
            beyond = self.after.warmup.shapes
            shapes |= beyond
            if beyond.calls:  # more calls have another plan
                plan = None
            elif plan is not None:
                gaps = tuple(dict.fromkeys((*plan.gaps, *beyond.gaps)))
                plan = msgspec.structs.replace(plan, shapes=shapes, gaps=gaps)
        index = {call: i for i, call in enumerate(shapes.calls)}
        weights = tuple(
            (index[call], tuple(places.items()))
            for call, places in self.weights.items()
            if call in index
        )
        parcel = Parcel(shapes, self.warmup.options, self.warmup.graph_key, plan, weights)
        return msgspec.json.encode(parcel)

    @classmethod
    def unpack(cls, inner: Callable[..., Any], data: bytes, *, keep: bool = False) -> WarmCallable:
        """Return the callable that ``pack`` described around a loaded ``inner``. Raises ValueError for bad bytes."""
        parcel: Parcel = decode(data, Parcel)
        _define_ops()
        warmup = Warmup(
            parcel.shapes, parcel.options, graph_key=parcel.graph_key, offered=parcel.plan
        )
        weights = {parcel.shapes.calls[i]: dict(places) for i, places in parcel.weights}
        kind = callable_class(parcel.options) if cls is WarmCallable else cls
        loaded = kind(inner, warmup, weights, keep=keep)
        if parcel.options.when == "load":
            warmup.settle(())
            warmup.start()
        return loaded

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        """Return ``fn`` as bytes for ``aot_compile``: what torch writes for Inductor's callable, and the parcel."""
        assert _Bundled is not None
        carrier = aot_artifacts.Carrier(fn.inner, fn.pack())
        return _Bundled.serialize_compile_artifacts(_Bundled(carrier))

    deserialize_compile_artifacts = _TorchsOwn()  # type: ignore[assignment]


class EmbeddedCallable(WarmCallable):
    """What the backend returns with ``fxwarm.embed``: its artifacts name this class, so loading one imports fxwarm."""

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Any:
        """Return what torch's reader makes of ``data``; it is hooked, for fxwarm is imported now."""
        assert _Bundled is not None
        return _Bundled.deserialize_compile_artifacts(data)


def callable_class(options: Options) -> type[WarmCallable]:
    """Return the class whose artifacts load as ``options`` say."""
    return EmbeddedCallable if options.embed else WarmCallable


def restore(inner: Callable[..., Any], parcel: bytes, *, keep: bool = False) -> Callable[..., Any]:
    """Return the warm callable around what torch loaded, or ``inner`` with an error logged if its plan is damaged.

    A damaged plan must not cost the user the model.
    """
    try:
        return WarmCallable.unpack(inner, parcel, keep=keep)
    except Exception as error:
        log.error("fxwarm: not warmed, its plan does not load (%s); compile the model again", error)
        return inner


def attach(gm: torch.fx.GraphModule, warm: WarmCallable) -> None:
    """Let the plan travel in torch's precompile artifact of ``gm``, if ``caching_precompile`` makes one.

    The artifact stays torch's own class with one more attribute, so it loads in a process without fxwarm.
    """
    if not getattr(torch._dynamo.config, "caching_precompile", False):
        return
    backend_id = getattr(gm, "_backend_id", None)
    try:
        from torch._dynamo.precompile_context import PrecompileContext

        artifact = PrecompileContext.serialize_artifact_by_key(backend_id) if backend_id else None
    except (ImportError, AttributeError) as error:
        log.warning(
            "fxwarm: the plan cannot travel with a precompiled model on torch %s: %s",
            torch.__version__,
            error,
        )
        return
    if artifact is not None:
        artifact.fxwarm_parcel = warm.pack()  # type: ignore[attr-defined]


def hook_precompiled() -> None:
    """Make precompiled artifacts that carry a plan come back as warm callables in this process."""
    try:
        from torch._functorch._aot_autograd.aot_autograd_result import (
            BundledAOTAutogradCacheArtifact as artifact,
        )
    except ImportError as error:
        log.info("no precompiled artifacts on torch %s: %s", torch.__version__, error)
        return
    original = artifact.after_deserialization
    if getattr(original, "_fxwarm", False):
        return

    def after_deserialization(self: Any) -> Any:
        inner = original(self)
        parcel = getattr(self, "fxwarm_parcel", None)
        if parcel is None:
            return inner
        return restore(inner, parcel)

    after_deserialization._fxwarm = True  # type: ignore[attr-defined]
    artifact.after_deserialization = after_deserialization  # type: ignore[method-assign]


def _define_ops() -> None:
    """Torch's callable may hold our ops: they must exist before it runs."""
    import fxwarm.ops  # noqa: F401


def never_called(*args: Any) -> None:
    """Stand in for the compiled function where there is only something to warm."""
    raise AssertionError("never called")
