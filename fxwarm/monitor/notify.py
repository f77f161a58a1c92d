"""The operating system's notice that a file of a folder was made or opened: fanotify, else inotify, through ctypes.

fanotify also says whether it was this process (to anybody since Linux 5.13: no privilege is needed to know one's own
process from others), which inotify cannot. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from pathlib import Path
from typing import NamedTuple, Protocol

OPEN, MOVED_FROM, MOVED_TO, CREATE, ISDIR = 0x20, 0x40, 0x80, 0x100, 0x40000000  # same bits in both

_ENOSPC = 28


class Notice(NamedTuple):
    """One thing that happened in a watched folder."""

    folder: Path
    name: str
    is_open: bool
    """Opened, else new."""
    mine: bool | None
    """Whether this process did it; None where the system does not tell."""
    source: str | None = None
    """The name that it had before it was renamed, "" where that was in no watched folder; None where nobody tells."""


class Notifier(Protocol):
    """A queue of notices."""

    def watch(self, folder: Path, *, opens: bool) -> None:
        """Tell what is opened in ``folder``, or what is new there. Raises OSError."""

    def read(self) -> list[Notice]:
        """Return what there is to tell; empty where nothing is. Raises OSError once closed."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""

    def close(self) -> None:
        """End it."""


class Fanotify:
    """Notices that say who did it. Raises OSError where the kernel is too old or a container forbids it."""

    _HEAD = struct.Struct("IBBHQii")
    _NAME, _ON_CHILD, _INIT = 2, 0x08000000, 0x1 | 0x2 | 0x400 | 0x800
    """Record type of a folder and a name; events of children; close on exec, no blocking, report both."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.fanotify_mark.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p)  # fmt: skip
        self._folders: dict[bytes, Path] = {}
        self._fd = _checked(self._libc.fanotify_init(self._INIT, os.O_RDONLY))

    def watch(self, folder: Path, *, opens: bool) -> None:
        """See Notifier."""
        mask = (OPEN | self._ON_CHILD) if opens else CREATE | MOVED_TO | ISDIR
        self._folders[self._handle(folder)] = folder
        _checked(self._libc.fanotify_mark(self._fd, 1, mask, -100, os.fsencode(folder)))

    def read(self) -> list[Notice]:
        """See Notifier."""
        found, at = [], 0
        data = _read(self._fd)
        while at + self._HEAD.size <= len(data):
            length, _, _, head, mask, _, pid = self._HEAD.unpack_from(data, at)
            record = data[at + head : at + length]
            at += length
            if len(record) < 20 or record[0] != self._NAME or (mask & OPEN and mask & ISDIR):
                continue
            end = 20 + struct.unpack_from("I", record, 12)[0]
            folder = self._folders.get(record[12:end])
            name = os.fsdecode(record[end : struct.unpack_from("H", record, 2)[0]].split(b"\0")[0])
            if folder is not None and name != ".":
                found.append(Notice(folder, name, bool(mask & OPEN), pid == os.getpid()))
        return found

    def fileno(self) -> int:
        """See Notifier."""
        return self._fd

    def close(self) -> None:
        """See Notifier."""
        os.close(self._fd)

    def _handle(self, folder: Path) -> bytes:
        """Return the kernel's own name of ``folder``, as it stands in the records."""
        room, mount = ctypes.create_string_buffer(8 + 128), ctypes.c_int()
        struct.pack_into("I", room, 0, 128)
        _checked(
            self._libc.name_to_handle_at(-100, os.fsencode(folder), room, ctypes.byref(mount), 0)
        )
        return room.raw[: 8 + struct.unpack_from("I", room)[0]]


class Inotify:
    """Notices that do not say who did it, but what a renamed thing was called before."""

    _HEAD = struct.Struct("iIII")

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._folders: dict[int, Path] = {}
        self._sources: dict[int, str] = {}
        self._fd = _checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def watch(self, folder: Path, *, opens: bool) -> None:
        """See Notifier."""
        mask = OPEN if opens else CREATE | MOVED_TO | MOVED_FROM
        number = _checked(self._libc.inotify_add_watch(self._fd, os.fsencode(folder), mask))
        self._folders[number] = folder

    def read(self) -> list[Notice]:
        """See Notifier."""
        found, at = [], 0
        data = _read(self._fd)
        while at + self._HEAD.size <= len(data):
            number, mask, cookie, length = self._HEAD.unpack_from(data, at)
            at += self._HEAD.size + length
            name = os.fsdecode(data[at - length : at].rstrip(b"\0"))
            folder = self._folders.get(number)
            if folder is None or not name or (mask & OPEN and mask & ISDIR):
                continue
            if mask & MOVED_FROM:
                self._sources[cookie] = name
            else:
                source = self._sources.pop(cookie, "") if mask & MOVED_TO else None
                found.append(Notice(folder, name, bool(mask & OPEN), None, source))
        return found

    def fileno(self) -> int:
        """See Notifier."""
        return self._fd

    def close(self) -> None:
        """See Notifier."""
        os.close(self._fd)


def open_notifier(folder: Path) -> Notifier | None:
    """Return the best notifier that works for ``folder``, watching what is new there; None where there is none."""
    for kind in (Fanotify, Inotify):
        with contextlib.suppress(OSError, AttributeError):  # not Linux, an old kernel, NFS, overlay
            notifier: Notifier = kind()
            try:
                notifier.watch(folder, opens=False)
                return notifier
            except OSError:
                notifier.close()
    return None


def is_full(error: OSError) -> bool:
    """Whether this user may have no more watches."""
    return error.errno == _ENOSPC


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except BlockingIOError:
        return b""


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
