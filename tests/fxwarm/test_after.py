"""Kernels that Dynamo's graph does not show: of a backward, and of ops that AOTAutograd takes apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import fxwarm
from fxwarm.backend import fxwarm as backend
from tests import load_models, toy_family
from tests.cold import forget

_library = torch.library.Library("toy", "FRAGMENT")
_library.define("halves(Tensor x, Tensor w) -> Tensor")


def _halves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.ops.toy.scale(half.contiguous(), w) for half in x.chunk(2, 1)], 1)


_library.impl("halves", _halves, "CompositeImplicitAutograd")


pytestmark = pytest.mark.usefixtures("toy")


def end_process() -> None:
    """What a new process does not have."""
    torch._dynamo.reset()
    forget()


def jit() -> list[tuple[str, str]]:
    done = list(toy_family.events)
    toy_family.events.clear()
    return done


def step(compiled, rows: int) -> torch.Tensor:
    x = torch.ones(rows, 8, requires_grad=True)
    compiled(x).pow(2).sum().backward()
    return x.grad


def widths() -> set[str]:
    return {key.template[0] for plan in fxwarm.plans() for key in plan.keys}


def forget_what_was_seen() -> None:
    kept = list(Path(os.environ["FXWARM_CACHE_DIR"]).glob("*/after.json"))
    assert kept
    for path in kept:
        path.unlink()


def gaps() -> list[str]:
    return [str(gap) for report in fxwarm.reports() for gap in report.gaps]


def test_a_kernel_of_the_backward_alone_is_warm_before_the_first_step():
    model = load_models.TrainedModel()
    compiled = torch.compile(model, backend=backend)
    compiled(torch.ones(5, 8, requires_grad=True))
    assert widths() == {"8", "16"} and gaps() == []
    jit()
    for rows in (5, 16, 33):
        torch.testing.assert_close(step(compiled, rows), step(model, rows))
    assert jit() == []


def test_on_a_hit_of_torchs_cache_it_is_known_from_the_first_time_and_else_a_gap():
    model = load_models.TrainedModel()
    step(torch.compile(model, backend=backend), 5)
    end_process()
    step(torch.compile(model, backend=backend), 5)
    assert widths() == {"8", "16"} and gaps() == []
    end_process()
    forget_what_was_seen()
    step(torch.compile(model, backend=backend), 5)
    assert any("backward" in gap and "came compiled from torch's cache" in gap for gap in gaps())
    assert "partial" in {report.status for report in fxwarm.reports()}


def test_a_backward_that_is_compiled_late_is_warmed_there_and_then():
    compiled = torch.compile(load_models.TrainedModel(), backend=backend, dynamic=False)
    x = torch.ones(5, 8, requires_grad=True)
    out = compiled(x)
    assert widths() == {"8"}, "with a static batch the backward waits for its first run"
    jit()
    out.sum().backward()
    assert widths() == {"8", "16"} and ("build", "scale_16_other") in jit()
    step(compiled, 5)
    assert jit() == []


class Halves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((8,), 2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.halves(x, self.w)


@torch.no_grad()
def test_what_an_op_is_taken_apart_into_is_warm_also_on_a_hit_and_else_a_gap():
    model = Halves()

    def start() -> None:
        end_process()
        compiled = torch.compile(model, backend=backend)
        torch.testing.assert_close(compiled(torch.ones(5, 16)), torch.full((5, 16), 2.0))

    start()
    assert widths() == {"8"} and gaps() == []
    jit()
    start()
    assert widths() == {"8"} and gaps() == []
    forget_what_was_seen()
    start()
    assert any("toy::halves" in gap and "came compiled" in gap for gap in gaps())
