"""What a monitor costs a call of a warm op: the watchers nothing, the guards a look-up.

    python tests/bench/bench_monitor.py

Times one op of 13 us (a Python custom op on the CPU) in turn without a monitor, with watchers only (what
``fxwarm.monitor=count`` and ``=warn`` use), and with guards (what ``no_jit()`` and ``=raise`` use), and prints ratios.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import os

import torch

os.environ["TOY_CACHE_DIR"] = tempfile.mkdtemp()

import fxwarm
from fxwarm import family
from tests.toy_family import Toy

CALLS, ROUNDS = 2000, 15


def main() -> None:
    family.register(Toy)
    x, w = torch.randn(33, 8), torch.ones(8)
    op = torch.ops.toy.scale.default
    op(x, w)
    times: dict[str, list[float]] = {"none": [], "watchers": [], "guards": []}

    def measure(name: str) -> None:
        op(x, w)
        times[name].append(timeit.timeit(lambda: op(x, w), number=CALLS) / CALLS)

    for _ in range(ROUNDS):
        measure("none")
        with fxwarm.no_jit("count", calls=False):
            measure("watchers")
        with fxwarm.no_jit("count"):
            measure("guards")
    base = statistics.median(times["none"])
    spread = (max(times["none"]) - min(times["none"])) / base
    for name, found in times.items():
        middle = statistics.median(found)
        print(
            f"{name:9} {middle * 1e6:6.2f} us, ratio {middle / base:.3f}, added {(middle - base) * 1e9:+.0f} ns"
        )
    print(f"noise: the runs without a monitor differ by {spread:.0%}")


if __name__ == "__main__":
    main()
