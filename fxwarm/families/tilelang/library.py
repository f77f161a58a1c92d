"""Which TileLang and TileKernels are installed, and what else makes their binaries. Imports neither."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from fxwarm import exc
from fxwarm.records import Library, digest

DISTRIBUTION = "tilelang"
NEWEST = "0.1.15"
KERNELS = "tile-kernels"

ENVIRONMENT = (
    "TILELANG_LAYOUT_COST_MODEL",  # enters the key
    "TILELANG_KERNEL_CACHE_USE_LIB_STAMP",
    "TILELANG_EXECUTION_BACKEND",
    "TILELANG_DISABLE_CACHE",
    "TL_CUTLASS_PATH",
    "TL_TEMPLATE_PATH",
)
"""Variables that enter kernels, or where they are filed."""


def get_library(wanted: Mapping[str, str]) -> Library:
    """Return the TileLang to plan for: the one in ``wanted``, else the installed one, else the newest known.

    The rules that decide keys are the callers', so any version can be planned for.
    """
    installed = _version(DISTRIBUTION)
    version = wanted.get(DISTRIBUTION) or installed or NEWEST
    here = version == installed
    settings = {"tile-kernels": wanted.get(KERNELS) or _version(KERNELS) or "absent"}
    settings["deep_gemm"] = (
        "present" if importlib.util.find_spec("deep_gemm") or not here else "absent"
    )
    if _version("vllm"):
        settings["vllm"] = _version("vllm")
    return Library(
        distribution=DISTRIBUTION,
        version=version,
        installed=here,
        module="tilelang" if here else "",
        fingerprint=digest(compilers()) if here else "",
        settings=tuple(sorted(settings.items())),
        environment=tuple(sorted((n, os.environ[n]) for n in ENVIRONMENT if os.environ.get(n))),
    )


@functools.cache
def compilers() -> tuple[str, ...]:
    """Return what nvcc and the host compiler say of themselves. TileLang's own key holds neither."""
    return tuple(
        _say(path) for path in (find_nvcc(), shutil.which(os.environ.get("CXX", "g++"))) if path
    )


def find_nvcc() -> str | None:
    """Return the nvcc that TileLang takes: CUDA_HOME's, CUDA_PATH's, the one on PATH, the usual place."""
    homes = [os.environ.get(n) for n in ("CUDA_HOME", "CUDA_PATH")]
    for home in (*homes, None, "/usr/local/cuda"):
        found = shutil.which("nvcc") if home is None else None
        if home is not None and home:
            path = Path(home) / "bin" / "nvcc"
            found = str(path) if path.is_file() else None
        if found:
            return found
    return None


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _say(path: str) -> str:
    try:
        return subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise exc.LibraryError(f"{path} --version does not answer: {error}") from error
