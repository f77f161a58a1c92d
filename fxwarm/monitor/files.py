"""Watches the entries of a kernel cache: nothing per call of anybody, only when a file is made or opened.

Elsewhere than on Linux, or where the system allows no watches, listings are compared at each drain: what is new is seen,
not what is opened.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

from fxwarm.monitor import notify, stack
from fxwarm.monitor.event import JitEvent, Kind
from fxwarm.monitor.notify import Notice
from fxwarm.monitor.stack import Moment, Sight
from fxwarm.monitor.watchers import on_drain

log = logging.getLogger(__name__)

Told = Callable[[Path, str, Notice], None]
"""``told(entry, file, notice)``: ``file`` of that entry was opened, or, with "", the entry is new."""


class FolderWatch:
    """Watches the entries (subfolders) of ``folders``; ``told`` runs in a thread of its own, or in ``drain``.

    ``beside`` are folders in which entries are made before they are renamed: what is new there is told as well.
    """

    def __init__(self, folders: Iterable[Path], told: Told, beside: Iterable[Path] = ()) -> None:
        self.folders, self._beside, self._told = list(folders), list(beside), told
        self._known: set[Path] = set()
        self._lock = threading.RLock()
        self._stopped = False
        self._start()
        _alive.add(self)

    @property
    def sees_opens(self) -> bool:
        """Whether opened files are seen, or only new ones."""
        return self._notifier is not None

    def drain(self) -> None:
        """Return once all that happened before is told."""
        if self._stopped:
            return
        if self._notifier is not None:
            end = time.monotonic() + 0.5
            while _waiting(self._notifier.fileno()) and time.monotonic() < end:
                time.sleep(0.002)
            with self._lock:
                return
        for folder in self.folders:
            for entry in _entries(folder):
                if entry not in self._known:
                    self._known.add(entry)
                    self._tell(entry, "", Notice(folder, entry.name, False, None))

    def stop(self) -> None:
        """End it."""
        with self._lock:
            if not self._stopped and self._notifier is not None:
                os.write(self._wake, b"x")  # the thread closes what it reads from
            self._stopped = True
        _alive.discard(self)

    def _start(self) -> None:
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
        self._notifier = notify.open_notifier(self.folders[0]) if self.folders else None
        for folder in (*self.folders[1:], *self._beside):
            self._watch(folder, opens=False)
        for folder in self.folders:
            for entry in _entries(folder):
                self._known.add(entry)
                self._watch(entry, opens=True)
        if self._notifier is not None:
            self._woken, self._wake = os.pipe()
            threading.Thread(
                target=self._run, args=(self._notifier, self._woken, self._wake), name="fxwarm-files", daemon=True
            ).start()  # fmt: skip

    def _restart(self) -> None:
        """Watch anew in a forked child: the thread is its parent's, and so are the notices in the queue."""
        self._lock = threading.RLock()
        if self._stopped:
            return
        if self._notifier is not None:
            with contextlib.suppress(OSError):
                self._notifier.close()
            for handle in (self._woken, self._wake):
                os.close(handle)
        self._start()

    def _watch(self, folder: Path, *, opens: bool) -> None:
        if self._notifier is not None:
            try:
                self._notifier.watch(folder, opens=opens)
            except OSError as error:  # gone by now, or there are no watches left
                if notify.is_full(error):
                    log.warning(
                        "fxwarm: no watches are left, loads from %s are not seen; raise "
                        "fs.inotify.max_user_watches and fs.fanotify.max_user_marks", folder
                    )  # fmt: skip

    def _run(self, notifier: notify.Notifier, woken: int, wake: int) -> None:
        try:
            # select() takes no descriptor beyond 1023, and a server has thousands
            ready = select.poll()
            for handle in (notifier.fileno(), woken):
                ready.register(handle, select.POLLIN)
            while all(handle != woken for handle, _ in ready.poll()):
                with self._lock:
                    if self._stopped:
                        break
                    for notice in notifier.read():
                        self._take(notice)
        except (OSError, ValueError):
            log.debug("fxwarm: no longer watching %s", self.folders, exc_info=True)
        finally:
            with self._lock:  # from now on these numbers are other files
                self._stopped = True
                notifier.close()
                os.close(woken)
                os.close(wake)

    def _take(self, notice: Notice) -> None:
        if notice.is_open:
            self._tell(notice.folder, notice.name, notice)
        else:
            entry = notice.folder / notice.name
            if notice.folder in self.folders:
                self._watch(entry, opens=True)
            self._tell(entry, "", notice)

    def _tell(self, entry: Path, file: str, notice: Notice) -> None:
        try:
            self._told(entry, file, notice)
        except Exception:  # nobody is there to catch it
            log.debug("fxwarm: %s", entry, exc_info=True)


def watch_cache(
    folders: Iterable[Path],
    binary: str,
    describe: Callable[[Path, Kind], JitEvent | None],
    report: Callable[..., None],
    *,
    beside: Iterable[Path] = (),
    is_mine: Callable[[Notice], bool | None] = lambda notice: notice.mine,
) -> Callable[[], None]:
    """Report each new entry of a library's cache as a build, each opened ``binary`` as a load; return what ends it.

    The stacks of this process are read at once, while the call that did it still runs: of a build also when its folder
    appears in ``beside``, which is when its compile begins. ``describe`` has time afterwards.
    """
    begun: collections.deque[Sight] = collections.deque(maxlen=64)

    def told(entry: Path, file: str, notice: Notice) -> None:
        if file not in ("", binary):
            return
        now = stack.sights()
        before, mine = list(begun), is_mine(notice)
        if not file:
            begun.extend(s for s in now if s.call is not None)
            now += reversed(before)
        event = describe(entry, "load" if file else "build") if mine is not False else None
        if event is not None:
            report(event, moment=Moment(now, mine))

    files = FolderWatch(folders, told, beside)
    forget = on_drain(files.drain)

    def stop() -> None:
        forget()
        files.stop()

    return stop


def seconds_of(source: Path, binary: Path) -> float:
    """Return how long a compile took: from when its source was written to when its binary was; 0 if unknown."""
    try:
        return max(0.0, (binary.stat().st_mtime_ns - source.stat().st_mtime_ns) / 1e9)
    except OSError:
        return 0.0


_alive: weakref.WeakSet[FolderWatch] = weakref.WeakSet()


def _after_fork() -> None:
    for watch in list(_alive):
        watch._restart()


os.register_at_fork(after_in_child=_after_fork)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir())
    except OSError:
        return []


def _waiting(handle: int) -> bool:
    import fcntl
    import struct
    import termios

    left = bytearray(4)
    with contextlib.suppress(OSError):
        fcntl.ioctl(handle, termios.FIONREAD, left)
        return bool(struct.unpack("i", left)[0])
    return False
