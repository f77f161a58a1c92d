"""A call whose tensors contradict each other raises with both shapes; a right one has the right output."""

from __future__ import annotations

import pytest
import torch

from fxwarm.exc import ShapeMismatchError
from fxwarm.ops.scales import FP8
from tests.fxwarm.ops.tensors import BF16, F32, randn

ops = torch.ops.fxwarm


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


@pytest.mark.parametrize(
    ("form", "changed", "shapes"),
    [
        ("nn", {"b": meta(256, 7168, dtype=FP8)}, ("[16, 7168]", "[256, 7168]", "[16, 256]")),
        ("nn", {"b_sf": meta(2, 56, dtype=F32)}, ("[2, 56]", "[7168, 256]", "[56, 2]")),
        ("tn", {"a": meta(16, 7168, dtype=FP8)}, ("[16, 7168]", "[7168, 256]", "[7168, 7168]")),
        (
            "tn",
            {"a_sf": meta(16, 56, dtype=F32)},
            ("[16, 56]", "[7168, 16]", "[56, 16]", "(128, 1)"),
        ),
        ("tt", {"a": meta(7000, 16, dtype=FP8)}, ("[7000, 16]", "[256, 7168]", "[7168, 16]")),
        ("tt", {"d": meta(256, 16)}, ("[256, 16]", "[7168, 16]", "[16, 256]")),
        ("tn", {"b": meta(3, 7168, 256, dtype=FP8)}, ("[3, 7168, 256]", "[K, N]")),
        ("tt", {"a": meta(7168, dtype=FP8)}, ("[7168]", "[K, M]")),
    ],
)
def test_a_wrong_call_of_a_form_shows_shapes_as_they_are_stored(form, changed, shapes):
    flip_a, flip_b = form[0] == "t", form[1] == "n"

    def stored(flip: bool, *size: int, dtype: torch.dtype = FP8) -> torch.Tensor:
        return meta(*(reversed(size) if flip else size), dtype=dtype)

    args = {
        "a": stored(flip_a, 16, 7168), "a_sf": stored(flip_a, 16, 56, dtype=F32),
        "b": stored(flip_b, 256, 7168), "b_sf": stored(flip_b, 2, 56, dtype=F32),
        "d": meta(16, 256),
    }  # fmt: skip
    op = getattr(ops, f"fp8_gemm_{form}")
    op(**args)
    with pytest.raises(ShapeMismatchError, match=f"fp8_gemm_{form}") as caught:
        op(**{**args, **changed})
    for shape in shapes:
        assert shape in str(caught.value)


def test_heads_with_a_gap_must_be_whole_and_as_wide_as_said():
    a, a_sf, b_sf = meta(16, 512, dtype=FP8), meta(16, 4, dtype=F32), meta(8, 4, dtype=F32)
    b, op = meta(1024, 512, dtype=FP8), ops.fp8_gemm_nt_skip_head_mid
    op(a, a_sf, b, b_sf, meta(16, 1280), [128, 64, 128])
    with pytest.raises(
        ValueError, match=r"d is bfloat16\[16, 1024\].*\(128, 64, 128\).*\[16, 1280\]"
    ):
        op(a, a_sf, b, b_sf, meta(16, 1024), [128, 64, 128])
    with pytest.raises(ValueError, match="1024 columns are no whole heads of 100 and 128"):
        op(a, a_sf, b, b_sf, meta(16, 1280), [100, 64, 128])
    for splits in ([128, 64], [0, 64, 0], [-1, 64, 129]):
        with pytest.raises(ValueError, match=r"give \(left, mid, right\) columns"):
            op(a, a_sf, b, b_sf, meta(16, 1280), splits)


def test_transposed_groups_and_masks_show_both_shapes():
    a, b, d = meta(512, 128), meta(8, 128, 256), meta(512, 256)
    layout = meta(512, dtype=torch.int32)
    ops.m_grouped_bf16_gemm_nn_contiguous(a, b, d, layout)
    with pytest.raises(
        ValueError, match=r"a is bfloat16\[512, 128\].*\[8, 256, 128\].*\[512, 256\]"
    ):
        ops.m_grouped_bf16_gemm_nn_contiguous(a, b.mT, d, layout)
    a, d, counts = meta(8, 64, 256), meta(8, 64, 128), meta(8, dtype=torch.int32)
    ops.m_grouped_bf16_gemm_nt_masked(a, b, d, counts, 9)
    with pytest.raises(ValueError, match=r"masked_m is int32\[7\].*\[8, 128, 256\]"):
        ops.m_grouped_bf16_gemm_nt_masked(a, b, d, counts[:7], 9)


@pytest.mark.parametrize("expression", ["bmn,bnk->mk", "bhr,hdr->bdh"])
def test_an_unknown_einsum_names_the_known_ones(expression):
    with pytest.raises(ValueError, match="bhr,hdr->bhd"):
        ops.einsum(expression, meta(2, 4, 8), meta(4, 16, 8), meta(2, 4, 16))


def test_a_float32_sum_without_c_is_refused_since_the_library_would_crash():
    a, b = meta(5, 128, 64), meta(5, 64, 64)
    sums = meta(128, 64, dtype=torch.float32)
    with pytest.raises(ShapeMismatchError, match="pass it as c as well"):
        ops.einsum("bmk,bnk->mn", a, b, sums)
    ops.einsum("bmk,bnk->mn", a, b, sums, sums)
    ops.einsum("bmk,bnk->mn", a, b, meta(128, 64))


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
