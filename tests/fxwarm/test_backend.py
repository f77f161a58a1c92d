"""The main job: a compiled model is warm, for every size in its range, before its first result."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import fxwarm
import fxwarm.exc
import fxwarm.ops
from fxwarm import artifacts
from fxwarm.backend import fxwarm as backend
from tests import toy_family
from tests.toy_family import Toy

pytestmark = pytest.mark.usefixtures("toy")


class Model(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.w = torch.nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.scale(self.linear(x), self.w)


def jit() -> list[tuple[str, str]]:
    """What the JIT did since the last call."""
    done = list(toy_family.events)
    toy_family.events.clear()
    return done


@torch.no_grad()
def test_no_size_in_the_range_builds_or_loads_after_the_first_call():
    model = Model()
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(5, 8))
    assert sorted(jit()) == sorted(
        (what, f"scale_8_{kind}") for what in ("build", "load") for kind in toy_family.CLASSES
    )
    for rows in (1, 2, 16, 33, 64, 1000):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x))
    assert jit() == []


@torch.no_grad()
def test_without_fxwarm_a_new_size_compiles_in_the_hot_path():
    compiled = torch.compile(Model(), backend="inductor", dynamic=True)
    compiled(torch.randn(5, 8))
    assert ("build", "scale_8_other") in jit()
    compiled(torch.randn(32, 8))
    assert ("build", "scale_8_mult16") in jit()


@torch.no_grad()
def test_the_first_call_is_symbolic_without_any_marking_and_costs_no_recompile():
    compiled = torch.compile(Model(), backend=backend)
    compiled(torch.randn(5, 8))
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(torch.randn(7, 8))
    (call,) = fxwarm.plans()[0].shapes.calls
    assert (call["x"].dims[0].lower, call["x"].dims[0].upper) == (1, 8192)
    assert call["w"].dims[0].is_static


@torch.no_grad()
def test_batch_one_is_warm_before_its_own_graph_exists():
    compiled = torch.compile(Model(), backend=backend)
    compiled(torch.randn(5, 8))
    jit()
    compiled(torch.randn(1, 8))
    assert jit() == []


@torch.no_grad()
def test_dynamic_false_and_mark_static_are_respected():
    compiled = torch.compile(Model(), backend=backend, dynamic=False)
    compiled(torch.randn(5, 8))
    assert fxwarm.plans()[-1].shapes.calls[0]["x"].dims[0].is_static
    torch._dynamo.reset()
    x = torch.randn(6, 8)
    torch._dynamo.mark_static(x, 0)
    torch.compile(Model(), backend=backend)(x)
    assert fxwarm.plans()[-1].shapes.calls[0]["x"].dims[0].is_static


@torch.no_grad()
def test_the_marks_do_not_stay_on_the_users_tensors():
    x = torch.randn(5, 8)
    torch.compile(Model(), backend=backend)(x)
    assert not getattr(x, "_dynamo_weak_dynamic_indices", None)


class Loops(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        for _ in range(x.shape[0]):  # fixes the batch
            out = out + 1
        return out


@torch.no_grad()
def test_a_model_that_fixes_its_batch_compiles_and_the_report_names_the_line():
    model = Loops()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(x), model(x))
    (report,) = fxwarm.reports()
    (fixed,) = report.specialized
    assert (fixed.source, fixed.size) == ("L['x'].size()[0]", 3)
    assert "test_backend.py" in fixed.place and "forward" in fixed.place


class Branches(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out * 2 if x.shape[0] > 4 else out


class Keyed(Model):
    table = {3: 1.0, 6: 2.0}  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.table[x.shape[0]]


@pytest.mark.parametrize("cls", [Branches, Loops, Keyed])
@torch.no_grad()
def test_models_whose_trace_depends_on_the_size_give_right_results(cls):
    model = cls()
    compiled = torch.compile(model, backend=backend)
    for rows in (3, 6):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x))


@torch.no_grad()
def test_a_model_without_a_kernel_call_compiles_as_with_inductor():
    model = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert fxwarm.reports()[-1].status == "complete" and len(fxwarm.plans()[-1]) == 0


@torch.no_grad()
def test_off_does_nothing_and_on_again_needs_no_cleaning():
    model, x = Model(), torch.randn(4, 8)
    off = torch.compile(model, backend=backend, options={"fxwarm.coverage": "off"})
    torch.testing.assert_close(off(x), model(x))
    assert fxwarm.plans() == [] and jit() == [("build", "scale_8_other"), ("load", "scale_8_other")]
    assert [r.status for r in fxwarm.reports()] == ["off"]
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x)
    assert fxwarm.reports()[-1].status == "complete"


@torch.no_grad()
def test_full_coverage_launches_every_attainable_size(monkeypatch):
    launched = []
    original = Toy.load

    def load(self, planned, target, bind):
        launched.extend(int(p.witness["x"].dims[0]) for p in planned)
        return original(self, planned, target, bind)

    monkeypatch.setattr(Toy, "load", load)
    options = {"fxwarm.coverage": "full", "fxwarm.max_size": 40}
    torch.compile(Model(), backend=backend, options=options)(torch.randn(4, 8))
    assert set(launched) == set(range(1, 41))


@torch.no_grad()
def test_an_unknown_option_is_one_clear_error_and_inductors_options_still_work():
    with pytest.raises(Exception, match=r"did you mean 'fxwarm\.max_size'"):
        torch.compile(Model(), backend=backend, options={"fxwarm.max_sise": 3})(torch.randn(4, 8))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no_such_inductor_option"):
        torch.compile(Model(), backend=backend, options={"no_such_inductor_option": 3})(
            torch.randn(4, 8)
        )
    torch._dynamo.reset()
    model, x = Model(), torch.randn(4, 8)
    compiled = torch.compile(
        model, backend=backend, options={"epilogue_fusion": False, "fxwarm.max_size": 64}
    )
    torch.testing.assert_close(compiled(x), model(x))
    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(model, backend=backend, mode="reduce-overhead")(x), model(x)
    )


@torch.no_grad()
def test_a_failing_family_does_not_break_the_compile(monkeypatch, caplog):
    monkeypatch.setattr(Toy, "keys", lambda *a: 1 / 0)
    model, x = Model(), torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert fxwarm.reports()[-1].status == "partial" and "ZeroDivisionError" in caplog.text


@torch.no_grad()
def test_a_failing_matcher_does_not_break_the_compile(monkeypatch, caplog):
    monkeypatch.setattr(Toy, "match", lambda *a: 1 / 0)
    model, x = Model(), torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    (gap,) = fxwarm.reports()[-1].gaps
    assert gap.op == "toy::scale" and "the matcher failed" in gap.reason


@torch.no_grad()
def test_strict_raises_when_something_cannot_be_warmed(monkeypatch):
    monkeypatch.setenv("TOY_CC", "false")
    options = {"fxwarm.strict": True}
    with pytest.raises(Exception, match="cc exited with 1"):
        torch.compile(Model(), backend=backend, options=options)(torch.randn(4, 8))


@torch.no_grad()
def test_the_random_state_is_as_it_was(monkeypatch):
    original = Toy.load

    def load(self, *args):
        torch.rand(3)
        return original(self, *args)

    monkeypatch.setattr(Toy, "load", load)
    compiled = torch.compile(Model(), backend=backend)
    x = torch.randn(4, 8)
    torch.manual_seed(0)
    compiled(x)
    after = torch.rand(1)
    torch.manual_seed(0)
    assert after == torch.rand(1)


@torch.no_grad()
def test_two_threads_making_the_first_call_warm_once():
    compiled = torch.compile(Model(), backend=backend, options={"fxwarm.when": "manual"})
    compiled(torch.randn(5, 8))
    jit()
    (warm,) = artifacts.pending
    warm._run = warm._first
    x = torch.randn(5, 8)
    args = (x,) * 4
    threads = [threading.Thread(target=warm.make_warm, args=(args,)) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted(e for e in jit() if e[0] == "build") == [
        ("build", "scale_8_mult16"),
        ("build", "scale_8_one"),
    ]
    assert len(fxwarm.reports()) == 1


@torch.no_grad()
def test_manual_warms_only_when_asked():
    compiled = torch.compile(Model(), backend=backend, options={"fxwarm.when": "manual"})
    compiled(torch.randn(5, 8))
    assert fxwarm.reports() == []
    assert len(fxwarm.warm_all()) == 1
    jit()
    compiled(torch.randn(16, 8))
    assert jit() == []


def test_training_gives_the_same_gradients():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    x = torch.randn(4, 8)
    torch.compile(model, backend=backend)(x).sum().backward()
    got = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(got, model[0].weight.grad)


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Model(8), Model(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


@torch.no_grad()
def test_graphs_after_a_break_are_each_warm_and_share_their_kernels():
    compiled = torch.compile(Two(), backend=backend)
    compiled(torch.randn(5, 8))
    assert len(fxwarm.reports()) == 2
    assert len([e for e in jit() if e[0] == "build"]) == 3
    compiled(torch.randn(16, 8))
    assert jit() == []


def test_trace_unites_graphs_and_needs_no_weights():
    with torch.device("meta"):
        model, x = Two(), torch.empty(5, 8)
    shapes = fxwarm.trace(model, x, max_size=100)
    (call,) = shapes.calls
    assert call["x"].dims[0].values == ((1, 100, 1),) and shapes.sites[0].count == 2
    assert fxwarm.ShapeSet.from_json(shapes.to_json()) == shapes


@torch.no_grad()
def test_one_info_line_says_what_was_found(caplog):
    with caplog.at_level(logging.INFO, logger="fxwarm"):
        torch.compile(Model(), backend=backend)(torch.randn(5, 8))
    assert "1 kernel calls (1 toy), 0 gaps" in caplog.text
    assert "fxwarm.max_size bounds" in caplog.text


@torch.no_grad()
def test_plan_and_warm_by_hand():
    with torch.device("meta"):
        shapes = fxwarm.trace(Model(), torch.empty(5, 8))
    plan = fxwarm.plan(shapes, fxwarm.Target.named("cpu"))
    assert {k.template for k in plan.keys} == {("8", kind) for kind in toy_family.CLASSES}
    report = fxwarm.warm(plan)
    assert report.status == "complete" and len(report.built) == 3 and len(report.loaded) == 3
    assert fxwarm.warm(plan).built == ()


class Captures(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Model(8), Model(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum([layer(x) for layer in self.layers])  # before Python 3.12 x is a cell here


def test_an_input_that_an_inner_function_captures_stays_symbolic():
    with torch.device("meta"):
        model, x = Captures(), torch.empty(5, 8)
    (call,) = fxwarm.trace(model, x).calls
    assert (call["x"].dims[0].lower, call["x"].dims[0].upper) == (1, 8192)


def test_the_same_input_can_be_traced_for_several_models():
    with torch.device("meta"):
        x, models = torch.empty(5, 8), [Model(8), Model(8), Two()]
    for model in models:
        assert not fxwarm.trace(model, x).calls[0]["x"].dims[0].is_static


def test_a_contradiction_is_refused_at_trace_with_the_layer_and_both_shapes():
    class Wrong(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.empty(8, 256, 512, dtype=torch.float8_e4m3fn), False)
            self.sf = torch.nn.Parameter(torch.empty(4, 2, 4), False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, a_sf = x.to(torch.float8_e4m3fn), x.new_empty(x.shape[0], 4)
            d, ids = (
                x.new_empty(x.shape[0], 256, dtype=torch.bfloat16),
                x.new_empty(x.shape[0], dtype=torch.int32),
            )
            torch.ops.fxwarm.m_grouped_fp8_gemm_nt_contiguous(a, a_sf, self.w, self.sf, d, ids)
            return d

    with torch.device("meta"):
        model, x = torch.nn.Sequential(torch.nn.Identity(), Wrong()), torch.empty(256, 512)
    with pytest.raises(fxwarm.exc.ShapeMismatchError, match=r"^1 .*\[4, 2, 4\].*\[8, 256, 512\]"):
        fxwarm.trace(model, x)
