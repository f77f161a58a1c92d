"""The functions a user calls by hand: plan, warm, and what the backend made in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fxwarm.options import resolve
from fxwarm.records import Target, WarmPlan, WarmReport
from passes.records import ShapeSet


def plan(
    shapes: ShapeSet,
    target: Target | None = None,
    libraries: Mapping[str, str] | None = None,
    **options: Any,
) -> WarmPlan:
    """Return every kernel that ``shapes`` can need on ``target`` (by default this machine's device).

    ``libraries`` names builds to plan for, ``{"sgl-deep-gemm": "0.1.2"}``: a distribution and its full version. The
    default is what is installed, else the newest build that a family knows. For a named target or build the kernels
    are modelled; for this machine's own device the installed library is asked, unless an earlier process did so and its
    receipt still holds. ``options`` are ``max_keys`` and so on.

    Raises UnknownTargetError or LibraryError, each with what is known.
    """
    from fxwarm import receipts
    from fxwarm.planner import make_plan
    from fxwarm.warmup import Warmup

    settings = resolve(options)
    ask = target is None and not libraries
    target = Target.current() if target is None else target
    known = receipts.stored_plan(Warmup(shapes, settings, target=target)) if ask else None
    if known is not None:
        return known
    return make_plan(shapes, target, libraries, ask=ask, max_keys=settings.max_keys)


def warm(plan: WarmPlan | ShapeSet, device: Any = None, **options: Any) -> WarmReport:
    """Build, tune and load every kernel of ``plan`` in this process; return what was done.

    Shapes are planned for this device first, and what is known is built while the rest is asked. ``device`` is the
    current CUDA device by default, else the CPU. ``options`` are those of ``fxwarm.options.Options`` (``jobs=8``,
    ``strict=True``). Raises LibraryError where the plan is for another kind of device.
    """
    import torch

    from fxwarm import exc, runtime, warmup

    if isinstance(plan, ShapeSet):
        here = runtime.current_device() if device is None else torch.device(device)
        target = Target.current(here)
        return warmup.Warmup(plan, resolve(options), device=here, target=target).finish()
    where = runtime.current_device(plan.target.device)
    if plan.target.device != where.type and plan.planned:
        raise exc.LibraryError(
            f"the plan is for {plan.target.name} ({plan.target.device}), this process has only a {where.type}; "
            "run it on that machine, or plan for this one"
        )
    return warmup.run(plan, resolve(options), device)


def warm_model(
    model: Callable[..., Any], *args: Any, max_size: int = 8192, **kwargs: Any
) -> WarmReport:
    """Trace ``model(*args, **kwargs)`` for any batch up to ``max_size``, plan for this device, and warm."""
    from fxwarm.tracing import trace

    return warm(trace(model, *args, max_size=max_size, **kwargs))


def plans() -> list[WarmPlan]:
    """Return the plans that the backend made in this process, in order; those still being made are waited for."""
    from fxwarm.artifacts import pending

    out = []
    for warmup in pending.warmups():
        warmup.wait()
        if warmup.plan is not None:
            out.append(warmup.plan)
    return out


def reports() -> list[WarmReport]:
    """Return the reports of what was warmed in this process, in order of compilation, also of models that are gone."""
    from fxwarm.artifacts import pending

    return [warmup.report for warmup in pending.warmups() if warmup.report is not None]


def warm_all(group: Any = None, *, builds: bool = True) -> list[WarmReport]:
    """Make every model that this process has compiled or loaded, and still holds, warm now; return the reports.

    That includes ``aot_compile`` artifacts that were loaded before fxwarm was imported.

    With a ``torch.distributed`` group, together with its other ranks, each of which must call this too: missing kernels
    are dealt out and built once per cache folder, then every rank loads all of its own, and tactics are made to agree.
    It goes through the group's store, so any backend will do, and waiting does not count against its timeout. A rank
    with ``builds=False`` (short of memory) builds nothing. A rank that dies is reported, and the others go on.

    Set ``fxwarm.when`` to "manual" to leave all building to this; builds begun in the background share their locks.
    Raises IncompleteError, after all ranks are done, if ``strict`` is set and something could not be warmed.
    """
    from fxwarm import aot_artifacts
    from fxwarm.artifacts import never_called, pending, restore

    for parcel in aot_artifacts.take_missed():
        restore(never_called, parcel, keep=True)
    if group is not None:
        from fxwarm.ranks import warm_together

        return warm_together(list(pending), group, builds=builds)
    return [report for c in pending if (report := c.make_warm()) is not None]
