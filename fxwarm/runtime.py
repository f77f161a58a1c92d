"""How a warmup runs on a device: under no modes, random states given back, memory measured, never in a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """Run under no modes and no grad, on ``device``, and give the random states back as they were."""
    from torch.utils._python_dispatch import _disable_current_modes

    cuda = device.type == "cuda"
    with (
        torch.random.fork_rng(devices=[device] if cuda else [], enabled=True),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.cuda.device(device) if cuda else contextlib.nullcontext(),
    ):
        yield
        if cuda:
            torch.cuda.synchronize(device)


@contextlib.contextmanager
def memory(device: torch.device) -> Iterator[dict[str, int]]:
    """Yield a dict that holds, afterwards, the ``peak`` and ``kept`` bytes of device memory of what ran inside."""
    used = {"peak": 0, "kept": 0}
    if device.type != "cuda":
        yield used
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        yield used
    finally:
        used["peak"] = max(0, torch.cuda.max_memory_allocated(device) - before)
        used["kept"] = max(0, torch.cuda.memory_allocated(device) - before)
        torch.cuda.empty_cache()  # what is kept for reuse would be missing from a profile taken next


def current_device(kind: str = "cuda") -> torch.device:
    """Return the current CUDA device if ``kind`` is "cuda" and there is one, else the CPU."""
    if kind == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_of(args: Iterable[Any]) -> torch.device:
    """Return the first CUDA device among the tensors in ``args``, else the CPU; without tensors the current device."""
    devices = [a.device for a in args if torch.is_tensor(a)]
    return next(
        (d for d in devices if d.type == "cuda"),
        torch.device("cpu") if devices else current_device(),
    )


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
