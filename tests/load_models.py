"""Models for ``load_paths``: at the top of a module, where torch can find their classes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests import toy_family
from tests.plain_model import PlainModel


class ToyModel(torch.nn.Module):
    """One toy kernel after a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.w = torch.nn.Parameter(torch.full((8,), 2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.scale(self.linear(x), self.w)


class MhcModel(torch.nn.Module):
    """One mHC pre-norm: a TileLang kernel a split count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fn = torch.nn.Parameter(torch.randn(24, 4 * 256) * 0.02, requires_grad=False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("base", torch.zeros(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        post, comb, out = torch.ops.fxwarm.mhc_pre(
            x, self.fn, self.scale, self.base, 1e-6, 1e-6, 1e-6, 2.0, 20
        )
        return out.float().sum(-1) + post.flatten(1).sum(-1) + comb.flatten(1).sum(-1)


class GemmModel(torch.nn.Module):
    """One fp8 linear layer on DeepGEMM: quantise the rows, multiply."""

    def __init__(self, n: int = 2112, k: int = 1024) -> None:
        super().__init__()
        from fxwarm.ops import per_block_cast_to_fp8

        weight, scale = per_block_cast_to_fp8(
            torch.randn(n, k, generator=torch.Generator().manual_seed(0))
        )
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from fxwarm.ops import per_token_cast_to_fp8

        a, a_sf = per_token_cast_to_fp8(x)
        out = x.new_empty(x.shape[0], self.weight.shape[0], dtype=torch.bfloat16)
        torch.ops.fxwarm.fp8_gemm_nt(a, a_sf, self.weight, self.scale, out)
        return out


class Broken(torch.nn.Module):
    """A graph break between two calls of a model."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        torch._dynamo.graph_break()
        return y + self.inner(x)


def _scale_back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.toy.scale(grad, ctx.saved_tensors[0]), None


toy_family.scale.register_autograd(
    _scale_back, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1])
)


@torch.library.custom_op("toy::widen", mutates_args=())
def widen(x: torch.Tensor) -> torch.Tensor:
    """Put two copies of x side by side: no kernel, but its backward is one of twice the width."""
    return torch.cat([x, x], 1)


@widen.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], 2 * x.shape[1])


def _widen_back(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    scaled = torch.ops.toy.scale(grad, grad.new_ones(16))
    return scaled[:, :8] + scaled[:, 8:]


widen.register_autograd(_widen_back)


class TrainedModel(ToyModel):
    """A toy kernel of width 8 in the forward and the backward, one of width 16 in the backward alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.widen(super().forward(x))


def plain() -> tuple[torch.nn.Module, Callable, Callable]:
    """Return what ``toy`` does, for a model that calls no kernel."""
    return PlainModel(), lambda rows: torch.ones(rows, 8), list


def trained() -> tuple[torch.nn.Module, Callable, Callable]:
    """Return what ``toy`` does, for a model that can be trained."""
    _, make, events = toy()
    return TrainedModel(), make, events


def toy() -> tuple[torch.nn.Module, Callable, Callable]:
    """Return (model, make an input of so many rows, list of JIT events)."""
    from fxwarm import family

    family.register(toy_family.Toy)
    return (
        ToyModel(),
        lambda rows: torch.ones(rows, 8),
        lambda: [f"{a} {b}" for a, b in toy_family.events],
    )


def mhc() -> tuple[torch.nn.Module, Callable, Callable]:
    """Return the same for the mHC model."""
    import fxwarm.ops  # noqa: F401  # it defines them
    from fxwarm.families.tilelang import jit

    return (
        MhcModel(),
        lambda rows: torch.ones(rows, 4, 256, dtype=torch.bfloat16),
        lambda: ["build"] * jit.builds(),
    )


def gemm() -> tuple[torch.nn.Module, Callable, Callable]:
    """Return the same for DeepGEMM on the current CUDA device. A JIT event is a new entry of its cache."""
    import os
    from pathlib import Path

    import fxwarm.ops  # noqa: F401  # it defines them

    folder = Path(os.environ["DG_JIT_CACHE_DIR"]) / "cache"

    def make(rows: int) -> torch.Tensor:
        return torch.ones(rows, 1024, device="cuda", dtype=torch.bfloat16)

    def events() -> list[str]:
        torch.cuda.synchronize()
        return sorted(p.name for p in folder.glob("*")) if folder.is_dir() else []

    return GemmModel().cuda(), make, events
