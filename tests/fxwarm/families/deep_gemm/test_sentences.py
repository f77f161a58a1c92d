"""What is missing or wrong around the library is one sentence that says what to do, whatever came first."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import msgspec
import pytest
import torch

from fxwarm import exc
from fxwarm.families.deep_gemm import DeepGemm, cache, library, toolchain
from fxwarm.families.deep_gemm.library import find_library
from fxwarm.records import Planned, Target
from passes.records import Gap
from tests.fxwarm.families.deep_gemm.conftest import runs_of
from tests.fxwarm.families.deep_gemm.samples import dense, sgl

CPU_H200 = msgspec.structs.replace(Target.named("h200"), device="cpu")
H200 = Target.named("h200")


def plan(build=None, upper: int = 16) -> list[Planned]:
    return list(DeepGemm().keys([dense(256, 256, upper=upper)], H200, build or sgl()))


def load(family: DeepGemm, planned) -> list[str]:
    return [x.error for x in family.load(planned, CPU_H200, lambda call: None)]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # whatever a test's warmup sets in the environment goes with the test
    monkeypatch.setenv("DG_JIT_CACHE_DIR", os.environ.get("DG_JIT_CACHE_DIR", ""))


@pytest.fixture
def read_only(monkeypatch, tmp_path):
    """Return what makes the library's cache one that cannot be written, and the private one instead."""

    def make() -> Path:
        monkeypatch.setattr(cache, "_said", set())
        private = tmp_path / "tmp"
        private.mkdir()
        monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(private))
        there = tmp_path / "cache"
        (there / "cache").mkdir(parents=True, exist_ok=True)
        (there / "tmp").touch()  # no folder can be made in it, even by root
        real = cache.tempfile.TemporaryFile

        def refuse(**options):
            if options.get("dir") == there:
                raise OSError(30, "Read-only file system")
            return real(**options)

        monkeypatch.setattr(cache.tempfile, "TemporaryFile", refuse)
        return private

    return make


def test_absent(monkeypatch):
    monkeypatch.setattr(library, "module_name", lambda: None)
    errors = load(DeepGemm(), plan())
    assert errors == [errors[0]] * len(errors)
    assert "install sgl-deep-gemm" in errors[0]
    assert not find_library({}).installed


def test_too_old_to_be_known():
    (gap,) = plan(sgl("0.0.9"))
    assert isinstance(gap, Gap)
    assert "0.0.9 are not known; known are" in gap.reason
    assert gap.reason.endswith("plan for a known version")


@pytest.mark.parametrize("home", ["", "/nowhere"], ids=["unset", "wrong"])
def test_cuda_home_is_unset_or_wrong(home):
    with pytest.raises(exc.LibraryError) as error:
        toolchain.find_compiler("A", {"CUDA_HOME": home, "PATH": ""}, prefix="/nowhere/either")
    looked = "CUDA_HOME=/nowhere" if home else "CUDA_HOME (unset)"
    assert looked in str(error.value)
    assert "set CUDA_HOME" in str(error.value)


def test_a_toolkit_that_goes_after_the_import_leaves_cached_kernels_loadable(fake, toolkit):  # E1
    home = toolkit()
    fake(real_torch=True)
    planned, family = plan(), DeepGemm(memory=1 << 30)
    assert load(family, planned) == [""] * len(planned)
    (home / "bin" / "nvcc").unlink()
    assert family.missing(planned, H200) == []
    assert load(DeepGemm(memory=1 << 30), planned) == [""] * len(planned)


def test_a_library_that_wants_a_toolkit_to_import_says_so(fake):
    fake(body="assert None is not None", real_torch=True)
    planned = plan()
    errors = load(DeepGemm(), planned)
    assert all("AssertionError" in e and "set CUDA_HOME before" in e for e in errors)
    assert len(errors) == len(planned)


def test_a_read_only_cache_before_the_library_is_imported(fake, toolkit, read_only, caplog):
    home = toolkit()
    fake(real_torch=True)
    planned = plan()
    private = read_only()
    assert load(DeepGemm(memory=1 << 30), planned) == [""] * len(planned)  # nothing was recorded
    assert runs_of(home) == len(planned)
    (root,) = private.iterdir()
    assert len(cache.entries(cache.Roots("A", root))) == len(planned)
    assert caplog.text.count("set DG_JIT_CACHE_DIR to keep them") == 1


def test_a_read_only_cache_after_the_library_was_imported_and_before_it_compiled(
    fake, toolkit, read_only
):
    toolkit()
    fake(real_torch=True)
    read_only()
    importlib.import_module("deep_gemm")
    planned = plan()
    assert load(DeepGemm(memory=1 << 30), planned) == [""] * len(planned)


def test_a_read_only_cache_after_the_library_has_compiled(fake, toolkit, read_only, tmp_path):
    toolkit()
    fake(real_torch=True)
    some, all_of_them = plan(), plan(upper=100)
    family = DeepGemm(memory=1 << 30)
    assert load(family, some) == [""] * len(some)
    (tmp_path / "cache" / "tmp").rmdir()
    read_only()
    loaded = family.load(all_of_them, CPU_H200, lambda call: None)
    errors = {x.key: x.error for x in loaded}
    assert set(errors) == {p.key for p in all_of_them}
    late = [e for k, e in errors.items() if k not in {p.key for p in some}]
    assert late
    assert all("before its first call" in e and "set DG_JIT_CACHE_DIR" in e for e in late)
    assert [errors[p.key] for p in some] == [""] * len(some)  # what it holds already is loaded


def test_home_is_unset(fake, toolkit, monkeypatch, tmp_path, caplog):
    toolkit()
    fake()
    monkeypatch.setattr(cache, "_said", set())
    monkeypatch.delenv("DG_JIT_CACHE_DIR")
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    assert DeepGemm().folder(H200) == tmp_path / ".deep_gemm"
    assert caplog.text.count("set DG_JIT_CACHE_DIR") == 1
