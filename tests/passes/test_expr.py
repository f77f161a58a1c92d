from __future__ import annotations

import math

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy import functions as of_torch

from passes.expr import DEEPEST, LONGEST, evaluate, magnitude, parse, rename, to_text
from tests.strategies import conditions, expressions

S0, S1 = (sympy.Symbol(n, integer=True) for n in ("s0", "s1"))

WRITTEN = [
    ("128*((s0 + 2032)//16)", "128*(s0//16) + 16256"),
    ("8*s0 + 127*Min(128, 8*s0)", "127*Min(128, 8*s0) + 8*s0"),
    ("Max(1, Min(132//ceiling(s0/64), 56))", "Max(1, Min(56, 132//ceiling(s0/64)))"),
    ("s0*s1 <= 8192", "s0*s1 <= 8192"),
    ("Mod(s0, 8) == 0", "Mod(s0, 8) == 0"),
    ("And(s0 > 4, Not(Mod(s0, 2) == 0))", "And(Mod(s0, 2) != 0, s0 > 4)"),
    ("Or(s1 < 3, s0 >= 7)", "Or(s0 >= 7, s1 < 3)"),
    ("s0**2 - 3*s0*(s1 + 1)", "-3*s0*(s1 + 1) + s0**2"),
    ("-s0*s1 - 5", "-s0*s1 - 5"),
    ("(s0//8)//s1", "s0//(8*s1)"),
    ("2*s0/(3*s1)", "2*s0/(3*s1)"),
    ("s0 % 8", "PythonMod(s0, 8)"),
    ("ModularIndexing(s0, 4, 8)", "ModularIndexing(s0, 4, 8)"),
    ("CeilToInt(IntTrueDiv(s0, 3))", "CeilToInt(IntTrueDiv(s0, 3))"),
    ("FloorToInt(FloatTrueDiv(ToFloat(s0), 3.0))", "FloorToInt(FloatTrueDiv(ToFloat(s0), 3.0))"),
    ("TruncToInt(ToFloat(s0))", "TruncToInt(ToFloat(s0))"),
    ("PowByNatural(2, s0)", "PowByNatural(2, s0)"),
    ("CleanDiv(s0, 8)", "s0//8"),
    ("Identity(s0 + 1)", "s0 + 1"),
    ("Where(s0 > 3, s0, 1)", "Where(s0 > 3, s0, 1)"),
    ("True", "True"),
    ("-7", "-7"),
]


@pytest.mark.parametrize(("text", "canonical"), WRITTEN)
def test_text_reads_back_to_the_same_expression(text, canonical):
    expr = parse(text)
    assert to_text(expr) == canonical
    assert parse(canonical) == expr


@given(expressions() | conditions())
@settings(max_examples=150, deadline=None)
def test_canonical_text_is_a_fixed_point(text):
    canonical = to_text(parse(text))
    assert to_text(parse(canonical)) == canonical


@given(expressions(), st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=150, deadline=None)
def test_arrays_and_plain_python_agree(text, s0, s1):
    names = {
        "Max": max, "Min": min, "Mod": lambda a, b: a % b, "ceiling": math.ceil, "s0": s0, "s1": s1,
    }  # fmt: skip
    expected = eval(text, {"__builtins__": {}}, names)  # text of our own strategy
    expr = parse(text)
    assert int(evaluate(expr, {"s0": s0, "s1": s1})) == expected
    assert evaluate(expr, {"s0": np.array([s0, 1]), "s1": np.array([s1, 1])})[0] == expected
    assert magnitude(expr, {"s0": s0, "s1": s1}) >= abs(expected)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "a.b", "[1]", "lambda: 1", "s0 if s1 else 2", "Max", "eval(s0)", "().__class__",
        "s0 and s1", "1 < s0 < 3", "\0", "", "'s0'", "1j", "f(s0)", "Max(*s0)", "Mod(s0, q=2)", "s0 @ s1", "~s0", "s0 << 2",
        "(s0 := 3)", "__class__", "s0[0]", "None", "...", "Max()", "Mod(1)", "1//0", "Mod(-1, 2)", "True + 1",
    ],
)  # fmt: skip
def test_what_is_no_expression_over_sizes_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse(text)


@pytest.mark.parametrize(
    "text", ["9**9**9", "10**10**2", "(9**60)**60", "PowByNatural(9, 99999)", "s0**99", "1e999"]
)
def test_towers_of_powers_are_not_computed(text):
    with pytest.raises(ValueError, match=r"."):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "s" * (LONGEST + 1),
        "(" * 500 + "s0" + ")" * 500,
        "-" * 9000 + "1",
        "Max(1, " * 150 + "s0" + ")" * 150,
    ],
)
def test_long_or_deep_text_is_refused_before_it_hurts(text):
    with pytest.raises(ValueError, match=rf"{LONGEST}|{DEEPEST}|no expression"):
        parse(text)


def test_division_is_exact_where_floating_point_would_round_the_wrong_way():
    sizes = np.arange(1, 100_000)
    for step in (3, 7, 49, 127):
        up = evaluate(parse(f"ceiling(s0/{step} + 1/{step})"), {"s0": sizes})
        assert np.array_equal(up, -(-(sizes + 1) // step))


def test_symbols_lose_what_their_graph_assumed_of_them():
    positive = sympy.Symbol("s77", integer=True, positive=True)
    assert rename(of_torch.FloorDiv(positive + 1, 8), {positive: "s0"}) == of_torch.FloorDiv(
        S0 + 1, 8
    )
    assert rename(of_torch.Identity(positive) * 2, {positive: "s0"}).free_symbols == {S0}


def test_a_constant_has_the_shape_of_the_sizes():
    assert evaluate(parse("7"), {"s0": np.arange(3)}).tolist() == [7, 7, 7]


def test_a_missing_size_is_named():
    with pytest.raises(ValueError, match="s1"):
        evaluate(S0 + S1, {"s0": 1})


def test_a_value_that_is_no_integer_is_an_error():
    with pytest.raises(ValueError, match="no integers"):
        evaluate(parse("s0/2"), {"s0": np.arange(3)})


def test_functions_that_are_not_known_cannot_be_written():
    with pytest.raises(ValueError, match="sin"):
        to_text(sympy.sin(S0))
