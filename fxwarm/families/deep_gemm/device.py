"""Which device this process works on, as another process can be told."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["identity"]


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
