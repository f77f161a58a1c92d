"""What fxwarm adds to each call of a warm model: one attribute look-up.

    python tests/bench/bench_call.py

Prints the time of a call through the warm callable and of the callable inside it, in turn in one run, and the ratio.
"""

from __future__ import annotations

import statistics
import sys
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fxwarm import artifacts
from fxwarm.backend import fxwarm as backend


def main() -> None:
    model, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        compiled(x)
        warm = artifacts.pending[-1]
        args = (model.weight, model.bias, 8, x)
        for args in (
            (8, x, model.weight, model.bias),
            (model.weight, model.bias, 8, x),
            (model.weight, model.bias, x),
            (x, model.weight, model.bias),
        ):
            try:
                warm(*args)
                break
            except Exception:
                continue
        outer, inner = [], []
        for _ in range(25):
            outer.append(timeit.timeit(lambda: warm(*args), number=2000) / 2000)
            inner.append(timeit.timeit(lambda: warm.inner(*args), number=2000) / 2000)
    through, without = statistics.median(outer), statistics.median(inner)
    print(
        f"through fxwarm {through * 1e6:.2f} µs, without {without * 1e6:.2f} µs, ratio {through / without:.3f}, added {1e9 * (through - without):.0f} ns"
    )


if __name__ == "__main__":
    main()
