"""torch.compile's own cache key of a graph, and its look-up: the only file that touches torch's private cache API.

Each access is guarded. Where torch gives no key, or one that is not of torch's form (under ``aot_compile`` it can be
``str(random())``), there is none, ``GraphKeys.why`` says why, and a digest of the graph has to do.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

_FORM = re.compile(
    r"[af][a-z2-7]{20,64}"
)  # prefix, then base32 of sha256 as torch._inductor.codecache writes it


@dataclass
class GraphKeys:
    """What torch called the graph while it compiled it."""

    aot: str = ""
    """AOTAutograd's key; known before anything is lowered, on a hit as on a miss."""
    fx: tuple[str, ...] = field(default=())
    """FX graph keys: forward, then backward."""
    why: str = ""
    """Why there is no key, in torch's words, where there is none."""
    is_stable: bool = True
    """Whether another process gets the same keys for the same graph."""
    digest: str = ""
    """What ``passes.digest`` says of the graph."""

    @property
    def best(self) -> str:
        """AOTAutograd's key, else the first FX key, else the digest: what another process gets as well."""
        if not self.is_stable:
            return self.digest
        return self.aot or (self.fx[0] if self.fx else self.digest)


def is_torch_key(text: object) -> bool:
    """Return whether ``text`` has the form of torch's cache keys."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None


def is_stable() -> bool:
    """Return whether torch's key of a graph is the same in another process.

    Under ``caching_precompile`` and ``aot_compile`` it holds a per-process id from torch 2.13 on.
    """
    import torch._dynamo.config
    import torch._functorch.config

    return not (
        getattr(torch._dynamo.config, "caching_precompile", False)
        or getattr(torch._functorch.config, "bypass_autograd_cache_key", False)
    )


@contextlib.contextmanager
def watch(on_key: Callable[[str], None], digest: str = "") -> Iterator[GraphKeys]:
    """Note the cache keys that torch computes inside, and call ``on_key`` once, as soon as a stable AOT key is known.

    Where torch's keys hold an id of this process, that is at once, with ``digest``, which is the graph's. Dynamo's
    compile lock is held around a backend call, so nobody else compiles inside. ``on_key`` must not raise.
    """
    keys = GraphKeys(is_stable=is_stable(), digest=digest)
    if not keys.is_stable:
        keys.why = "torch's key holds an id of this process (caching_precompile, aot_compile)"
        on_key(digest)
    try:
        from torch._functorch._aot_autograd import autograd_cache as module

        original = module.autograd_cache_key
    except (ImportError, AttributeError) as error:
        keys.why = f"torch has no autograd_cache_key here ({error})"
        with whole_ranges():
            yield keys
        return

    def spy(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except Exception as error:
            keys.why = f"torch made no AOT key: {error}"
            raise
        key = result[0] if isinstance(result, tuple) and result else result
        if not is_torch_key(key):
            keys.why = f"torch's AOT key {str(key)[:24]!r} is not of torch's form"
        elif not keys.aot:
            keys.aot = str(key)
            if keys.is_stable:
                on_key(keys.aot)
        return result

    module.autograd_cache_key = spy
    try:
        with whole_ranges():
            yield keys
    finally:
        module.autograd_cache_key = original
        if not (keys.aot or keys.fx or keys.why):
            keys.why = "torch was not asked for a key (its caches are off)"


@contextlib.contextmanager
def whole_ranges() -> Iterator[None]:
    """Let a cache hit inside keep the range of sizes that was compiled.

    Torch stores the guards of an entry as text and evaluates it on symbolic sizes at a hit. There ``min(128, 8*s)`` is
    Python's ``min``, whose comparison picks a branch and becomes a guard: the range splits at s = 16, and the first
    small batch of a warm start is traced again, which the cold start never did (torch 2.11 to 2.15).
    """
    try:
        from torch import sym_max, sym_min
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP as names
    except ImportError as error:
        log.info("a cache hit may split the range of sizes on this torch: %s", error)
        yield
        return
    added = {
        name: functools.partial(_fold, pair)
        for name, pair in (("min", sym_min), ("max", sym_max))
        if name not in names
    }
    names.update(added)
    try:
        yield
    finally:  # the guards that Dynamo makes of the frame use the same names, on plain numbers, at every call
        for name in added:
            names.pop(name, None)


def _fold(pair: Callable[[Any, Any], Any], *values: Any) -> Any:
    return functools.reduce(pair, values)


def wrap_inner(inner: Callable[..., Any], keys: GraphKeys) -> Callable[..., Any]:
    """Return ``inner`` (an ``inner_compile`` of Inductor) so that the FX keys it gives are noted in ``keys``."""

    def compile_and_note(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        key = getattr(out, "_fx_graph_cache_key", None)
        if is_torch_key(key):
            keys.fx = (*keys.fx, str(key))
        return out

    return compile_and_note
