"""Ask the library which kernels calls need: a child process sweeps them against a stand-in compiler.

One child per process and device serves all graphs. It sees this process's device by UUID, repeats
the library's settings and environment, needs no weights, executes nothing on its operands, and
never touches the real cache. About 50 us a call after some 4 s to start, which ``prepare`` hides
behind the trace.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fxwarm import exc
from fxwarm.families.deep_gemm import cache, device, library, standin, sweep, toolchain
from fxwarm.families.deep_gemm.child import Child
from fxwarm.families.deep_gemm.match import FAMILY
from fxwarm.families.deep_gemm.source import key_in, tag_of
from fxwarm.records import CompileKey, Library, Planned, Source, Target
from passes.records import Gap, KernelCall

__all__ = ["Recorder", "compare", "recorder_for"]

log = logging.getLogger(__name__)

SHARED = 1 << 30
"""Bytes of the buffer that all operands share at most; what is larger, and only a kernel would touch, pretends."""


class Recorder:
    """One child, started at the first need. Its methods may be called from any thread.

    It asks as if nvcc compiled, also where the library is told to use NVRTC: the names of entries are nvcc's then.
    ``patience`` is how many seconds may pass without a word from the child, a sign of life every 2 s included;
    ``start_patience`` how many for its imports.
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
        self._child: Child | None = None
        self._lock = threading.RLock()
        self._requests = 0
        self._owner = os.getpid()
        self._forks = True

    def start(self) -> None:
        """Start the child and compile what it hands out. Returns when it can be asked.

        Raises LibraryError where it cannot: no compiler, a library that does not import.
        """
        with self._lock:
            if self._child is not None and self._child.is_alive:
                return
            compiler = toolchain.find_compiler(self.generation)
            toolchain.check(compiler, self.target.arch or "sm_90a", self.generation)
            if self._room is None:
                self._room = standin.make_room((None, cache.roots(self.generation).write.parent))
            standin.write_standin(self._room, compiler.text)
            child = self._child = self._spawn(self._room)
            if not (self._room / "stub.cubin").exists():
                standin.compile_stub(self._room, compiler, self.target.arch or "sm_90a")
            self._forks = bool(child.answer(self.start_patience, "to start").get("forks"))

    def record(
        self,
        calls: Sequence[KernelCall],
        *,
        memory: int | None = None,
        first: Sequence[Planned] = (),
    ) -> Iterator[Planned | Gap]:
        """Yield each kernel that the library asks for over every attainable size of ``calls``.

        The witness is the call with the smallest M that asks for it. ``first`` is what the model expects: its
        witnesses are asked before all other calls, in this order, so that the builds which take longest begin at
        once; a kernel that is seen there has the model's witness. Beyond a million calls, and where the tensors would
        take more than ``memory`` bytes of the device, one M of each interval is asked instead. What the library refuses
        is a gap with its own words. Raises LibraryError if the child cannot start, dies, hangs, or fails every call.
        """
        sweeps, gaps = _sweeps(calls, memory)
        yield from gaps
        if not sweeps:
            return
        with self._lock:
            try:
                self.start()
                yield from self._ask(sweeps, [p for p in first if p.witness], memory)
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
            child, self._child = self._child, None
            if child is not None:
                child.end()
            if self._room is not None:
                shutil.rmtree(self._room, ignore_errors=True)
                self._room = None

    def _ask(
        self, full: Sequence[sweep.Sweep], first: Sequence[Planned], memory: int | None
    ) -> Iterator[Planned | Gap]:
        self._requests += 1
        expected = {p.key: p.witness for p in first}
        sweeps = [*(sweep.make_sweep(w) for w in expected.values() if w), *full]
        real = sum(int(s.real_bytes().max(initial=0)) for s in full)
        request = {
            "id": self._requests,
            "memory": SHARED if memory is None else max(0, min(SHARED, memory - real)),
            "settings": library.settings_to_repeat(self.found),
            "first": len(expected),
            "calls": [s.request() for s in sweeps],
        }
        child = self._child
        assert child is not None
        child.send(request)
        begin, failures, keys = time.monotonic(), dict[int, str](), set[CompileKey]()
        while "done" not in (answer := child.answer(self.patience, "during a sweep")):
            if "entry" in answer:
                planned = _planned(answer, sweeps)
                if answer["call"] < len(expected) and planned.key in expected:
                    # a call asks for its layout kernel first, and another call may be smaller
                    witness = expected[planned.key]
                    planned = msgspec.structs.replace(planned, witness=witness)
                if planned.key not in keys:
                    keys.add(planned.key)
                    yield planned
            elif "failed" in answer and answer["call"] >= len(expected):
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
                    f"{answer['died']}: {child.words()}"
                )
        if len(failures) == len(full) and not keys:
            raise exc.LibraryError(library.probe_message(self.found, failures[min(failures)]))
        log.info(
            "fxwarm: %s named %d kernels for %d calls in %.2f s",
            self.found, len(keys), answer["made"], time.monotonic() - begin,
        )  # fmt: skip

    def _spawn(self, room: Path) -> Child:
        config = {
            "module": self.found.module,
            "device": self.target.device,
            "root": str(room),
            "log": str(room / "log.txt"),
        }
        return Child(
            "recorder_child",
            config,
            room=room,
            environ=device.child_environment(self.target.device) | standin.environment(room),
            found=self.found,
            task=f"asks {self.found} for its kernels",
        )


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


def _sweeps(calls: Sequence[KernelCall], memory: int | None) -> tuple[list[sweep.Sweep], list[Gap]]:
    found: list[sweep.Sweep] = []
    gaps: list[Gap] = []
    for call in calls:
        try:
            found.append(sweep.make_sweep(call))
        except ValueError as error:
            gaps.append(Gap(call.op, f"{call}: {error}", family=FAMILY))
    if sum(len(s.points) for s in found) > sweep.MOST_CALLS:
        found = [sweep.thin(s) for s in found]
    if memory is not None:
        found, lost = sweep.within(found, memory)
        gaps += lost
    return [s for s in found if len(s.points)], gaps


def _planned(answer: dict[str, Any], sweeps: Sequence[sweep.Sweep]) -> Planned:
    entry, code = str(answer["entry"]), str(answer["code"])
    key = key_in(code, tag_of(entry))
    witness = sweeps[answer["call"]].witness(answer["row"])
    return Planned(key, witness, Source(entry, code, tuple(answer["flags"])))


def _at(planned: Planned) -> str:
    return str(planned.witness) if planned.witness is not None else "no call"
