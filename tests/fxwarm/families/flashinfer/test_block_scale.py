"""DeepSeek's block scale: the kernels that are compiled at call time, re-computed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxwarm.families.flashinfer.block_scale import BlockGemm, first_of_each_kernel, kernel_at

QWEN = BlockGemm(1536, 2048, 128)


def test_the_kernels_of_qwen3_begin_where_the_facts_say():
    assert [t for t, _ in first_of_each_kernel(QWEN, range(1, 8193))] == [1, 17, 25, 32, 65]


def test_names_are_the_folders_of_the_librarys_cache():
    assert (
        kernel_at(QWEN, 1).name == "gemm_swapAB_1536_2048_128_16_128_128_8128_8_1_GroupedWithOffset"
    )
    assert kernel_at(QWEN, 100).name == "gemm_1536_2048_128_128_128_128_5128_5_1_GroupedWithOffset"
    assert kernel_at(BlockGemm(2112, 7168, 1, grouped=False), 8).name.endswith("_1_Normal")


# (n, k, groups, SMs, tokens) -> (swapped, block_m, block_n, stages, multicast), from the library's own
# get_best_gemm_config, compiled from 0.6.18.post1 by g++; 60,000 points agreed when this was written
@pytest.mark.parametrize(
    ("gemm", "tokens", "expected"),
    [
        (BlockGemm(1536, 2048, 128), 24, (True, 128, 24, 6, 1)),
        (BlockGemm(7168, 2048, 32), 4000, (False, 128, 128, 5, 1)),
        (BlockGemm(4096, 7168, 1), 1040, (False, 128, 96, 6, 1)),
        (BlockGemm(4096, 2048, 1), 1410, (False, 128, 128, 5, 2)),
        (BlockGemm(4096, 7168, 1, num_sms=78), 40, (True, 128, 24, 6, 1)),
    ],
)
def test_single_points_are_the_librarys(gemm, tokens, expected):
    k = kernel_at(gemm, tokens)
    assert (k.swap_ab, k.block_m, k.block_n, k.stages, k.multicast) == expected


def test_an_h20_swaps_up_to_64_tokens():
    assert kernel_at(QWEN._replace(num_sms=78), 63).swap_ab
    assert not kernel_at(QWEN, 63).swap_ab
    assert not kernel_at(BlockGemm(1536, 2048, 1, grouped=False, num_sms=78), 63).swap_ab


@settings(max_examples=25, deadline=None)
@given(
    n=st.sampled_from([24, 512, 1536, 2112, 4096, 7168]),
    groups=st.sampled_from([1, 8, 32, 256]),
    sms=st.sampled_from([78, 114, 132]),
    step=st.integers(1, 9),
)
def test_no_token_count_needs_a_kernel_that_was_not_named(n, groups, sms, step):
    gemm = BlockGemm(n, 2048, groups, groups > 1, sms)
    tokens = range(step, 2200, step)
    assert {kernel_at(gemm, t) for t in tokens} == {
        k for _, k in first_of_each_kernel(gemm, tokens)
    }


def test_zero_rows_need_no_kernel():
    assert list(first_of_each_kernel(QWEN, [0])) == []
    with pytest.raises(ValueError, match="0 rows"):
        kernel_at(QWEN, 0)
