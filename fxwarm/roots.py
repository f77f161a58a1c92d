"""Where the kernel libraries keep what they build: one setting moves all of them, and the receipts with them.

    FXWARM_CACHE_ROOT=/var/cache/kernels       before the first import of fxwarm, or fxwarm.roots.apply(...)

Each library reads its own variable once, when it is imported, so this comes before. A variable that is set stays.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

SETTING = "FXWARM_CACHE_ROOT"

_PLACES = (  # module, its variable, folder below the root, what it takes below HOME
    ("deep_gemm", "DG_JIT_CACHE_DIR", "deep_gemm", ".deep_gemm"),
    ("flashinfer", "FLASHINFER_WORKSPACE_BASE", "flashinfer", ".cache/flashinfer"),
    ("flashinfer", "TRTLLM_DG_CACHE_DIR", "tensorrt_llm", ".tensorrt_llm"),
    ("tilelang", "TILELANG_CACHE_DIR", "tilelang", ".tilelang"),
    ("", "FXWARM_CACHE_DIR", "fxwarm", ""),
)
_told: set[Path] = set()
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p")


def apply(root: str = "", environ: MutableMapping[str, str] = os.environ) -> dict[str, Path]:
    """Point every library at ``root`` (by default ``FXWARM_CACHE_ROOT``); return variable -> folder of what was set.

    Without a setting nothing moves, unless HOME is unset or cannot be written: then the libraries that have nothing
    there go to a temporary folder, and one line says that it will not be kept.
    """
    wanted = root or environ.get(SETTING, "")
    why = "" if wanted else _no_home(environ)
    if not wanted and not why:
        return {}
    base = (
        Path(wanted).absolute() if wanted else Path(tempfile.gettempdir(), f"fxwarm-{os.getuid()}")
    )
    moved: dict[str, Path] = {}
    for module, variable, folder, below_home in _PLACES:
        if environ.get(variable) or (why and not below_home):
            continue
        if why and environ.get("HOME") and Path(environ["HOME"], below_home).is_dir():
            continue  # what it holds can still be used
        if module in sys.modules:
            log.warning(
                "fxwarm: %s is imported already and keeps its cache; set %s before",
                module,
                variable,
            )
            continue
        moved[variable] = base / folder
        environ[variable] = str(base / folder)
    if why and moved:
        log.warning(
            "fxwarm: %s, so kernels go to %s and may be gone at the next start; set %s",
            why,
            base,
            SETTING,
        )
    elif moved:
        log.info("fxwarm: caches are below %s", base)
        warn_if_remote(base)
    return moved


def warn_if_remote(folder: Path, mounts: str = "/proc/mounts") -> bool:
    """Return whether ``folder`` lies on a network disk; if so say it once: locks and renames fail there in odd ways."""
    try:
        lines = [line.split()[1:3] for line in Path(mounts).read_text().splitlines()]
    except OSError:  # not Linux
        return False
    above = [
        (point, kind)
        for point, kind in lines
        if folder == Path(point) or Path(point) in folder.parents
    ]
    kind = max(above, key=lambda pair: len(pair[0]), default=("", ""))[1]
    if kind not in _REMOTE:
        return False
    if not _told & {folder, *folder.parents}:
        _told.add(folder)
        log.warning(
            "fxwarm: the cache %s is on a network disk (%s); a local folder is faster and safer: set %s",
            folder,
            kind,
            SETTING,
        )
    return True


def in_use(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders of the libraries' caches that are there now, wherever each was put."""
    home = environ.get("HOME", "")
    found = [
        Path(environ[variable]) if environ.get(variable) else Path(home, below_home)
        for module, variable, _, below_home in _PLACES
        if module and (environ.get(variable) or home)
    ]
    return [folder for folder in found if os.path.isdir(folder)]  # False where one may not look


def folders(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return the folder of each variable that is set now."""
    return {
        variable: Path(environ[variable]) for _, variable, _, _ in _PLACES if environ.get(variable)
    }


def _no_home(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME", "")
    if not home:
        return "HOME is unset"
    return "" if os.access(home, os.W_OK) else f"HOME ({home}) cannot be written"
