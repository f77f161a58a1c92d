"""FlashInfer on a machine without a GPU: the real tuner and the real functions, over modules that do nothing."""

from __future__ import annotations

import importlib.util

import pytest

from tests.fxwarm.families.flashinfer.fake import make_library

HERE = importlib.util.find_spec("flashinfer") is not None
REASON = "flashinfer-python is not installed: the tests against its own functions need it"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The installed FlashInfer with fake modules, a fake clock and a private workspace."""
    if not HERE:
        pytest.skip(REASON)
    made = make_library(tmp_path, monkeypatch)
    yield made
    made.restart()
