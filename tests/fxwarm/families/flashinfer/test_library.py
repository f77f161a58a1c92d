"""What is wrong with an installation is said in one sentence that ends with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fxwarm import exc, options
from fxwarm.families.flashinfer import FlashInfer, cache, modules
from fxwarm.families.flashinfer.library import ENVIRONMENT, find_library
from fxwarm.families.flashinfer.versions import KNOWN, NEWEST
from fxwarm.records import CompileKey, Planned, Target
from tests.fxwarm.families.flashinfer.conftest import HERE, REASON

needs_library = pytest.mark.skipif(not HERE, reason=REASON)
ROOT = Path(__file__).resolve().parents[4]


def module(name: str) -> Planned:
    return Planned(CompileKey("flashinfer", name, ("sm_90a",), "cached_ops"))


def in_a_child(code: str, **env: str) -> str:
    """Run ``code`` in a fresh process; return what it printed."""
    path = os.pathsep.join([env.pop("FIRST", ""), str(ROOT), *[p for p in sys.path if p]])
    full = {**os.environ, "FLASHINFER_CUDA_ARCH_LIST": "9.0a", **env, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=full,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


LOAD = "from fxwarm.families.flashinfer import upstream\ntry: upstream.load()\nexcept Exception as e: print(type(e).__name__, e)"


def fake_package(folder: Path, text: str) -> str:
    (folder / "flashinfer").mkdir()
    (folder / "flashinfer" / "__init__.py").write_text(text)
    return str(folder)


def test_a_partial_installation_names_what_to_install(tmp_path):
    said = in_a_child(LOAD, FIRST=fake_package(tmp_path, "import pynvml_that_is_absent"))
    assert "LibraryError" in said
    assert "installed in part" in said
    assert "pip install" in said


def test_an_import_that_fails_gives_its_own_words(tmp_path):
    text = "raise RuntimeError('flashinfer-cubin version (0.6.13) does not match')"
    said = in_a_child(LOAD, FIRST=fake_package(tmp_path, text))
    assert "does not match" in said
    assert "LibraryError" in said


@needs_library
def test_a_workspace_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    said = in_a_child(LOAD, FLASHINFER_WORKSPACE_BASE=str(tmp_path / "file"))
    assert "FLASHINFER_WORKSPACE_BASE" in said
    assert "LibraryError" in said


def test_planning_imports_no_library():
    said = in_a_child(
        "import sys\nfrom fxwarm.families.flashinfer import FlashInfer\nfrom fxwarm.records import Target\n"
        "from tests.fxwarm.families.flashinfer.calls import moe\nf = FlashInfer()\n"
        "n = len(list(f.keys([moe(64)], Target.named('h200'), f.library({}))))\n"
        "f.missing([], Target.named('h200'))\nprint(n, 'flashinfer' in sys.modules, 'tvm_ffi' in sys.modules)"
    )
    assert said.split() == ["16", "False", "False"]


def test_a_named_version_is_planned_for_without_it():
    library = find_library({"flashinfer-python": "0.6.18.post1"})
    assert str(library) == "flashinfer-python 0.6.18.post1"
    with pytest.raises(exc.LibraryError, match=r"0\.1\.0 is not known"):
        find_library({"flashinfer-python": "0.1.0"})
    assert NEWEST in KNOWN


@needs_library
def test_the_installed_build_has_an_identity_and_its_environment_enters(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    library = find_library({})
    assert library.installed
    assert library.fingerprint
    assert library.module == "flashinfer"
    monkeypatch.setenv("FLASHINFER_NVCC", "/opt/other/nvcc")
    assert find_library({}).environment == (("FLASHINFER_NVCC", "/opt/other/nvcc"),)


@pytest.mark.parametrize(
    ("name", "jobs", "gib", "expected"),
    [
        ("fused_moe_90", 16, 128, 16),
        ("fused_moe_90", 16, 96, 12),
        ("fused_moe_90", 16, 4, 1),
        ("gemm", 16, 12, 4),
    ],
)
def test_jobs_are_as_many_as_memory_holds(name, jobs, gib, expected, monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert modules.jobs_that_fit(name, jobs, gib << 30) == expected
    monkeypatch.setenv("MAX_JOBS", "2")
    assert modules.jobs_that_fit(name, jobs, gib << 30) == min(2, expected)


def test_the_memory_of_a_container_counts(tmp_path):
    for name, text in {
        "proc/meminfo": "MemTotal: 1 kB\nMemAvailable: 4194304 kB\n",
        "sys/fs/cgroup/memory.max": "2147483648",
        "sys/fs/cgroup/memory.current": "1073741824",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert modules.available_bytes(tmp_path) == 1 << 30
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max")
    assert modules.available_bytes(tmp_path) == 4 << 30
    assert modules.available_bytes() > 0


@pytest.fixture
def cold(library, monkeypatch, tmp_path):
    """A workspace without modules, and a spec whose build is ours."""
    from types import SimpleNamespace

    from fxwarm.families.flashinfer import upstream

    seen = []
    so = tmp_path / "trtllm_utils.so"

    def build(need_lock: bool) -> None:
        seen.append((need_lock, os.environ["MAX_JOBS"]))
        so.write_bytes(b"built")

    spec = SimpleNamespace(is_aot=False, build=build, get_library_path=lambda: so)
    monkeypatch.setattr(upstream, "make_spec", lambda name: spec)
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    monkeypatch.setattr(modules, "nvcc", lambda: "/usr/bin/nvcc")
    return SimpleNamespace(seen=seen, spec=spec, so=so)


def test_a_build_goes_through_the_librarys_spec_under_its_lock(cold, monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    (built,) = modules.build([module("trtllm_utils")], 1)
    assert not built.error
    assert built.bytes == 5
    assert cold.seen == [(True, "1")]
    assert "MAX_JOBS" not in os.environ


def test_a_build_does_not_take_the_jobs_of_another_graphs_for_the_users(monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(modules, "available_bytes", lambda: 1 << 40)
    begun, go_on, seen = threading.Event(), threading.Event(), []

    def build(name):
        begun.set()
        go_on.wait(10)
        seen.append(os.environ["MAX_JOBS"])
        return 5

    monkeypatch.setattr(modules, "_build", build)
    threads = [
        threading.Thread(target=lambda n=jobs: list(modules.build([module("gemm")], n)))
        for jobs in (1, 3)
    ]
    threads[0].start()
    begun.wait(10)
    threads[1].start()
    threads[1].join(0.3)  # until it waits for the first
    go_on.set()
    for thread in threads:
        thread.join()
    assert seen == ["1", "3"]
    assert "MAX_JOBS" not in os.environ


def test_a_module_is_built_in_the_name_of_its_warmup_and_keeps_no_process_alive(monkeypatch):
    seen = []

    def build(name):
        seen.append((options.is_active(), threading.current_thread().daemon))
        return 5

    monkeypatch.setattr(modules, "_build", build)
    with options.use(options.resolve()):
        built = list(modules.build([module("gemm"), module("monomoe")], 2))
    assert [b.bytes for b in built] == [5, 5]
    assert seen == [(True, True)] * 2


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda m, c: m.setenv("PATH", "/nowhere"), "ninja is not on PATH"),
        (lambda m, c: m.setattr(modules, "nvcc", lambda: ""), "no nvcc"),
        (lambda m, c: m.setenv("FLASHINFER_DISABLE_JIT", "1"), "FLASHINFER_DISABLE_JIT is set"),
        (lambda m, c: setattr(c.spec, "build", lambda need_lock: None), "left no trtllm_utils.so"),
    ],
)
def test_what_keeps_a_module_from_being_built_is_told(cold, monkeypatch, break_it, says):
    break_it(monkeypatch, cold)
    (built,) = modules.build([module("trtllm_utils")], 1)
    assert says in built.error


def test_sources_that_the_library_copies_anew_do_not_look_new(library):
    """``gen_monomoe_module`` copies its sources in each process, so ninja compiled ``monomoe`` in each process."""
    from flashinfer.jit import env
    from flashinfer.jit.monomoe import gen_monomoe_module

    from fxwarm.families.flashinfer import upstream

    def times() -> dict[str, int]:
        gen_monomoe_module.cache_clear()  # another process
        upstream.make_spec("monomoe")
        return {
            str(p): p.stat().st_mtime_ns
            for p in (env.FLASHINFER_GEN_SRC_DIR / "monomoe").rglob("*.cu*")
        }

    first = times()
    assert first
    assert times() == first
    path = next(iter(first))
    Path(path).write_text("another text")
    assert times()[path] != first[path]


def test_of_ninjas_output_the_lines_that_failed_are_kept(cold):
    def build(need_lock: bool) -> None:
        raise RuntimeError(
            "Ninja build failed.\n"
            + "[1/9] ok\n" * 50
            + "FAILED: a.o\na.cu(3): error: no such type\n"
        )

    cold.spec.build = build
    (built,) = modules.build([module("trtllm_utils")], 1)
    assert "error: no such type" in built.error
    assert "[1/9] ok" not in built.error


def test_tuned_entries_are_left_to_tuning():
    assert (
        list(
            modules.build(
                [Planned(CompileKey("flashinfer", "gemm1", (), "trtllm::fused_moe::gemm1"))], 1
            )
        )
        == []
    )


def test_paths_are_found_without_the_library(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "flashinfer.jit.env", raising=False)
    monkeypatch.setattr(cache, "installed_version", lambda: "0.6.18.post1")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    for named, folder in (
        ("9.0", "90a"),
        ("9.0a", "90a"),
        ("8.9 9.0a", "89_90a"),
        ("12.0 12.1", "120f_121a"),
    ):
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", named)
        assert cache.workspace("sm_90a") == tmp_path / ".cache/flashinfer/0.6.18.post1" / folder
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    assert cache.workspace("sm_90a").name == "90a"
    assert cache.find_module("gemm", "sm_90a") is None
    so = cache.workspace("sm_90a") / "cached_ops/gemm/gemm.so"
    so.parent.mkdir(parents=True)
    so.write_bytes(b"")
    assert cache.find_module("gemm", "sm_90a") is None  # an empty binary is none
    so.write_bytes(b"x")
    assert cache.find_module("gemm", "sm_90a") == so


@needs_library
def test_the_paths_are_the_librarys_own(tmp_path):
    said = in_a_child(
        "from fxwarm.families.flashinfer import cache\nbefore = cache.workspace('sm_90a'), cache._aot_dir()\n"
        "import flashinfer.jit.env as env\nprint(before == (env.FLASHINFER_WORKSPACE_DIR, env.FLASHINFER_AOT_DIR))",
        FLASHINFER_WORKSPACE_BASE=str(tmp_path),
    )
    assert said.split()[-1] == "True"


def test_block_scale_kernels_lie_where_the_library_looks(monkeypatch, tmp_path):
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path))
    assert cache.block_kernels() == set()
    path = cache.block_kernel("gemm_1_2")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    assert cache.block_kernels() == {"gemm_1_2"}
    monkeypatch.delenv("TRTLLM_DG_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.block_kernel("n") == Path("/home/someone/.tensorrt_llm/cache/n/nvcc_kernel.cubin")
    monkeypatch.delenv("HOME")
    assert cache.block_kernel("n").is_absolute()


def test_a_kernel_beside_the_plan_is_a_gap():
    family = FlashInfer()
    family._strange = {"gemm_9_9"}
    (gap,) = family.verify([])
    assert "gemm_9_9, which was not planned" in gap.reason


def test_without_a_compiler_a_block_scale_kernel_is_not_tried(monkeypatch, tmp_path):
    from fxwarm.families.flashinfer import load
    from tests.fxwarm.families.flashinfer.calls import block_scale_moe

    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(load, "nvcc", lambda: "")
    family, target = FlashInfer(), Target.named("h200")
    planned = [
        p
        for p in family.keys([block_scale_moe(64)], target, find_library({}))
        if load.is_block_scale(p)
    ]
    assert planned
    assert all("no nvcc" in x.error for x in family.load(planned, target, lambda c: None))
