"""Planning is arithmetic: every split that a token count can lead to, each variant apart, no library imported."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from fxwarm.families.tilelang import TileLang, declare, of, undeclare
from fxwarm.families.tilelang.statics import statics_of
from fxwarm.records import CompileKey, Library, Target
from fxwarm.testing import check_family
from passes import bound
from passes.records import Dim, Gap, KernelCall, Symbol, TensorSpec
from tests.fxwarm.families.tilelang.calls import EPS, post, pre
from tests.fxwarm.ops.test_mhc import TABLE_7168

H200 = Target.named("h200")
CPU = Target.named("cpu")
LIBRARY = Library("tilelang", "0.1.15", settings=(("deep_gemm", "present"),))


def planned(*calls, target=H200, library=LIBRARY):
    return [p for p in TileLang().keys(calls, target, library) if not isinstance(p, Gap)]


def gaps(*calls, target=H200, library=LIBRARY):
    return [p for p in TileLang().keys(calls, target, library) if isinstance(p, Gap)]


def splits(plan) -> dict[int, int]:
    """Return split count -> tokens of the witness."""
    return {statics_of(p.key)["n_splits"]: int(p.witness["residual"].dims[0]) for p in plan}


def test_the_22_splits_of_hidden_7168_with_their_first_token_counts():  # A7
    plan = planned(pre(7168, 8192))
    assert splits(plan) == TABLE_7168
    assert len(plan) == 22


@pytest.mark.parametrize(
    ("top", "count"), [(256, 4), (512, 8), (1024, 15), (2048, 19), (4096, 21), (8192, 22)]
)
def test_a_smaller_limit_needs_fewer_kernels(top, count):  # A7
    assert len(planned(pre(7168, top))) == count


@pytest.mark.parametrize(
    ("hidden", "count", "head"), [(5120, 22, [80, 66]), (4096, 21, [64, 44]), (2048, 19, [32, 26])]
)
def test_other_hidden_sizes_cap_the_head(hidden, count, head):
    found = splits(planned(pre(hidden, 8192)))
    assert len(found) == count
    assert list(found)[:2] == head


def test_the_graph_alone_gives_the_21_splits_of_hidden_4096():  # A3
    wanted = [64, 44, 33, 26, 22, 18, 16, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert list(splits(planned(pre(4096, 8192)))) == wanted


def test_a_broadcast_first_layer_is_another_set_of_kernels():  # A5
    target = Target("h20", arch="sm_90a", num_sms=78)
    plain = pre(4096, 8192, origin="vllm", norm=True, norm_eps=EPS)
    broadcast = pre(4096, 8192, origin="vllm", norm=True, norm_eps=EPS, broadcast=True, k=4096)
    one, other = planned(plain, target=target), planned(broadcast, target=target)
    assert sorted(splits(one), reverse=True) == [
        64,
        39,
        26,
        19,
        15,
        13,
        11,
        9,
        8,
        7,
        6,
        5,
        4,
        3,
        2,
        1,
    ]
    assert sorted(splits(other), reverse=True) == [16, 15, 13, 11, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert not {p.key for p in one} & {p.key for p in other}
    (at_786,) = planned(bound.at(broadcast, {"s0": 786}), target=target)
    assert statics_of(at_786.key)["n_splits"] == 6
    assert at_786 in other
    assert len([p for p in planned(plain, broadcast, target=target) if p not in one]) == 13


def test_the_delayed_path_is_bucketed():
    call = pre(7168, 8192, origin="vllm", rule="mhc_bucketed", delayed=True, use_pre_mix_in=True)
    assert splits(planned(call)) == {16: 1, 4: 1665, 1: 4225}


@pytest.mark.parametrize(
    "change",
    [
        {"delayed": True, "use_pre_mix_in": False},
        {"delayed": True, "use_pre_mix_in": True},
        {"delayed": True, "use_pre_mix_in": True, "write_aux": True},
        {"norm": True, "norm_eps": EPS},
        {"norm": True, "norm_eps": 1e-5},
        {"rms_eps": 1e-5},
        {"sinkhorn_repeat": 10},
        {"hc_post_mult_value": 1.0},
    ],
    ids=str,
)
def test_every_variant_is_a_key_of_its_own(change):
    plain = {p.key for p in planned(pre(4096, 64, origin="vllm"))}
    assert not plain & {p.key for p in planned(pre(4096, 64, origin="vllm", **change))}


def test_the_fused_post_and_pre_needs_its_extra_splits():
    call = pre(4096, 8192, op="mhc_fused_post_pre", origin="vllm")
    plan = planned(call)
    fuse = [p for p in plan if p.key.kernel == "mhc_pre_big_fuse_tilelang"]
    assert {statics_of(p.key)["n_splits"] for p in fuse} == {8, *splits(planned(pre(4096, 8192)))}
    small = [statics_of(p.key) for p in plan if p.key.kernel == "mhc_fused_tilelang"]
    assert {(s["tile_n"], s["n_splits"], s["n_thr"]) for s in small} == {(2, 8, 128), (6, 8, 128)}
    assert sum(p.key.kernel == "mhc_post_tilelang" for p in plan) == 1
    assert [p.key.kernel for p in planned(bound.at(call, {"s0": 3}))] == [
        "mhc_pre_big_fuse_tilelang",
        "mhc_fused_tilelang",
    ]
    odd = planned(pre(5120 + 256, 32, op="mhc_fused_post_pre", origin="vllm"))
    assert {statics_of(p.key).get("n_splits") for p in odd} == {2}  # 5376 = 42 * 128


@pytest.mark.parametrize("op", ["mhc_pre", "mhc_fused_post_pre"])
def test_the_split_modes_of_a_decode_on_two_streams_are_keys_of_their_own(op):
    given = {"rule": "mhc_bucketed", "delayed": True, "use_pre_mix_in": True, "norm": True}
    call = pre(5120, 8192, op=op, origin="vllm", norm_eps=EPS, write_aux=True, **given)
    for name, wanted in (("h200", set()), ("b200", {"input", "stats"})):
        keys = [statics_of(p.key) for p in planned(call, target=Target.named(name))]
        split = [k for k in keys if "split_mode" in k]
        assert {k["split_mode"] for k in split} == wanted
        assert {k["n_splits"] for k in split} == ({16} if wanted else set()), "16 tokens at most"
        assert not any("write_aux" in k for k in split)
        assert {k["n_splits"] for k in keys if k.get("write_aux")} >= {1, 4, 16}


def test_what_is_not_known_is_a_gap():
    held = gaps(
        pre(4096, 64, origin="vllm", delayed=True, use_pre_mix_in=True, norm=True, norm_eps=EPS)
    )
    assert "vLLM holds these kernels itself" in held[0].reason
    bare = Library("tilelang", "0.1.15", settings=(("deep_gemm", "absent"),))
    assert "install deep_gemm" in gaps(pre(4096, 64, origin="vllm"), library=bare)[0].reason
    assert "for a CPU" in gaps(pre(4096, 64, origin="vllm"), target=CPU)[0].reason
    alone = Library("tilelang", "0.1.15", installed=True, settings=(("tile-kernels", "absent"),))
    assert "pip install --no-deps tile-kernels" in gaps(pre(4096, 64), library=alone)[0].reason
    assert len(planned(pre(256, 64), target=CPU, library=alone)) == 1
    b200 = Target.named("b200")
    assert (
        "sm_90a only"
        in gaps(pre(4096, 64, op="mhc_fused_post_pre", origin="vllm"), target=b200)[0].reason
    )


def test_the_cpu_plans_our_own_kernels():
    (key,) = {p.key.kernel for p in planned(pre(256, 4096), target=CPU)}
    assert key == "mhc_pre_big_fuse_cpu"
    assert list(splits(planned(pre(256, 4096), target=CPU))) == [4, 3, 2]
    assert [str(p.key) for p in planned(post(256), target=CPU)] == [
        "mhc_post_cpu<hidden=256, mhc=4>"
    ]
    assert [str(p.key) for p in planned(post(7168))] == ["_mhc_post_fwd<hidden=7168, mhc=4>"]


def test_a_product_too_large_to_enumerate_is_still_covered():
    symbols = (Symbol("s0", 1, 4096), Symbol("s1", 1, 4096))
    call = pre(7168, 8192)
    tokens = Dim("s0*s1", 1, 4096 * 4096)
    attrs = tuple((n, tokens if n == "tokens" else v) for n, v in call.attrs)
    call = msgspec.structs.replace(call, symbols=symbols, attrs=attrs)
    plan = planned(call)
    assert {statics_of(p.key)["n_splits"] for p in plan} == set(TABLE_7168)
    assert all(p.witness is None for p in plan)


def test_a_batch_without_a_bound_is_a_gap():
    call = pre(7168, 8192)
    tokens = Dim("s0", 1, None)
    attrs = tuple((n, tokens if n == "tokens" else v) for n, v in call.attrs)
    call = msgspec.structs.replace(call, symbols=(Symbol("s0", 1, None),), attrs=attrs)
    assert not planned(call)
    assert "upper bound" in gaps(call)[0].reason


def test_the_family_keeps_the_laws():
    check_family(TileLang(), [pre(7168, 8192), post(7168)], H200, library=LIBRARY)
    check_family(
        TileLang(), [pre(4096, 300, op="mhc_fused_post_pre", origin="vllm")], H200, library=LIBRARY
    )
    check_family(TileLang(), [pre(256, 8192)], CPU, library=LIBRARY)


def test_a_key_reads_back_as_the_statics_that_the_op_passes():
    from fxwarm.ops.mhc_factories import pre_statics

    key = planned(pre(7168, 64))[0].key
    again = msgspec.json.decode(msgspec.json.encode(key), type=CompileKey)
    assert statics_of(again) == pre_statics(7168, 4, 112, EPS, EPS, EPS, 2.0, 20)
    types = {type(v) for v in statics_of(again).values()}
    assert types == {int, float}
    one, other = (planned(pre(7168, 64, hc_post_mult_value=v))[0].key for v in (2, 2.0))
    assert one == other


def tiles_call(top: int = 4096) -> KernelCall:
    symbols = (Symbol("s0", 1, top),)
    rows = bound.bound_dim("s0", symbols, ())
    x = TensorSpec("float32", (rows, Dim.static(96)))
    return KernelCall("tilelang", "toy::scaled", (("x", x),), (("factor", 0.5),), symbols)


def test_a_picture_calls_a_pre_norm_kernel_by_its_splits_alone():
    fuse, after = planned(pre(7168, 64))[0].key, planned(post(7168))[0].key
    assert TileLang().label(fuse) == "112 splits"
    assert TileLang().label(after) == ""  # what differs among its arguments serves


def test_any_kernel_is_planned_from_one_declaration():
    path = "tests.fxwarm.families.tilelang.toy:scaled"
    declare(
        "toy::scaled",
        path,
        lambda call, target: {
            "width": call["x"].dims[1],
            "factor": call.attr("factor"),
            "step": of("Min(4, (m + 511)//512)", m=call["x"].dims[0]),
        },
    )
    try:
        plan = planned(tiles_call(), target=CPU)
        check_family(TileLang(), [tiles_call()], CPU, library=LIBRARY)
    finally:
        undeclare("toy::scaled")
    assert [str(p.key) for p in plan] == [
        f"scaled<factor=0.5, step={n}, width=96>" for n in (1, 2, 3, 4)
    ]
    assert [int(p.witness["x"].dims[0]) for p in plan] == [1, 513, 1025, 1537]
    assert plan[0].key.tag == path
    assert "not declared here" in gaps(tiles_call(), target=CPU)[0].reason


@pytest.mark.parametrize(
    ("op", "factory"), [("scaled", "a.b:c"), ("toy::scaled", "a.b.c"), ("toy::scaled", ":c")]
)
def test_a_declaration_is_checked(op, factory):
    with pytest.raises(ValueError, match="write it as"):
        declare(op, factory, lambda call, target: {})


def test_planning_imports_no_kernel_library():
    code = (
        "import sys\n"
        "from tests.fxwarm.families.tilelang.test_keys import planned, pre\n"
        "assert len(planned(pre(7168, 8192))) == 22\n"
        "print([m for m in ('tilelang', 'tile_kernels', 'tvm', 'deep_gemm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
