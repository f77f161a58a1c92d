"""What is installed here, what would not work, and the one sentence that says what to do."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING

import msgspec

from fxwarm import exc
from fxwarm.records import CompileKey, Target, WarmPlan
from passes.table import size

if TYPE_CHECKING:
    from fxwarm import caches


class Examination(msgspec.Struct):
    """What ``examine`` saw."""

    python: str
    torch: str
    target: Target
    families: dict[str, str]
    """What each family would use, or why it cannot."""
    compilers: dict[str, str]
    store: str
    caches: dict[str, str]
    """Entries and size of each cache that a warm start stands on."""
    problems: list[str]
    """Sentences that end with what to do."""

    def lines(self) -> Iterable[str]:
        """Yield the examination as lines of text."""
        yield f"python {self.python}, torch {self.torch}"
        yield f"target {self.target.name}: {self.target.arch or self.target.device}, {self.target.num_sms} SMs"
        for name, what in self.families.items():
            yield f"{name}: {what}"
        for name, where in self.compilers.items():
            yield f"{name}: {where or 'not found'}"
        yield f"plans and receipts: {self.store}"
        for name, what in self.caches.items():
            yield f"cache of {name}: {what}"
        for problem in self.problems:
            yield f"problem: {problem}"
        if not self.problems:
            yield "no problem found"


def examine() -> Examination:
    """Look at this machine without compiling or launching anything."""
    from fxwarm import caches, store
    from fxwarm.family import load_families

    target = Target.current()
    problems = _machine_problems()
    families: dict[str, str] = {}
    for name, family in load_families().items():
        try:
            library = family.library({})
        except exc.LibraryError as error:
            families[name] = f"unusable: {error}"
            problems.append(str(error))
            continue
        if target.device not in getattr(family, "devices", ("cuda",)):
            families[name] = f"{library}, reference implementation on this device"
        elif not library.installed:
            families[name] = f"not installed (plans are made for {library})"
        else:
            families[name] = f"{library} as {library.module}"
            problems += getattr(family, "problems", lambda target: [])(target)
    return Examination(
        python=sys.version.split()[0],
        torch=metadata.version("torch") if importlib.util.find_spec("torch") else "not installed",
        target=target,
        families=families,
        compilers={
            "nvcc": _nvcc() or "",
            "c++": os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "",
            "ninja": shutil.which("ninja") or "",
        },
        store=str(store.root(os.environ.get("FXWARM_CACHE_DIR", ""))),
        caches={root.name: _cache_text(root) for root in caches.examine().roots},
        problems=problems,
    )


def missing(plan: WarmPlan) -> list[CompileKey]:
    """Return the keys of ``plan`` whose kernels this machine's library caches lack or hold damaged."""
    from fxwarm.family import by_family

    return [
        p.key
        for family, group in by_family(plan.planned)
        for p in family.missing(group, plan.target)
    ]


def other_builds(plan: WarmPlan) -> list[str]:
    """Return a sentence for each library of ``plan`` that is absent here or another version."""
    from fxwarm.family import load_families

    found = []
    for library in plan.libraries:
        families = [f for f in load_families().values() if library.distribution in f.distributions]
        for family in families:
            try:
                here = family.library({})
            except exc.LibraryError as error:
                found.append(f"{family.name}: the plan is for {library}, and here {error}")
                continue
            if not here.installed:
                found.append(
                    f"{family.name}: the plan is for {library}, and nothing is installed here"
                )
            elif (here.distribution, here.version) != (library.distribution, library.version):
                found.append(
                    f"{family.name}: the plan is for {library}, and {here} is installed here; plan again"
                )
    return found


def _machine_problems() -> list[str]:
    problems = []
    if not os.environ.get("HOME"):
        problems.append(
            "HOME is unset, so libraries put their caches into the working folder; set it"
        )
    if os.environ.get("DG_JIT_DEBUG"):
        problems.append(
            "DG_JIT_DEBUG is set: it changes every compiler flag of DeepGEMM, so no cache entry fits; unset it"
        )
    for name in (
        "DG_JIT_CACHE_DIR",
        "TILELANG_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
        "FXWARM_CACHE_DIR",
    ):
        folder = os.environ.get(name, "").split(":")[0]
        while folder and not os.path.exists(folder):
            folder = os.path.dirname(os.path.abspath(folder))
        if folder and not os.access(folder, os.W_OK):
            problems.append(
                f"{name} is in {folder}, which cannot be written; choose another folder"
            )
    return problems


def _cache_text(root: caches.Root) -> str:
    lost = f", {root.misses} lost" if root.misses else ""
    return f"{len(root.entries)} entries, {size(root.bytes)}{lost}, {', '.join(root.paths) or 'no folder yet'}"


def _nvcc() -> str | None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return shutil.which("nvcc", path=os.path.join(os.environ[name], "bin"))
    return shutil.which("nvcc")
