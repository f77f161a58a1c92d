"""Fixtures for all tests: private caches, the recorded truth, a fresh Dynamo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


def shared(name: str) -> Path:
    """Return a file of recorded inputs beside the checkout, or skip: CI has them, a user's clone does not."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} lies beside the checkout only in CI")
    return path


def cases(kind: str) -> list:
    """Return the cases of one kind from public bug reports, as pytest parameters with their ids."""
    path = SHARED / "cases.json"
    if not path.exists():
        return [
            pytest.param(
                {}, marks=pytest.mark.skip(reason="cases.json lies beside the checkout only in CI")
            )
        ]
    return [pytest.param(c, id=c["id"]) for c in json.loads(path.read_text()) if c["kind"] == kind]


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Private caches of every library, and nothing compiled yet."""
    import torch

    from fxwarm import store

    for name, folder in {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TILELANG_CACHE_DIR": "tilelang",
        "DG_JIT_CACHE_DIR": "deep_gemm",
        "TOY_CACHE_DIR": "toy",
        "FXWARM_CACHE_DIR": "fxwarm",
    }.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    store._root.cache_clear()
    torch._dynamo.reset()
    yield tmp_path
    torch._dynamo.reset()


@pytest.fixture
def toy(fresh):
    """The toy family in private caches, and nothing of it warm."""
    from fxwarm import family
    from tests.cold import forget
    from tests.toy_family import Toy

    family.register(Toy)
    forget()
    yield
    family.unregister("toy")
