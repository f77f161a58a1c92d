"""Every way torch saves and loads a compiled model, one stage a process: what ran cold must come back warm.

    python tests/load_paths.py disk save FOLDER        a process that compiles and saves
    python tests/load_paths.py disk load FOLDER        a fresh process that loads and serves
    python tests/load_paths.py all FOLDER              both stages of each path, in processes of their own; a table
    python tests/load_paths.py all FOLDER --model gemm --paths package,cudagraphs --jobs 4

A stage prints one JSON line. With ``all`` each path prints its line, and FOLDER/MODEL.json has its result, as soon as
both its stages are done; a stage that outlasts its limit is ended, and its error shows where each of its threads was.
Needs nothing but torch, fxwarm and, for ``--model mhc`` and ``--model gemm``, the libraries; runs on any torch.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PATHS = (
    "package",  # the slowest first: with several jobs the rest runs beside them
    "package_op",
    "disk",
    "mega_cache",
    "aot_compile",
    "aot_inputs",
    "precompile",
    "precompile_mega_cache",
    "training",
    "cudagraphs",
)
MODELS = ("toy", "mhc", "gemm", "plain")
LIMITS = {"package": 240.0, "package_op": 240.0}
"""Seconds after which a stage is cut. A ``.pt2`` with DeepGEMM compiles for about 60 s on a GPU machine."""
LIMIT = 120.0


def paths_of(model: str) -> tuple[str, ...]:
    """Return the paths that say something of a model: the toy alone can be trained, only a GPU has CUDA graphs."""
    leave = {"gemm": {"training"}, "toy": {"cudagraphs"}}.get(model, {"training", "cudagraphs"})
    return tuple(path for path in PATHS if path not in leave)


def environment(folder: Path, path: str, what: str) -> dict[str, str]:
    """Private caches; a path through one file finds Inductor's cache empty when it loads."""
    what = "load" if what == "blind" else what  # without fxwarm
    through_a_file = path not in ("disk", "precompile", "training", "cudagraphs")
    inductor = folder / (f"{path}-inductor-{what}" if through_a_file else f"{path}-inductor")
    kernels = folder / f"{path}-kernels"
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(inductor),
        "TOY_CACHE_DIR": str(kernels / "toy"),
        "TILELANG_CACHE_DIR": str(kernels / "tilelang"),
        "DG_JIT_CACHE_DIR": str(kernels / "deep_gemm"),
    }


def run_stage(
    path: str, what: str, folder: Path, model: str, limit: float = 0.0, **extra: str
) -> dict:
    """Run one stage in a process of its own and return what it printed, or its error. ``limit`` is in seconds."""
    root, limit = Path(__file__).resolve().parents[1], limit or LIMITS.get(path, LIMIT)
    env = {**os.environ, **environment(folder, path, what), **extra}
    env["PYTHONPATH"] = os.pathsep.join([str(root), env.get("PYTHONPATH", "")])
    folder.mkdir(parents=True, exist_ok=True)
    here = str(Path(__file__).resolve())
    command = [sys.executable, here, path, what, str(folder)]
    command += ["--model", model, "--limit", str(limit)]
    out, err = folder / f"{path}-{what}.out", folder / f"{path}-{what}.err"
    begin = time.perf_counter()
    # Files, not pipes: a worker that outlives its parent would hold a pipe open, and we would wait for it.
    with out.open("w") as stdout, err.open("w") as stderr:
        child = subprocess.Popen(
            command, stdout=stdout, stderr=stderr, env=env, cwd=root, start_new_session=True
        )
        try:
            child.wait(limit + 30)  # it ends itself at the limit; this is for one that cannot
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):  # it and the workers that it left behind
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    seconds = round(time.perf_counter() - begin, 1)
    lines = [line for line in out.read_text().splitlines() if line.startswith("{")]
    if child.returncode or not lines:
        said = err.read_text(errors="replace").strip()
        why = f"cut after {limit:.0f} s" if seconds >= limit else f"rc {child.returncode}"
        stacks = said.find("Timeout (")  # as faulthandler begins
        return {"error": f"{why}: {said[stacks:] if stacks >= 0 else said[-1500:]}", "s": seconds}
    return {**json.loads(lines[-1]), "s": seconds}


def run_path(path: str, folder: Path, model: str, limit: float = 0.0) -> dict:
    """Run both stages of a path; return them and whether what came back was warm."""
    result: dict = {"date": str(date.today())}
    for what in ("save", "load"):
        result[what] = done = run_stage(path, what, folder, model, limit)
        if "error" in done:
            return {**result, "warm": False}
    stages = (result["save"], result["load"])
    return {**result, "warm": all(not done["jit"] and done["right"] for done in stages)}


def run_all(folder: Path, model: str, paths: tuple[str, ...], jobs: int, limit: float) -> int:
    """Run paths side by side; print and store each result as soon as it is known. Return how many are not warm."""
    import torch

    print(f"torch {torch.__version__}, model {model}, {jobs} at once", flush=True)
    # Each stage compiles with all CPUs that it may use: share them.
    os.environ.setdefault("FXWARM_JOBS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    results: dict = {"torch": torch.__version__, "model": model, "paths": {}}
    file = folder / f"{model}.json"
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run_path, path, folder, model, limit): path for path in paths}
        for future in as_completed(running):
            path, result = running[future], future.result()
            results["paths"][path] = result
            file.write_text(json.dumps(results, indent=1))
            _say(path, result)
    print(f"results in {file}")
    return sum(not result["warm"] for result in results["paths"].values())


def _say(path: str, result: dict) -> None:
    stages = {what: result[what] for what in ("save", "load") if what in result}
    seconds = ", ".join(f"{what} {done['s']} s" for what, done in stages.items())
    print(f"{path:22} {'warm' if result['warm'] else 'NOT WARM'}  {seconds}", flush=True)
    for what, done in stages.items():
        if "error" in done:
            print(f"  {what}: {done['error']}", flush=True)
        elif done["jit"] or not done["right"]:
            print(f"  {what}: right {done['right']}, jit {done['jit']}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", choices=[*PATHS, "all"])
    parser.add_argument(
        "what", help="save, load or blind (load without fxwarm); with all, the folder"
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--model", choices=MODELS, default="toy")
    parser.add_argument("--paths", help="with all: some of them, by comma")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds of a stage; by the path")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 4))
    args = parser.parse_args()
    if args.path == "all":
        paths = tuple(args.paths.split(",")) if args.paths else paths_of(args.model)
        if unknown := set(paths) - set(PATHS):
            parser.error(f"no path {', '.join(sorted(unknown))}; known are {', '.join(PATHS)}")
        folder = Path(args.what).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return run_all(folder, args.model, paths, args.jobs, args.limit)
    faulthandler.enable()
    limit = args.limit or LIMITS.get(args.path, LIMIT)
    faulthandler.dump_traceback_later(limit, exit=True)
    from tests import load_stages

    folder = args.folder.resolve()
    if args.what == "blind":
        done = load_stages.blind(args.path, folder)
    else:
        done = load_stages.stage(args.path, args.what, folder, args.model)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(done), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
