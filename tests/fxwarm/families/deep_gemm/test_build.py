"""Kernels are compiled in parallel, once, in one atomic step; what fails is named and leaves nothing."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from fxwarm.families.deep_gemm import DeepGemm, cache, toolchain
from fxwarm.families.deep_gemm.build import build, by_cost
from fxwarm.records import Built, CompileKey, Planned, Source, Target
from tests.fxwarm.families.deep_gemm.conftest import runs_of

FLAGS = ("-std=c++20", "--gpu-architecture=sm_90a", "-O3")


def planned(index: int, code: str = "fine", generation: str = "A", flags=FLAGS) -> Planned:
    name = f"tag.{index:032x}"
    key = CompileKey("deep_gemm", "kernel", (str(index),), "tag")
    entry = f"kernel.{name}" if generation == "A" else name
    return Planned(key, None, Source(entry, f"// {index}: {code}\n", flags))


def make(some, root: Path, generation: str = "A", **options) -> list[Built]:
    where = cache.Roots(generation, root)
    compiler = toolchain.find_compiler(generation)
    return list(build(some, where, compiler, **{"jobs": 4, **options}))


@pytest.mark.parametrize("generation", ["A", "B"])
def test_everything_is_built_and_found(toolkit, tmp_path, generation):
    home = toolkit()
    some = [planned(i, generation=generation) for i in range(6)]
    built = make(some, tmp_path / "cache", generation)
    assert {b.key for b in built} == {p.key for p in some}
    assert not [b.error for b in built if b.error]
    assert all(b.bytes == 256 for b in built)
    assert runs_of(home) == 6
    where = cache.Roots(generation, tmp_path / "cache")
    assert len(cache.entries(where)) == 6
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    assert [b.error for b in make(some, tmp_path / "cache", generation)] == [""] * 6
    assert runs_of(home) == 6  # a second start builds nothing


def test_jobs_run_side_by_side(toolkit, tmp_path):
    toolkit(seconds=0.4)
    start = time.monotonic()
    make([planned(i) for i in range(6)], tmp_path / "cache", jobs=6)
    assert time.monotonic() - start < 1.6  # 2.4 s one after the other


def test_the_slow_ones_come_first():
    def kernel(name: str, *template: str) -> Planned:
        return Planned(CompileKey("deep_gemm", name, template, "t"))

    layout = kernel("transpose_fp32", "512", "64", "56")
    small = kernel("sm90_fp8_gemm_1d2d_impl", "K", "0", "0", "0", "1", "16", "16")
    large = kernel("sm90_fp8_gemm_1d2d_impl", "K", "0", "0", "0", "1", "128", "192")
    wide = kernel("sm90_fp8_gemm_1d2d_impl", "K", "0", "0", "0", "1", "256", "128")
    assert by_cost([layout, small, wide, large]) == [large, wide, small, layout]


def test_a_failure_has_the_compilers_words_and_leaves_nothing(toolkit, tmp_path):
    toolkit()
    good, bad = planned(1), planned(2, "does not compile")
    built = {b.key: b for b in make([bad, good], tmp_path / "cache", jobs=1)}
    assert not built[good.key].error
    assert "exit code 2" in built[bad.key].error
    assert "identifier is undefined" in built[bad.key].error
    assert len(list((tmp_path / "cache" / "cache").iterdir())) == 1
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []


def test_a_compile_that_takes_for_ever_is_ended_by_name(toolkit, tmp_path):
    toolkit()
    start = time.monotonic()
    built = {
        b.key: b.error
        for b in make([planned(1, "takes for ever"), planned(2)], tmp_path, timeout=1)
    }
    assert time.monotonic() - start < 10
    assert "took more than 1 s" in built[planned(1).key]
    assert not built[planned(2).key]


def test_an_old_compiler_is_refused_without_a_run(toolkit, tmp_path):  # E3
    home = toolkit("12.8")
    blackwell = planned(1, flags=("--gpu-architecture=sm_100f",))
    built = {b.key: b.error for b in make([blackwell, planned(2)], tmp_path)}
    assert "12.8" in built[blackwell.key]
    assert "sm_100f" in built[blackwell.key]
    assert not built[planned(2).key]
    assert runs_of(home) == 1


def test_a_damaged_entry_is_built_again(toolkit, tmp_path):
    toolkit()
    one = planned(1)
    make([one], tmp_path)
    cubin = tmp_path / "cache" / one.source.entry / "kernel.cubin"
    cubin.write_bytes(cubin.read_bytes()[:100])
    (built,) = make([one], tmp_path)
    assert built.bytes == 256
    assert cache.is_whole_elf(cubin)


def test_closing_the_generator_ends_the_compiles(toolkit, tmp_path):
    toolkit()
    where, compiler = cache.Roots("A", tmp_path), toolchain.find_compiler()
    running = build([planned(1), planned(2, "takes for ever")], where, compiler, jobs=2)
    next(running)
    start = time.monotonic()
    running.close()
    assert time.monotonic() - start < 5
    assert threading.active_count() < 20
    assert list((tmp_path / "tmp").iterdir()) == []


def _build_all(root: str, results) -> None:
    built = make([planned(i) for i in range(6)], Path(root), jobs=2)
    results.put([b.error for b in built])


def test_eight_processes_build_each_kernel_once(toolkit, tmp_path):  # D1
    home = toolkit(seconds=0.2)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=_build_all, args=(str(tmp_path), results)) for _ in range(8)
    ]
    for process in processes:
        process.start()
    errors = [error for _ in processes for error in results.get(timeout=60)]
    for process in processes:
        process.join()
    assert errors == [""] * 48
    assert runs_of(home) == 6


def test_a_folder_that_cannot_be_written_is_said_so(toolkit, tmp_path):
    toolkit()
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache should be")
    (built,) = make([planned(1)], blocked)
    assert "set DG_JIT_CACHE_DIR" in built.error


def test_the_family_builds_what_was_recorded_and_says_why_not(toolkit, fake, tmp_path, monkeypatch):
    home = toolkit()
    fake()
    family, target = DeepGemm(), Target.named("h200")
    some = [planned(1), planned(2)]
    assert family.missing(some, target) == some
    assert not [b.error for b in family.build(some, target, 2) if b.error]
    assert family.missing(some, target) == []
    assert list(family.build([Planned(planned(9).key)], target, 2)) == []  # left to the load
    monkeypatch.setenv("CUDA_HOME", str(home / "nowhere"))
    errors = [b.error for b in family.build(some, target, 2)]
    assert all("set CUDA_HOME" in e for e in errors)
