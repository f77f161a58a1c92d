"""Make planned kernels resident: one launch of each, at its witness, through the library itself.

The library keeps a loaded kernel for good, so after this no call within the plan loads anything.
Never under stream capture, where a load kills the engine (DeepGEMM#443).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from fxwarm.families.deep_gemm import inputs
from fxwarm.families.deep_gemm.entries import invoke
from fxwarm.records import Loaded, Planned
from passes.records import KernelCall

__all__ = ["load"]

log = logging.getLogger(__name__)

Bind = Callable[[KernelCall], "dict[str, Any] | None"]


def load(
    planned: Sequence[Planned],
    library: ModuleType,
    bind: Bind,
    *,
    memory: int,
    alignment: int = inputs.ALIGNMENT,
    device: Any = None,
) -> Iterator[Loaded]:
    """Launch every witness once, the largest first; yield each with its seconds or its error.

    What follows fits into the memory that the largest leaves cached, so the peak is that of one launch.
    A kernel whose tensors would take more than ``memory`` bytes is not launched, and says how many
    it would take. Out of memory ends one kernel, not the others. Weights that ``bind`` knows are
    used instead of synthetic ones and cost nothing.
    """
    import torch

    where = torch.device(device) if device is not None else _current(torch)
    legal = [(p, inputs.legal(p.witness, alignment)) for p in planned if p.witness is not None]
    for p in planned:
        if p.witness is None:
            yield Loaded(p.key, error="no call of ours reaches it, so there is nothing to launch")
    for p, call in sorted(legal, key=lambda item: -inputs.bytes_of(item[1])):
        begin = time.perf_counter()
        error = ""
        try:
            live = bind(p.witness) if p.witness is not None else None
            need = inputs.bytes_of(call) - _held(call, live)
            if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
                error = "a CUDA graph is being captured; call fxwarm.warm_all() before the capture"
            elif need > memory:
                error = _too_large(p.witness or call, need, memory)
            else:
                _launch(library, call, inputs.arguments(call, where, live), torch, where)
        except Exception as failure:  # out of memory, and what the library asserts
            error = f"{call}: {type(failure).__name__}: {str(failure).strip()[-500:]}"
            log.debug("fxwarm: %s was not loaded", p.key, exc_info=True)
        yield Loaded(p.key, time.perf_counter() - begin, error)


def _launch(
    library: ModuleType, call: KernelCall, values: dict[str, Any], torch: Any, where: Any
) -> None:
    invoke(library, call.op, values)
    if where.type == "cuda":
        torch.cuda.synchronize(where)  # or its error would be the next kernel's


def _held(call: KernelCall, live: dict[str, Any] | None) -> int:
    names = [name for name in ("b", "b_sf") if live and name in live]
    return sum(inputs.span(call[n]) * live[n].element_size() for n in names if live and n in call)


def _too_large(full: KernelCall, need: int, memory: int) -> str:
    whole = inputs.bytes_of(full)
    return (
        f"built, not launched: {full.op} needs {need} bytes of scratch ({whole} at full size), more "
        f"than the {memory} that a warmup may use; raise fxwarm.memory, or let fxwarm see the weights"
    )


def _current(torch: Any) -> Any:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
