"""FlashInfer's calls are planned for a named build and card: no library, no GPU, no gap."""

from __future__ import annotations

import io

from rich.console import Console

from fxwarm.demo import fused_moe, report
from fxwarm.families.flashinfer.buckets import buckets_up_to
from fxwarm.lanes import label_of, lanes_of
from fxwarm.records import Target, WarmPlan
from passes.records import Gap


def test_every_bucket_up_to_the_bound_has_a_tactic_in_each_gemm():
    fused = fused_moe.plan_model(1024)
    assert fused.modules == ("fused_moe_90", "trtllm_utils", "gemm")
    assert [(one.op, one.gemm) for one in fused.tuned] == [
        ("cutlass_fused_moe", "gemm1"),
        ("cutlass_fused_moe", "gemm2"),
        ("bmm_fp8", "fp8_gemm"),
    ]
    assert all(one.buckets == buckets_up_to(1024) for one in fused.tuned)
    assert fused.entries == 36 == len(fused.plan) - 3
    assert report.problems_of((), None, fused) == ()


def test_a_gap_is_a_problem():
    plan = WarmPlan(Target.named("h200"), gaps=(Gap("bmm_fp8", "no such card"),))
    (problem,) = report.problems_of((), None, fused_moe.Fused(plan, (), (), 0.0))
    assert "bmm_fp8" in problem
    assert "no such card" in problem


def test_the_report_names_modules_tactics_and_what_was_not_done():
    out = io.StringIO()
    report.print_fused(Console(file=out, width=160), fused_moe.plan_model(8))
    text = out.getvalue()
    assert "planned for h200 with flashinfer-python 0.6.18.post1; nothing is built or tuned" in text
    assert "4 of gemm1 (cutlass_fused_moe)" in text
    assert "each is for steps of up to 1, 2, 4, 8 tokens" in text


def test_a_picture_has_a_lane_for_each_gemm_and_a_band_for_each_bucket():
    plan = fused_moe.plan_model(64).plan
    lanes = dict(lanes_of(plan))
    head = f"bmm_fp8\n1 \N{MULTIPLICATION SIGN} 2048 \N{MULTIPLICATION SIGN} {fused_moe.VOCABULARY}"
    experts = "cutlass_fused_moe\n128 \N{MULTIPLICATION SIGN} 1536 \N{MULTIPLICATION SIGN} 2048"
    for name in (f"{experts}, gemm1", f"{experts}, gemm2", head):
        label = label_of([band.key for band in lanes[name]])
        bands = [(band.first, band.last, label(band.key)) for band in lanes[name]]
        assert bands == [
            (1, 1, "1"), (2, 2, "2"), (3, 4, "4"), (5, 8, "8"), (9, 16, "16"), (17, 32, "32"), (33, 64, "64"),
        ]  # fmt: skip
    assert "gemm" in lanes
