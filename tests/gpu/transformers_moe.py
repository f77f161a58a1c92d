"""transformers' own fp8 Qwen3-MoE with and without fxwarm: every forward over random batches, on a Hopper GPU.

    python tests/gpu/transformers_moe.py --out tests/gpu/results/transformers_moe.json

Four layers of the widths of Qwen3-30B-A3B-FP8 with random fp8 weights, linears and experts as transformers builds them
(``experts_implementation="deepgemm"``), the Hub's kernels replaced by the installed DeepGEMM. Each backend has a process
and caches of its own. Prefill is one sequence of up to ``--tokens`` tokens, decode one token of up to 256 sequences;
Dynamo makes a graph for each, both before the timing begins. Needs torch, transformers, fxwarm's dependencies and a
DeepGEMM on PYTHONPATH; no pytest. ``--small`` is a trial on a CPU, without any JIT.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
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

LAYERS, SEQUENCES = 4, 256
WIDTHS = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
SMALL = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def make_model(small: bool, device: str):
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        num_hidden_layers=LAYERS, vocab_size=1024, **(SMALL if small else WIDTHS)
    )
    config._experts_implementation = "deepgemm"
    with torch.device(device):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config(weight_block_size=(128, 128)))
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            if not old.is_meta:
                continue
            if old.dtype == torch.float8_e4m3fn:
                # 0.125 to 1.9, one third of them negative
                bits = torch.randint(0x20, 0x40, old.shape, dtype=torch.uint8, device=device)
                bits |= (torch.rand(old.shape, device=device) < 1 / 3).to(torch.uint8) << 7
                new = bits.view(torch.float8_e4m3fn)
            else:
                new = torch.full(old.shape, 0.02, dtype=old.dtype, device=device)
            setattr(module, name, torch.nn.Parameter(new, requires_grad=False))
    return model.eval().requires_grad_(False)


def batches(calls: int, tokens: int, sequences: int) -> list[tuple[int, int]]:
    """Return (sequences, tokens of each) of prefills and decodes, in random order: as a server meets them."""
    rng = random.Random(0)

    def sizes(most: int, count: int) -> list[int]:
        found = {2, most}
        while len(found) < min(count, most - 1):
            found.add(max(2, round(most ** rng.random())))
        return sorted(found)

    chosen = [(1, n) for n in sizes(tokens, calls - calls // 2)] + [
        (n, 1) for n in sizes(sequences, calls // 2)
    ]
    rng.shuffle(chosen)
    return chosen


def serve(backend: str, calls: int, tokens: int, small: bool) -> dict:
    import torch

    import fxwarm
    from fxwarm.backend import fxwarm as ours
    from fxwarm.substitute.transformers import answer_for, use_deep_gemm

    device = "cpu" if small else "cuda"
    wait = (lambda: None) if small else torch.cuda.synchronize
    folder = Path(os.environ["DG_JIT_CACHE_DIR"]) / "cache"
    entries = lambda: len(list(folder.glob("*"))) if folder.is_dir() else 0  # noqa: E731
    use_deep_gemm()
    model = make_model(small, device)
    dynamic = None if backend == "fxwarm" else True
    compiled = torch.compile(
        model, backend=ours if backend == "fxwarm" else "inductor", dynamic=dynamic
    )
    sequences = 16 if small else SEQUENCES
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, 1024, (max(tokens, sequences),), device=device, generator=generator)

    def forward(batch: int, length: int):
        begin = time.perf_counter()
        out = compiled(ids[: batch * length].view(batch, length).clone(), use_cache=False).logits
        wait()
        return 1e3 * (time.perf_counter() - begin), out

    asked = answer_for(fxwarm.Target.named("h200")) if small else contextlib.nullcontext()
    with torch.no_grad(), asked:
        first, _ = forward(1, min(64, tokens))
        before = entries()
        second, _ = forward(8, 1)  # one token of several sequences is another graph of Dynamo's
        points = []
        for batch, length in batches(calls, tokens, sequences):
            known = entries()
            took, out = forward(batch, length)
            jit = entries() - known
            digest = hashlib.sha256(out[:, -1].float().cpu().numpy().tobytes()).hexdigest()[:16]
            points.append(
                [batch, length, round(took, 3), round(forward(batch, length)[0], 3), jit, digest]
            )
    found = {
        "first_call_s": round(first / 1e3, 2), "second_graph_s": round(second / 1e3, 2), "kernels_at_first": before,
        "jit_after": sum(p[4] for p in points), "points": points,
    }  # fmt: skip
    if backend == "fxwarm":
        reports, plans = fxwarm.reports(), fxwarm.plans()
        found |= {
            "kernels": len({p.key for plan in plans for p in plan.planned}), "status": [r.status for r in reports],
            "built": sum(len(r.built) for r in reports), "launches": sum(len(r.loaded) for r in reports),
            "gaps": [str(g) for r in reports for g in r.gaps], "wait_s": round(sum(r.seconds for r in reports), 2),
            "shapes": sorted({str(c) for plan in plans for c in plan.shapes.calls}),
        }  # fmt: skip
    return found


def summary(points: list) -> dict:
    out = {}
    for name, some in (
        ("prefill", [p for p in points if p[0] == 1]),
        ("decode", [p for p in points if p[0] > 1]),
        ("all", points),
    ):
        times = sorted(p[2] for p in some)
        out[name] = {
            "calls": len(times), "p50_ms": round(statistics.median(times), 2), "p99_ms": round(times[int(0.99 * (len(times) - 1))], 2),
            "max_ms": times[-1], "stalls_over_100_ms": sum(t > 100 for t in times), "jit": sum(p[4] for p in some),
        }  # fmt: skip
    return out


def versions(small: bool) -> dict:
    import torch
    import transformers

    found = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if not small:
        from fxwarm.families.deep_gemm.library import find_library

        found |= {"library": str(find_library({})), "card": torch.cuda.get_device_name()}
    return found | {"cores": len(os.sched_getaffinity(0))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", "--json", default="")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--warm", action="store_true", help="run fxwarm a second time, on the caches of the first"
    )
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.backend:
        print(json.dumps(serve(args.backend, args.calls, args.tokens, args.small)))
        return
    result = {
        "date": time.strftime("%Y-%m-%d"), "versions": versions(args.small),
        "command": f"python tests/gpu/transformers_moe.py --calls {args.calls} --tokens {args.tokens}",
        "model": f"Qwen3MoeForCausalLM, {LAYERS} layers, {SMALL if args.small else WIDTHS}", "runs": {},
    }  # fmt: skip
    runs = [("fxwarm cold", "fxwarm", "a"), ("inductor", "inductor", "b")]
    runs[1:1] = [("fxwarm warm", "fxwarm", "a")] if args.warm else []
    passed = [
        "--calls",
        str(args.calls),
        "--tokens",
        str(args.tokens),
        *(["--small"] if args.small else []),
    ]
    with tempfile.TemporaryDirectory(prefix="fxwarm-transformers-") as folder:
        for name, backend, cache in runs:
            env = os.environ | {
                "DG_JIT_CACHE_DIR": f"{folder}/{cache}/dg",
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{cache}/inductor",
                "FXWARM_CACHE_DIR": f"{folder}/{cache}/fxwarm",
                "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]),
            }
            begin = time.perf_counter()
            command = [sys.executable, __file__, "--backend", backend, *passed]
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=300, check=False
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
            shown = {k: v for k, v in result["runs"][name].items() if k not in ("points", "shapes")}
            print(name, json.dumps(shown), flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps(result) + "\n")
    digests = [[p[5] for p in run["points"]] for run in result["runs"].values()]
    result["outputs_equal"] = len(digests) > 1 and all(d == digests[0] for d in digests)
    result["outputs_different"] = sum(len(set(each)) > 1 for each in zip(*digests, strict=True))
    print(
        "outputs equal to the last bit:",
        result["outputs_equal"],
        "different:",
        result["outputs_different"],
    )
    if args.out:
        Path(args.out).write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
