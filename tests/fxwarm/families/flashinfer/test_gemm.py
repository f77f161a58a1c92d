"""``bmm_fp8``: LM heads, side projections and low batches are tuned and run at the rows that they serve."""

from __future__ import annotations

import json

import pytest
import torch

import fxwarm.ops.flashinfer  # noqa: F401
from fxwarm.families.flashinfer import FlashInfer, stored, tuner, tuning
from fxwarm.families.flashinfer.keys import MODULE, rows_of
from fxwarm.families.flashinfer.library import find_library
from fxwarm.families.flashinfer.tuner_key import is_tuned
from fxwarm.records import Planned, Target
from fxwarm.tracing import trace
from tests.fxwarm.families.flashinfer.calls import bmm

HOPPER = Target.named("h200")
FP8 = torch.float8_e4m3fn


def plan(*calls):
    return [p for p in FlashInfer().keys(calls, HOPPER, find_library({})) if isinstance(p, Planned)]


def tune(planned):
    return list(tuning.tune(planned, "sm_90a", lambda call: None))


def serve(rows: int, n: int = 32, k: int = 16) -> None:
    from flashinfer import bmm_fp8

    one = torch.ones(1)
    weight = torch.zeros(1, n, k).to(FP8).transpose(1, 2)
    bmm_fp8(torch.zeros(1, rows, k).to(FP8), weight, one, one, torch.bfloat16, backend="cublas")


def test_every_row_count_finds_its_tuned_algorithm(library):
    planned = plan(bmm(100, n=32, k=16))
    assert not [t for t in tune(planned) if t.error or t.found]
    assert {shape[1] for shape, _ in library.measured} == {1, 2, 4, 8, 16, 32, 64, 128}
    library.measured.clear()
    library.gemms.clear()
    with tuner.watch() as said:
        for rows in range(1, 101):
            serve(rows)
    assert not library.measured
    assert not said
    assert library.gemms == [(rows, 0) for rows in range(1, 101)]  # the fastest, never the default
    assert not tuning.verify(planned, "sm_90a")


def test_the_files_key_is_the_one_that_the_library_writes(library):
    from flashinfer.autotuner import AutoTuner

    planned = plan(bmm(40, n=32, k=16))
    tune(planned)
    ours = {stored.entry_of(p, "sm_90a").file_key for p in planned if is_tuned(p.key)}
    assert ours == {k.file_key for k in AutoTuner.get().profiling_cache}
    written = json.loads(next((library.folder / "fxwarm").iterdir()).read_text())
    assert ours == {k for k in written if not k.startswith("_")}
    library.restart()
    assert all(t.found for t in tune(planned))


def test_a_low_batch_is_run_at_each_row_that_it_serves(library):
    """cuBLASLt lists its algorithms anew for each M, so a bucket's one row loads not all of its kernels."""
    family, planned = FlashInfer(), plan(bmm(8, n=32, k=16))
    tune(planned)
    library.gemms.clear()
    wanted = [p for p in planned if p.key.tag != MODULE]
    assert not [x for x in family.load(wanted, HOPPER, lambda c: None) if x.error]
    assert sorted(rows for rows, _ in library.gemms) == list(range(1, 9))


class Head(torch.nn.Module):
    """Two layers with a projection of one shape, and an LM head that sees the last token of each sequence."""

    def __init__(self, sequences: int) -> None:
        super().__init__()
        self.sequences = sequences
        weights = [torch.empty(1, n, 64, dtype=FP8, device="meta") for n in (48, 48, 1024)]
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(w, requires_grad=False) for w in weights
        )
        self.scale = torch.nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)

    def project(self, x, weight):
        op = torch.ops.fxwarm.bmm_fp8
        return op(x, weight.transpose(1, 2), self.scale, self.scale, torch.bfloat16)

    def forward(self, tokens, last):
        first, second, head = (self.weights[i] for i in range(3))
        return self.project(tokens, first), self.project(tokens, second), self.project(last, head)


def test_a_head_and_a_projection_are_tuned_at_their_own_rows_once_a_weight_shape():
    torch._dynamo.reset()
    tokens, last = (torch.empty(1, rows, 64, dtype=FP8, device="meta") for rows in (300, 7))
    torch._dynamo.mark_dynamic(tokens, 1, min=1, max=2048)
    torch._dynamo.mark_dynamic(last, 1, min=1, max=8)
    shapes = trace(Head(8), tokens, last, max_size=2048)
    calls = [c for c in shapes.calls if c.family == "flashinfer"]
    assert {int(c["B"].dims[2]): rows_of(c).upper for c in calls} == {48: 2048, 1024: 8}
    assert len(calls) == 2  # one representative of the two equal layers
    planned = [p for p in plan(*calls) if is_tuned(p.key)]
    buckets = {
        n: sorted(int(rows_of(p.witness)) for p in planned if int(p.witness["B"].dims[2]) == n)
        for n in (48, 1024)
    }
    assert buckets[1024] == [1, 2, 3, 5]  # buckets 1, 2, 4 and 8, and no more
    assert len(buckets[48]) == 16


@pytest.mark.parametrize(("rows", "run"), [(8, [5, 6, 7, 8]), (100, [65, 128])])
def test_beyond_decode_a_bucket_is_run_at_both_ends(rows, run):
    from fxwarm.families.flashinfer.load import _rows

    last = max((p.witness for p in plan(bmm(rows)) if is_tuned(p.key)), key=lambda w: int(rows_of(w)))  # fmt: skip
    assert [int(rows_of(last)), *_rows(last)] == run
