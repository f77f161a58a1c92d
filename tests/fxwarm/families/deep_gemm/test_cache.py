"""The library's cache on disk: names, whole entries, the compiler behind them."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fxwarm import exc
from fxwarm.families.deep_gemm import DeepGemm, cache, digest, library, source, toolchain
from fxwarm.records import CompileKey, Planned, Target
from tests.fxwarm.families.deep_gemm.conftest import elf, runs_of
from tests.fxwarm.families.deep_gemm.samples import dense, sgl

WHEEL = "sgl-deep-gemm==0.1.5.post1"
FLAGS_A = (
    "-std=c++20 --diag-suppress=39,161,174,177,186,940 --ptxas-options=--register-usage-level=10 "
    "-I{include} --gpu-architecture=sm_90a "
    "--compiler-options=-fPIC,-O3,-fconcepts,-Wno-deprecated-declarations,-Wno-abi "
    "-O3 --expt-relaxed-constexpr --expt-extended-lambda"
)
TRANSPOSE = """
#include <deep_gemm/impls/smxx_layout.cuh>

using namespace deep_gemm;

static void __instantiate_kernel() {
    auto ptr = reinterpret_cast<void*>(&transpose_fp32<
        512, 64, 56
    >);
};
"""


def entry(root: Path, name: str, cubin: bytes, *, committed: bool = False) -> Path:
    folder = root / "cache" / name
    folder.mkdir(parents=True)
    (folder / "kernel.cu").write_text(TRANSPOSE)
    (folder / "kernel.cubin").write_bytes(cubin)
    if committed:
        (folder / ".committed").touch()
    return folder


NAME = "kernel.transpose_fp32." + "0" * 32


def test_the_key_is_read_from_the_source():
    assert source.key_in(TRANSPOSE, "transpose_fp32") == CompileKey(
        "deep_gemm", "transpose_fp32", ("512", "64", "56"), "transpose_fp32"
    )
    code = "auto p = reinterpret_cast<void*>(&sched::f<\n  a::B<1, 2>,\n  false, (3, 4)\n>);"
    assert source.key_in(code, "t").template == ("a::B<1, 2>", "false", "(3, 4)")
    assert source.key_in("reinterpret_cast<void*>(&plain)", "t").template == ()
    for broken, words in (("", "no kernel"), ("reinterpret_cast<void*>(&f<1, 2", "do not end")):
        with pytest.raises(ValueError, match=words):
            source.key_in(broken, "t")
    assert source.tag_of(NAME) == "transpose_fp32"
    assert source.tag_of("a.b." + "0" * 32) == "a.b"
    with pytest.raises(ValueError, match="no name of a DeepGEMM cache entry"):
        source.tag_of("tmp")


def test_digests_of_known_texts():
    # FNV-1a with these seeds over no byte is the seed, and splitmix64 finishes it
    assert digest.digest_a(b"") == digest._hex(0xC6A4A7935BD1E995, 0x9E3779B97F4A7C15)
    assert digest.digest_a(b"a") != digest.digest_a(b"b")
    assert len(digest.digest_b([b"a", b"b"])) == 32
    assert digest.digest_b([b"ab"]) != digest.digest_b([b"a", b"b"])  # lengths are hashed


@pytest.mark.parametrize(
    ("damage", "whole"),
    [
        (lambda data: data, True),
        (lambda data: b"", False),
        (lambda data: data[:-1], False),
        (lambda data: data[: len(data) // 2], False),
        (lambda data: b"\0" * len(data), False),
        (lambda data: b"\x7fELF\x01" + data[5:], False),
    ],
)
def test_only_whole_binaries_count(tmp_path, real_elf, damage, whole):
    for data in (elf(), real_elf):
        path = tmp_path / "k.cubin"
        path.write_bytes(damage(data))
        assert cache.is_whole_elf(path) == whole


def test_a_damaged_entry_is_missing_and_a_foreign_folder_is_no_entry(tmp_path):
    where = cache.Roots("A", tmp_path)
    entry(tmp_path, NAME, elf())
    entry(tmp_path, NAME.replace("0", "1"), b"")
    entry(tmp_path, "somebody_elses", elf())
    assert list(cache.entries(where)) == [NAME]
    assert cache.find(where, NAME) == tmp_path / "cache" / NAME
    assert cache.find(where, NAME.replace("0", "1")) is None


def test_generation_b_wants_its_mark_and_looks_in_every_root(tmp_path):
    rw, ro = tmp_path / "rw", tmp_path / "ro"
    where = cache.roots("B", {"DG_JIT_CACHE_DIR": f"{rw}:{ro}"})
    assert where == cache.Roots("B", rw, (ro,))
    name = NAME.removeprefix("kernel.")
    folder = entry(ro, name, elf())
    assert cache.find(where, name) is None
    (folder / ".committed").touch()
    assert cache.find(where, name) == folder
    assert cache.environment(where) == {"DG_JIT_CACHE_DIR": f"{rw}:{ro}"}


def test_where_the_cache_is(tmp_path, caplog, monkeypatch):
    assert cache.roots("A", {"HOME": "/h"}).write == Path("/h/.deep_gemm")
    assert cache.roots("B", {"HOME": "/h"}).write == Path("/h/.dj")
    assert cache.roots("B", {"HOME": "/h", "DJ_JIT_CACHE_DIR": "/c"}).write == Path("/c")
    monkeypatch.chdir(tmp_path)
    assert cache.roots("A", {}).write == tmp_path / ".deep_gemm"
    assert f"keeps its cache in {tmp_path}/.deep_gemm" in caplog.text


def test_publishing_is_one_step_and_the_loser_uses_the_winners(tmp_path):
    where = cache.Roots("A", tmp_path)
    for text in ("first", "second"):
        with cache.scratch(where) as room:
            built = room / "entry"
            built.mkdir()
            (built / "kernel.cu").write_text(text)
            (built / "kernel.cubin").write_bytes(elf())
            cache.publish(built, NAME, where)
    assert (tmp_path / "cache" / NAME / "kernel.cu").read_text() == "first"
    assert list((tmp_path / "tmp").iterdir()) == []
    (tmp_path / "cache" / NAME / "kernel.cubin").write_bytes(b"")
    with cache.scratch(where) as room:
        (room / "entry").mkdir()
        (room / "entry" / "kernel.cu").write_text("third")
        (room / "entry" / "kernel.cubin").write_bytes(elf())
        cache.publish(room / "entry", NAME, where)
    assert (tmp_path / "cache" / NAME / "kernel.cu").read_text() == "third"


def test_a_read_only_cache_is_used_and_new_kernels_go_elsewhere(tmp_path, monkeypatch, caplog):
    entry(tmp_path / "ro", NAME, elf())
    where = cache.Roots("A", tmp_path / "ro")
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "private"))
    assert cache.writable(where) == where

    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache.tempfile, "TemporaryFile", refuse)
    (tmp_path / "private").mkdir()
    for generation in ("A", "B"):
        other = cache.writable(cache.Roots(generation, tmp_path / "ro"))
        assert other.write.parent == tmp_path / "private"
        name = NAME if generation == "A" else NAME.removeprefix("kernel.")
        if generation == "B":
            entry(tmp_path / "ro", name, elf(), committed=True)
        assert cache.find(other, name) is not None
    assert caplog.text.count("set DG_JIT_CACHE_DIR to keep them") == 1


@pytest.mark.parametrize(
    ("version", "arch", "generation", "words"),
    [
        pytest.param("12.8", "sm_100f", "A", "nvcc 12.8 .* does not know sm_100f", id="E3"),
        pytest.param("12.9", "sm_100f", "A", "", id="E3-new"),
        pytest.param("12.8", "sm_90a", "A", "", id="E3-hopper"),
        pytest.param("12.2", "sm_90a", "A", "wants 12.3", id="old for A"),
        pytest.param("12.8", "sm_90a", "B", "wants 12.9", id="old for B"),
    ],
)
def test_a_compiler_that_is_too_old_is_refused_before_it_runs(
    toolkit, version, arch, generation, words
):
    home = toolkit(version)
    compiler = toolchain.find_compiler(generation)
    if words:
        with pytest.raises(exc.LibraryError, match=words):
            toolchain.check(compiler, arch, generation)
    else:
        toolchain.check(compiler, arch, generation)
    assert runs_of(home) == 0


def test_no_compiler_is_one_message_and_cached_kernels_still_count(
    tmp_path, fake, monkeypatch
):  # E1
    fake()
    for name in ("CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "DEFAULT_PREFIX", "/nowhere")
    with pytest.raises(exc.LibraryError) as error:
        toolchain.find_compiler(environ={"PATH": str(tmp_path)}, prefix="/nowhere")
    for looked in ("CUDA_HOME (unset)", "CUDA_PATH (unset)", "nvcc in PATH", "/nowhere/bin/nvcc"):
        assert looked in str(error.value)
    assert "set CUDA_HOME" in str(error.value)
    entry(tmp_path / "cache", NAME, elf())
    key = source.key_in(TRANSPOSE, "transpose_fp32")
    assert DeepGemm().missing([Planned(key)], Target.named("h200")) == []


def test_a_missing_cuobjdump_is_named_only_where_it_is_needed(toolkit):  # E2
    home = toolkit()
    compiler = toolchain.find_compiler()
    toolchain.check_cuobjdump(compiler, needed=False)
    with pytest.raises(exc.LibraryError, match="bin/cuobjdump, which is not there"):
        toolchain.check_cuobjdump(compiler, needed=True)
    (home / "bin" / "cuobjdump").touch()
    toolchain.check_cuobjdump(compiler, needed=True)
    assert toolchain.needs_cuobjdump("mid", {})
    assert not toolchain.needs_cuobjdump("new", {})
    assert toolchain.needs_cuobjdump("new", {"DG_JIT_DUMP_SASS": "1"})


def test_an_empty_binary_of_nvrtc_is_no_entry(tmp_path):  # E5: a failed compile publishes 0 bytes
    assert toolchain.uses_nvrtc("A", {"DG_JIT_USE_NVRTC": "1"})
    assert not toolchain.uses_nvrtc("B", {"DG_JIT_USE_NVRTC": "1"})
    entry(tmp_path, NAME, b"")
    assert cache.entries(cache.Roots("A", tmp_path)) == {}


def test_a_build_is_known_by_distribution_headers_and_compiler(fake, toolkit, tmp_path):
    toolkit()
    package = fake()
    first = library.find_library({})
    assert (first.distribution, first.version, first.installed) == (
        "sgl-deep-gemm",
        "0.1.5.post1",
        True,
    )
    assert "deep_gemm" not in sys.modules
    header = package / "include" / "deep_gemm" / "common.cuh"
    os.utime(header, (1, 1))
    library._headers.cache_clear()
    assert library.find_library({}).fingerprint == first.fingerprint  # contents, not times
    header.write_text("// changed\n")
    library._headers.cache_clear()
    assert library.find_library({}).fingerprint != first.fingerprint
    assert library.find_library({"sgl-deep-gemm": "0.1.2"}).version == "0.1.2"


def test_variables_that_change_flags_are_in_the_identity(fake, toolkit, monkeypatch):
    toolkit()
    fake()
    monkeypatch.setenv("DG_JIT_DEBUG", "1")
    monkeypatch.setenv("DG_JIT_PTXAS_VERBOSE", "0")
    assert library.find_library({}).environment == (("DG_JIT_DEBUG", "1"),)


@pytest.fixture(scope="session")
def headers(tmp_path_factory) -> Path:
    """The include folder of a real wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += [
        "--only-binary=:all:",
        "--platform=manylinux_2_28_x86_64",
        "--platform=manylinux2014_x86_64",
    ]
    command += ["--platform=manylinux_2_34_x86_64", "--platform=manylinux_2_35_x86_64"]
    done = subprocess.run(
        [*command, WHEEL], capture_output=True, text=True, timeout=120, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        pytest.skip(f"{WHEEL} could not be downloaded: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as z:
        z.extractall(folder, [n for n in z.namelist() if n.startswith("deep_gemm/include/")])
    return folder / "deep_gemm" / "include"


def test_a_real_source_compiles_into_its_own_name(headers, real_nvcc, tmp_path):
    from fxwarm.families.deep_gemm.build import build
    from fxwarm.records import Source

    compiler = (
        toolchain.find_compiler("A", {"CUDA_HOME": str(real_nvcc.parent.parent)})
        if (real_nvcc.parent.parent / "bin" / "nvcc").exists()
        else toolchain.find_compiler("A")
    )
    code = f"// Includes' hash value: {digest.includes_hash(TRANSPOSE, headers)}\n{TRANSPOSE}"
    flags = tuple(FLAGS_A.format(include=headers).split())
    name = digest.name_a("transpose_fp32", code, flags, compiler.version)
    planned = Planned(source.key_in(code, "transpose_fp32"), None, Source(name, code, flags))
    (built,) = build([planned], cache.Roots("A", tmp_path), compiler, jobs=1)
    assert not built.error, built.error
    assert built.bytes > 1000
    data = (tmp_path / "cache" / name / "kernel.cubin").read_bytes()
    assert struct.unpack_from("<H", data, 18)[0] == 190  # EM_CUDA
    assert b"transpose_fp32" in data


def test_modelled_kernels_are_found_by_what_the_cache_instantiates(tmp_path, fake, toolkit):
    toolkit()
    fake()
    planned = [p for p in DeepGemm().keys([dense(2112, 7168)], Target.named("h200"), sgl())
               if p.key.tag == "transpose_fp32"]  # fmt: skip
    family = DeepGemm()
    assert family.missing(planned, Target.named("h200")) == planned
    folder = entry(tmp_path / "cache", NAME, elf())
    assert family.missing(planned, Target.named("h200")) == []
    assert family.cached(planned) == [folder / "kernel.cubin"]
