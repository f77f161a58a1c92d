"""The library asked in a child process: the same keys as the rules it runs, exact names, no traces."""

from __future__ import annotations

import json
import time

import msgspec
import pytest

from fxwarm import exc
from fxwarm.families.deep_gemm import DeepGemm, build, recorder, sweep
from fxwarm.families.deep_gemm.buffers import unread_in
from fxwarm.families.deep_gemm.build import by_cost
from fxwarm.families.deep_gemm.library import find_library
from fxwarm.families.deep_gemm.recorder import Recorder, compare
from fxwarm.records import Planned, Target
from passes.records import Gap
from tests.fxwarm.families.deep_gemm.conftest import is_running, runs_of
from tests.fxwarm.families.deep_gemm.samples import (
    BF16,
    F32,
    contiguous,
    dense,
    masked,
    name_of,
    prenorm,
    sgl,
    spec,
)
from tests.fxwarm.families.deep_gemm.samples import call as call_of

CPU_H200 = msgspec.structs.replace(Target.named("h200"), device="cpu")
"""The fake library's tensors live on the CPU; everything else is as on the card."""
CALLS = (
    dense(2112, 7168, upper=300),
    dense(2112, 7168, upper=40, sf=("1", "s0")),
    contiguous(8, 512, 1024, upper=6),
    masked(4, 512, 1024, most=512, upper=200),
    prenorm(24, 8192, upper=2000),
)


@pytest.fixture
def asked(fake, toolkit):
    """Return what records calls with a fresh recorder, and ends it."""
    made: list[Recorder] = []

    def ask(
        *calls, generation="A", body="", memory=1 << 30, first=(), real_torch=False, **patience
    ):
        if not made:
            toolkit()
            fake(generation, body, real_torch=real_torch)
            made.append(Recorder(CPU_H200, find_library({}), **patience))
        return list(made[0].record(calls, memory=memory, first=first))

    ask.made = made
    yield ask
    for r in made:
        r.close()


@pytest.mark.parametrize("generation", ["A", "B"])
def test_recorded_keys_are_the_modelled_ones(asked, generation, tmp_path):
    recorded = asked(*CALLS, generation=generation, real_torch=generation == "A")
    assert not [r for r in recorded if isinstance(r, Gap)]
    found = find_library({})
    modelled = list(DeepGemm().keys(CALLS, Target.named("h200"), found))
    assert compare(modelled, recorded) == []
    assert len({r.key for r in recorded}) == len(recorded)
    ours = {p.key: p.witness for p in modelled}
    for r in recorded:
        m = [int(w["a"].dims[-2]) for w in (r.witness, ours[r.key])]
        assert m[0] == m[1], (r.witness, ours[r.key])
    text = (tmp_path / "cuda" / "version.txt").read_text()
    package = tmp_path / "site" / "deep_gemm"
    for r in recorded:
        source = r.source
        name = name_of(r.key.tag, source.code, source.flags, generation, package, text)
        assert name == source.entry
        assert any(f.startswith("--gpu-architecture=sm_90a") for f in source.flags)
        assert not [f for f in source.flags if f.endswith((".cu", ".cubin"))]


def test_the_real_cache_and_compiler_are_left_alone(asked, tmp_path):
    asked(CALLS[0])
    assert not (tmp_path / "cache").exists()
    assert runs_of(tmp_path / "cuda") == 1  # the kernel that does nothing
    room = asked.made[0]._room
    assert list(room.glob("r*")) == []
    asked.made[0].close()
    assert not room.exists()


def test_one_child_serves_all_graphs_and_tells_each_all_of_its_kernels(asked):
    first = asked(CALLS[0])
    pid = asked.made[0]._child.pid
    again = asked(CALLS[0], CALLS[2])
    assert asked.made[0]._child.pid == pid
    assert {p.key for p in first} < {p.key for p in again}


def test_settings_of_this_process_are_repeated(asked, monkeypatch):
    plain = {p.key for p in asked(CALLS[0])}
    r = asked.made[0]
    r.found = msgspec.structs.replace(r.found, settings=(("generation", "A"), ("num_sms", "120")))
    fewer = {p.key for p in asked(CALLS[0])}
    assert any("120" in k.template for k in fewer)
    assert not {k for k in plain & fewer if "gemm" in k.tag}


def test_a_library_that_fails_every_call_is_named(asked):
    body = """
    def fp8_gemm_nt(a, b, d, **_):
        raise RuntimeError("Assertion error (layout.hpp:15): dim == 2 or dim == 3")
    """
    with pytest.raises(exc.LibraryError, match="built for another torch") as error:
        asked(CALLS[0], body=body)
    assert "0.1.5.post1" in str(error.value)


def test_what_one_call_refuses_is_a_gap_and_the_others_go_on(asked):
    body = """
    def tf32_hc_prenorm_gemm(a, b, d, sqr_sum, num_splits=None):
        raise RuntimeError("n is odd")
    del fp8_m_grouped_gemm_nt_masked
    """
    found = asked(*CALLS, body=body)
    gaps = {g.op: g.reason for g in found if isinstance(g, Gap)}
    assert set(gaps) == {"tf32_hc_prenorm_gemm", "m_grouped_fp8_gemm_nt_masked"}
    assert "n is odd" in gaps["tf32_hc_prenorm_gemm"]
    assert "M=1" in gaps["tf32_hc_prenorm_gemm"]
    assert "does not export" in gaps["m_grouped_fp8_gemm_nt_masked"]
    assert [p for p in found if isinstance(p, Planned)]


def test_a_child_that_dies_is_reported_and_the_next_request_gets_another(asked, tmp_path):
    body = """
    def fp8_gemm_nt(a, b, d, **_):
        if not os.path.exists("@MARK@"):
            open("@MARK@", "w").close()
            import sys; print("my last words", file=sys.stderr, flush=True)
            os.abort()
    """.replace("@MARK@", str(tmp_path / "mark"))
    with pytest.raises(exc.LibraryError, match="my last words") as error:
        asked(CALLS[0], body=body)
    assert "SIGABRT" in str(error.value)
    assert asked(CALLS[0]) == []  # this fake asks for nothing the second time


def test_a_library_that_does_not_import_is_reported(asked):
    with pytest.raises(exc.LibraryError, match="no toolkit here"):
        asked(CALLS[0], body='raise AssertionError("no toolkit here")')


def test_a_hanging_compiler_is_given_up_and_ended(asked, monkeypatch):
    script = recorder.standin.SCRIPT.replace("exec cp", "sleep 1000; exec cp")
    monkeypatch.setattr(recorder.standin, "SCRIPT", script)
    start = time.monotonic()
    with pytest.raises(exc.LibraryError, match="said nothing for 2 s"):
        asked(CALLS[0], patience=2.0)
    assert time.monotonic() - start < 40
    assert asked.made[0]._child is None


def test_no_child_outlives_its_recorder(asked):
    asked(CALLS[0])
    pid = asked.made[0]._child.pid
    asked.made[0].close()
    assert not is_running(pid)
    asked.made[0].close()


def test_without_a_compiler_the_reason_is_one_sentence(asked, monkeypatch):
    monkeypatch.setattr("tests.fxwarm.families.deep_gemm.conftest.NVCC", "#!/bin/sh\nexit 1\n")
    with pytest.raises(exc.LibraryError, match="set CUDA_HOME") as error:
        asked(CALLS[0])
    assert "nvcc --version gave exit code 1" in str(error.value)


def test_where_no_fork_can_open_the_device_one_child_serves_one_request(asked):
    body = """
    import torch
    _zeros, _parent = torch.zeros, os.getpid()
    def zeros(*args, **options):
        if os.getpid() != _parent:
            raise RuntimeError("initialization error")
        return _zeros(*args, **options)
    torch.zeros = zeros
    """
    first = asked(CALLS[0], body=body)
    assert asked.made[0]._child is None
    assert {p.key for p in asked(CALLS[0])} == {p.key for p in first}


def test_where_the_library_uses_nvrtc_it_is_asked_as_with_nvcc(asked, monkeypatch):
    plain = asked(CALLS[0])
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    found = find_library({})
    assert dict(found.environment) == {"DG_JIT_USE_NVRTC": "1"}
    assert list(DeepGemm().record([CALLS[0]], CPU_H200, found)) == []  # there the model serves
    asked.made[0].close()
    assert [(p.key, p.source) for p in asked(CALLS[0])] == [(p.key, p.source) for p in plain]


def test_beyond_a_million_calls_one_size_of_each_interval_is_asked(monkeypatch, asked):
    full = asked(CALLS[0], CALLS[3])
    monkeypatch.setattr(sweep, "MOST_CALLS", 100)
    thin = sweep.thin(sweep.make_sweep(CALLS[0]))
    assert len(thin.points) < 40
    assert {1, 17, 33, 49, 65, 128, 255, 256} <= {thin.m_at(i) for i in range(len(thin.points))}
    assert {p.key: p.witness for p in asked(CALLS[0], CALLS[3])} == {p.key: p.witness for p in full}


def test_a_literal_m_is_never_thinned():
    made = sweep.make_sweep(dense(2112, 7168, upper=300, compiled_dims="mn"))
    assert len(sweep.thin(made).points) == 300


def test_what_takes_long_to_compile_is_asked_first(asked):
    plain = asked(*CALLS)
    modelled = by_cost(list(DeepGemm().keys(CALLS, Target.named("h200"), find_library({}))))
    found = asked(*CALLS, first=modelled)
    assert {p.key: (p.witness, p.source) for p in found} == {
        p.key: (p.witness, p.source) for p in plain
    }
    costs, before = (
        [build._cost(p.key) for p in some if "gemm" in p.key.tag] for some in (found, plain)
    )
    assert costs == sorted(costs, reverse=True) != before


def test_a_wrong_model_loses_nothing(asked):
    plain = asked(*CALLS)
    unknown = msgspec.structs.replace(plain[0].key, template=("1",))
    other = dense(2112, 7168, m="200", compiled_dims="nk")  # no call of ours
    found = asked(*CALLS, first=[Planned(unknown, other)])
    assert [p.witness for p in found if p not in plain] == [
        other
    ]  # built as well, and told as drift
    assert {p.key for p in found} > {p.key for p in plain}


def test_a_small_budget_asks_one_size_of_each_interval_and_names_what_it_leaves_out(asked):
    full = asked(*CALLS[:3])
    whole = [sweep.make_sweep(call) for call in CALLS[:3]]
    needs = sum(int(s.real_bytes().max()) for s in whole)
    assert needs < 2 << 20  # scales and ids: neither weights nor outputs have to be there
    assert asked(*CALLS[:3], memory=needs) == full
    found = asked(*CALLS[:3], memory=needs // 2)
    gaps = [f for f in found if isinstance(f, Gap)]
    assert gaps
    assert all("raise fxwarm.memory" in g.reason and "from M=" in g.reason for g in gaps)
    assert {f.key for f in found if isinstance(f, Planned)} < {p.key for p in full}
    kept, _ = sweep.within(whole, needs // 2)
    assert sum(int(s.real_bytes().max(initial=0)) for s in kept) <= needs // 2


@pytest.mark.parametrize("change", [{}, {"ensure_zero_padding": True}])
def test_an_output_is_only_pretended_where_nobody_but_the_kernel_touches_it(change):
    call = contiguous(8, 512, 1024, upper=6, **change)
    made = sweep.make_sweep(call)
    d = 2 * 512 * 128 * 6
    assert (int(made.real_bytes().max()) > d) == bool(change)
    names = unread_in(call.op, made.tensors, made.attrs)
    assert ("d" in names) == (not change)
    assert "d" not in unread_in(call.op, [*made.tensors, "c"], {})
    assert "d" not in unread_in("einsum", made.tensors, {})


def test_c_of_the_shape_of_d_is_d_and_takes_no_memory_of_its_own():
    import torch

    from fxwarm.families.deep_gemm.buffers import Buffers, Call

    tensors = [("a", spec(BF16, "s0", 128, 64)), ("b", spec(BF16, "s0", 256, 64))]
    tensors += [("d", spec(F32, 128, 256))]
    alone = call_of("einsum", tensors, 8, {"expr": "bmk,bnk->mn"})
    both = call_of("einsum", [*tensors, ("c", tensors[-1][1])], 8, {"expr": "bmk,bnk->mn"})
    made = sweep.make_sweep(both)
    assert (made.real_bytes() == sweep.make_sweep(alone).real_bytes()).all()
    call = Call(json.loads(json.dumps(made.request())), torch)
    call.allocate(Buffers(torch, "cpu", call.operand_bytes))
    values = call.values(3)
    assert values["c"] is values["d"]
    assert values["d"].shape == (128, 256)


def test_buffers_are_shared_and_bounded():
    import torch

    from fxwarm.families.deep_gemm.buffers import Buffers, Call

    call = Call(sweep.make_sweep(CALLS[0]).request(), torch)
    assert call.operand_bytes == 2112 * 7168
    call.allocate(Buffers(torch, "cpu", call.operand_bytes))
    values = call.values(4)
    assert values["a"].shape == (5, 7168)
    assert values["a"].data_ptr() == values["b"].data_ptr() == values["d"].data_ptr()
    assert values["a_sf"].data_ptr() != values["b_sf"].data_ptr()


def test_drift_names_shape_and_size():
    planned = list(DeepGemm().keys([CALLS[0]], Target.named("h200"), sgl()))
    other = Planned(msgspec.structs.replace(planned[0].key, template=("1",)), planned[0].witness)
    notes = compare(planned, [other, *planned[1:]])
    assert len(notes) == 2
    assert all("[1, 7168]" in n and "drift" in n for n in notes)
