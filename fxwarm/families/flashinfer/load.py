"""Makes what was planned resident: each module opened, each distinct call made once, without tuning."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from fxwarm.families.flashinfer import cache, limit, tuner, tuning, upstream
from fxwarm.families.flashinfer.buckets import bucket_of
from fxwarm.families.flashinfer.keys import MODULE, rows_of
from fxwarm.families.flashinfer.library import nvcc
from fxwarm.families.flashinfer.modules import shorten
from fxwarm.families.flashinfer.tensors import run
from fxwarm.families.flashinfer.tuner_key import is_tuned
from fxwarm.family import Bind
from fxwarm.records import Loaded, Planned
from passes.records import KernelCall

__all__ = ["is_block_scale", "load_kernels"]

log = logging.getLogger(__name__)

EACH_ROW_TO = 64
"""Rows of a GEMM up to which every number of them is run, not one a bucket. A guess: what a decode step serves."""


def load_kernels(planned: Sequence[Planned], arch: str, bind: Bind) -> Iterator[Loaded]:
    """Load each planned kernel on the current device; yield it with its seconds, or with what went wrong.

    The entries of two GEMMs of one bucket share one plain call. A block-scale kernel is compiled by that call.
    """
    made: dict[KernelCall, str] = {}
    for p in sorted(planned, key=lambda p: p.key.tag != MODULE):
        begin = time.perf_counter()
        try:
            error = _load(p, arch, bind, made)
        except Exception as failure:
            log.debug("fxwarm: loading %s", p.key, exc_info=True)
            error = shorten(failure)  # ninja runs at each load, and may find something to do
        yield Loaded(p.key, time.perf_counter() - begin, error)


def is_block_scale(planned: Planned) -> bool:
    """Whether a planned key names a kernel that the library's C++ compiles at call time."""
    return planned.key.kernel.startswith("fp8_gemm_kernel")


def _load(p: Planned, arch: str, bind: Bind, made: dict[KernelCall, str]) -> str:
    if p.key.tag == MODULE:
        if cache.find_module(p.key.kernel, arch) is None:
            return f"module {p.key.kernel} is not built; it would be built in the first call that needs it"
        upstream.load()
        upstream.open_module(p.key.kernel)
        if p.witness is None or p.witness.op != "mono_moe":
            return ""  # its calls are planned under keys of their own
    if p.witness is None:
        return "" if is_tuned(p.key) else f"{p.key} has no witness to launch"
    if is_block_scale(p) and not cache.block_kernel(p.key.tag).is_file() and not nvcc():
        return "the library compiles this kernel at call time and there is no nvcc; set CUDA_HOME to a CUDA toolkit"
    if p.witness not in made:
        with tuner.undisturbed():
            run(p.witness, tuning.device(), bind, limit.current_limit(p.witness), _rows(p.witness))
        made[p.witness] = ""
    if is_block_scale(p) and not cache.block_kernel(p.key.tag).is_file():
        return f"the library compiled another kernel than {p.key.tag} for {p.witness}: the model of it has drifted"
    return ""


def _rows(witness: KernelCall) -> range:
    """Return the other row counts of a witness's bucket at which ``bmm_fp8`` is to be run.

    cuBLASLt lists its algorithms anew for each M, so one tuned number names other kernels at other rows, and a kernel
    is read from the library at its first launch.
    """
    first = int(rows_of(witness))
    last = bucket_of(first) if witness.op == "bmm_fp8" else first
    return range(first + 1, last + 1) if last <= EACH_ROW_TO else range(last, last + 1)
