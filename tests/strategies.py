"""Hypothesis strategies that several tests share."""

from __future__ import annotations

from hypothesis import strategies as st

from passes.records import (
    Dim,
    Gap,
    KernelCall,
    ShapeSet,
    Site,
    Specialization,
    Symbol,
    TensorSpec,
    UnknownOp,
)

names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
sizes = st.integers(1, 1 << 20)


def expressions(
    symbols: tuple[str, ...] = ("s0", "s1"), largest: int = 64
) -> st.SearchStrategy[str]:
    """Texts over ``symbols`` whose value is defined at every size of at least 1."""
    numbers = st.integers(1, largest).map(str)
    leaves = st.sampled_from(symbols) | numbers

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        pair = st.tuples(inner, inner)
        return st.one_of(
            pair.map(lambda p: f"({p[0]}) + ({p[1]})"),
            pair.map(lambda p: f"({p[0]})*({p[1]})"),
            pair.map(lambda p: f"Max({p[0]}, {p[1]})"),
            pair.map(lambda p: f"Min({p[0]}, {p[1]})"),
            st.tuples(inner, numbers).map(lambda p: f"({p[0]})//{p[1]}"),
            st.tuples(inner, numbers).map(lambda p: f"Mod({p[0]}, {p[1]})"),
            st.tuples(inner, numbers).map(lambda p: f"ceiling(({p[0]})/{p[1]})"),
            st.tuples(inner, numbers)
            .map(lambda p: f"({p[0]}) - {p[1]}")
            .map(lambda t: f"Max(0, {t})"),
            st.tuples(numbers, inner).map(lambda p: f"{p[0]}//Max(1, {p[1]})"),
            st.tuples(inner, numbers).map(lambda p: f"{p[1]}*((({p[0]}) + {p[1]} - 1)//{p[1]})"),
        )

    return st.recursive(leaves, grow, max_leaves=6)


def conditions(symbols: tuple[str, ...] = ("s0", "s1")) -> st.SearchStrategy[str]:
    """Guards such as torch writes."""
    one = st.sampled_from(symbols)
    number = st.integers(1, 40).map(str)
    return st.one_of(
        st.tuples(one, number).map(lambda p: f"Mod({p[0]}, {p[1]}) == 0"),
        st.tuples(one, number).map(lambda p: f"{p[0]} >= {p[1]}"),
        st.tuples(one, number).map(lambda p: f"{p[0]} != {p[1]}"),
        st.tuples(one, one, number).map(lambda p: f"{p[0]}*{p[1]} <= {p[2]}"),
        st.tuples(one, one).map(lambda p: f"{p[0]} <= 2*{p[1]}"),
        st.tuples(one, number, number).map(
            lambda p: f"Or({p[0]} < {p[1]}, Mod({p[0]}, {p[2]}) == 0)"
        ),
    )


@st.composite
def dims(draw: st.DrawFn) -> Dim:
    if draw(st.booleans()):
        return Dim.static(draw(sizes))
    lower = draw(sizes)
    upper = lower + draw(st.integers(1, 100))
    values = draw(st.none() | st.just(((lower, upper, 1),)))
    return Dim(f"{draw(st.integers(2, 9))}*s0", lower, upper, values)


tensors = st.builds(
    TensorSpec,
    st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    st.lists(dims(), max_size=4).map(tuple),
)
scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.floats(0.5, 2)
calls = st.builds(
    KernelCall,
    names,
    names,
    st.lists(st.tuples(names, tensors), max_size=3, unique_by=lambda p: p[0]).map(tuple),
    st.lists(st.tuples(names, scalars | dims()), max_size=2, unique_by=lambda p: p[0]).map(tuple),
    st.just((Symbol("s0", 1, 8192),)),
    st.sampled_from([(), ("Mod(s0, 8) == 0",)]),
)
gaps = st.builds(Gap, names, names, names, names)
unknown = st.builds(UnknownOp, names, st.integers(1, 9), names)


@st.composite
def shape_sets(draw: st.DrawFn) -> ShapeSet:
    some = tuple(dict.fromkeys(draw(st.lists(calls, max_size=3))))
    sites = tuple(Site(draw(st.integers(1, 9)), draw(names)) for _ in some)
    return ShapeSet(
        some,
        sites,
        tuple(draw(st.lists(gaps, max_size=2, unique=True))),
        tuple(draw(st.lists(unknown, max_size=2, unique_by=lambda u: u.op))),
        tuple(
            draw(st.lists(st.builds(Specialization, names, sizes, names), max_size=2, unique=True))
        ),
    )
