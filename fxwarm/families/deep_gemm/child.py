"""A process that is asked in lines of JSON and answers in lines of JSON, and that leaves nothing behind.

The recorder asks one of these, the workers of NVRTC mode several. What a child prints goes to a file, so that its
last words can be told when it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxwarm import exc
from fxwarm.families.deep_gemm import library
from fxwarm.records import Library

__all__ = ["Child", "Silence"]

_NO_WORDS = "(it left no words)"


class Silence(exc.LibraryError):
    """The child said nothing for longer than was allowed."""


class Child:
    """One child process of a module of this room, in a session of its own.

    ``task`` completes "the process that ... ended by SIGSEGV", for errors.
    """

    def __init__(
        self,
        module: str,
        config: Mapping[str, Any],
        *,
        room: Path,
        environ: Mapping[str, str],
        found: Library,
        task: str,
        name: str = "stderr",
    ) -> None:
        self._found, self._task = found, task
        self._output = room / f"{name}.txt"
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        command = [sys.executable, "-m", f"fxwarm.families.deep_gemm.{module}", json.dumps(config)]
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=room,
                env=dict(environ),
                start_new_session=True,  # so that a hanging compiler ends with it
            )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def send(self, request: Mapping[str, Any]) -> None:
        """Send one request. Raises LibraryError with its last words if it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.death() from None

    def answer(self, patience: float, when: str) -> dict[str, Any]:
        """Return its next answer. Raises Silence after ``patience`` seconds, LibraryError if it has ended."""
        try:
            answer = self._lines.get(timeout=patience)
        except queue.Empty:
            raise Silence(
                f"the process that {self._task} said nothing for {patience:.0f} s {when}: "
                f"{self.words()}; run it again, or set FXWARM_COVERAGE=off"
            ) from None
        if answer is None:
            raise self.death()
        return answer

    def death(self) -> exc.LibraryError:
        """Return the error that says how it ended."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = self.words()
        if "undefined symbol" in words:
            return exc.LibraryError(library.probe_message(self._found, words))
        return exc.LibraryError(
            f"the process that {self._task} ended by {how}: {words}; "
            f"check that `import {self._found.module}` works"
        )

    def words(self) -> str:
        """Return the end of what it printed."""
        try:
            text = self._output.read_text(errors="replace")
        except OSError:
            return _NO_WORDS
        return text.strip()[-800:] or _NO_WORDS

    def end(self, grace: float = 2.0) -> None:
        """End it and all that it started, at the latest after ``grace`` seconds. Harmless to call twice."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                process.pid, signal.SIGKILL
            )  # the group outlives its leader: forks, compilers
        process.wait(10)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)
