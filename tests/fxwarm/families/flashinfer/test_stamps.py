"""Tactics files say where they were measured: one of another card or an unknown library is never used (case D17)."""

from __future__ import annotations

import json
import logging

import pytest

from fxwarm.families.flashinfer import FlashInfer, tuning
from fxwarm.families.flashinfer.keys import MODULE
from fxwarm.families.flashinfer.library import find_library
from fxwarm.records import Planned, Target
from tests.fxwarm.families.flashinfer.calls import moe

HOPPER = Target.named("h200")


@pytest.fixture
def said(caplog):
    """What the library's own logger says; it does not propagate."""
    from flashinfer.jit.core import logger

    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)


def start(library):
    """Tune in what stands for a fresh process; return (entries found, entries measured)."""
    library.restart()
    call = moe(4, experts=4, hidden=16, inter=8, top_k=2)
    planned = [
        p for p in FlashInfer().keys([call], HOPPER, find_library({})) if isinstance(p, Planned)
    ]
    tuned = list(tuning.tune(planned, "sm_90a", lambda call: None))
    assert not [t for t in tuned if t.error]
    modules = [p for p in planned if p.key.tag == MODULE]
    assert not FlashInfer().missing(modules, HOPPER), "modules do not depend on the stamp"
    found = sum(t.found for t in tuned)
    return found, len(tuned) - found


@pytest.fixture
def h200(library, monkeypatch):
    """The library as on a machine with this card and this cuDNN."""
    from flashinfer.autotuner import autotuner

    collect = autotuner._collect_metadata
    machine = {"gpu": "NVIDIA H200", "cudnn_version": "9.12"}
    monkeypatch.setattr(autotuner, "_collect_metadata", lambda: {**collect(), **machine})
    return library


@pytest.mark.parametrize(
    ("stamp", "stays"),
    [
        ({"gpu": "NVIDIA H100", "cudnn_version": "9.10"}, True),
        ({"gpu": "NVIDIA H200", "cudnn_version": "unknown"}, False),
    ],
    ids=["another card", "unknown version"],
)
def test_D17_a_file_with_another_stamp_is_ignored_and_the_fields_are_named(
    stamp, stays, h200, said
):
    _, entries = start(h200)
    path = next((h200.folder / "fxwarm").iterdir())
    stored = json.loads(path.read_text())
    differ = {k: v for k, v in stamp.items() if stored["_metadata"][k] != v}
    stored["_metadata"].update(stamp)
    path.write_text(json.dumps(stored))
    said.clear()
    assert start(h200) == (0, entries)
    line = next(r.getMessage() for r in said.records if "different environment" in r.getMessage())
    assert all(f"{name}: saved={value} vs current=" in line for name, value in differ.items())
    assert (json.loads(path.read_text()) == stored) == stays
    # What nobody could attribute is replaced, and serves the next start.
    assert start(h200) == ((0, entries) if stays else (entries, 0))
