"""FlashInfer's own behaviour that this family is built around, shown by its own functions.

Each test first shows the trap, then what this family does about it. One that no longer shows it fails: then the way
around can go. Buckets, limits and tactics files have tests of their own in ``test_buckets`` and ``test_tuning``.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fxwarm.families.flashinfer import FlashInfer, cache, modules, stored, tuner, tuning
from fxwarm.families.flashinfer.library import find_library
from fxwarm.families.flashinfer.tuner_key import is_tuned
from fxwarm.records import CompileKey, Planned, Target
from passes import bound
from passes.records import Gap
from tests.fxwarm.families.flashinfer.calls import moe, trtllm

SIZES = {"experts": 4, "hidden": 16, "inter": 8, "top_k": 2}
HOPPER = Target.named("h200")


def plan(*calls, target=HOPPER):
    found = FlashInfer().keys(calls, target, find_library({}))
    return [p for p in found if isinstance(p, Planned)]


def serve(call, tokens):
    from flashinfer.fused_moe import cutlass_fused_moe

    from fxwarm.families.flashinfer.tensors import make_arguments

    arguments = make_arguments(bound.at(call, {"s0": tokens}), torch.device("cpu"), lambda c: None)
    cutlass_fused_moe(**{**arguments, "tune_max_num_tokens": 8192})


@pytest.fixture
def spec(library, monkeypatch):
    """A module of the library whose ninja and dlopen are written down."""
    from flashinfer.jit import core, env
    from flashinfer.jit.core import gen_jit_spec

    done: list[str] = []
    for name, folder in (("FLASHINFER_JIT_DIR", "cached_ops"), ("FLASHINFER_AOT_DIR", "aot")):
        monkeypatch.setattr(env, name, library.folder / folder)
    monkeypatch.setattr(core.JitSpecNvcc, "write_ninja", lambda self: None)
    monkeypatch.setattr(core, "run_ninja", lambda *a: done.append("ninja"))

    def load_module(path: str) -> str:
        if Path(path).read_bytes() == b"too new":
            raise OSError("GLIBC_2.38 not found")
        done.append("open")
        return path

    monkeypatch.setattr(core, "tvm_ffi", SimpleNamespace(load_module=load_module))
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    return SimpleNamespace(made=gen_jit_spec("gemm", []), done=done, folder=library.folder)


def put_aot(folder: Path, text: bytes) -> Path:
    path = folder / "aot" / "gemm" / "gemm.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    return path


def test_a_layer_that_nobody_tuned_runs_its_default_tactic_and_nothing_says_so(library):
    from flashinfer.autotuner import AutoTuner

    call = moe(16, **SIZES)
    with tuner.watch() as said:
        serve(call, 3)
    assert library.runner.ran == [[-1, -1]]
    assert not said
    assert AutoTuner.get().stats.cache_misses == 0
    assert len(AutoTuner.get().profiling_cache) == 0
    gaps = tuning.verify(plan(call), "sm_90a")
    assert len(gaps) == 2 * 5
    assert all("default tactic" in g.reason for g in gaps)


def test_outside_the_tuned_range_it_warns_once_and_then_never_again(library):
    call = moe(16, **SIZES)
    list(tuning.tune(plan(call), "sm_90a", lambda c: None))
    other = moe(16, **{**SIZES, "top_k": 1})
    with tuner.watch() as said:
        serve(other, 3)
        serve(other, 3)
    assert len(said) == 2  # one for each GEMM
    assert len(tuning.verify(plan(other), "sm_90a")) == 2 * 5


def test_tuning_in_a_capture_raises(library, monkeypatch):
    """So a warmup never runs in one; see ``fxwarm.runtime``."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tuned = list(tuning.tune(plan(moe(4, **SIZES)), "sm_90a", lambda c: None))
    assert all("capture" in t.error for t in tuned)


def test_mm_bf16_keys_the_tokens_themselves(library, monkeypatch):
    """flashinfer-ai/flashinfer, fixed in 0.7.4: no range of it can be tuned, so it is a gap."""
    from flashinfer.gemm import gemm_base

    from fxwarm.families.flashinfer.match import match
    from passes.flatten import OpCall

    spec = SimpleNamespace(build_and_load=lambda: None)
    monkeypatch.setattr(gemm_base, "gen_mm_bf16_cublaslt_module", lambda: spec)
    gemm_base.get_mm_bf16_cublaslt_module.cache_clear()
    try:
        runner = gemm_base.get_mm_bf16_cublaslt_module().cublaslt_bf16_gemm_runner()
    finally:
        gemm_base.get_mm_bf16_cublaslt_module.cache_clear()
    extras = []
    for rows in (3, 4):
        a, b, out = (torch.empty(s, dtype=torch.bfloat16) for s in ((rows, 8), (8, 16), (rows, 16)))
        extras.append(runner.get_cache_key_extras([a, b, None, None, out, None]))
    assert extras[0] != extras[1]
    (gap,) = match(OpCall("vllm", "mm_bf16", {"a": None}))
    assert isinstance(gap, Gap)
    assert "no range can be warmed" in gap.reason


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_tripwire_is_any_text_and_refuses_a_module_that_is_built(spec, monkeypatch, value):
    from flashinfer.jit.core import MissingJITCacheError

    assert spec.made.jit_library_path.is_file()
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", value)
    with pytest.raises(MissingJITCacheError):
        spec.made.build_and_load()
    planned = Planned(CompileKey("flashinfer", "gemm", ("sm_90a",), "cached_ops"))
    (built,) = modules.build([planned], 1)
    assert "FLASHINFER_DISABLE_JIT is set" in built.error


def test_ninja_is_asked_in_every_process_even_for_a_module_that_is_built(spec):
    spec.made.build_and_load()
    assert spec.done == ["ninja", "open"]


def test_a_module_built_ahead_is_opened_without_ninja_and_found_first(spec, monkeypatch):
    path = put_aot(spec.folder, b"good")
    assert cache.find_module("gemm", "sm_90a") == path
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    spec.made.build_and_load()
    assert spec.done == ["open"]


def test_a_module_built_ahead_that_does_not_load_starts_a_build(spec):
    """A .so is tied to its builder's glibc. The tripwire turns that build into an error."""
    put_aot(spec.folder, b"too new")
    spec.made.build_and_load()
    assert spec.done == ["ninja", "open"]


def test_a_workspace_that_cannot_be_written_says_what_to_set(library, monkeypatch):
    from flashinfer.jit import core, env
    from flashinfer.jit.core import gen_jit_spec

    from fxwarm.families.flashinfer import upstream

    in_the_way = library.folder / "file"
    in_the_way.write_text("")
    monkeypatch.setattr(env, "FLASHINFER_JIT_DIR", in_the_way / "cached_ops")
    monkeypatch.setattr(core, "run_ninja", lambda *a: None)
    monkeypatch.setattr(modules, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(modules.shutil, "which", lambda name: name)
    monkeypatch.setattr(upstream, "make_spec", lambda name: gen_jit_spec(name, []))
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    (built,) = modules.build(
        [Planned(CompileKey("flashinfer", "gemm", ("sm_90a",), "cached_ops"))], 1
    )
    assert "set FLASHINFER_WORKSPACE_BASE" in built.error


def test_a_build_makes_its_spec_once(library, monkeypatch):
    """The one of ``fused_moe_90`` writes 247 sources, and a spec is asked whether it is ahead of time, and where it is."""
    from fxwarm.families.flashinfer import upstream

    made = []
    path = library.folder / "cached_ops" / "gemm" / "gemm.so"

    def make_spec(name: str) -> SimpleNamespace:
        made.append(name)
        return SimpleNamespace(
            is_aot=False, build=lambda need_lock: None, get_library_path=lambda: path
        )

    monkeypatch.setattr(upstream, "make_spec", make_spec)
    monkeypatch.setattr(modules, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(modules.shutil, "which", lambda name: name)
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    (built,) = modules.build(
        [Planned(CompileKey("flashinfer", "gemm", ("sm_90a",), "cached_ops"))], 1
    )
    assert not built.error
    assert made == ["gemm"]


def test_fp8_per_tensor_is_tuned_and_hits_as_bf16_does(library):
    call = moe(40, **SIZES, dtype="float8_e4m3fn")
    planned = plan(call)
    assert not [t for t in tuning.tune(planned, "sm_90a", lambda c: None) if t.error]
    library.runner.ran.clear()
    for tokens in (1, 33, 40):
        serve(call, tokens)
    assert library.runner.ran == [[0, 3]] * 3
    assert not tuning.verify(planned, "sm_90a")
    options = {str(dict(stored.entry_of(p, "sm_90a").options)["x_dtype"]) for p in planned if is_tuned(p.key)}  # fmt: skip
    assert options == {"float8_e4m3fn"}


def test_what_runs_on_blackwell_alone_is_planned_and_says_that_it_is_not_run(library):
    planned = plan(trtllm(64), target=Target.named("b200"))
    assert {p.key.kernel for p in planned} >= {"fused_moe_trtllm_sm100"}
    assert any(is_tuned(p.key) for p in planned)
    built = list(modules.build(planned, 1))
    assert any("planned and keyed" in b.error for b in built)
    tuned = list(tuning.tune(planned, "sm_100a", lambda c: None))
    assert tuned
    assert all("fused_moe_trtllm_sm100 is not built" in t.error for t in tuned)


def test_a_long_build_is_no_stuck_one():
    """fused_moe_90 takes 40 minutes on 16 cores, and ``fxwarm.build_timeout`` is 5."""
    family = FlashInfer()
    whole = Planned(CompileKey("flashinfer", "fused_moe_90", ("sm_90a",), "cached_ops")).key
    assert family.patience(whole, 16) > 40 * 60
    assert family.patience(whole, 1) > family.patience(whole, 4)
    assert family.builds(whole)
    assert not any(family.builds(p.key) for p in plan(moe(4, **SIZES)) if is_tuned(p.key))
