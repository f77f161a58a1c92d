"""DeepGEMM's MQA logits: plain and paged agree, and what is returned has the strides that a trace was promised."""

from __future__ import annotations

import pytest
import torch

import fxwarm.ops  # noqa: F401  (defines the ops)
from fxwarm.exc import ShapeMismatchError
from tests.fxwarm.ops.tensors import close, randn

OPS = torch.ops.fxwarm
ROWS, KEYS, HEADS, DIM, BLOCK = 5, 100, 32, 64, 64


def inputs():
    q = randn(ROWS, HEADS, DIM).to(torch.float8_e4m3fn)
    k, sf = randn(KEYS, DIM).to(torch.float8_e4m3fn), randn(KEYS).abs()
    start = torch.tensor([0, 0, 3, 10, 0], dtype=torch.int32)
    end = torch.tensor([1, 100, 40, 10, 64], dtype=torch.int32)
    return q, k, sf, randn(ROWS, HEADS), start, end


def expected(q, k, sf, weights, start, end):
    scores = torch.einsum("rhd,kd->rhk", q.float(), k.float() * sf[:, None]).relu()
    out = torch.einsum("rhk,rh->rk", scores, weights)
    at = torch.arange(KEYS)
    return out.masked_fill((at < start[:, None]) | (at >= end[:, None]), float("-inf"))


def finite(x):
    return x.masked_fill(x == float("-inf"), 0)


def test_each_row_sees_its_own_window_of_keys():
    given = inputs()
    out, wanted = OPS.fp8_mqa_logits(*given, True), expected(*given)
    assert torch.equal(out == float("-inf"), wanted == float("-inf"))
    assert close(finite(out), finite(wanted), 1e-4)
    short = OPS.fp8_mqa_logits(*given, False, 64)
    for row in range(ROWS):
        count = min(64, int(given[5][row] - given[4][row]))
        part = wanted[row, int(given[4][row]) :][:count]
        assert close(short[row, :count], part, 1e-4)


def paged(given):
    """Return the arguments of a paged call on the keys of ``given``."""
    q, k, sf, weights, _, _ = given
    lens = torch.tensor([[1], [100], [64], [37], [99]], dtype=torch.int32)
    cache = torch.zeros(3, BLOCK * (DIM + 4), dtype=torch.uint8)
    table = torch.tensor([2, 0], dtype=torch.int32)
    for page in range(2):
        part, scale = k[page * BLOCK : (page + 1) * BLOCK], sf[page * BLOCK : (page + 1) * BLOCK]
        row = cache[int(table[page])]
        row[: part.numel()] = part.reshape(-1).view(torch.uint8)
        row[BLOCK * DIM :][: 4 * len(scale)] = scale.view(torch.uint8)
    meta = torch.zeros(133, 2, dtype=torch.int32)
    tables = table.expand(ROWS, 2).contiguous()
    return q.unsqueeze(1), cache.view(3, BLOCK, 1, DIM + 4), weights, lens, tables, meta, KEYS


def test_paged_keys_give_what_plain_ones_give():
    given = inputs()
    q, cache, weights, lens, tables, meta, _ = paged(given)
    out = OPS.fp8_paged_mqa_logits(q, cache, weights, lens, tables, meta, KEYS)
    wanted = expected(*given[:4], torch.zeros(ROWS, dtype=torch.int32), lens[:, 0])
    assert torch.equal(out == float("-inf"), wanted == float("-inf"))
    assert close(finite(out), finite(wanted), 1e-4)
    flat = OPS.fp8_paged_mqa_logits(q, cache, weights, lens[:, 0], tables, meta, KEYS)
    assert torch.equal(flat, out)


def test_a_trace_knows_shape_and_row_length():
    given = inputs()
    for more in ((None, 0), (False, 64)):
        torch.library.opcheck(
            OPS.fp8_mqa_logits.default,
            (*given, *more),
            test_utils=("test_faketensor",),
        )
    assert OPS.fp8_mqa_logits(*given).stride() == (512, 1)
    torch.library.opcheck(
        OPS.fp8_paged_mqa_logits.default, paged(given), test_utils=("test_faketensor",)
    )
    lens = torch.zeros(7, 1, dtype=torch.int32, device="meta")
    assert OPS.get_paged_mqa_logits_metadata(lens, 64, 132).shape == (133, 2)


def test_logits_of_bfloat16_are_rounded_and_their_rows_are_as_many_bytes():
    given, dtype = inputs(), torch.bfloat16
    pages = paged(given)
    for op, args, steps in (
        (OPS.fp8_mqa_logits, (*given, True), (512, 512)),  # 100 + 256
        (OPS.fp8_mqa_logits, (*given, False, 64), (256, 512)),
        (OPS.fp8_paged_mqa_logits, pages, (256, 512)),
    ):
        plain, short = op(*args), op(*args, logits_dtype=dtype)
        assert torch.equal(short, plain.to(dtype))
        assert torch.equal(op(*args, logits_dtype=torch.float32), plain)
        assert (plain.stride(0), short.stride(0)) == steps
        torch.library.opcheck(
            op.default, args, {"logits_dtype": dtype}, test_utils=("test_faketensor",)
        )
        with pytest.raises(ShapeMismatchError, match="logits_dtype is float16; give float32 or bf"):
            op(*args, logits_dtype=torch.float16)
