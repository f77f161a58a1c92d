"""What travels with a saved model, and when the model that comes back is made warm."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref

import msgspec
import pytest
import torch

import fxwarm
from fxwarm import artifacts, exc, options, receipts
from fxwarm.artifacts import Parcel, WarmCallable
from fxwarm.backend import fxwarm as backend
from fxwarm.records import Target
from fxwarm.warmup import Warmup
from passes.records import Dim, Gap, KernelCall, ShapeSet, Site, Symbol, TensorSpec
from tests import load_models, toy_family
from tests.cold import forget

CPU = Target.named("cpu")
CPU_DEVICE = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("toy")


def shapes(width: int = 8) -> ShapeSet:
    rows = Dim("s0", 1, 100, ((1, 100, 1),))
    x, w = (
        TensorSpec("float32", (rows, Dim.static(width))),
        TensorSpec("float32", (Dim.static(width),)),
    )
    call = KernelCall("toy", "scale", (("x", x), ("w", w)), symbols=(Symbol("s0", 1, 100),))
    return ShapeSet(calls=(call,), sites=(Site(1, ""),))


def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What Inductor compiled."""
    return toy_family.scale(x, w)


X, W = torch.ones(3, 8), torch.full((8,), 2.0)


def saved(**given: object) -> bytes:
    """Compile, warm and pack in what stands for an earlier process."""
    warm = WarmCallable(
        run, Warmup(shapes(), options.resolve(given), device=torch.device("cpu"), target=CPU)
    )
    warm.make_warm()
    data = warm.pack()
    forget()
    return data


def jit() -> list[str]:
    done = [what for what, _ in toy_family.events]
    toy_family.events.clear()
    return done


def test_a_parcel_is_json_and_holds_the_plan():
    parcel = msgspec.json.decode(saved(), type=Parcel)
    assert parcel.shapes == shapes() and len(parcel.plan) == 3


def test_a_loaded_model_is_warm_after_its_first_call_by_the_plan_that_came_with_it(monkeypatch):
    data = saved()
    monkeypatch.setattr(toy_family.Toy, "keys", lambda *a: pytest.fail("the plan came along"))
    warm = WarmCallable.unpack(run, data)
    assert jit() == []
    assert warm(X, W).sum() == 48 and jit() == ["load"] * 3
    warm(torch.ones(16, 8), W)
    warm(torch.ones(1, 8), W)
    assert jit() == []


def test_what_was_learned_since_it_was_saved_reaches_a_model_that_is_loaded():
    data = saved()
    warm = WarmCallable.unpack(run, data)
    warm(X, W)
    toy = toy_family.Toy()
    others = list(toy.keys(shapes(16).calls, CPU, toy.library({})))
    receipts.learn(warm.warmup.plan, others, warm.warmup.options)
    forget()
    WarmCallable.unpack(run, data)(X, W)
    assert jit().count("load") == 6


def test_an_artifact_carries_the_key_of_the_graph_that_it_no_longer_has():
    warmup = Warmup(shapes(), options.resolve(), device=CPU_DEVICE, target=CPU, graph_key="d" * 33)
    warm = WarmCallable(run, warmup)
    warm.make_warm()
    loaded = WarmCallable.unpack(run, warm.pack())
    loaded(X, W)
    assert loaded.warmup.graph_key == "d" * 33
    first, second = fxwarm.reports()
    assert first.plan_key == second.plan_key


@pytest.mark.parametrize(
    ("when", "begins", "warms"),
    [("first_call", False, True), ("load", True, True), ("manual", False, False)],
)
@torch.no_grad()
def test_when_a_loaded_function_builds_and_when_it_is_warm(when, begins, warms, fresh):
    """Through ``aot_compile``: "load" builds before any call, "manual" not even at the first one."""
    model, file = load_models.ToyModel().eval(), fresh / "function"
    x = torch.ones(5, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with torch._dynamo.config.patch(enable_aot_compile=True):
        chosen = {"fxwarm.when": when}
        compiled = torch.compile(model, fullgraph=True, backend=backend, options=chosen)
        compiled.forward.aot_compile(((x,), {})).save_compiled_function(str(file))
    forget()
    shutil.rmtree(toy_family.cache_dir(), ignore_errors=True)
    with file.open("rb") as f:
        loaded = torch.compiler.load_compiled_function(f)
    (warm,) = artifacts.pending
    warm.warmup.wait()
    assert jit() == (["build"] * 3 if begins else [])
    loaded(model, X)
    done = jit()
    assert done.count("load") == (3 if warms else 1)
    if not warms:
        fxwarm.warm_all()
        jit()
    loaded(model, torch.ones(16, 8))
    loaded(model, torch.ones(17, 8))
    assert jit() == [] and fxwarm.reports()[-1].status == "complete"


def test_a_plan_for_other_libraries_is_made_again(monkeypatch):
    data = saved()
    original = toy_family.Toy.library
    monkeypatch.setattr(
        toy_family.Toy,
        "library",
        lambda self, wanted: msgspec.structs.replace(original(self, wanted), version="2.0"),
    )
    warm = WarmCallable.unpack(run, data)
    warm(X, W)
    assert (
        warm.warmup.plan.libraries[0].version == "2.0" and fxwarm.reports()[0].status == "complete"
    )


def test_when_load_begins_to_build_at_once_and_loads_at_the_first_call():
    data = saved(when="load")
    for entry in toy_family.cache_dir().glob("scale_*"):
        (entry / "kernel.so").unlink()
    warm = WarmCallable.unpack(run, data)
    warm.warmup.wait()
    assert jit() == ["build"] * 3
    warm(X, W)
    assert jit() == ["load"] * 3


def test_when_manual_waits_to_be_asked():
    warm = WarmCallable.unpack(run, saved(when="manual"))
    assert warm.warmup._thread is None
    warm(X, W)
    assert fxwarm.reports() == [] and jit() == ["load"]
    fxwarm.warm_all()
    warm(torch.ones(16, 8), W)
    assert fxwarm.reports()[0].status == "complete" and "build" not in jit()


def test_two_threads_that_call_first_warm_once(monkeypatch):
    warm = WarmCallable.unpack(run, saved())
    times, original = [], toy_family.Toy.load

    def load(self, planned, target, bind):
        times.append(len(planned))
        time.sleep(0.2)
        return list(original(self, planned, target, bind))

    monkeypatch.setattr(toy_family.Toy, "load", load)
    results: list[float] = []
    threads = [
        threading.Thread(target=lambda: results.append(float(warm(X, W).sum()))) for _ in range(2)
    ]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert times == [3] and results == [48.0, 48.0] and jit() == ["load"] * 3


def test_a_second_model_of_the_same_kernels_loads_nothing_again():
    data = saved()
    WarmCallable.unpack(run, data)(X, W)
    jit()
    WarmCallable.unpack(run, data)(X, W)
    assert jit() == [] and len(fxwarm.reports()) == 2


def test_what_showed_only_after_dynamo_is_warm_too_and_travels():
    forget()
    first, second = (
        WarmCallable(
            run, Warmup(shapes(width), options.resolve(), device=torch.device("cpu"), target=CPU)
        )
        for width in (8, 16)
    )
    first.after = second
    first(X, W)
    assert jit().count("load") == 6
    data = first.pack()
    forget()
    WarmCallable.unpack(run, data)(X, W)
    assert jit() == ["load"] * 6


def test_a_gap_that_showed_only_after_dynamo_travels_with_the_plan():
    first, gap = (
        WarmCallable(run, Warmup(s, options.resolve(), device=torch.device("cpu"), target=CPU))
        for s in (shapes(), ShapeSet(gaps=(Gap("attention", "it plans at each call"),)))
    )
    first.after = gap
    first(X, W)
    data = first.pack()
    forget()
    assert len(msgspec.json.decode(data, type=Parcel).plan) == 3
    WarmCallable.unpack(run, data)(X, W)
    (report,) = fxwarm.reports()
    assert report.status == "partial" and [g.op for g in report.gaps] == ["attention"]


def test_it_warms_before_a_graph_is_captured(monkeypatch):
    """``reduce-overhead``: this callable is outside of the captured part and is called before it."""
    order: list[str] = []
    original = toy_family.Toy.load

    def load(self, planned, target, bind):
        order.append("load")
        return original(self, planned, target, bind)

    monkeypatch.setattr(toy_family.Toy, "load", load)

    def captured(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        monkeypatch.setattr(artifacts, "is_capturing", lambda: True)
        order.append("capture")
        return run(x, w)

    warm = WarmCallable.unpack(captured, saved())
    order.clear()
    warm(X, W)
    warm(X, W)
    assert order == ["load", "capture", "capture"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_cold_model_met_by_a_capture_says_so_and_does_no_work(strict, monkeypatch, caplog):
    warm = WarmCallable.unpack(run, saved(strict=strict))
    with monkeypatch.context() as patch:
        patch.setattr(artifacts, "is_capturing", lambda: True)
        if strict:
            with pytest.raises(exc.ColdCaptureError, match=r"warm_all"):
                warm(X, W)
        else:
            warm(X, W)
            assert "call fxwarm.warm_all() before it" in caplog.text
    assert fxwarm.reports() == []
    warm(X, W)
    assert fxwarm.reports()[0].status == "complete"


def test_foreign_bytes_are_refused():
    for data in (b"", b"{}", saved()[:-10], saved().replace(b'"schema":1', b'"schema":99')):
        with pytest.raises(ValueError, match=r"."):
            WarmCallable.unpack(run, data)


def test_a_damaged_plan_in_a_precompiled_model_costs_the_plan_and_not_the_model(
    monkeypatch, caplog
):
    from torch._functorch._aot_autograd.aot_autograd_result import (
        BundledAOTAutogradCacheArtifact as Artifact,
    )

    class Loaded(Artifact):
        def __init__(self, parcel: bytes | None) -> None:
            self.fxwarm_parcel = parcel

    monkeypatch.setattr(Artifact, "after_deserialization", lambda self: run)
    artifacts.hook_precompiled()
    assert Loaded(b"{").after_deserialization() is run
    assert "not warmed" in caplog.text and "compile the model again" in caplog.text
    assert Loaded(None).after_deserialization() is run
    assert isinstance(Loaded(saved()).after_deserialization(), WarmCallable)
    once = Artifact.after_deserialization
    artifacts.hook_precompiled()
    assert Artifact.after_deserialization is once


@torch.no_grad()
def test_a_model_that_nobody_holds_is_let_go_and_its_report_stays():
    model = load_models.ToyModel()
    torch.compile(model, backend=backend)(X)
    held = [weakref.ref(warm) for warm in artifacts.pending]
    held += [weakref.ref(model), *(weakref.ref(warm.inner) for warm in artifacts.pending)]
    assert len(held) >= 3
    del model
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert [report.status for report in fxwarm.reports()] == ["complete"]
    assert len(fxwarm.plans()[0]) == 3 and fxwarm.warm_all() == [], "there is nothing to warm"


def test_what_nobody_else_holds_is_kept_until_it_is_warm():
    """A backward that is compiled when it first runs, with ``fxwarm.when`` "manual"."""
    settings = options.resolve({"when": "manual"})
    late = Warmup(shapes(), settings, device=torch.device("cpu"), target=CPU)
    WarmCallable(artifacts.never_called, late, keep=True)
    gc.collect()
    (report,) = fxwarm.warm_all()
    assert report.status == "complete" and jit().count("load") == 3
