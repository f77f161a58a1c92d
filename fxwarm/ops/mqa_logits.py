"""DeepGEMM's logits of multi-query attention, the indexer of sparse attention, and their schedule, as torch ops.

logits[i, j] = sum over heads of relu(q[i, h] . k[j]) * weights[i, h]. Unlike a GEMM they return what they allocate: a
window into rows that are longer, whose stride is the library's (54e2261). ``logits_dtype`` None is float32.

    meta = torch.ops.fxwarm.get_paged_mqa_logits_metadata(context_lens, 64, 132)
    logits = torch.ops.fxwarm.fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, table, meta, 8192)
"""

# ruff: noqa: PLR0917 (the argument order is the schema's)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxwarm.exc import ShapeMismatchError
from fxwarm.families.deep_gemm.entries import LOGITS_DTYPES, OF_DTYPE
from fxwarm.ops._checks import Size, check_dtype, check_rank, check_shape, describe
from fxwarm.ops._define import define_op
from fxwarm.ops._library import Function
from fxwarm.ops.scales import FP8

_KEYS = 256
"""Keys of a block. A row of logits is a multiple of it."""
_ROW = 1024
"""Bytes that a row of logits is a multiple of."""

_mqa = Function("deep_gemm", "fp8_mqa_logits")
_paged = Function("deep_gemm", "fp8_paged_mqa_logits")
# FP4 queries with scales or FP8 ones without: the only ones that are told a dtype (DeepGEMM 2026)
_mqa_of_dtype = Function("deep_gemm", OF_DTYPE["fp8_mqa_logits"])
_paged_of_dtype = Function("deep_gemm", OF_DTYPE["fp8_paged_mqa_logits"])
_metadata = Function("deep_gemm", "get_paged_mqa_logits_metadata")


def _window(
    like: Tensor, rows: Size, columns: Size, stride: Size, dtype: torch.dtype | None
) -> Tensor:
    return like.new_empty_strided((rows, columns), (stride, 1), dtype=dtype or torch.float32)


def _up(size: Size, dtype: torch.dtype | None) -> Size:
    """Return the row length of ``size`` logits: whole blocks of keys and whole kilobytes, in elements."""
    unit = max(_KEYS, _ROW // (dtype or torch.float32).itemsize)
    return (size + unit - 1) // unit * unit


def _check_logits(op: str, dtype: torch.dtype | None) -> None:
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in LOGITS_DTYPES:
        known = " or ".join(LOGITS_DTYPES)
        raise ShapeMismatchError(f"{op}: logits_dtype is {name}; give {known}")


def _as_promised(out: Tensor, stride: int) -> Tensor:
    """Return ``out`` with rows of ``stride``, as the fake has it: another version rounds them to another length."""
    if out.stride() == (stride, 1):
        return out
    rows, columns = out.shape
    return _window(out, rows, columns, stride, out.dtype).copy_(out)


def _logits_of(
    plain: Function, of_dtype: Function, q: Tensor, rest: tuple[Any, ...], options: dict[str, Any]
) -> Tensor:
    """Call ``plain``, or where ``options`` have another dtype than float32 ``of_dtype``, with queries without scales."""
    out: Tensor
    if options.get("logits_dtype") in (None, torch.float32):
        known = {name: value for name, value in options.items() if name != "logits_dtype"}
        out = plain.resolve()(q, *rest, **known)
    else:
        function = of_dtype.resolve()
        of_dtype.require(options)
        out = function((q, None), *rest, **options)
    return out


def _mqa_fake(
    *,
    q: Tensor,
    kv: Tensor,
    kv_sf: Tensor,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | None = None,
    max_seqlen_k: Size = 0,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    op = "fp8_mqa_logits"
    _check_logits(op, logits_dtype)
    check_rank(op, "q", q, "[T, heads, dim]")
    check_rank(op, "kv", kv, "[S, dim]")
    (rows, heads, dim), keys = q.shape, kv.shape[0]
    because = f"q = {describe(q)}"
    check_dtype(op, "q", q, (FP8,))
    check_dtype(op, "kv", kv, (FP8,))
    check_shape(op, "kv", kv, [keys, dim], because)
    check_dtype(op, "kv_sf", kv_sf, (torch.float32,))
    check_shape(op, "kv_sf", kv_sf, [keys], f"kv = {describe(kv)}", rows=(0,))
    check_dtype(op, "weights", weights, (torch.float32,))
    check_shape(op, "weights", weights, [rows, heads], because, rows=(0,))
    for name, edge in (("start", cu_seq_len_k_start), ("end", cu_seq_len_k_end)):
        check_dtype(op, f"cu_seq_len_k_{name}", edge, (torch.int32,))
        check_shape(op, f"cu_seq_len_k_{name}", edge, [rows], because, rows=(0,))
    if isinstance(max_seqlen_k, int) and max_seqlen_k == 0:
        return _window(q, rows, keys, _up(keys + _KEYS, logits_dtype), logits_dtype)
    return _window(q, rows, max_seqlen_k, _up(max_seqlen_k, logits_dtype), logits_dtype)


def _mqa_cpu(
    *,
    q: Tensor,
    kv: Tensor,
    kv_sf: Tensor,
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | None,
    max_seqlen_k: int,
    logits_dtype: torch.dtype | None,
) -> Tensor:
    """Keys outside of a row's window are minus infinity, whether asked to be or not."""
    k = kv.float() * kv_sf.unsqueeze(1)
    start, end = cu_seq_len_k_start.unsqueeze(1), cu_seq_len_k_end.unsqueeze(1)
    out = _scores(q.float(), k, weights)
    at = torch.arange(kv.shape[0])
    out = out.masked_fill((at < start) | (at >= end), float("-inf"))
    if max_seqlen_k:  # each row begins at its own window
        at = start + torch.arange(max_seqlen_k)
        out = out.gather(1, at.clamp_max(kv.shape[0] - 1)).masked_fill(at >= end, float("-inf"))
    out = out.to(logits_dtype or torch.float32)
    return _as_promised(out, _up(max_seqlen_k or kv.shape[0] + _KEYS, logits_dtype))


def _mqa_cuda(
    q: Tensor,
    kv: Tensor,
    kv_sf: Tensor,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    clean_logits: bool | None = None,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    options: dict[str, Any] = {} if clean_logits is None else {"clean_logits": clean_logits}
    if max_seqlen_k:
        options["max_seqlen_k"] = max_seqlen_k
    options["logits_dtype"] = logits_dtype
    out = _logits_of(_mqa, _mqa_of_dtype, q, ((kv, kv_sf), weights, start, end), options)
    return _as_promised(out, _up(max_seqlen_k or kv.shape[0] + _KEYS, logits_dtype))


fp8_mqa_logits = define_op(
    "fp8_mqa_logits(Tensor q, Tensor kv, Tensor kv_sf, Tensor weights, Tensor cu_seq_len_k_start, "
    "Tensor cu_seq_len_k_end, bool? clean_logits=None, SymInt max_seqlen_k=0, ScalarType? logits_dtype=None) -> Tensor",
    fake=_mqa_fake,
    cpu=_mqa_cpu,
    cuda=_mqa_cuda,
    by_name=True,
)
"""q [T, heads, dim] and kv [S, dim] in FP8 -> [T, S], or [T, max_seqlen_k]. ``clean_logits`` None is the default."""


def _paged_fake(
    *,
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: Size,
    clean_logits: bool | None = None,
    indices: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    op = "fp8_paged_mqa_logits"
    _check_logits(op, logits_dtype)
    check_rank(op, "q", q, "[B, next, heads, dim]")
    check_rank(op, "kv_cache", kv_cache, "[blocks, block, 1, dim + 4]")
    batch, tokens, heads, dim = q.shape
    because = f"q = {describe(q)}"
    check_dtype(op, "q", q, (FP8,))
    check_dtype(op, "kv_cache", kv_cache, (torch.uint8,))
    check_shape(op, "kv_cache", kv_cache, [*kv_cache.shape[:2], 1, dim + 4], because)
    check_dtype(op, "weights", weights, (torch.float32,))
    check_shape(op, "weights", weights, [batch * tokens, heads], because, rows=(0,))
    check_dtype(op, "block_table", block_table, (torch.int32,))
    check_shape(op, "block_table", block_table, [batch, *block_table.shape[1:]], because, rows=(0,))
    check_dtype(op, "context_lens", context_lens, (torch.int32,))
    check_dtype(op, "schedule_meta", schedule_meta, (torch.int32,))
    stride = _up(max_context_len, logits_dtype)
    return _window(q, batch * tokens, max_context_len, stride, logits_dtype)


def _paged_cpu(
    *,
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    logits_dtype: torch.dtype | None,
    **_: Any,
) -> Tensor:
    batch, tokens, _heads, dim = q.shape
    block = kv_cache.shape[1]
    flat = kv_cache.flatten(1)  # a block's values first, then its scales
    values = flat[:, : block * dim].contiguous().view(FP8).view(-1, block, dim)
    scales = flat[:, block * dim :].contiguous().view(torch.float32).unsqueeze(-1)
    keys = values.float() * scales
    stride = _up(max_context_len, logits_dtype)
    out = _window(q, batch * tokens, max_context_len, stride, logits_dtype).fill_(float("-inf"))
    lens = context_lens if context_lens.dim() == 2 else _rising(context_lens, tokens)
    for row in range(batch * tokens):
        b, t = divmod(row, tokens)
        count = min(int(lens[b, t]), max_context_len)
        used = block_table[b, : -(-count // block)].long()
        part = keys[used].flatten(0, 1)[:count]
        out[row, :count] = _scores(q[b, t : t + 1].float(), part, weights[row : row + 1])[0]
    return out


def _rising(context_lens: Tensor, tokens: int) -> Tensor:
    """The last of a sequence's tokens sees all of it, each before it one less."""
    return context_lens.unsqueeze(1) - torch.arange(tokens - 1, -1, -1)


def _paged_cuda(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool | None = None,
    indices: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    options: dict[str, Any] = {} if clean_logits is None else {"clean_logits": clean_logits}
    if indices is not None:
        options["indices"] = indices
    options["logits_dtype"] = logits_dtype
    rest = kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len
    out = _logits_of(_paged, _paged_of_dtype, q, rest, options)
    return _as_promised(out, _up(max_context_len, logits_dtype))


fp8_paged_mqa_logits = define_op(
    "fp8_paged_mqa_logits(Tensor q, Tensor kv_cache, Tensor weights, Tensor context_lens, Tensor block_table, "
    "Tensor schedule_meta, SymInt max_context_len, bool? clean_logits=None, Tensor? indices=None, "
    "ScalarType? logits_dtype=None) -> Tensor",
    fake=_paged_fake,
    cpu=_paged_cpu,
    cuda=_paged_cuda,
    by_name=True,
)
"""q [B, next, heads, dim] and a paged cache [blocks, block, 1, dim + 4] -> [B * next, max_context_len]."""


def _metadata_fake(
    *, context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    check_dtype("get_paged_mqa_logits_metadata", "context_lens", context_lens, (torch.int32,))
    return context_lens.new_empty((num_sms + 1, 2))


def _metadata_cpu(**_: Any) -> Tensor:
    raise NotImplementedError(
        "get_paged_mqa_logits_metadata has no CPU reference: its schedule is the library's own; trace it on meta"
    )


def _metadata_cuda(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Any:
    return _metadata(context_lens, block_kv, num_sms, indices=indices)


get_paged_mqa_logits_metadata = define_op(
    "get_paged_mqa_logits_metadata(Tensor context_lens, int block_kv, int num_sms, Tensor? indices=None) -> Tensor",
    fake=_metadata_fake,
    cpu=_metadata_cpu,
    cuda=_metadata_cuda,
    by_name=True,
)
"""The schedule of a paged call, int32 [num_sms + 1, 2]. Its kernel is one for each 32 of the batch."""


def _scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return [rows, keys], a head at a time."""
    out = torch.zeros(q.shape[0], k.shape[0])
    for head in range(q.shape[1]):
        out += torch.relu(q[:, head] @ k.T) * weights[:, head : head + 1]
    return out
