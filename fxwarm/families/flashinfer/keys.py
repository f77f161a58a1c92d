"""The modelled plan: modules, tuned entries and block-scale kernels that calls can need, each with a witness.

Three kinds of first-use work, three kinds of key:

    fused_moe_90<sm_90a>                                   a module: known by its name alone, serves every shape
    gemm1<input[8, 2048], ..., top_k=8, ...>               an entry of the tuner's table, one a bucket
    fp8_gemm_kernel<1536, 2048, 64, 128, 128, ...>         a kernel that the library's C++ compiles at call time

Pure: no library imported, no device touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fxwarm import exc
from fxwarm.families.flashinfer.block_scale import BlockGemm, first_of_each_kernel
from fxwarm.families.flashinfer.buckets import bucket_of
from fxwarm.families.flashinfer.entries import ENTRIES, module_of
from fxwarm.families.flashinfer.match import FAMILY
from fxwarm.families.flashinfer.supported import why_not
from fxwarm.families.flashinfer.tuner_key import entries_at
from fxwarm.families.flashinfer.versions import Version, find_version
from fxwarm.records import CompileKey, Library, Planned, Target
from passes import bound
from passes.records import Dim, Gap, KernelCall

__all__ = ["DELAY", "MODULE", "keys", "rows_of", "with_rows"]

MODULE = "cached_ops"
"""Tag of a module's key: the library's own name of the folder that they lie in."""
DELAY = "trtllm_utils"
"""The module of the delay kernel, which the tuner builds at the first tactic that it measures."""

_Found = tuple[CompileKey, int, KernelCall]
"""A key, the rows of its witness, and the witness."""


def keys(calls: Sequence[KernelCall], target: Target, library: Library) -> Iterator[Planned | Gap]:
    """Yield each distinct kernel that ``calls`` can need on ``target``, and what cannot be covered.

    Modules come first, then the rest by the rows of its witness: the call with the fewest rows that needs it.
    """
    if target.device != "cuda":
        return
    try:
        version = find_version(library.version, installed=library.installed)
    except exc.LibraryError as error:
        yield from (Gap(call.op, str(error), family=FAMILY) for call in calls)
        return
    found: dict[CompileKey, tuple[int, KernelCall]] = {}
    for call in calls:
        try:
            reason, most = why_not(call, target.arch)
            if reason:
                yield Gap(call.op, reason, family=FAMILY)
            if most < 1:
                continue
            for key, rows, witness in _keys(call, target, version, most):
                if key not in found or rows < found[key][0]:
                    found[key] = (rows, witness)
        except ValueError as error:
            yield Gap(call.op, f"{call}: {error}", family=FAMILY)
    yield from _other_limits(calls, [witness for _, witness in found.values()])
    for key, (_, witness) in sorted(
        found.items(), key=lambda item: (item[0].tag != MODULE, item[1][0])
    ):
        yield Planned(key, witness)


def _other_limits(calls: Sequence[KernelCall], witnesses: Sequence[KernelCall]) -> Iterator[Gap]:
    """Yield a gap for each ``tune_max_num_tokens`` of a call that shares all its keys with calls of another one."""
    limits = [c.attr("tune_max_num_tokens") for c in calls if c.op == "cutlass_fused_moe"]
    kept = {w.attr("tune_max_num_tokens") for w in witnesses}
    for limit in dict.fromkeys(limits):
        if limit not in kept and kept:
            known = ", ".join(sorted(str(k) for k in kept if k is not None))
            reason = (
                f"equal layers pass tune_max_num_tokens={limit} and {known}, and FlashInfer keeps one "
                "for the whole process; give all layers the largest"
            )
            yield Gap("cutlass_fused_moe", reason, family=FAMILY)


def _keys(call: KernelCall, target: Target, version: Version, most: int) -> Iterator[_Found]:
    module = module_of(call.op, target.arch)
    image = bound.image(call, rows_of(call))
    tokens = np.unique(image.rows[:, 0])
    tokens = tokens[(tokens > 0) & (tokens <= most)]
    if not len(tokens):
        return

    def at(rows: int) -> KernelCall:
        return _witness(call, image, rows)

    first = int(tokens[0])
    yield CompileKey(FAMILY, module, (target.arch,), MODULE), first, at(first)
    buckets: dict[int, int] = {}
    for count in tokens.tolist():
        buckets.setdefault(bucket_of(count), count)
    for bucket, count in buckets.items():
        witness = None
        for entry in entries_at(call, bucket, target.arch, version):
            witness = at(count) if witness is None else witness
            yield entry.key, count, witness
            if bucket == bucket_of(first):
                yield CompileKey(FAMILY, DELAY, (target.arch,), MODULE), first, witness
    for gemm in block_gemms(call, target.num_sms):
        for count, kernel in first_of_each_kernel(gemm, tokens.tolist()):
            name = "fp8_gemm_kernel_swapAB" if kernel.swap_ab else "fp8_gemm_kernel"
            yield CompileKey(FAMILY, name, kernel.template, kernel.name), count, at(count)


def block_gemms(call: KernelCall, num_sms: int) -> tuple[BlockGemm, ...]:
    """Return the GEMMs of ``call`` that the library's C++ compiles by nvcc: two of an MoE layer, one of a dense one."""
    if call.op == "cutlass_fused_moe" and call.attr("use_deepseek_fp8_block_scale") is True:
        experts, wide, hidden = (int(d) for d in call["fc1_expert_weights"].dims)
        _, hidden, inter = (int(d) for d in call["fc2_expert_weights"].dims)
        shapes = ((wide, hidden), (hidden, inter))
        return tuple(BlockGemm(n, k, experts, True, num_sms) for n, k in shapes)
    if call.op == "fp8_blockscale_gemm_sm90":
        n, k = (int(d) for d in call["weight"].dims)
        return (BlockGemm(n, k, 1, False, num_sms),)
    return ()


def rows_of(call: KernelCall) -> Dim:
    """Return the dim of ``call`` that counts its tokens."""
    name, at = ENTRIES[call.op].rows[0]
    return call[name].dims[at]


def with_rows(call: KernelCall, rows: int) -> KernelCall:
    """Return the static ``call`` with ``rows`` tokens; the strides stay, for none of them depends on the rows."""
    import msgspec

    places = dict(ENTRIES[call.op].rows)
    tensors = tuple(
        (
            name,
            spec
            if name not in places
            else msgspec.structs.replace(
                spec,
                dims=tuple(
                    Dim.static(rows) if at == places[name] else d for at, d in enumerate(spec.dims)
                ),
            ),
        )
        for name, spec in call.tensors
    )
    return msgspec.structs.replace(call, tensors=tensors)


def _witness(call: KernelCall, image: bound.Image, rows: int) -> KernelCall:
    """Return the static call with ``rows`` tokens, at the smallest sizes that lead to it.

    Every tensor gets them: where the graph does not say that two are as long, each has a symbol of its own.
    """
    at = int(np.searchsorted(image.rows[:, 0], rows))
    try:
        sizes = image.at(at)
    except (
        ValueError
    ):  # too many points: the sizes behind the tokens are not known, and no kernel asks for them
        sizes = {s.name: s.lower for s in call.symbols}
    return with_rows(bound.at(call, sizes), rows)
