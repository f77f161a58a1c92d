"""Plans and receipts on disk, beside Inductor's cache: atomic writes, reads that believe nothing.

A file that is absent, truncated, foreign or of another schema counts as absent, and the reason is logged. Nothing here
is pickled, and no name that came from a file becomes a path.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from fxwarm import locks, roots

log = logging.getLogger(__name__)

T = TypeVar("T")

LARGEST = 64 << 20
"""Bytes of the largest file that is read; a plan of 10,000 kernels with sources is a few MiB."""

_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")


def root(cache_dir: str = "") -> Path:
    """Return the folder of plans and receipts, made if need be.

    Where it cannot be made or written, a temporary one is used and one line says that nothing will be kept.
    """
    return _root(cache_dir or _beside_inductor())


def root_with(key: str, cache_dir: str = "") -> Path:
    """Return the folder that holds the warm key ``key``: ``root``, or the wanted one where it can only be read."""
    wanted = Path(cache_dir or _beside_inductor())
    try:
        return wanted if _KEY.fullmatch(key) and (wanted / key).is_dir() else root(cache_dir)
    except OSError:  # it may not even be looked at
        return root(cache_dir)


def path_of(folder: Path, key: str, what: str) -> Path:
    """Return where ``what`` ("plan", "receipt") of the warm key ``key`` lies. Raises ValueError for a foreign key."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no warm key")
    return folder / key / f"{what}.json"


@contextlib.contextmanager
def alone(folder: Path, key: str) -> Iterator[None]:
    """Keep other processes from writing the files of the warm key ``key`` meanwhile, where the disk has locks at all.

    So a plan and its receipt are of one warmup, and what two processes add to a file is united. Readers need no lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            place = path_of(folder, key, "receipt").parent
            stack.enter_context(locks.hold(place, "receipt", f"the receipt {key}"))
        except (OSError, NotImplementedError) as error:
            log.debug("fxwarm: no lock for %s: %s", key, error)
        yield


def write(path: Path, text: str) -> bool:
    """Put ``text`` at ``path`` in one atomic step; return whether that worked. Never raises for the disk's sake."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        log.warning("fxwarm: could not write %s: %s", path, error)
        return False
    return True


def read(path: Path, cls: type[T]) -> T | None:
    """Return the record at ``path``, or None, with the reason logged, where there is none that can be believed."""
    try:
        status = path.stat()
        if status.st_size > LARGEST:
            raise ValueError(f"it has {status.st_size} bytes, more than {LARGEST}")
        if status.st_uid not in (os.getuid(), 0, path.parent.parent.stat().st_uid):
            raise ValueError(
                f"it belongs to user {status.st_uid}, who owns neither this process nor the folder"
            )
        if status.st_mode & stat.S_IWOTH:
            raise ValueError("anybody may write it; chmod o-w it or remove it")
        record: T = cls.from_json(path.read_bytes())  # type: ignore[attr-defined]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("fxwarm: ignoring %s: %s", path, error)
        return None
    return record


def _beside_inductor() -> str:
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return os.path.join(cache_dir(), "fxwarm")
    except Exception as error:  # torch may move it, or find no home directory
        log.debug("no Inductor cache folder: %s", error)
        return os.path.join(tempfile.gettempdir(), f"fxwarm_{os.getuid()}")


@functools.lru_cache(maxsize=8)
def _root(wanted: str) -> Path:
    folder = Path(wanted)
    for place in (folder.absolute(), *roots.in_use()):
        roots.warn_if_remote(place)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & stat.S_IWOTH:
            log.warning(
                "fxwarm: anybody may write %s; chmod o-w it, or set FXWARM_CACHE_DIR", folder
            )
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        private = Path(tempfile.mkdtemp(prefix="fxwarm-"))
        log.warning(
            "fxwarm: %s cannot be written (%s); plans go to %s and will not be kept for the next start; "
            "set FXWARM_CACHE_DIR to a folder that can",
            folder,
            error.strerror or error,
            private,
        )
        return private
