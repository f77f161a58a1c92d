"""The small model compiles kernels as token counts come; with fxwarm it compiles none after the first call."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from fxwarm import demo
from fxwarm.demo import compare, report
from fxwarm.demo.mhc_moe import Call, Run, token_counts


def test_fifty_token_counts_need_at_least_eight_kernels():
    counts = token_counts(50)
    assert len(set(counts)) == 50
    assert min(counts) == 2, "a single token is another graph"
    assert len({compare.splits(Call(tokens, 0.0, 0, "")) for tokens in counts}) >= 8


def run(backend: str, builds: tuple[int, ...], digest: str = "a") -> Run:
    counts = token_counts(len(builds))
    calls = tuple(Call(t, 0.5, b, digest) for t, b in zip(counts, builds))
    return Run(backend, calls, graphs=1, built_ahead=0 if backend == "inductor" else 9)


def test_the_report_names_what_is_wrong():
    good = compare.Comparison(run("inductor", (2, 1, 0)), run("fxwarm", (0, 0, 0)))
    assert report.problems_of((), good) == ()
    late = compare.Comparison(run("inductor", (2, 1, 0)), run("fxwarm", (2, 1, 1)))
    assert report.problems_of((), late) == ("with fxwarm 2 kernels compiled after the first call",)
    other = compare.Comparison(run("inductor", (2, 0)), run("fxwarm", (0, 0), "b"))
    assert report.problems_of((), other) == ("the outputs with and without fxwarm differ",)


def test_the_table_has_a_row_a_call_and_the_sums():
    mhc = compare.Comparison(run("inductor", (2, 1, 1)), run("fxwarm", (0, 0, 0)))
    out = io.StringIO()
    report.print_comparison(Console(file=out, width=120), mhc)
    text = out.getvalue()
    assert "1,280" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["without", "0.5", "s", "0", "2", "500", "ms", "1.0", "s"] in lines
    assert ["with", "0.5", "s", "9", "0", "500", "ms", "1.0", "s"] in lines


def test_json_is_one_object(capsys):
    pytest.importorskip("transformers")
    status = demo.run(["qwen3-30b-a3b"], tokens=256, calls=0, json=True, layers=1)
    found = json.loads(capsys.readouterr().out)
    assert status == 0
    assert [m["title"] for m in found["models"]] == ["Qwen3-30B-A3B"]
    assert len(found["models"][0]["shapes"]["calls"]) == 4
    assert found["fused"]["modules"] == ["fused_moe_90", "trtllm_utils", "gemm"]


def test_nothing_is_compiled_after_the_first_warm_call():
    pytest.importorskip("tilelang")
    mhc = compare.compare(calls=6, largest=640)
    assert mhc.same_outputs
    assert mhc.without.graphs == mhc.with_fxwarm.graphs == 1
    assert compare.builds_after_first(mhc.without) > 0
    assert mhc.with_fxwarm.built_ahead == 4, "splits 16, 14 and 13, and the post kernel"
    assert compare.builds_after_first(mhc.with_fxwarm) == 0


@pytest.mark.slow
def test_fifty_token_counts_in_full():
    pytest.importorskip("tilelang")
    mhc = compare.compare()
    report.print_comparison(Console(width=120), mhc)
    assert report.problems_of((), mhc) == ()
    assert compare.builds_after_first(mhc.without) >= 8
