"""Builds of several families: side by side, those that only model beside the asking, each error told."""

from __future__ import annotations

import threading
import time

import pytest

from fxwarm import exc, family, options, planner, warmup
from fxwarm.beside import Beside
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


class Failing(One):
    """One whose build fails at once."""

    def build(self, planned, target, jobs):
        raise exc.LibraryError("its compiler is gone")


class Slow(One):
    """One whose build is done when the gate opens."""

    def build(self, planned, target, jobs):
        self._gate.wait(10)
        yield from (Built(p.key, 0.1) for p in planned)


def test_a_family_that_fails_does_not_leave_the_builds_of_others_behind(registered):
    opened = threading.Event()
    registered(Failing("failing", opened), Slow("slow", opened))
    keys = [Planned(CompileKey(name, "k")) for name in ("failing", "slow")]
    threading.Timer(0.2, opened.set).start()
    report = warmup.run(WarmPlan(CPU, planned=tuple(keys)))
    assert [b.key.family for b in report.built] == ["slow"]
    assert "its compiler is gone" in str(report.gaps)
    assert not [t for t in threading.enumerate() if t.name == "fxwarm-beside"]


def make_warmup(name, **given):
    given = options.resolve(given)
    one = warmup.Warmup(
        ShapeSet(), given, target=CPU, device=warmup.current_device("cpu"),
        plan=WarmPlan(CPU, planned=(Planned(CompileKey(name, "k")),)),
    )  # fmt: skip
    one.start()
    return one


def test_who_waits_for_the_slots_of_another_graph_is_not_given_up_while_that_builds(registered):
    opened, held = threading.Event(), threading.Event()
    registered(Slow("waiting", opened), Slow("building", held))
    one = make_warmup("waiting", build_timeout=0.1)
    other = make_warmup("building", build_timeout=300)
    while not (one._builds.pending and other._builds.pending):
        time.sleep(0.01)
    one._builds.moved -= 10
    one._builds.give_up_if_stuck()
    assert not one._builds.gave_up
    other._builds.moved -= 10
    one._builds.give_up_if_stuck()
    assert one._builds.gave_up
    opened.set()
    held.set()
    other.wait()


def test_what_an_error_cut_off_is_not_waited_for(registered):
    registered(Failing("failing", threading.Event()))
    one = make_warmup("failing")
    one.wait()
    assert not one._builds.pending


def test_what_a_thread_raises_is_raised_where_it_is_joined():
    def fail() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        Beside(fail).join()
