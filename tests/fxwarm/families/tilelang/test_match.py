"""From a Dynamo graph to calls: fxwarm's ops, vLLM's schemas under any namespace, declared ops."""

from __future__ import annotations

import pytest
import torch

from fxwarm.families.mhc.splits import prenorm_call, resolve
from fxwarm.families.tilelang import TileLang, declare, undeclare
from fxwarm.records import Target
from passes.collect import collect
from tests.fxwarm.families.tilelang.test_keys import LIBRARY, planned, splits
from tests.fxwarm.ops.test_mhc import ARGS, BF16, layer

_SCALARS = "float rms_eps, float hc_pre_eps, float hc_sinkhorn_eps, float hc_post_mult_value, SymInt sinkhorn_repeat"
_NORM = "Tensor? norm_weight=None, float norm_eps=1e-06"
_WEIGHTS = f"Tensor fn, Tensor hc_scale, Tensor hc_base, {_SCALARS}"
_POST = "Tensor x, Tensor residual, Tensor post_layer_mix, Tensor comb_res_mix"
SCHEMAS = (
    f"mhc_pre_tilelang(Tensor residual, {_WEIGHTS}, SymInt n_splits=1, {_NORM}) -> (Tensor, Tensor, Tensor)",
    f"mhc_pre_delayed_tilelang(Tensor residual, {_WEIGHTS}, Tensor? pre_mix=None, Tensor? x=None, {_NORM}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    f"mhc_post_tilelang({_POST}) -> Tensor",
    f"mhc_fused_post_pre_tilelang({_POST}, {_WEIGHTS}, SymInt n_splits=1, SymInt tile_n=1, {_NORM}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "hc_head_fused_kernel_tilelang(Tensor hs_flat, Tensor fn, Tensor hc_scale, Tensor hc_base, float rms_eps, "
    "float hc_eps) -> Tensor",
    "toy_scaled(Tensor x, float factor) -> Tensor",
)
"""As vLLM 0.33 registers them; here under a namespace of our own."""


@pytest.fixture(scope="module")
def ops():
    library = torch.library.Library("fxwarm_match_test", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        name = schema[: schema.index("(")]
        count = 1 if schema.endswith("-> Tensor") else schema.split("->")[1].count("Tensor")

        def fake(x, *args, count=count, **kwargs):
            outs = tuple(x.new_empty(x.shape) for _ in range(count))
            return outs[0] if count == 1 else outs

        torch.library.register_fake(f"fxwarm_match_test::{name}", fake, lib=library)
    yield torch.ops.fxwarm_match_test
    library._destroy()


def trace(function, *inputs, dynamic=True, matchers=None):
    """Return what the family makes of the graph of ``function``."""
    found = []

    def backend(gm, example):
        found.append(collect(gm, example, matchers or [TileLang().match]))
        return gm.forward

    torch._dynamo.reset()
    for value in inputs:  # as in a model, where hidden comes from a weight
        if isinstance(value, torch.Tensor) and value.shape[0] == 7 and dynamic is None:
            torch._dynamo.mark_dynamic(value, 0, min=1, max=8192)
    try:
        torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    except NotImplementedError:
        pass  # the ops of these tests have no kernels: the graph is all we want
    finally:
        torch._dynamo.reset()
    return found[0].shapes


def weights(hidden=256):
    residual, fn, scale, base = layer(7, hidden)
    return residual, torch.nn.Parameter(fn, requires_grad=False), scale, base


def test_one_node_is_one_call_with_all_its_splits():
    residual, fn, scale, base = weights()
    shapes = trace(
        lambda r, s, b: torch.ops.fxwarm.mhc_pre(r, fn, s, b, 1e-6, 1e-6, 1e-6, 2.0, 20),
        residual,
        scale,
        base,
    )
    (call,) = shapes.calls
    assert (call.family, call.op, str(call["residual"])) == (
        "tilelang",
        "mhc_pre",
        "bfloat16[s0, 4, 256]",
    )
    assert (call.attr("hidden"), call.attr("k"), call.attr("rule")) == (256, 1024, "mhc")
    assert splits(planned(call, target=Target.named("cpu"))) == {4: 1, 3: 2113, 2: 2817, 1: 4225}


def test_floats_from_globals_are_symbols_with_a_value():
    residual, fn, scale, base = weights()
    (call,) = trace(
        lambda r, s, b: torch.ops.fxwarm.mhc_pre(r, fn, s, b, *ARGS), residual, scale, base
    ).calls
    assert [call.attr(n) for n in ("rms_eps", "hc_post_mult_value", "sinkhorn_repeat")] == [
        1e-6,
        2.0,
        20,
    ]


def test_a_float_that_is_an_input_is_a_gap():
    residual, fn, scale, base = weights()

    def model(r, s, b, eps):
        return torch.ops.fxwarm.mhc_pre(r, fn, s, b, eps, 1e-6, 1e-6, 2.0, 20)

    shapes = trace(model, residual, scale, base, 1e-6)
    if shapes.calls:  # Dynamo took the input for a constant, as it does at the first value
        assert shapes.calls[0].attr("rms_eps") == 1e-6
    else:
        assert "make it a Python constant" in shapes.gaps[0].reason


def test_the_gemm_of_the_same_node_is_deep_gemms():
    residual, fn, scale, base = weights()

    def match(op):
        call = prenorm_call(op)
        return () if call is None else (call,)

    def model(r, s, b):
        return torch.ops.fxwarm.mhc_pre(r, fn, s, b, 1e-6, 1e-6, 1e-6, 2.0, 20)

    shapes = trace(model, residual, scale, base, matchers=[TileLang().match, match])
    fuse, gemm = sorted(shapes.calls, key=lambda c: c.family, reverse=True)
    assert (gemm.family, gemm.op, gemm.attr("num_splits")) == (
        "deep_gemm",
        "tf32_hc_prenorm_gemm",
        "mhc",
    )
    assert (str(gemm["a"]), str(gemm["b"])) == ("bfloat16[s0, 1024]", "float32[24, 1024]")
    solved = resolve(gemm, 132)
    assert solved.attr("num_splits").attainable().tolist() == [1, 2, 3, 4]
    assert [len(solved[n].dims) for n in ("d", "sqr_sum")] == [3, 2]
    assert str(solved["d"].dims[0]) == str(solved.attr("num_splits"))
    assert resolve(solved, 132) == solved
    assert set(splits(planned(fuse, target=Target.named("cpu")))) == {1, 2, 3, 4}


def test_vllms_pre_is_known_under_any_namespace_and_its_splits_argument_is_ignored(ops):
    residual, fn, scale, base = weights(4096)
    norm = torch.nn.Parameter(torch.ones(4096, dtype=BF16), requires_grad=False)

    def model(r, s, b):
        one = ops.mhc_pre_tilelang(r, fn, s, b, 1e-6, 1e-6, 1e-6, 2.0, 20, 5)
        other = ops.mhc_pre_tilelang(
            r.view(1, -1, 4, 4096), fn, s, b, 1e-6, 1e-6, 1e-6, 2.0, 20, 5, norm
        )
        return one, other

    one, other = trace(model, residual, scale, base).calls
    assert {p.key.kernel for p in planned(one)} == {"mhc_pre_big_fuse_tilelang"}
    assert {p.key.kernel for p in planned(other)} == {"mhc_pre_big_fuse_with_norm_tilelang"}
    assert len(planned(one)) == len(planned(other)) == 21
    assert planned(one)[0].key.tag.startswith("vllm.model_executor.kernels.mhc.tilelang_kernels:")


def test_vllms_delayed_pre_may_broadcast_its_first_layer(ops):
    residual, fn, scale, base = weights(4096)
    narrow = torch.nn.Parameter(torch.zeros(24, 4096), requires_grad=False)

    def model(r, s, b, x, mix):
        carried = ops.mhc_pre_delayed_tilelang(r, fn, s, b, 1e-6, 1e-6, 1e-6, 2.0, 20, mix)
        first = ops.mhc_pre_delayed_tilelang(r, narrow, s, b, 1e-6, 1e-6, 1e-6, 2.0, 20, None, x)
        return carried, first

    inputs = residual, scale, base, torch.zeros(7, 4096, dtype=BF16), torch.zeros(7, 4)
    carried, first = trace(model, *inputs, dynamic=None).calls
    assert splits(planned(carried)) == {16: 1, 4: 1665, 1: 4225}
    for call, numel, mixed in ((carried, 16384, True), (first, 4096, False)):
        template = planned(call)[0].key.template
        assert {f"rms_numel={numel}", f"use_pre_mix_in={mixed}", "save_pre_mix=True"} <= set(
            template
        )


def test_vllms_other_ops(ops):
    residual, fn, scale, base = weights(4096)
    head = torch.nn.Parameter(torch.zeros(4, 16384), requires_grad=False)

    def model(r, s, b, x, post, comb):
        fused = ops.mhc_fused_post_pre_tilelang(
            x, r, post, comb, fn, s, b, 1e-6, 1e-6, 1e-6, 2.0, 20
        )
        after = ops.mhc_post_tilelang(x, r, post, comb)
        return fused, after, ops.hc_head_fused_kernel_tilelang(r, head, s, b, 1e-6, 1e-6)

    extra = torch.zeros(7, 4096, dtype=BF16), torch.zeros(7, 4, 1), torch.zeros(7, 4, 4)
    calls = trace(model, residual, scale, base, *extra, dynamic=None).calls
    assert [c.op for c in calls] == ["mhc_fused_post_pre", "mhc_post", "hc_head"]
    assert str(planned(calls[1])[0].key) == "mhc_post_tilelang<hc=4, hidden=4096>"
    assert planned(calls[2])[0].key.kernel == "hc_head_fuse_tilelang"
    assert (
        len(planned(calls[0])) == 21 + 2 + 1
    )  # the splits (8 is one of them), two fused kernels, post


def test_a_hidden_size_that_nothing_fixes_is_a_gap(ops):
    inputs = torch.zeros(7, 256), torch.zeros(7, 4, 256), torch.zeros(7, 4), torch.zeros(7, 4, 4)
    (call,) = trace(lambda *a: torch.ops.fxwarm.mhc_post(*a), *inputs).calls
    assert not planned(call)
    (gap,) = TileLang().keys([call], Target.named("h200"), LIBRARY)
    assert "upper bound" in gap.reason


def test_a_declared_op_is_a_call(ops):
    declare(
        "fxwarm_match_test::toy_scaled",
        "a.b:scaled",
        lambda call, target: {"width": call["x"].dims[1]},
    )
    try:
        shapes = trace(lambda x: ops.toy_scaled(x, 0.5), torch.zeros(7, 96))
        (call,) = shapes.calls
        assert call.attr("factor") == 0.5
        assert isinstance(planned(call)[0].key.kernel, str)
    finally:
        undeclare("fxwarm_match_test::toy_scaled")
    unknown = trace(lambda x: ops.toy_scaled(x, 0.5), torch.zeros(7, 96))
    assert not unknown.calls
    assert [u.op for u in unknown.unknown] == ["fxwarm_match_test::toy_scaled"]


def test_a_static_batch_is_one_kernel():
    residual, fn, scale, base = weights()

    def model(r, s, b):
        return torch.ops.fxwarm.mhc_pre(r, fn, s, b, 1e-6, 1e-6, 1e-6, 2.0, 20)

    (call,) = trace(model, residual, scale, base, dynamic=False).calls
    assert splits(planned(call, target=Target.named("cpu"))) == {4: 7}
