"""What reading a graph costs: linear in its calls, well under a millisecond each.

    python tests/bench/bench_collect.py

Prints the time a call at 100, 1,000 and 10,000 calls, and the ratio of the largest graph's to the smallest's: 1 is linear.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import fxwarm.ops  # noqa: F401
from fxwarm.family import load_families
from passes.collect import collect


def graph(calls: int) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A Dynamo-like graph of ``calls`` fp8 GEMMs with a symbolic batch, over eight weight shapes."""
    captured: list = []

    def keep(gm, inputs):
        captured.append((gm, inputs))
        return gm.forward

    def model(a, a_sf, b, b_sf):
        d = a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
        torch.ops.fxwarm.fp8_gemm_nt(a, a_sf, b, b_sf, d)
        return d

    with torch.device("meta"):
        a = torch.empty(64, 512, dtype=torch.float8_e4m3fn)
        args = (
            a,
            torch.empty(64, 4),
            torch.empty(1024, 512, dtype=torch.float8_e4m3fn),
            torch.empty(8, 4),
        )
    for tensor in args[:2]:
        torch._dynamo.mark_dynamic(tensor, 0)
    torch.compile(model, backend=keep)(*args)
    gm, inputs = captured[0]
    (call,) = [n for n in gm.graph.nodes if "fp8_gemm_nt" in str(n.target)]
    with gm.graph.inserting_after(call):
        for _ in range(calls - 1):
            copied = gm.graph.node_copy(call)
            copied.meta = dict(call.meta)
    gm.recompile()
    return gm, inputs


def main() -> None:
    matchers = [family.match for family in load_families().values()]
    costs = {}
    for calls in (100, 1_000, 10_000):
        gm, inputs = graph(calls)
        begin = time.perf_counter()
        found = collect(gm, inputs, matchers)
        costs[calls] = (time.perf_counter() - begin) / calls
        assert found.shapes.sites[0].count == calls
        print(f"{calls:6,} calls: {costs[calls] * 1e3:.3f} ms a call, {costs[calls] * calls:.2f} s")
    print(f"ratio a call, 10,000 to 100 calls: {costs[10_000] / costs[100]:.2f}")


if __name__ == "__main__":
    main()
