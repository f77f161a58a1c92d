"""NVRTC mode: worker processes launch the witnesses, so that the library compiles into its own cache in parallel."""

from __future__ import annotations

import importlib
import logging
import time
from pathlib import Path

import msgspec
import pytest
import torch

from fxwarm.families.deep_gemm import DeepGemm, cache, inputs, worker_pool, workers
from fxwarm.families.deep_gemm.child import Child
from fxwarm.families.deep_gemm.library import find_library
from fxwarm.records import Built, Planned, Target
from tests.fxwarm.families.deep_gemm.conftest import is_running, runs_of
from tests.fxwarm.families.deep_gemm.samples import contiguous, dense, prenorm, sgl

CPU_H200 = msgspec.structs.replace(Target.named("h200"), device="cpu")
"""The fake library's tensors live on the CPU; everything else is as on the card."""
E5 = (prenorm(24, 16384, upper=10), dense(2112, 7168, upper=40))


@pytest.fixture
def mode(fake, toolkit, monkeypatch):
    """Return what installs the fake library in NVRTC mode, and the toolkit's folder."""

    def install(body: str = "") -> Path:
        home = toolkit()
        fake(body=body)
        monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        return home

    return install


@pytest.fixture
def children(monkeypatch):
    """Every child that is started, in order."""
    made: list[Child] = []
    start = Child.__init__

    def note(self, *args, **options):
        start(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Child, "__init__", note)
    return made


def plan(*calls) -> list[Planned]:
    planned = list(DeepGemm().keys(calls, Target.named("h200"), sgl()))
    assert planned
    assert all(isinstance(p, Planned) for p in planned)
    return planned


def build(planned, jobs: int = 2, **family) -> dict:
    built = [*DeepGemm(**{"memory": 4 << 30, **family}).build(planned, CPU_H200, jobs)]
    assert all(isinstance(b, Built) for b in built)
    assert len({b.key for b in built}) == len(built)
    return {b.key: b for b in built}


def load_here(planned) -> list[str]:
    """Load in this process, as a warmup does after the build; return the errors."""
    loaded = DeepGemm(memory=1 << 30).load(planned, CPU_H200, lambda call: None)
    return [x.error for x in loaded if x.error]


def test_workers_build_into_the_librarys_own_cache_and_the_load_compiles_nothing(
    mode, children, tmp_path
):
    home = mode()
    planned = plan(dense(256, 256, upper=100), contiguous(4, 256, 256, upper=4))
    built = build(planned)
    assert set(built) == {p.key for p in planned}
    assert not [b.error for b in built.values() if b.error]
    assert all(b.bytes == 256 for b in built.values())
    assert len(children) == 2
    assert runs_of(home) == 0  # no nvcc at all
    assert DeepGemm().missing(planned, CPU_H200) == []
    names = set(cache.entries(cache.Roots("A", tmp_path / "cache")))
    assert len(names) == len(planned)
    assert load_here(planned) == []
    assert set(importlib.import_module("deep_gemm")._loaded) == names
    assert set(cache.entries(cache.Roots("A", tmp_path / "cache"))) == names


def test_only_the_kernel_that_nvrtc_cannot_compile_is_tried_with_nvcc(mode, caplog, tmp_path):  # E5
    home = mode("""
    def nvrtc(code):
        if "prenorm" in code:
            print("NVRTC log: kernel.cu(7): error: no operator matches", flush=True)
            return b""
        return Path(os.environ["CUDA_HOME"], "some.cubin").read_bytes()
    """)
    planned = plan(*E5)
    (bad,) = [p for p in planned if "prenorm" in p.key.kernel]
    built = build(planned)
    assert {k: b.error for k, b in built.items()} == {p.key: "" for p in planned}
    assert DeepGemm().missing(planned, CPU_H200) == []
    assert runs_of(home) == 2  # the kernel that does nothing, and this one
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1
    assert str(bad.key) in warned[0]
    assert "kernel.cu(7): error: no operator matches" in warned[0]
    assert cache.damaged(cache.Roots("A", tmp_path / "cache")) == {}
    assert load_here(planned) == []  # the library takes what nvcc made under its NVRTC name


def test_where_nvrtc_compiles_nothing_nvcc_compiles_all(mode, children):
    home = mode("""
    def nvrtc(code):
        print("NVRTC log: catastrophic error: cannot open source file", flush=True)
        return b""
    """)
    planned = plan(
        dense(256, 256, upper=100)
    )  # no GEMM is reached before its scales are transposed
    built = build(planned)
    assert {k: b.error for k, b in built.items()} == {p.key: "" for p in planned}
    assert runs_of(home) == 1 + len(planned)
    assert len(children) == 5  # two rounds of two workers, and one child that names the flags
    assert load_here(planned) == []


def test_what_neither_compiler_can_build_has_the_words_of_both(mode, monkeypatch):  # E5
    body = """
    def nvrtc(code):
        print("NVRTC log: no such header", flush=True)
        return b""
    """
    home = mode(body)
    planned = plan(dense(256, 256, upper=16))
    script = (home / "bin" / "nvcc").read_text()
    (home / "bin" / "nvcc").write_text(
        script.replace("sleep 0.0", "case $* in *kernel.cu*) echo no room >&2; exit 3;; esac")
    )
    (b,) = build(planned).values()  # the scales': without it no GEMM is reached
    assert b.key.kernel == "transpose_fp32"
    assert "NVRTC: no such header" in b.error
    assert "exit code 3: no room" in b.error
    (home / "bin" / "nvcc").unlink()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert all("set CUDA_HOME" in b.error for b in build(planned).values())


def test_an_empty_entry_of_an_earlier_start_is_compiled_again(mode, tmp_path):
    mode()
    planned = plan(dense(256, 256, upper=16))
    build(planned)
    cubins = list((tmp_path / "cache" / "cache").glob("*/kernel.cubin"))
    for cubin in cubins:
        cubin.write_bytes(b"")
    assert len(DeepGemm().missing(planned, CPU_H200)) == len(planned)
    assert not [b.error for b in build(planned).values() if b.error]
    assert all(cache.is_whole_elf(cubin) for cubin in cubins)
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("does", "words"),
    [
        pytest.param("import time; time.sleep(1000)", "took more than 3 s", id="hangs"),
        pytest.param("os.abort()", "ended by signal SIGABRT", id="dies"),
    ],
)
def test_a_kernel_that_ends_its_worker_fails_by_name_and_the_others_are_built(
    mode, children, does, words
):
    mode(f"""
    def nvrtc(code):
        if "prenorm" in code:
            {does}
        return Path(os.environ["CUDA_HOME"], "some.cubin").read_bytes()
    """)
    planned = plan(*E5)
    begin = time.monotonic()
    built = build(planned, jobs=1, timeout=3)
    assert time.monotonic() - begin < 60
    bad = {k: b.error for k, b in built.items() if b.error}
    assert [k.tag for k in bad] == ["sm90_tf32_hc_prenorm_gemm"]
    assert all(words in error for error in bad.values())
    assert len(built) == len(planned)
    assert len(children) == 2  # another worker went on
    assert not any(is_running(c.pid) for c in children)


def test_a_device_that_an_illegal_access_has_spoilt_gets_no_other_witness(mode, children):
    mode("""
    import torch
    _zeros, _spoilt = torch.zeros, []
    def zeros(*args, **options):
        if _spoilt: raise RuntimeError("an illegal memory access was encountered")
        return _zeros(*args, **options)
    torch.zeros = zeros
    def tf32_hc_prenorm_gemm(a, b, d, sqr_sum, num_splits=None):
        _spoilt.append(1)
        raise RuntimeError("an illegal memory access was encountered")
    """)
    planned = plan(*E5)
    built = build(planned, jobs=1)
    bad = [b for b in built.values() if b.error]
    assert len(bad) == 1
    assert "illegal memory access" in bad[0].error
    assert len(built) == len(planned)
    assert len(children) == 2


def test_what_the_library_refuses_is_left_to_the_load_which_says_why(mode):
    mode("""
    def tf32_hc_prenorm_gemm(a, b, d, sqr_sum, num_splits=None):
        raise RuntimeError("n is odd")
    """)
    planned = plan(*E5)
    built = build(planned)
    assert {p.key.tag for p in planned if p.key not in built} == {"sm90_tf32_hc_prenorm_gemm"}
    assert not [b.error for b in built.values() if b.error]
    assert ["n is odd" in error for error in load_here(planned)] == [True]


def test_a_library_that_does_not_import_fails_every_kernel_with_one_sentence(mode, children):
    mode('raise AssertionError("no toolkit here")')
    planned = plan(dense(256, 256, upper=40))
    built = build(planned)
    assert set(built) == {p.key for p in planned}
    assert all("no toolkit here" in b.error for b in built.values())
    assert len(children) <= 2
    assert not any(is_running(c.pid) for c in children)


def test_workers_are_as_many_as_jobs_kernels_and_device_memory_allow(mode):
    mode()
    planned = plan(dense(2112, 7168, upper=600))
    assert len(planned) > 4

    def count(jobs: int, memory: int):
        job = worker_pool.Job(
            CPU_H200, find_library({}), cache.Roots("A", Path()), jobs, memory, 1.0
        )
        number, fitting = workers.count(planned, job)
        return number, len(fitting)

    all_of_them = len(planned)
    assert count(4, 1 << 40) == (4, all_of_them)
    assert count(100, 1 << 40) == (all_of_them, all_of_them)
    assert count(100, 2 * worker_pool.CONTEXT + (128 << 20)) == (2, all_of_them)
    assert count(100, worker_pool.CONTEXT) == (0, 0)
    some = worker_pool.CONTEXT + inputs.bytes_of(planned[0].witness)
    number, fitting = count(100, some)
    assert number == 1
    assert 0 < fitting < all_of_them


def test_without_memory_for_a_worker_the_load_compiles_and_that_is_said(mode, children, caplog):
    mode()
    planned = plan(dense(256, 256, upper=40))
    assert build(planned, memory=1 << 20) == {}
    assert children == []
    assert "compiled one by one when they are loaded" in caplog.text
    assert load_here(planned) == []


def test_closing_the_build_ends_the_workers_and_leaves_no_folder(
    mode, children, tmp_path, monkeypatch
):
    monkeypatch.setattr(worker_pool.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    mode("""
    def nvrtc(code):
        if "prenorm" in code:
            import time; time.sleep(1000)
        return Path(os.environ["CUDA_HOME"], "some.cubin").read_bytes()
    """)
    running = DeepGemm(memory=4 << 30).build(plan(*E5), CPU_H200, 2)
    next(running)
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    running.close()
    assert not any(is_running(c.pid) for c in children)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_kernel_of_several_damaged_entries_is_told_of_once(mode, monkeypatch):
    mode()
    planned = plan(*E5)
    key = planned[0].key
    monkeypatch.setattr(workers, "build", lambda planned, job: iter([Built(key), Built(key)]))
    assert list(build(planned)) == [key]
