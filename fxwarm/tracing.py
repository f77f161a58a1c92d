"""Shapes without weights and without a GPU: trace a model and return what it asks of JIT kernel libraries."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from passes.records import ShapeSet, unite

if TYPE_CHECKING:
    from fxwarm.records import Target

log = logging.getLogger(__name__)


def trace(
    model: Callable[..., Any],
    *args: Any,
    max_size: int = 8192,
    target: Target | str | None = None,
    **kwargs: Any,
) -> ShapeSet:
    """Return every kernel call that ``model(*args, **kwargs)`` makes, for any batch up to ``max_size``.

    The model runs once under Dynamo, so build it and its inputs with ``torch.device("meta")``: then there are no
    weights and no arithmetic. The leading sizes of the inputs become symbolic unless marked static. Several graphs
    (after graph breaks) are united. ``target`` names the GPU to trace for: what the model asks about its device is then
    answered from it.

    Raises OptionError for an impossible ``max_size``, UnknownTargetError for an unknown target, and ShapeMismatchError where one call contradicts itself.
    """
    import torch

    from fxwarm import exc, substitute, symbolic
    from fxwarm.family import inputs_of, keep_weights, load_families
    from fxwarm.options import resolve
    from passes.collect import collect

    options = resolve({"max_size": max_size})
    matchers = [family.match for family in load_families().values()]
    found: list[ShapeSet] = []
    failed: list[Exception] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        try:
            collected = collect(
                gm,
                inputs,
                matchers,
                max_size=options.max_size,
                jit_ops=options.jit_ops,
                strict=True,
            )
        except ValueError as error:
            failed.append(error)
            return gm.forward
        weights = inputs_of(keep_weights(collected.weights))
        if collected.shapes:
            symbolic.retrace_if_static(gm, inputs, weights, options.symbolic)
        fixed = symbolic.settle(gm, inputs, weights)
        found.append(unite([collected.shapes, ShapeSet(specialized=fixed)]))
        for bounded in collected.used_max_size:
            log.info("fxwarm: max_size=%d bounds %s", options.max_size, bounded)
        return gm.forward

    substitute.install()
    substitute.mark(backend)
    substitute.take_refusals()
    # A limit on recompiles is for serving; one code object may be traced for many configurations.
    patch = {
        name: 1 << 16
        for name in ("recompile_limit", "accumulated_recompile_limit")
        if hasattr(torch._dynamo.config, name)
    }
    denied: list[str] = []
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    if isinstance(model, torch.nn.Module):
        # A module's inputs are activations: marked beforehand, it is traced once, not twice.
        symbolic.mark_leading(leaves, options.symbolic)
    try:
        with (
            torch.no_grad(),
            torch._dynamo.config.patch(patch),
            substitute.questions(target) as denied,
        ):
            torch.compile(model, backend=backend)(*args, **kwargs)
    except Exception as error:
        contradiction = _find_mismatch(error)
        if contradiction is None:
            if (
                denied
            ):  # a gap says that the model took a path for which this machine lacks the kernels
                log.warning("fxwarm: the trace ended early: %s", error)
                return unite([*found, ShapeSet(gaps=substitute.take_refusals())])
            raise
        raise exc.ShapeMismatchError(
            f"{_place_of(model, error, contradiction)}: {contradiction}"
        ) from error
    finally:
        symbolic.unmark(leaves)
    if failed:
        raise exc.ShapeMismatchError(str(failed[0])) from failed[0]
    return unite([*found, ShapeSet(gaps=substitute.take_refusals())])


def _find_mismatch(error: BaseException | None) -> Exception | None:
    """Return the shape contradiction that one of our ops raised inside a trace, out of what torch made of it."""
    from fxwarm import exc

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, exc.ShapeMismatchError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _place_of(model: Any, error: BaseException, contradiction: Exception) -> str:
    """Return the layer that holds tensors of the contradicting shapes, and the user's line, as far as they are known."""
    import torch

    shapes = {
        tuple(map(int, text.split(",")))
        for text in re.findall(r"\w\[([\d, ]+)\]", str(contradiction))
    }
    place = ""
    if isinstance(model, torch.nn.Module) and shapes:
        for name, module in model.named_modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if len(shapes & {tuple(t.shape) for t in tensors}) > 1:
                place = name or type(module).__name__
                break
    stack = getattr(error, "real_stack", None)
    line = f"{os.path.basename(stack[-1].filename)}:{stack[-1].lineno}" if stack else ""
    return " ".join(filter(None, (place, f"({line})" if line else ""))) or "the model"
