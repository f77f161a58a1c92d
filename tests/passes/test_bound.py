from __future__ import annotations

import itertools
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes import bound
from passes.bound import Unbounded, bound_dim, image, is_contiguous
from passes.expr import evaluate, parse
from passes.points import BUDGET, bounds, cap_of, enumerate_points
from passes.records import Dim, KernelCall, ShapeSet, Site, Symbol, TensorSpec
from tests.strategies import conditions, expressions

TOKENS = (Symbol("s0", 1, 8192),)
BATCH = (Symbol("s0", 1, 8192), Symbol("s1", 1, 8192))
CAP = ("s0*s1 <= 8192",)


def brute(symbols, guards, texts):
    """Every row and the first point that leads to it, by a loop over the whole box."""
    rows = {}
    for point in itertools.product(*(range(s.lower, s.upper + 1) for s in symbols)):
        sizes = dict(zip((s.name for s in symbols), point, strict=True))
        if all(bool(evaluate(parse(g), sizes)) for g in guards):
            rows.setdefault(tuple(int(evaluate(parse(t), sizes)) for t in texts), sizes)
    return rows


boxes = st.tuples(
    st.builds(lambda a, n: Symbol("s0", a, a + n), st.integers(0, 4), st.integers(0, 11)),
    st.builds(lambda a, n: Symbol("s1", a, a + n), st.integers(1, 4), st.integers(0, 11)),
)


@given(
    boxes,
    st.lists(conditions(), max_size=3, unique=True),
    st.lists(expressions(), min_size=1, max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_an_image_is_what_a_loop_over_the_box_finds(symbols, guards, texts):
    found = image(KernelCall("f", "o", (), (), symbols, tuple(guards)), *texts)
    naive = brute(symbols, guards, texts)
    assert [tuple(r) for r in found.rows.tolist()] == sorted(naive)
    assert [found.at(i) for i in range(len(found))] == [naive[row] for row in sorted(naive)]
    assert found.exact


@given(boxes, st.lists(conditions(), max_size=2, unique=True), expressions())
@settings(max_examples=60, deadline=None)
def test_a_dim_holds_every_attainable_value_and_no_other(symbols, guards, text):
    naive = {row[0] for row in brute(symbols, guards, [text])}
    if not naive:
        with pytest.raises(Unbounded):
            raise_if_empty(bound_dim(text, symbols, tuple(guards)), text)
        return
    dim = bound_dim(text, symbols, tuple(guards))
    values = set(dim.attainable().tolist())
    assert naive <= values
    if {"s0", "s1"} <= {s.name for s in parse(text).free_symbols}:
        assert naive == values
    lower, upper = bounds(parse(text), symbols, tuple(guards))
    assert lower <= min(naive)
    assert max(naive) <= upper


def raise_if_empty(dim, text):
    # guards over a symbol that the expression does not have may be what contradicts
    if len(parse(text).free_symbols) < 2:
        raise Unbounded
    return dim


@given(boxes, st.lists(conditions(), min_size=1, max_size=3, unique=True), expressions())
@settings(max_examples=40, deadline=None)
def test_a_guard_more_never_adds_a_value(symbols, guards, text):
    def values(some):
        try:
            return set(bound_dim(text, symbols, tuple(some)).attainable().tolist())
        except Unbounded:
            return set()

    assert values(guards) <= values(guards[:-1]) or parse(text).is_number


def test_a_capped_product_is_enumerated_exactly_and_fast():
    enumerate_points.cache_clear()
    evaluate(parse("s0*s1"), {"s0": 1, "s1": 1})  # imports
    begin = time.perf_counter()
    columns = enumerate_points(BATCH, CAP)
    assert time.perf_counter() - begin < 1
    assert len(columns["s0"]) == sum(8192 // s for s in range(1, 8193)) == 75_108
    assert bound_dim("s0*s1", BATCH, CAP).values == ((1, 8192, 1),)
    assert bound_dim("s0*(s1 + 1)", BATCH, CAP).upper == 16384


def test_a_cap_is_recognised_in_either_comparison():
    assert cap_of(parse("s0*s1 < 9")) == cap_of(parse("s0*s1 <= 8")) == ({"s0", "s1"}, 8)
    assert all(
        cap_of(parse(t)) is None
        for t in ("s0 <= 8", "2*s0*s1 <= 8", "s0*s1 >= 8", "s0 + s1 <= 8", "s0**2 <= 8")
    )


def test_moe_padding_takes_the_values_that_the_formula_does():
    dim = bound_dim("8*s0 + 127*Min(128, 8*s0)", TOKENS, ())
    tokens = np.arange(1, 8193)
    assert (
        dim.attainable().tolist()
        == np.unique(8 * tokens + 127 * np.minimum(8 * tokens, 128)).tolist()
    )
    assert (dim.lower, dim.upper) == (1024, 81792)
    assert bound_dim("128*((8*s0 + 127*128)//128)", TOKENS, ()).values == ((16256, 81792, 128),)


def test_num_splits_takes_its_21_values():
    found = image(
        KernelCall("f", "o", (), (), TOKENS), "Max(1, Min(132//Max(1, (s0 + 63)//64), 64))"
    )
    splits = [64, 44, 33, 26, 22, 18, 16, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert found.rows[:, 0].tolist()[::-1] == splits
    assert found.at(len(found) - 2) == {"s0": 129}


def test_a_modulus_guard_thins_the_set():
    assert bound_dim("s0", TOKENS, ("Mod(s0, 8) == 0",)).values == ((8, 8192, 8),)


def test_a_guard_over_a_further_symbol_pulls_it_in_if_it_is_small():
    symbols = (Symbol("s0", 1, 64), Symbol("s1", 1, 4))
    assert bound_dim("s0", symbols, ("s0 <= 2*s1",)).upper == 8
    wide = (Symbol("s0", 1, 8192), Symbol("s1", 1, 8192))
    assert bound_dim("s0", wide, ("s0 <= 2*s1 + 1",)).values == (
        (1, 8192, 1),
    )  # 67 million points: left out


def test_beyond_the_budget_only_bounds_are_known_and_the_dim_says_so():
    dim = bound_dim("s0 + s1", BATCH, ())
    assert not dim.is_exact
    assert (dim.lower, dim.upper) == (2, 16384)
    many = (Symbol("s0", 1, BUDGET + 1),)
    assert not bound_dim("8*s0", many, ()).is_exact
    assert bound_dim("8*s0", (Symbol("s0", 1, BUDGET),), ()).is_exact


def test_a_capped_product_beyond_the_budget_keeps_its_cap():
    million = (Symbol("s0", 1, 1 << 20), Symbol("s1", 1, 1 << 20))
    dim = bound_dim("128*s0*s1", million, (f"s0*s1 <= {1 << 20}",))
    assert (dim.lower, dim.upper, dim.is_exact) == (128, 1 << 27, False)


def test_a_size_that_nothing_bounds_is_an_error_that_says_what_to_do():
    with pytest.raises(Unbounded, match=r"torch\._check$"):
        bound_dim("u0 + 1", (Symbol("u0", 0),), ())
    assert bound_dim("Min(u0, 100)", (Symbol("u0", 0),), ()).upper == 100


def test_guards_that_contradict_each_other_are_an_error_not_an_empty_set():
    with pytest.raises(Unbounded, match="raise max_size"):
        bound_dim("s0", TOKENS, ("Mod(s0, 16384) == 0",))


def test_int64_never_wraps_around():
    six = tuple(Symbol(f"s{i}", 1 << 19, (1 << 19) + 1) for i in range(6))
    dim = bound_dim("Min(s0*s1*s2*s3*s4*s5, 100)", six, ())
    assert (dim.lower, dim.upper) == (100, 100)
    assert not dim.is_exact


def call_of(*texts, symbols=BATCH, guards=CAP, strides=(), **attrs):
    dims = tuple(bound_dim(t, symbols, guards) for t in texts)
    return KernelCall(
        "f",
        "o",
        (("x", TensorSpec("bfloat16", dims, strides)),),
        tuple(attrs.items()),
        symbols,
        guards,
    )


def test_rows_are_sorted_unique_and_led_to_by_the_smallest_sizes():
    found = image(call_of("s0*s1", "7168"), "s0*s1", "Mod(s1, 2)")
    assert found.rows[:3].tolist() == [[1, 1], [2, 0], [2, 1]]
    assert (found.at(1), found.at(2)) == ({"s0": 1, "s1": 2}, {"s0": 2, "s1": 1})


def test_an_image_needs_the_record_alone():
    call = call_of("s0*s1", "7168")
    shapes = ShapeSet.from_json(ShapeSet((call,), (Site(),)).to_json())
    back = shapes.calls[0]
    assert np.array_equal(image(back, back["x"].dims[0]).rows, image(call, "s0*s1").rows)


def test_an_image_of_a_static_call_has_one_row():
    static = call_of("64", symbols=(), guards=())
    assert image(static, static["x"].dims[0]).rows.tolist() == [[64]]
    assert image(static).at(0) == {}
    assert bound.at(static, {}) == static


def test_a_call_that_cannot_be_enumerated_gives_every_integer_between_its_bounds():
    call = KernelCall("f", "o", (), (), BATCH)
    found = image(call, "s0 + s1")
    assert not found.exact
    assert (found.rows[0, 0], found.rows[-1, 0], len(found)) == (2, 16384, 16383)
    assert found.at(0) == {"s0": 1, "s1": 1}
    assert sum(found.at(10_000).values()) == 10_002
    with pytest.raises(ValueError, match="together"):
        image(call, "s0 + s1", "s0*s1")
    with pytest.raises(ValueError, match="too many to list"):
        image(call, "s0*s1")
    wide = KernelCall("f", "o", (), (), (Symbol("s0", 1, 1 << 22),))
    assert image(wide, "s0").at(65) == {"s0": 66}


def test_a_row_that_no_sizes_lead_to_has_none():
    found = image(KernelCall("f", "o", (), (), (Symbol("s0", 1, 1 << 21),)), "7*s0")
    assert found.at(0) == {"s0": 1}
    with pytest.raises(ValueError, match="no sizes"):
        found.at(1)


def test_an_unknown_symbol_is_named():
    with pytest.raises(ValueError, match="s7"):
        image(call_of("s0*s1"), "s7 + 1")


def test_a_call_at_given_sizes_is_static():
    splits = bound_dim("Max(1, 132//s0)", BATCH, CAP)
    call = call_of(
        "s0*s1", "4", strides=("8", "1"), num_splits=splits, recipe=(1, splits), mode="x"
    )
    static = bound.at(call, {"s0": 5, "s1": 13})
    assert str(static) == "f.o(x=bfloat16[65, 4], num_splits=26, recipe=(1, 26), mode=x)"
    assert static["x"].strides == ("8", "1")
    assert (static.symbols, static.guards) == ((), ())
    assert (
        bound.at(call, {"s0": 1, "s1": 1})["x"].strides == ()
    )  # one row is contiguous, whatever its stride
    with pytest.raises(ValueError, match="s1"):
        bound.at(call, {"s0": 5})


def test_contiguity_is_decided_on_the_safe_side():
    s0, u0 = parse("s0"), parse("u0")
    assert is_contiguous((s0, 8), (8, 1))
    assert is_contiguous((s0, u0, 8), (8 * parse("Max(1, u0)"), 8, 1))
    assert is_contiguous((1, 8), (999, 1))
    assert is_contiguous((0, 8), (3, 3))
    assert is_contiguous((), ())
    assert not is_contiguous((s0, 8), (16, 1))
    assert not is_contiguous((8, s0), (1, 8))
    assert not is_contiguous((s0, 1), (2, 1))
    assert not is_contiguous((8, s0), (u0, 1))


def test_static_dims_are_equal_however_they_are_made():
    assert bound_dim("64", (), ()) == Dim.static(64)
    assert msgspec.json.encode(bound_dim("64", (), ())) == msgspec.json.encode(Dim.static(64))
