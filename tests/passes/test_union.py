"""Several graphs, one set: what unites, what widens, what a difference shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxwarm
import fxwarm.ops
from passes.bound import bound_dim
from passes.records import Dim, KernelCall, ShapeSet, Site, Symbol, TensorSpec, unite
from passes.runs import to_array

TEXTS = ["s0", "8*s0", "128*((s0 + 254)//16)", "2*s0 + 127*Min(128, 2*s0)"]


def make(
    text: str, symbols: tuple[Symbol, ...], guards=(), exact: bool = True, name="f"
) -> KernelCall:
    """A call whose one dynamic dim is ``text``, and whose argument n follows from it."""
    dim = bound_dim(text, symbols, guards)
    splits = bound_dim(f"({text} + 63)//64", symbols, guards)
    if not exact:
        dim = Dim(dim.expr, dim.lower, dim.upper)
    spec = TensorSpec("bfloat16", (dim, Dim.static(64)))
    return KernelCall(
        name, "op", (("a", spec),), (("n", splits), ("b", (1, splits))), symbols, guards
    )


@st.composite
def ranges(draw, name="s0"):
    lower = draw(st.integers(1, 9))  # few, so that they touch, and their dims are computed once
    return Symbol(name, lower, lower + draw(st.integers(0, 4)))


@st.composite
def calls(draw):
    symbols = (draw(ranges()),)
    text = draw(st.sampled_from(TEXTS))
    if draw(st.integers(0, 3)) == 0:
        symbols += (draw(ranges("s1")),)
        text = "s0*s1"
    return make(text, symbols, exact=draw(st.booleans() | st.just(True)))


@st.composite
def sets(draw):
    some = tuple(dict.fromkeys(draw(st.lists(calls(), max_size=5))))
    return ShapeSet(some, tuple(Site(draw(st.integers(1, 3)), "p") for _ in some))


def content(shapes: ShapeSet) -> set[KernelCall]:
    return set(shapes.calls)


def form(call: KernelCall) -> str:
    return call["a"].dims[0].expr


def values(calls_, true: bool) -> dict[str, set[int]]:
    """Every value of the dim by its expression: as recorded, or those that its range really leads to."""
    out: dict[str, set[int]] = {}
    for call in calls_:
        dim = call["a"].dims[0]
        known = bound_dim(dim.expr, call.symbols, call.guards) if true else dim
        out.setdefault(dim.expr, set()).update(known.attainable().tolist())
    return out


@given(sets(), sets())
@settings(max_examples=50, deadline=None)
def test_a_union_does_not_depend_on_the_order(one, other):
    assert content(one | other) == content(other | one)
    assert sum(s.count for s in (one | other).sites) == sum(
        s.count for s in (*one.sites, *other.sites)
    )


@given(sets(), sets(), sets())
@settings(max_examples=50, deadline=None)
def test_a_union_does_not_depend_on_the_grouping(one, other, third):
    assert (
        content((one | other) | third)
        == content(one | (other | third))
        == content(unite([one, other, third]))
    )


@given(sets())
@settings(max_examples=40, deadline=None)
def test_a_union_with_itself_is_the_same_set(shapes):
    once = unite([shapes])
    assert content(once | once) == content(once)
    assert content(once | shapes) == content(once)


@given(sets(), sets())
@settings(max_examples=50, deadline=None)
def test_a_union_covers_what_its_parts_cover_and_no_more(one, other):
    both = one | other
    parts = (*one.calls, *other.calls)
    needed, found = values(parts, true=True), values(both.calls, true=False)
    assert all(needed[text] <= found[text] for text in needed)
    if all(c["a"].dims[0].is_exact for c in parts):
        assert needed == found


@given(sets(), sets())
@settings(max_examples=50, deadline=None)
def test_each_united_call_is_what_its_range_says(one, other):
    for call in (one | other).calls:
        dim = call["a"].dims[0]
        again = bound_dim(dim.expr, call.symbols, call.guards)
        assert (dim.lower, dim.upper) == (again.lower, again.upper)
        splits = dict(call.attrs)["n"]
        assert set(to_array(splits.values)) == set(
            bound_dim(splits.expr, call.symbols, ()).attainable().tolist()
        )
        assert call.attr("b") == (1, splits)


def test_compile_ranges_become_one_and_a_hole_keeps_two_apart():
    low, high, far = (make("s0", (Symbol("s0", *r),)) for r in ((1, 32), (33, 64), (100, 200)))
    both = ShapeSet((low,), (Site(2, "a"),)) | ShapeSet((high,), (Site(3, "b"),))
    (call,) = both.calls
    assert call.symbols == (Symbol("s0", 1, 64),)
    assert (call["a"].dims[0].values, both.sites) == (((1, 64, 1),), (Site(5, "a"),))
    three = both | ShapeSet((far,), (Site(),))
    assert [c.symbols[0].upper for c in three.calls] == [64, 200]
    (one,) = (three | ShapeSet((make("s0", (Symbol("s0", 60, 120),)),), (Site(),))).calls
    assert one.symbols == (Symbol("s0", 1, 200),)


def test_bounds_only_stay_bounds_only_and_no_bound_stays_none():
    exact, vague = (
        make("8*s0", (Symbol("s0", 1, 32),)),
        make("8*s0", (Symbol("s0", 9, 64),), exact=False),
    )
    (call,) = unite([ShapeSet((c,), (Site(),)) for c in (exact, vague)]).calls
    assert call["a"].dims[0] == Dim("8*s0", 8, 512)
    free = KernelCall("f", "op", (), (), (Symbol("s0", 1),))
    bound = KernelCall("f", "op", (), (), (Symbol("s0", 1, 8),))
    assert unite([ShapeSet((c,), (Site(),)) for c in (bound, free)]).calls == (free,)


@pytest.mark.parametrize("change", ["guards", "name", "dtype"])
def test_calls_that_differ_in_more_than_a_range_stay_two(change):
    one = make("s0", (Symbol("s0", 1, 32),))
    other = make(
        "s0", (Symbol("s0", 33, 64),), guards=("Mod(s0, 8) == 0",) if change == "guards" else ()
    )
    if change == "name":
        other = make("s0", other.symbols, name="g")
    if change == "dtype":
        spec = TensorSpec("float16", other["a"].dims)
        other = KernelCall("f", "op", (("a", spec),), other.attrs, other.symbols)
    assert len(unite([ShapeSet((c,), (Site(),)) for c in (one, other)])) == 2


def test_batch_and_sequence_go_into_a_greater_range_but_never_into_a_box_around_both():
    def box(b, s):
        return make("s0*s1", (Symbol("s0", *b), Symbol("s1", *s)))

    small, great, long = box((1, 4), (1, 8)), box((1, 8), (1, 8)), box((1, 2), (1, 64))
    found = unite([ShapeSet((c,), (Site(),)) for c in (small, long, great)])
    assert content(found) == {great, long}
    assert sorted(s.count for s in found.sites) == [1, 2]


class Linear(torch.nn.Module):
    def __init__(self, n: int = 256, factor: int = 1):
        super().__init__()
        self.w = torch.nn.Parameter(torch.empty(n, 128, dtype=torch.float8_e4m3fn), False)
        self.sf = torch.nn.Parameter(torch.empty(n // 128, 1), False)
        self.factor = factor

    def forward(self, x):
        x = x.repeat_interleave(self.factor, 0) if self.factor > 1 else x + 0
        a, a_sf = fxwarm.ops.per_token_cast_to_fp8(x)
        d = x.new_empty(x.shape[0], self.w.shape[0], dtype=torch.bfloat16)
        torch.ops.fxwarm.fp8_gemm_nt(a, a_sf, self.w, self.sf, d)
        return d


def meta(kind, *args):
    with torch.device("meta"):
        return kind(*args), torch.empty(6, 128)


def test_target_and_draft_are_one_set_without_doubles():
    draft, x = meta(Linear, 256, 1)
    target, _ = meta(Linear, 256, 5)  # verifies 4 drafted tokens and one of its own: M = batch * 5
    other, _ = meta(Linear, 512, 1)
    shapes = [fxwarm.trace(m, x, max_size=64) for m in (draft, target, other)]
    united = unite(shapes)
    assert {str(c["a"].dims[0]) for c in united.calls} == {"s0", "5*s0"}
    assert len(united) == 3
    again = united | shapes[0] | shapes[1]
    assert content(again) == content(united)
    assert content(united - shapes[1]) == content(shapes[0] | shapes[2])


def test_pipeline_stages_share_their_kernels():
    stages = [fxwarm.trace(*meta(Linear), max_size=64) for _ in range(3)]
    united = unite(stages)
    assert len(united) == 1
    assert united.sites[0].count == 3


class Adapted(Linear):
    """A layer with a LoRA adapter of some rank beside its base weight."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        n, k = self.w.shape
        self.down = torch.nn.Parameter(torch.empty(rank, k, dtype=torch.bfloat16), False)
        self.up = torch.nn.Parameter(torch.empty(n, rank, dtype=torch.bfloat16), False)

    def forward(self, x):
        inner, out = (
            x.new_empty(x.shape[0], w.shape[0], dtype=torch.bfloat16) for w in (self.down, self.up)
        )
        torch.ops.fxwarm.bf16_gemm_nt(x.bfloat16(), self.down, inner)
        torch.ops.fxwarm.bf16_gemm_nt(inner, self.up, out)
        return super().forward(x) + out


def test_lora_variants_share_the_base_and_add_a_pair_a_rank():
    variants = [fxwarm.trace(*meta(Adapted, rank), max_size=64) for rank in (16, 64, 16)]
    united = unite([fxwarm.trace(*meta(Linear), max_size=64), *variants])
    weights = {(c.op, *map(int, c["b"].dims)) for c in united.calls}
    n, k = Linear().w.shape
    adapters = {("bf16_gemm_nt", *dims) for r in (16, 64) for dims in ((r, k), (n, r))}
    assert weights == {("fp8_gemm_nt", n, k), *adapters}
    assert len(united) == 5
    assert {s.count for c, s in united.items() if c.op == "fp8_gemm_nt"} == {4}
    (*added,) = (united - variants[0]).calls  # what the variant of rank 64 brings
    assert {(c.op, *map(int, c["b"].dims)) for c in added} == {
        ("bf16_gemm_nt", 64, k),
        ("bf16_gemm_nt", n, 64),
    }


@pytest.mark.parametrize("marking", ["default dynamic", "unbacked"])
def test_compile_ranges_of_one_model_unite(marking):
    """Case A34: each compile range, and batch one, get a graph of their own."""
    sets_ = []
    for low, high in ((1, 32), (33, 64)):
        model, _ = meta(Linear)
        x = torch.empty(max(low, 5), 128, device="meta")
        if marking == "unbacked":
            torch._dynamo.decorators.mark_unbacked(x, 0, min=low, max=high)
        else:
            torch._dynamo.mark_dynamic(x, 0, min=low, max=high)
        sets_.append(fxwarm.trace(model, x, max_size=8192))
    united = unite(sets_)
    (call,) = united.calls
    assert np.array_equal(call["a"].dims[0].attainable(), np.arange(1, 65))
    assert not united.gaps


def test_a_difference_shows_what_a_release_changed():
    old = fxwarm.trace(*meta(Linear), max_size=64) | fxwarm.trace(*meta(Linear, 512), max_size=64)
    new = fxwarm.trace(*meta(Linear), max_size=128) | fxwarm.trace(*meta(Linear, 512), max_size=64)
    (added,) = (new - old).calls
    assert added.symbols[0].upper == 128
    (gone,) = (old - new).calls
    assert gone.symbols[0].upper == 64
    assert not (new - new)
