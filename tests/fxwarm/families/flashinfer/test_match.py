"""Matching: through the real ops and a real graph, under whatever namespace."""

from __future__ import annotations

import pytest
import torch

import fxwarm.ops.flashinfer  # noqa: F401
from fxwarm.families.flashinfer.match import match
from fxwarm.family import load_families
from fxwarm.tracing import trace
from passes.calls import SymTensor
from passes.flatten import OpCall

E, H, I = 8, 256, 128  # noqa: E741


def meta(*shape, dtype=torch.bfloat16):
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return tensor


def dynamic(*shape, dtype=torch.bfloat16):
    tensor = meta(*shape, dtype=dtype)
    torch._dynamo.mark_dynamic(tensor, 0, min=1, max=512)
    return tensor


class Layer(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.w13 = torch.nn.Parameter(meta(E, 2 * I, H), requires_grad=False)
        self.w2 = torch.nn.Parameter(meta(E, H, I), requires_grad=False)
        self.options = options

    def forward(self, x, ids, scales):
        op = torch.ops.fxwarm.cutlass_fused_moe
        return op(x, ids, scales, self.w13, self.w2, torch.bfloat16, [], **self.options)


def traced(model, *args):
    torch._dynamo.reset()
    return trace(model, *args, max_size=512)


def test_a_layer_is_one_call_with_its_tokens_symbolic():
    x, ids, scales = (
        dynamic(7, H),
        dynamic(7, 2, dtype=torch.int32),
        dynamic(7, 2, dtype=torch.float32),
    )
    shapes = traced(Layer(use_fused_finalize=False), x, ids, scales)
    (call,) = [c for c in shapes.calls if c.family == "flashinfer"]
    assert not shapes.gaps
    assert call.op == "cutlass_fused_moe"
    assert (call["input"].dims[0].lower, call["input"].dims[0].upper) == (1, 512)
    assert dict(call.attrs) == {
        "output_dtype": "bfloat16", "tune_max_num_tokens": 8192, "use_fused_finalize": False,
    }  # fmt: skip


def test_a_spelled_out_default_is_the_call_that_does_not():
    def args():
        ids = dynamic(7, 2, dtype=torch.int32)
        return dynamic(7, H), ids, dynamic(7, 2, dtype=torch.float32)

    assert (
        traced(Layer(), *args()).calls
        == traced(Layer(ep_size=1, swizzled_input_sf=True), *args()).calls
    )


def test_a_witness_is_a_call_that_can_be_made():
    """Nothing in the graph says that ids and tokens are as many: each input has a size of its own."""
    from fxwarm.families.flashinfer import FlashInfer
    from fxwarm.records import Library, Target

    x, ids, scales = (
        dynamic(7, H),
        dynamic(7, 2, dtype=torch.int32),
        dynamic(7, 2, dtype=torch.float32),
    )
    (call,) = traced(Layer(), x, ids, scales).calls
    library = Library("flashinfer-python", "0.6.18.post1")
    for planned in FlashInfer().keys([call], Target.named("h200"), library):
        rows = {
            int(planned.witness[n].dims[0])
            for n in ("input", "token_selected_experts", "token_final_scales")
        }
        assert len(rows) == 1


def tensor(dtype, *shape):
    return SymTensor(dtype, shape, None, "cpu", None)


def fake(name, namespace="vllm", **arguments):
    return OpCall(namespace, name, arguments)


def test_the_namespace_does_not_matter():
    arguments = {
        "A": tensor("float8_e4m3fn", 1, 4, 64),
        "B": tensor("float8_e4m3fn", 1, 64, 32),
        "dtype": "bfloat16",
    }
    one, other = (list(match(fake("bmm_fp8", ns, **arguments))) for ns in ("vllm", "engine_0f3a"))
    assert one == other
    assert one[0].op == "bmm_fp8"


def test_a_tensor_list_becomes_one_tensor_an_element():
    call = match(
        fake(
            "cutlass_fused_moe",
            input=tensor("bfloat16", 4, H),
            token_selected_experts=tensor("int32", 4, 2),
            fc1_expert_weights=tensor("float8_e4m3fn", E, 2 * I, H),
            fc2_expert_weights=tensor("float8_e4m3fn", E, H, I),
            quant_scales=(tensor("float32", E, 2, 2), tensor("float32", E, 2, 1)),
        )
    )[0]
    assert [name for name, _ in call.tensors][-2:] == ["quant_scales.0", "quant_scales.1"]


def test_vllms_dynamic_op_goes_through_flashinfer_below_32_rows():
    (call,) = match(
        fake(
            "dynamic_flashinfer_deepgemm_blockscale_gemm",
            x=tensor("bfloat16", 8, 512),
            w=tensor("float8_e4m3fn", 256, 512),
            w_scale=tensor("float32", 2, 4),
            group=128,
            e8m0=False,
        )
    )
    assert call.op == "fp8_blockscale_gemm_sm90"
    assert dict(call.attrs) == {"max_rows": 31}


def test_other_tuned_ops_are_gaps_and_foreign_ones_nobodys():
    (gap,) = match(fake("flashinfer_mm_fp4", a=tensor("uint8", 4, 4)))
    assert "tuned at its first call" in gap.reason
    assert not list(match(fake("fp8_gemm_nt")))
    assert not list(match(fake("bmm_fp8", other=1)))  # another op of that name


def test_the_family_is_built_in():
    assert load_families()["flashinfer"].distributions == ("flashinfer-python",)


@pytest.mark.parametrize(
    "name",
    [
        "cutlass_fused_moe",
        "bmm_fp8",
        "fp8_blockscale_gemm_sm90",
        "mono_moe",
        "trtllm_fp8_block_scale_moe",
    ],
)
def test_every_op_of_ours_is_recognised(name):
    from fxwarm.families.flashinfer.entries import ENTRIES

    schema = getattr(torch.ops.fxwarm, name).default._schema
    assert set(ENTRIES[name].required) <= {a.name for a in schema.arguments}
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    assert {k: defaults[k] for k in ENTRIES[name].defaults if k in defaults} == {
        k: v for k, v in ENTRIES[name].defaults.items() if k in defaults
    }
