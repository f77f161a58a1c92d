"""DeepGEMM's cache on disk, in both JIT generations: where it is, what is in it, how to publish.

Generation A:  <root>/cache/kernel.<tag>.<digest>/{kernel.cu, kernel.cubin}
Generation B:  <root>/cache/<tag>.<digest>/{kernel.cu, kernel.cubin, meta.json, .committed}

The library itself only tests that the files exist, so a truncated or empty cubin would be loaded:
here an entry counts as present only if its cubin is a whole ELF file.

Source: DeepGEMM ``csrc/jit/compiler.hpp``, ``cache.hpp``; sgl-deep-gemm 0.2.5.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import struct
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fxwarm.families.deep_gemm.source import tag_of

__all__ = [
    "Roots",
    "damaged",
    "entries",
    "find",
    "is_whole_elf",
    "locate",
    "publish",
    "roots",
    "set_aside",
    "writable",
]

log = logging.getLogger(__name__)

SEEN_TRIES, SEEN_EVERY = (
    90,
    1.0,
)  # seconds; clients of NFS remember for up to 60 that a name was not there

_NOT_LOST = (errno.EXDEV, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM)
"""Why a rename fails that nobody else has won: there is nothing to wait for."""

CODE, CUBIN, COMMITTED = "kernel.cu", "kernel.cubin", ".committed"


class Roots(NamedTuple):
    """The folders of one cache: entries are written to the first, looked up in all."""

    generation: str
    """"A" or "B"."""
    write: Path
    read: tuple[Path, ...] = ()

    @property
    def all(self) -> tuple[Path, ...]:
        """Every root, in the order in which the library looks."""
        return (self.write, *self.read)


def roots(generation: str, environ: Mapping[str, str] = os.environ) -> Roots:
    """Return where the library keeps its cache under these environment variables.

    A: ``DG_JIT_CACHE_DIR``, else ``$HOME/.deep_gemm``. B: ``DG_`` or ``DJ_JIT_CACHE_DIR`` as
    ``RW[:RO[:RO...]]``, else ``$HOME/.dj``. With HOME unset the library takes the working folder,
    and so does this, with a warning that names it.
    """
    names = ("DG_JIT_CACHE_DIR",) if generation == "A" else ("DG_JIT_CACHE_DIR", "DJ_JIT_CACHE_DIR")
    given = next((environ[n] for n in names if environ.get(n)), "")
    if given and generation == "A":
        return Roots("A", Path(given).absolute())
    if given:
        first, *others = (Path(part).absolute() for part in given.split(":") if part)
        return Roots("B", first, tuple(others))
    home = environ.get("HOME", "")
    root = Path(home, ".deep_gemm" if generation == "A" else ".dj").absolute()
    if not home:
        _warn_once(f"HOME is unset, so DeepGEMM keeps its cache in {root}; set DG_JIT_CACHE_DIR")
    return Roots(generation, root)


def find(cache: Roots, entry: str) -> Path | None:
    """Return the folder of a complete entry, None where every root lacks it or holds it damaged."""
    for root in cache.all:
        folder = root / "cache" / entry
        if is_complete(folder, cache.generation):
            return folder
    return None


def locate(cache: Roots, entry: str) -> Path:
    """Return where an entry of that name is written."""
    return cache.write / "cache" / entry


def entries(cache: Roots) -> dict[str, Path]:
    """Return each complete entry by name, the first root first. Foreign folders are left out."""
    found: dict[str, Path] = {}
    for root in cache.all:
        with contextlib.suppress(OSError):
            for folder in sorted((root / "cache").iterdir()):
                with contextlib.suppress(ValueError):
                    tag_of(folder.name)
                    if folder.name not in found and is_complete(folder, cache.generation):
                        found[folder.name] = folder
    return found


def damaged(cache: Roots) -> dict[str, Path]:
    """Return each entry of the first root that has a source and no whole cubin: NVRTC leaves them, and full disks."""
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for folder in sorted((cache.write / "cache").iterdir()):
            if (folder / CODE).is_file() and not is_complete(folder, cache.generation):
                found[folder.name] = folder
    return found


def set_aside(folder: Path, cache: Roots) -> None:
    """Remove an entry in one step: it is gone before its files are. Whoever was faster is no error."""
    aside = cache.write / "tmp" / f"damaged-{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):
        aside.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def is_complete(folder: Path, generation: str) -> bool:
    """Return whether the library would take this entry and it would work."""
    if generation == "B" and not (folder / COMMITTED).exists():
        return False
    return (folder / CODE).is_file() and is_whole_elf(folder / CUBIN)


def is_whole_elf(path: Path) -> bool:
    """Return whether a file is a 64-bit ELF whose headers, segments and sections lie within it."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    size = len(data)
    if size < 64 or data[:5] != b"\x7fELF\x02":
        return False
    program, section = struct.unpack_from("<QQ", data, 32)
    sizes = struct.unpack_from("<HHHH", data, 54)
    program_size, program_count, section_size, section_count = sizes
    if program + program_size * program_count > size:
        return False
    if not section_count or section + section_size * section_count > size:
        return False
    for index in range(section_count):
        at = section + index * section_size
        kind = struct.unpack_from("<I", data, at + 4)[0]
        offset, length = struct.unpack_from("<QQ", data, at + 24)
        if kind not in (0, 8) and offset + length > size:  # 8: no bits in the file
            return False
    return True


def publish(built: Path, entry: str, cache: Roots) -> Path:
    """Move a built folder into place in one atomic step, as the library does; return the entry.

    The loser of a race deletes its own and uses the winner's; a damaged entry is set aside first,
    or the rename would fail on it for ever. Raises OSError where the cache cannot be written.
    """
    target = locate(cache, entry)
    if cache.generation == "B":
        (built / COMMITTED).touch()
    _sync(built)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not is_complete(target, cache.generation):
        set_aside(target, cache)
    try:
        built.rename(target)
    except OSError as error:
        if error.errno in _NOT_LOST or not _appears(target, cache.generation):
            raise
        shutil.rmtree(built, ignore_errors=True)
    _sync_one(target.parent)
    return target


def _appears(target: Path, generation: str) -> bool:
    """Return whether the winner's entry shows within a minute or so: a network disk may tell the loser late of it."""
    for _ in range(SEEN_TRIES):
        if is_complete(target, generation):
            return True
        time.sleep(SEEN_EVERY if target.parent.is_dir() else 0)
    return False


@contextlib.contextmanager
def scratch(cache: Roots) -> Iterator[Path]:
    """Yield an empty folder on the cache's file system, gone afterwards whatever happens."""
    folder = cache.write / "tmp" / f"{os.getpid()}-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def writable(cache: Roots) -> Roots:
    """Return a cache that can be written: ``cache`` itself, else a private one that also sees it.

    Generation B looks the old roots up by itself; for A, which knows one root, its entries are
    linked into the private one. The library must be told (``environment``) before its first call.
    """
    try:
        (cache.write / "cache").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache.write):
            return cache
    except OSError as error:
        private = Path(tempfile.gettempdir(), f"fxwarm-deep_gemm-{os.getuid()}")
        _warn_once(
            f"DeepGEMM's cache {cache.write} cannot be written ({error.strerror or error}); what it "
            f"holds is used, new kernels go to {private}; set DG_JIT_CACHE_DIR to keep them"
        )
    (private / "cache").mkdir(mode=0o700, parents=True, exist_ok=True)
    if private.stat().st_uid != os.getuid():
        raise OSError(f"{private} belongs to somebody else; set DG_JIT_CACHE_DIR")
    if cache.generation == "B":
        return Roots("B", private, cache.all)
    for name, folder in entries(cache).items():
        link = private / "cache" / name
        if not link.exists():
            with contextlib.suppress(FileExistsError):
                link.symlink_to(folder, target_is_directory=True)
    return Roots("A", private)


def environment(cache: Roots) -> dict[str, str]:
    """Return the variable that makes the library use ``cache``."""
    return {"DG_JIT_CACHE_DIR": ":".join(map(str, cache.all))}


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_said: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning(text)
