"""Ask the library which kernels calls need: a child process sweeps them against a stand-in compiler.

One child per process and device serves all graphs. It sees this process's device by UUID, repeats
the library's settings and environment, needs no weights, executes nothing on its operands, and
never touches the real cache. About 50 us a call after some 4 s to start, which ``prepare`` hides
behind the trace.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fxwarm import exc
from fxwarm.families.deep_gemm import cache, device, library, standin, sweep, toolchain
from fxwarm.families.deep_gemm.match import FAMILY
from fxwarm.families.deep_gemm.source import key_in, tag_of
from fxwarm.records import CompileKey, Library, Planned, Source, Target
from passes.records import Gap, KernelCall

__all__ = ["Recorder", "compare", "recorder_for"]

log = logging.getLogger(__name__)

MEMORY = 1 << 30
"""Bytes of device memory that the child's operands may take; beyond it A and B only pretend."""


class Recorder:
    """One child, started at the first need. Its methods may be called from any thread.

    ``patience`` is how many seconds may pass without a word from the child, a sign of life every
    2 s included; ``start_patience`` how many for its imports.
    """

    def __init__(
        self,
        target: Target,
        found: Library,
        *,
        patience: float = 60.0,
        start_patience: float = 180.0,
    ) -> None:
        self.target, self.found = target, found
        self.patience, self.start_patience = patience, start_patience
        self.generation = dict(found.settings).get("generation", "A")
        self._room: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._requests = 0
        self._owner = os.getpid()
        self._forks = True

    def start(self) -> None:
        """Start the child and compile what it hands out. Returns when it can be asked.

        Raises LibraryError where it cannot: no compiler, a library that does not import.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            if toolchain.uses_nvrtc(self.generation):
                raise exc.LibraryError(
                    "DeepGEMM compiles through NVRTC here, where no compiler can be stood in for; "
                    "unset DG_JIT_USE_NVRTC to have its kernels recorded and built in parallel"
                )
            compiler = toolchain.find_compiler(self.generation)
            toolchain.check(compiler, self.target.arch or "sm_90a", self.generation)
            if self._room is None:
                self._room = standin.make_room((None, cache.roots(self.generation).write.parent))
            standin.write_standin(self._room, compiler.text)
            self._lines = queue.SimpleQueue()
            self._process = self._spawn(self._room)
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
            if not (self._room / "stub.cubin").exists():
                standin.compile_stub(self._room, compiler, self.target.arch or "sm_90a")
            self._forks = bool(self._answer(self.start_patience, "to start").get("forks"))

    def record(
        self, calls: Sequence[KernelCall], *, memory: int = MEMORY
    ) -> Iterator[Planned | Gap]:
        """Yield each kernel that the library asks for over every attainable size of ``calls``.

        The witness is the call with the smallest M that asks for it. Beyond a million calls one M
        of each interval is asked instead. What the library refuses is a gap with its own words.
        Raises LibraryError if the child cannot start, dies, hangs, or fails every call.
        """
        sweeps, gaps = _sweeps(calls)
        yield from gaps
        if not sweeps:
            return
        with self._lock:
            try:
                self.start()
                yield from self._ask(sweeps, memory)
            except BaseException:
                self.close()  # whatever state it is in, the next request gets a fresh child
                raise
            if not self._forks:
                self.close()

    def close(self) -> None:
        """End the child and remove its folder. Harmless to call twice, and in a fork of its owner."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                _end(process)
            if self._room is not None:
                shutil.rmtree(self._room, ignore_errors=True)
                self._room = None

    def _ask(self, sweeps: Sequence[sweep.Sweep], memory: int) -> Iterator[Planned | Gap]:
        self._requests += 1
        request = {
            "id": self._requests,
            "memory": memory,
            "settings": library.live_settings(self.found.module) | _given(self.found),
            "calls": [s.request() for s in sweeps],
        }
        self._send(request)
        begin, failures, keys = time.monotonic(), dict[int, str](), set[CompileKey]()
        while "done" not in (answer := self._answer(self.patience, "during a sweep")):
            if "entry" in answer:
                planned = _planned(answer, sweeps)
                if planned.key not in keys:
                    keys.add(planned.key)
                    yield planned
            elif "failed" in answer:
                failures[answer["call"]] = answer["failed"]
                at = sweeps[answer["call"]]
                words = answer["failed"].strip()
                yield Gap(
                    at.call.op, f"{at.call} at M={at.m_at(answer['row'])}: {words}", family=FAMILY
                )
            elif "forks" in answer:
                self._forks = bool(answer["forks"])
            elif "died" in answer:
                raise exc.LibraryError(
                    f"the process that asks {self.found} for its kernels ended by "
                    f"{answer['died']}: {self._words()}"
                )
        if len(failures) == len(sweeps) and not keys:
            raise exc.LibraryError(library.probe_message(self.found, failures[min(failures)]))
        log.info(
            "fxwarm: %s named %d kernels for %d calls in %.2f s",
            self.found, len(keys), answer["made"], time.monotonic() - begin,
        )  # fmt: skip

    def _spawn(self, room: Path) -> subprocess.Popen[bytes]:
        config = {
            "module": self.found.module,
            "device": self.target.device,
            "root": str(room),
            "log": str(room / "log.txt"),
        }
        environ = device.child_environment(room, self.target.device)
        with open(room / "stderr.txt", "wb") as errors:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "fxwarm.families.deep_gemm.recorder_child",
                    json.dumps(config),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=room,
                env=environ,
                start_new_session=True,  # so that a hanging compiler ends with it
            )

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        lines = self._lines
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(json.loads(line))
        lines.put(None)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def _answer(self, patience: float, when: str) -> dict[str, Any]:
        try:
            answer = self._lines.get(timeout=patience)
        except queue.Empty:
            raise exc.LibraryError(
                f"the process that asks {self.found} for its kernels said nothing for "
                f"{patience:.0f} s {when}: {self._words()}; run it again, or set FXWARM_COVERAGE=off"
            ) from None
        if answer is None:
            raise self._death()
        return answer

    def _death(self) -> exc.LibraryError:
        code = self._process.wait(10) if self._process is not None else None
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        words = self._words()
        if "undefined symbol" in words:
            return exc.LibraryError(library.probe_message(self.found, words))
        return exc.LibraryError(
            f"the process that asks {self.found} for its kernels ended by {how}: {words}; "
            f"check that `import {self.found.module}` works"
        )

    def _words(self) -> str:
        """Return the end of what the child wrote to stderr."""
        try:
            text = (self._room or Path()).joinpath("stderr.txt").read_text(errors="replace")
        except OSError:
            return "(it left no words)"
        return text.strip()[-800:] or "(it left no words)"


def compare(modelled: Sequence[Planned], recorded: Sequence[Planned]) -> list[str]:
    """Return where the model and the library disagree, with shape and M; the library is right."""
    theirs, ours = {p.key: p for p in recorded}, {p.key: p for p in modelled}
    notes = [
        f"drift: {_at(p)} takes {key}, which the model does not expect"
        for key, p in theirs.items()
        if key not in ours
    ]
    notes += [
        f"drift: the model expects {key} at {_at(p)}, which the library did not ask for"
        for key, p in ours.items()
        if key not in theirs
    ]
    return notes


_recorders: dict[tuple[Any, ...], Recorder] = {}
_recorders_lock = threading.Lock()


def recorder_for(target: Target, found: Library) -> Recorder:
    """Return this process's recorder for the current device and this build."""
    key = (
        os.getpid(),
        found.module,
        found.fingerprint,
        target.arch,
        device.identity(target.device),
    )
    with _recorders_lock:
        if key not in _recorders:
            recorder = _recorders[key] = Recorder(target, found)
            atexit.register(recorder.close)
        return _recorders[key]


def _sweeps(calls: Sequence[KernelCall]) -> tuple[list[sweep.Sweep], list[Gap]]:
    found: list[sweep.Sweep] = []
    gaps: list[Gap] = []
    for call in calls:
        try:
            found.append(sweep.make_sweep(call))
        except ValueError as error:
            gaps.append(Gap(call.op, f"{call}: {error}", family=FAMILY))
    if sum(len(s.points) for s in found) > sweep.MOST_CALLS:
        found = [sweep.thin(s) for s in found]
    return [s for s in found if len(s.points)], gaps


def _planned(answer: dict[str, Any], sweeps: Sequence[sweep.Sweep]) -> Planned:
    entry, code = str(answer["entry"]), str(answer["code"])
    key = key_in(code, tag_of(entry))
    witness = sweeps[answer["call"]].witness(answer["row"])
    return Planned(key, witness, Source(entry, code, tuple(answer["flags"])))


def _given(found: Library) -> dict[str, str]:
    return {n: v for n, v in found.settings if n in ("num_sms", "mk_alignment")}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group outlives its leader: forks, compilers
    process.wait(10)


def _at(planned: Planned) -> str:
    return str(planned.witness) if planned.witness is not None else "no call"
