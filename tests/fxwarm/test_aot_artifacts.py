"""Torch's ``aot_compile`` artifacts: whose name they hold, and in which process they come back warm."""

from __future__ import annotations

import pickletools
import re
import subprocess
import sys

import pytest
import torch
from torch._dynamo import aot_compile_types
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Reader

import fxwarm
from fxwarm import aot_artifacts, artifacts
from fxwarm.artifacts import EmbeddedCallable, WarmCallable
from fxwarm.backend import fxwarm as backend
from tests import load_models
from tests.cold import forget
from tests.fxwarm.test_artifacts import X, jit


@pytest.fixture(autouse=True)
def heard(toy):
    yield
    aot_artifacts.take_missed()


def save(file, name: object = backend, **options: object):
    """Save the toy model as an earlier process would; return the model and the artifact's bytes."""
    model, x = load_models.ToyModel().eval(), torch.ones(5, 8)
    torch._dynamo.mark_dynamic(x, 0)
    given = {f"fxwarm.{key}": value for key, value in options.items()}
    with torch.no_grad(), torch._dynamo.config.patch(enable_aot_compile=True):
        compiled = torch.compile(model, fullgraph=True, backend=name, options=given or None)
        compiled.forward.aot_compile(((x,), {})).save_compiled_function(str(file))
    forget()
    return model, file.read_bytes()


def load(file):
    with file.open("rb") as f:
        return torch.compiler.load_compiled_function(f)


def names(data: bytes) -> set[str]:
    """The strings that torch's pickle reads as names of classes and functions, or as other text."""
    begin = data.index(b"\x80")  # torch 2.15 writes a header before it
    return {arg for _, arg, _ in pickletools.genops(data[begin:]) if isinstance(arg, str)}


@pytest.fixture
def before_import(monkeypatch):
    """The process as it was before fxwarm was imported: torch's reader is its own."""
    own = Reader.deserialize_compile_artifacts.__func__.__wrapped__
    monkeypatch.setattr(Reader, "deserialize_compile_artifacts", classmethod(own))


@torch.no_grad()
def test_an_artifact_names_torchs_class_and_comes_back_warm(fresh):
    model, data = save(fresh / "function")
    assert not any(name.startswith("fxwarm.") for name in names(data))
    loaded = load(fresh / "function")
    (warm,) = artifacts.pending
    assert type(warm) is WarmCallable
    assert torch.allclose(loaded(model, X), model(X))
    jit()
    loaded(model, torch.ones(16, 8))
    assert jit() == [] and fxwarm.reports()[0].status == "complete"


@torch.no_grad()
def test_an_embedded_artifact_names_ours_so_that_loading_imports_fxwarm(fresh, before_import):
    model, data = save(fresh / "function", embed=True)
    assert {"fxwarm.artifacts", "EmbeddedCallable"} <= names(data)
    aot_artifacts.hook(aot_compile_types)
    loaded = load(fresh / "function")
    (warm,) = artifacts.pending
    assert type(warm) is EmbeddedCallable, "saved again it is as it was"
    loaded(model, X)
    assert fxwarm.reports()[0].status == "complete"


@torch.no_grad()
def test_what_was_loaded_before_fxwarm_is_named_and_warm_all_warms_it(fresh, before_import, caplog):
    model, _ = save(fresh / "function")
    loaded = load(fresh / "function")
    loaded(model, X)
    assert len(artifacts.pending) == 0 and jit() == ["load"], "torch's own reader knows no plan"
    aot_artifacts.hook(aot_compile_types)
    # Torch lets go of nothing that it has loaded, so what other tests loaded counts as well.
    said = r"not warmed: \d+ aot_compile graphs .* import fxwarm before loading, or call fxwarm.warm_all()"
    assert re.search(said.replace("()", r"\(\)"), caplog.text)
    assert {report.status for report in fxwarm.warm_all()} == {"complete"}
    assert jit().count("load") == 2
    loaded(model, torch.ones(16, 8))
    assert jit() == [] and aot_artifacts.take_missed() == []


@torch.no_grad()
def test_a_loaded_artifact_keeps_its_plan_when_it_is_saved_again(fresh):
    model, _ = save(fresh / "function")
    load(fresh / "function").save_compiled_function(str(fresh / "again"))
    forget()
    again = load(fresh / "again")
    (warm,) = artifacts.pending
    assert torch.allclose(again(model, X), model(X))
    assert len(warm.warmup.plan) == 3


@torch.no_grad()
def test_an_artifact_of_plain_inductor_is_left_alone(fresh):
    model, _ = save(fresh / "function", "inductor")
    assert torch.allclose(load(fresh / "function")(model, X), model(X))
    assert len(artifacts.pending) == 0


def test_torchs_cache_entry_gets_the_parcel_in_a_copy():
    class Entry:
        """What torch keeps in its own cache."""

    entry, inner = Entry(), type("Inner", (), {"serialize": lambda self: entry})()
    carried = Reader(aot_artifacts.Carrier(inner, b"{}"))
    assert aot_artifacts.parcel_of(carried) == b"{}"
    assert aot_artifacts.parcel_of(Reader(inner)) is None
    assert not hasattr(entry, aot_artifacts.FIELD)


def test_a_torch_without_that_reader_is_left_alone(caplog):
    caplog.set_level("INFO")
    aot_artifacts.hook(sys)
    assert "cannot be read here" in caplog.text


@pytest.mark.parametrize("first", ["fxwarm, torch", "torch, fxwarm"])
def test_the_reader_is_hooked_in_either_order_and_only_when_torch_imports_it(first):
    code = (
        f"import sys, {first}\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as R\n"
        "print(R.deserialize_compile_artifacts._fxwarm, 'fxwarm.artifacts' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
