"""Answers what a model asks about its GPU, while it is traced for a target that this machine may not have.

    torch.cuda.get_device_capability()    (9, 0) for target="h200", on a laptop

Host code chooses its kernels by such questions while it is traced, and asks torch itself, so a trace without a device
shows other kernels than those that will run. Torch's own use of these functions is left alone.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from fxwarm.records import Target

__all__ = ["answer_for", "capability_of"]


def capability_of(target: Target) -> tuple[int, int]:
    """Return the compute capability of ``target``: (9, 0) for sm_90a. Raises ValueError where it has none."""
    digits = re.match(r"sm_(\d+)", target.arch)
    if digits is None:
        raise ValueError(
            f"the target {target.name} has no CUDA architecture; name a GPU such as h200"
        )
    return divmod(int(digits[1]), 10)


@contextlib.contextmanager
def answer_for(target: Target) -> Iterator[None]:
    """Let host code see the GPU of ``target`` until the end of the block; nothing runs on it."""
    import torch

    with contextlib.ExitStack() as stack:
        for name, answer in _answers(target).items():
            if hasattr(torch.cuda, name):
                stack.enter_context(replace(torch.cuda, name, answer))
        yield


@contextlib.contextmanager
def replace(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, and put the old one back at the end of the block."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _answers(target: Target) -> dict[str, Callable[..., Any]]:
    import torch

    capability = capability_of(target)
    truth = torch.cuda.is_available

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return capability

    def get_device_name(device: Any = None) -> str:
        return target.name

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def get_device_properties(device: Any = None) -> Any:
        return types.SimpleNamespace(
            name=target.name,
            major=capability[0],
            minor=capability[1],
            multi_processor_count=target.num_sms,
            shared_memory_per_block_optin=target.smem,
        )

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def is_available() -> bool:
        # Dynamo asks on behalf of the model in this one place, everywhere else for itself: then a "yes" would make
        # it read the state of a GPU that is not there
        caller = sys._getframe(1)
        module = caller.f_globals.get("__name__", "")
        if (
            module.partition(".")[0] == "torch"
            and caller.f_code.co_name != "invoke_and_store_as_constant"
        ):
            return truth()
        return True

    return {
        "get_device_capability": get_device_capability,
        "get_device_name": get_device_name,
        "get_device_properties": get_device_properties,
        "is_available": is_available,
    }
