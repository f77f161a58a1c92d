"""cuDNN's attention in the graph after AOTAutograd. The op has no CPU kernel: graphs are traced on meta."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxwarm import options
from fxwarm.after import AfterDynamo
from fxwarm.attention import attends, find_cudnn_attention
from fxwarm.graph_key import GraphKeys
from passes.records import ShapeSet


def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attention(q, k, k, None, False, 0.0, True, False)[0]


def trace(mode: str) -> torch.fx.GraphModule:
    q = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    return make_fx(attend, tracing_mode=mode)(q, q.clone())


@pytest.mark.parametrize(("mode", "gaps"), [("symbolic", 1), ("fake", 0)])
def test_sizes_that_vary_are_a_gap_and_static_ones_are_planned_by_the_first_call(mode, gaps):
    found = find_cudnn_attention(trace(mode))
    assert len(found) == gaps
    assert all("torch.backends.cuda.enable_cudnn_sdp(False)" in str(gap) for gap in found)


def test_a_body_within_the_graph_is_looked_into():
    outer = torch.fx.Graph()
    outer.output(outer.call_module("body", (outer.placeholder("q"), outer.placeholder("k"))))
    gm = torch.fx.GraphModule({"body": trace("symbolic")}, outer)
    assert len(find_cudnn_attention(gm)) == 1


def test_other_attention_is_none():
    def flash(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    gm = make_fx(flash, tracing_mode="symbolic")(torch.empty(2, 4, 16, 64, device="meta"))
    assert find_cudnn_attention(gm) == ()


def test_what_inductor_is_given_is_read():
    after = AfterDynamo(ShapeSet(), options.active(), GraphKeys(), lambda shapes: None)
    gm = trace("symbolic")
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    assert after.wrap(lambda gm, inputs: gm)(gm, inputs) is gm
    (gap,) = after.finish(inputs).gaps
    assert gap.op == "aten::_scaled_dot_product_cudnn_attention"


def test_on_a_hit_of_torchs_cache_the_gap_is_known_from_the_first_time_and_else_is_one(fresh):
    def after(key: str) -> AfterDynamo:
        keys = GraphKeys(aot=key)
        return AfterDynamo(ShapeSet(), options.active(), keys, lambda shapes: None, attends=True)

    gm, first = trace("symbolic"), after("a" * 52)
    inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    first.wrap(lambda gm, inputs: gm)(gm, inputs)
    found = first.finish(inputs)
    assert after("a" * 52).finish(inputs).gaps == found.gaps
    (unseen,) = after("b" * 52).finish(inputs).gaps
    assert unseen.op == "scaled_dot_product_attention" and "clear that cache" in unseen.reason


@pytest.mark.parametrize(("device", "seen"), [("cuda", True), ("cpu", False)])
def test_attention_of_dynamos_graph_counts_on_a_cuda_device(device, seen):
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    with torch._subclasses.FakeTensorMode():
        q.meta["example_value"] = torch.empty(2, 4, 16, 64, device=device)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    graph.output(graph.call_function(sdpa, (q, q, q)))
    gm = torch.fx.GraphModule({}, graph)
    assert attends(gm) is seen
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert not attends(gm)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
