"""The ops under Inductor, export and torch's own checks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxwarm.ops import _gemm
from tests.fxwarm.ops.tensors import BF16, F32, fp8_blocks, fp8_rows, randn

ops = torch.ops.fxwarm
N, K, G = 256, 128, 3


class Layers(nn.Module):
    """Every mutating op once, with outputs that are views, reused, half written and never read."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensors in {
            "dense": fp8_blocks(N, K),
            "group": fp8_blocks(G, N, K),
            "heads": fp8_blocks(2, 128, 128),
        }.items():
            self.register_buffer(name, tensors[0])
            self.register_buffer(f"{name}_sf", tensors[1])
        self.register_buffer("fn", randn(24, K))
        self.register_buffer("plain", randn(G, N, K, dtype=BF16))

    def forward(self, x, x_sf, y, layout, counts):
        m = x.shape[0]
        both = torch.zeros(2 * m, N, dtype=BF16)
        ops.fp8_gemm_nt(x, x_sf, self.dense, self.dense_sf, both[:m])
        ops.bf16_gemm_nt(y, self.plain[0], both[m:])
        d = torch.full((m, N), 3.0)
        before = d + 1
        ops.fp8_gemm_nt(x, x_sf, self.dense, self.dense_sf, d, d)
        grouped = torch.ones(m, N, dtype=BF16)
        args = (x, x_sf, self.group, self.group_sf, grouped, layout)
        ops.m_grouped_fp8_gemm_nt_contiguous(*args)
        ops.m_grouped_bf16_gemm_nt_contiguous(y, self.plain, both[:m], layout)
        masked = torch.ones(G, m, N, dtype=BF16)
        xs, sfs = x.expand(G, -1, -1).contiguous(), x_sf.expand(G, -1, -1).contiguous()
        ops.m_grouped_fp8_gemm_nt_masked(xs, sfs, self.group, self.group_sf, masked, counts, m // 2)
        heads = torch.empty(m, 2, 128, dtype=BF16)
        pair, pair_sf = torch.stack([x, x], 1), torch.stack([x_sf, x_sf], 1)
        ops.fp8_einsum("bhr,hdr->bhd", pair, pair_sf, self.heads, self.heads_sf, heads)
        back = torch.empty(m, 2, 128, dtype=BF16)
        ops.einsum("bhd,hdr->bhr", heads, self.plain[:2, :128].contiguous(), back)
        partial, sqr_sum = torch.empty(2, m, 24), torch.empty(2, m)
        ops.tf32_hc_prenorm_gemm(y, self.fn, partial, sqr_sum, 2)
        return both * 2, before, d, grouped, masked, back, partial.sum(0), sqr_sum.sum(0).rsqrt()


def inputs(m: int) -> tuple[torch.Tensor, ...]:
    x, x_sf, _ = fp8_rows(m, K)
    layout = torch.arange(m, dtype=torch.int32) % (G + 1) - 1
    counts = torch.tensor([0, m // 2, m], dtype=torch.int32)
    return x, x_sf, randn(m, K, dtype=BF16), layout, counts


@pytest.fixture(scope="module")
def layers() -> Layers:
    return Layers()


def agree(got, wanted) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_agrees_with_eager(layers, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(layers, backend="inductor", dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        for m in (9, 30) if dynamic else (9,):
            agree(compiled(*inputs(m)), layers(*inputs(m)))


def test_an_exported_program_agrees_and_serves_every_m(layers):
    batch = torch.export.Dim("batch", min=2, max=4096)
    rows = {0: batch}
    program = torch.export.export(
        layers, inputs(9), dynamic_shapes=(rows, rows, rows, rows, None), strict=False
    )
    for m in (9, 30):
        agree(program.module()(*inputs(m)), layers(*inputs(m)))
    again = program.run_decompositions()
    targets = [str(node.target) for node in again.graph.nodes]
    assert sum("auto_functionalized" in target for target in targets) == 9
    agree(again.module()(*inputs(30)), layers(*inputs(30)))


def test_inductor_keeps_column_major_scales(monkeypatch):
    (a, a_sf, _), (b, b_sf, _) = fp8_rows(5, 256), fp8_blocks(N, 256)
    seen, dequantize = [], _gemm.dequantize

    def spy(x, sf, gran_mn, gran_k):
        if gran_mn == 1:
            seen.append(sf.stride())
        return dequantize(x, sf, gran_mn, gran_k)

    def run(a, a_sf):
        d = torch.empty(a.shape[0], N, dtype=BF16)
        ops.fp8_gemm_nt(a, (a_sf * 2).t().contiguous().t(), b, b_sf, d)
        return d

    monkeypatch.setattr(_gemm, "dequantize", spy)
    torch._dynamo.reset()
    torch.compile(run, backend="inductor", dynamic=True, fullgraph=True)(a, a_sf)
    assert seen == [(1, 5)]


def test_a_moe_is_one_node_and_agrees():
    fc1, fc2 = randn(4, 32, 64, dtype=BF16), randn(4, 64, 16, dtype=BF16)

    def run(x, ids, scales):
        return ops.cutlass_fused_moe(x, ids, scales, fc1, fc2, BF16, []) + x

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="inductor", dynamic=True, fullgraph=True)
    for m in (3, 8):
        ids = torch.arange(2 * m, dtype=torch.int32).view(m, 2) % 4
        args = (randn(m, 64, dtype=BF16), ids, torch.rand(m, 2))
        agree([compiled(*args)], [run(*args)])


CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def calls() -> dict[str, tuple]:
    x, x_sf, y, layout, counts = inputs(6)
    (w, w_sf, _), (g, g_sf, _), (h, h_sf, _) = (
        fp8_blocks(N, K),
        fp8_blocks(G, N, K),
        fp8_blocks(2, N, K),
    )
    plain, d = randn(G, N, K, dtype=BF16), torch.zeros(6, N, dtype=BF16)
    xs, sfs = x.expand(G, -1, -1).contiguous(), x_sf.expand(G, -1, -1).contiguous()
    (heads, heads_sf, _), wide = fp8_rows(6, 2, K), torch.zeros(6, 2, N, dtype=BF16)
    ids, one = layout.clamp_min(0).view(6, 1), torch.ones(1)
    fc1, fc2 = randn(G, 64, K, dtype=BF16), randn(G, K, 32, dtype=BF16)
    masked = torch.zeros(G, 6, N, dtype=BF16)
    return {
        "fp8_gemm_nt": (x, x_sf, w, w_sf, d, d + 1, [1, 128, 128], "nk", True),
        "bf16_gemm_nt": (y, plain[0], d),
        "m_grouped_fp8_gemm_nt_contiguous": (x, x_sf, g, g_sf, d, layout),
        "m_grouped_bf16_gemm_nt_contiguous": (y, plain, d, layout),
        "m_grouped_fp8_gemm_nt_masked": (xs, sfs, g, g_sf, masked, counts, 4),
        "einsum": ("bhr,hdr->bhd", randn(6, 2, K, dtype=BF16), plain[:2], wide),
        "fp8_einsum": ("bhr,hdr->bhd", heads, heads_sf, h, h_sf, wide),
        "tf32_hc_prenorm_gemm": (y, randn(24, K), torch.zeros(2, 6, 24), torch.zeros(2, 6), 2),
        "cutlass_fused_moe": (y, ids, torch.ones(6, 1), fc1, fc2, F32, []),
        "bmm_fp8": (xs, xs.mT, one, one, BF16),
        "mono_moe": (y, randn(6, G, dtype=BF16), h[:1].expand(G, -1, -1).contiguous(),
                     h_sf[:1].expand(G, -1, -1).contiguous(), *fp8_blocks(G, K, 128)[:2], 2),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_torch_finds_no_fault_in_an_op(name):
    args = calls()[name]
    fp8 = any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in args)
    # torch's schema check compares inputs by allclose, which has no float8
    checks = CHECKS if fp8 else ("test_schema", *CHECKS)
    torch.library.opcheck(getattr(ops, name).default, args, test_utils=checks, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", calls())
def test_an_op_writes_only_what_its_schema_says(name):
    args = calls()[name]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    op = getattr(ops, name).default
    out = op(*args)
    for argument, value, old in zip(op._schema.arguments, args, before, strict=False):
        if isinstance(value, torch.Tensor):
            same = torch.equal(value.view(torch.uint8), old.view(torch.uint8))
            assert same is not (argument.alias_info is not None), argument.name
    assert (out is None) == (not op._schema.returns)
