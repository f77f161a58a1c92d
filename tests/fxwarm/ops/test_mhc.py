"""mHC ops on a CPU: right against a float64 reference, one node in a graph, one rule for the splits."""

from __future__ import annotations

import pytest
import torch

from fxwarm import devices
from fxwarm.families.mhc.splits import expression, num_splits
from fxwarm.ops import mhc, mhc_factories
from fxwarm.ops.mhc_reference import mhc_post_reference, mhc_pre_reference, prenorm_reference
from passes import expr

needs_tilelang = pytest.mark.skipif(not mhc_factories.has_tilelang(), reason="needs TileLang")
ARGS = (1e-6, 1e-6, 1e-6, 2.0, 20)
BF16 = torch.bfloat16

TABLE_7168 = {
    112: 1, 66: 65, 44: 129, 33: 193, 26: 257, 22: 321, 18: 385, 16: 449, 14: 513, 13: 577, 12: 641,
    11: 705, 10: 769, 9: 833, 8: 897, 7: 1025, 6: 1153, 5: 1409, 4: 1665, 3: 2113, 2: 2817, 1: 4225,
}  # fmt: skip
"""Split count -> first token count, hidden 7168 on 132 SMs: sgl-project/sglang#25810, and seen on an H200."""


def layer(
    tokens: int, hidden: int, dtype: torch.dtype = BF16, mult: int = 4
) -> tuple[torch.Tensor, ...]:
    """Return residual, fn, hc_scale, hc_base of one layer."""
    rng = torch.Generator().manual_seed(tokens + hidden)
    rows = mult * (2 + mult)
    residual = torch.randn(tokens, mult, hidden, generator=rng).to(dtype)
    fn = torch.randn(rows, mult * hidden, generator=rng) * 0.05
    return residual, fn, torch.randn(3, generator=rng), torch.randn(rows, generator=rng)


@pytest.mark.parametrize(
    ("tokens", "hidden", "dtype", "mult"),
    [
        (1, 256, BF16, 4),
        (65, 256, torch.float32, 4),
        (2113, 256, BF16, 4),
        (7, 96, torch.float32, 2),
    ],
)
def test_pre_agrees_with_float64(tokens, hidden, dtype, mult):
    inputs = layer(tokens, hidden, dtype, mult)
    got = mhc.mhc_pre(*inputs, *ARGS)
    wanted = mhc_pre_reference(*inputs, *ARGS)
    for name, one, other in zip(("post", "comb", "layer_input"), got, wanted):
        assert one.shape == other.shape, name
        tol = (
            0.004 if one.dtype == BF16 else 2e-6
        )  # half a unit of bfloat16's 8 bits, else float32 sums
        assert (one.double() - other).abs().max() <= tol * max(1.0, other.abs().max().item()), name
    assert got[2].dtype == dtype


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_post_agrees_with_float64(dtype):
    residual, *rest = layer(70, 256, dtype)
    post, comb, _ = mhc.mhc_pre(residual, *rest, *ARGS)
    x = torch.randn(70, 256).to(dtype)
    wanted = mhc_post_reference(x, residual, post, comb)
    for mix in (post, post.unsqueeze(-1)):
        got = mhc.mhc_post(x, residual, mix, comb)
        tol = 0.004 if dtype == BF16 else 2e-6
        assert (got.double() - wanted).abs().max() <= tol * wanted.abs().max()
        assert got.dtype == dtype


def test_comb_is_doubly_stochastic():
    _, comb, _ = mhc_pre_reference(*layer(9, 128), *ARGS)
    for dim in (1, 2):
        assert torch.allclose(comb.sum(dim), torch.ones(9, 4, dtype=torch.float64), atol=1e-4)


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_the_partial_sums_add_up(splits):
    residual, fn, *_ = layer(5, 112)
    partial, squares = prenorm_reference(residual.flatten(1), fn, splits, torch.float64)
    flat = residual.flatten(1).double()
    assert partial.shape == (splits, 5, 24)
    assert squares.shape == (splits, 5)
    assert torch.allclose(partial.sum(0), flat @ fn.double().T)
    assert torch.allclose(squares.sum(0), flat.square().sum(1))


def test_no_token_needs_no_kernel(monkeypatch):
    monkeypatch.setattr(mhc_factories, "get_factory", None)
    post, comb, layer_input = mhc.mhc_pre(*layer(0, 256), *ARGS)
    assert (post.shape, comb.shape, layer_input.shape) == ((0, 4), (0, 4, 4), (0, 256))
    assert mhc.mhc_post(layer_input, torch.empty(0, 4, 256, dtype=BF16), post, comb).shape == (
        0,
        4,
        256,
    )


def test_without_tilelang_the_reference_runs_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(mhc_factories, "has_tilelang", lambda: False)
    mhc.has_cpu_kernels.cache_clear()
    inputs = layer(3, 256)
    try:
        with caplog.at_level("INFO", logger="fxwarm.ops.mhc"):
            mhc.mhc_pre(*inputs, *ARGS)
            got = mhc.mhc_pre(*inputs, *ARGS)
            out = mhc.mhc_post(got[2], inputs[0], got[0], got[1])
    finally:
        mhc.has_cpu_kernels.cache_clear()
    assert [r.getMessage().count("reference") for r in caplog.records] == [1]
    assert torch.allclose(got[2].double(), mhc_pre_reference(*inputs, *ARGS)[2], atol=0.05)
    assert out.dtype == BF16


def test_the_inputs_are_left_alone_and_may_be_strided():
    residual, fn, scale, base = layer(6, 256)
    wide = torch.zeros(6, 4, 512, dtype=BF16)
    wide[..., ::2] = residual
    before = wide.clone()
    got = mhc.mhc_pre(wide[..., ::2], fn.T.contiguous().T, scale, base, *ARGS)
    assert torch.equal(wide, before)
    for one, other in zip(got, mhc.mhc_pre(residual, fn, scale, base, *ARGS)):
        assert torch.allclose(
            one.float(), other.float(), atol=1e-5
        )  # the GEMM may sum in another order


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r, f, s, b: (r[:, :3], f, s, b), "3 streams, fn wants 4"),
        (lambda r, f, s, b: (r[..., :128], f, s, b), "hidden 128, fn wants 256"),
        (lambda r, f, s, b: (r, f[:23], s, b), "23 rows"),
        (lambda r, f, s, b: (r, f.bfloat16(), s, b), "fn is torch.bfloat16; give float32"),
        (lambda r, f, s, b: (r.double(), f, s, b), "residual is torch.float64"),
        (lambda r, f, s, b: (r, f, s[:2], b), "hc_scale must be"),
    ],
)
def test_a_wrong_shape_names_both_sides(change, words):
    with pytest.raises(RuntimeError, match=words):
        mhc.mhc_pre(*change(*layer(2, 256)), *ARGS)


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_ops_pass_torchs_own_checks(tokens):
    inputs = layer(tokens, 256)
    torch.library.opcheck(mhc.mhc_pre, (*inputs, *ARGS))
    post, comb, x = mhc.mhc_pre(*inputs, *ARGS)
    torch.library.opcheck(mhc.mhc_post, (x, inputs[0], post, comb))


def test_a_layer_is_one_node_and_hidden_is_the_weights(fresh):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fn = torch.nn.Parameter(layer(1, 256)[1], requires_grad=False)

        def forward(self, residual, scale, base):
            return torch.ops.fxwarm.mhc_pre(residual, self.fn, scale, base, *ARGS)

    seen = []

    def backend(gm, inputs):
        seen.append(gm)
        return gm.forward

    residual, _, scale, base = layer(7, 256)
    block = torch.compile(Block(), backend=backend, dynamic=True, fullgraph=True)
    out = block(residual, scale, base)
    assert out[2].shape == (7, 256)
    (gm,) = seen
    nodes = [n for n in gm.graph.nodes if "mhc_pre" in str(n.target)]
    assert len(nodes) == 1
    _, comb, layer_input = nodes[0].meta["example_value"]
    assert layer_input.shape[1] == 256
    assert isinstance(layer_input.shape[1], int)
    assert comb.shape[1:] == (4, 4)
    block(layer(12, 256)[0], scale, base)
    assert len(seen) == 1


def test_the_splits_of_hidden_7168_are_the_22_that_were_reported():
    first: dict[int, int] = {}
    for tokens in range(1, 8193):
        first.setdefault(num_splits(tokens, 28672, 132), tokens)
    assert first == TABLE_7168


@pytest.mark.parametrize(
    ("hidden", "sms", "count"),
    [
        (7168, 132, 22),
        (5120, 132, 22),
        (4096, 132, 21),
        (2048, 132, 19),
        (4096, 78, 16),
        (7168, 148, 23),
    ],
)
def test_the_number_of_splits_follows_hidden_and_sms(hidden, sms, count):
    found = {num_splits(t, 4 * hidden, sms) for t in range(1, 8193)}
    assert len(found) == count


def test_the_bucketed_rule_has_three_values():
    splits = [num_splits(t, 28672, 132, "mhc_bucketed") for t in range(1, 8193)]
    assert sorted(set(splits)) == [1, 4, 16]
    assert (splits.index(4) + 1, splits.index(1) + 1) == (1665, 4225)


@pytest.mark.parametrize("rule", ["mhc", "mhc_bucketed"])
@pytest.mark.parametrize(("k", "sms"), [(28672, 132), (4096, 78), (1000, 148)])
def test_the_expression_is_the_rule(k, sms, rule):
    tokens = list(range(1, 9000, 7))
    values = expr.evaluate(expr.parse(expression("s0", k, sms, rule)), {"s0": tokens})
    assert values.tolist() == [num_splits(t, k, sms, rule) for t in tokens]


def test_the_heuristics_of_deep_gemm_apply_the_same_rule():
    heuristics = pytest.importorskip("fxwarm.families.deep_gemm.heuristics.prenorm")
    for tokens in range(1, 5000, 13):
        assert heuristics.compute_num_split(tokens, 16384, 78) == num_splits(tokens, 16384, 78)


def test_zero_tokens_have_no_splits():
    with pytest.raises(ValueError, match="0 tokens need no kernel"):
        num_splits(0, 1024, 132)


@needs_tilelang
def test_a_cpu_counts_the_sms_that_its_target_says(monkeypatch):
    asked = []
    real = mhc_factories.pre_statics
    monkeypatch.setattr(
        mhc_factories, "pre_statics", lambda h, m, n, *rest: asked.append(n) or real(h, m, n, *rest)
    )
    for sms in (132, 78):
        monkeypatch.setattr(devices, "CPU_SMS", sms)
        mhc.mhc_pre(*layer(2113, 256), *ARGS)
    assert asked == [num_splits(2113, 1024, 132), num_splits(2113, 1024, 78)] == [3, 2]
