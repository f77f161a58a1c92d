"""What we remember of kernels on disk, so that a warm start elaborates nothing.

TileLang files a kernel under a hash of its TIR, and only its factory's Python, slow, tells the TIR. Beside the
library's ``kernels`` folder we keep one small file a kernel: our key, the disk key, and the TIR as TVM's JSON. A file is
only believed while the package versions, the factory's module text and the target are the same; and whoever loads
computes the disk key of the stored TIR again, with the library's own function. Without a file a kernel is missing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import sys
import tempfile
import zlib
from importlib import metadata
from pathlib import Path

import msgspec

from fxwarm.families.tilelang.statics import factory_of
from fxwarm.records import CompileKey, Target, digest
from passes.records import Record

log = logging.getLogger(__name__)

SCHEMA = 1


class Entry(Record, frozen=True):
    """One kernel on disk: what it is, what it was made from, and where."""

    key: CompileKey
    made_from: str
    """Digest of all else that the TIR depends on: versions, the factory's module, the target."""
    disk_key: str
    tir: str
    """TVM's JSON of the PrimFunc, compressed, in base64."""
    check: str
    """sha256 of the JSON: half a file must not reach TVM's parser."""
    schema: int = SCHEMA

    def read_tir(self) -> str:
        """Return TVM's JSON. Raises ValueError for a damaged entry."""
        try:
            text = zlib.decompress(base64.b64decode(self.tir)).decode()
        except (zlib.error, ValueError) as error:
            raise ValueError(f"the entry of {self.key} is damaged: {error}") from error
        if _sha(text) != self.check:
            raise ValueError(f"the entry of {self.key} is damaged: another checksum")
        return text


def root() -> Path:
    """Return the folder of this TileLang version in its cache, as the library lays it out from 0.1.14 on."""
    base = os.environ.get("TILELANG_CACHE_DIR") or os.path.expanduser("~/.tilelang/cache")
    public, _, local = metadata.version("tilelang").partition("+")
    return (
        Path(base)
        / (f"{public}_{local}" if local else public)
        / f"{sys.platform}-{platform.machine()}"
    )


def path_of(key: CompileKey, target: Target) -> Path:
    """Return the file of ``key``. Other versions, another text of the factory and other targets have other files."""
    return root() / "fxwarm" / f"{digest(key, made_from(key, target))}.json"


def read(key: CompileKey, target: Target) -> Entry | None:
    """Return what we remember of ``key``, or None where that is nothing or not to be believed."""
    try:
        entry = msgspec.json.decode(path_of(key, target).read_bytes(), type=Entry)
    except (OSError, ValueError, metadata.PackageNotFoundError):  # msgspec's errors are ValueErrors
        return None
    if entry.schema != SCHEMA or entry.key != key or entry.made_from != made_from(key, target):
        log.info("fxwarm: the index entry of %s says %s; it is not used", key, entry.key)
        return None
    return entry


def write(key: CompileKey, target: Target, disk_key: str, tir: str) -> None:
    """Remember ``key``. A folder that cannot be written costs time at the next start, nothing else."""
    packed = base64.b64encode(zlib.compress(tir.encode(), 6)).decode()
    entry = Entry(key, made_from(key, target), disk_key, packed, _sha(tir))
    path = path_of(key, target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(entry))
        os.chmod(temporary, 0o644)  # as the library's own files: a cache may be read by others
        os.replace(temporary, path)
    except OSError as error:
        log.warning(
            "fxwarm: the TileLang index cannot be written, the next start will be slower: %s", error
        )


def folder_of(entry: Entry) -> Path:
    """Return the library's folder of ``entry``."""
    return root() / "kernels" / entry.disk_key


def size_of(folder: Path) -> int:
    """Return the bytes of the kernel in ``folder`` by its own manifest; 0 where it is absent, torn or unreadable.

    Sizes only: the library itself compares the hashes when it loads an entry.
    """
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        sizes = {name: int(meta["size"]) for name, meta in files.items()}
        if any((folder / name).stat().st_size != size for name, size in sizes.items()):
            return 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
    return sum(size for name, size in sizes.items() if name.endswith(".so"))


def made_from(key: CompileKey, target: Target) -> str:
    """Return a digest of what ``key`` does not say and its TIR depends on."""
    module = factory_of(key).partition(":")[0]
    return _made_from(module, target.device, target.arch)


@functools.lru_cache(256)
def _made_from(module: str, device: str, arch: str) -> str:
    names = ("tilelang", module.partition(".")[0].replace("_", "-"))
    return digest(SCHEMA, [(name, _version(name)) for name in names], _source(module), device, arch)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _source(module: str) -> str:
    """Return a digest of the text of ``module``, found without importing it or its packages."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    if file is None:
        top, *rest = module.split(".")
        spec = importlib.util.find_spec(top)
        if spec is None:
            return ""
        places = spec.submodule_search_locations
        file = (
            spec.origin
            if not rest or not places
            else os.path.join(next(iter(places)), *rest) + ".py"
        )
    try:
        return hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()
    except OSError:
        return ""


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
