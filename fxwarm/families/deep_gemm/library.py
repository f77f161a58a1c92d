"""Which build of DeepGEMM there is: distribution, generation, fingerprint, settings, environment.

All distributions import as ``deep_gemm``, and ``deep_gemm.__version__`` is no identity: a build is
known by its distribution and a digest of its headers. Nothing is imported here; settings are read
from the live module only if the program has imported it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from fxwarm import exc
from fxwarm.families.deep_gemm import toolchain
from fxwarm.families.deep_gemm.heuristics.errors import UnknownVersion
from fxwarm.families.deep_gemm.heuristics.versions import newest, resolve_version
from fxwarm.records import Library

__all__ = [
    "DISTRIBUTIONS",
    "ENVIRONMENT",
    "find_library",
    "folder_of",
    "live_module",
    "module_name",
]

DISTRIBUTIONS = ("sgl-deep-gemm", "tokenspeed-deepgemm", "deep-gemm")
MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")
"""Import names, in the order in which vLLM 0.33 looks; hub builds are ``deep_gemm_<hash>``."""
_HUB = re.compile(r"(?:.*[._])?deep_gemm_[0-9a-f]{6,}")

_SUFFIXES = (
    "JIT_DEBUG", "JIT_PTXAS_VERBOSE", "JIT_PTXAS_CHECK", "JIT_WITH_LINEINFO", "JIT_CPP_STANDARD",
    "JIT_CHECK_NO_SPILLS", "JIT_CHECK_NO_LOCAL_MEMORY", "JIT_USE_NVRTC", "JIT_MINIMIZE_NUM_SMS",
)  # fmt: skip
ENVIRONMENT = (
    *(f"{prefix}_{suffix}" for prefix in ("DG", "DJ") for suffix in _SUFFIXES),
    "DG_USE_FP8_COMBINE", "DG_USE_FP4_ACTS", "DG_USE_MXF4_KIND", "DG_SM90_TRACE_EPI",
    "DG_SM90_TRACE_PTR", "DG_MEGA_MOE_TILES",
)  # fmt: skip
"""Variables that change sources or flags, and with them every key (facts of both generations)."""

_GETTERS = {
    "num_sms": ("get_num_sms",),
    "mk_alignment": (
        "get_mk_alignment_for_contiguous_layout",
        "get_m_alignment_for_contiguous_layout",
    ),
    "pdl": ("get_pdl",),
    "tc_util": ("get_tc_util",),
}


def find_library(wanted: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> Library:
    """Return the build to plan for: the one in ``wanted``, else the installed, else the newest known.

    Raises LibraryError for a wanted version that is unknown, with the known ones.
    """
    names = {_normal(name): version for name, version in wanted.items()}
    for distribution in DISTRIBUTIONS:
        if distribution in names:
            return _named(distribution, names[distribution], environ)
    return _installed(environ) or _named(DISTRIBUTIONS[0], newest().number, environ)


def _named(distribution: str, number: str, environ: Mapping[str, str]) -> Library:
    installed = _installed(environ)
    if installed is not None and (installed.distribution, installed.version) == (
        distribution,
        number,
    ):
        return installed
    try:
        generation = resolve_version(distribution, number).jit
    except UnknownVersion as error:
        raise exc.LibraryError(str(error)) from None
    return Library(
        distribution,
        number,
        settings=(("generation", generation),),
        environment=_environment(environ),
    )


def _installed(environ: Mapping[str, str]) -> Library | None:
    module = module_name()
    folder = folder_of(module) if module else None
    if module is None or folder is None:
        return None
    distribution, version = _identity(module)
    generation = generation_of(distribution, version, folder)
    try:
        compiler = toolchain.find_compiler(generation, environ).text
    except exc.LibraryError:
        compiler = ""  # whoever needs it says so
    parts = [_headers(folder), compiler] + ([str(folder.absolute())] if generation == "A" else [])
    return Library(
        distribution,
        version,
        installed=True,
        module=module,
        fingerprint=hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32],
        settings=tuple(sorted({**_identity_settings(module), "generation": generation}.items())),
        environment=_environment(environ),
    )


def module_name() -> str | None:
    """Return the import name of the installed build, None where there is none. Imports nothing."""
    for name in MODULES:
        if _is_importable(name):
            return name
    return next((name for name in list(sys.modules) if _HUB.fullmatch(name)), None)


def live_module(name: str) -> ModuleType | None:
    """Return the module if the program has imported it."""
    return sys.modules.get(name)


def folder_of(module: str) -> Path | None:
    """Return the package folder, which holds ``include/deep_gemm``; symlinks are not resolved."""
    live = sys.modules.get(module)
    file = getattr(live, "__file__", None)
    if file is None:
        spec = importlib.util.find_spec(module)
        file = spec.origin if spec is not None else None
    return Path(os.path.abspath(file)).parent if file else None


def include_of(module: str) -> Path | None:
    """Return the folder that is given to the compiler with ``-I``."""
    folder = folder_of(module)
    return folder / "include" if folder is not None else None


def generation_of(distribution: str, version: str, folder: Path | None) -> str:
    """Return "A" or "B": by the known versions, else by the headers that only B ships."""
    try:
        return resolve_version(distribution, version).jit
    except UnknownVersion:
        pass
    marks = ("deep_jit", "dj", "deepjit")
    has_b = folder is not None and any((folder / "include" / m).is_dir() for m in marks)
    return "B" if has_b else "A"


def probe_message(library: Library, error: str) -> str:
    """Return one sentence for a build that imports and fails every call."""
    if "dim == 2 or dim == 3" in error or "undefined symbol" in error:
        return (
            f"{library} was built for another torch than {_torch_version()}: every call fails with "
            f"{error.strip()[-160:]!r}; install a build made for this torch (torch 2.11 and 2.12: "
            "sgl-deep-gemm 0.1.5.post1, 2.13: 0.2.1, 2.14: 0.2.3 or later)"
        )
    return f"{library} fails every call here: {error.strip()[-300:]}; see its requirements"


def _torch_version() -> str:
    with_torch = sys.modules.get("torch")
    if with_torch is not None:
        return str(with_torch.__version__)
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "this one"


def _identity(module: str) -> tuple[str, str]:
    """Return (distribution, full version) by the package metadata."""
    if module == "deep_gemm":
        for name in DISTRIBUTIONS:
            try:
                return name, metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    live = sys.modules.get(module)
    return "deep-gemm", str(getattr(live, "__version__", "unknown"))


def _is_importable(name: str) -> bool:
    if name in sys.modules:
        return True
    parent = name.rpartition(".")[0]
    if parent and parent.partition(".")[0] not in sys.modules:
        return False  # a parent package would have to be imported to look into it
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def live_settings(module: str) -> dict[str, str]:
    """Return all that the program set in the library; empty where it has not imported it.

    Getters ask the device, so they are asked only where CUDA is already in use.
    """
    live, torch = live_module(module), sys.modules.get("torch")
    if live is None or torch is None or not _in_use(torch):
        return {}
    found: dict[str, str] = {}
    for name, getters in _GETTERS.items():
        getter = next((g for n in getters if (g := getattr(live, n, None)) is not None), None)
        if getter is not None:
            found[name] = str(getter())
    return found


def settings_to_repeat(found: Library) -> dict[str, str]:
    """Return what a child must set in the library to ask as this process would."""
    named = {n: v for n, v in found.settings if n in ("num_sms", "mk_alignment")}
    return live_settings(found.module) | named


def _identity_settings(module: str) -> dict[str, str]:
    """Return the settings that enter kernels and are not the default.

    Only those: a plan is the same whether the library was imported before it was made or after.
    """
    found: dict[str, str] = {}
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        found["deterministic"] = "True"
    live = live_settings(module)
    if live.get("mk_alignment", "128") != "128":
        found["mk_alignment"] = live["mk_alignment"]
    if "num_sms" in live and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        if live["num_sms"] != str(device.multi_processor_count):
            found |= {"num_sms": live["num_sms"], "device_sms": str(device.multi_processor_count)}
    elif "num_sms" in live:
        found["num_sms"] = live["num_sms"]
    return found


def _in_use(torch: Any) -> bool:
    return bool(torch.cuda.is_initialized()) or not torch.cuda.is_available()


def _environment(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted((n, environ[n]) for n in ENVIRONMENT if environ.get(n, "0") not in ("", "0"))
    )


@functools.lru_cache(maxsize=8)
def _headers(folder: Path) -> str:
    """Digest the header tree by names and contents; once a process (0.5 MB)."""
    digest = hashlib.sha256()
    for path in _files(folder / "include" / "deep_gemm"):
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(p for p in folder.rglob("*") if p.is_file())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def heuristics_of(found: Library) -> str:
    """Return "old", "mid" or "new"; what is not known is taken for new."""
    try:
        return resolve_version(found.distribution, found.version).heuristics
    except UnknownVersion:
        return "new"
