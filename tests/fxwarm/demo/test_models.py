"""The big models of the demo have the shapes of the recorded ones, and trace as one graph in little time and memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from fxwarm import exc
from fxwarm.demo import facts, models
from tests.conftest import shared

RECORDED = {"qwen3-30b-a3b": "Qwen3-30B-A3B-FP8", "deepseek-v3": "DeepSeek-V3/R1"}
LAYERS = {"qwen3-30b-a3b": 1, "deepseek-v3": 2}
"""One mixture-of-experts layer, and a dense one where the model has them."""
DEPTH = {"qwen3-30b-a3b": 48, "deepseek-v3": 61}
MOST_SECONDS, MOST_BYTES = 120, 4 << 30


@pytest.fixture(scope="module")
def traced():
    found: dict[str, facts.Traced] = {}

    def get(name: str) -> facts.Traced:
        if name not in found:
            torch._dynamo.reset()
            found[name] = facts.trace_model(name, layers=LAYERS[name])
        return found[name]

    return get


def recorded(name: str) -> set[tuple[int, ...]]:
    """Return the fp8 weight shapes of a model at TP 1: (N, K) and (G, N, K, top-k)."""
    model = json.loads(shared("model_shapes.json").read_text())["models"][RECORDED[name]]
    dense = [w for w in model["dense"].values() if w["dtype"] == "fp8_block128"]
    grouped = model["grouped"]
    out = {tuple((w.get("any_tp") or w["tp"]["1"])[:2]) for w in dense}
    return out | {(*shape[:3], grouped["topk"]) for shape in grouped["tp"]["1"].values()}


@pytest.mark.parametrize("name", RECORDED)
def test_weight_shapes_equal_the_recorded_ones_at_tp_1(traced, name):
    assert {w.shape for w in traced(name).weights} == recorded(name)


@pytest.mark.parametrize("name", RECORDED)
def test_a_model_has_no_gap_and_nothing_fixed(traced, name):
    shapes = traced(name).shapes
    assert not shapes.gaps
    assert not shapes.unknown
    assert not shapes.specialized


@pytest.mark.parametrize("name", RECORDED)
def test_rows_are_all_token_counts_and_their_padded_images(traced, name):
    for call in traced(name).shapes.calls:
        rows = set(call["a"].dims[0].attainable().tolist())
        if call.op == "fp8_gemm_nt":
            assert rows == set(range(1, 8193))
        else:
            groups = int(call["b"].dims[0])
            wanted = {
                128 * math.ceil((8 * t + min(8 * t, groups) * 127) / 128) for t in range(1, 8193)
            }
            assert rows == wanted


@pytest.mark.parametrize("name", RECORDED)
def test_each_layer_makes_the_same_calls(traced, name):
    for call, site in traced(name).shapes.items():
        assert site.count <= LAYERS[name], f"{call} is made more than once a layer"


def test_the_configuration_of_deepseek_v3_is_that_of_transformers():
    from transformers import DeepseekV3Config

    default = DeepseekV3Config()
    own = models.MODELS["deepseek-v3"].config
    longer = {
        "rope_parameters",
        "max_position_embeddings",
    }  # the checkpoint's yarn, which the class leaves out
    assert {k: v for k, v in own.items() if k not in longer and getattr(default, k) != v} == {}


def test_a_cut_keeps_an_expert_layer():
    assert models.config("deepseek-v3", 4).first_k_dense_replace == 3
    assert models.config("deepseek-v3", 2).first_k_dense_replace == 1
    with pytest.raises(exc.OptionError, match="1 to 48"):
        models.config("qwen3-30b-a3b", 49)


def test_an_unknown_model_is_refused_with_the_nearest():
    with pytest.raises(exc.OptionError, match="did you mean 'deepseek-v3'"):
        models.build("deepseek-v4")


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(exc.LibraryError, match="install fxwarm"):
        models.config("qwen3-30b-a3b")


@pytest.mark.parametrize(
    ("name", "small"),
    [
        (
            "qwen3-30b-a3b",
            {"num_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
        ),
        (
            "deepseek-v3",
            {
                "n_routed_experts": 8,
                "n_group": 2,
                "topk_group": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "q_lora_rank": 128,
                "kv_lora_rank": 128,
            },
        ),
    ],
)
def test_a_small_model_with_weights_agrees_with_transformers(name, small):
    import transformers

    from fxwarm.demo.replace import use_fp8

    small |= {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
    }
    torch.manual_seed(0)
    config = models.config(name, 2, num_experts_per_tok=2, **small)
    model = getattr(transformers, f"{models.find(name).code}ForCausalLM")(config).bfloat16().eval()
    ids = torch.randint(512, (2, 9))
    with torch.no_grad():
        wanted = model(ids).logits.float()
        found = use_fp8(model)(ids).logits.float()
    # fp8 moves a router's choice now and then, so the whole is compared, not each token
    assert (found - wanted).norm() / wanted.norm() < 0.2


def test_a_model_is_one_graph():
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    model = models.build("deepseek-v3", 2)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(models.token_ids())
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_the_whole_model_is_traced_within_its_limits(name):
    code = f"""
import msgspec, time
from fxwarm.demo import facts
found = facts.trace_model({name!r})
print(time.process_time())
print(msgspec.json.encode(found).decode())
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    *_, cpu, text = done.stdout.splitlines()
    found = json.loads(text)
    gigabytes = found["peak_bytes"] / 1e9
    print(f"{name}: {found['seconds']:.1f} s, {float(cpu):.1f} s of CPU, {gigabytes:.2f} GB")
    assert found["layers"] == DEPTH[name]
    # tracing is one thread: on an idle machine this is the wall time, on a busy one the fair part of it
    assert float(cpu) < MOST_SECONDS
    assert found["peak_bytes"] < MOST_BYTES
    weights = {(w.get("groups", 0), w["n"], w["k"], w.get("top_k", 0)) for w in found["weights"]}
    assert {w if w[0] else w[1:3] for w in weights} == recorded(name)
