"""Layers that call DeepGEMM's ops in the place of transformers' own: fp8 block linears, fused linears, experts.

They compute what the layers they replace compute, up to the fp8 rounding of weights and activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fxwarm.ops import deep_gemm  # noqa: F401  (registers the ops)
from fxwarm.ops.scales import per_block_cast_to_fp8, per_token_cast_to_fp8

ALIGNMENT = 128
"""Rows that each expert's share is padded to: DeepGEMM's default, its only one on SM90."""


def _quantised(weight: Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    fp8, scale = per_block_cast_to_fp8(weight.detach())
    return nn.Parameter(fp8, requires_grad=False), nn.Parameter(scale, requires_grad=False)


class Fp8Linear(nn.Module):
    """One or more linears of one input as a single fp8 GEMM, their weights concatenated along N.

    Weights are quantised in 128x128 blocks, activations in 1x128.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight, self.scale = _quantised(torch.cat([linear.weight for linear in linears]))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x[..., K] @ weight[N, K].T`` in bf16."""
        a, a_sf = per_token_cast_to_fp8(x.reshape(-1, x.shape[-1]))
        d = x.new_empty((a.shape[0], self.weight.shape[0]), dtype=torch.bfloat16)
        torch.ops.fxwarm.fp8_gemm_nt(a, a_sf, self.weight, self.scale, d)
        return d.view(*x.shape[:-1], d.shape[-1])


class Shared:
    """A fused linear with its last input and output, which the parts of it share."""

    def __init__(self, fused: Fp8Linear) -> None:
        self.fused = fused
        self.x: Tensor | None = None
        self.y: Tensor | None = None


class Part(nn.Module):
    """The columns of a fused linear that one of the original linears computed.

    Whichever part first sees an input computes all of them; the last one lets the result go.
    """

    def __init__(self, shared: Shared, columns: slice, *, last: bool) -> None:
        super().__init__()
        self.fused = shared.fused
        self.shared = shared
        self.columns = columns
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """Return these columns of the fused output, as a view."""
        shared = self.shared
        if shared.x is not x:
            shared.x, shared.y = x, self.fused(x)
        y = shared.y
        assert y is not None
        if self.last:
            shared.x = shared.y = None
        return y[..., self.columns]


def fuse(linears: Sequence[nn.Linear]) -> list[Part]:
    """Return one replacement for each of ``linears``, which take the same input: together a single GEMM."""
    shared = Shared(Fp8Linear(linears))
    parts, start = [], 0
    for index, linear in enumerate(linears):
        columns = slice(start, start + linear.out_features)
        parts.append(Part(shared, columns, last=index == len(linears) - 1))
        start += linear.out_features
    return parts


class Fp8Experts(nn.Module):
    """Routed experts as two grouped GEMMs over the chosen rows, each expert's share padded to 128.

    ``gate_up`` is [G, 2I, H], ``down`` [G, H, I]. The row buffer is sized for the worst routing, as vLLM does, so
    that its size depends on the token count alone.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w13, self.w13_scale = _quantised(gate_up)
        self.w2, self.w2_scale = _quantised(down)
        self.act = act

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum over the chosen experts: [T, H], [T, k], [T, k] -> [T, H]."""
        tokens, k = top_k_index.shape
        places, layout = _place(top_k_index, self.w13.shape[0])
        a, a_sf = per_token_cast_to_fp8(hidden)
        token = torch.arange(tokens * k, device=hidden.device) // k
        rows = layout.shape[0]
        a = _scatter(a.view(torch.int8), token, places, rows).view(a.dtype)
        a_sf = _scatter(a_sf, token, places, rows)
        gate, up = self._grouped(a, a_sf, self.w13, self.w13_scale, layout).chunk(2, -1)
        a, a_sf = per_token_cast_to_fp8(self.act(gate) * up)
        out = self._grouped(a, a_sf, self.w2, self.w2_scale, layout)[places].view(tokens, k, -1)
        return (out * top_k_weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _grouped(self, a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, layout: Tensor) -> Tensor:
        d = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)
        torch.ops.fxwarm.m_grouped_fp8_gemm_nt_contiguous(a, a_sf, b, b_sf, d, layout)
        return d


def padded_rows(tokens: int, k: int, experts: int) -> int:
    """Return the rows that ``tokens`` tokens of ``k`` choices can take, each expert's share padded to 128.

    Source: vLLM 0.33 ``compute_aligned_M``.
    """
    chosen = tokens * k
    worst = chosen + min(chosen, experts) * (ALIGNMENT - 1)
    return (worst + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _place(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the row of each choice [T*k] and the expert of each row, -1 for padding, sorted by expert."""
    tokens, k = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    ones = torch.ones_like(chosen)
    counts = torch.zeros(experts, dtype=chosen.dtype, device=chosen.device).scatter_add(
        0, chosen, ones
    )
    padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    # how far each expert's first row moves, from where it would be without padding
    shift = (padded - counts).cumsum(0) - (padded - counts)
    order = chosen.argsort(stable=True)
    rank = torch.empty_like(order).scatter(0, order, torch.arange(tokens * k, device=chosen.device))
    places = rank + shift[chosen]
    layout = torch.full(
        (padded_rows(tokens, k, experts),), -1, dtype=torch.int32, device=chosen.device
    )
    return places, layout.scatter(0, places, chosen.to(torch.int32))


def _scatter(x: Tensor, source: Tensor, places: Tensor, rows: int) -> Tensor:
    return x.new_zeros((rows, x.shape[-1])).index_copy(0, places, x[source])
