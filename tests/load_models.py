"""Models for ``load_paths``: at the top of a module, where torch can find their classes again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests import toy_family


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
        post, comb, out = torch.ops.fxwarm.mhc_pre(x, self.fn, self.scale, self.base, 1e-6, 1e-6, 1e-6, 2.0, 20)
        return out.float().sum(-1) + post.flatten(1).sum(-1) + comb.flatten(1).sum(-1)


class Broken(torch.nn.Module):
    """A graph break between two calls of a model."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        torch._dynamo.graph_break()
        return y + self.inner(x)


def toy() -> tuple[torch.nn.Module, Callable, Callable]:
    """Return (model, make an input of so many rows, list of JIT events)."""
    from fxwarm import family

    family.register(toy_family.Toy)
    return ToyModel(), lambda rows: torch.ones(rows, 8), lambda: [f"{a} {b}" for a, b in toy_family.events]


def mhc() -> tuple[torch.nn.Module, Callable, Callable]:
    """Return the same for the mHC model."""
    import fxwarm.ops.mhc
    from fxwarm.families.tilelang import jit

    return MhcModel(), lambda rows: torch.ones(rows, 4, 256, dtype=torch.bfloat16), jit.builds
