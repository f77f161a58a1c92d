"""The CPU references of FlashInfer's ops against a loop over tokens and experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxwarm.exc import ShapeMismatchError
from fxwarm.ops import per_block_cast_to_fp8
from fxwarm.ops.scales import FP8, dequantize
from tests.fxwarm.ops.tensors import BF16, F32, close, randn

ops = torch.ops.fxwarm
E, H, I, TOP = 4, 256, 128, 2  # noqa: E741 (the paper's letters)


def route(m: int, experts: int = E) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m)
    scores = torch.rand(m, experts, generator=generator)
    scales, ids = scores.topk(TOP)
    return ids.int(), scales


def loop(x, ids, scales, fc1, fc2, up_first=True):
    out = torch.zeros(x.shape[0], fc2.shape[1])
    for i in range(x.shape[0]):
        for e, scale in zip(ids[i].tolist(), scales[i].tolist(), strict=True):
            if 0 <= e < fc1.shape[0]:
                up, gate = (fc1[e] @ x[i]).chunk(2)
                up, gate = (up, gate) if up_first else (gate, up)
                out[i] += scale * (fc2[e] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
@pytest.mark.parametrize("m", [0, 1, 7])
def test_a_moe_takes_the_up_half_first(m, dtype):
    x, fc1, fc2 = (
        randn(m, H, dtype=dtype),
        randn(E, 2 * I, H, dtype=dtype),
        randn(E, H, I, dtype=dtype),
    )
    ids, scales = route(m)
    out = ops.cutlass_fused_moe(x, ids, scales, fc1, fc2, BF16, [])
    assert out.dtype == BF16
    wanted = loop(x.float(), ids, scales, fc1.float(), fc2.float())
    assert close(out, wanted)
    if m:
        assert not close(
            out, loop(x.float(), ids, scales, fc1.float(), fc2.float(), up_first=False), 0.1
        )


def test_deepseeks_blocks_are_dequantised():
    x = randn(6, H, dtype=BF16)
    (fc1, sf1), (fc2, sf2) = (per_block_cast_to_fp8(randn(E, *s)) for s in ((2 * I, H), (H, I)))
    ids, scales = route(6)
    out = ops.cutlass_fused_moe(
        x, ids, scales, fc1, fc2, BF16, [sf1, sf2], use_deepseek_fp8_block_scale=True
    )
    wide = dequantize(fc1, sf1, 128, 128), dequantize(fc2, sf2, 128, 128)
    assert close(out, loop(x.float(), ids, scales, *wide), 0.1)  # activations lose 1/16 an element


def test_fp8_with_a_scale_a_tensor():
    x = (randn(6, H) * 8).to(FP8)
    fc1, fc2 = (randn(E, 2 * I, H) * 8).to(FP8), (randn(E, H, I) * 8).to(FP8)
    in1, w1, w2 = torch.tensor(0.125), torch.full((E,), 0.1), torch.arange(1.0, E + 1) / 8
    in2 = torch.tensor(0.05)  # multiplies the activation before it is rounded to fp8
    ids, scales = route(6)
    quant = [in1 * w1, in2, w2 / in2, in1]
    out = ops.cutlass_fused_moe(x, ids, scales, fc1, fc2, BF16, quant)
    wide = fc1.float() * w1[:, None, None], fc2.float() * w2[:, None, None]
    assert close(out, loop(x.float() * in1, ids, scales, *wide), 0.1)


def test_the_ranks_of_expert_and_tensor_parallelism_add_up():
    x, fc1, fc2 = randn(6, H), randn(E, 2 * I, H), randn(E, H, I)
    bias1, bias2 = randn(E, 2 * I), randn(E, H)
    ids, scales = route(6)
    biases = {"fc1_expert_biases": bias1, "fc2_expert_biases": bias2}
    whole = ops.cutlass_fused_moe(x, ids, scales, fc1, fc2, F32, [], **biases)
    half = E // 2
    parts = [
        ops.cutlass_fused_moe(
            x, ids, scales, fc1[s], fc2[s], F32, [], bias1[s], bias2[s], ep_size=2, ep_rank=rank
        )
        for rank, s in enumerate((slice(0, half), slice(half, E)))
    ]
    assert close(sum(parts), whole, 1e-5)
    up, gate = fc1.chunk(2, 1)
    up_bias, gate_bias = bias1.chunk(2, 1)
    parts = [
        ops.cutlass_fused_moe(
            x, ids, scales, torch.cat([up[:, s], gate[:, s]], 1), fc2[..., s], F32, [],
            torch.cat([up_bias[:, s], gate_bias[:, s]], 1), bias2, tp_size=2, tp_rank=rank,
        )
        for rank, s in enumerate((slice(0, I // 2), slice(I // 2, I)))
    ]  # fmt: skip
    assert close(sum(parts), whole, 1e-5)


def test_swiglu_with_alpha_beta_and_limit():
    x, fc1, fc2 = randn(3, H), randn(E, 2 * I, H), randn(E, H, I)
    ids, scales = route(3)
    alpha, beta, limit = (torch.full((E,), v) for v in (1.7, 1.0, 7.0))
    out = ops.cutlass_fused_moe(
        x, ids, scales, fc1, fc2, F32, [], None, None, None, alpha, beta, limit, activation_type=5
    )
    wanted = torch.zeros(3, H)
    for i in range(3):
        for e, scale in zip(ids[i].tolist(), scales[i].tolist(), strict=True):
            up, gate = (fc1[e] @ x[i]).chunk(2)
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            wanted[i] += scale * (fc2[e] @ (gate * torch.sigmoid(1.7 * gate) * (up + 1)))
    assert close(out, wanted, 1e-5)


def test_what_has_no_reference_says_so():
    x, ids, scales = randn(3, H, dtype=BF16), *route(3)
    fc1, fc2 = randn(E, I, H, dtype=BF16), randn(E, H, I, dtype=BF16)
    with pytest.raises(NotImplementedError, match="activation_type=6"):
        ops.cutlass_fused_moe(x, ids, scales, fc1, fc2, BF16, [], activation_type=6)


def test_a_bmm_has_one_scale_a_tensor():
    a, b = randn(2, 5, 64).to(FP8), randn(2, 64, 32).to(FP8)
    two, three = torch.tensor(2.0), torch.tensor(3.0)
    out = ops.bmm_fp8(a, b, two, three, BF16)
    assert close(out, 6 * torch.bmm(a.float(), b.float()))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_mono_moe_routes_and_takes_the_gate_half_first(scoring, renormalize):
    x, logits = randn(5, H, dtype=BF16), randn(5, E, dtype=BF16)
    (up, up_sf), (down, down_sf) = (
        per_block_cast_to_fp8(randn(E, *s)) for s in ((2 * I, H), (H, I))
    )
    args = (x, logits, up, up_sf, down, down_sf, TOP, scoring, renormalize)
    out = ops.mono_moe(*args)
    scores = logits.float().softmax(1) if scoring == "softmax" else logits.float().sigmoid()
    scales, ids = scores.topk(TOP)
    scales = scales / scales.sum(1, keepdim=True) if renormalize else scales
    wide = dequantize(up, up_sf, 128, 128), dequantize(down, down_sf, 128, 128)
    assert close(out, loop(x.float(), ids, scales, *wide, up_first=False), 0.1)

    gate, linear = up.view(torch.uint8).chunk(2, 1)
    woven = torch.empty_like(up.view(torch.uint8))
    for block in range(I // 64):
        for wg in range(2):
            for w in range(4):
                to = 128 * block + 64 * wg + 16 * w
                rows = slice(64 * block + 32 * wg + 8 * w, 64 * block + 32 * wg + 8 * w + 8)
                woven[:, to : to + 8], woven[:, to + 8 : to + 16] = gate[:, rows], linear[:, rows]
    args = (x, logits, woven.view(FP8), up_sf, down, down_sf, TOP, scoring, renormalize)
    assert torch.equal(ops.mono_moe(*args, interleave_up=False), out)


@pytest.mark.parametrize("quantised", [True, False])
def test_a_dense_gemm_in_deepseeks_blocks(quantised):
    x, w = randn(5, H, dtype=BF16), randn(192, H, dtype=BF16)
    weight, scale = per_block_cast_to_fp8(w)
    arguments = {"weight": weight, "weight_scale": scale} if quantised else {"weight": w}
    out = ops.fp8_blockscale_gemm_sm90(x, **arguments)
    assert out.dtype == BF16
    assert out.shape == (5, 192)
    assert close(out, x.float() @ w.float().T, 0.06)


def test_scales_that_are_lacking_or_too_many_are_told():
    x, w = randn(5, H, dtype=BF16), randn(192, H, dtype=BF16)
    weight, scale = per_block_cast_to_fp8(w)
    with pytest.raises(ShapeMismatchError, match="needs its scales"):
        ops.fp8_blockscale_gemm_sm90(x.to("meta"), weight.to("meta"))
    with pytest.raises(ShapeMismatchError, match="give no weight_scale"):
        ops.fp8_blockscale_gemm_sm90(x.to("meta"), w.to("meta"), None, scale.to("meta"))
