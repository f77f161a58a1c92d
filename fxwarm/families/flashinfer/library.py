"""Which FlashInfer is installed: its identity and what else makes its binaries, without importing it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata, util

from fxwarm.families.flashinfer.versions import NEWEST, find_version
from fxwarm.records import Library, digest

__all__ = ["DISTRIBUTION", "ENVIRONMENT", "find_library", "installed_version", "nvcc"]

DISTRIBUTION = "flashinfer-python"
ENVIRONMENT = (
    "CC",
    "CUDA_HOME",
    "CUDA_PATH",
    "CXX",
    "FLASHINFER_AUTOTUNE_TIMER",
    "FLASHINFER_CUDA_ARCH_LIST",
    "FLASHINFER_EXTRA_CFLAGS",
    "FLASHINFER_EXTRA_CUDAFLAGS",
    "FLASHINFER_EXTRA_LDFLAGS",
    "FLASHINFER_JIT_DEBUG",
    "FLASHINFER_JIT_LINEINFO",
    "FLASHINFER_NVCC",
    "FLASHINFER_TACTICS_BLOCKLIST",
    "TRTLLM_DG_ENABLED",
    "TRTLLM_DG_NVCC_COMPILER",
)
"""Variables that enter its modules, its kernels or its choice among them."""


def find_library(wanted: Mapping[str, str]) -> Library:
    """Return the build to plan for: the one in ``wanted``, else the installed one, else the newest known.

    Raises LibraryError for a named version that is unknown and not installed.
    """
    here = installed_version()
    number = wanted.get(DISTRIBUTION) or here or NEWEST
    installed = number == here
    if DISTRIBUTION in wanted:
        find_version(number, installed=installed)
    if not installed:
        return Library(DISTRIBUTION, number)
    return Library(
        DISTRIBUTION,
        number,
        installed=True,
        module="flashinfer",
        fingerprint=_fingerprint(number),
        environment=tuple((n, os.environ[n]) for n in ENVIRONMENT if os.environ.get(n)),
    )


def installed_version() -> str:
    """Return the full version of the installed distribution, "" where there is none that can be imported."""
    try:
        return metadata.version(DISTRIBUTION) if util.find_spec("flashinfer") is not None else ""
    except (metadata.PackageNotFoundError, ValueError):
        return ""


def nvcc() -> str:
    """Return the compiler that the library's builds start, "" where there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    named = os.environ.get("FLASHINFER_NVCC") or (os.path.join(home, "bin", "nvcc") if home else "")
    return shutil.which(named or "nvcc") or shutil.which("/usr/local/cuda/bin/nvcc") or ""


@functools.lru_cache(maxsize=4)
def _fingerprint(number: str) -> str:
    """Return a digest of the package's files as installed, of tvm-ffi, and of what the compiler says it is."""
    distribution = metadata.distribution(DISTRIBUTION)
    try:
        ffi = metadata.version("apache-tvm-ffi")
    except metadata.PackageNotFoundError:
        ffi = ""
    return digest(number, distribution.read_text("RECORD") or "", ffi, _compiler_text(nvcc()))


@functools.lru_cache(maxsize=4)
def _compiler_text(path: str) -> str:
    if not path:
        return ""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
