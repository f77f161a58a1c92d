"""Pictures show what the records hold, on light and on dark pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import fxwarm
from fxwarm import exc, lanes, plot
from fxwarm.records import Built, CompileKey, Library, Loaded, Target, WarmReport
from passes.records import Dim, KernelCall, ShapeSet, Site, Symbol, TensorSpec
from tests.toy_family import Toy

pytest.importorskip("matplotlib")
RESULTS = Path(__file__).parents[1] / "gpu" / "results" / "serve-h200.json"


def call(upper: int = 64) -> KernelCall:
    rows = Dim("s0", 1, upper, ((1, upper, 1),))
    x = TensorSpec("float32", (rows, Dim.static(8)))
    w = TensorSpec("float32", (Dim.static(8),))
    return KernelCall("toy", "scale", (("x", x), ("w", w)), symbols=(Symbol("s0", 1, upper),))


def shapes() -> ShapeSet:
    return ShapeSet((call(),), (Site(),))


@pytest.fixture
def toy():
    fxwarm.register(Toy)
    yield Toy
    fxwarm.unregister("toy")


def check(drawing: plot.Drawing) -> str:
    """Well-formed, transparent, no black and no white ink."""
    svg = drawing._repr_svg_()
    ElementTree.fromstring(svg)
    assert "fill: #ffffff" not in svg
    assert not re.search(r"(fill|stroke): (#000000|black)", svg)
    return svg


def test_the_bands_of_a_plan_are_its_kernels_at_each_size(toy):
    plan = fxwarm.plan(shapes(), Target.named("cpu"))
    [(name, bands)] = lanes.lanes_of(plan)
    assert name.startswith("scale")
    for rows in range(1, 65):
        [band] = [b for b in bands if b.first <= rows <= b.last]
        kind = "one" if rows == 1 else "mult16" if rows % 16 == 0 else "other"
        assert band.key.template == ("8", kind)


def test_each_of_our_records_has_a_picture(toy):
    plan = fxwarm.plan(shapes(), Target.named("cpu"))
    keys = plan.keys
    report = WarmReport(
        "k",
        plan.target,
        (Library("toy-jit", "1.0"),),
        built=(Built(keys[0], 2.5, 1024), Built(keys[1], error="cc exited with 1")),
        loaded=(Loaded(keys[0], 0.01),),
    )
    for record in (shapes(), plan, report):
        check(fxwarm.draw(record))


def test_the_same_records_give_the_same_bytes(toy):
    plan = fxwarm.plan(shapes(), Target.named("cpu"))
    assert str(fxwarm.draw(plan)) == str(fxwarm.draw(plan))


def test_bands_are_named_by_the_caller_the_family_or_what_differs():
    keys = [CompileKey("nobody", "k", ("a", str(i), "z")) for i in (16, 128)]
    assert [lanes.label_of(keys)(key) for key in keys] == ["16", "128"]
    check(
        plot.bands([("lane", [lanes.Band(1, 8, keys[0]), lanes.Band(9, 64, keys[1])])], label=str)
    )


def test_a_family_without_a_model_leaves_its_calls_out():
    plan = fxwarm.WarmPlan(Target.named("cpu"), shapes=shapes())
    assert lanes.lanes_of(plan) == []
    check(plot.draw(plan))


def test_empty_records_have_a_picture_too():
    for record in (ShapeSet(), WarmReport("k", Target.named("cpu"))):
        check(plot.draw(record))


def test_what_has_no_picture_is_refused_by_name():
    with pytest.raises(exc.OptionError, match="int has no picture; give a ShapeSet"):
        plot.draw(3)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(exc.LibraryError, match=r"install fxwarm\[notebooks\]"):
        plot.draw(shapes())


def test_the_picture_of_latencies_is_the_one_of_the_readme(tmp_path):
    drawing = plot.latency(json.loads(RESULTS.read_text()))
    check(drawing)
    drawing.save(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text() == str(drawing)
    kept = Path(__file__).parents[2] / "notebooks" / "images" / "serve-h200.svg"
    assert kept.stat().st_size < 200_000
