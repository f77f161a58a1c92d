"""The only file that touches FlashInfer: its specs, its getters, its tuner, private names included.

Everything goes through ``load``, which says in one sentence why a FlashInfer that is absent, partial or cannot write
its workspace is of no use. A canary test imports each private name.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import util
from pathlib import Path
from typing import Any

from fxwarm import exc
from fxwarm.families.flashinfer.tuner_key import Entry

__all__ = [
    "autotune",
    "covers",
    "load",
    "make_spec",
    "open_module",
    "pin_limit",
    "tuner",
    "undisturbed",
    "watch",
]

_SPECS = {
    "fused_moe_90": ("flashinfer.fused_moe.core", "gen_cutlass_fused_moe_sm90_module"),
    "trtllm_utils": ("flashinfer.jit.tllm_utils", "gen_trtllm_utils_module"),
    "gemm": ("flashinfer.gemm.gemm_base", "gen_gemm_module"),
    "monomoe": ("flashinfer.jit.monomoe", "gen_monomoe_module"),
    "fp8_blockscale_gemm_90": ("flashinfer.gemm.gemm_base", "gen_fp8_blockscale_gemm_sm90_module"),
}
_GETTERS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "fused_moe_90": ("flashinfer.fused_moe.core", "get_cutlass_fused_moe_module", ("90",)),
    "trtllm_utils": ("flashinfer.tllm_utils", "get_trtllm_utils_module", ()),
    "gemm": ("flashinfer.gemm.gemm_base", "get_gemm_module", ()),
    "monomoe": ("flashinfer.fused_moe.monomoe", "_get_monomoe_module", ()),
    "fp8_blockscale_gemm_90": (
        "flashinfer.gemm.gemm_base",
        "get_fp8_blockscale_gemm_runner_sm90",
        (),
    ),
}
_COPIED = ("monomoe",)
_SEEDS_TO = 1 << 16
_lock = threading.RLock()


def load() -> Any:
    """Import FlashInfer and return it. Raises LibraryError with the reason and what to do."""
    with _lock:
        if "flashinfer" not in sys.modules and util.find_spec("flashinfer") is None:
            raise exc.LibraryError("flashinfer is not installed; pip install flashinfer-python")
        try:
            return importlib.import_module("flashinfer")
        except ModuleNotFoundError as error:
            raise exc.LibraryError(
                f"flashinfer is installed in part: its import needs {error.name}; pip install {_pip_name(error.name)}"
            ) from error
        except OSError as error:
            raise exc.LibraryError(
                f"flashinfer cannot write its workspace ({error}); set FLASHINFER_WORKSPACE_BASE to a folder that can "
                "be written before it is imported"
            ) from error
        except Exception as error:  # a jit-cache or cubin package of another version, an old driver
            raise exc.LibraryError(
                f"flashinfer is installed but does not import ({type(error).__name__}: {error}); see its requirements"
            ) from error


def make_spec(name: str) -> Any:
    """Return the library's own description of module ``name``, which builds it. May write generated sources.

    Raises LibraryError for a module that is planned and keyed, not built.
    """
    module, function = _find(name, _SPECS)
    with _keep_times(name):
        return _attribute(module, function)()


def open_module(name: str) -> Any:
    """Return module ``name`` loaded, as the library's own first call does. Raises LibraryError as ``make_spec``."""
    module, function, arguments = _find(name, _GETTERS)
    if name in _COPIED:
        make_spec(name)  # the library keeps it, with the times that its sources have now
    return _attribute(module, function)(*arguments)


def function_of(home: str, name: str) -> Callable[..., Any]:
    """Return the library's function ``name``. Raises LibraryError where this build does not export it."""
    load()
    found: Callable[..., Any] = _attribute(home, name)
    return found


def activation(number: int) -> Any:
    """Return the library's enum member: its name, not its number, enters the tuner's hash."""
    return _attribute("flashinfer.tllm_enums", "ActivationType")(number)


def tuner() -> Any:
    """Return the process's one tuner."""
    load()
    return _attribute("flashinfer.autotuner", "AutoTuner").get()


def autotune() -> contextlib.AbstractContextManager[Any]:
    """Return the library's tuning context, without a file: entering with one drops what another file had loaded."""
    context: contextlib.AbstractContextManager[Any] = _attribute(
        "flashinfer.autotuner", "autotune"
    )(True)
    return context


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run as if no ``autotune(tuning_buckets=, round_up=, skip_ops=)`` were open on this thread.

    An engine may make its first call inside one; its buckets would then be in our keys, and never looked up after it.
    """
    stacks = [tuner()._get_override_stack(), tuner()._get_skip_ops_stack()]
    saved = [stack[:] for stack in stacks]
    try:
        for stack in stacks:
            stack.clear()
        yield
    finally:
        for stack, before in zip(stacks, saved, strict=True):
            stack[:] = before


def pin_limit(limit: int, others: Iterable[int]) -> None:
    """Make ``limit`` the ``tune_max_num_tokens`` in force for the process, whatever calls pass later.

    The library assigns a class attribute the first time it sees a value and never again for that value, so the last
    *new* one wins. Showing it all the others first leaves ours. Source: 0.6.18.post1 to 0.7.4.
    """
    from fxwarm.families.flashinfer.buckets import buckets_up_to

    runner = open_module("fused_moe_90").MoERunner
    refine = runner.refine_tuning_config
    refine.cache_clear()
    for seen in sorted({*buckets_up_to(_SEEDS_TO), *others} - {limit}):
        refine(seen)
    refine(limit)


def covers(entry: Entry, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether a call with tensors of these ``shapes`` finds a stored entry now."""
    import torch

    if entry.runner == "MoERunner":
        namespace = open_module("fused_moe_90")
        options: dict[str, Any] = dict(entry.options)
        for name, value in options.items():
            if name.endswith("_dtype"):
                options[name] = getattr(torch, str(value))
        options["activation_type"] = activation(options["activation_type"])
        for name in ("tp_rank", "ep_rank", "cluster_rank"):
            options.setdefault(name, 0)
        runner = namespace.MoERunner(**options)
        runner.gemm_idx_for_tuning = 1 if entry.op.endswith("gemm1") else 2
        config, inputs = namespace.MoERunner.tuning_config, []
    else:
        runner = open_module("gemm").cublas_fp8_gemm_runner()
        config = _attribute("flashinfer.gemm.gemm_base", "_FP8_GEMM_SM100_TUNING_CONFIG")
        a, b, out = (
            torch.empty(0, dtype=getattr(torch, str(v)), device="meta") for _, v in entry.options
        )
        inputs = [a, b, None, None, out, None]
    return bool(tuner().search_cache(entry.op, [runner], tuple(shapes), config, inputs=inputs)[0])


@contextlib.contextmanager
def watch() -> Iterator[list[str]]:
    """Yield a list that fills with what the library warns of: memory that ran out, an entry that is not there."""
    load()
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    logger, handler = _attribute("flashinfer.jit.core", "logger"), Handler()
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def library_path(name: str) -> Path | None:
    """Return the shared object that the library would load for module ``name``, None where it would build."""
    spec = make_spec(name)
    path = Path(spec.get_library_path())
    return path if path.is_file() and path.stat().st_size else None


@contextlib.contextmanager
def _keep_times(name: str) -> Iterator[None]:
    """Give generated sources whose text did not change their old times back.

    ``gen_monomoe_module`` copies its sources anew in every process, and ninja, which goes by times, then compiles them
    anew: 25 to 50 s at the first call of each process (0.6.18.post1).
    """
    if name not in _COPIED:
        yield
        return
    folder = Path(_attribute("flashinfer.jit.env", "FLASHINFER_GEN_SRC_DIR")) / name
    before = {p: (p.read_bytes(), p.stat()) for p in folder.rglob("*") if p.is_file()}
    yield
    for path, (text, status) in before.items():
        if path.is_file() and path.read_bytes() == text:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _find(name: str, table: dict[str, Any]) -> Any:
    load()
    if name not in table:
        raise exc.LibraryError(
            f"module {name} is planned and keyed, but neither built nor run here"
        )
    return table[name]


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        from fxwarm.families.flashinfer.library import installed_version

        raise exc.LibraryError(
            f"flashinfer-python {installed_version()} has no {module}.{name}; install 0.6.18 to 0.7.4"
        ) from error


def _pip_name(module: str | None) -> str:
    named = {"pynvml": "nvidia-ml-py", "tvm_ffi": "apache-tvm-ffi"}
    root = (module or "").partition(".")[0]
    return named.get(root, root)
