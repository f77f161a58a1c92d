"""Which device this process works on, and the environment in which a child sees the same."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

__all__ = ["child_environment", "identity"]

_QUIET = (
    "PRINT_CONFIGS",
    "JIT_PRINT_COMPILER_COMMAND",
    "JIT_PRINT_LOAD_TIME",
    "JIT_DUMP_ASM",
    "JIT_DUMP_PTX",
    "JIT_DUMP_SASS",
)
"""Variables that print or dump and enter no key: not repeated, each costs time at every launch."""


def identity(device: str) -> str:
    """Return what ``CUDA_VISIBLE_DEVICES`` must be for a child to see only our current device.

    "GPU-<uuid>": indices mean other devices as soon as the variable is set or the order differs.
    Empty on a CPU.
    """
    if device != "cuda":
        return ""
    import torch

    if not torch.cuda.is_available():
        return ""
    index = torch.cuda.current_device()
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if index < len(visible) and visible[index].startswith("MIG-"):
        return visible[index]  # a slice of a device has a name of its own
    properties: Any = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    if not uuid:
        return visible[index] if index < len(visible) and visible[index] else str(index)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def child_environment(device: str) -> dict[str, str]:
    """Return this process's environment for a child that sees our modules and our current device alone.

    ``DG_JIT_DEBUG`` is repeated where the user set it: it changes the name of every entry.
    """
    quiet = {f"{prefix}_{name}" for prefix in ("DG", "DJ") for name in _QUIET}
    environ = {name: value for name, value in os.environ.items() if name not in quiet}
    environ |= {
        "DG_USE_PYTORCH_CUBLASLT_HANDLE": "1",  # or the library takes 32 MiB of its own
        "DG_USE_TEMP_CUBLASLT_WORKSPACE": "1",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path),
        "TMPDIR": environ.get("TMPDIR", tempfile.gettempdir()),
    }
    seen = identity(device)
    if seen:
        environ["CUDA_VISIBLE_DEVICES"] = seen
    return environ
