"""What an eager run really calls, and what a user may say about other sizes."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import fxwarm
import fxwarm.ops
from fxwarm import exc
from fxwarm.ops import _gemm, per_token_cast_to_fp8
from fxwarm.ops import _library as libraries
from tests import toy_family

EXPERTS, TOPK, HIDDEN, INTER = 4, 2, 256, 128


def weight(*shape):
    scale = torch.ones(*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    return torch.randn(shape).to(torch.float8_e4m3fn), scale


class Layer(torch.nn.Module):
    """A linear, and experts whose rows are padded as transformers pads them."""

    def __init__(self):
        super().__init__()
        self.w, self.w_sf = weight(HIDDEN, HIDDEN)
        self.experts, self.experts_sf = weight(EXPERTS, INTER, HIDDEN)

    def forward(self, x):
        tokens = x.shape[0]
        d = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16)
        torch.ops.fxwarm.fp8_gemm_nt(*per_token_cast_to_fp8(x), self.w, self.w_sf, d)
        rows = tokens * TOPK + min(tokens * TOPK, EXPERTS) * 127
        index = torch.arange(rows)
        ids = (index // 128 % EXPERTS).to(torch.int32)
        out = torch.empty(rows, INTER, dtype=torch.bfloat16)
        a = per_token_cast_to_fp8(d[index % tokens])
        torch.ops.fxwarm.m_grouped_fp8_gemm_nt_contiguous(
            *a, self.experts, self.experts_sf, out, ids
        )
        return out


def bounds(call):
    return call["a"].dims[0].lower, call["a"].dims[0].upper


@torch.inference_mode()
def test_a_run_is_recorded_as_it_was_and_changes_nothing():
    layer, x = Layer(), torch.randn(13, HIDDEN)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with fxwarm.observe() as seen:
        out = layer(x)
        layer(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(out[:26], layer(x)[:26])
    shapes = seen.shapes()
    assert [c.op for c in shapes.calls] == ["fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous"]
    assert [s.count for s in shapes.sites] == [2, 2]
    assert all(not c.symbols for c in shapes.calls)
    assert int(shapes.calls[0]["a"].dims[0]) == 13
    assert "test_observe.py" in shapes.sites[0].place


@torch.no_grad()
def test_sizes_become_ranges_only_where_declared():
    with fxwarm.observe() as seen:
        Layer()(torch.randn(13, HIDDEN))
    only = seen.shapes(T=(13, 1, 8192))
    assert bounds(only.calls[0]) == (1, 8192)
    assert only.calls[1]["a"].dims[0].is_static
    both = seen.shapes(T=(13, 1, 8192), rows=[f"{TOPK}*T + Min({TOPK}*T, {EXPERTS})*127"])
    assert bounds(both.calls[1]) == (2 + 2 * 127, 8192 * 2 + 4 * 127)
    assert both.calls[0]["b"].dims[0].is_static


@torch.no_grad()
def test_an_observed_run_and_a_trace_agree_on_every_call():
    layer = Layer()
    with fxwarm.observe() as seen:
        layer(torch.randn(13, HIDDEN))
    rows = f"{TOPK}*T + 127*Min({EXPERTS}, {TOPK}*T)"
    shapes = seen.shapes(T=(13, 1, 4096), rows=[rows])
    traced = fxwarm.trace(layer, torch.randn(13, HIDDEN), max_size=4096)
    assert shapes.calls == traced.calls


@pytest.mark.parametrize(
    ("sizes", "rows", "match"),
    [
        ({"T": (16, 1, 8192)}, [], "no multiple of 8"),
        ({"T": (13, 100, 8192)}, [], r"outside 100\.\.8192"),
        ({"T": (13, 1, 8192)}, ["2*U"], "declare it as U="),
        ({"T": (13, 1, 8192)}, ["T*1009"], "no kernel call had a size"),
        ({"T": (13, 1, 8192)}, ["26 - T"], "both 13"),
    ],
)
def test_a_declaration_that_cannot_be_right_is_refused(sizes, rows, match):
    with fxwarm.observe() as seen:
        Layer()(torch.randn(13, HIDDEN))
    with pytest.raises(exc.OptionError, match=match):
        seen.shapes(rows=rows, **sizes)


@pytest.fixture
def deep_gemm(monkeypatch):
    module = types.ModuleType("deep_gemm")

    def fp8_gemm_nt(a, b, d, c=None, compiled_dims="nk"):
        _gemm.dense(a=a[0], a_sf=a[1], b=b[0], b_sf=b[1], d=d)

    def bf16_gemm_nn(a, b, d, c=None, compiled_dims="nk"):
        d.copy_(a.float() @ b.float())

    def fp8_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True):
        return q.new_zeros(q.shape[0], kv[0].shape[0], dtype=torch.float32)

    for function in (fp8_gemm_nt, bf16_gemm_nn, fp8_mqa_logits):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr(libraries, "_chosen", {})
    user = types.ModuleType("users_code")
    user.gemm = module.fp8_gemm_nt  # imported by name
    monkeypatch.setitem(sys.modules, "users_code", user)
    return module


def test_plain_functions_are_seen_under_every_name_and_put_back(deep_gemm):
    user, original = sys.modules["users_code"], deep_gemm.fp8_gemm_nt
    w, sf = weight(HIDDEN, HIDDEN)
    x, d = torch.randn(13, HIDDEN), torch.empty(13, HIDDEN, dtype=torch.bfloat16)
    with fxwarm.observe() as seen:
        user.gemm(per_token_cast_to_fp8(x), (w, sf), d)
        deep_gemm.bf16_gemm_nn(d, torch.ones(HIDDEN, 128).bfloat16(), d.new_empty(13, 128))
        q, kv = torch.randn(13, 2, 128).to(w.dtype), torch.randn(40, 128).to(w.dtype)
        ends = torch.full((13,), 40, dtype=torch.int32)
        deep_gemm.fp8_mqa_logits(q, (kv, torch.ones(40)), torch.ones(13, 2), ends * 0, ends)
    assert user.gemm is original is deep_gemm.fp8_gemm_nt
    shapes = seen.shapes(T=(13, 1, 8192))
    assert [c.op for c in shapes.calls] == ["fp8_gemm_nt", "bf16_gemm_nn", "fp8_mqa_logits"]
    assert bounds(shapes.calls[0]) == bounds(shapes.calls[1]) == (1, 8192)
    assert not shapes.gaps
    user.gemm(per_token_cast_to_fp8(x), (w, sf), d)
    assert len(seen) == 3


@torch.no_grad()
def test_a_function_is_traced_without_being_compiled():
    w, sf = weight(HIDDEN, 128)

    def step(x):
        d = torch.empty(x.shape[0], HIDDEN, dtype=torch.bfloat16)
        torch.ops.fxwarm.fp8_gemm_nt(*per_token_cast_to_fp8(x), w, sf, d)
        return d

    (call,) = fxwarm.trace(step, torch.randn(5, 128)).calls
    assert bounds(call) == (1, 8192)


@torch.no_grad()
def test_a_model_that_is_never_compiled_is_warmed_in_one_call(toy):
    w = torch.full((8,), 2.0)

    def model(x):
        return torch.ops.toy.scale(x * 2, w)

    report = fxwarm.warm_model(model, torch.randn(5, 8), max_size=64)
    assert len(report.loaded) == len(toy_family.CLASSES)
    toy_family.events.clear()
    for rows in range(1, 65):
        model(torch.randn(rows, 8))
    assert toy_family.events == []


@torch.no_grad()
def test_an_observed_run_plans_and_warms(toy):
    w = torch.full((8,), 2.0)
    with fxwarm.observe() as seen:
        torch.ops.toy.scale(torch.randn(13, 8), w)
    shapes = seen.shapes(T=(13, 1, 64))
    fxwarm.warm(fxwarm.plan(shapes))
    toy_family.events.clear()
    for rows in range(1, 65):
        torch.ops.toy.scale(torch.randn(rows, 8), w)
    assert toy_family.events == []
