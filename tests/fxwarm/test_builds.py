"""Builds of several families: side by side, those that only model beside the asking, each error told."""

from __future__ import annotations

import threading

import pytest

from fxwarm import family, options, planner, warmup
from fxwarm.builds import Beside
from fxwarm.records import Built, CompileKey, Library, Loaded, Planned, Target, WarmPlan
from passes.records import KernelCall, ShapeSet, Site

CPU = Target.named("cpu")


class One:
    """A family of one kernel, whose build waits until the other family builds, too."""

    devices = ("cpu",)

    def __init__(self, name: str, gate: threading.Barrier) -> None:
        self.name, self.distributions, self._gate = name, (name,), gate

    def match(self, op):
        return ()

    def library(self, wanted):
        return Library(self.name, "1.0", installed=True)

    def keys(self, calls, target, library):
        yield Planned(CompileKey(self.name, "k"))

    def missing(self, planned, target):
        return list(planned)

    def build(self, planned, target, jobs):
        for p in planned:
            self._gate.wait(10)
            yield Built(p.key, 0.1)

    def load(self, planned, target, bind):
        return [Loaded(p.key) for p in planned]


class Asked(One):
    """One that asks its library: what it names is built meanwhile."""

    def record(self, calls, target, library):
        yield Planned(CompileKey(self.name, "k"))
        self._gate.wait(10)  # the model of the other family builds while this one still asks


@pytest.fixture
def registered(fresh):
    names = []

    def register(*families):
        for one in families:
            family.register(one)
            names.append(one.name)

    yield register
    for name in names:
        family.unregister(name)
    warmup._resident.clear()


def test_families_build_side_by_side(registered):
    gate = threading.Barrier(2)
    registered(One("left", gate), One("right", gate))
    keys = [Planned(CompileKey(name, "k")) for name in ("left", "right")]
    report = warmup.run(WarmPlan(CPU, planned=tuple(keys)))
    assert {b.key for b in report.built if not b.error} == {p.key for p in keys}


def test_what_is_modelled_builds_while_another_library_is_asked(registered):
    gate = threading.Barrier(3)  # the one that asks, its own build, and the build of the other
    registered(Asked("asked", gate), One("modelled", gate))
    calls = tuple(KernelCall(name, "op", ()) for name in ("asked", "modelled"))
    shapes = ShapeSet(calls=calls, sites=(Site(1, ""),) * 2)
    one = warmup.Warmup(
        shapes, options.resolve({}), target=CPU, device=warmup.current_device("cpu")
    )
    report = one.finish()
    assert {b.key.family for b in report.built if not b.error} == {"asked", "modelled"}, report.gaps
    chosen = [f.name for f, _, _ in planner.choose(shapes, CPU)]
    assert chosen == ["modelled", "asked"]


def test_what_a_thread_raises_is_raised_where_it_is_joined():
    def fail() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        Beside(fail).join()
