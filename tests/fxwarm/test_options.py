from __future__ import annotations

import pytest

from fxwarm import exc
from fxwarm.options import Options, resolve, split


def test_option_beats_environment_beats_default():
    assert resolve({}, {}).max_size == 8192
    assert resolve({}, {"FXWARM_MAX_SIZE": "4096"}).max_size == 4096
    assert resolve({"fxwarm.max_size": 128}, {"FXWARM_MAX_SIZE": "4096"}).max_size == 128


@pytest.mark.parametrize("value", [0, -1, "many", True, 2.5, None])
def test_an_impossible_max_size_is_one_clear_error(value):
    with pytest.raises(exc.OptionError, match=r"fxwarm\.max_size is .*; give a"):
        resolve({"fxwarm.max_size": value}, {})


def test_an_unknown_option_gets_the_nearest_name():
    with pytest.raises(
        exc.OptionError,
        match=r"unknown option 'fxwarm\.max_sise'; did you mean 'fxwarm\.max_size'\?",
    ):
        resolve({"fxwarm.max_sise": 1}, {})


def test_a_choice_lists_what_is_possible():
    with pytest.raises(exc.OptionError, match="give 'exact' or 'full' or 'off'"):
        resolve({"fxwarm.coverage": "most"}, {})


def test_environment_text_becomes_the_right_type():
    options = resolve(
        {}, {"FXWARM_STRICT": "1", "FXWARM_JIT_OPS": "a::b, c", "FXWARM_BUILD_TIMEOUT": "2"}
    )
    assert options == Options(strict=True, jit_ops=("a::b", "c"), build_timeout=2.0)


def test_inductor_options_are_left_to_inductor():
    ours, theirs = split({"fxwarm.max_size": 1, "max_autotune": True})
    assert ours == {"fxwarm.max_size": 1} and theirs == {"max_autotune": True}
