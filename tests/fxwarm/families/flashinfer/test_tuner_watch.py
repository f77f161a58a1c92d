"""A call that finds no tuned entry is silent and uncounted; the monitor hears of it, and a hit costs nothing."""

from __future__ import annotations

import pytest

import fxwarm
from fxwarm.exc import JitError
from fxwarm.families.flashinfer.watch import _Log


@pytest.fixture
def choose(library):
    """The library's own tuner, with a runner of two tactics; tuned for up to 64 rows of width 8."""
    import torch
    from flashinfer import autotuner
    from flashinfer.autotuner import (
        AutoTuner,
        DynamicTensorSpec,
        TunableRunner,
        TuningConfig,
        autotune,
    )

    class Runner(TunableRunner):
        def get_valid_tactics(self, inputs, profile):
            return [0, 1]

        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            return inputs[0]

    buckets = tuple(2**i for i in range(7))
    spec = DynamicTensorSpec((0,), (0,), buckets, lambda n: min(64, 1 << (n - 1).bit_length()))
    config = TuningConfig(dynamic_tensor_specs=(spec,))
    runner = Runner()

    def call(rows: int, width: int = 8):
        return AutoTuner.get().choose_one("toy_op", [runner], config, [torch.zeros(rows, width)])

    with autotune(True):
        call(64)
    assert not isinstance(autotuner.autotuner.logger, _Log)
    call.tune = autotune
    return call


def test_a_call_without_a_tuned_entry_is_a_fallback_with_its_shape(choose):
    with fxwarm.no_jit("count") as seen:
        for rows in (1, 17, 64):
            assert choose(rows)[1] != -1
        assert not seen
        assert choose(8, 16)[1] == -1
        choose(8, 16)
    assert [(e.library, e.kind, e.op, e.shape) for e in seen] == [
        ("flashinfer", "fallback", "toy_op", "(8, 16)")
    ]
    with pytest.raises(JitError, match="flashinfer fallback: toy_op"), fxwarm.no_jit("raise", calls=False):  # fmt: skip
        choose(8, 32)
    assert choose(8)[1] != -1, "and its lock is free again"


def test_a_measurement_after_warmup_is_told_once_an_op(choose):
    with fxwarm.no_jit("count") as seen, choose.tune(True):
        choose(64, 24)
    assert seen.counts == {("flashinfer", "tune"): 1}
    assert seen[0].op == "toy_op"
