"""The models of the demo: public configurations, built by transformers' own code on the meta device, in fp8."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

from fxwarm import exc

if TYPE_CHECKING:
    import torch
    from torch import nn


class Model(NamedTuple):
    """Where a model's code is in transformers, and its configuration."""

    title: str
    code: str
    """Prefix of the classes ``<code>Config`` and ``<code>ForCausalLM``."""
    config: dict[str, Any]


MODELS = {
    "qwen3-30b-a3b": Model(
        "Qwen3-30B-A3B",
        "Qwen3Moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "deepseek-v3": Model(
        "DeepSeek-V3",
        "DeepseekV3",
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 163840,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 40.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}


def find(name: str) -> Model:
    """Return the model ``name``. Raises OptionError with the nearest name."""
    if name not in MODELS:
        raise exc.OptionError(f"unknown model {name!r}; {exc.did_you_mean(name, MODELS)}")
    return MODELS[name]


def _transformers() -> Any:
    """Return transformers. Raises LibraryError where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise exc.LibraryError(
            "the models are transformers' own code; install fxwarm[transformers]"
        )
    return importlib.import_module("transformers")


def config(name: str, layers: int | None = None, **changes: Any) -> Any:
    """Return transformers' configuration of the model ``name``, cut to its first ``layers`` layers.

    A cut keeps a mixture-of-experts layer: DeepSeek-V3's three dense layers become fewer below four layers.
    Raises OptionError for another number of layers than the model has, LibraryError without transformers.
    """
    model = find(name)
    values = {**model.config, **changes, "use_cache": False}
    if layers is not None:
        if not 1 <= layers <= values["num_hidden_layers"]:
            most = values["num_hidden_layers"]
            raise exc.OptionError(f"layers is {layers}; {model.title} has 1 to {most}")
        values["num_hidden_layers"] = layers
        if "first_k_dense_replace" in values:
            values["first_k_dense_replace"] = min(values["first_k_dense_replace"], layers - 1)
    return getattr(_transformers(), f"{model.code}Config")(**values)


def build(name: str, layers: int | None = None, device: str = "meta", **changes: Any) -> nn.Module:
    """Return the model ``name`` in bf16 with fp8 linears and experts; on the meta device it takes no memory.

    ``changes`` are other values of its configuration. Nothing is downloaded.
    """
    import torch

    from fxwarm.demo.replace import use_fp8

    kind = getattr(_transformers(), f"{find(name).code}ForCausalLM")
    with torch.device(device):
        model: nn.Module = kind(config(name, layers, **changes)).eval()
        return use_fp8(model.to(torch.bfloat16))


def token_ids(tokens: int = 64) -> torch.Tensor:
    """Return what a server hands to a model: the token ids of one step, [1, T], T symbolic, on the meta device."""
    import torch

    ids = torch.empty((1, tokens), dtype=torch.int64, device="meta")
    torch._dynamo.maybe_mark_dynamic(
        ids, 1
    )  # else the first trace is static, and a second one follows
    return ids
