from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings

from passes.records import Dim, KernelCall, ShapeSet, Site, TensorSpec, unite
from tests.strategies import shape_sets


@given(shape_sets())
@settings(max_examples=50, deadline=None)
def test_json_reads_back_to_an_equal_set(shapes):
    back = ShapeSet.from_json(shapes.to_json())
    assert back == shapes
    assert hash(back) == hash(shapes)
    assert back.to_json() == shapes.to_json()


@given(shape_sets(), shape_sets())
@settings(max_examples=50, deadline=None)
def test_a_union_loses_no_call_and_a_difference_keeps_no_common_one(one, other):
    both = one | other
    assert {(c.family, c.op) for c in both.calls} == {
        (c.family, c.op) for c in (*one.calls, *other.calls)
    }
    assert len(both) <= len({*one.calls, *other.calls})
    assert sum(s.count for s in both.sites) == sum(s.count for s in (*one.sites, *other.sites))
    assert not set((both - one).calls) & set(one.calls)
    assert set(both.gaps) == {*one.gaps, *other.gaps}


@given(shape_sets())
@settings(max_examples=20, deadline=None)
def test_a_set_united_with_itself_only_counts_twice(shapes):
    once, twice = unite([shapes]), unite([shapes, shapes])
    assert twice.calls == once.calls
    assert [s.count for s in twice.sites] == [2 * s.count for s in once.sites]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"kind": "fxwarm.Plan", "schema": 1}',
        '{"kind": "fxwarm.ShapeSet", "schema": 99}',
    ],
)
def test_a_foreign_or_damaged_file_is_refused_with_a_reason(text):
    with pytest.raises(ValueError, match=r"make|give"):
        ShapeSet.from_json(text)


def test_an_unknown_field_is_refused():
    text = json.loads(ShapeSet().to_json()) | {"extra": 1}
    with pytest.raises(ValueError, match="extra"):
        ShapeSet.from_json(json.dumps(text))


def test_a_set_needs_a_site_for_each_call():
    call = KernelCall("f", "o", (("x", TensorSpec("float32", (Dim.static(1),))),))
    with pytest.raises(ValueError, match="one site a call"):
        ShapeSet((call,), ())
    assert len(ShapeSet((call,), (Site(),))) == 1


def test_a_dynamic_dim_is_no_number():
    assert int(Dim.static(7)) == 7
    with pytest.raises(ValueError, match=r"8\*s0 is not static"):
        int(Dim("8*s0", 8, 64))


def test_records_import_neither_torch_nor_sympy_nor_numpy():
    code = (
        "import sys, passes.records, passes.bound, passes.expr, passes.collect;"
        "print([m for m in ('torch', 'sympy', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
