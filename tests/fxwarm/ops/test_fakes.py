"""What a trace learns from the ops: K and N become the weight's, M stays free, errors show both shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxwarm.exc import ShapeMismatchError
from fxwarm.ops import per_token_cast_to_fp8
from fxwarm.ops.scales import FP8
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


def meta(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def dense(**changed: torch.Tensor) -> None:
    args = {
        "a": meta(16, 7168, dtype=FP8),
        "a_sf": meta(16, 56, dtype=F32),
        "b": meta(2112, 7168, dtype=FP8),
        "b_sf": meta(17, 56, dtype=F32),
        "d": meta(16, 2112),
    }
    ops.fp8_gemm_nt(**{**args, **changed})


def test_a_right_call_runs_on_meta_tensors():
    dense()
    dense(recipe=[1, 1, 128], b_sf=meta(2112, 56, dtype=F32), d=meta(16, 2112, dtype=F32))
    dense(b_sf=meta(2112, 14, dtype=torch.int32), a_sf=meta(16, 14, dtype=torch.int32))


@pytest.mark.parametrize(
    ("changed", "shapes"),
    [
        ({"a": meta(16, 7000, dtype=FP8)}, ("[16, 7000]", "[2112, 7168]")),
        ({"a": meta(2, 16, 7168, dtype=FP8)}, ("[2, 16, 7168]", "[M, K]")),
        ({"a": meta(16, 7168)}, ("bfloat16[16, 7168]", "float8_e4m3fn")),
        ({"b": meta(7168, dtype=FP8)}, ("[7168]", "[N, K]")),
        ({"a_sf": meta(16, 57, dtype=F32)}, ("[16, 57]", "[16, 7168]", "[16, 56]")),
        ({"a_sf": meta(16, 56, dtype=torch.float64)}, ("float64[16, 56]", "float32")),
        ({"a_sf": meta(15, 56, dtype=F32)}, ("[15, 56]", "[16, 56]")),
        ({"b_sf": meta(16, 56, dtype=F32)}, ("[16, 56]", "[2112, 7168]", "[17, 56]")),
        ({"d": meta(16, 2048)}, ("[16, 2048]", "[16, 2112]")),
        ({"d": meta(17, 2112)}, ("[17, 2112]", "[16, 2112]")),
        ({"d": meta(16, 2112, dtype=torch.float16)}, ("float16[16, 2112]", "bfloat16")),
        ({"c": meta(16, 2112, dtype=F32)}, ("float32[16, 2112]", "bfloat16")),
        ({"recipe": [1, 128]}, ("(1, 128)", "rows of A")),
    ],
)
def test_a_wrong_call_shows_both_shapes(changed, shapes):
    with pytest.raises(ShapeMismatchError, match=r"fp8_gemm_nt|recipe") as caught:
        dense(**changed)
    for shape in shapes:
        assert shape in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_scales_of_another_number_of_groups_show_both_shapes():
    a, a_sf = meta(512, 7168, dtype=FP8), meta(512, 56, dtype=F32)
    b, b_sf = meta(256, 4096, 7168, dtype=FP8), meta(64, 32, 56, dtype=F32)
    layout, d = meta(512, dtype=torch.int32), meta(512, 4096)
    with pytest.raises(ValueError, match="b_sf") as caught:
        ops.m_grouped_fp8_gemm_nt_contiguous(a, a_sf, b, b_sf, d, layout)
    assert "[64, 32, 56]" in str(caught.value)
    assert "[256, 4096, 7168]" in str(caught.value)
    right = meta(256, 32, 56, dtype=F32)
    ops.m_grouped_fp8_gemm_nt_contiguous(a, a_sf, b, right, d, layout)
    with pytest.raises(ValueError, match=r"grouped_layout is int32\[511\].*\[512, 7168\]"):
        ops.m_grouped_fp8_gemm_nt_contiguous(a, a_sf, b, right, d, layout[1:])
    with pytest.raises(ValueError, match=r"grouped_layout is int32\[512\].*\[256, 4096, 7168\]"):
        ops.m_grouped_fp8_gemm_nt_contiguous(a, a_sf, b, right, d, layout, use_psum_layout=True)
    with pytest.raises(ValueError, match="without use_psum_layout"):
        ops.m_grouped_fp8_gemm_nt_contiguous(
            a, a_sf, b, right, d, layout, expected_m_for_psum_layout=4
        )


@pytest.mark.parametrize("expression", ["bmk,bnk->mn", "bhr,hdr->bdh"])
def test_an_unknown_einsum_names_the_known_ones(expression):
    with pytest.raises(ValueError, match="bhr,hdr->bhd"):
        ops.einsum(expression, meta(2, 4, 8), meta(4, 16, 8), meta(2, 4, 16))


def test_the_scales_of_an_einsum_follow_its_letters():
    b, b_sf = meta(8, 1024, 4096, dtype=FP8), meta(8, 8, 32, dtype=F32)
    for expression, k, n in (("bhr,hdr->bhd", 4096, 1024), ("bhd,hdr->bhr", 1024, 4096)):
        a, a_sf = meta(3, 8, k, dtype=FP8), meta(3, 8, k // 128, dtype=F32)
        ops.fp8_einsum(expression, a, a_sf, b, b_sf, meta(3, 8, n))
        with pytest.raises(ValueError, match=r"b_sf is float32\[8, 32, 8\]"):
            ops.fp8_einsum(expression, a, a_sf, b, b_sf.mT, meta(3, 8, n))


def test_splits_must_be_the_leading_dim():
    a, b = meta(9, 16384), meta(24, 16384, dtype=F32)
    ops.tf32_hc_prenorm_gemm(a, b, meta(4, 9, 24, dtype=F32), meta(4, 9, dtype=F32), 4)
    with pytest.raises(ValueError, match=r"d is float32\[3, 9, 24\].*\[4, 9, 24\]"):
        ops.tf32_hc_prenorm_gemm(a, b, meta(3, 9, 24, dtype=F32), meta(4, 9, dtype=F32), 4)
    with pytest.raises(ValueError, match=r"d is float32\[4, 9, 24\].*\[9, 24\]"):
        ops.tf32_hc_prenorm_gemm(a, b, meta(4, 9, 24, dtype=F32), meta(4, 9, dtype=F32))


def test_a_wrong_call_fails_alike_in_a_trace_and_on_the_cpu():
    a, b, d = randn(4, 64, dtype=BF16), randn(8, 32, dtype=BF16), torch.empty(4, 8, dtype=BF16)
    with pytest.raises(ValueError, match=r"a is bfloat16\[4, 64\].*\[8, 32\]"):
        ops.bf16_gemm_nt(a, b, d)
    torch._dynamo.reset()
    run = torch.compile(ops.bf16_gemm_nt, backend="eager", dynamic=True, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="make them agree"):
        run(a, b, d)


def test_flashinfer_fakes_have_the_shape_and_dtype_of_the_output():
    ids, scales = meta(5, 8, dtype=torch.int32), meta(5, 8, dtype=F32)
    x, fc1, fc2 = meta(5, 2048), meta(32, 1536, 2048), meta(32, 2048, 768)
    out = ops.cutlass_fused_moe(x, ids, scales, fc1, fc2, torch.float16, [])
    assert (out.shape, out.dtype, out.is_meta) == ((5, 2048), torch.float16, True)
    with pytest.raises(ValueError, match=r"fc1_expert_weights is bfloat16\[32, 768, 2048\]"):
        ops.cutlass_fused_moe(x, ids, scales, fc1[:, :768], fc2, BF16, [])
    ops.cutlass_fused_moe(x, ids, scales, fc1[:, :768], fc2, BF16, [], activation_type=6)
    with pytest.raises(ValueError, match="1 quant_scales given"):
        ops.cutlass_fused_moe(x, ids, scales, fc1, fc2, BF16, [scales])
    with pytest.raises(NotImplementedError, match="min_latency_mode"):
        ops.cutlass_fused_moe(x, ids, scales, fc1, fc2, BF16, [], min_latency_mode=True)
    packed = meta(32, 2048, 384, dtype=torch.uint8)
    quant = [scales] * 2
    out = ops.cutlass_fused_moe(
        x, ids, scales, meta(32, 1536, 1024, dtype=torch.uint8), packed, BF16, quant,
        use_w4_group_scaling=True,
    )  # fmt: skip
    assert out.shape == (5, 2048)
    fp8 = [meta(32, 12, 16, dtype=F32), meta(32, 16, 6, dtype=F32)]
    args = (x, ids, scales, fc1.to(FP8), fc2.to(FP8), BF16)
    ops.cutlass_fused_moe(*args, fp8, use_deepseek_fp8_block_scale=True)
    with pytest.raises(ValueError, match=r"\[32, 16, 6\].*float8_e4m3fn\[32, 1536, 2048\]"):
        ops.cutlass_fused_moe(*args, fp8[::-1], use_deepseek_fp8_block_scale=True)

    one = meta(1, dtype=F32)
    out = ops.bmm_fp8(meta(4, 9, 64, dtype=FP8), meta(4, 64, 32, dtype=FP8), one, one, BF16)
    assert (out.shape, out.dtype) == ((4, 9, 32), BF16)

    up, down = meta(256, 1024, 2048, dtype=FP8), meta(256, 2048, 512, dtype=FP8)
    up_sf, down_sf = meta(256, 8, 16, dtype=F32), meta(256, 16, 4, dtype=F32)
    out = ops.mono_moe(meta(3, 2048), meta(3, 256), up, up_sf, down, down_sf, 8)
    assert (out.shape, out.dtype) == ((3, 2048), BF16)

    logits, x, x_sf = meta(3, 256), meta(3, 7168, dtype=FP8), meta(56, 3, dtype=F32)
    rest = (up, up_sf, down, down_sf, 256, 8, 8, 4, 2048, 0, 256, 2.5)
    out = ops.trtllm_fp8_block_scale_moe(logits, None, x, x_sf, *rest)
    assert (out.shape, out.dtype) == ((3, 7168), BF16)


def test_the_ops_run_under_a_fake_mode():
    with FakeTensorMode():
        a, b, d = (torch.empty(s, dtype=BF16) for s in ((3, 64), (8, 64), (3, 8)))
        assert ops.bf16_gemm_nt(a, b, d) is None
        ids = torch.empty(3, 2, dtype=torch.int32)
        fc1, fc2 = torch.empty(4, 16, 64, dtype=BF16), torch.empty(4, 64, 8, dtype=BF16)
        out = ops.cutlass_fused_moe(a, ids, torch.empty(3, 2), fc1, fc2, BF16, [])
        assert out.shape == (3, 64)
