"""The laws hold a good family and catch each kind of bad one."""

from __future__ import annotations

import msgspec
import pytest

import fxwarm
from fxwarm import family
from fxwarm.records import CompileKey, Planned, Target
from fxwarm.testing import check_family, restrict
from tests import toy_family
from tests.toy_family import Toy

CPU = Target.named("cpu")


@pytest.fixture
def calls(fresh):
    import torch

    family.register(Toy)
    toy_family._loaded.clear()
    with torch.device("meta"):
        shapes = fxwarm.trace(
            lambda x, w: torch.ops.toy.scale(x * 2, w),
            torch.empty(4, 8),
            torch.empty(8),
            max_size=200,
        )
    yield shapes.calls
    family.unregister("toy")


def test_a_good_family_passes_and_is_warm_afterwards(calls):
    keys = check_family(Toy, calls, CPU, load=True)
    assert {k.template[1] for k in keys} == set(toy_family.CLASSES)


def test_a_family_that_forgets_a_size_breaks_coverage(calls):
    class Forgets(Toy):
        def keys(self, calls, target, library):
            for p in super().keys(calls, target, library):
                if p.key.template[1] != "one" or not calls[0].symbols:
                    yield p

    with pytest.raises(AssertionError, match=r"coverage: .*scale<8, one>"):
        check_family(Forgets, calls, CPU, samples=400)


def test_a_family_whose_keys_depend_on_the_range_breaks_monotone(calls):
    class Ranged(Toy):
        def keys(self, calls, target, library):
            for p in super().keys(calls, target, library):
                upper = calls[0]["x"].dims[0].upper
                name = "wide" if upper == 200 else "narrow"
                yield Planned(
                    msgspec.structs.replace(p.key, tag=name if calls[0].symbols else "wide"),
                    p.witness,
                )

    with pytest.raises(AssertionError, match="monotone"):
        check_family(Ranged, calls, CPU)


def test_a_key_twice_and_a_witness_that_leads_elsewhere_break_economy(calls):
    class Twice(Toy):
        def keys(self, calls, target, library):
            found = list(super().keys(calls, target, library))
            return [*found, *found]

    class Astray(Toy):
        def keys(self, calls, target, library):
            for p in super().keys(calls, target, library):
                yield Planned(CompileKey("toy", "other"), p.witness) if calls[0].symbols else p

    with pytest.raises(AssertionError, match="economy: a key is planned twice"):
        check_family(Twice, calls, CPU)
    with pytest.raises(AssertionError, match="economy: "):
        check_family(Astray, calls, CPU)


def test_a_narrower_range_is_the_same_call_with_fewer_values(calls):
    narrow = restrict(calls[0], 20)
    assert narrow["x"].dims[0].values == ((1, 20, 1),)
    assert narrow["w"] == calls[0]["w"]
