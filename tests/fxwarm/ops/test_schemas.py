"""The ops' schemas are an interface: matchers and saved programs read them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from expecttest import assert_expected_inline

import fxwarm.ops
from fxwarm.families.deep_gemm.entries import ENTRIES
from fxwarm.ops import _define

DEEP_GEMM = (
    "fp8_gemm_nt",
    "bf16_gemm_nt",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "einsum",
    "fp8_einsum",
    "tf32_hc_prenorm_gemm",
)
K_GROUPED = tuple(
    f"k_grouped_{kind}_contiguous" for kind in ("fp8_gemm_nt", "fp8_gemm_tn", "bf16_gemm_tn")
)
FORMS = (
    "fp8_gemm_nn",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "bf16_gemm_nn",
    "bf16_gemm_tn",
    "bf16_gemm_tt",
    "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "fp8_gemm_nt_skip_head_mid",
)
LOGITS = ("fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata")
TILE_KERNELS = (
    "mhc_pre_big_fuse",
    "mhc_post_fwd",
    "mhc_pre_norm_fn",
    "mhc_pre_split_mixes",
    "sinkhorn_normalize",
    "mhc_pre_apply_mix",
    "mhc_head_compute_mix",
    "expand_to_mhc",
)
FLASHINFER = (
    "cutlass_fused_moe",
    "bmm_fp8",
    "fp8_blockscale_gemm_sm90",
    "mono_moe",
    "trtllm_fp8_block_scale_moe",
)


def _schemas(names: tuple[str, ...]) -> str:
    ops = torch.ops.fxwarm
    return "\n".join(str(getattr(ops, n).default._schema).removeprefix("fxwarm::") for n in names)


def test_deep_gemm_ops_have_the_librarys_arguments_with_scales_flattened():
    assert_expected_inline(
        _schemas(DEEP_GEMM),
        """\
fp8_gemm_nt(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(d!) d, Tensor? c=None, int[]? recipe=None, str? compiled_dims=None, bool disable_ue8m0_cast=False) -> ()
bf16_gemm_nt(Tensor a, Tensor b, Tensor(d!) d, Tensor? c=None, str? compiled_dims=None) -> ()
m_grouped_fp8_gemm_nt_contiguous(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(d!) d, Tensor grouped_layout, int[]? recipe=None, str? compiled_dims=None, bool disable_ue8m0_cast=False, bool use_psum_layout=False, SymInt? expected_m_for_psum_layout=None) -> ()
m_grouped_bf16_gemm_nt_contiguous(Tensor a, Tensor b, Tensor(d!) d, Tensor grouped_layout, str? compiled_dims=None, bool use_psum_layout=False, SymInt? expected_m_for_psum_layout=None) -> ()
m_grouped_fp8_gemm_nt_masked(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(d!) d, Tensor masked_m, SymInt expected_m, int[]? recipe=None, str? compiled_dims=None, bool disable_ue8m0_cast=False) -> ()
einsum(str expr, Tensor a, Tensor b, Tensor(d!) d, Tensor? c=None, bool use_cublaslt=False) -> ()
fp8_einsum(str expr, Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(d!) d, Tensor? c=None, int[]? recipe=None) -> ()
tf32_hc_prenorm_gemm(Tensor a, Tensor b, Tensor(d!) d, Tensor(s!) sqr_sum, SymInt? num_splits=None) -> ()""",
    )


def test_each_form_of_a_gemm_has_the_arguments_of_nt():
    nt = _schemas(("fp8_gemm_nt", "bf16_gemm_nt")).split("\n")
    forms = _schemas(FORMS[:6]).split("\n")
    assert {s.replace(f[-2:], "nt", 1) for s, f in zip(forms, FORMS, strict=False)} == set(nt)
    assert_expected_inline(
        _schemas(FORMS[6:]),
        """\
m_grouped_fp8_gemm_nn_contiguous(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(d!) d, Tensor grouped_layout, int[]? recipe=None, str? compiled_dims=None, bool disable_ue8m0_cast=False, bool use_psum_layout=False) -> ()
m_grouped_bf16_gemm_nn_contiguous(Tensor a, Tensor b, Tensor(d!) d, Tensor grouped_layout, str? compiled_dims=None, bool use_psum_layout=False) -> ()
m_grouped_bf16_gemm_nt_masked(Tensor a, Tensor b, Tensor(d!) d, Tensor masked_m, SymInt expected_m, str? compiled_dims=None) -> ()
fp8_gemm_nt_skip_head_mid(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(d!) d, int[] head_splits, int[]? recipe=None, str? compiled_dims=None, bool disable_ue8m0_cast=False) -> ()""",
    )


def test_every_entry_point_has_an_op_with_its_tensors():
    for entry in ENTRIES.values():
        schema = getattr(torch.ops.fxwarm, entry.op).default._schema
        required = {a.name for a in schema.arguments if not a.has_default_value()}
        assert required == {name for part in entry.positional for name in part.split(",")}


def test_flashinfer_ops_hold_all_that_enters_the_tuners_key():
    assert_expected_inline(
        _schemas(FLASHINFER),
        """\
cutlass_fused_moe(Tensor input, Tensor token_selected_experts, Tensor token_final_scales, Tensor fc1_expert_weights, Tensor fc2_expert_weights, ScalarType output_dtype, Tensor[] quant_scales, Tensor? fc1_expert_biases=None, Tensor? fc2_expert_biases=None, Tensor? input_sf=None, Tensor? swiglu_alpha=None, Tensor? swiglu_beta=None, Tensor? swiglu_limit=None, int tp_size=1, int tp_rank=0, int ep_size=1, int ep_rank=0, int cluster_size=1, int cluster_rank=0, bool enable_alltoall=False, bool use_deepseek_fp8_block_scale=False, bool use_w4_group_scaling=False, bool use_mxfp8_act_scaling=False, bool min_latency_mode=False, bool use_packed_weights=False, bool use_wfp4afp8_humming=False, int tune_max_num_tokens=8192, bool? enable_pdl=None, int activation_type=3, bool swizzled_input_sf=True, bool use_fused_finalize=True, int[]? profile_ids=None) -> Tensor
bmm_fp8(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, ScalarType dtype, str backend="cublas") -> Tensor
fp8_blockscale_gemm_sm90(Tensor input, Tensor weight, Tensor? input_scale=None, Tensor? weight_scale=None, ScalarType? out_dtype=None) -> Tensor
mono_moe(Tensor activations_in, Tensor router_logits, Tensor expert_weights_up, Tensor expert_scales_up, Tensor expert_weights_down, Tensor expert_scales_down, int top_k, str scoring_func="softmax", bool renormalize=True, bool interleave_up=True) -> Tensor
trtllm_fp8_block_scale_moe(Tensor routing_logits, Tensor? routing_bias, Tensor hidden_states, Tensor hidden_states_scale, Tensor gemm1_weights, Tensor gemm1_weights_scale, Tensor gemm2_weights, Tensor gemm2_weights_scale, int num_experts, int top_k, int? n_group, int? topk_group, int intermediate_size, int local_expert_offset, int local_num_experts, float? routed_scaling_factor, int routing_method_type=0, bool use_shuffled_weight=False, int weight_layout=0, bool? enable_pdl=None, int tune_max_num_tokens=8192, int activation_type=3, bool norm_topk_prob=True) -> Tensor""",
    )


def test_weight_gradient_ops_have_one_schema():
    assert_expected_inline(
        _schemas(K_GROUPED),
        """\
k_grouped_fp8_gemm_nt_contiguous(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(d!) d, SymInt[] ks, Tensor grouped_layout, Tensor? c=None, int[]? recipe=None, str? compiled_dims=None, bool use_psum_layout=False) -> ()
k_grouped_fp8_gemm_tn_contiguous(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(d!) d, SymInt[] ks, Tensor grouped_layout, Tensor? c=None, int[]? recipe=None, str? compiled_dims=None, bool use_psum_layout=False) -> ()
k_grouped_bf16_gemm_tn_contiguous(Tensor a, Tensor b, Tensor(d!) d, SymInt[] ks, Tensor grouped_layout, Tensor? c=None, str? compiled_dims=None, bool use_psum_layout=False) -> ()""",
    )


def test_logits_ops_return_what_they_allocate():
    assert_expected_inline(
        _schemas(LOGITS),
        """\
fp8_mqa_logits(Tensor q, Tensor kv, Tensor kv_sf, Tensor weights, Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, bool? clean_logits=None, SymInt max_seqlen_k=0, ScalarType? logits_dtype=None) -> Tensor
fp8_paged_mqa_logits(Tensor q, Tensor kv_cache, Tensor weights, Tensor context_lens, Tensor block_table, Tensor schedule_meta, SymInt max_context_len, bool? clean_logits=None, Tensor? indices=None, ScalarType? logits_dtype=None) -> Tensor
get_paged_mqa_logits_metadata(Tensor context_lens, int block_kv, int num_sms, Tensor? indices=None) -> Tensor""",
    )


def test_mhc_ops_have_tile_kernels_own_arguments():
    assert_expected_inline(
        _schemas(TILE_KERNELS),
        """\
mhc_pre_big_fuse(Tensor residual, Tensor fn, Tensor mhc_scale, Tensor mhc_base, float rms_eps, float mhc_pre_eps, float mhc_sinkhorn_eps, float mhc_post_mult_value, int sinkhorn_repeat, int n_splits=16) -> (Tensor, Tensor, Tensor)
mhc_post_fwd(Tensor x, Tensor residual, Tensor post_layer_mix, Tensor comb_res_mix) -> Tensor
mhc_pre_norm_fn(Tensor residual, Tensor mhc_fn, Tensor? mhc_norm_weight, float mhc_norm_eps, int n_splits=16) -> Tensor
mhc_pre_split_mixes(Tensor input_mixes, Tensor mhc_scale, Tensor mhc_base, int mhc_mult, float mhc_post_mult_value, float mhc_pre_eps) -> (Tensor, Tensor, Tensor)
sinkhorn_normalize(Tensor x, int repeat=10, float eps=9.9999999999999995e-07) -> Tensor
mhc_pre_apply_mix(Tensor x, Tensor mix) -> Tensor
mhc_head_compute_mix(Tensor input_mix, Tensor mhc_scale, Tensor mhc_base, float mhc_pre_eps) -> Tensor
expand_to_mhc(Tensor hidden, int mhc_mult) -> Tensor""",
    )


@pytest.mark.parametrize("name", DEEP_GEMM + FORMS + FLASHINFER + K_GROUPED + LOGITS + TILE_KERNELS)
def test_every_op_keeps_the_strides_of_its_arguments(name):
    assert torch.Tag.needs_exact_strides in getattr(torch.ops.fxwarm, name).default.tags


def test_importing_the_ops_imports_no_kernel_library_and_registers_once():
    code = """
import importlib, os, sys
import fxwarm.ops
import torch
print([m for m in ("deep_gemm", "flashinfer", "tilelang", "tile_kernels", "tvm_ffi", "vllm") if m in sys.modules])
def call():
    a, w, d = (torch.ones(4, 4, dtype=torch.bfloat16) for _ in range(3))
    torch.ops.fxwarm.bf16_gemm_nt(a, w, d)
    return d.unique().tolist()
for name in ("_define", "deep_gemm", "gemm_forms", "flashinfer"):
    importlib.reload(importlib.import_module("fxwarm.ops." + name))
print(call())
for name in [m for m in sys.modules if m.startswith("fxwarm")]:
    del sys.modules[name]
import gc; gc.collect()
import fxwarm.ops
gc.collect()
print(call())
child = os.fork()
if not child:
    import fxwarm.ops
    print(call(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:4] == ["[]", "[4.0]", "[4.0]", "[4.0]"], done.stderr


def test_another_schema_under_the_same_name_is_refused():
    with pytest.raises(RuntimeError, match="already defined as fxwarm::bmm_fp8"):
        _define.define_op(
            "bmm_fp8(Tensor A) -> ()", fake=lambda a: None, cpu=lambda a: None, cuda=lambda a: None
        )


def test_the_public_names_are_no_modules():
    assert callable(fxwarm.ops.per_token_cast_to_fp8)
    assert callable(fxwarm.ops.per_block_cast_to_fp8)
    assert callable(fxwarm.ops.use_library)
