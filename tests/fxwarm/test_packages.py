"""AOTInductor packages: the plan in the metadata, or an op inside that warms where torch alone loads the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxwarm
from fxwarm import family, packages
from tests import load_models, toy_family

BY_TORCH_ALONE = """
import sys, torch
import fxwarm.packages
from fxwarm import family
from tests import toy_family
family.register(toy_family.Toy)
model = torch._inductor.aoti_load_package(sys.argv[1])
out = model(torch.ones(5, 8))
done = list(toy_family.events)
assert sorted(what for what, _ in done) == ["build"] * 3 + ["load"] * 3, done
for rows in (1, 2, 16, 33):
    model(torch.ones(rows, 8))
assert toy_family.events == done
print("warm", tuple(out.shape))
"""


@pytest.fixture(autouse=True)
def toy(fresh):
    family.register(toy_family.Toy)
    toy_family._loaded.clear()
    toy_family.events.clear()
    yield
    family.unregister("toy")


def program() -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=8192)
    with torch.no_grad():
        return torch.export.export(
            load_models.ToyModel().eval(), (torch.ones(5, 8),), dynamic_shapes={"x": {0: batch}}
        )


def test_an_embedded_op_warms_the_package_where_torch_loads_it(fresh):
    path = fxwarm.save_package(program(), str(fresh / "model.pt2"), embed=True)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", BY_TORCH_ALONE, path],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "warm (5, 8)" in done.stdout, done.stderr[-1500:]


def test_a_package_without_a_plan_loads_and_says_that_it_is_not_warmed(fresh, monkeypatch, caplog):
    class Plain:
        def get_metadata(self) -> dict[str, str]:
            return {"AOTI_DEVICE_KEY": "cpu"}

    plain = Plain()
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path, **kwargs: plain)
    assert fxwarm.load_package("model.pt2") is plain
    assert "carries no plan and is not warmed; save it with fxwarm.save_package" in caplog.text


def test_a_damaged_plan_costs_the_plan_and_not_the_model(fresh, monkeypatch, caplog):
    class Damaged:
        def get_metadata(self) -> dict[str, str]:
            return {packages.FIELD: "{"}

    damaged = Damaged()
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path, **kwargs: damaged)
    assert fxwarm.load_package("model.pt2") is damaged
    assert (
        "model.pt2 is not warmed, its plan does not load" in caplog.text
        and "save it again" in caplog.text
    )
