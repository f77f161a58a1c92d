"""``torch.compile(model, backend="fxwarm")``: collect, plan, build beside Inductor, return a callable that is warm.

Extraction happens on Dynamo's graph before Inductor sees it, and the graph is handed on unchanged. Nothing that goes
wrong here reaches the user's compile, unless ``strict``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from fxwarm import attention, graph_key, planner, receipts, substitute, symbolic
from fxwarm.after import AfterDynamo
from fxwarm.artifacts import (
    WarmCallable,
    attach,
    callable_class,
    hook_precompiled,
    never_called,
)
from fxwarm.family import inputs_of, keep_weights, load_families
from fxwarm.options import Options, resolve, split
from fxwarm.records import Target
from fxwarm.runtime import device_of
from fxwarm.warmup import Warmup, switched_off
from passes.digest import digest_of
from passes.records import Gap, ShapeSet

if TYPE_CHECKING:
    from passes.collect import Collected

log = logging.getLogger(__name__)


def fxwarm(
    gm: torch.fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile ``gm`` with Inductor so that no JIT kernel is built, loaded or tuned after the first call.

    ``mode`` and all options but ``fxwarm.*`` are Inductor's. Raises OptionError for an unknown ``fxwarm.*`` option.
    """
    ours, theirs = split(options)
    settings = resolve(ours)
    patches = torch._TorchCompileInductorWrapper(mode, theirs, None).config
    if settings.coverage == "off":
        inner = _inductor(gm, example_inputs, patches)
        return callable_class(settings)(inner, switched_off(settings, device_of(example_inputs)))
    begin = time.perf_counter()
    collected = _collect(gm, example_inputs, settings)
    if _is_meta(example_inputs):
        return _inductor(gm, example_inputs, patches)
    bound = keep_weights(collected.weights)
    device = device_of(example_inputs)
    target = Target.current(device)
    if collected.shapes.calls:
        # Only a head start: what is wrong shows when it is asked, and where a receipt is, nothing will be.
        with contextlib.suppress(Exception):
            if not receipts.knows(collected.shapes, settings):
                planner.prepare(collected.shapes, target)
        weights = inputs_of(bound)
        symbolic.retrace_if_static(gm, example_inputs, weights, settings.symbolic)
        fixed = symbolic.settle(gm, example_inputs, weights)
        collected = _with_specialized(collected, fixed)
    _say(collected, time.perf_counter() - begin)
    warmup = Warmup(collected.shapes, settings, device=device, target=target)
    # Torch computes its key before anything is lowered: there the builds start, and run beside Inductor.
    begin_builds = _no_builds if settings.when == "manual" else warmup.start
    with graph_key.watch(begin_builds, _digest(gm)) as keys:
        after = AfterDynamo(
            collected.shapes,
            settings,
            keys,
            lambda found: _warm_late(found, warmup),
            attends=attention.attends(gm),
        )
        inner = _inductor(gm, example_inputs, patches, keys, after)
    warmup.graph_key = keys.best
    if keys.why:
        serves = "a digest of the graph" if keys.best == keys.digest else "the FX graph's"
        log.info("fxwarm: %s; %s serves as key", keys.why, serves)
    begin_builds(warmup.graph_key)
    warm = callable_class(settings)(inner, warmup, bound)
    beyond = after.finish(example_inputs)
    if beyond.calls or beyond.gaps:
        warm.after = _beside(beyond, warmup)
    attach(gm, warm)
    return warm


hook_precompiled()
substitute.install()
substitute.mark(fxwarm)


def _beside(shapes: ShapeSet, first: Warmup, *, keep: bool = False) -> WarmCallable:
    """Return what warms ``shapes``, which showed only after Dynamo, on the device of ``first``."""
    warmup = Warmup(shapes, first.options, device=first.device, target=first.target)
    if first.options.when != "manual":
        warmup.start()
    return WarmCallable(never_called, warmup, keep=keep)


def _warm_late(shapes: ShapeSet, first: Warmup) -> None:
    """A backward that is compiled when it first runs is warmed there and then."""
    if shapes.calls or shapes.gaps:
        warm = _beside(shapes, first, keep=True)
        if first.options.when != "manual":
            warm.make_warm()


def _digest(gm: torch.fx.GraphModule) -> str:
    try:
        return digest_of(gm)
    except Exception as error:  # then the calls alone make the key
        log.debug("fxwarm: no digest of the graph: %s", error, exc_info=True)
        return ""


def _no_builds(key: str) -> None:
    """``fxwarm.when`` is "manual": nothing starts before ``warm_all``."""


def _collect(gm: torch.fx.GraphModule, inputs: list[Any], options: Options) -> Collected:
    """Collect, or say why not: a bug of ours must not break the user's compile."""
    from passes.collect import Collected, collect

    matchers = [family.match for family in load_families().values()]
    try:
        found = collect(gm, inputs, matchers, max_size=options.max_size, jit_ops=options.jit_ops)
        gaps = (*found.shapes.gaps, *substitute.take_refusals())
        return dataclasses.replace(found, shapes=msgspec.structs.replace(found.shapes, gaps=gaps))
    except Exception as error:
        if options.strict:
            raise
        log.exception("fxwarm: could not read the graph, the model runs without warmup: %s", error)
        gap = Gap("collect", f"{type(error).__name__}: {error}")
        return Collected(shapes=ShapeSet(gaps=(gap,)), weights={}, used_max_size=())


def _with_specialized(collected: Collected, found: tuple[Any, ...]) -> Collected:
    if not found:
        return collected
    shapes = msgspec.structs.replace(collected.shapes, specialized=found)
    for one in found:
        log.warning(
            "fxwarm: the model fixed %s to %d at %s",
            one.source,
            one.size,
            one.place or "an unknown line",
        )
    return dataclasses.replace(collected, shapes=shapes)


def _inductor(
    gm: torch.fx.GraphModule,
    inputs: list[Any],
    patches: Mapping[str, Any],
    keys: graph_key.GraphKeys | None = None,
    after: AfterDynamo | None = None,
) -> Callable[..., Any]:
    from torch._inductor import compile_fx as module

    inner = module.compile_fx_inner
    if keys is not None:
        inner = graph_key.wrap_inner(inner, keys)
    if after is not None:
        inner = after.wrap(inner)
    compile_fx: Any = module.compile_fx  # with a graph, not a serialised one, it returns a callable
    compiled: Callable[..., Any] = compile_fx(
        gm, inputs, inner_compile=inner, config_patches=dict(patches) or None
    )
    return compiled


def _is_meta(inputs: list[Any]) -> bool:
    """Return whether there is nothing to run on: all tensors are on the meta device."""
    devices = [t.device.type for t in inputs if torch.is_tensor(t)]
    return bool(devices) and all(d == "meta" for d in devices)


def _say(collected: Collected, seconds: float) -> None:
    shapes = collected.shapes
    families = ", ".join(
        f"{sum(c.family == name for c in shapes.calls)} {name}"
        for name in dict.fromkeys(c.family for c in shapes.calls)
    )
    log.info(
        "fxwarm: %d kernel calls (%s), %d gaps, %d unknown ops in %.2f s",
        len(shapes),
        families or "none",
        len(shapes.gaps),
        len(shapes.unknown),
        seconds,
    )
    for bounded in collected.used_max_size:
        log.info("fxwarm: fxwarm.max_size bounds %s", bounded)
    with contextlib.suppress(Exception):
        from torch._logging._internal import trace_structured

        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": "fxwarm_shapes", "encoding": "json"},
            payload_fn=shapes.to_json,
        )
