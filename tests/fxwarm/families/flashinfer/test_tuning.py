"""Tuning with the library's real tuner over a module that does nothing: each upstream trap is a test."""

from __future__ import annotations

import json

import pytest
import torch

from fxwarm import exc
from fxwarm.families.flashinfer import FlashInfer, tuner, tuning, upstream
from fxwarm.families.flashinfer.keys import MODULE
from fxwarm.families.flashinfer.library import find_library
from fxwarm.families.flashinfer.tuner_key import is_tuned
from fxwarm.records import Planned, Target
from passes import bound
from tests.fxwarm.families.flashinfer.calls import bmm, moe

SIZES = {"experts": 4, "hidden": 16, "inter": 8, "top_k": 2}
HOPPER = Target.named("h200")


def plan(*calls):
    return [p for p in FlashInfer().keys(calls, HOPPER, find_library({})) if isinstance(p, Planned)]


def tune(planned):
    return list(tuning.tune(planned, "sm_90a", lambda call: None))


def serve(call, tokens, limit=8192, **options):
    """Make a call as a model does, outside ``autotune``; return the two tactics that it ran."""
    from flashinfer.fused_moe import cutlass_fused_moe

    from fxwarm.families.flashinfer.tensors import make_arguments

    arguments = make_arguments(bound.at(call, {"s0": tokens}), torch.device("cpu"), lambda c: None)
    cutlass_fused_moe(**{**arguments, "tune_max_num_tokens": limit, **options})


def test_one_call_tunes_every_bucket_and_every_token_count_hits(library):
    call = moe(300, **SIZES)
    planned = plan(call)
    tuned = tune(planned)
    assert len(tuned) == len([p for p in planned if is_tuned(p.key)]) == 2 * 10
    assert not [t for t in tuned if t.error or t.found]
    assert {shape[0] for shape, _ in library.measured} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    library.measured.clear()
    with tuner.watch() as said:
        for tokens in range(1, 301):
            serve(call, tokens)
    assert not library.measured
    assert not said
    assert {tuple(r) for r in library.runner.ran[1:]} == {
        (0, 3)
    }  # the fastest of each, never the default -1
    assert not tuning.verify(planned, "sm_90a")


def test_the_next_process_reads_the_file_and_measures_nothing(library):
    planned = plan(moe(100, **SIZES))
    tune(planned)
    library.restart()
    tuned = tune(planned)
    assert all(t.found and not t.error for t in tuned)
    assert not library.measured
    assert not tuning.verify(planned, "sm_90a")


def test_a_wider_plan_reuses_the_file_of_a_narrower_one(library):
    tune(plan(moe(100, **SIZES)))
    library.restart()
    tuned = tune(plan(moe(256, **SIZES)))
    assert {t.key.template[0] for t in tuned if not t.found} == {"input[256, 16]"}
    assert {shape[0] for shape, _ in library.measured} == {256}


def test_each_rank_has_a_file_of_its_own(library, monkeypatch):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        library.restart()
        assert not any(t.found for t in tune(plan(moe(8, **SIZES, tp_size=2, tp_rank=int(rank)))))
    names = sorted(p.name for p in (library.folder / "fxwarm").iterdir())
    assert len(names) == 2
    assert names != sorted({n.replace("rank1", "rank0") for n in names})


def test_a_limit_that_is_no_power_of_two_is_rounded_up(library):
    call = moe(100, **SIZES, tune_max_num_tokens=100)
    planned = plan(call)
    tune(planned)
    for tokens in range(1, 101):
        serve(call, tokens, limit=100)
    assert {tuple(r) for r in library.runner.ran[1:]} == {(0, 3)}
    assert {t for p in planned if is_tuned(p.key) for t in [p.key.template[0]]} >= {
        "input[128, 16]"
    }


def test_a_smaller_limit_of_another_layer_does_not_take_over(library):
    """Upstream the last new value of ``tune_max_num_tokens`` stays in force for the process."""
    small, large = moe(64, **SIZES, tune_max_num_tokens=100), moe(1000, **SIZES)
    planned = plan(small, large)
    tune(planned)
    for tokens, limit in ((1000, 8192), (70, 100), (900, 4096), (1000, 8192)):
        serve(large, tokens, limit=limit)
    assert {tuple(r) for r in library.runner.ran[1:]} == {(0, 3)}


def test_a_limit_that_nobody_planned_shows_as_a_gap(library):
    planned = plan(moe(300, **SIZES))
    tune(planned)
    serve(moe(300, **SIZES), 80, limit=100)  # a layer that was not in the graph
    gaps = tuning.verify(planned, "sm_90a")
    assert gaps
    assert all("tune_max_num_tokens" in g.reason for g in gaps)


def test_buckets_of_an_engine_that_is_tuning_do_not_enter_our_keys(library):
    from flashinfer import autotune

    call = moe(200, **SIZES)
    planned = plan(call)
    with autotune(
        False, tuning_buckets=(64, 128), round_up=True, skip_ops={"trtllm::fused_moe::gemm1"}
    ):
        assert not [t for t in tune(planned) if t.error]
    for tokens in (1, 3, 130, 200):
        serve(call, tokens)
    assert {tuple(r) for r in library.runner.ran[1:]} == {(0, 3)}


def test_another_tactics_file_drops_what_was_loaded_and_verify_says_so(library, tmp_path):
    from flashinfer import autotune

    planned = plan(moe(16, **SIZES))
    tune(planned)
    library.restart()
    tune(planned)  # from the file
    with autotune(False, cache=str(tmp_path / "other.json")):
        pass
    assert len(tuning.verify(planned, "sm_90a")) == len([p for p in planned if is_tuned(p.key)])


def test_memory_that_runs_out_is_not_silent(library, monkeypatch):
    from flashinfer.autotuner import AutoTuner

    def profile(self, runner, inputs, tactic, *args, **kwargs):
        if inputs[0].shape[0] > 16:
            raise torch.cuda.OutOfMemoryError("no room")
        return 1.0

    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", profile)
    tuned = tune(plan(moe(64, **SIZES)))
    failed = [t for t in tuned if t.error]
    assert {t.key.template[0] for t in failed} == {"input[32, 16]", "input[64, 16]"}
    assert "10 of 14 buckets were kept" in failed[0].error
    assert "OOM" in failed[0].error
    assert "free device memory" in failed[0].error


def test_a_stored_file_of_another_card_is_ignored_and_left_alone(library):
    planned = plan(moe(4, **SIZES))
    tune(planned)
    path = next((library.folder / "fxwarm").iterdir())
    stored = json.loads(path.read_text())
    for name in stored["_metadata"]:
        stored["_metadata"][name] = "another"
    path.write_text(json.dumps(stored))
    library.restart()
    assert not any(t.found for t in tune(planned))
    assert json.loads(path.read_text()) == stored


def test_a_damaged_file_costs_a_tuning_and_nothing_else(library):
    planned = plan(moe(4, **SIZES))
    tune(planned)
    next((library.folder / "fxwarm").iterdir()).write_text('{"x": 1')
    library.restart()
    assert not [t for t in tune(planned) if t.error or t.found]


def test_a_folder_that_cannot_be_written_costs_the_next_start_a_tuning(
    library, monkeypatch, caplog
):
    (library.folder / "fxwarm").write_text("in the way")
    tuned = tune(plan(moe(4, **SIZES)))
    assert not [t for t in tuned if t.error]
    assert "could not write" in caplog.text


def test_a_module_that_is_not_built_is_not_built_by_tuning(library):
    (library.folder / "cached_ops" / "fused_moe_90" / "fused_moe_90.so").write_bytes(b"")
    tuned = tune(plan(moe(4, **SIZES)))
    assert tuned
    assert all("fused_moe_90 is not built" in t.error for t in tuned)


def test_a_failing_library_is_told_in_its_own_words(library, monkeypatch):
    from flashinfer.fused_moe import core

    def broken(*args):
        raise OSError("GLIBC_2.38 not found")

    monkeypatch.setattr(core, "gen_cutlass_fused_moe_sm90_module", broken)
    core.get_cutlass_fused_moe_module.cache_clear()
    tuned = tune(plan(moe(4, **SIZES)))
    assert all("GLIBC_2.38" in t.error for t in tuned)


def test_missing_are_the_entries_that_no_file_holds(library):
    family, planned = FlashInfer(), plan(moe(16, **SIZES))
    assert [p.key for p in family.missing(planned, HOPPER)] == [
        p.key for p in planned if p.key.tag != MODULE
    ]
    tune(planned)
    assert not family.missing(planned, HOPPER)
    files = family.cached(planned)
    assert {p.suffix for p in files} == {".so", ".json"}
    assert all(p.is_file() for p in files)


def test_loading_makes_one_plain_call_a_bucket_and_tunes_nothing(library):
    family, planned = FlashInfer(), plan(moe(16, **SIZES))
    tune(planned)
    library.measured.clear()
    library.runner.ran.clear()
    loaded = list(
        family.load([p for p in planned if p.key.kernel != "trtllm_utils"], HOPPER, lambda c: None)
    )
    assert not [x for x in loaded if x.error]
    assert len(library.runner.ran) == 5
    assert not library.measured


def test_the_live_weights_are_used_where_they_are_known(library, monkeypatch):
    seen = []
    planned = plan(moe(4, **SIZES))
    weight = torch.zeros(4, 16, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(
        library.runner, "run_moe", lambda *a: seen.append(any(x is weight for x in a))
    )
    list(tuning.tune(planned, "sm_90a", lambda call: {"fc1_expert_weights": weight}))
    assert seen == [True]


def test_the_random_state_is_the_users_afterwards(library):
    from fxwarm.runtime import quiet

    planned = plan(moe(16, **SIZES))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with quiet(torch.device("cpu")):
        tune(planned)
    assert torch.equal(torch.rand(3), expected)


def test_warmup_tunes_before_it_loads(library, monkeypatch):
    import msgspec

    from fxwarm import warmup
    from fxwarm.options import resolve
    from fxwarm.records import WarmPlan
    from passes.records import ShapeSet, Site

    done = []
    for name in ("tune", "load", "verify"):
        real = getattr(FlashInfer, name)
        monkeypatch.setattr(
            FlashInfer,
            name,
            lambda self, *a, _real=real, _name=name: (done.append(_name), _real(self, *a))[1],
        )
    call = moe(8, **SIZES)
    planned = tuple(p for p in plan(call) if p.key.kernel != "trtllm_utils")
    made = WarmPlan(HOPPER, (find_library({}),), planned, shapes=ShapeSet((call,), (Site(),)))
    report = warmup.run(
        msgspec.structs.replace(made), resolve({"cache_dir": str(library.folder / "store")}), "cpu"
    )
    assert done[:3] == ["tune", "load", "verify"]
    assert report.status == "complete", report.failed or report.gaps
    assert len(report.tuned) == 8


def test_a_gemm_is_tuned_at_its_most_rows_once_a_weight_shape(library, monkeypatch):
    """``bmm_fp8``: its buckets come from the call's own rows."""
    calls = []
    monkeypatch.setattr(tuning, "run", lambda call, *a: calls.append(call))
    monkeypatch.setattr(tuning, "prepare", lambda *a: None)
    monkeypatch.setattr(tuner, "find", lambda *a: None)
    tuned = tune(plan(bmm(100), bmm(100), bmm(8, n=1024)))
    assert [int(c["A"].dims[1]) for c in calls] == [128, 8]
    assert all("0 of" in t.error for t in tuned)


def test_the_private_names_are_where_we_look_for_them(library):
    """A canary: fails when FlashInfer moves one."""
    import importlib

    from flashinfer.autotuner import AutoTuner

    for module, name, *_ in (*upstream._SPECS.values(), *upstream._GETTERS.values()):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    for name in (
        "_get_override_stack",
        "_get_skip_ops_stack",
        "load_configs",
        "save_configs",
        "search_cache",
    ):
        assert hasattr(AutoTuner, name)
    assert hasattr(
        importlib.import_module("flashinfer.gemm.gemm_base"), "_FP8_GEMM_SM100_TUNING_CONFIG"
    )
    with pytest.raises(exc.LibraryError, match="planned and keyed"):
        upstream.open_module("fused_moe_100")
