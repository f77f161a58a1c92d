"""AOTInductor packages (``.pt2``) that warm themselves: the plan in the package's metadata, or an op inside it.

Torch has no load hook for packages, so ``load_package`` reads the metadata. A program that loads the package with
torch alone runs it unwarmed; with ``embed=True`` an op inside the package warms it there too, and then the package
needs fxwarm to run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fxwarm.artifacts import WarmCallable, never_called
from fxwarm.family import load_families
from fxwarm.options import resolve, split
from fxwarm.warmup import Warmup

if TYPE_CHECKING:
    from torch.export import ExportedProgram

log = logging.getLogger(__name__)

FIELD = "fxwarm_parcel"
"""The field of the package's metadata that holds the parcel."""


def save_package(
    program: ExportedProgram,
    path: str,
    *,
    options: Mapping[str, Any] | None = None,
    embed: bool = False,
) -> str:
    """Compile an exported program with AOTInductor to ``path`` (``.pt2``), its plan inside; return the path.

    ``options`` are Inductor's and ``fxwarm.*``. With ``embed`` (or ``fxwarm.embed``) an op in the package warms it at
    its first call even where torch alone loads it; it costs a few microseconds a call, and the package then needs
    fxwarm to run: ``import fxwarm.packages`` before it is loaded.
    """
    from passes.collect import collect
    from passes.digest import digest_of

    ours, theirs = split(options)
    settings = resolve(ours)
    collected = collect(
        program.graph_module,
        [],
        [family.match for family in load_families().values()],
        max_size=settings.max_size,
        jit_ops=settings.jit_ops,
        ranges=program.range_constraints,
    )
    # The positions of weights are those of the exported graph, not of the package's call: none travel.
    warmup = Warmup(collected.shapes, settings, graph_key=digest_of(program.graph_module))
    parcel = WarmCallable(never_called, warmup, register=False).pack().decode()
    if embed or settings.embed:
        program = _with_op(program, parcel)
    configs = {
        **theirs,
        "aot_inductor.metadata": {**theirs.get("aot_inductor.metadata", {}), FIELD: parcel},
    }
    return str(
        torch._inductor.aoti_compile_and_package(
            program, package_path=path, inductor_configs=configs
        )
    )


def load_package(path: str, **kwargs: Any) -> Callable[..., Any]:
    """Load a ``.pt2`` package; the result warms before its first call if the package carries a plan.

    ``kwargs`` go to ``torch._inductor.aoti_load_package``. A package without a plan is returned as torch loads it, and
    one line says that it is not warmed and what to do.
    """
    with contextlib.suppress(ImportError):
        import fxwarm.ops  # noqa: F401  # the package may hold our ops
    loaded = torch._inductor.aoti_load_package(path, **kwargs)
    parcel = loaded.get_metadata().get(FIELD)
    if not parcel:
        log.warning(
            "fxwarm: %s carries no plan and is not warmed; save it with fxwarm.save_package", path
        )
        return loaded
    try:
        return _WarmPackage.unpack(loaded, parcel.encode())
    except ValueError as error:  # a damaged plan must not cost the user the model
        log.error(
            "fxwarm: %s is not warmed, its plan does not load (%s); save it again", path, error
        )
        return loaded


class _WarmPackage(WarmCallable):
    """A loaded package: called with the model's own arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.warmup.is_warm and self.warmup.options.when != "manual":
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            self.make_warm(tuple(leaves))
        return self.inner(*args, **kwargs)


_SCHEMA = "ensure_warm(str parcel) -> ()"


@functools.lru_cache(maxsize=1)
def define_ensure_warm() -> Any:
    """Define ``fxwarm::ensure_warm`` once and return it."""
    library = torch.library.Library("fxwarm", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("ensure_warm", _ensure_warm, "CompositeExplicitAutograd")
    torch.library.register_fake("fxwarm::ensure_warm", lambda parcel: None, lib=library)
    op = torch.ops.fxwarm.ensure_warm.default
    torch.fx.node.has_side_effect(op)
    define_ensure_warm.library = library  # type: ignore[attr-defined]  # it unregisters when collected
    return op


def _ensure_warm(parcel: str) -> None:
    _embedded(parcel)


@functools.lru_cache(maxsize=64)
def _embedded(parcel: str) -> WarmCallable:
    warm = WarmCallable.unpack(never_called, parcel.encode())
    warm.make_warm()
    return warm


def _with_op(program: ExportedProgram, parcel: str) -> ExportedProgram:
    op = define_ensure_warm()
    graph = program.graph_module.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_function(op, (parcel,))
    program.graph_module.recompile()
    return program


define_ensure_warm()  # so that importing this module is enough to load a package that holds the op
