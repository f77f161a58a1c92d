"""Make kernels resident: where their factory looks first, and launched once.

``tilelang.compile`` and ``par_compile`` fill only the caches behind the factory; the next call would elaborate again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from fxwarm.families.tilelang import jit
from fxwarm.families.tilelang.compiled import Kernel, get_kernel
from fxwarm.families.tilelang.statics import factory_of, statics_of
from fxwarm.records import CompileKey, Loaded, Planned, Target

_launched: set[tuple[CompileKey, str]] = set()
_lock = threading.RLock()


def load(planned: Sequence[Planned], target: Target) -> Iterator[Loaded]:
    """Put each kernel at level one of its factory and launch it with one token on the current device.

    A kernel that is resident already is left alone. Yields as they load; one that fails does not stop the others.
    """
    for one in planned:
        start = time.perf_counter()
        try:
            with _lock:
                _load_one(one.key, target)
            yield Loaded(one.key, time.perf_counter() - start)
        except Exception as error:
            words = f"{type(error).__name__}: {str(error).strip()[-2000:]}"
            yield Loaded(one.key, time.perf_counter() - start, words)


def is_resident(key: CompileKey) -> bool:
    """Whether a call finds ``key`` at once: nothing is elaborated, read or compiled for it."""
    factory, statics = jit.get(factory_of(key)), statics_of(key)
    if jit.is_lazy(factory, statics):
        return jit.level_one(factory, statics) is not None
    return any(launched == key for launched, _ in _launched)


def _load_one(key: CompileKey, target: Target) -> None:
    where = _device(target)
    if (key, where) in _launched:
        return
    kernel = get_kernel(key, target)
    if jit.is_lazy(kernel.factory, kernel.statics):
        jit.put(kernel.factory, kernel.statics, kernel.jit_kernel)
    _launch(kernel, where)
    _launched.add((key, where))


def _launch(kernel: Kernel, where: str) -> None:
    import torch

    if where.startswith("cuda") and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a stream is being captured; warm before the capture")
    skipped = {i % len(kernel.jit_kernel.params) for i in _outputs(kernel.factory.out_idx)}
    wanted = jit.parameters(kernel.jit_kernel)
    tensors = [
        torch.zeros(shape, dtype=dtype, device=where)
        for i, (dtype, shape) in enumerate(wanted)
        if i not in skipped
    ]
    if jit.is_lazy(kernel.factory, kernel.statics):
        kernel.jit_kernel(*tensors)
    else:  # an eager factory has a template of its own in front of level one, which only a call fills
        kernel.factory(*tensors, **kernel.statics)
    if where.startswith("cuda"):
        torch.cuda.synchronize()


def _outputs(out_idx: int | list[int] | None) -> list[int]:
    return [] if out_idx is None else [out_idx] if isinstance(out_idx, int) else list(out_idx)


def _device(target: Target) -> str:
    if target.device != "cuda":
        return "cpu"
    import torch

    return f"cuda:{torch.cuda.current_device()}"
