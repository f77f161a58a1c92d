"""On a Hopper GPU: each op gives what the library gives, bit for bit, and what the CPU reference gives, nearly."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.fxwarm.ops.tensors import BF16, fp8_blocks, fp8_rows, randn

ops = torch.ops.fxwarm
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or torch.cuda.get_device_capability()[0] != 9
        or importlib.util.find_spec("deep_gemm") is None,
        reason="needs a Hopper GPU and deep_gemm",
    ),
]
N, K, G = 256, 512, 2


def calls() -> dict[str, tuple]:
    """Return the arguments of one call an op, on the CPU; the last tensors that an op writes are zeros."""
    m = 256
    (x, x_sf, _), (w, w_sf, _), (g, g_sf, _) = fp8_rows(m, K), fp8_blocks(N, K), fp8_blocks(G, N, K)
    (one, one_sf, _), y = fp8_rows(N, K), randn(m, K, dtype=BF16)
    plain, d = randn(G, N, K, dtype=BF16), torch.zeros(m, N, dtype=BF16)
    layout = torch.arange(m, dtype=torch.int32) // 128
    ends = torch.tensor([100, 128 + 60], dtype=torch.int32)
    xs, sfs = fp8_rows(G, m, K)[:2]
    counts = torch.tensor([3, m], dtype=torch.int32)
    heads, heads_sf, _ = fp8_rows(m, 8, K)
    h, h_sf, _ = fp8_blocks(8, N, K)
    wide, sums = torch.zeros(m, 8, N, dtype=BF16), torch.zeros(128, 64)
    mixed = randn(m, 8, K, dtype=BF16), randn(8, N, K, dtype=BF16)
    plain_nt = "m_grouped_bf16_gemm_nt_contiguous"
    fp8_nt = "m_grouped_fp8_gemm_nt_contiguous"
    return {
        "fp8_gemm_nt": (x, x_sf, w, w_sf, d),
        "fp8_gemm_nt 1d1d": (x, x_sf, one, one_sf, d.float(), randn(m, N), [1, 1, 128]),
        "bf16_gemm_nt": (y, plain[0], d),
        fp8_nt: (x, x_sf, g, g_sf, d, layout),
        f"{fp8_nt} psum": (x, x_sf, g, g_sf, d, ends, None, None, False, True),
        plain_nt: (y, plain, d, layout),
        "m_grouped_fp8_gemm_nt_masked": (
            xs,
            sfs,
            g,
            g_sf,
            torch.zeros(G, m, N, dtype=BF16),
            counts,
            130,
        ),
        "einsum": ("bhr,hdr->bhd", *mixed, wide),
        "einsum back": (
            "bhd,hdr->bhr",
            mixed[0][..., :N].contiguous(),
            mixed[1],
            randn(m, 8, K, dtype=BF16) * 0,
        ),
        "fp8_einsum": ("bhr,hdr->bhd", heads, heads_sf, h, h_sf, wide),
        "tf32_hc_prenorm_gemm": (y, randn(24, K), torch.zeros(3, m, 24), torch.zeros(3, m), 3),
        "tf32_hc_prenorm_gemm whole": (y, randn(24, K), torch.zeros(m, 24), torch.zeros(m)),
        "einsum sum": (
            "bmk,bnk->mn",
            randn(5, 128, 128, dtype=BF16),
            randn(5, 64, 128, dtype=BF16),
            sums,
            sums,
        ),
        **forms(x, x_sf, w, w_sf, d),
        "bf16_gemm_nn": (y, plain[0].t().contiguous(), d),
        "bf16_gemm_tn": (y.t().contiguous(), plain[0].t().contiguous(), d),
        "bf16_gemm_tt": (y.t().contiguous(), plain[0], d),
        "m_grouped_bf16_gemm_nn_contiguous": (y, plain.mT.contiguous(), d, layout),
        "m_grouped_fp8_gemm_nn_contiguous": (x, x_sf, g.mT, g_sf.mT, d, layout),
        "m_grouped_bf16_gemm_nt_masked": (
            randn(G, m, K, dtype=BF16),
            plain,
            torch.zeros(G, m, N, dtype=BF16),
            counts,
            130,
        ),
        "fp8_gemm_nt_skip_head_mid": (
            x,
            x_sf,
            w,
            w_sf,
            torch.zeros(m, 320, dtype=BF16),
            [128, 64, 128],
        ),
        **k_grouped(),
        "fp8_mqa_logits": logits(),
        "fp8_mqa_logits bfloat16": (*logits(), 0, BF16),
    }


def forms(x, x_sf, w, w_sf, d) -> dict[str, tuple]:
    """The library takes FP8 where K has stride 1: views of what nt takes."""
    at, bt = (x.t(), x_sf.t()), (w.t(), w_sf.t())
    return {
        "fp8_gemm_nn": (x, x_sf, *bt, d),
        "fp8_gemm_tn": (*at, *bt, d),
        "fp8_gemm_tt": (*at, w, w_sf, d),
    }


def k_grouped() -> dict[str, tuple]:
    ks, rows = [128, 256], 384
    sizes, d = torch.tensor(ks, dtype=torch.int32), torch.zeros(2, 256, 128)
    a, b = randn(rows, 256, dtype=BF16), randn(rows, 128, dtype=BF16)
    flat = []
    for x in (a, b):
        bits, sf, _ = fp8_rows(x.shape[1], rows)
        flat += [torch.cat([p.flatten() for p in bits.split(ks, 1)]), sf]
    return {
        "k_grouped_bf16_gemm_tn_contiguous": (a, b, d, ks, sizes, d),
        "k_grouped_fp8_gemm_nt_contiguous": (*flat, d, ks, sizes, d),
    }


def logits() -> tuple:
    rows, keys = 256, 512
    q, k = randn(rows, 32, 128).to(torch.float8_e4m3fn), randn(keys, 128).to(torch.float8_e4m3fn)
    end = torch.arange(rows, dtype=torch.int32) + 1
    return q, k, randn(keys).abs(), randn(rows, 32), torch.zeros(rows, dtype=torch.int32), end, True


def written(op: torch._ops.OpOverload, args: tuple) -> list[torch.Tensor]:
    return [a for s, a in zip(op._schema.arguments, args, strict=False) if s.alias_info is not None]


@pytest.mark.parametrize("name", calls())
def test_cuda_agrees_with_the_cpu_reference(name):
    op = getattr(ops, name.split()[0]).default
    args = calls()[name]
    moved: dict[int, torch.Tensor] = {}  # c may be d
    cuda = [moved.setdefault(id(a), a.cuda()) if isinstance(a, torch.Tensor) else a for a in args]
    expected, returned = op(*args), op(*cuda)
    pairs = [*zip(written(op, cuda), written(op, args), strict=True)]
    if returned is not None:
        assert returned.stride() == expected.stride()
        pairs.append((returned, expected))
    for got, wanted in pairs:
        got, wanted = got.cpu().float(), wanted.float()
        assert torch.equal(got.isinf(), wanted.isinf())
        got, wanted = (x.masked_fill(x.isinf(), 0) for x in (got, wanted))
        if "psum" in name:  # a kernel writes padding rows too
            rows = torch.cat([torch.arange(100), torch.arange(128, 188)])
            got, wanted = got[rows], wanted[rows]
        if "masked" in name:
            got, wanted = got[:, :3], wanted[:, :3]
        assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()


def test_an_op_is_the_librarys_call_bit_for_bit():
    import deep_gemm

    x, x_sf, w, w_sf, d = (t.cuda() for t in calls()["fp8_gemm_nt"])
    direct = torch.zeros_like(d)
    deep_gemm.fp8_gemm_nt((x, x_sf), (w, w_sf), direct)
    ops.fp8_gemm_nt(x, x_sf, w, w_sf, d)
    assert torch.equal(d, direct)
    compiled = torch.zeros_like(d)
    torch.compile(lambda out: ops.fp8_gemm_nt(x, x_sf, w, w_sf, out), fullgraph=True)(compiled)
    assert torch.equal(compiled, direct)


def test_paged_logits_and_their_schedule_are_warm_and_the_librarys_bit_for_bit():
    import deep_gemm

    import fxwarm
    from fxwarm.backend import fxwarm as backend

    def schedule(lens):
        return deep_gemm.get_paged_mqa_logits_metadata(lens, 64, deep_gemm.get_num_sms())

    def score(q, cache, weights, lens, table, meta):
        paged = deep_gemm.fp8_paged_mqa_logits
        return paged(q, cache, weights, lens, table, meta, 1024, clean_logits=False)

    batch = 256  # a multiple of 32, where the schedule's kernel has no room to spare
    lens = torch.randint(300, 600, (batch, 1), dtype=torch.int32).cuda()
    meta = torch.compile(schedule, backend=backend, dynamic=False)(lens)
    assert torch.equal(meta, schedule(lens))
    q = randn(batch, 1, 64, 128).to(torch.float8_e4m3fn).cuda()
    cache = torch.zeros(4096, 64, 1, 132, dtype=torch.uint8, device="cuda")
    table = torch.randint(0, 4096, (batch, 16), dtype=torch.int32).cuda()
    args = q, cache, randn(batch, 64).cuda(), lens, table, meta
    out = torch.compile(score, backend=backend, dynamic=False)(*args)
    assert torch.equal(out[:, :300], score(*args)[:, :300])
    reports = fxwarm.reports()[-2:]
    assert [(r.status, len(r.loaded), r.gaps) for r in reports] == [("complete", 1, ())] * 2
