"""FlashInfer on a Hopper card: build, tune, sweep every token count, and once more in a second process.

    python tests/gpu/flashinfer.py --out flashinfer.json [--skip-fused-moe] [--only bmm_fp8,mono_moe]

Needs a checkout, torch with CUDA, nvcc, ninja and flashinfer-python; no pytest. Each layer is warmed in a process of
its own, cold, and in another one, warm; what goes wrong with one does not stop the next. Modules are built in the
background from the start. Of ``fused_moe_90`` only the bf16 part is built (32 of 247 translation units, about 5
minutes on 16 cores); its layer comes last. The figures are written after every layer, the table is printed last.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# this file is called flashinfer.py: it must not be what ``import flashinfer`` finds
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE]
sys.path.insert(0, str(HERE.parents[1]))

SLOWEST_MS = 5.0
QUICK = ("gemm", "trtllm_utils", "monomoe")
LAYERS: dict[str, tuple[str, float, float]] = {
    "bmm_fp8": ("quick", 60, 60),
    "mono_moe": ("quick", 60, 60),
    "fp8_blockscale_gemm_sm90": ("block_scale", 110, 45),
    "cutlass_fused_moe bf16": ("fused_moe", 75, 50),
}
"""Layer -> who builds for it, and the most seconds of its cold and its warm process."""
LAST = "cutlass_fused_moe bf16"


class Run:
    """All processes of one run, and the time that is left for them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.end = time.monotonic() + args.seconds
        self.folder = Path(args.workspace or tempfile.mkdtemp(prefix="fxwarm-flashinfer-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begun = time.monotonic()
        self.flags = link_flags(self.folder / "link", cuda_home())
        self.builders: dict[str, tuple[subprocess.Popen[bytes] | None, Path]] = {}
        self.builds: dict[str, Any] = {}

    def left(self) -> float:
        return self.end - time.monotonic()

    def start(self, result: Path, *flags: str) -> subprocess.Popen[bytes]:
        """Start one process of this run, in a session of its own."""
        home = cuda_home()
        env = {
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "FLASHINFER_LOGGING_LEVEL": "warning",
            "TQDM_DISABLE": "1",
            **({"CUDA_HOME": home} if home else {}),
            **({"FLASHINFER_EXTRA_LDFLAGS": self.flags} if self.flags else {}),
            **os.environ,
            "FLASHINFER_WORKSPACE_BASE": str(self.folder),
            "TRTLLM_DG_CACHE_DIR": str(self.folder / "trtllm"),
            "FXWARM_CACHE_DIR": str(self.folder / "fxwarm"),
        }
        if home:
            env["PATH"] = os.pathsep.join([env.get("PATH", ""), str(Path(home, "bin"))])
        command = [sys.executable, __file__, "--result", str(result), *flags]
        return subprocess.Popen(command, env=env, start_new_session=True)

    def build(self, who: str, names: tuple[str, ...], jobs: int) -> None:
        """Build modules in the background, unless ``--build-only`` did so in this workspace."""
        result = self.folder / f"build-{who}.json"
        known = read(result).get("modules", {})
        if set(names) <= set(known) and not any(m["error"] for m in known.values()):
            self.builders[who] = (None, result)
            return
        flags = ["--build", ",".join(names), "--jobs", str(jobs)]
        self.builders[who] = (self.start(result, *flags), result)

    def built(self, who: str, reserve: float) -> str:
        """Wait for a builder, but leave ``reserve`` seconds; return what went wrong, "" if nothing."""
        process, result = self.builders[who]
        problem = finish(process, max(1.0, self.left() - reserve)) if process is not None else ""
        found = read(result)
        self.builds |= found.get("modules", {})
        errors = [f"{n}: {m['error']}" for n, m in found.get("modules", {}).items() if m["error"]]
        return "; ".join(filter(None, [problem, found.get("error", ""), *errors]))

    def layer(self, name: str, phase: str, limit: float) -> dict[str, Any]:
        """Warm one layer in a process; return what is known of it, whatever became of the process."""
        result = self.folder / f"{name.replace(' ', '_')}-{phase}.json"
        limit = min(limit, self.left() - 3)
        if limit < 10:
            return {"status": "error", "failed": [f"no time was left for the {phase} process"]}
        begin = time.monotonic()
        problem = finish(self.start(result, "--layer", name, "--limit", str(limit)), limit)
        found = read(result)
        record = {"status": "error", **found.get("found", {})}
        record["process_s"] = round(time.monotonic() - begin, 1)
        record |= {key: found[key] for key in ("card", "versions") if key in found}
        problems = [p for p in (problem, found.get("error", "")) if p]
        if problems:
            record["status"] = "error"
            record["failed"] = [*record.get("failed", []), *problems]
        return record

    def stop(self) -> None:
        """End whatever still runs."""
        for process, _ in self.builders.values():
            if process is not None:
                end(process)


def cuda_home() -> str:
    """Return the toolkit that all processes use, so that one spelling of its path is in every build."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return named
    for home in ("/usr/local/cuda", *map(str, sorted(Path("/usr/local").glob("cuda-*")))):
        if Path(home, "bin", "nvcc").is_file():
            return home
    nvcc = shutil.which("nvcc")
    return str(Path(nvcc).resolve().parents[1]) if nvcc else ""


def link_flags(folder: Path, home: str) -> str:
    """Return the linker's flag for a folder with the libraries that the toolkit lacks, from torch's own; "" for none."""
    inside = [Path(home, *p) for p in (("lib64",), ("lib64", "stubs"))]
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec is not None else []
    roots.append(Path("/usr/lib/x86_64-linux-gnu"))
    found = False
    for name in ("cuda", "cudart", "cublas", "cublasLt", "nvrtc"):
        if any((place / f"lib{name}.so").exists() for place in inside):
            continue
        other = next((p for r in roots for p in sorted(r.rglob(f"lib{name}.so*"))), None)
        if other is not None:
            folder.mkdir(parents=True, exist_ok=True)
            link = folder / f"lib{name}.so"
            link.unlink(missing_ok=True)
            link.symlink_to(other)
            found = True
    return f"-L{folder}" if found else ""


def finish(process: subprocess.Popen[bytes], limit: float) -> str:
    """Wait for ``process`` at most ``limit`` seconds; return what went wrong, "" if nothing."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        end(process)
        return f"ended after {limit:.0f} s"
    return f"its process ended with {code}" if code else ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its compilers."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def run_layer(run: Run, name: str) -> dict[str, Any]:
    """Warm a layer cold, then warm; return one record with the seconds of both."""
    who, cold_limit, warm_limit = LAYERS[name]
    problem = run.built(who, cold_limit + warm_limit)
    if problem:
        print(f"{name}: {problem}", file=sys.stderr)
    cold = run.layer(name, "cold", cold_limit)
    warm = run.layer(name, "warm", warm_limit)
    modules = {n: m for n, m in run.builds.items() if n in modules_of(name)}
    build_s = max((m["seconds"] for m in modules.values()), default=0.0)
    return {
        **cold,
        "failed": [*([problem] if problem else []), *cold.get("failed", [])],
        "built": modules,
        "build_s": build_s,
        "cold_s": round(build_s + cold["seconds"], 2) if "seconds" in cold else None,
        "warm_s": warm.get("seconds"),
        "jit_after": cold.get("jit_after", 1) + warm.get("jit_after", 1),
        "slowest_call_ms": max(cold.get("slowest_call_ms", 1e9), warm.get("slowest_call_ms", 1e9)),
        "warm": warm,
    }


def modules_of(name: str) -> tuple[str, ...]:
    return {
        "bmm_fp8": ("gemm", "trtllm_utils"),
        "mono_moe": ("monomoe",),
        "fp8_blockscale_gemm_sm90": ("fp8_blockscale_gemm_90",),
        LAST: ("fused_moe_90", "trtllm_utils"),
    }[name]


def faults(m: dict[str, Any]) -> list[str]:
    """Return the promises that a layer did not keep."""
    warm = m["warm"]
    found = [f"{p}: {text}" for p, x in (("cold", m), ("warm", warm)) for text in [*x.get("failed", []), *x.get("gaps", [])]]  # fmt: skip
    if m.get("status") != "complete" or warm.get("status") != "complete":
        found.append(f"cold {m.get('status')}, warm {warm.get('status')}")
    if m["jit_after"]:
        found.append(f"in the sweep: {m.get('changed')} {warm.get('changed')} {m.get('warnings')}")
    if m["slowest_call_ms"] > SLOWEST_MS:
        found.append(f"a call took {m['slowest_call_ms']:.2f} ms")
    for name in ("built", "tuned", "measured_tactics", "modules_written", "block_kernels"):
        if warm.get(name):
            found.append(f"the warm process has {name}: {warm[name]}")
    if not (m.get("rng_kept") and warm.get("rng_kept")):
        found.append("the random state is another one afterwards")
    return found


def show(models: dict[str, Any]) -> bool:
    """Print the table; return whether every promise was kept."""
    print(
        f"{'layer':26} {'keys':>4} {'build s':>7} {'cold s':>7} {'warm s':>7} {'calls':>5} {'JIT':>3} {'max ms':>8} "
        f"{'error':>7} {'RNG':>4}  order"
    )
    for name, m in models.items():
        print(
            f"{name:26} {m.get('kernels', 0):4} {m['build_s']:7.1f} {m['cold_s'] or 0:7.2f} {m['warm_s'] or 0:7.2f} "
            f"{m.get('calls_after', 0):5} {m['jit_after']:3} {m['slowest_call_ms']:8.2f} "
            f"{m.get('relative_error', float('nan')):7.4f} {'kept' if m.get('rng_kept') else 'LOST':>4}  "
            f"{', '.join(m.get('order', []))}"
        )
    broken = {name: found for name, m in models.items() if (found := faults(m))}
    for name, found in broken.items():
        print(f"BROKEN {name}: {len(found)} faults", *(f"\n  {text[:500]}" for text in found[:8]))
    print("kept" if not broken else "", flush=True)
    return bool(models) and not broken


def main(args: argparse.Namespace) -> int:
    """Start the builders, warm one layer after the other, write the figures after each."""
    run, models, cores = Run(args), {}, len(os.sched_getaffinity(0))
    wanted = [n for n in LAYERS if (not args.only or n.partition(" ")[0] in args.only)]
    wanted = [n for n in wanted if n != LAST or not args.skip_fused_moe]
    needs = {LAYERS[name][0] for name in wanted}
    if "fused_moe" in needs:
        run.build("fused_moe", ("fused_moe_90",), max(1, cores - 3))
        needs.add("quick")  # its tuner's delay kernel
    if "quick" in needs:
        run.build("quick", QUICK, cores)
    if "block_scale" in needs:
        run.build("block_scale", ("fp8_blockscale_gemm_90",), cores)
    if args.build_only:
        problems = [run.built(who, 0.0) for who in run.builders]
        print(json.dumps(run.builds), *filter(None, problems), sep="\n")
        return 1 if any(problems) else 0
    try:
        for name in wanted:
            try:
                models[name] = run_layer(run, name)
            except Exception:
                traceback.print_exc()
                continue
            first = models[name]
            record = {
                "date": date.today().isoformat(),
                "card": first.get("card") or first["warm"].get("card"),
                "versions": first.get("versions") or first["warm"].get("versions"),
                "command": " ".join(["python", "tests/gpu/flashinfer.py", *sys.argv[1:]]),
                "seconds": round(time.monotonic() - run.begun, 1),
                "models": models,
            }
            if args.out:
                Path(args.out).write_text(json.dumps(record, indent=1))
            print(f"{record['seconds']:.0f} s: {name} done", file=sys.stderr, flush=True)
    finally:
        run.stop()
    return 0 if show(models) else 1


def child(args: argparse.Namespace) -> int:
    """Be one process of a run: build, or warm one layer."""
    import faulthandler

    if args.limit:
        faulthandler.dump_traceback_later(max(1.0, args.limit - 4))
    result = Path(args.result)
    try:
        from tests.gpu import flashinfer_phase as phase

        if args.build:
            found = phase.build(args.build.split(","), args.jobs)
            result.write_text(json.dumps({"modules": found}))
        else:
            phase.run_case(args.layer, result)
    except BaseException as error:
        traceback.print_exc()
        told = {
            "error": f"{type(error).__name__}: {error}"[:800],
            "traceback": traceback.format_exc(),
        }
        result.write_text(json.dumps({**read(result), **told}))
        return 1
    return 0


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="where to write the figures, as JSON")
    parser.add_argument(
        "--skip-fused-moe", action="store_true", help="leave out the 5 minutes of fused_moe_90"
    )
    parser.add_argument(
        "--build-only", action="store_true", help="build the modules into --workspace, warm nothing"
    )
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of layers")
    parser.add_argument("--seconds", type=float, default=545, help="most seconds of the whole run")
    parser.add_argument("--workspace", help="folder of all caches; a fresh one by default")
    for name in ("--result", "--build", "--layer"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    sys.exit(child(arguments) if arguments.result else main(arguments))
