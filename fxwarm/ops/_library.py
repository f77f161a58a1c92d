"""Finds the installed kernel library at the first call of an op on CUDA, and calls it by what it accepts."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from fxwarm.exc import LibraryError

_MODULES = {
    # vLLM 0.33 looks in the same order: its own fork serves where none is installed
    "deep_gemm": ("deep_gemm", "vllm.third_party.deep_gemm"),
    "flashinfer": ("flashinfer",),
    "flashinfer.fused_moe": ("flashinfer.fused_moe",),
    "flashinfer.gemm": ("flashinfer.gemm",),
}
_INSTALL = {"deep_gemm": "fxwarm[deepgemm]", "flashinfer": "fxwarm[flashinfer]"}
_chosen: dict[str, ModuleType] = {}
_functions: list[Function] = []


def use_library(name: str, module: ModuleType) -> None:
    """Make the ops of library ``name`` call ``module``, such as a build that the kernel hub returned."""
    if name not in _MODULES:
        raise LibraryError(f"no op calls a library {name!r}; known are {', '.join(_MODULES)}")
    _chosen[name] = module
    for function in _functions:
        function.forget()


def load_library(name: str) -> ModuleType:
    """Import library ``name``: the one chosen, else the installed one, else a hub build already loaded.

    Raises LibraryError where there is none, or it does not import.
    """
    if name in _chosen:
        return _chosen[name]
    for candidate in _MODULES[name]:
        try:
            if candidate not in sys.modules and importlib.util.find_spec(candidate) is None:
                continue
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:  # a parent package is absent
            if error.name is not None and candidate.startswith(error.name):
                continue
            raise _broken(candidate, error) from error
        except Exception as error:  # DeepGEMM asserts a CUDA toolkit at import
            raise _broken(candidate, error) from error
    hub = re.compile(rf"{re.escape(name)}_[0-9a-f]+")  # the hub imports a build as name_<hash>
    for loaded, module in list(sys.modules.items()):
        if hub.fullmatch(loaded):
            return module
    extra = _INSTALL[name.partition(".")[0]]
    raise LibraryError(
        f"{name} is not installed; install {extra}, or name a module with use_library"
    )


def _broken(name: str, error: Exception) -> LibraryError:
    text = f"{type(error).__name__}: {error}"
    return LibraryError(f"{name} is installed but does not import ({text}); see its requirements")


class Function:
    """A function of a kernel library, under the first of ``names`` that the installed build has."""

    def __init__(self, library: str, *names: str) -> None:
        self.library = library
        self.names = names
        self.forget()
        _functions.append(self)

    def forget(self) -> None:
        """Look the function up again at the next call."""
        self._function: Callable[..., Any] | None = None
        self.module: ModuleType | None = None
        self.accepted: frozenset[str] | None = None

    def resolve(self) -> Callable[..., Any]:
        """Return the library's function, importing the library if need be."""
        if self._function is None:
            module = load_library(self.library)
            found = next((n for n in self.names if hasattr(module, n)), None)
            if found is None:
                version = getattr(module, "__version__", "of unknown version")
                raise LibraryError(
                    f"{module.__name__} {version} has no {' or '.join(self.names)}; install a newer one"
                )
            function = getattr(module, found)
            self.module = module
            self.accepted = accepted_names(function)
            self._function = function
        return self._function

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call it with ``args``, and with those ``options`` that are neither None nor False."""
        function = self._function or self.resolve()
        given = {k: v for k, v in options.items() if v is not None and v is not False}
        if given:
            self.require(given)
        return function(*args, **given)

    def require(self, names: Collection[str]) -> None:
        """Raise LibraryError where the function is known not to accept one of ``names``."""
        if self.accepted is None or self.accepted.issuperset(names):
            return
        lacking = ", ".join(sorted(set(names) - self.accepted))
        raise LibraryError(
            f"the installed {self.library} has no {lacking} in {self.names[0]}; leave it at its "
            "default, or install a newer one"
        )


def accepted_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the keyword names of ``function``, or None where any may do or none can be told.

    A pybind11 function has no signature, but its docstring begins with one.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        names = re.findall(r"[(,]\s*(\w+):", (function.__doc__ or "").partition("->")[0])
        return frozenset(names) or None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)
