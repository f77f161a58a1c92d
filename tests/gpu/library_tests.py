"""DeepGEMM's and TileKernels' own test scripts, each library call of theirs compiled with fxwarm, on a Hopper GPU.

    python tests/gpu/library_tests.py --scripts DIR --out tests/gpu/results/library_tests.json

DIR holds ``DeepGEMM*/test_*.py`` (the tests folder of its repository) and ``TileKernels*/mhc/test_*.py``: they are not
part of fxwarm. Each test function runs in a process and caches of its own, several at a time. A call ``deep_gemm.f(...)``
of the script goes through ``torch.compile(f, backend="fxwarm")``, so that our op, its fake and its plan meet inputs that
nobody here chose, and the script's own assertions judge the numbers. A call that wants gradients stays the library's; the
op is held against it bit for bit. A function's first graph has dynamic sizes and all kernels of their range; its others
have the sizes of the call, so that many cases fit in the time. What is slow is sampled: a script's cases come in a random
order, its benchmarks are one more call, and at its time limit a test stops with what it has. Results are written after
each test.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
# this file's folder holds files with the names of libraries: it must not be where imports look first
sys.path[:] = [
    str(CHECKOUT),
    *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent),
]

SKIPPED = {
    "test_mega_moe.py": "it needs 8 GPUs of one process group",
    "test_legacy.py": "its kernels are Triton's",
    "test_lazy_init.py": "it calls no kernel",
    "test_sanitizer.py": "it runs the other scripts under compute-sanitizer",
    "test_layout.py": "its functions lay out scales and have no op: a plain call of one is a gap",
    "test_multilayer_recompute.py": "its kernel has the number of layers in it; no op, a gap",
}
FIRST = ("test_fp8_fp4.py", "test_attention.py", "test_einsum.py")
"""Scripts with the most to compile begin first."""
HOST = (
    "get_",
    "set_",
    "transform_",
    "cublaslt_",
    "SymmBuffer",
    "mega",
    "legacy",
    "utils",
    "testing",
)
"""Beginnings of names of DeepGEMM that compile nothing, or that the scripts call to prepare inputs."""
LARGE = {"m_grouped": 65536, "k_grouped": 65536, "mqa": 65536}
"""Bound of the dynamic sizes of a test whose name holds a part: grouped rows, keys."""
BY_BATCH = {"get_paged_mqa_logits_metadata"}
"""Functions with a kernel for each 32 of the batch: for all up to LARGE there are 2,048 of them."""
RUNS = {"get_paged_mqa_logits_metadata"}
"""Names that begin as HOST's do and are kernels."""


class Stop(BaseException):
    """The time of a test is over."""


class Runner:
    """Compiles the library calls of one test function, and counts what came of them."""

    def __init__(self, limit: float, device: str) -> None:
        self.end, self.device = time.monotonic() + limit, device
        self.calls: Counter[str] = Counter()
        self.jit: Counter[str] = Counter()
        self.compiling: Counter[str] = Counter()
        self.unequal: list[str] = []
        self.compared = 0
        self.plain = False
        self.graphs: dict[Any, Any] = {}
        self.dynamic: dict[str, Any] = {}
        self.functions: dict[int, Any] = {}

    def wrap(self, name: str, function: Any, *, gradients: bool = False) -> Any:
        """Return what the script gets for ``function``: the same object each time that it asks."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if time.monotonic() > self.end:
                raise Stop
            if self.plain:
                return function(*args, **kwargs)
            self.calls[name] += 1
            if gradients and any(t.requires_grad for t in tensors((args, kwargs))):
                return self.compare(name, function, args, kwargs)
            return self.run(name, function, args, kwargs)

        return self.functions.setdefault(id(function), call)

    def run(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        import torch

        import fxwarm

        key = name, signature(args, kwargs)
        dynamic = name not in BY_BATCH and self.dynamic.setdefault(name, key) == key
        if not dynamic:
            key = name, sizes(args, kwargs)
        if key not in self.graphs:
            # a code object of its own, so that each weight has its own place in Dynamo's cache
            def forward(*a: Any, **k: Any) -> Any:
                return function(*a, **k)

            code = forward.__code__.replace(co_name=f"{name}_{len(self.graphs)}")
            forward = types.FunctionType(
                code, forward.__globals__, code.co_name, None, forward.__closure__
            )
            self.graphs[key] = torch.compile(
                forward, backend=fxwarm_backend(), dynamic=None if dynamic else False
            )
        warmed = len(fxwarm.reports())
        with torch.no_grad(), fxwarm.no_jit("count") as seen:
            out = self.graphs[key](*args, **kwargs)
        # a call that compiled a graph warmed its kernels too; in any other nothing may happen
        into = self.jit if len(fxwarm.reports()) == warmed else self.compiling
        into.update(f"{e.library} {e.kind} in {name}" for e in seen if e.library in LIBRARIES)
        return out

    def compare(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the library's own result, with its gradient, and hold the op's against it."""
        import torch

        detached = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.detach(), (args, kwargs)
        )
        ours = tensors(self.run(name, function, *detached))
        theirs = function(*args, **kwargs)
        self.compared += 1
        for a, b in zip(ours, tensors(theirs), strict=True):
            if not torch.equal(a, b):
                worst = (a.float() - b.float()).abs().max().item()
                self.unequal.append(f"{name}: {tuple(a.shape)} differs by {worst:.3g}")
        return theirs


def fxwarm_backend() -> Any:
    """Return the backend itself: a checkout that is not installed has no entry point of that name."""
    from fxwarm.backend import fxwarm

    return fxwarm


LIBRARIES = ("deep_gemm", "tilelang", "flashinfer")


def tensors(tree: Any) -> list[Any]:
    import torch

    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def signature(args: Any, kwargs: Any) -> Any:
    """Return what tells one weight's calls from another's: all but the leading dims, and B's whole shape."""
    import torch

    def of(value: Any, whole: bool, inner: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape) if whole else (value.dim(), *value.shape[1:])
            return str(value.dtype), shape, whole or value.stride(-1) == 1
        if isinstance(value, list | tuple):
            return tuple(of(v, whole, True) for v in value)
        return type(value).__name__ if isinstance(value, int) and not inner else str(value)

    ranked = [i for i, a in enumerate(args) if not isinstance(a, str)]
    second = ranked[1] if len(ranked) > 1 else -1
    return (
        tuple(of(a, i == second) for i, a in enumerate(args)),
        tuple((k, of(v, False)) for k, v in sorted(kwargs.items())),
    )


def sizes(args: Any, kwargs: Any) -> Any:
    """Return all that a graph of constant sizes is made for."""
    import torch

    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    return str(spec), tuple(
        (str(x.dtype), tuple(x.shape), x.stride()) if isinstance(x, torch.Tensor) else str(x)
        for x in leaves
    )


class View(types.ModuleType):
    """A library as a script sees it: each function compiled, all else as it is."""

    def __init__(self, module: Any, runner: Runner) -> None:
        super().__init__(module.__name__)
        self._module, self._runner = module, runner

    def __getattr__(self, name: str) -> Any:
        module = self._module
        # sgl-deep-gemm has in utils what upstream has at the top as well
        found = getattr(module, name, None) or getattr(module.utils, name)
        prepares = name.startswith(HOST) and name not in RUNS
        if not callable(found) or isinstance(found, type) or prepares or name.startswith("_"):
            return found
        return self._runner.wrap(name, found)


def execute(path: Path, device: str) -> types.ModuleType:
    source = path.read_text().replace("'cuda'", f"'{device}'")
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def load_script(path: Path, runner: Runner, deep_gemm: Any) -> types.ModuleType:
    """Return the script as a module that sees compiled functions."""
    sys.path.insert(0, str(path.parent))  # for its `generators`
    if runner.device != "cuda":
        for helper in path.parent.glob("gen*.py"):
            sys.modules[helper.stem] = execute(helper, runner.device)
    module = execute(path, runner.device)
    for name, value in list(vars(module).items()):
        if value is deep_gemm and deep_gemm is not None:
            setattr(module, name, View(value, runner))
        elif str(getattr(value, "__module__", "")).startswith("tile_kernels.modeling") or (
            getattr(value, "__module__", "") == "tile_kernels.mhc.post_kernel"
        ):
            setattr(module, name, runner.wrap(name, value, gradients=True))
        elif name.startswith("enumerate_"):
            setattr(module, name, shuffled(value))
    for name in ("bench_kineto", "bench"):
        if hasattr(module, name):
            setattr(module, name, once)
    return module


def shuffled(cases: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "variants" in cases.__name__:
            return cases(*args, **kwargs)
        found = list(cases(*args, **kwargs))
        random.Random(0).shuffle(found)
        return iter(found)

    return call


def once(function: Any, names: Any = "", *args: Any, **kwargs: Any) -> Any:
    """In the place of a benchmark: one more call, which must find all kernels warm."""
    function()
    return (1.0,) * len(names) if isinstance(names, tuple) else 1.0


def cases_of(test: Any) -> list[dict[str, Any]]:
    """Return the arguments that pytest would give ``test``, in a random order."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = [n.strip() for n in mark.args[0].split(",")]
            axes.append(
                [dict(zip(names, v if len(names) > 1 else (v,), strict=True)) for v in mark.args[1]]
            )
    found = [
        {k: v for part in parts for k, v in part.items()} for parts in itertools.product(*axes)
    ]
    random.Random(0).shuffle(found)
    return found


def run_test(path: Path, name: str, limit: float, device: str, out: Path) -> None:
    """Run one test function of one script; write what it found, also while it runs."""
    import torch

    import fxwarm
    from fxwarm import substitute

    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 4096
    runner = Runner(limit, device)
    counters = torch._dynamo.utils.counters
    found: dict[str, Any] = {"state": "cut", "cases": 0}
    gaps: set[str] = set()  # a call that is left alone may leave no graph, and so no report

    def write() -> None:
        reports = fxwarm.reports()
        gaps.update(map(str, (*substitute.take_refusals(), *(g for r in reports for g in r.gaps))))
        left = {n for n in runner.calls if any(f".{n}: " in gap for gap in gaps)}
        jit = {k: n for k, n in runner.jit.items() if k.rpartition(" ")[2] not in left}
        found.update(
            calls=dict(runner.calls), graphs=len(runner.graphs), dynamic_graphs=len(runner.dynamic), compared_bit_for_bit=runner.compared,
            unequal=runner.unequal[:8], jit_after=sum(jit.values()), jit_events=jit, jit_of_gaps=sum(runner.jit.values()) - sum(jit.values()), jit_in_compiling_calls=dict(runner.compiling),
            graph_breaks={k[:160]: n for k, n in counters["graph_break"].items()}, ops=sorted({c.op for p in fxwarm.plans() for c in p.shapes.calls}),
            kernels=len({p.key for plan in fxwarm.plans() for p in plan.planned}),
            built=sum(len(r.built) for r in reports), loaded=sum(len(r.loaded) for r in reports),
            failed=[str(s) for r in reports for s in r.failed][:8], gaps=sorted(gaps)[:20],
        )  # fmt: skip
        out.write_text(json.dumps(found))

    def beat() -> None:
        while True:
            time.sleep(4)
            with contextlib.suppress(Exception):  # the lists change while they are read
                write()

    threading.Thread(target=beat, daemon=True).start()
    begin = time.monotonic()
    try:
        deep_gemm = library_for(path)
        test = getattr(load_script(path, runner, deep_gemm), name)
        found["import_s"] = round(time.monotonic() - begin, 1)
        runner.end = time.monotonic() + limit
        found |= attempt(test, found)
        if found["state"] == "passed" and not runner.calls:
            found |= {
                "state": "skipped",
                "why": "it called nothing: the script leaves it to another GPU",
            }
        if found["state"] in ("failed", "error"):  # is it ours, or would it fail without us?
            runner.plain, runner.end = True, time.monotonic() + limit / 3
            found["without_fxwarm"] = attempt(test, {"cases": 0})["state"]
    except Exception as error:
        found |= {
            "state": "error",
            "why": f"{type(error).__name__}: {error}"[-600:],
            "trace": traceback.format_exc()[-1500:],
        }
    found["seconds"] = round(time.monotonic() - begin, 1)
    write()
    os._exit(0)  # no library's own shutdown can undo what is written


def attempt(test: Any, found: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)  # the same inputs with fxwarm and without
    random.seed(0)
    try:
        if hasattr(test, "pytestmark"):
            cases = cases_of(test)
            found["cases_of"] = len(cases)
            for case in cases:
                test(**case)
                found["cases"] += 1
        else:
            test()
        return {"state": "passed"}
    except Stop:
        return {"state": "stopped", "why": "its time was over; what had run passed"}
    except AssertionError as error:
        return {
            "state": "failed",
            "why": str(error)[-600:],
            "trace": traceback.format_exc()[-1500:],
        }
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        return {"state": "error", "why": words[-600:], "trace": traceback.format_exc()[-1500:]}


def library_for(path: Path) -> Any:
    """Import the library that a script tests; return deep_gemm, or None for TileKernels."""
    if "TileKernels" not in str(path):
        return importlib.import_module("deep_gemm")
    if importlib.util.find_spec("tilelang.utils.target") is None:  # TileKernels #24
        sys.modules["tilelang.utils.target"] = importlib.import_module("tilelang.backend.target")
    importlib.import_module("tile_kernels.modeling.mhc.ops")
    return None


def tests_in(path: Path) -> list[str]:
    """Return the names of the test functions of a script, without running it."""
    import ast

    nodes = ast.parse(path.read_text()).body
    names = [n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    marked = {
        n.name
        for n in nodes
        if isinstance(n, ast.FunctionDef)
        and any("benchmark" in ast.unparse(d) for d in n.decorator_list)
    }
    return [n for n in names if n not in marked and n != "test_cublaslt_gemm"]


def one(path: Path, name: str, limit: float, device: str, folder: Path) -> dict[str, Any]:
    """Run one test in a process of its own; return what it wrote, whatever became of it."""
    room = folder / f"{path.parent.name}-{path.stem}-{name}"
    room.mkdir(parents=True)
    caches = ("DG_JIT_CACHE_DIR", "TILELANG_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FXWARM_CACHE_DIR")  # fmt: skip
    env = os.environ | {c: str(room / c.lower()) for c in caches}
    bound = next((size for part, size in LARGE.items() if part in name), 8192)
    env |= {"FXWARM_MAX_SIZE": str(bound), "DG_MQA_NUM_CASES": "6", "FXWARM_JOBS": "6", "TILELANG_PRINT_ON_COMPILATION": "0"}  # fmt: skip
    env["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    out, log = room / "found.json", room / "log.txt"
    command = [sys.executable, __file__, "--one", str(path), name, "--limit", str(limit)]
    command += ["--device", device, "--out", str(out)]
    with log.open("w") as stream:
        child = subprocess.Popen(
            command, env=env, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            child.wait(limit * 1.4 + 40)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    found = json.loads(out.read_text()) if out.exists() else {"state": "error"}
    if found["state"] == "error" and "why" not in found:
        found["why"] = log.read_text()[-1500:]
    if found["state"] == "cut":
        found["why"] = f"ended with {child.returncode}: {log.read_text()[-600:]}"
    return found


def versions() -> dict[str, Any]:
    from importlib import metadata

    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}  # fmt: skip
    if torch.cuda.is_available():
        found["card"] = torch.cuda.get_device_name()
    for name in ("torch", "sgl-deep-gemm", "tokenspeed-deepgemm", "tilelang", "tile-kernels"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main() -> None:
    from tests.gpu.figures import write

    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--scripts", type=Path, help="folder of the libraries' test folders")
    parser.add_argument("--out", "--json", type=Path)
    parser.add_argument(
        "--limit", type=float, default=100.0, help="seconds of one test, after its imports"
    )
    parser.add_argument(
        "--total", type=float, default=300.0, help="seconds after which none begins"
    )
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of tests")
    parser.add_argument("--dry", action="store_true", help="list the tests, run none")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_test(Path(args.one[0]), args.one[1], args.limit, args.device, args.out)
        return
    scripts = [*args.scripts.glob("DeepGEMM*/test_*.py"), *args.scripts.glob("TileKernels*/mhc/test_*.py")]  # fmt: skip
    scripts.sort(key=lambda p: (p.name not in FIRST, str(p)))
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "command": "python tests/gpu/library_tests.py --scripts DIR",
        "versions": versions(), "limit_s": args.limit, "tests": {},
    }  # fmt: skip
    result["card"] = result["versions"].get("card", "")
    jobs = []
    for path in scripts:
        where = str(path.relative_to(args.scripts))
        if path.name in SKIPPED:
            result["tests"][where] = {"state": "skipped", "why": SKIPPED[path.name]}
            continue
        jobs += [(path, n) for n in tests_in(path) if not args.only or any(o in f"{where}::{n}" for o in args.only)]  # fmt: skip
    begin, lock = time.monotonic(), threading.Lock()

    def work(job: tuple[Path, str], folder: Path) -> None:
        path, name = job
        where = f"{path.relative_to(args.scripts)}::{name}"
        if args.dry:
            found: dict[str, Any] = {"state": "listed"}
        elif time.monotonic() - begin > args.total - args.limit:
            found = {"state": "skipped", "why": "the time of all tests was over"}
        else:
            found = one(path, name, args.limit, args.device, folder)
        with lock:
            result["tests"][where] = found
            result.update(totals(result["tests"]), seconds=round(time.monotonic() - begin, 1))
            if args.out:
                write(args.out, result)
            shown = {k: found[k] for k in ("state", "cases", "calls", "kernels", "jit_after", "why") if found.get(k)}  # fmt: skip
            print(where, json.dumps(shown)[:400], flush=True)

    with (
        tempfile.TemporaryDirectory(
            prefix="fxwarm-library-tests-", ignore_cleanup_errors=True
        ) as room,
        ThreadPoolExecutor(args.workers) as pool,
    ):
        list(pool.map(lambda job: work(job, Path(room)), jobs))
    print(json.dumps({k: v for k, v in result.items() if k not in ("tests", "versions")}))


def totals(tests: dict[str, Any]) -> dict[str, Any]:
    ran = [t for t in tests.values() if t.get("calls")]
    return {
        "states": dict(Counter(t["state"] for t in tests.values())),
        "calls_after": sum(sum(t["calls"].values()) for t in ran),
        "kernels": sum(t["kernels"] for t in ran),
        "jit_after": sum(t["jit_after"] for t in ran),
        "graph_breaks": sum(sum(t["graph_breaks"].values()) for t in ran),
        "compared_bit_for_bit": sum(t["compared_bit_for_bit"] for t in ran),
        "unequal": sum(len(t["unequal"]) for t in ran),
    }


if __name__ == "__main__":
    main()
