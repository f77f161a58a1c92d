"""Planning: pure, complete, and every option that changes the valid tactics in the key."""

from __future__ import annotations

import itertools
import json

import pytest

from fxwarm.families.flashinfer import FlashInfer
from fxwarm.families.flashinfer.keys import MODULE, rows_of, with_rows
from fxwarm.families.flashinfer.tuner_key import entries_at, is_tuned
from fxwarm.families.flashinfer.versions import KNOWN
from fxwarm.records import Library, Planned, Target, digest
from fxwarm.testing import check_family
from passes import bound
from passes.records import Gap
from tests.conftest import cases
from tests.fxwarm.families.flashinfer.calls import block_scale_moe, bmm, moe, mono, trtllm

HOPPER = Target.named("h200")
LIBRARY = Library("flashinfer-python", "0.6.18.post1")


def plan(*calls, target=HOPPER, library=LIBRARY):
    found = list(FlashInfer().keys(calls, target, library))
    return [p for p in found if isinstance(p, Planned)], [g for g in found if isinstance(g, Gap)]


@pytest.mark.parametrize(
    "call",
    [moe(1000), block_scale_moe(300), bmm(8), bmm(100), mono()],
    ids=lambda c: f"{c.op}-{c.symbols[0].upper}",
)
def test_the_laws_hold(call):
    check_family(FlashInfer(), [call], samples=20, library=LIBRARY)


def test_the_laws_hold_on_blackwell():
    check_family(
        FlashInfer(), [trtllm(), moe(300)], Target.named("b200"), samples=10, library=LIBRARY
    )


def test_a_tuned_layer_needs_its_module_the_delay_kernel_and_two_entries_a_bucket():
    planned, gaps = plan(moe(1024))
    assert not gaps
    assert [str(p.key) for p in planned[:2]] == ["fused_moe_90<sm_90a>", "trtllm_utils<sm_90a>"]
    assert len([p for p in planned if is_tuned(p.key)]) == 2 * 12
    assert {p.key.kernel for p in planned[2:]} == {"gemm1", "gemm2"}
    assert all(not p.witness.symbols for p in planned)


def test_equal_layers_share_all_keys_and_one_module_serves_every_shape():
    one, _ = plan(moe(512))
    two, _ = plan(moe(512), moe(512))
    other, _ = plan(moe(512), moe(512, inter=1024))
    assert one == two
    assert len([p for p in other if p.key.tag == MODULE]) == 2
    assert len([p for p in other if is_tuned(p.key)]) == 2 * len(
        [p for p in one if is_tuned(p.key)]
    )


CHANGES = {
    "output_dtype": "float16",
    "tp_size": 2,
    "tp_rank": 1,
    "ep_size": 4,
    "ep_rank": 3,
    "cluster_size": 2,
    "cluster_rank": 1,
    "enable_alltoall": True,
    "use_w4_group_scaling": True,
    "use_packed_weights": True,
    "use_wfp4afp8_humming": True,
    "enable_pdl": False,
    "activation_type": 4,
    "use_fused_finalize": False,
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_that_changes_the_tactics_changes_the_key(name):
    one, other = plan(moe(64))[0], plan(moe(64, **{name: CHANGES[name]}))[0]
    tuned = [{p.key for p in planned if is_tuned(p.key)} for planned in (one, other)]
    assert tuned[0].isdisjoint(tuned[1])
    file_keys = [entries_at(with_rows(c, 8), 8, "sm_90a", KNOWN["0.6.18.post1"]) for c in (moe(64), moe(64, **{name: CHANGES[name]}))]  # fmt: skip
    assert file_keys[0][0].file_key != file_keys[1][0].file_key


def test_top_k_dtype_and_bias_are_in_the_key():
    variants = [moe(8), moe(8, top_k=2), moe(8, dtype="float16"), moe(8, dtype="float8_e4m3fn")]
    keys = [{p.key for p in plan(c)[0] if is_tuned(p.key)} for c in variants]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(keys, 2))


def test_what_the_device_can_do_is_the_default_of_enable_pdl():
    assert plan(moe(8))[0] == plan(moe(8, enable_pdl=True))[0]


def test_the_limit_is_no_part_of_the_key():
    assert plan(moe(8))[0] == plan(moe(8, tune_max_num_tokens=100))[0]


def test_two_limits_in_one_process_are_reported():
    _, gaps = plan(moe(64), moe(64, tune_max_num_tokens=5000))
    assert len(gaps) == 1
    assert "tune_max_num_tokens=5000 and 8192" in gaps[0].reason


def test_newer_releases_leave_the_ranks_out_of_the_key():
    new = Library("flashinfer-python", "0.7.2.post1")
    assert plan(moe(8, tp_rank=1), library=new)[0] == plan(moe(8), library=new)[0]


@pytest.mark.parametrize(
    "case", [c for c in cases("plan") if c.values[0].get("id", "C11") == "C11"]
)
def test_a_layout_flag_keeps_stored_results_apart(case):
    one, other = (moe(16, **flags) for flags in case["input"]["calls"])
    planned, _ = plan(one, other)
    first, second = ({p.key for p in plan(c)[0] if is_tuned(p.key)} for c in (one, other))
    assert first.isdisjoint(second)  # two keys, two tuning entries
    assert {p.key for p in planned if is_tuned(p.key)} == first | second
    receipts = {digest(c, sorted(k for k in keys)) for c, keys in ((one, first), (other, second))}
    assert len(receipts) == 2


def test_a_block_scale_layer_is_not_tuned_and_names_what_is_compiled_at_call_time():
    planned, gaps = plan(block_scale_moe(8192, experts=128, inter=768))
    assert not gaps
    assert [p.key.kernel for p in planned if p.key.tag == MODULE] == ["fused_moe_90"]
    first = [int(rows_of(p.witness)) for p in planned if p.key.template[:2] == ("1536", "2048")]
    assert first == [1, 17, 25, 32, 65]
    assert len(planned) == 1 + 2 * 5


def test_profile_ids_bypass_the_tuner():
    planned, _ = plan(moe(64, profile_ids=(1, 5)))
    assert [str(p.key) for p in planned] == ["fused_moe_90<sm_90a>"]


def test_low_batch_gemms_are_planned_at_the_rows_they_serve():
    planned, _ = plan(bmm(8))
    tuned = [p for p in planned if is_tuned(p.key)]
    assert [int(rows_of(p.witness)) for p in tuned] == [1, 2, 3, 5]  # buckets 1, 2, 4, 8
    assert {p.key.tag for p in tuned} == {"fp8_gemm"}


@pytest.mark.parametrize(
    ("call", "target", "says"),
    [
        (moe(8, min_latency_mode=True), HOPPER, "min_latency_mode"),
        (moe(8, use_mxfp8_act_scaling=True), HOPPER, "SM100"),
        (block_scale_moe(8), Target.named("b200"), "SM90 alone"),
        (trtllm(), HOPPER, "SM100"),
        (mono(16), HOPPER, "at most 8 rows"),
        (mono(8, experts=128), HOPPER, r"\[256, 2048, 512\]"),
        (bmm(8, backend="cudnn"), HOPPER, "backend='cublas'"),
    ],
)
def test_what_has_no_kernel_is_a_gap_that_says_why(call, target, says):
    _, gaps = plan(call, target=target)
    assert len(gaps) == 1
    assert pytest.importorskip("re").search(says, gaps[0].reason), gaps[0].reason


def test_mono_moe_is_still_planned_for_the_rows_it_serves():
    planned, _ = plan(mono(16))
    assert [str(p.key) for p in planned] == ["monomoe<sm_90a>"]


def test_an_unknown_version_is_a_gap_unless_it_is_installed():
    planned, gaps = plan(moe(8), library=Library("flashinfer-python", "0.9.1"))
    assert not planned
    assert "0.9.1 is not known" in gaps[0].reason
    planned, gaps = plan(moe(8), library=Library("flashinfer-python", "0.9.1", installed=True))
    assert planned
    assert not gaps


def test_versions_that_round_down_are_a_gap():
    _, gaps = plan(moe(8), library=Library("flashinfer-python", "0.6.9", installed=True))
    assert "rounds token counts down" in gaps[0].reason


def test_on_a_cpu_there_is_nothing_to_warm():
    assert plan(moe(8), target=Target.named("cpu")) == ([], [])


def test_the_files_key_is_the_one_that_the_library_writes(library):
    """Built by the library's own runner and tuner, compared with ours."""
    from flashinfer.autotuner import AutoTuner

    from fxwarm.families.flashinfer import stored, tuning
    from fxwarm.families.flashinfer.library import find_library

    call = moe(40, experts=4, hidden=16, inter=8, top_k=2, use_fused_finalize=False)
    planned, _ = plan(call, library=find_library({}))
    list(tuning.tune(planned, "sm_90a", lambda c: None))
    ours = {stored.entry_of(p, "sm_90a").file_key for p in planned if is_tuned(p.key)}
    assert ours == {k.file_key for k in AutoTuner.get().profiling_cache}
    stored = json.loads(next((library.folder / "fxwarm").iterdir()).read_text())
    assert ours == {k for k in stored if not k.startswith("_")}


def test_a_static_call_is_planned_as_it_is():
    static = bound.at(moe(64), {"s0": 3})
    planned, _ = plan(static)
    assert {p.key.template[0] for p in planned if is_tuned(p.key)} == {"input[4, 2048]"}
