"""What a user feels: the first call at each token count, with and without fxwarm, on a Hopper GPU.

    python tests/gpu/serve.py --out tests/gpu/results/serve.json

One layer of Qwen3-30B-A3B-FP8 (TP 1) on DeepGEMM: two dense GEMMs and two grouped ones, top-8 of 128 experts. It is
compiled by torch.compile with each backend in a process and a cache of its own, then called at ``--calls`` token counts
from 1 to 8192. Needs torch, fxwarm's dependencies and a DeepGEMM on PYTHONPATH; no pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:] = [
    str(CHECKOUT),
    *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent),
]

EXPERTS, TOPK, HIDDEN, INTER, TOKENS = 128, 8, 2048, 768, 8192


def make_layer():
    import torch
    from torch import nn

    from fxwarm.ops import per_token_cast_to_fp8

    def weight(*shape):
        bits = torch.randint(0x20, 0x40, shape, dtype=torch.uint8, device="cuda")
        scale = torch.full(
            (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)), 0.02, device="cuda"
        )
        return nn.Parameter(bits.view(torch.float8_e4m3fn), False), nn.Parameter(scale, False)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.qkv_sf = weight(5120, HIDDEN)
            self.o, self.o_sf = weight(HIDDEN, 4096)
            self.w13, self.w13_sf = weight(EXPERTS, 2 * INTER, HIDDEN)
            self.w2, self.w2_sf = weight(EXPERTS, HIDDEN, INTER)

        def linear(self, x, w, sf):
            a, a_sf = per_token_cast_to_fp8(x)
            d = x.new_empty(x.shape[0], w.shape[0])
            torch.ops.fxwarm.fp8_gemm_nt(a, a_sf, w, sf, d)
            return d

        def grouped(self, x, w, sf, ids):
            a, a_sf = per_token_cast_to_fp8(x)
            d = x.new_empty(x.shape[0], w.shape[1])
            torch.ops.fxwarm.m_grouped_fp8_gemm_nt_contiguous(a, a_sf, w, sf, d, ids)
            return d

        def forward(self, x):
            tokens = x.shape[0]
            x = self.linear(self.linear(x, self.qkv, self.qkv_sf)[:, :4096], self.o, self.o_sf)
            # rows as an engine pads them: each expert's share up to a multiple of 128
            rows = 128 * (
                (TOPK * tokens + torch.sym_min(TOPK * tokens, EXPERTS) * 127 + 127) // 128
            )
            index = torch.arange(rows, device=x.device)
            ids = ((index // 128) % EXPERTS).to(torch.int32)
            h = self.grouped(x[index % tokens], self.w13, self.w13_sf, ids)
            h = nn.functional.silu(h[:, :INTER]) * h[:, INTER:]
            return self.grouped(h, self.w2, self.w2_sf, ids)[:tokens]

    return Layer()


def token_counts(calls: int) -> list[int]:
    """Decode batches and prefill tails, in random order: as a server meets them."""
    rng = random.Random(0)
    found = {1, TOKENS} | {round(2 ** rng.uniform(0, 13)) for _ in range(4 * calls)}
    chosen = sorted(rng.sample(sorted(found), min(calls, len(found))))
    rng.shuffle(chosen)
    return chosen


def serve(backend: str, calls: int) -> dict:
    import torch

    import fxwarm
    import fxwarm.ops
    from fxwarm.backend import fxwarm as ours

    layer = make_layer()
    folder = Path(os.environ["DG_JIT_CACHE_DIR"]) / "cache"
    entries = lambda: len(list(folder.glob("*"))) if folder.is_dir() else 0  # noqa: E731
    compiled = torch.compile(
        layer,
        backend=ours if backend == "fxwarm" else "inductor",
        dynamic=None if backend == "fxwarm" else True,
    )
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        begin = time.perf_counter()
        compiled(x[:64])
        torch.cuda.synchronize()
        first, before = time.perf_counter() - begin, entries()
        compiled(x[:1])  # Dynamo's own graph for one row: no kernel's doing
        torch.cuda.synchronize()
        points = []
        for tokens in token_counts(calls):
            known, start = entries(), time.perf_counter()
            compiled(x[:tokens])
            torch.cuda.synchronize()
            took = 1e3 * (time.perf_counter() - start)
            start = time.perf_counter()
            compiled(x[:tokens])
            torch.cuda.synchronize()
            points.append(
                [
                    tokens,
                    round(took, 3),
                    round(1e3 * (time.perf_counter() - start), 3),
                    entries() - known,
                ]
            )
    found = {
        "first_call_s": round(first, 2),
        "kernels_at_first": before,
        "jit_after": entries() - before,
        "points": points,
    }
    if backend == "fxwarm":
        (report, *more) = fxwarm.reports()
        found |= {
            "kernels": len(fxwarm.plans()[0]), "status": report.status, "built": len(report.built), "launches": len(report.loaded),
            "build_s": round(report.build_seconds, 2), "wait_s": round(report.seconds, 2), "peak_bytes": report.peak_bytes,
            "kept_bytes": report.kept_bytes, "gaps": [str(g) for g in report.gaps], "notes": list(report.notes), "graphs": 1 + len(more),
        }  # fmt: skip
    return found


def summary(points: list) -> dict:
    times = sorted(p[1] for p in points)
    return {
        "calls": len(points), "p50_ms": round(statistics.median(times), 2), "p99_ms": round(times[int(0.99 * (len(times) - 1))], 2),
        "max_ms": times[-1], "stalls_over_100_ms": sum(t > 100 for t in times), "sum_s": round(sum(times) / 1e3, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.backend:
        print(json.dumps(serve(args.backend, args.calls)))
        return
    import torch

    from fxwarm.families.deep_gemm.library import find_library

    result = {
        "date": time.strftime("%Y-%m-%d"), "card": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "library": str(find_library({})), "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))},
        "command": f"python tests/gpu/serve.py --calls {args.calls}", "model": "one layer of Qwen3-30B-A3B-FP8, TP 1", "runs": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="fxwarm-serve-") as folder:
        for name, backend, cache in (
            ("fxwarm cold", "fxwarm", "a"),
            ("fxwarm warm", "fxwarm", "a"),
            ("inductor", "inductor", "b"),
        ):
            env = {
                **os.environ,
                "DG_JIT_CACHE_DIR": f"{folder}/{cache}/dg",
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{cache}/inductor",
            }
            env["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
            begin = time.perf_counter()
            done = subprocess.run(
                [sys.executable, __file__, "--backend", backend, "--calls", str(args.calls)],
                env=env,
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if not lines:
                print(name, "failed:", done.stderr[-3000:], flush=True)
                continue
            found = json.loads(lines[-1])
            result["runs"][name] = {
                **summary(found["points"]),
                **found,
                "process_s": round(time.perf_counter() - begin, 1),
            }
            if args.out:
                Path(args.out).write_text(json.dumps(result) + "\n")
            shown = {k: v for k, v in result["runs"][name].items() if k != "points"}
            print(name, json.dumps(shown), flush=True)
    print(
        f"{'':14}{'first call s':>13}{'p50 ms':>9}{'p99 ms':>10}{'max ms':>10}{'stalls':>8}{'JIT after':>11}"
    )
    for name, r in result["runs"].items():
        print(
            f"{name:14}{r['first_call_s']:>13}{r['p50_ms']:>9}{r['p99_ms']:>10}{r['max_ms']:>10}{r['stalls_over_100_ms']:>8}{r['jit_after']:>11}"
        )


if __name__ == "__main__":
    main()
