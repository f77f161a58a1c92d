"""A model without a kernel of ours, in a file that imports only torch: it must load where fxwarm is not installed."""

from __future__ import annotations

import torch


class PlainModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))
