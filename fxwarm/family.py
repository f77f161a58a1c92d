"""What a kernel family is, and which ones there are.

A family is one room for one library: it recognises the library's calls in a graph, knows which kernels a call can
need, and makes them resident. Three sources, the later wins: built in, the entry point group ``fxwarm.families``
(name -> class or instance), and ``register()``. Families are loaded at first use, kernel libraries later still.
"""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, Protocol, runtime_checkable

from fxwarm import exc
from fxwarm.records import Built, Library, Loaded, Planned, Target, Tuned, WarmPlan
from passes.records import Gap, KernelCall

Bind = Callable[[KernelCall], "dict[str, Any] | None"]
"""Gives the live tensors behind a witness (the weights it was collected with), by argument name, where known."""


@runtime_checkable
class KernelFamily(Protocol):
    """What every family must have. Optional powers, looked up by name:

    ``devices: tuple[str, ...]`` (default ``("cuda",)``)
        Device types on which there is anything to warm. Elsewhere its calls run as reference implementations.
    ``archs: tuple[str, ...]``
        Architectures on which it was seen to work. On another one key is tried before the rest is built.
    ``activations: tuple[str, ...]``
        Names of the tensors of its calls that change from one model call to the next; the first one by default. Any
        other static tensor that is an input of the graph counts as a weight.
    ``label(key) -> str``
        What a picture calls a kernel, as short as can be; where it is empty, the arguments that differ.
    ``needs_nothing(call, target, library) -> bool``
        The library serves this call without a kernel of its own.
    ``extra(target, library) -> Iterable[Planned]``
        Kernels that no graph contains.
    ``prepare(target, library) -> None``
        Called as early as a trace begins: start in the background whatever takes long.
    ``import_library() -> None``
        Called in the thread that waits for builds, which the load would otherwise do after them.
    ``record(calls, target, library) -> Iterable[Planned | Gap]``
        Exact: ask the library itself, in a process of its own.
    ``drift(modelled, recorded) -> Iterable[object]``
        Where ``keys`` and ``record`` disagree, each as a line for the notes of the plan.
    ``build(planned, target, jobs) -> Iterable[Built]``
        Put kernels into the library's disk cache, in parallel, launching nothing. Yields as they finish.
    ``builds(key) -> bool``
        Whether ``build`` makes this key at all; every one by default. The others are only tuned, or loaded.
    ``patience(key, jobs) -> float``
        Seconds that its build may take, where that can be more than ``fxwarm.build_timeout``.
    ``tune(planned, bind) -> Iterable[Tuned]``
        For autotuned libraries: fill the tuning table.
    ``tune(planned, bind, reduce=None)`` and ``tactics(planned) -> Mapping[CompileKey, str]``
        To tune together with other ranks. ``tactics`` is what the table holds. With ``reduce``, measure all of
        ``planned`` whatever it holds, call ``reduce`` once with {key: {tactic: seconds}} and store its {key: tactic}.
    ``common(key) -> CompileKey``
        What ranks call a key that differs between them in the rank alone; the key itself by default.
    ``folder(target) -> Path``
        Where ``build`` puts kernels: ranks that see the same folder share the work. Default: one folder a host.
    ``fit(planned, target) -> Mapping[CompileKey, KernelCall | str]``
        What cannot be launched in the memory that is free: a smaller witness, or the reason why there is none. What
        one rank cannot launch is left out on all.
    ``verify(planned) -> list[Gap]``
        After the fact: did the library ask for anything that was not planned?
    ``watch(report) -> stop | None``
        Tell ``report(event)`` of JIT work after warmup, at no cost per call; see ``fxwarm.monitor.watchers``.
    ``falls_back(key) -> bool``
        Without this tuned entry the library runs its default instead of compiling.
    ``cached(planned) -> list[Path]``
        The files of the library's cache that hold these kernels, for the receipt.
    """

    name: str
    distributions: tuple[str, ...]
    """Distributions that provide the library, in order of preference."""

    def match(self, op: Any) -> Iterable[KernelCall | Gap]:
        """Return the calls of this library that ``op`` (a ``passes.flatten.OpCall``) makes; pure. Empty: not mine."""
        ...

    def library(self, wanted: Mapping[str, str]) -> Library:
        """Return the build to plan for: the one named in ``wanted``, else the installed one, else the newest known.

        Imports nothing heavy. Raises LibraryError for a named version that is unknown.
        """
        ...

    def keys(
        self, calls: Sequence[KernelCall], target: Target, library: Library
    ) -> Iterable[Planned | Gap]:
        """Return each kernel that ``calls`` can need, modelled: pure, no library imported, no device touched."""
        ...

    def missing(self, planned: Sequence[Planned], target: Target) -> list[Planned]:
        """Return those that the library's own disk cache lacks, or holds damaged."""
        ...

    def load(self, planned: Sequence[Planned], target: Target, bind: Bind) -> Iterable[Loaded]:
        """Make each kernel resident on the current device: one launch of its witness. Yields as they load."""
        ...


_REQUIRED = ("name", "distributions", "match", "library", "keys", "missing", "load")
_GROUP = "fxwarm.families"
_BUILT_IN = {
    "deep_gemm": "fxwarm.families.deep_gemm:DeepGemm",
    "flashinfer": "fxwarm.families.flashinfer:FlashInfer",
    "tilelang": "fxwarm.families.tilelang:TileLang",
}
_lock = threading.RLock()
_registered: dict[str, KernelFamily] = {}
_found: dict[str, KernelFamily] | None = None


def check(family: object) -> KernelFamily:
    """Return ``family`` if it has all that a family needs. Raises FamilyError that lists what it lacks."""
    family = family() if isinstance(family, type) else family
    lacking = [name for name in _REQUIRED if not hasattr(family, name)]
    if lacking:
        raise exc.FamilyError(
            f"{family!r} is no KernelFamily: it lacks {', '.join(lacking)}; see fxwarm.family.KernelFamily"
        )
    return family  # type: ignore[return-value]


def register(family: object, *, replace: bool = False) -> None:
    """Add a family (an instance or a class without arguments) to this process.

    Raises FamilyError if another family has its name and ``replace`` is not set. The same object twice is harmless.
    """
    checked = check(family)
    with _lock:
        known = load_families().get(checked.name)
        if known is not None and type(known) is not type(checked) and not replace:
            raise exc.FamilyError(
                f"two families are named {checked.name!r}: {known!r} and {checked!r}; "
                "rename one, or pass replace=True"
            )
        _registered[checked.name] = checked


def unregister(name: str) -> None:
    """Take back ``register``. Families from entry points stay."""
    with _lock:
        _registered.pop(name, None)


def load_families() -> dict[str, KernelFamily]:
    """Return every family by name, loading entry points on the first call."""
    global _found
    with _lock:
        if _found is None:
            found = {name: check(pkgutil.resolve_name(home)) for name, home in _BUILT_IN.items()}
            for entry in metadata.entry_points(group=_GROUP):
                if _BUILT_IN.get(entry.name) == entry.value:
                    continue
                family = check(entry.load())
                known = found.get(family.name)
                if known is not None and type(known) is not type(family):
                    raise exc.FamilyError(
                        f"two families are named {family.name!r}: {known!r} and {family!r}; uninstall one"
                    )
                found[family.name] = family
            _found = found
        return {**_found, **_registered}


def keep_weights(
    found: Mapping[KernelCall, Mapping[str, int]],
) -> dict[KernelCall, dict[str, int]]:
    """Return the graph inputs in ``found`` that are weights of their calls: an activation may be static, too."""
    families = load_families()
    kept = {}
    for call, places in found.items():
        first = tuple(name for name, _ in call.tensors[:1])
        activations = getattr(families.get(call.family), "activations", first)
        kept[call] = {name: i for name, i in places.items() if name not in activations}
    return kept


def inputs_of(weights: Mapping[KernelCall, Mapping[str, int]]) -> set[int]:
    """Return the graph inputs that are weights of any call."""
    return {index for places in weights.values() for index in places.values()}


def by_family(planned: Iterable[Planned]) -> list[tuple[KernelFamily, list[Planned]]]:
    """Return the planned kernels grouped by their family, in the order of the families."""
    families = load_families()
    groups: dict[str, list[Planned]] = {name: [] for name in families}
    for p in planned:
        groups.setdefault(p.key.family, []).append(p)
    return [(families[name], group) for name, group in groups.items() if group and name in families]


def builds(family: KernelFamily, planned: Iterable[Planned]) -> list[Planned]:
    """Return those of ``planned`` that ``family`` builds ahead: the others are tuned, or made by the first call."""
    if not hasattr(family, "build"):
        return []
    wanted = getattr(family, "builds", None)
    return [p for p in planned if wanted is None or wanted(p.key)]


def not_installed(plan: WarmPlan) -> str:
    """Return a note that lists the kernel libraries which this machine lacks and the plan does not name."""
    names = {library.distribution for library in plan.libraries}
    lacking = []
    for family in load_families().values():
        if not names & set(family.distributions) and not any(
            map(_is_installed, family.distributions)
        ):
            lacking.append(family.distributions[0])
    return f"not installed, and not needed here: {', '.join(lacking)}" if lacking else ""


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def get_family(name: str) -> KernelFamily:
    """Return the family ``name``. Raises UnknownFamilyError with the nearest name."""
    families = load_families()
    if name not in families:
        raise exc.UnknownFamilyError(f"unknown family {name!r}; {exc.did_you_mean(name, families)}")
    return families[name]


__all__ = [
    "Bind",
    "Built",
    "KernelFamily",
    "Loaded",
    "Tuned",
    "builds",
    "by_family",
    "check",
    "get_family",
    "inputs_of",
    "keep_weights",
    "load_families",
    "not_installed",
    "register",
    "unregister",
]
