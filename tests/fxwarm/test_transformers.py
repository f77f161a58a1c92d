"""transformers' own fp8 models, as it builds them: every GEMM is found, with the rows that it pads its experts to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxwarm
import fxwarm.substitute
from fxwarm import exc

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.deepgemm")

OLDER = os.environ.get("FXWARM_TEST_TRANSFORMERS", "")
"""A folder with another version of transformers, for a second run of these tests in a process of its own."""


def fp8(model, config):
    """What transformers' quantizer does to a model before it loads fp8 weights."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    quantization = FineGrainedFP8Config(weight_block_size=(128, 128))
    return replace_with_fp8_linear(model, ["lm_head"], quantization).eval()


def qwen(layers: int = 2):
    config = transformers.Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        vocab_size=1024,
    )  # fmt: skip
    config._experts_implementation = "deepgemm"
    with torch.device("meta"):
        return fp8(transformers.Qwen3MoeForCausalLM(config).bfloat16(), config)


def deepseek(layers: int = 2):
    config = transformers.DeepseekV3Config(
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        vocab_size=1024,
        num_nextn_predict_layers=0,
    )
    config._experts_implementation = "deepgemm"
    with torch.device("meta"):
        return fp8(transformers.DeepseekV3ForCausalLM(config).bfloat16(), config)


@pytest.fixture(scope="module")
def ids():
    return torch.zeros(1, 64, dtype=torch.long, device="meta")


def weights(shapes, op: str) -> set[tuple[int, ...]]:
    return {tuple(map(int, call["b"].dims)) for call in shapes.calls if call.op == op}


def rows(shapes) -> set[str]:
    return {c["a"].dims[0].expr for c in shapes.calls if c.op.startswith("m_grouped")}


@pytest.mark.parametrize("target", ["h200", fxwarm.Target.named("h100")])
def test_qwen3_moe_shows_every_gemm_of_its_experts_and_linears(target, ids):
    shapes = fxwarm.trace(qwen(), ids, use_cache=False, target=target)
    assert not shapes.gaps
    assert weights(shapes, "fp8_gemm_nt") == {(4096, 2048), (512, 2048), (2048, 4096)}
    assert weights(shapes, "m_grouped_fp8_gemm_nt_contiguous") == {
        (128, 1536, 2048),
        (128, 2048, 768),
    }
    assert rows(shapes) == {"127*Min(128, 8*s0) + 8*s0"}
    (dense, *_) = (c for c in shapes.calls if c.op == "fp8_gemm_nt")
    assert (dense["a"].dims[0].lower, dense["a"].dims[0].upper) == (1, 8192)
    grouped = next(c for c in shapes.calls if c.op.startswith("m_grouped"))["a"].dims[0]
    assert (grouped.lower, grouped.upper) == (1024, 8 * 8192 + 128 * 127)
    assert {17056} <= set(grouped.attainable().tolist())  # 100 tokens: no multiple of 128
    assert grouped.is_exact


def test_deepseek_v3_shows_its_latent_projections_and_256_experts(ids):
    shapes = fxwarm.trace(deepseek(), ids, use_cache=False, target="h200")
    assert not shapes.gaps
    assert weights(shapes, "fp8_gemm_nt") == {
        (1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384),  # attention
        (18432, 7168), (7168, 18432),  # the dense layer
        (2048, 7168), (7168, 2048),  # the shared expert
    }  # fmt: skip
    assert weights(shapes, "m_grouped_fp8_gemm_nt_contiguous") == {
        (256, 4096, 7168),
        (256, 7168, 2048),
    }
    assert rows(shapes) == {"127*Min(256, 8*s0) + 8*s0"}


def test_experts_that_are_stored_transposed_show_their_bfloat16_gemms():
    config = transformers.GptOssConfig(
        num_hidden_layers=2, hidden_size=1024, intermediate_size=512, num_local_experts=16,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=1024,
    )  # fmt: skip
    config._experts_implementation = "deepgemm"
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(config).bfloat16().eval()
        x = torch.empty(1, 64, 1024, dtype=torch.bfloat16)
    # one layer of experts: 5.17 makes the mask of this model's attention on two devices
    shapes = fxwarm.trace(model.model.layers[0].mlp, x, target="h200")
    assert not shapes.gaps, shapes.gaps
    assert weights(shapes, "m_grouped_bf16_gemm_nn_contiguous") == {
        (16, 1024, 1024),
        (16, 512, 1024),
    }


def test_without_a_target_or_a_gpu_there_is_a_gap_and_no_empty_plan(ids):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU to answer")
    shapes = fxwarm.trace(qwen(1), ids, use_cache=False)
    assert shapes.gaps
    assert 'trace it with target="h200"' in shapes.gaps[0].reason
    assert not shapes.is_complete


def test_answers_are_for_the_model_only_and_end_with_the_block():
    truth, capability = torch.cuda.is_available(), torch.cuda.get_device_capability

    def asks(x):
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
            return x + torch.cuda.get_device_capability()[1] + 7
        return x

    with fxwarm.substitute.questions("h200") as denied:
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties().multi_processor_count == 132
        out = torch.compile(asks, backend="eager", fullgraph=True)(torch.zeros(2))
    assert out.tolist() == [7, 7]
    assert not denied
    assert torch.cuda.is_available() == truth
    assert torch.cuda.get_device_capability is capability
    with pytest.raises(exc.UnknownTargetError), fxwarm.substitute.questions("h2000"):
        pass
    with (
        pytest.raises(ValueError, match="no CUDA architecture"),
        fxwarm.substitute.questions("cpu"),
    ):
        pass


def test_the_same_holds_for_an_older_transformers():
    if not OLDER or "FXWARM_TEST_INNER" in os.environ:
        pytest.skip("FXWARM_TEST_TRANSFORMERS names no folder")
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([OLDER, str(root)]), "FXWARM_TEST_INNER": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
