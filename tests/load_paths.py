"""Every way torch saves and loads a compiled model, one stage a process: what ran cold must come back warm.

    python tests/load_paths.py disk save FOLDER        a process that compiles and saves
    python tests/load_paths.py disk load FOLDER        a fresh process that loads and serves
    python tests/load_paths.py all FOLDER              both stages of each path, in processes of their own; a table last

Each stage prints one JSON line. ``jit`` are the JIT events of the served calls after the first one; it must be empty.
Needs nothing but torch, fxwarm and, for ``--model mhc`` and ``--model gemm``, the libraries; runs on any torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PATHS = (
    "disk",
    "mega_cache",
    "aot_compile",
    "aot_inputs",
    "precompile",
    "precompile_mega_cache",
    "package",
    "training",
)
MODELS = ("toy", "mhc", "gemm", "plain")
ROWS = (5, 1, 2, 16, 33, 64, 200)


def serve(call: Callable, make: Callable, events: Callable, expect: Callable | None) -> dict:
    """Call with every row count; return what JIT work came after the first call, and whether the results are right."""
    import torch

    import fxwarm

    begin = time.perf_counter()
    with torch.no_grad():
        call(make(ROWS[0]))
    first, before, right = time.perf_counter() - begin, len(events()), True
    with torch.no_grad():
        for rows in ROWS[1:]:
            x = make(rows)
            out = call(x)
            right &= expect is None or torch.allclose(
                out.float(), expect(x).float(), atol=1e-3, rtol=1e-2
            )
    reports = fxwarm.reports()
    return {
        "jit": [str(e) for e in events()[before:]],
        "right": bool(right),
        "first_s": round(first, 3),
        "reports": [r.status for r in reports],
        "built": sum(len(r.built) for r in reports),
        "loaded": sum(len(r.loaded) for r in reports),
        "keys": sorted({str(k) for p in fxwarm.plans() for k in p.keys}),
        "warm_keys": sorted({r.plan_key for r in reports}),
    }


def blind(path: str, folder: Path) -> dict:
    """Load what fxwarm saved in a process that has no fxwarm, with torch alone; the model holds no op of ours."""
    import torch

    class Blocker:
        def find_spec(self, name: str, *rest: object) -> None:
            if name.split(".", maxsplit=1)[0] in ("fxwarm", "passes"):
                raise ModuleNotFoundError(f"No module named {name.split('.', maxsplit=1)[0]!r}")

    sys.meta_path.insert(0, Blocker())
    from tests import plain_model

    model, x = plain_model.PlainModel().eval(), torch.ones(5, 8)
    if path == "aot_compile":
        with (folder / path).open("rb") as f:
            loaded = torch.compiler.load_compiled_function(f)
        return {"right": bool(torch.allclose(loaded(model, x), model(x)))}
    info = torch.compiler.load_cache_artifacts((folder / path).read_bytes())
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(caching_precompile=path.startswith("precompile")),
    ):
        right = torch.allclose(torch.compile(model)(x), model(x), atol=1e-3)
    assert "fxwarm" not in sys.modules
    return {"right": bool(right), "loaded": info is not None}


def train(model: Any, make: Callable, events: Callable, backend: Callable) -> dict:
    """Make one step with every row count; return what ``serve`` does, after the first step, of the gradients."""
    import torch

    import fxwarm

    def step(call: Callable, rows: int) -> torch.Tensor:
        x = make(rows).requires_grad_()
        call(x).pow(2).sum().backward()
        return x.grad

    begin, compiled = time.perf_counter(), torch.compile(model, backend=backend)
    step(compiled, ROWS[0])
    first, before, right = time.perf_counter() - begin, len(events()), True
    for rows in ROWS[1:]:
        right &= torch.allclose(step(compiled, rows), step(model, rows), atol=1e-3, rtol=1e-2)
    reports = fxwarm.reports()
    return {
        "jit": events()[before:],
        "right": bool(right),
        "first_s": round(first, 3),
        "reports": [r.status for r in reports],
        "gaps": [str(gap) for r in reports for gap in r.gaps],
        "built": sum(len(r.built) for r in reports),
        "loaded": sum(len(r.loaded) for r in reports),
        "keys": sorted({str(k) for p in fxwarm.plans() for k in p.keys}),
    }


def stage(path: str, what: str, folder: Path, model_name: str) -> dict:
    import torch

    from fxwarm.backend import fxwarm as backend
    from tests import load_models

    if hasattr(torch._dynamo.config, "enable_aot_compile"):
        torch._dynamo.config.enable_aot_compile = True  # 2.11 has it off
    model, make, events = getattr(load_models, model_name)()
    model = model.eval()
    file = folder / path
    if path in ("disk", "mega_cache"):
        if path == "mega_cache" and what == "load":
            torch.compiler.load_cache_artifacts(file.read_bytes())
        out = serve(torch.compile(model, backend=backend), make, events, model)
        if path == "mega_cache" and what == "save":
            data, _ = torch.compiler.save_cache_artifacts()
            file.write_bytes(data)
        return out
    if path == "aot_compile":
        if what == "save":
            x = make(5)
            torch._dynamo.mark_dynamic(x, 0)
            with torch.no_grad():
                compiled = torch.compile(
                    model, fullgraph=True, backend=backend
                ).forward.aot_compile(((x,), {}))
            compiled.save_compiled_function(str(file))
            return serve(lambda y: compiled(model, y), lambda r: make(max(r, 2)), events, model)
        with file.open("rb") as f:
            loaded = torch.compiler.load_compiled_function(f)
        return serve(lambda y: loaded(model, y), lambda r: make(max(r, 2)), events, model)
    if path == "aot_inputs":
        from torch._dynamo.aot_compile import ModelInput

        compiled = torch.compile(model, fullgraph=True, backend=backend)
        if what == "save":
            inputs = []
            for rows in (5, 1):
                x = make(rows)
                if rows > 1:
                    torch._dynamo.mark_dynamic(x, 0)
                inputs.append(ModelInput((x,), {}, []))
            with torch.no_grad():
                compiled._aot_compile(inputs)
            file.write_bytes(compiled._save_aot_compiled_module())
            return serve(compiled, make, events, model)
        compiled._load_aot_compiled_module(file.read_bytes())
        return serve(compiled, make, events, model)
    if path.startswith("precompile"):
        model = model if model_name == "plain" else load_models.Broken(model)
        if path.endswith("mega_cache") and what == "load":
            torch.compiler.load_cache_artifacts(file.read_bytes())
        with torch._dynamo.config.patch(caching_precompile=True):
            out = serve(torch.compile(model, backend=backend), make, events, model)
            if what == "save":
                if path.endswith("mega_cache"):
                    data, _ = torch.compiler.save_cache_artifacts()
                    file.write_bytes(data)
                else:
                    from torch._dynamo.precompile_context import PrecompileContext

                    PrecompileContext.save_to_dynamo_cache()
        return out
    if path == "training":
        if model_name == "toy":
            return train(*load_models.trained(), backend)
        return serve(torch.compile(model, backend=backend), make, events, model)
    if path == "package":
        import fxwarm as package

        file = file.with_suffix(".pt2")
        if what == "save":
            batch = torch.export.Dim("batch", min=1, max=8192)
            with torch.no_grad():
                program = torch.export.export(model, (make(5),), dynamic_shapes={"x": {0: batch}})
            package.save_package(program, str(file))
            return {"jit": [], "right": True}
        loaded = package.load_package(str(file))
        return serve(loaded, make, events, model)
    raise SystemExit(f"no path {path!r}; known are {', '.join(PATHS)}")


def environment(folder: Path, path: str, what: str) -> dict[str, str]:
    """Private caches; a path through one file finds Inductor's cache empty when it loads."""
    what = "load" if what == "blind" else what
    through_a_file = path not in ("disk", "precompile", "training")
    inductor = folder / (f"{path}-inductor-{what}" if through_a_file else f"{path}-inductor")
    kernels = folder / f"{path}-kernels"
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(inductor),
        "TOY_CACHE_DIR": str(kernels / "toy"),
        "TILELANG_CACHE_DIR": str(kernels / "tilelang"),
        "DG_JIT_CACHE_DIR": str(kernels / "deep_gemm"),
    }


def run_stage(path: str, what: str, folder: Path, model: str, **extra: str) -> dict:
    """Run one stage in a process of its own and return what it printed."""
    root = Path(__file__).resolve().parents[1]
    env = {**os.environ, **environment(folder, path, what), **extra}
    env["PYTHONPATH"] = os.pathsep.join([str(root), env.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        path,
        what,
        str(folder),
        "--model",
        model,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=root, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": done.stderr.strip()[-1500:]}
    return json.loads(lines[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", choices=[*PATHS, "all"])
    parser.add_argument(
        "what", help="save, load or blind (load without fxwarm); with all, the folder"
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--model", choices=MODELS, default="toy")
    args = parser.parse_args()
    if args.path != "all":
        args.folder.mkdir(parents=True, exist_ok=True)
        done = blind(args.path, args.folder) if args.what == "blind" else None
        print(json.dumps(done or stage(args.path, args.what, args.folder, args.model)))
        return 0
    import torch

    folder, bad = Path(args.what), 0
    folder.mkdir(parents=True, exist_ok=True)
    print(f"torch {torch.__version__}, model {args.model}")
    for path in PATHS:
        results = [run_stage(path, what, folder, args.model) for what in ("save", "load")]
        errors = [r["error"].splitlines()[-1] for r in results if "error" in r]
        good = not errors and all(not r["jit"] and r["right"] for r in results)
        bad += not good
        print(f"{path:24} {'warm' if good else 'NOT WARM'} {errors or [r['jit'] for r in results]}")
    return bad


if __name__ == "__main__":
    sys.exit(main())
