"""What is installed here, what would not work, and the one sentence that says what to do."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from importlib import metadata

import msgspec

from fxwarm import exc
from fxwarm.records import CompileKey, Target, WarmPlan


class Examination(msgspec.Struct):
    """What ``examine`` saw."""

    python: str
    torch: str
    target: Target
    families: dict[str, str]
    """What each family would use, or why it cannot."""
    compilers: dict[str, str]
    store: str
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
        for problem in self.problems:
            yield f"problem: {problem}"
        if not self.problems:
            yield "no problem found"


def examine() -> Examination:
    """Look at this machine without compiling or launching anything."""
    from fxwarm import store
    from fxwarm.family import load_families

    target = Target.current()
    problems: list[str] = []
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
        store=str(store.root()),
        problems=problems,
    )


def missing(plan: WarmPlan) -> list[CompileKey]:
    """Return the keys of ``plan`` whose kernels this machine's library caches lack or hold damaged."""
    from fxwarm.warmup import by_family

    return [p.key for family, group in by_family(plan.planned) for p in family.missing(group, plan.target)]


def _nvcc() -> str | None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return shutil.which("nvcc", path=os.path.join(os.environ[name], "bin"))
    return shutil.which("nvcc")
