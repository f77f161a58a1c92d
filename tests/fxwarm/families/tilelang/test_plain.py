"""TileKernels' own functions: the plan is what their own Python asks its factories for."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

import fxwarm
from fxwarm import substitute
from fxwarm.families.tilelang.statics import factory_of, statics_of
from fxwarm.ops.mhc_factories import get_factory
from fxwarm.records import Target

pytest.importorskip("tilelang")
if importlib.util.find_spec("tile_kernels") is None:
    pytest.skip("TileKernels is not installed", allow_module_level=True)
M, H, SMS = 4, 256, 132
N = M * (2 + M)


@pytest.fixture(scope="module")
def ops():
    """TileKernels' public functions, imported without the package's own start."""
    get_factory("tile_kernels.modeling.mhc.ops:mhc_post")
    substitute.install()
    return sys.modules["tile_kernels.modeling.mhc.ops"]


def asked(monkeypatch, function, *args) -> set:
    """Run the library's Python on the CPU and return what it asked its factories for; nothing is compiled."""
    found = set()
    config = sys.modules["tile_kernels.config"]
    monkeypatch.setattr(config, "_num_sms", SMS)
    for module in [m for n, m in sys.modules.items() if n.startswith("tile_kernels.mhc.")]:
        for name, factory in vars(module).items():
            if hasattr(factory, "get_tir"):
                path = f"{module.__name__}:{name}"

                def ask(*statics, _path=path, _factory=factory, **named):
                    bound = _factory.signature.bind(*statics, **named)
                    bound.apply_defaults()
                    found.add((_path, tuple(bound.arguments.items())))
                    return lambda *tensors: None

                for user in list(sys.modules.values()):
                    if (
                        getattr(user, "__name__", "").startswith("tile_kernels.")
                        and vars(user).get(name) is factory
                    ):
                        monkeypatch.setattr(user, name, ask)
    norm = sys.modules["tile_kernels.modeling.mhc.ops.norm_fn"]
    fuse = sys.modules["tile_kernels.modeling.mhc.ops.pre_big_fuse"]
    for module in (norm, fuse):  # a kernel of Triton's, for a GPU
        monkeypatch.setattr(module, "round_to_tf32", lambda x: x)
    with torch.no_grad():
        function(*args)
    return found


def planned(function, *args) -> set:
    target = Target.named("h200")
    with torch.no_grad():
        shapes = fxwarm.trace(lambda *a: function(*a), *args, target=target)
    assert not shapes.gaps
    plan = fxwarm.plan(shapes, target=target)
    assert not plan.gaps, plan.gaps
    found = set()
    for p in plan.planned:
        bound = get_factory(factory_of(p.key)).signature.bind(**statics_of(p.key))
        bound.apply_defaults()
        found.add((factory_of(p.key), tuple(bound.arguments.items())))
    return found


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def f32(*shape):
    return torch.zeros(shape)


CALLS = {
    "mhc_pre_big_fuse": lambda t: (bf16(1, t, M, H), f32(N, M * H), f32(3), f32(N), 1e-6, 1e-5, 1e-4, 2.0, 20),
    "mhc_post": lambda t: (bf16(1, t, H), bf16(1, t, M, H), f32(1, t, M, 1), f32(1, t, M, M)),
    "mhc_pre_norm_fn": lambda t: (bf16(1, t, M, H), f32(N, M * H), f32(M * H), 1e-6),
    "mhc_pre_split_mixes": lambda t: (f32(1, t, N), f32(3), f32(N), M, 2.0, 1e-6),
    "sinkhorn_normalize": lambda t: (f32(1, t, M, M),),
    "mhc_pre_apply_mix": lambda t: (bf16(1, t, M, H), f32(1, t, M, 1)),
    "mhc_head_compute_mix": lambda t: (f32(1, t, M), f32(1), f32(M), 1e-6),
    "expand_to_mhc": lambda t: (bf16(1, t, H), M),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_plan_is_what_the_library_asks_for(name, ops, monkeypatch):
    function, args = getattr(ops, name), CALLS[name](6)
    plan = planned(function, *args)
    wanted = asked(monkeypatch, function, *args)
    assert plan == wanted
    assert plan
