"""fxwarm: make sure that no kernel is compiled, loaded or tuned while a model serves.

    compiled = torch.compile(model, backend="fxwarm")

Importing this package imports neither torch nor a kernel library; each name below is loaded at first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from fxwarm import aot_artifacts, roots

if TYPE_CHECKING:
    from fxwarm.api import plan, plans, reports, warm, warm_all, warm_model
    from fxwarm.family import register, unregister
    from fxwarm.monitor import events, no_jit
    from fxwarm.observations import Observed, observe
    from fxwarm.packages import load_package, save_package
    from fxwarm.plot import draw
    from fxwarm.records import CompileKey, Library, Planned, Target, WarmPlan, WarmReport
    from fxwarm.tracing import trace
    from passes.records import Dim, Gap, KernelCall, ShapeSet, TensorSpec

__version__ = "0.1.0"

_HOMES = {
    "fxwarm.api": ("plan", "plans", "reports", "warm", "warm_all", "warm_model"),
    "fxwarm.family": ("register", "unregister"),
    "fxwarm.monitor": ("events", "no_jit"),
    "fxwarm.observations": ("Observed", "observe"),
    "fxwarm.packages": ("load_package", "save_package"),
    "fxwarm.plot": ("draw",),
    "fxwarm.records": ("CompileKey", "Library", "Planned", "Target", "WarmPlan", "WarmReport"),
    "fxwarm.tracing": ("trace",),
    "passes.records": ("Dim", "Gap", "KernelCall", "ShapeSet", "TensorSpec"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CompileKey",
    "Dim",
    "Gap",
    "KernelCall",
    "Library",
    "Observed",
    "Planned",
    "ShapeSet",
    "Target",
    "TensorSpec",
    "WarmPlan",
    "WarmReport",
    "draw",
    "events",
    "load_package",
    "no_jit",
    "observe",
    "plan",
    "plans",
    "register",
    "reports",
    "save_package",
    "trace",
    "unregister",
    "warm",
    "warm_all",
    "warm_model",
]

roots.apply()  # each library reads its own variable when it is imported
aot_artifacts.install()  # what torch loads from here on comes back warm

if "torch" in sys.modules:  # torch.ops.fxwarm.*; where torch comes later, `import fxwarm.ops`
    importlib.import_module("fxwarm.ops")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fxwarm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
