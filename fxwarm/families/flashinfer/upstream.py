"""What touches FlashInfer itself: its import, its specs, its getters. Its tuner is next door, in ``tuner``.

Everything goes through ``load``, which says in one sentence why a FlashInfer that is absent, partial or cannot write
its workspace is of no use. A canary test imports each private name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

from fxwarm import exc

__all__ = [
    "activation",
    "attribute",
    "function_of",
    "load",
    "make_spec",
    "not_writable",
    "open_module",
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
            raise not_writable(error) from error
        except Exception as error:  # a jit-cache or cubin package of another version, an old driver
            raise exc.LibraryError(
                f"flashinfer is installed but does not import ({type(error).__name__}: {error}); see its requirements"
            ) from error


def not_writable(error: OSError) -> exc.LibraryError:
    """Return the error of a workspace that refused a file."""
    return exc.LibraryError(
        f"flashinfer cannot write its workspace ({error}); set FLASHINFER_WORKSPACE_BASE to a folder that can "
        "be written before it is imported"
    )


def make_spec(name: str) -> Any:
    """Return the library's own description of module ``name``, which builds it. May write generated sources.

    Raises LibraryError for a module that is planned and keyed, not built.
    """
    module, function = _find(name, _SPECS)
    with _keep_times(name):
        return attribute(module, function)()


def open_module(name: str) -> Any:
    """Return module ``name`` loaded, as the library's own first call does. Raises LibraryError as ``make_spec``."""
    module, function, arguments = _find(name, _GETTERS)
    if name in _COPIED:
        make_spec(name)  # the library keeps it, with the times that its sources have now
    return attribute(module, function)(*arguments)


def function_of(home: str, name: str) -> Callable[..., Any]:
    """Return the library's function ``name``. Raises LibraryError where this build does not export it."""
    load()
    found: Callable[..., Any] = attribute(home, name)
    return found


def activation(number: int) -> Any:
    """Return the library's enum member: its name, not its number, enters the tuner's hash."""
    return attribute("flashinfer.tllm_enums", "ActivationType")(number)


@contextlib.contextmanager
def _keep_times(name: str) -> Iterator[None]:
    """Give generated sources whose text did not change their old times back.

    ``gen_monomoe_module`` copies its sources anew in every process, and ninja, which goes by times, then compiles them
    anew: 25 to 50 s at the first call of each process (0.6.18.post1).
    """
    if name not in _COPIED:
        yield
        return
    folder = Path(attribute("flashinfer.jit.env", "FLASHINFER_GEN_SRC_DIR")) / name
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


def attribute(module: str, name: str) -> Any:
    """Return a name of the library, private ones included. Raises LibraryError where this build lacks it."""
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
