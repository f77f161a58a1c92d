"""What a monitor costs a call of a warm op: "count" and "warn" nothing, "raise" a look-up.

    python tests/bench/bench_monitor.py

Times one op (a Python custom op on the CPU) in short turns: without a monitor, twice, so that the noise shows; inside
``no_jit("count")`` and ``no_jit("warn")``, which is also what ``fxwarm.monitor`` uses; and inside ``no_jit("raise")``,
which looks at each call. Processor time of all threads, the watchers' included. Prints the ratio to the first of each
round: the median, and the middle half of the rounds.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

os.environ["TOY_CACHE_DIR"] = tempfile.mkdtemp()

import fxwarm.exc
from fxwarm import family
from tests.toy_family import Toy

CALLS, ROUNDS = 500, 60


def main() -> None:
    family.register(Toy)
    x, w = torch.randn(33, 8), torch.ones(8)
    op = torch.ops.toy.scale.default
    modes = {
        "without": contextlib.nullcontext,
        "again": contextlib.nullcontext,
        "count": lambda: fxwarm.no_jit("count"),
        "warn": lambda: fxwarm.no_jit("warn"),
        "raise": lambda: fxwarm.no_jit("raise"),
    }
    times: dict[str, list[float]] = {name: [] for name in modes}
    for mode in modes.values():  # what is done once is done before: imports, the kernel itself
        with contextlib.suppress(fxwarm.exc.JitError), mode():
            op(x, w)
    op(x, w)
    with fxwarm.no_jit("count", calls=True):
        op(x, w)
    for at in range(ROUNDS):
        for name in sorted(
            modes, key=lambda n: (at * 7919 + len(n) * 31) % 97
        ):  # in changing order
            with modes[name]():
                op(x, w)
                taken = timeit.timeit(lambda: op(x, w), timer=time.process_time, number=CALLS)
                times[name].append(taken / CALLS)
    base = times["without"]
    for name, found in times.items():
        low, middle, high = statistics.quantiles(
            (b / a for a, b in zip(base, found, strict=True)), n=4
        )
        took = statistics.median(found)
        print(
            f"{name:8} {took * 1e6:6.2f} us, ratio {middle:.3f} ({low:.3f} to {high:.3f}), "
            f"added {(took - statistics.median(base)) * 1e9:+.0f} ns"
        )


if __name__ == "__main__":
    main()
