"""transformers' own fp8 Qwen3-MoE with and without fxwarm: every forward over random batches, on a Hopper GPU.

    python tests/gpu/transformers_moe.py --out tests/gpu/results/transformers_moe.json

Four layers of the widths of Qwen3-30B-A3B-FP8 with random fp8 weights, linears and experts as transformers builds them
(``experts_implementation="deepgemm"``), the Hub's kernels replaced by the installed DeepGEMM. Each backend has a process
and caches of its own. They compile at the same time and are timed one after the other. Prefill is one sequence of up to
``--tokens`` tokens, decode one token of up to 256 sequences; Dynamo makes a graph for each, both before the timing
begins. Both run with ``INDUCTOR`` and without cuDNN's attention, unless ``--cudnn``. What is measured is kept as it comes,
and at ``--budget`` seconds a run stops with what it has. Needs torch, transformers, fxwarm's dependencies and a DeepGEMM on
PYTHONPATH; no pytest. ``--small`` is a trial on a CPU, without any JIT.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:] = [
    str(CHECKOUT),
    *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent),
]

LAYERS, SEQUENCES = 4, 256
INDUCTOR = {"deterministic": True, "emulate_precision_casts": True}
"""Settings of Inductor's for both backends, so that results can be equal."""
TIMED = "timed"
"""File that says that the calls of the first backend have been timed."""
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


def serve(args: argparse.Namespace) -> None:
    """Run one backend up to the time ``args.end``; write what it measures to ``args.room``, after each call."""
    backend, calls, tokens, small = args.backend, args.calls, args.tokens, args.small
    room, end, cudnn = args.room, args.end, args.cudnn
    import torch
    from torch._dynamo.utils import counters

    import fxwarm
    from fxwarm.backend import fxwarm as ours
    from fxwarm.substitute.transformers import answer_for, use_deep_gemm

    device = "cpu" if small else "cuda"
    wait = (lambda: None) if small else torch.cuda.synchronize
    folder = Path(os.environ["DG_JIT_CACHE_DIR"]) / "cache"
    entries = lambda: len(list(folder.glob("*"))) if folder.is_dir() else 0  # noqa: E731
    found: dict = {"state": "cut", "points": []}

    def write() -> None:
        part = room / f"{backend}.part"
        part.write_text(json.dumps(found))
        part.replace(room / f"{backend}.json")

    # Inductor picks block sizes of reductions by timing, so that two runs of one backend differ in the last bit.
    # And a fusion keeps float32 where two kernels would round to bfloat16 between them.
    for name, value in INDUCTOR.items():
        setattr(torch._inductor.config, name, value)
    # cuDNN plans attention for each new length, which is a gap of fxwarm's; what its message says to do is done here.
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    use_deep_gemm()
    begin = time.perf_counter()
    model = make_model(small, device)
    wait()
    found["model_s"] = round(time.perf_counter() - begin, 2)
    write()
    compiled = torch.compile(model, backend=ours if backend == "fxwarm" else "inductor")
    sequences = 16 if small else SEQUENCES
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, 1024, (max(tokens, sequences),), device=device, generator=generator)

    def forward(batch: int, length: int, first: bool = False):
        begin = time.perf_counter()
        given = ids[: batch * length].view(batch, length).clone()
        if (
            first and backend != "fxwarm"
        ):  # the same two graphs as fxwarm's, so that results can be equal
            torch._dynamo.maybe_mark_dynamic(given, 0 if batch > 1 else 1)
        out = compiled(given, use_cache=False).logits
        wait()
        return 1e3 * (time.perf_counter() - begin), out

    asked = answer_for(fxwarm.Target.named("h200")) if small else contextlib.nullcontext()
    outputs = {}
    with torch.no_grad(), asked:
        found["first_call_s"] = round(forward(1, min(64, tokens), True)[0] / 1e3, 2)
        found["kernels_at_first"] = entries()
        write()
        # one token of several sequences is another graph of Dynamo's
        found["second_graph_s"] = round(forward(8, 1, True)[0] / 1e3, 2)
        write()
        (room / f"{backend}.compiled").touch()
        first = (room / "inductor.compiled") if backend == "fxwarm" else (room / TIMED)
        while not first.exists() and time.monotonic() < end - (130 if backend == "fxwarm" else 90):
            time.sleep(0.2)  # the compilers of one would slow down the calls of the other
        with fxwarm.no_jit("count") as seen:  # all libraries and Dynamo; it adds nothing to a call
            for batch, length in batches(calls, tokens, sequences):
                if time.monotonic() > end:
                    found["state"] = "out of time"
                    break
                known, traced = entries(), counters["stats"]["unique_graphs"]
                took, out = forward(batch, length)
                jit, traced = entries() - known, counters["stats"]["unique_graphs"] - traced
                digest = hashlib.sha256(out[:, -1].float().cpu().numpy().tobytes()).hexdigest()[:16]
                outputs[batch, length] = out[0, -1].float().cpu()
                again = round(forward(batch, length)[0], 3)
                found["points"].append([batch, length, round(took, 3), again, jit, digest, traced])
                write()
            else:
                found["state"] = "complete"
    (room / TIMED).touch()
    torch.save(outputs, room / f"{backend}.pt")
    found["events"] = Counter(f"{e.library} {e.kind}" for e in seen)
    found["jit_after"] = sum(p[4] for p in found["points"])
    if backend == "fxwarm":
        reports, plans = fxwarm.reports(), fxwarm.plans()
        found |= {
            "kernels": len({p.key for plan in plans for p in plan.planned}), "status": [r.status for r in reports],
            "built": sum(len(r.built) for r in reports), "launches": sum(len(r.loaded) for r in reports),
            "gaps": [str(g) for r in reports for g in r.gaps], "wait_s": round(sum(r.seconds for r in reports), 2),
            "shapes": sorted({str(c) for plan in plans for c in plan.shapes.calls}),
        }  # fmt: skip
    write()


def compare(room: Path, names: list[str]) -> dict:
    """Return how the last token's logits of the same batches differ between two runs."""
    import torch

    files = [room / f"{name}.pt" for name in names]
    if not all(f.exists() for f in files):
        return {"outputs_compared": 0}
    first, second = (torch.load(f, weights_only=False) for f in files)
    shared = sorted(first.keys() & second.keys())
    worst = [
        ((first[k] - second[k]).abs().max() / second[k].abs().max().clamp_min(1e-9)).item()
        for k in shared
    ]
    return {
        "outputs_compared": len(shared), "outputs_equal": sum(w == 0 for w in worst),
        "worst_relative_difference": max(worst, default=0.0), "finite": all(bool(torch.isfinite(v).all()) for v in first.values()),
    }  # fmt: skip


def summary(points: list) -> dict:
    out = {}
    for name, some in (
        ("prefill", [p for p in points if p[0] == 1]),
        ("decode", [p for p in points if p[0] > 1]),
        ("all", points),
    ):
        times = sorted(p[2] for p in some)
        if not times:
            continue
        out[name] = {
            "calls": len(times), "p50_ms": round(statistics.median(times), 2), "p99_ms": round(times[int(0.99 * (len(times) - 1))], 2),
            "max_ms": times[-1], "stalls_over_100_ms": sum(t > 100 for t in times), "jit": sum(p[4] for p in some),
            "retraces": sum(p[6] for p in some),
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
    parser.add_argument("--budget", type=float, default=285.0, help="seconds of one run")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--cudnn", action="store_true", help="leave attention to cuDNN")
    parser.add_argument("--backend", default="", help=argparse.SUPPRESS)
    parser.add_argument("--room", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.backend:
        serve(args)
        return
    result = {
        "date": time.strftime("%Y-%m-%d"), "versions": versions(args.small), "cudnn_attention": args.cudnn, "inductor": INDUCTOR,
        "command": f"python tests/gpu/transformers_moe.py --calls {args.calls} --tokens {args.tokens}" + " --cudnn" * args.cudnn,
        "model": f"Qwen3MoeForCausalLM, {LAYERS} layers, {SMALL if args.small else WIDTHS}", "runs": {},
    }  # fmt: skip
    result["card"] = result["versions"].get("card", "")

    def keep(room: Path, ended: dict) -> None:
        for name in BACKENDS:
            file = room / f"{name}.json"
            if file.exists():
                found = json.loads(file.read_text())
                result["runs"][name] = {**summary(found["points"]), **found, **ended.get(name, {})}
        if args.out:
            Path(args.out).write_text(json.dumps(result) + "\n")

    with tempfile.TemporaryDirectory(
        prefix="fxwarm-transformers-", ignore_cleanup_errors=True
    ) as folder:
        room, begin = Path(folder), time.monotonic()
        args.end = begin + args.budget
        running = {name: start(name, room, args) for name in BACKENDS}
        ended: dict = {}
        while running and time.monotonic() < begin + args.budget + 12:
            time.sleep(0.5)
            for name, (child, log) in list(running.items()):
                if child.poll() is not None:
                    del running[name]
                    (room / TIMED).touch()  # also where it failed
                    ended[name] = {"process_s": round(time.monotonic() - begin, 1)}
                    if child.returncode:
                        ended[name]["error"] = log.read_text()[-3000:]
                        print(name, "failed:", ended[name]["error"], flush=True)
            keep(room, ended)
        for child, _ in running.values():
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        keep(room, ended)
        result |= compare(room, BACKENDS)
        keep(room, ended)
    for name, run in result["runs"].items():
        shown = {k: v for k, v in run.items() if k not in ("points", "shapes")}
        print(name, json.dumps(shown), flush=True)
    print({k: v for k, v in result.items() if k.startswith(("outputs", "worst", "finite"))})


BACKENDS = ["fxwarm", "inductor"]


def start(name: str, room: Path, args: argparse.Namespace) -> tuple:
    """Start one run in a process and caches of its own; return it and its log."""
    caches = ("DG_JIT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FXWARM_CACHE_DIR")
    env = os.environ | {c: str(room / name / c.lower()) for c in caches}
    env["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--backend", name, "--room", str(room)]
    for option in ("calls", "tokens", "end"):
        command += [f"--{option}", str(getattr(args, option))]
    log = room / f"{name}.log"
    with log.open("w") as stream:
        child = subprocess.Popen(
            command + ["--small"] * args.small + ["--cudnn"] * args.cudnn,
            env=env,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    return child, log


if __name__ == "__main__":
    main()
