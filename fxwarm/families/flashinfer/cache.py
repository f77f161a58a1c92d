"""Where FlashInfer keeps what it has built and tuned, found without importing it.

    $FLASHINFER_WORKSPACE_BASE/.cache/flashinfer/<version>/<archs>/cached_ops/<name>/<name>.so      modules
    .../<archs>/fxwarm/<digest>-<card>-rank<r>.json                                                 tactics, ours
    $TRTLLM_DG_CACHE_DIR/cache/gemm_<N>_<K>_.../nvcc_kernel.cubin                                   block scale

Once the library is imported its own variables decide, for a user may have assigned them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import util
from pathlib import Path
from typing import Any

from fxwarm.families.flashinfer.library import installed_version
from fxwarm.records import Planned, digest

__all__ = [
    "block_kernel",
    "block_kernels",
    "find_module",
    "read_tactics",
    "tactics_files",
    "tactics_path",
]


def find_module(name: str, arch: str) -> Path | None:
    """Return the shared object of module ``name``, ahead-of-time or built; None where there is none, or an empty one."""
    for folder in (_aot_dir(), workspace(arch) / "cached_ops"):
        if folder is not None:
            path = folder / name / f"{name}.so"
            try:
                if path.stat().st_size:
                    return path
            except OSError:
                continue
    return None


def workspace(arch: str) -> Path:
    """Return the folder of this version and these architectures. ``arch`` is the target's, as in "sm_90a"."""
    env = sys.modules.get("flashinfer.jit.env")
    if env is not None:
        return Path(env.FLASHINFER_WORKSPACE_DIR)
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE") or os.path.expanduser("~")
    return Path(base) / ".cache" / "flashinfer" / installed_version() / _archs(arch)


def block_kernel(name: str) -> Path:
    """Return where the cubin of a block-scale kernel lies, or will lie. The path names neither version nor device."""
    return _block_cache() / name / "nvcc_kernel.cubin"


def block_kernels() -> set[str]:
    """Return the names of all block-scale kernels in the cache."""
    folder = _block_cache()
    try:
        return {path.name for path in folder.iterdir() if (path / "nvcc_kernel.cubin").is_file()}
    except OSError:
        return set()


def tactics_path(planned: Sequence[Planned], arch: str, card: str) -> Path:
    """Return the tactics file of these entries on this card: one a rank, for ranks tune on their own."""
    name = digest(sorted(str(p.key) for p in planned), installed_version())
    return workspace(arch) / "fxwarm" / f"{name}-{_safe(card)}-rank{rank()}.json"


def tactics_files(path: Path) -> list[Path]:
    """Return ``path`` and the files of other plans for the same card and rank, which may hold some of its entries."""
    suffix = path.name.partition("-")[2]
    others = (
        sorted(p for p in path.parent.glob(f"*-{suffix}") if p != path)
        if path.parent.is_dir()
        else []
    )
    return [*others, *([path] if path.is_file() else [])]


def read_tactics(paths: Iterable[Path]) -> set[str]:
    """Return the keys of all entries in tactics files; a file that is no such file counts as empty."""
    found: set[str] = set()
    for path in paths:
        try:
            entries: Any = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(entries, dict):
            found.update(key for key in entries if not key.startswith("_"))
    return found


def rank() -> int:
    """Return the rank of this process among its peers: 0 without any."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else 0


def _aot_dir() -> Path | None:
    env = sys.modules.get("flashinfer.jit.env")
    if env is not None:
        return Path(env.FLASHINFER_AOT_DIR)
    if util.find_spec("flashinfer_jit_cache") is not None:
        return None  # only the package itself knows; the library is asked when it loads
    spec = util.find_spec("flashinfer")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) / "data" / "aot" if places else None


def _archs(arch: str) -> str:
    """Return the library's name of the folder of architectures: "90a", or "89_90a" on a mixed host."""
    named = os.environ.get("FLASHINFER_CUDA_ARCH_LIST", "")
    if named:
        found = {_with_suffix(*a.split(".", 1)) for a in named.split(" ") if "." in a}
    else:
        import torch

        found = {arch.removeprefix("sm_").replace("f", "a")}
        if torch.cuda.is_available():
            pairs = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
            found = {_with_suffix(str(major), str(minor)) for major, minor in pairs}
    return "_".join(sorted(found))


def _with_suffix(major: str, minor: str) -> str:
    if minor[-1:].isalpha() or int(major) < 9:
        return f"{major}{minor}"
    return f"{major}{minor}" + ("f" if (major, minor) == ("12", "0") else "a")


def _block_cache() -> Path:
    named = os.environ.get("TRTLLM_DG_CACHE_DIR")
    if named:
        return Path(named) / "cache"
    home = os.environ.get("HOME")  # as the library does: the variable, not the user's entry
    base = Path(home) / ".tensorrt_llm" if home else Path(tempfile.gettempdir()) / "tensorrt_llm"
    return base / "cache"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "_", text) or "unknown"
