"""Warm keys: the same graph has the same key anywhere, and whatever changes a kernel changes the key."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import fxwarm
from fxwarm import artifacts, graph_key, receipts
from fxwarm.backend import fxwarm as backend
from fxwarm.records import Library, Target
from passes.records import Dim, KernelCall, ShapeSet, Site, TensorSpec
from tests import load_models

TORCH = "a" + "b" * 51


pytestmark = pytest.mark.usefixtures("toy")


def shapes(upper: int = 8192, width: int = 8) -> ShapeSet:
    rows = Dim("s0", 1, upper, ((1, upper, 1),))
    x = TensorSpec("float32", (rows, Dim.static(width)))
    call = KernelCall(
        "toy", "scale", (("x", x), ("w", TensorSpec("float32", (Dim.static(width),))))
    )
    return ShapeSet(calls=(call,), sites=(Site(1, ""),))


CARD = Target("h200", arch="sm_90a", num_sms=132)
LIBRARY = Library(
    "toy-jit", "1.0", True, "toy", "1234", (("num_sms", "132"),), (("TOY_FAST", "1"),)
)


def key(*, of=None, target=CARD, library=LIBRARY, graph=TORCH) -> str:
    return receipts.key_of(of or shapes(), target, (library,), graph)


CHANGES = {
    "range": {"of": shapes(4096)},
    "width": {"of": shapes(width=16)},
    "graph": {"graph": "a" + "c" * 51},
    "arch": {"target": msgspec.structs.replace(CARD, arch="sm_100f")},
    "SM count": {"target": msgspec.structs.replace(CARD, num_sms=66)},
    "shared memory": {"target": msgspec.structs.replace(CARD, smem=101376)},
    "device": {"target": msgspec.structs.replace(CARD, device="cpu")},
    "library": {"library": msgspec.structs.replace(LIBRARY, distribution="toy-jit-fork")},
    "library version": {"library": msgspec.structs.replace(LIBRARY, version="1.0+local")},
    "include tree, compiler": {"library": msgspec.structs.replace(LIBRARY, fingerprint="1235")},
    "settings": {"library": msgspec.structs.replace(LIBRARY, settings=(("num_sms", "130"),))},
    "environment": {"library": msgspec.structs.replace(LIBRARY, environment=())},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_input_has_another_key(change):
    assert key(**change) != key()
    assert re.fullmatch("[0-9a-f]{32}", key(**change))


def test_another_torch_and_another_schema_have_another_key(monkeypatch):
    before = key()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        assert key() != before
    monkeypatch.setattr(receipts, "SCHEMA", 99)
    assert key() != before


def test_the_name_of_the_card_and_the_order_of_calls_are_not_in_the_key():
    h100 = msgspec.structs.replace(CARD, name="h100")
    assert key(target=h100) == key()
    a, b = shapes(), shapes(width=16)
    assert key(of=a | b) == key(of=b | a)


def aot_key(backend_: object, model: torch.nn.Module, x: torch.Tensor, dynamic: bool | None) -> str:
    torch._dynamo.reset()
    with torch.no_grad(), graph_key.watch(lambda key: None) as keys:
        torch.compile(model, backend=backend_, dynamic=dynamic)(x)
    return keys.aot


@pytest.mark.parametrize("how", ["dynamic", "mark_dynamic"])
def test_torchs_own_key_is_the_one_of_plain_inductor(how):
    model = load_models.ToyModel()

    def run(backend_: object) -> str:
        x = torch.ones(5, 8)
        if how == "mark_dynamic":
            torch._dynamo.mark_dynamic(x, 0)
        return aot_key(backend_, model, x, True if how == "dynamic" else None)

    ours, plain = run(backend), run("inductor")
    assert graph_key.is_torch_key(plain) and ours == plain
    assert fxwarm.plans()[0].graph_key == plain, "and the plan knows it"


KEYS = """
import json, torch
import fxwarm
from fxwarm import family
from fxwarm.backend import fxwarm as backend
from tests import load_models, toy_family
family.register(toy_family.Toy)
model = load_models.ToyModel()
for caching in (False, True):
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(caching_precompile=caching):
        torch.compile(model, backend=backend)(torch.ones(5, 8))
print(json.dumps([[r.plan_key for r in fxwarm.reports()], [p.graph_key for p in fxwarm.plans()]]))
"""


def keys_on_a_machine(folder: Path, seed: str) -> list[list[str]]:
    """Return the warm keys and graph keys of a process whose checkout, home, caches and hash seed are its own."""
    root = Path(__file__).parents[2]
    for part in ("fxwarm", "passes", "tests"):
        shutil.copytree(root / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    places = ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "FXWARM_CACHE_DIR", "TOY_CACHE_DIR")
    environ = {name: str(folder / name.lower()) for name in places}
    for place in environ.values():
        Path(place).mkdir()
    environ |= {"PYTHONPATH": str(folder), "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", KEYS],
        env={**os.environ, **environ},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    keys: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return keys


@pytest.mark.timeout(600)
def test_the_same_graph_has_the_same_key_in_two_processes_and_on_two_machines(tmp_path):
    one, two = (keys_on_a_machine(tmp_path / seed, seed) for seed in ("1", "2"))
    assert one == two
    warm, graph = one
    assert len(set(warm)) == 2 and graph_key.is_torch_key(graph[0])
    assert re.fullmatch("d[0-9a-f]{32}", graph[1]), "torch's key holds an id of the process there"


@torch.no_grad()
def test_where_torch_gives_no_key_the_digest_starts_the_builds_before_inductor():
    asked: list[str] = []
    with (
        torch._dynamo.config.patch(caching_precompile=True),
        graph_key.watch(asked.append, "d" + "0" * 32) as keys,
    ):
        assert asked == ["d" + "0" * 32] == [keys.best]


@torch.no_grad()
def test_a_random_number_is_no_key(monkeypatch):
    from torch._functorch._aot_autograd import autograd_cache

    monkeypatch.setattr(
        autograd_cache, "autograd_cache_key", lambda *a, **k: ("0.8444218515250481", [])
    )
    asked = []
    with graph_key.watch(asked.append) as keys:
        autograd_cache.autograd_cache_key()
    assert (asked, keys.best) == ([], "") and "is not of torch's form" in keys.why


@pytest.mark.parametrize(
    "text", ["", "0.5", "a", "A" + "b" * 51, "a" + "1" * 51, "../" + "a" * 48, None, 3]
)
def test_only_torchs_own_form_is_a_key(text):
    assert not graph_key.is_torch_key(text)


def test_a_torch_without_the_function_gives_no_key_and_the_reason(monkeypatch):
    from torch._functorch._aot_autograd import autograd_cache

    monkeypatch.delattr(autograd_cache, "autograd_cache_key")
    with graph_key.watch(lambda key: None) as keys:
        pass
    assert keys.best == "" and "torch has no autograd_cache_key here" in keys.why


@pytest.mark.parametrize(
    ("config", "patch", "why"),
    [
        (torch._dynamo.config, {"caching_precompile": True}, "holds an id of this process"),
        (torch._inductor.config, {"force_disable_caches": True}, "was not asked for a key"),
        (torch._inductor.config, {"fx_graph_cache": False}, "torch made no AOT key"),
    ],
    ids=["caching_precompile", "no caches", "no FX cache"],
)
@torch.no_grad()
def test_without_a_stable_key_the_digest_serves_and_one_line_says_why(config, patch, why, caplog):
    with caplog.at_level(logging.INFO, logger="fxwarm"), config.patch(patch):
        torch.compile(load_models.ToyModel(), backend=backend)(torch.ones(5, 8))
    (report,) = fxwarm.reports()
    assert report.status == "complete" and len(report.loaded) == 3
    assert re.fullmatch("d[0-9a-f]{32}", fxwarm.plans()[0].graph_key)
    assert why in caplog.text and "a digest of the graph serves as key" in caplog.text


@torch.no_grad()
def test_without_aotautograds_cache_the_fx_key_serves():
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(load_models.ToyModel(), backend=backend)(torch.ones(5, 8))
    (warm,) = artifacts.pending
    assert warm.warmup.graph_key.startswith("f") and graph_key.is_torch_key(warm.warmup.graph_key)


@torch.no_grad()
def test_the_patch_of_torch_is_gone_afterwards():
    from torch._functorch._aot_autograd import autograd_cache

    before = autograd_cache.autograd_cache_key
    with contextlib.suppress(RuntimeError), graph_key.watch(lambda key: None):
        assert autograd_cache.autograd_cache_key is not before
        raise RuntimeError("stop")
    assert autograd_cache.autograd_cache_key is before


class Padded(torch.nn.Module):
    """Rows as an engine pads them: their number depends on the batch by a ``min``."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        tokens = x.shape[0]
        rows = 8 * tokens + 3 * torch.sym_min(8 * tokens, 128)
        index = torch.arange(rows, device=x.device) % tokens
        return torch.ops.toy.scale(x[index], self.w)[:tokens]


def graphs_of_two_sizes(model: torch.nn.Module) -> tuple[int, int]:
    """Return how many frames Dynamo traced for 64 rows, then for 9, and how many AOTAutograd entries were found."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend=backend)
    traced = []
    with torch.no_grad():
        for rows in (64, 9):
            assert torch.equal(compiled(torch.ones(rows, 8)), torch.ones(rows, 8))
            traced.append(counters["stats"]["unique_graphs"])
    return traced[1] - traced[0], counters["aot_autograd"]["autograd_cache_hit"]


def test_a_cache_hit_keeps_the_range_that_was_compiled():
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    model = Padded()
    assert graphs_of_two_sizes(model) == (0, 0)
    assert graphs_of_two_sizes(model) == (0, 1)
    assert not {"min", "max"} & set(SYMPY_INTERP)  # Dynamo's own guards see Python's


def test_without_torch_s_table_of_names_nothing_is_changed(monkeypatch):
    from torch.fx.experimental import symbolic_shapes

    names = symbolic_shapes.SYMPY_INTERP
    monkeypatch.delattr(symbolic_shapes, "SYMPY_INTERP")
    with graph_key.whole_ranges():
        assert "min" not in names
