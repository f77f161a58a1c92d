from __future__ import annotations

import re

import pytest

from fxwarm import exc, family
from tests.toy_family import Toy


@pytest.fixture(autouse=True)
def clean():
    yield
    family.unregister("toy")


def test_a_registered_family_is_found_by_name():
    family.register(Toy)
    assert family.get_family("toy").name == "toy"


def test_registering_the_same_family_twice_is_harmless():
    family.register(Toy)
    family.register(Toy())


def test_an_object_that_is_no_family_is_told_what_it_lacks():
    with pytest.raises(
        exc.FamilyError, match="it lacks distributions, match, library, keys, missing, load"
    ):
        family.register(type("Half", (), {"name": "half"}))


def test_two_families_of_one_name_are_refused_and_both_named():
    family.register(Toy)
    with pytest.raises(exc.FamilyError, match="two families are named 'toy'"):
        family.register(type("Other", (Toy,), {}))


def test_an_unknown_family_gets_the_nearest_name():
    with pytest.raises(
        exc.UnknownFamilyError, match=r"unknown family 'deepgemm'; did you mean 'deep_gemm'\?"
    ):
        family.get_family("deepgemm")


def test_every_power_of_a_built_in_family_is_listed():
    listed = set(re.findall(r"``(\w+)[(:]", family.KernelFamily.__doc__ or ""))
    for one in family.load_families().values():
        names = {name for name in dir(type(one)) if not name.startswith("_")}
        assert names <= listed | set(family._REQUIRED), one.name
