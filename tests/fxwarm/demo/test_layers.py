"""The demo's layers compute what they replace, and ask for the rows that engines ask for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxwarm.demo import layers
from fxwarm.demo.layers import Fp8Experts, Fp8Linear, fuse, padded_rows

torch.manual_seed(0)


def linears(*sizes: int, k: int = 256) -> list[nn.Linear]:
    return [nn.Linear(k, n, bias=False).bfloat16() for n in sizes]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def test_a_linear_is_right_up_to_fp8_rounding():
    (linear,) = linears(384)
    x = torch.randn(2, 5, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        assert Fp8Linear([linear])(x).shape == (2, 5, 384)
        assert relative(Fp8Linear([linear])(x), linear(x)) < 0.06


def test_the_parts_of_a_fused_linear_equal_the_linears_one_by_one():
    several = linears(256, 128, 128)
    parts = fuse(several)
    x = torch.randn(7, 256, dtype=torch.bfloat16)
    for part, linear in zip(parts, several):
        assert torch.equal(part(x), Fp8Linear([linear])(x))


def test_a_fused_linear_is_computed_once_an_input_and_lets_go():
    parts = fuse(linears(128, 128))
    calls = []
    parts[0].fused.register_forward_hook(lambda *_: calls.append(1))
    x, y = torch.randn(3, 256, dtype=torch.bfloat16), torch.randn(3, 256, dtype=torch.bfloat16)
    for part in parts:
        part(x)
    assert len(calls) == 1
    assert parts[0].shared.x is None
    assert parts[0].shared.y is None
    parts[0](x)
    assert torch.equal(parts[1](y), fuse_alone(parts[1], y)), (
        "a part must not answer for another input"
    )
    assert len(calls) == 4


def fuse_alone(part: layers.Part, x: torch.Tensor) -> torch.Tensor:
    return part.fused(x)[..., part.columns]


def test_experts_compute_what_transformers_experts_compute():
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = transformers.Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=128, num_experts=6, num_experts_per_tok=2
    )
    theirs = Qwen3MoeExperts(config).bfloat16()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.05)
    ours = Fp8Experts(theirs.gate_up_proj, theirs.down_proj, theirs.act_fn)
    x = torch.randn(300, 256, dtype=torch.bfloat16)
    weights, index = torch.randn(300, 6).softmax(-1).topk(2)
    with torch.no_grad():
        assert (
            relative(ours(x, index, weights.bfloat16()), theirs(x, index, weights.bfloat16())) < 0.1
        )


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "rows"),
    [(1, 8, 128, 1024), (100, 8, 128, 17152), (8192, 8, 128, 81792)],
)
def test_rows_are_those_of_vllm(tokens, k, experts, rows):
    assert padded_rows(tokens, k, experts) == rows
    assert rows == 128 * math.ceil((k * tokens + min(k * tokens, experts) * 127) / 128)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(1, 4), st.integers(4, 9), st.randoms())
def test_every_choice_has_a_row_of_its_own_in_a_block_of_its_expert(tokens, k, experts, random):
    chosen = torch.tensor([random.sample(range(experts), k) for _ in range(tokens)])
    places, layout = layers._place(chosen, experts)
    assert len(set(places.tolist())) == tokens * k
    assert torch.equal(layout[places].long(), chosen.reshape(-1))
    assert int((layout >= 0).sum()) == tokens * k
    for block in layout.view(-1, 128).tolist():
        assert len({e for e in block if e >= 0}) <= 1
        assert block[0] >= 0 or set(block) == {-1}, (
            "DeepGEMM reads a block's expert from its first row"
        )
