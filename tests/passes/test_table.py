"""Tables and texts read as people write: long sets folded, long expressions once, the same in every form."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from fxwarm.records import CompileKey, Planned, Target, WarmPlan
from passes import table, text
from passes.records import Dim, Gap, KernelCall, ShapeSet, Site, Symbol, TensorSpec

ROWS = "128*((127*Min(128, 8*s0) + 8*s0 + 127)//128)"


def grouped() -> KernelCall:
    rows = Dim(ROWS, 1024, 81792, ((1024, 81792, 128),))
    a = TensorSpec("float8_e4m3fn", (rows, Dim.static(2048)))
    sf = TensorSpec("float32", (rows, Dim.static(16)))
    b = TensorSpec("float8_e4m3fn", (Dim.static(128), Dim.static(1536), Dim.static(2048)))
    d = TensorSpec("bfloat16", (rows, Dim.static(1536)))
    tensors = (("a", a), ("a_sf", sf), ("b", b), ("d", d))
    return KernelCall("deep_gemm", "grouped", tensors, symbols=(Symbol("s0", 1, 8192),))


def shapes() -> ShapeSet:
    site = Site(48, "model.layers.0.mlp.experts (layers.py:117)")
    return ShapeSet((grouped(),), (site,), gaps=(Gap("x::op", "no bound; set max_size"),))


def plan(count: int) -> WarmPlan:
    shape = TensorSpec("bfloat16", (Dim.static(17), Dim.static(2048)))
    witness = KernelCall("deep_gemm", "fp8_gemm_nt", (("a", shape),))
    keys = [CompileKey("deep_gemm", "impl", ("Major::K", str(16 * i), "128")) for i in range(count)]
    return WarmPlan(Target.named("h200"), planned=tuple(Planned(key, witness) for key in keys))


@pytest.mark.parametrize(
    ("expr", "people"),
    [
        ("(s0 + 127)//128", "ceil(s0/128)"),
        ("128*((s0 + 127)//128)", "128*ceil(s0/128)"),
        (ROWS, "128*ceil((127*min(128, 8*s0) + 8*s0)/128)"),
        ("(s0 + 3)//128", "(s0 + 3)//128"),
        ("s0//2", "s0//2"),
        ("Max(1, s0)", "max(1, s0)"),
        ("(((s0 + 1)//2) + 3)//4", "ceil(ceil(s0/2)/4)"),
    ],
)
def test_an_expression_is_written_as_people_do(expr, people):
    assert text.expr_text(expr) == people


def test_a_written_ceiling_has_the_value_of_the_floor_it_stands_for():
    from math import ceil

    from passes.expr import evaluate, parse

    for expr in (ROWS, "(((s0 + 1)//2) + 3)//4", "128*((s0 + 127)//128) + (s0 + 6)//7"):
        shown = text.expr_text(expr)
        for value in (1, 2, 15, 16, 17, 127, 128, 129, 1000, 8192):
            assert eval(shown, {"ceil": ceil, "s0": value}) == evaluate(parse(expr), {"s0": value})


def test_a_ceiling_is_typeset():
    assert r"\lceil" in text.latex(ROWS)
    assert r"\lfloor" in text.latex("s0//2")


def test_a_long_expression_stands_in_a_table_once():
    shown = str(shapes())
    flat = re.sub(r"\s+", " ", shown)
    assert shown.count("ceil(") == 1
    assert "f8e4m3[M, 2048]" in flat
    assert "bf16[M, 1536]" in flat
    assert "M = 128*ceil((127*min(128, 8*s0) +" in flat
    assert "M: 1024..81792 (632 values)" in flat
    assert "s0: 1..8192" in flat
    assert "a_sf" not in flat
    assert "model.layers.0.mlp.experts" in flat
    assert "layers.py:117" in flat
    assert "gap: x::op: no bound; set max_size" in flat


def test_several_long_expressions_have_several_names():
    one, other = Dim(ROWS, 1024, 81792), Dim("(s0 + 127)//128", 1, 64)
    call = KernelCall("f", "op", (("a", TensorSpec("float32", (one, other))),))
    assert text.call_lines(call) == ["a f32[M1, M2]"]


def test_plain_text_is_at_most_120_columns_wide():
    assert max(map(len, str(shapes()).splitlines())) <= table.WIDTH
    assert max(map(len, str(plan(100)).splitlines())) <= table.WIDTH


def test_what_templates_have_in_common_is_said_once():
    shown = str(plan(3))
    assert shown.count("K, *, 128") == 1
    assert f"17{text.TIMES}2048" in shown
    assert text.fold([("Major::K", "16", "8"), ("Major::K", "128", "8")]) == (
        [" 16", "128"],
        "K, *, 8",
    )
    assert text.fold([("a", "b")]) == (["a, b"], "")
    assert text.fold([("a",), ("a", "b")]) == (["a", "a, b"], "")
    assert text.fold([()]) == ([""], "")


def test_a_long_table_is_folded_and_says_how_much_is_left():
    assert "… and 60 more rows" in str(plan(100))
    assert plan(100)._repr_html_().count("<tr") == table.FOLD + 1


def test_html_has_the_text_of_the_plain_table_and_no_colour_of_its_own():
    shown = shapes()._repr_html_()
    assert "M = 128*ceil((127*min(128, 8*s0) + 8*s0)/128)" in shown
    assert not re.search(r"#[0-9a-f]{3,6}\b|rgb\(", shown)
    assert "color:inherit" in shown


def test_html_escapes_what_a_model_says():
    html = table.Table("<b>", ("<i>",), [("<script>\n<u>",)], ("<hr>",))._repr_html_()
    assert not re.search(r"<(script|u|hr|i)>", html)


def test_a_terminal_shows_the_same_table():
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(shapes())
    assert "grouped" in out.getvalue()
    assert "1024..81792" in out.getvalue()
