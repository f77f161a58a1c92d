"""Tells when files of a folder tree are made or opened: inotify through ctypes, nothing per call of anybody.

Linux only; elsewhere, or where the system allows no more watches, ``FolderWatch`` compares listings at each drain and
sees what is new, not what is opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

log = logging.getLogger(__name__)

OPEN, MOVED_TO, CREATE, ISDIR = 0x20, 0x80, 0x100, 0x40000000
_HEAD = struct.Struct("iIII")

Told = Callable[[Path, str], None]
"""``told(entry, file)``: ``file`` of that entry was opened, or, with "", the entry is new."""


class FolderWatch:
    """Watches the entries (subfolders) of ``folders``; ``told`` runs in a thread of its own, or in ``drain``."""

    def __init__(self, folders: Iterable[Path], told: Told) -> None:
        self.folders, self._told = list(folders), told
        self._watched: dict[int, tuple[Path, bool]] = {}
        self._known: set[Path] = set()
        self._lock = threading.RLock()
        self._handle = _open_inotify()
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            self._watch(folder, CREATE | MOVED_TO, is_root=True)
            for entry in _entries(folder):
                self._known.add(entry)
                self._watch(entry, OPEN, is_root=False)
        self._thread = threading.Thread(target=self._read, name="fxwarm-files", daemon=True)
        if self._handle >= 0:
            self._thread.start()

    @property
    def sees_opens(self) -> bool:
        """Whether opened files are seen, or only new ones."""
        return self._handle >= 0

    def drain(self) -> None:
        """Return once all that happened before is told."""
        if self._handle >= 0:
            end = time.monotonic() + 0.5
            while _waiting(self._handle) and time.monotonic() < end:
                time.sleep(0.002)
            with self._lock:
                return
        for folder in self.folders:
            for entry in _entries(folder):
                if entry not in self._known:
                    self._known.add(entry)
                    self._told(entry, "")

    def stop(self) -> None:
        """End it."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _watch(self, path: Path, mask: int, *, is_root: bool) -> None:
        if self._handle >= 0:
            number = _libc().inotify_add_watch(self._handle, os.fsencode(path), mask)
            if number >= 0:
                self._watched[number] = (path, is_root)
            elif ctypes.get_errno() == 28:  # ENOSPC: no watches left for this user
                log.warning("fxwarm: no inotify watches left, loads from %s are not seen; raise "
                            "fs.inotify.max_user_watches", path)  # fmt: skip

    def _read(self) -> None:
        import select

        while (handle := self._handle) >= 0:
            try:
                if not select.select([handle], [], [], 0.5)[0]:
                    continue
                with self._lock:
                    data = os.read(handle, 1 << 16)
                    self._tell(data)
            except (OSError, ValueError):  # closed by ``stop``
                return

    def _tell(self, data: bytes) -> None:
        at = 0
        while at + _HEAD.size <= len(data):
            number, mask, _, length = _HEAD.unpack_from(data, at)
            name = data[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0")
            at += _HEAD.size + length
            path, is_root = self._watched.get(number, (None, False))
            if path is None or (mask & OPEN and (mask & ISDIR or not name)):
                continue
            file = os.fsdecode(name)
            if is_root:
                path, file = path / file, ""
                self._watch(path, OPEN, is_root=False)
            try:
                self._told(path, file)
            except Exception:  # nobody is there to catch it
                log.debug("fxwarm: %s", path, exc_info=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir())
    except OSError:
        return []


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _open_inotify() -> int:
    try:
        return int(_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    except (AttributeError, OSError):
        return -1


def _waiting(handle: int) -> bool:
    import fcntl
    import termios

    left = bytearray(4)
    with contextlib.suppress(OSError):
        fcntl.ioctl(handle, termios.FIONREAD, left)
        return bool(struct.unpack("i", left)[0])
    return False
