"""What a trace learns from the ops: K and N become the weight's, M stays free."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxwarm.ops import per_token_cast_to_fp8
from tests.fxwarm.ops.tensors import BF16, F32, fp8_blocks, fp8_rows, randn

ops = torch.ops.fxwarm
N, K, G = 384, 256, 4


class Traced:
    """A backend that keeps what it was given."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, _inputs: list) -> torch.fx.GraphModule:
        self.graphs.append(gm)
        return gm

    def tensor(self, name: str) -> torch.Tensor:
        """Return the fake tensor of the placeholder that holds the local ``name``."""
        for node in self.graphs[-1].graph.nodes:
            if node.op == "placeholder" and node.target.lower().strip("_").endswith(f"l_{name}"):
                return node.meta["example_value"]
        raise KeyError(name)

    def guards(self) -> str:
        for node in self.graphs[-1].graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor):
                return " ".join(str(guard.expr) for guard in value.fake_mode.shape_env.guards)
        raise AssertionError("no fake tensor in the graph")


def trace(model: nn.Module, *args: torch.Tensor) -> Traced:
    torch._dynamo.reset()
    traced = Traced()
    with torch.no_grad():
        torch.compile(model, backend=traced, dynamic=True, fullgraph=True)(*args)
    assert len(traced.graphs) == 1
    return traced


def expr(size: object) -> object:
    return size if isinstance(size, int) else size.node.expr


def weight(*size: int) -> nn.Parameter:
    return nn.Parameter(randn(*size, dtype=BF16), requires_grad=False)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        shape = (G, N, K) if kind in ("contiguous", "masked", "moe") else (N, K)
        w, sf, _ = fp8_blocks(*shape)
        self.w, self.sf = nn.Parameter(w, False), nn.Parameter(sf, False)
        self.fn = nn.Parameter(randn(24, K), False)
        self.fc1, self.fc2 = weight(G, 2 * 64, K), weight(G, K, 64)

    def forward(self, x, *more):
        m = x.shape[-2]
        if self.kind == "quantised":
            x, sf = per_token_cast_to_fp8(x.view(-1, x.shape[-1]))
            d = x.new_empty(x.shape[0], N, dtype=BF16)
            ops.fp8_gemm_nt(x, sf, self.w, self.sf, d)
        elif self.kind == "dense":
            d = x.new_empty(m, N, dtype=BF16)
            ops.fp8_gemm_nt(x, more[0], self.w, self.sf, d)
        elif self.kind == "contiguous":
            d = x.new_empty(m, N, dtype=BF16)
            ops.m_grouped_fp8_gemm_nt_contiguous(x, more[0], self.w, self.sf, d, more[1])
        elif self.kind == "masked":
            d = x.new_empty(G, m, N, dtype=BF16)
            ops.m_grouped_fp8_gemm_nt_masked(x, more[0], self.w, self.sf, d, more[1], (m + 3) // 4)
        elif self.kind == "prenorm":
            splits = max(1, 132 // ((m + 63) // 64) // 64)
            d, sqr = x.new_empty(splits, m, 24, dtype=F32), x.new_empty(splits, m, dtype=F32)
            ops.tf32_hc_prenorm_gemm(x, self.fn, d, sqr, splits)
        elif self.kind == "moe":
            d = ops.cutlass_fused_moe(x, *more, self.fc1, self.fc2, BF16, [])
        return d


def call(kind: str, m: int) -> tuple[torch.Tensor, ...]:
    if kind == "prenorm":
        return (randn(m, K, dtype=BF16),)
    if kind == "moe":
        ids = torch.arange(2 * m, dtype=torch.int32).view(m, 2) % G
        return randn(m, K, dtype=BF16), ids, torch.ones(m, 2)
    if kind == "quantised":
        return (randn(m, 3, K),)
    if kind == "masked":
        return *fp8_rows(G, m, K)[:2], torch.full((G,), 2, dtype=torch.int32)
    layout = (torch.zeros(m, dtype=torch.int32),) if kind == "contiguous" else ()
    return *fp8_rows(m, K)[:2], *layout


@pytest.mark.parametrize("kind", ["dense", "contiguous", "masked", "prenorm", "moe"])
def test_k_becomes_the_weights_and_m_stays_free(kind):
    traced = trace(Model(kind), *call(kind, 17))
    x = traced.tensor("x")
    assert expr(x.shape[-1]) == K
    symbol = expr(x.shape[-2])
    assert symbol.is_Symbol
    assert str(symbol) not in traced.guards()


@pytest.mark.parametrize("kind", ["dense", "contiguous", "masked", "prenorm", "moe"])
def test_one_graph_serves_every_m(kind):
    torch._dynamo.reset()
    traced, model = Traced(), Model(kind)
    compiled = torch.compile(model, backend=traced, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for m in (17, 5, 300):
            args = call(kind, m)
            assert torch.equal(compiled(*args)[..., :2, :], model(*args)[..., :2, :])
    assert len(traced.graphs) == 1


def test_a_product_of_leading_dims_that_is_quantised_in_the_graph_serves_every_m():
    torch._dynamo.reset()
    traced, model = Traced(), Model("quantised")
    compiled = torch.compile(model, backend=traced, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for m in (17, 5, 300):
            (x,) = call("quantised", m)
            assert torch.equal(compiled(x), model(x))
    assert len(traced.graphs) == 1
    assert expr(traced.tensor("x").shape[2]) == K
    assert expr(traced.tensor("x").shape[0]).is_Symbol


def test_sizes_that_are_marked_one_by_one_need_no_guard():
    torch._dynamo.reset()
    traced, model, args = Traced(), Model("dense"), call("dense", 17)
    for tensor in args:
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=8192)
    compiled = torch.compile(model, backend=traced, fullgraph=True)
    with torch.no_grad():
        compiled(*args)
        compiled(*call("dense", 300))
    assert len(traced.graphs) == 1
    assert traced.guards() == ""


def test_an_unbacked_m_is_never_guarded_on():
    torch._dynamo.reset()
    traced, (x, sf) = Traced(), call("dense", 17)
    for tensor in (x, sf):
        torch._dynamo.decorators.mark_unbacked(tensor, 0)

    def run(x, sf, w, w_sf):
        d = x.new_empty(x.shape[0], N, dtype=BF16)
        ops.fp8_gemm_nt(x, sf, w, w_sf, d)
        return d

    model = Model("dense")
    torch.compile(run, backend=traced, fullgraph=True)(x, sf, model.w.data, model.sf.data)
    assert str(expr(traced.tensor("x").shape[0])).startswith("u")


def test_n_of_a_symbolic_output_becomes_the_weights():
    def run(x, sf, w, w_sf, d):
        ops.fp8_gemm_nt(x, sf, w, w_sf, d)
        return d + 1

    torch._dynamo.reset()
    model, traced = Model("dense"), Traced()
    x, sf = call("dense", 17)
    for tensor in (model.w, model.sf):
        torch._dynamo.mark_static(tensor)
    compiled = torch.compile(run, backend=traced, dynamic=True, fullgraph=True)
    with torch.no_grad():
        compiled(x, sf, model.w.data, model.sf.data, torch.empty(17, N, dtype=BF16))
    d, w = traced.tensor("d"), traced.tensor("w")
    assert expr(d.shape[1]) == expr(w.shape[0])
    assert expr(traced.tensor("x").shape[1]) == expr(w.shape[1])


def test_the_ops_run_under_a_fake_mode():
    with FakeTensorMode():
        a, b, d = (torch.empty(s, dtype=BF16) for s in ((3, 64), (8, 64), (3, 8)))
        assert ops.bf16_gemm_nt(a, b, d) is None
        ids = torch.empty(3, 2, dtype=torch.int32)
        fc1, fc2 = torch.empty(4, 16, 64, dtype=BF16), torch.empty(4, 64, 8, dtype=BF16)
        out = ops.cutlass_fused_moe(a, ids, torch.empty(3, 2), fc1, fc2, BF16, [])
        assert out.shape == (3, 64)
