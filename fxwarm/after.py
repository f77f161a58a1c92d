"""What Dynamo's graph does not show: calls of the backward graph, of ops that AOTAutograd decomposes, cuDNN's attention.

Inductor's inner compile sees them, but only on a miss of AOTAutograd's cache. So what it saw is kept under the AOT key,
and a hit finds it there; a hit that should have had something and finds nothing is a gap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxwarm import store
from fxwarm.attention import find_cudnn_attention
from fxwarm.family import load_families
from fxwarm.options import Options
from passes.records import Gap, ShapeSet

if TYPE_CHECKING:
    from fxwarm.graph_key import GraphKeys

log = logging.getLogger(__name__)


class AfterDynamo:
    """What the inner compile of one graph showed beyond ``seen``, the shapes of Dynamo's graph."""

    def __init__(
        self,
        seen: ShapeSet,
        options: Options,
        keys: GraphKeys,
        warm: Callable[[ShapeSet], None],
        *,
        attends: bool = False,
    ) -> None:
        """``warm`` is called with what a backward shows that is compiled late, when it first runs.

        ``attends`` says that Dynamo's graph has attention, which may be cuDNN's.
        """
        self._attends = attends
        self.shapes = ShapeSet()
        self._seen, self._options, self._keys, self._warm = seen, options, keys, warm
        self._ran = self._late = False

    def wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``inner`` (an ``inner_compile`` of Inductor) so that the graphs it is given are read first."""

        def read_and_compile(
            gm: torch.fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any
        ) -> Any:
            try:
                self._read(gm, inputs, backward=bool(kwargs.get("is_backward")))
            except Exception as error:  # the user's compile goes on
                if self._options.strict:
                    raise
                log.exception("fxwarm: could not read the graph after AOTAutograd: %s", error)
            return inner(gm, inputs, *args, **kwargs)

        return read_and_compile

    def finish(self, inputs: Sequence[Any]) -> ShapeSet:
        """Return what is to be warmed besides ``seen``, once Inductor is done; from the store after a hit."""
        self._late = True
        if self._ran or not self._path:
            self._keep()
            return self.shapes
        stored = store.read(self._path, ShapeSet)
        if stored is not None:
            return stored - self._seen
        hidden = [u.op for u in self._seen.unknown if _decomposes(u.op)]
        if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in inputs):
            hidden.append("backward")
        if self._attends:
            hidden.append("scaled_dot_product_attention")
        reason = (
            "it came compiled from torch's cache, which fxwarm did not see filled, so its kernels are not known; "
            "clear that cache, or call under torch.no_grad() where no gradient is needed"
        )
        return ShapeSet(gaps=tuple(Gap(op, reason) for op in hidden))

    def _read(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], *, backward: bool) -> None:
        from passes.collect import collect

        self._ran = True
        matchers = [family.match for family in load_families().values()]
        options = self._options
        found = collect(
            gm, inputs, matchers, max_size=options.max_size, jit_ops=options.jit_ops
        ).shapes
        if (
            not backward
        ):  # Dynamo's graph says more of the ops that it shows: which tensors are weights
            shown = {(c.family, c.op) for c in self._seen.calls}
            kept = [(c, s) for c, s in found.items() if (c.family, c.op) not in shown]
            found = ShapeSet(calls=tuple(c for c, _ in kept), sites=tuple(s for _, s in kept))
        gaps = (*found.gaps, *find_cudnn_attention(gm))
        found = ShapeSet(calls=found.calls, sites=found.sites, gaps=gaps) - self._seen - self.shapes
        self.shapes = self.shapes | found
        if self._late:
            self._keep()
            self._warm(found)

    def _keep(self) -> None:
        if self._path:
            store.write(self._path, self.shapes.to_json())

    @property
    def _path(self) -> Path | None:
        if not (self._keys.aot and self._keys.is_stable):
            return None
        return store.path_of(store.root(self._options.cache_dir), self._keys.aot, "after")


def _decomposes(name: str) -> bool:
    """Return whether AOTAutograd takes the op ``name`` apart, so that what it calls shows only after Dynamo."""
    try:
        return bool(
            torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        )
    except RuntimeError:  # no such op: a Python function
        return False
