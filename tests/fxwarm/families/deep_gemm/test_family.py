"""What is planned: the kernels of public bug reports, counted; and the family as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fxwarm import exc, planner
from fxwarm.families.deep_gemm import DeepGemm
from fxwarm.families.deep_gemm.build import by_cost
from fxwarm.families.deep_gemm.shapes import local_experts
from fxwarm.family import check
from fxwarm.records import Library, Planned, Target
from passes.records import Gap
from tests.fxwarm.families.deep_gemm.samples import contiguous, dense, masked, prenorm, sgl

H200 = Target.named("h200")


def plan(*calls, library: Library | None = None, target: Target = H200) -> list[Planned]:
    found = list(DeepGemm().keys(calls, target, library or sgl()))
    assert not [f for f in found if isinstance(f, Gap)], found
    return [f for f in found if isinstance(f, Planned)]


def gemms(planned: list[Planned]) -> list[Planned]:
    return [p for p in planned if p.key.tag != "transpose_fp32"]


def rows(planned: Planned) -> int:
    return int(planned.witness["a"].dims[-2])


def test_it_is_a_family():
    family = check(DeepGemm)
    assert family.name == "deep_gemm"
    assert {"record", "build", "verify", "prepare", "drift"} <= set(dir(family))


def test_importing_it_imports_no_torch_and_no_library():
    code = (
        "import sys, fxwarm.families.deep_gemm as d; d.DeepGemm; "
        "print([m for m in ('torch', 'deep_gemm', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("n", "k", "upper", "kernels"),
    [
        pytest.param(2112, 7168, 8192, 24, id="A14"),
        pytest.param(576, 5120, 8192, 19, id="A14-narrow"),
        pytest.param(2112, 7168, 2048, 20, id="A16"),
        pytest.param(576, 7168, 8192, 18, id="A23"),
        pytest.param(4096, 7168, 256, 6, id="A27"),
    ],
)
def test_dense_kernels_of_public_reports(n, k, upper, kernels):
    planned = plan(dense(n, k, upper=upper))
    assert len(gemms(planned)) == kernels
    assert len(planned) == kernels + 1  # row-major scales: one transpose for this K
    assert min(map(rows, planned)) == 1


def test_sampling_every_128th_row_missed_eight_kernels():  # A16
    full = gemms(plan(dense(2112, 7168, upper=2048)))
    sampled = {p.key for m in range(128, 2048, 128) for p in gemms(plan(dense(2112, 7168, m=m)))}
    assert len({p.key for p in full} - sampled) == 8
    for m in (540, 2048):
        (one,) = gemms(plan(dense(2112, 7168, m=m)))
        assert one.key in {p.key for p in full} - sampled


def test_planned_keys_equal_asking_at_every_size():
    full = {p.key for p in plan(dense(2112, 7168, upper=700))}
    each = {p.key for m in range(1, 701) for p in plan(dense(2112, 7168, m=m))}
    assert full == each


def test_the_group_count_is_part_of_a_masked_key():  # A21
    one, many = (plan(masked(g, 4096, 7168, 1024)) for g in (1, 32))
    assert (len(gemms(one)), len(gemms(many))) == (10, 2)
    assert not {p.key for p in gemms(one)} & {p.key for p in gemms(many)}


def test_another_rank_count_is_another_group_count():  # C14
    keys = {}
    for ranks in (4, 6, 8):
        groups = local_experts(384, ranks)
        keys[groups] = {p.key for p in plan(contiguous(groups, 4096, 7168))}
    assert sorted(keys) == [48, 64, 96]
    union = {p.key for p in plan(*(contiguous(g, 4096, 7168) for g in keys))}
    assert union == set().union(*keys.values())
    assert not keys[64] - union  # moving from 8 to 6 ranks builds nothing
    with pytest.raises(ValueError, match="384 experts over 5 ranks leave a remainder of 4"):
        local_experts(384, 5)


def test_shapes_that_share_a_kernel_have_one_key_and_the_smallest_witness():
    qkv, o = dense(5120, 2048), dense(2048, 4096)  # Qwen3-30B-A3B-FP8
    together = gemms(plan(qkv, o))
    assert len(together) == 25
    assert len(gemms(plan(qkv))) + len(gemms(plan(o))) == 39
    smallest = {p.key: rows(p) for p in gemms(plan(o))}
    for p in gemms(plan(qkv)):
        smallest[p.key] = min(rows(p), smallest.get(p.key, rows(p)))
    assert {p.key: rows(p) for p in together} == smallest


def test_upstream_compiles_n_and_k_in():
    tokenspeed = Library("tokenspeed-deepgemm", "2.5.0.post20260629")
    keys = {p.key for p in gemms(plan(dense(2112, 7168), library=tokenspeed))}
    assert all({"2112", "7168"} <= set(k.template) for k in keys)


def test_settings_enter_the_keys():
    base = {p.key for p in gemms(plan(dense(2112, 7168)))}
    assert not base & {p.key for p in gemms(plan(dense(2112, 7168), library=sgl(num_sms="120")))}
    plain, psum = (
        {p.key for p in gemms(plan(contiguous(32, 1536, 2048, **kw)))}
        for kw in ({}, {"use_psum_layout": True})
    )
    assert not plain & psum


def test_prenorm_takes_the_image_of_num_splits():
    planned = plan(prenorm(24, 28672))
    assert len(planned) == 22
    splits = sorted(int(p.key.template[5]) for p in planned)
    assert splits == [*range(1, 15), 16, 18, 22, 26, 33, 44, 66, 112]
    assert all(p.witness.attr("num_splits") == int(p.key.template[5]) for p in planned)


@pytest.mark.parametrize(
    ("strides", "witnesses"),
    [
        pytest.param((), [1], id="row-major"),
        pytest.param(("1", "s0"), [1], id="unpadded column: contiguous at one row alone"),
        pytest.param(("1", "4*((s0 + 3)//4)"), [], id="padded column: nothing to do"),
    ],
)
def test_layout_kernels_follow_the_strides_of_the_graph(strides, witnesses):
    planned = plan(dense(2112, 7168, sf=strides))
    layout = [p for p in planned if p.key.tag == "transpose_fp32"]
    assert [rows(p) for p in layout] == witnesses
    assert all(p.key.template == ("512", "64", "56") for p in layout)


def test_an_unpadded_column_from_two_rows_on_needs_no_layout_kernel():
    from passes.records import Symbol

    call = dense(2112, 7168, sf=("1", "s0"))
    call = type(call)(call.family, call.op, call.tensors, call.attrs, (Symbol("s0", 2, 8192),))
    assert not [p for p in plan(call) if p.key.tag == "transpose_fp32"]


def test_what_is_not_modelled_is_a_gap():
    unknown = sgl("9.9.9")
    (gap,) = DeepGemm().keys([dense(2112, 7168)], H200, unknown)
    assert isinstance(gap, Gap)
    assert "9.9.9" in gap.reason
    assert "known are" in gap.reason
    found = list(DeepGemm().keys([dense(64, 128, recipe=(1, 1, 128))], H200, sgl()))
    assert "float32 d and c" in found[0].reason


def test_a_cpu_runs_references():
    cpu = Target.named("cpu")
    call = dense(2112, 7168)
    assert list(DeepGemm().keys([call], cpu, sgl())) == []
    assert not DeepGemm().needs_nothing(call, H200, sgl())


def test_the_laws_of_a_family_hold():
    from fxwarm.testing import check_family

    keys = check_family(DeepGemm, [dense(2112, 7168), dense(576, 5120)], H200, library=sgl())
    assert len(keys) > 24


def test_a_plan_has_the_smallest_sizes_first_in_whatever_order_the_library_was_asked():
    calls = [dense(2112, 7168), dense(576, 5120)]
    modelled = plan(*calls)

    class Asked(DeepGemm):
        def record(self, calls, target, library):
            yield from by_cost(modelled)

    found, gaps, notes = planner._plan_family(
        Asked(), calls, H200, Library("sgl-deep-gemm", "0.1.5.post1", installed=True),
        ask=True, on_planned=None,
    )  # fmt: skip
    assert [p.key for p in found] == [p.key for p in modelled] != [p.key for p in by_cost(modelled)]
    assert [min(map(rows, found)), gaps, notes] == [rows(found[0]), [], []]


def test_an_unknown_wanted_version_is_refused():
    with pytest.raises(exc.LibraryError, match="known are sgl-deep-gemm"):
        DeepGemm().library({"sgl-deep-gemm": "9.9.9"})
    named = DeepGemm().library({"sgl-deep-gemm": "0.2.0"})
    assert (named.version, dict(named.settings)["generation"]) == ("0.2.0", "B")
