from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes import runs


@given(st.sets(st.integers(-1000, 1000), max_size=60))
def test_runs_hold_exactly_the_set(values):
    stored = runs.from_array(np.array(sorted(values), np.int64))
    naive = [v for first, last, step in stored for v in range(first, last + 1, step)]
    assert naive == sorted(values)
    assert runs.to_array(stored).tolist() == sorted(values)
    assert runs.size(stored) == len(values)


@given(st.integers(1, 50), st.integers(1, 9), st.integers(2, 500))
def test_an_arithmetic_progression_is_one_run(first, step, count):
    assert len(runs.from_array(np.arange(first, first + step * count, step))) == 1


@pytest.mark.parametrize("bad", [((1, 5, 0),), ((5, 1, 1),), ((1, 1 << 40, 1),), ((1, 5, -1),)])
def test_a_crafted_file_cannot_ask_for_memory(bad):
    with pytest.raises(ValueError, match="not ascending or hold more"):
        runs.to_array(bad)
