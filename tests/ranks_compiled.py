"""One rank of a torchrun: a compiled model warms itself without its peers; then all are warmed together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import fxwarm
from fxwarm import family
from fxwarm.backend import fxwarm as backend
from tests import ranks_toys, toy_family


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.scale(x.view(-1, 8), self.w)  # Inductor has no C++ to compile


@torch.no_grad()
def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    family.register(ranks_toys.RankToy)
    model = Model()
    compiled = torch.compile(model, backend=backend)
    with ranks_toys.no_collectives():
        for rows in (5, 1) if rank else (16,):  # rank 1 compiles once more than rank 0
            torch.testing.assert_close(compiled(torch.ones(rows, 8)), model(torch.ones(rows, 8)))
    reports = fxwarm.warm_all(dist.group.WORLD)
    events = list(toy_family.events)
    toy_family.events.clear()
    with ranks_toys.no_collectives():
        for rows in (1, 2, 16, 100):
            compiled(torch.ones(rows, 8))
    found = {
        "builds": [n for what, n in events if what == "build"],
        "loads": [n for what, n in events if what == "load"],
        "jit_after": [n for _, n in toy_family.events],
        "status": reports[0].status,
    }
    (out / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
