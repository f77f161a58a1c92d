"""Buckets: the library's own grid, and the rule that makes every token count in range hit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxwarm.families.flashinfer.buckets import LARGEST, bucket_of, buckets_up_to
from fxwarm.families.flashinfer.keys import keys
from fxwarm.families.flashinfer.library import find_library
from fxwarm.families.flashinfer.limit import limit_of
from fxwarm.records import Planned, Target
from tests.conftest import cases
from tests.fxwarm.families.flashinfer.calls import moe


@pytest.mark.parametrize(
    ("limit", "count"),
    [(256, 9), (512, 10), (1024, 12), (2048, 16), (4096, 20), (8192, 21), (16384, 22), (32768, 23)],
)
def test_the_number_of_buckets_is_the_librarys(limit, count):
    assert len(buckets_up_to(limit)) == count
    assert buckets_up_to(limit)[-1] == limit


@given(st.integers(1, 1 << 16))
def test_a_bucket_holds_its_tokens_and_is_its_own_bucket(tokens):
    bucket = bucket_of(tokens)
    assert tokens <= bucket
    assert bucket_of(bucket) == bucket
    assert bucket in buckets_up_to(tokens)
    assert tokens == 1 or bucket_of(tokens - 1) <= bucket


@pytest.mark.parametrize("tokens", [0, -1, LARGEST + 1])
def test_what_is_no_number_of_tokens_is_refused(tokens):
    with pytest.raises(ValueError, match="no number of tokens"):
        bucket_of(tokens)


def test_a_limit_below_256_is_a_power_of_two():
    assert [bucket_of(t) for t in (48, 96, 100, 200, 256)] == [64, 128, 128, 256, 256]


def test_the_library_lists_and_maps_as_we_do(library):
    from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets, map_to_hybrid_bucket

    for limit in buckets_up_to(32768):
        assert buckets_up_to(limit) == get_hybrid_num_tokens_buckets(limit)
        for tokens in {1, limit, *range(1, limit, 7)}:
            assert map_to_hybrid_bucket(tokens, limit) == bucket_of(tokens)


@pytest.mark.parametrize(
    ("limit", "lost"), [(100, range(65, 100)), (48, range(33, 48)), (200, range(129, 200))]
)
def test_the_librarys_own_limit_off_the_grid_loses_tokens(library, limit, lost):
    """The trap itself: still there up to 0.7.4. Rounded up, the same token counts hit."""
    from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets, map_to_hybrid_bucket

    def misses(t):
        return [
            n
            for n in range(1, t + 1)
            if map_to_hybrid_bucket(n, t) not in get_hybrid_num_tokens_buckets(t)
        ]

    assert misses(limit) == list(lost)
    assert misses(bucket_of(limit)) == []


@pytest.mark.parametrize(
    "case", [c for c in cases("bounds") if c.values[0].get("id", "A30") == "A30"]
)
def test_the_limit_counts_what_all_data_parallel_ranks_send(case):
    given = case["input"]
    call = moe(
        given["T_max"], experts=given["G"], hidden=given["hidden"], inter=given["inter"], top_k=given["topk"],
        factor=given["DP"], tune_max_num_tokens=given["default_tune_max"],
    )  # fmt: skip
    planned = [
        p for p in keys([call], Target.named("h200"), find_library({})) if isinstance(p, Planned)
    ]
    assert limit_of(planned) == 32768
    assert len(buckets_up_to(limit_of(planned))) == 23
    assert all(bucket_of(m) in buckets_up_to(32768) for m in range(8193, 32769))
    stored = {p.key.template[0] for p in planned if p.key.kernel == "gemm1"}
    assert {f"input{[bucket_of(m), 7168]}" for m in range(4, 32769, 4)} == stored
