"""TileLang's private parts: the only file of ours that touches them (read in 0.1.14 and 0.1.15).

A kernel has three homes: level 1, a dict in its factory, by statics; level 2, a dict of the process, by disk key;
level 3, a folder on disk. The disk key is a hash of the TIR script, so it costs an *elaboration* of the factory's
Python, 0.12 to 0.24 s for an mHC kernel: 22 of them are 3 s of a warm start. A PrimFunc that was stored as TVM's JSON
gives the same key in 3 ms, and the library itself then loads the entry and checks it.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fxwarm import exc
from fxwarm.ops.mhc_factories import get_factory
from fxwarm.records import Target

log = logging.getLogger(__name__)

Statics = Mapping[str, Any]

CHECKED = ("0.1.14", "0.1.15")
"""Versions whose private parts were read. Others are tried, and refused where a part is missing."""


class Counts:
    """What TileLang did in this process since ``watch``: real compiles, entries read from disk, elaborations."""

    builds = 0
    loads = 0
    elaborations = 0


_lock = threading.RLock()
_watching = False


def watch() -> bool:
    """Count from now on, if TileLang is imported; return whether it counts. A second call changes nothing."""
    global _watching
    import sys

    with _lock:
        if _watching or "tilelang.jit" not in sys.modules:
            return _watching
        from tilelang.jit import JITImpl
        from tilelang.jit.kernel import JITKernel

        init, get_tir = JITKernel.__init__, JITImpl.get_tir

        @functools.wraps(init)
        def counted_init(self: Any, *args: Any, **kwargs: Any) -> None:
            # from_database is the eighth argument; the library itself passes it by name
            stored = kwargs.get("from_database", len(args) > 7 and args[7])
            with _lock:
                if stored:
                    Counts.loads += 1
                else:
                    Counts.builds += 1
            init(self, *args, **kwargs)

        @functools.wraps(get_tir)
        def counted_get_tir(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _lock:
                Counts.elaborations += 1
            return get_tir(self, *args, **kwargs)

        JITKernel.__init__ = counted_init
        JITImpl.get_tir = counted_get_tir
        _watching = True
        return True


def builds() -> int:
    """Return how many kernels TileLang compiled in this process since ``watch``; 0 where it is not imported."""
    watch()
    return Counts.builds


def get(path: str) -> Any:
    """Return the factory ``path`` with counting on. Raises LibraryError that says what is wrong with it."""
    try:
        factory = get_factory(path)
    except Exception as error:
        raise exc.LibraryError(
            f"the TileLang factory {path} cannot be imported: {error}"
        ) from error
    if not all(
        hasattr(factory, part)
        for part in ("get_tir", "signature", "_kernel_cache", "initialize_jit_mode")
    ):
        raise exc.LibraryError(
            f"{path} is no TileLang jit function that we know; name one that @tilelang.jit made"
        )
    watch()
    return factory


def level_one(factory: Any, statics: Statics) -> Any | None:
    """Return the kernel that a call with ``statics`` finds at once, or None. Elaborates nothing."""
    return (
        factory._kernel_cache.get(_level_one_key(factory, statics))
        if is_lazy(factory, statics)
        else None
    )


def put(factory: Any, statics: Statics, kernel: Any) -> None:
    """Make ``kernel`` what a call of a lazy ``factory`` with ``statics`` finds."""
    factory._kernel_cache.setdefault(_level_one_key(factory, statics), kernel)


def is_lazy(factory: Any, statics: Statics) -> bool:
    """Whether ``factory(statics)`` returns a kernel, to be called with tensors; eager ones take both at once.

    Raises LibraryError where the factory does not take these statics: another version of its package.
    """
    statics = _checked(factory, statics)
    return str(factory.initialize_jit_mode(**statics)) == "lazy" and not factory.func.tensor_args


def elaborate(factory: Any, statics: Statics) -> Any:
    """Return the PrimFunc of ``factory`` for ``statics``: the expensive step, in Python."""
    return factory.get_tir(**_checked(factory, statics))


def disk_key(factory: Any, prim_func: Any, target: Target) -> tuple[str, Path]:
    """Return the library's own key for ``prim_func`` and the folder of its entry."""
    from tilelang import cache
    from tilelang.transform.pass_config import normalize_pass_configs

    try:
        store, context, _ = cache._resolve_cache_dispatch(
            _spec(factory, target), factory.target_host, factory.execution_backend, False
        )
        key = store._generate_key(
            prim_func,
            factory.out_idx,
            execution_backend=context.execution_backend.name,
            args=(),
            target=context.target,
            target_host=context.target_host,
            pass_configs=normalize_pass_configs(factory.pass_configs),
            compile_flags=factory.compile_flags,
        )
        return str(key), Path(store._get_cache_path(key))
    except (AttributeError, TypeError) as error:
        raise exc.LibraryError(
            f"TileLang {version()} names its kernels in a way we do not know: {error}"
        ) from error


def compile(factory: Any, prim_func: Any, target: Target) -> Any:
    """Return the kernel of ``prim_func``, from disk where the library finds it there, else compiled and stored."""
    import tilelang

    return tilelang.compile(
        prim_func,
        out_idx=factory.out_idx,
        execution_backend=factory.execution_backend,
        target=_spec(factory, target),
        target_host=factory.target_host,
        verbose=factory.verbose,
        pass_configs=factory.pass_configs,
        compile_flags=factory.compile_flags,
    )


def key_of(kernel: Any) -> str:
    """Return the disk key that ``kernel`` was loaded from or stored under; empty where the library gives none."""
    return str(getattr(kernel, "_tilelang_cache_key", ""))


def to_json(prim_func: Any) -> str:
    """Return ``prim_func`` as TVM's JSON: data, which runs nothing when it is read."""
    from tilelang import tvm

    return str(tvm.ir.save_json(prim_func))


def from_json(text: str) -> Any:
    """Read what ``to_json`` of the same TileLang wrote.

    ``tvm.ir.load_json`` first looks, in Python, for what older versions wrote: 7 of its 8.5 ms for an mHC kernel.
    """
    from tilelang import tvm

    load = tvm.get_global_func("node.LoadJSON", allow_missing=True)
    return load(text) if load is not None else tvm.ir.load_json(text)


def parameters(kernel: Any) -> list[tuple[Any, list[int]]]:
    """Return torch dtype and shape of each argument of ``kernel``, every dynamic size being 1."""
    from tilelang import tvm

    ones: dict[Any, Any] = {}

    def size(dim: Any) -> int:
        if isinstance(dim, tvm.tirx.Var):
            return 1
        if not isinstance(dim, (int, tvm.tirx.IntImm)):
            tvm.tirx.stmt_functor.post_order_visit(dim, note)
            dim = tvm.arith.Analyzer().simplify(tvm.tirx.stmt_functor.substitute(dim, ones))
        return int(dim)

    def note(node: Any) -> None:
        if isinstance(node, tvm.tirx.Var):
            ones[node] = tvm.tirx.IntImm(node.dtype, 1)

    return [(p.torch_dtype(), [size(d) for d in p.shape]) for p in kernel.params]


@functools.cache
def version() -> str:
    """Return the version under which TileLang files its cache."""
    import tilelang

    found = str(tilelang.__version__)
    if not found.startswith(CHECKED):
        log.info(
            "TileLang %s was not read by us (%s were); its private parts are tried",
            found,
            ", ".join(CHECKED),
        )
    return found


def _checked(factory: Any, statics: Statics) -> dict[str, Any]:
    tensors: Callable[[str], bool] = factory.func.tensor_args.__contains__
    known = [name for name in factory.signature.parameters if not tensors(name)]
    unknown = [name for name in statics if name not in known]
    if unknown:
        raise exc.LibraryError(
            f"{factory.func.__name__} takes {', '.join(known)}, not {', '.join(unknown)}; "
            "this version of its package is not known to us"
        )
    return dict(statics)


def _level_one_key(factory: Any, statics: Statics) -> Any:
    factory.initialize_jit_mode(**statics)
    return factory.func.parse_args(**statics)[0]


def _spec(factory: Any, target: Target) -> Any:
    """The target to compile for. A factory may fix its own; "auto" needs a GPU, and "cuda" is sm_50 without one."""
    if factory.target is not None:
        return factory.target
    if target.device == "cpu":
        return "c"
    return {"kind": "cuda", "arch": arch_of(target)}


def arch_of(target: Target) -> str:
    """Return TileLang's name of the architecture: it resolves capability 9.0 to sm_90a and 10.0 to sm_100a."""
    return target.arch.removesuffix("f") + "a" if target.arch.endswith("f") else target.arch
