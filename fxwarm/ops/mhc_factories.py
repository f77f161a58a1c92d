"""Where the TileLang kernel factories of mHC live, and how to import them without paying for what we do not use.

``import tile_kernels`` 1.0.0 fails from TileLang 0.1.12 on (it wants ``tilelang.utils.target``, TileKernels #24) and
takes 7 to 13 s where it works, for it runs torch.compile. Its ``mhc`` modules need neither.
"""

# ruff: noqa: PLR0917 (the argument order is the op's)

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

BIG_FUSE = "tile_kernels.mhc.pre_big_fuse_kernel:_mhc_pre_big_fuse"
POST = "tile_kernels.mhc.post_kernel:_mhc_post_fwd"
BIG_FUSE_CPU = "fxwarm.ops.mhc_kernels:mhc_pre_big_fuse_cpu"
POST_CPU = "fxwarm.ops.mhc_kernels:mhc_post_cpu"

_lock = threading.RLock()
_factories: dict[str, Any] = {}


def get_factory(path: str) -> Any:
    """Return the TileLang jit function ``path``, written "module:attribute". Imports TileLang.

    Raises ImportError or AttributeError where there is none.
    """
    found = _factories.get(path)
    if found is None:
        module, _, attribute = path.partition(":")
        with (
            _lock,
            _submodules_only("tile_kernels")
            if module.startswith("tile_kernels.")
            else contextlib.nullcontext(),
        ):
            found = getattr(importlib.import_module(module), attribute)
            _factories[path] = found
    return found


def has_tilelang() -> bool:
    """Whether TileLang is installed; imports nothing."""
    return importlib.util.find_spec("tilelang") is not None


def pre_statics(
    hidden: int,
    mult: int,
    n_splits: int,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    repeat: int,
) -> dict[str, int | float]:
    """Return what specialises the fused pre kernel, normalised: TileLang compares statics as Python values."""
    return {
        "hidden_size": int(hidden),
        "rms_eps": float(rms_eps),
        "mhc_pre_eps": float(pre_eps),
        "mhc_sinkhorn_eps": float(sinkhorn_eps),
        "mhc_post_mult_value": float(post_mult),
        "sinkhorn_repeat": int(repeat),
        "n_splits": int(n_splits),
        "mhc_mult": int(mult),
    }


def post_statics(hidden: int, mult: int) -> dict[str, int | float]:
    """Return what specialises the post kernel."""
    return {"mhc": int(mult), "hidden": int(hidden)}


@contextlib.contextmanager
def _submodules_only(package: str) -> Iterator[None]:
    """Let submodules of ``package`` be imported without running its ``__init__``.

    The stand-in leaves again: a later ``import tile_kernels`` of the user's gets the real package, and in it the
    same submodules, with the kernels that we warmed.
    """
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        yield
        return
    stand_in = types.ModuleType(package)
    stand_in.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(package) is stand_in:
            del sys.modules[package]
