"""The library is found wherever it lives; a child sees this process's device, and the library's settings."""

from __future__ import annotations

import importlib
import sys
import types

import msgspec
import pytest
import torch

from fxwarm.families.deep_gemm import device, library, recorder, standin
from fxwarm.families.deep_gemm.recorder import Recorder, recorder_for
from fxwarm.records import Planned, Target
from tests.fxwarm.families.deep_gemm.samples import dense, sgl

CPU_H200 = msgspec.structs.replace(Target.named("h200"), device="cpu")


@pytest.fixture
def elsewhere(monkeypatch):
    """Return what makes a module importable under a name, and nothing under ``deep_gemm``."""

    def put(name: str, file: str) -> None:
        module = types.ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return put


@pytest.mark.parametrize(
    "name", ["vllm.third_party.deep_gemm", "deep_gemm_1f9ca0b", "hub._deep_gemm_5f3ab01"]
)
def test_it_is_found_wherever_it_lives(elsewhere, tmp_path, name):
    assert library.module_name() is None
    (tmp_path / "include" / "deep_gemm").mkdir(parents=True)
    elsewhere(name, str(tmp_path / "__init__.py"))
    assert library.module_name() == name
    found = library.find_library({})
    assert found.installed
    assert found.module == name
    assert library.include_of(name) == tmp_path / "include"


def test_the_one_of_its_own_name_comes_first(elsewhere, tmp_path):
    elsewhere("deep_gemm_1f9ca0b", str(tmp_path / "__init__.py"))
    elsewhere("deep_gemm", str(tmp_path / "__init__.py"))
    assert library.module_name() == "deep_gemm"


@pytest.mark.parametrize(
    ("visible", "current", "uuid", "expected"),
    [
        pytest.param("", 3, "GPU-aa", "GPU-aa", id="by its UUID, not by index"),
        pytest.param("2,5", 1, "bb", "GPU-bb", id="the prefix is ours"),
        pytest.param("MIG-1,MIG-2", 1, "cc", "MIG-2", id="a slice has a name of its own"),
        pytest.param("2,5", 1, "", "5", id="no UUID: the name that it was given"),
        pytest.param("", 1, "", "1", id="no UUID and no names"),
    ],
)
def test_a_child_sees_the_device_of_its_parent(monkeypatch, visible, current, uuid, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    properties = types.SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert device.identity("cuda") == expected
    assert device.child_environment("cuda")["CUDA_VISIBLE_DEVICES"] == expected
    assert device.identity("cpu") == ""


def test_a_child_has_what_enters_keys_and_nothing_that_prints(monkeypatch, tmp_path):
    monkeypatch.setenv("DG_JIT_DEBUG", "1")
    monkeypatch.setenv("DG_JIT_CPP_STANDARD", "23")
    monkeypatch.setenv("DG_PRINT_CONFIGS", "1")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/the/real/one")
    environ = device.child_environment("cpu") | standin.environment(tmp_path)
    assert (environ["DG_JIT_DEBUG"], environ["DG_JIT_CPP_STANDARD"]) == ("1", "23")
    assert "DG_PRINT_CONFIGS" not in environ
    assert environ["DG_JIT_CACHE_DIR"].startswith(str(tmp_path))
    assert environ["DG_JIT_NVCC_COMPILER"] == str(tmp_path / "nvcc")


def test_one_recorder_a_process_and_device_serves_all_graphs(monkeypatch):
    found = sgl()
    seen = ["GPU-aa"]
    monkeypatch.setattr(recorder, "_recorders", {})
    monkeypatch.setattr(device, "identity", lambda kind: seen[0])
    first = recorder_for(CPU_H200, found)
    assert recorder_for(CPU_H200, found) is first
    seen[0] = "GPU-bb"
    assert recorder_for(CPU_H200, found) is not first


def test_settings_that_the_program_made_are_made_in_the_child(fake, toolkit, monkeypatch, tmp_path):
    toolkit()
    body = """
    _pdl = [False]
    def get_pdl(): return _pdl[0]
    def set_pdl(value):
        _pdl[0] = value
        with open("@MARK@", "a") as file: print(os.getpid(), value, file=file)
    """.replace("@MARK@", str(tmp_path / "mark"))
    fake(body=body)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = importlib.import_module("deep_gemm")
    module.set_num_sms(120)
    module.set_pdl(True)
    asked = Recorder(CPU_H200, library.find_library({}))
    try:
        found = [p for p in asked.record([dense(2112, 7168, upper=20)]) if isinstance(p, Planned)]
    finally:
        asked.close()
    gemms = [p for p in found if "gemm" in p.key.tag]
    assert gemms
    assert all("120" in p.key.template for p in gemms)
    ours, theirs = (tmp_path / "mark").read_text().splitlines()
    assert ours.split()[0] != theirs.split()[0]
    assert [line.split()[1] for line in (ours, theirs)] == ["True", "True"]
