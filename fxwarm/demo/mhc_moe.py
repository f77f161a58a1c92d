"""A small mixture-of-experts model with hyper-connections, and one process that times its calls on the CPU.

Its mHC kernels are compiled for the number of partial sums, which follows from the token count: at hidden 1024 it takes
10 values over 2..1280 tokens. So a server that meets token counts as they come stalls again and again.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from fxwarm.ops import mhc  # noqa: F401  (registers the ops)
from passes.records import Record

HIDDEN = 1024
STREAMS = 4
LAYERS = 2
EXPERTS = 8
TOP_K = 2
INTERMEDIATE = 64
LARGEST = 1280
"""Most tokens of a step."""


class Call(Record, frozen=True):
    """One call of the compiled model."""

    tokens: int
    seconds: float
    builds: int
    """Kernels that TileLang compiled during the call, in this process."""
    digest: str
    """Of the output's bytes."""


class Run(Record, frozen=True):
    """One process: its calls in order, and what it compiled before and while they ran."""

    backend: str
    calls: tuple[Call, ...]
    graphs: int
    """Graphs that Dynamo made: 1, or a size was not symbolic."""
    built_ahead: int
    """Kernels that fxwarm built before the first result."""


class Hyper(nn.Module):
    """A sublayer between hyper-connections: mix the streams into its input, add its output to the streams."""

    def __init__(self, sublayer: nn.Module, hidden: int = HIDDEN) -> None:
        super().__init__()
        rows, wide = STREAMS * (2 + STREAMS), STREAMS * hidden
        self.fn = nn.Parameter(torch.randn(rows, wide) * wide**-0.5)
        self.scale = nn.Parameter(torch.rand(3))
        self.base = nn.Parameter(torch.randn(rows) * 0.1)
        self.sublayer = sublayer

    def forward(self, streams: Tensor) -> Tensor:
        """Return the next streams, [T, m, H] -> [T, m, H]."""
        post, comb, x = torch.ops.fxwarm.mhc_pre(
            streams, self.fn, self.scale, self.base, 1e-6, 1e-6, 1e-6, 2.0, 20
        )
        out: Tensor = torch.ops.fxwarm.mhc_post(self.sublayer(x), streams, post, comb)
        return out


class Moe(nn.Module):
    """Top-k of a few small experts, all of them computed and the others weighted 0: no size depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Linear(HIDDEN, EXPERTS * INTERMEDIATE, bias=False)
        self.down = nn.Linear(EXPERTS * INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum over each token's experts, [T, H] -> [T, H]."""
        chosen, index = self.router(x).softmax(-1).topk(TOP_K)
        weights = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, index, chosen)
        hidden = nn.functional.silu(self.up(x)).unflatten(-1, (EXPERTS, INTERMEDIATE))
        out: Tensor = self.down((hidden * weights.unsqueeze(-1)).flatten(1))
        return out


class MhcMoe(nn.Module):
    """Layers of a plain mixer, in the place of attention, and a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        mixers = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(LAYERS))
        self.layers = nn.Sequential(*(Hyper(part) for mixer in mixers for part in (mixer, Moe())))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the streams after all layers, [T, H] -> [T, H]."""
        streams = x.unsqueeze(1).repeat(1, STREAMS, 1)
        out: Tensor = self.layers(streams).mean(1)
        return out


def token_counts(calls: int, largest: int = LARGEST) -> list[int]:
    """Return ``calls`` token counts spread over 2..``largest``, in an order as of requests."""
    counts = [2 + (largest - 2) * i // max(1, calls - 1) for i in range(calls)]
    random.Random(0).shuffle(counts)
    return counts


def time_calls(backend: str, counts: list[int], largest: int = LARGEST) -> Run:
    """Compile the model with ``backend`` ("inductor" or "fxwarm") and call it at each of ``counts`` tokens.

    The graph is for 2..``largest`` tokens: torch makes another one for a single token.
    """
    import fxwarm
    from fxwarm.backend import fxwarm as warm_backend
    from fxwarm.families.tilelang import jit
    from fxwarm.ops import mhc_factories

    mhc_factories.get_factory(mhc_factories.BIG_FUSE_CPU)  # TileLang's import is no part of a call
    jit.watch()
    torch.manual_seed(0)
    model = MhcMoe().eval()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend=warm_backend if backend == "fxwarm" else backend)
    calls: list[Call] = []
    with torch.no_grad():
        for tokens in counts:
            x = torch.randn(tokens, HIDDEN)
            if not calls:
                torch._dynamo.mark_dynamic(x, 0, min=2, max=largest)
            built, begin = jit.builds(), time.perf_counter()
            out = compiled(x)
            seconds = time.perf_counter() - begin
            digest = hashlib.sha256(out.numpy().tobytes()).hexdigest()[:16]
            calls.append(Call(tokens, seconds, jit.builds() - built, digest))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    ahead = sum(len(report.built) for report in fxwarm.reports())
    return Run(backend, tuple(calls), graphs, ahead)


def main() -> None:
    """Time the calls in this process and write them to a file: ``python -m fxwarm.demo.mhc_moe``."""
    import msgspec

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--backend", choices=("inductor", "fxwarm"), required=True)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--largest", type=int, default=LARGEST)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    run = time_calls(args.backend, token_counts(args.calls, args.largest), args.largest)
    args.output.write_bytes(msgspec.json.encode(run))


if __name__ == "__main__":
    main()
