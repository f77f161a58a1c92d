"""What one process does on one of the ways in which torch saves and loads a compiled model; see ``load_paths``.

Each stage returns a dict; ``jit`` are the JIT events of the served calls after the first one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

    model, x, loaded = plain_model.PlainModel().eval(), torch.ones(5, 8), True
    if hasattr(torch._dynamo.config, "enable_aot_compile"):
        torch._dynamo.config.enable_aot_compile = True  # 2.11 has it off
    if path == "aot_compile":
        with (folder / path).open("rb") as f:
            function = torch.compiler.load_compiled_function(f)
        call = lambda x: function(model, x)  # noqa: E731
    elif path == "aot_inputs":
        call = torch.compile(model, fullgraph=True)
        call._load_aot_compiled_module((folder / path).read_bytes())
    elif path.startswith("package"):
        call = torch._inductor.aoti_load_package(str(folder / f"{path}.pt2"))
    else:
        if path.endswith("mega_cache"):
            data = (folder / path).read_bytes()
            loaded = torch.compiler.load_cache_artifacts(data) is not None
        call = torch.compile(model)
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(caching_precompile=path.startswith("precompile")),
    ):
        right = torch.allclose(call(x), model(x), atol=1e-3)
    assert "fxwarm" not in sys.modules
    return {"right": bool(right), "loaded": loaded}


def train(model: Any, make: Callable, events: Callable) -> dict:
    """Make one step with every row count; return what ``serve`` does, after the first step, of the gradients."""
    import torch

    import fxwarm

    def step(call: Callable, rows: int) -> torch.Tensor:
        x = make(rows).requires_grad_()
        call(x).pow(2).sum().backward()
        return x.grad

    begin, compiled = time.perf_counter(), torch.compile(model, backend=_backend())
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
    """Run ``what`` ("save" or "load") of a path and return what was seen."""
    import torch

    from tests import load_models

    if hasattr(torch._dynamo.config, "enable_aot_compile"):
        torch._dynamo.config.enable_aot_compile = True  # 2.11 has it off
    if path == "training":
        return train(*load_models.trained())
    model, make, events = getattr(load_models, model_name)()
    return _STAGES[path](what == "save", folder / path, model.eval(), make, events)


def _disk(saves: bool, file: Path, model: Any, make: Callable, events: Callable) -> dict:
    import torch

    return serve(torch.compile(model, backend=_backend()), make, events, model)


def _mega_cache(saves: bool, file: Path, model: Any, make: Callable, events: Callable) -> dict:
    import torch

    if not saves:
        torch.compiler.load_cache_artifacts(file.read_bytes())
    out = serve(torch.compile(model, backend=_backend()), make, events, model)
    if saves:
        data, _ = torch.compiler.save_cache_artifacts()
        file.write_bytes(data)
    return out


def _aot_compile(saves: bool, file: Path, model: Any, make: Callable, events: Callable) -> dict:
    import torch

    if saves:
        x = make(5)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, backend=_backend())
            function = compiled.forward.aot_compile(((x,), {}))
        function.save_compiled_function(str(file))
    else:
        with file.open("rb") as f:
            function = torch.compiler.load_compiled_function(f)
    # Its one graph has a symbolic batch, which is never 1.
    return serve(lambda y: function(model, y), lambda r: make(max(r, 2)), events, model)


def _aot_inputs(saves: bool, file: Path, model: Any, make: Callable, events: Callable) -> dict:
    import torch
    from torch._dynamo.aot_compile import ModelInput

    compiled = torch.compile(model, fullgraph=True, backend=_backend())
    if saves:
        inputs = []
        for rows in (5, 1):
            x = make(rows)
            if rows > 1:
                torch._dynamo.mark_dynamic(x, 0)
            inputs.append(ModelInput((x,), {}, []))
        with torch.no_grad():
            compiled._aot_compile(inputs)
        file.write_bytes(compiled._save_aot_compiled_module())
    else:
        compiled._load_aot_compiled_module(file.read_bytes())
    return serve(compiled, make, events, model)


def _precompile(saves: bool, file: Path, model: Any, make: Callable, events: Callable) -> dict:
    import torch

    from tests import load_models

    through_mega_cache = file.name.endswith("mega_cache")
    if not isinstance(model, load_models.PlainModel):
        model = load_models.Broken(model)
    if through_mega_cache and not saves:
        torch.compiler.load_cache_artifacts(file.read_bytes())
    with torch._dynamo.config.patch(caching_precompile=True):
        out = serve(torch.compile(model, backend=_backend()), make, events, model)
        if saves and through_mega_cache:
            data, _ = torch.compiler.save_cache_artifacts()
            file.write_bytes(data)
        elif saves:
            from torch._dynamo.precompile_context import PrecompileContext

            PrecompileContext.save_to_dynamo_cache()
    return out


def _package(saves: bool, file: Path, model: Any, make: Callable, events: Callable) -> dict:
    """The plan in the package's metadata; for ``package_op`` in an op, and torch alone loads it."""
    import torch

    import fxwarm
    import fxwarm.packages  # it defines the op

    file, embed = file.with_suffix(".pt2"), file.name == "package_op"
    if saves:
        batch = torch.export.Dim("batch", min=1, max=8192)
        with torch.no_grad():
            program = torch.export.export(model, (make(5),), dynamic_shapes={"x": {0: batch}})
        fxwarm.save_package(program, str(file), embed=embed)
        return {"jit": [], "right": True}
    load = torch._inductor.aoti_load_package if embed else fxwarm.load_package
    return serve(load(str(file)), make, events, model)


def _cudagraphs(saves: bool, file: Path, model: Any, make: Callable, events: Callable) -> dict:
    """``reduce-overhead``: each size is run, then captured, then replayed; all of it must find every kernel warm."""
    import torch

    import fxwarm

    captures: list[tuple[int, set[str]]] = []
    enter = torch.cuda.graph.__enter__

    def note_and_enter(graph: Any) -> Any:
        captures.append((len(events()), {report.status for report in fxwarm.reports()}))
        return enter(graph)

    compiled = torch.compile(model, backend=_backend(), mode="reduce-overhead")

    def call(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(x)
        return out.clone()

    torch.cuda.graph.__enter__ = note_and_enter
    try:
        out = serve(call, make, events, model)
    finally:
        torch.cuda.graph.__enter__ = enter
    assert captures, "nothing was captured"
    # At each capture everything was built, and every warmup until then was complete.
    cold = [seen for seen in captures if seen != (len(events()), {"complete"})]
    right = out["right"] and not cold
    return {**out, "captures": len(captures), "cold": [str(seen) for seen in cold], "right": right}


_STAGES: dict[str, Callable[..., dict]] = {
    "disk": _disk,
    "mega_cache": _mega_cache,
    "aot_compile": _aot_compile,
    "aot_inputs": _aot_inputs,
    "precompile": _precompile,
    "precompile_mega_cache": _precompile,
    "package": _package,
    "package_op": _package,
    "cudagraphs": _cudagraphs,
}


def _backend() -> Callable:
    from fxwarm.backend import fxwarm

    return fxwarm
