"""The compiler behind DeepGEMM's JIT: where the library looks for it, and whether it is enough.

Every check runs before the first build, and each refusal is one sentence that says what to do.
Source: DeepGEMM ``deep_gemm/__init__.py`` (search order), ``csrc/jit/compiler.hpp`` (versions).
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fxwarm import exc

__all__ = ["Compiler", "check", "check_cuobjdump", "find_compiler", "uses_nvrtc"]

DEFAULT_PREFIX = "/usr/local/cuda"
OLDEST = {"A": (12, 3), "B": (12, 9)}
"""nvcc that each JIT generation asserts."""


class Compiler(NamedTuple):
    """One nvcc: its path, what ``--version`` prints, and (major, minor) in it."""

    path: Path
    text: str
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"nvcc {self.version[0]}.{self.version[1]} ({self.path})"


def find_compiler(
    generation: str = "A", environ: Mapping[str, str] = os.environ, prefix: str = DEFAULT_PREFIX
) -> Compiler:
    """Return the nvcc that the library will use.

    Raises LibraryError that lists what was looked for, where there is none or it does not run.
    """
    names = ["DG_JIT_NVCC_COMPILER"] + (["DJ_JIT_NVCC_COMPILER"] if generation == "B" else [])
    tried: list[str] = []
    for name in (*names, "CUDA_HOME", "CUDA_PATH"):
        value = environ.get(name)
        if value:
            path = Path(value) if name in names else Path(value, "bin", "nvcc")
            if path.is_file():
                return _ask(path)
            tried.append(f"{name}={value}")
        else:
            tried.append(f"{name} (unset)")
        if value and name not in names:
            break  # the library takes the first that is set, and then nothing else
    else:
        on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
        if on_path:
            return _ask(Path(on_path))
        path = Path(prefix, "bin", "nvcc")
        if path.is_file():
            return _ask(path)
        tried += ["nvcc in PATH", str(path)]
    raise exc.LibraryError(
        f"DeepGEMM's compiler was not found: looked for {', '.join(tried)}; install the CUDA "
        "toolkit and set CUDA_HOME to it before the program starts (once the library is imported, cached kernels load without it)"
    )


def check(compiler: Compiler, arch: str, generation: str) -> None:
    """Raise LibraryError, naming both, if ``compiler`` is too old for ``arch`` or the library.

    ``arch`` as in "sm_90a" or "90a". Runs nothing.
    """
    oldest = OLDEST[generation]
    if compiler.version < oldest:
        raise exc.LibraryError(
            f"{compiler} is too old for this DeepGEMM, which wants {oldest[0]}.{oldest[1]}; "
            "install a newer CUDA toolkit and set CUDA_HOME to it"
        )
    needed = _needed(arch.removeprefix("sm_"))
    if compiler.version < needed:
        raise exc.LibraryError(
            f"{compiler} does not know sm_{arch.removeprefix('sm_')}, which came with "
            f"{needed[0]}.{needed[1]}; install that CUDA toolkit or a newer one and set CUDA_HOME"
        )


def _needed(arch: str) -> tuple[int, int]:
    """Return the first nvcc that takes an architecture name."""
    number = int("".join(c for c in arch if c.isdigit()) or 0)
    if arch.endswith("f") or number in (103, 121):
        return (12, 9)
    return (12, 8) if number >= 100 else (12, 0)


def check_cuobjdump(
    compiler: Compiler, *, needed: bool, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise LibraryError if this build of the library loads kernels through cuobjdump and it lacks.

    It calls ``<toolkit>/bin/cuobjdump`` and looks nowhere else.
    """
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    path = (Path(home, "bin") if home else compiler.path.parent) / "cuobjdump"
    if needed and not path.is_file():
        raise exc.LibraryError(
            f"this DeepGEMM loads each kernel through {path}, which is not there; install the "
            "toolkit's cuobjdump (package cuda-cuobjdump) beside nvcc"
        )


def needs_cuobjdump(heuristics: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether loading a kernel runs cuobjdump: *old* and *mid* builds, and SASS dumps."""
    dumps = any(_is_set(environ, f"DG_JIT_DUMP_{kind}") for kind in ("ASM", "SASS"))
    return dumps or heuristics in ("old", "mid") or _is_set(environ, "DG_JIT_USE_RUNTIME_API")


def uses_nvrtc(generation: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the library compiles in process: then no compiler can be stood in for."""
    return generation == "A" and _is_set(environ, "DG_JIT_USE_NVRTC")


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0") not in ("", "0")


def _ask(path: Path) -> Compiler:
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        changed = 0
    return _version(path, changed)


@functools.lru_cache(maxsize=8)
def _version(path: Path, changed: int) -> Compiler:
    del changed  # another compiler at the same path is asked again
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise exc.LibraryError(
            f"{path} --version does not run ({error}); repair it, or set CUDA_HOME to another"
        ) from None
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if done.returncode or found is None:
        words = (done.stderr or done.stdout).strip()[-200:]
        raise exc.LibraryError(
            f"{path} --version gave exit code {done.returncode} and {words!r}; "
            "repair it, or set CUDA_HOME to another toolkit"
        )
    return Compiler(path, done.stdout, (int(found[1]), int(found[2])))
