"""Runs the small mHC model cold and with fxwarm, each in a fresh process with empty caches, and sets them side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from fxwarm import exc
from fxwarm.demo.mhc_moe import HIDDEN, LARGEST, STREAMS, Call, Run
from fxwarm.devices import CPU_SMS
from fxwarm.families.mhc.splits import num_splits
from fxwarm.ops.mhc_factories import has_tilelang
from passes.records import Record

CACHES = {
    "TILELANG_CACHE_DIR": "tilelang",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FXWARM_CACHE_DIR": "fxwarm",
}
TIMEOUT = 600.0
"""Seconds for one process; 50 calls take well under a minute on two idle cores."""


class Comparison(Record, frozen=True):
    """The same calls in two processes."""

    without: Run
    with_fxwarm: Run

    @property
    def same_outputs(self) -> bool:
        """Whether every output is the same to the last bit."""
        return [c.digest for c in self.without.calls] == [c.digest for c in self.with_fxwarm.calls]


def builds_after_first(run: Run) -> int:
    """Return the kernels that ``run`` compiled in calls after its first."""
    return sum(call.builds for call in run.calls[1:])


def splits(call: Call) -> int:
    """Return the number of partial sums that the mHC kernels of ``call`` are compiled for."""
    return num_splits(call.tokens, STREAMS * HIDDEN, CPU_SMS)


def compare(calls: int = 50, largest: int = LARGEST) -> Comparison:
    """Run ``calls`` token counts of 2..``largest`` without fxwarm, then with it.

    Raises LibraryError without TileLang, and where a process fails, with the last lines that it wrote.
    """
    if not has_tilelang():
        raise exc.LibraryError(
            "the mHC model needs TileLang to have anything to compile; install fxwarm[tilelang]"
        )
    without = run_process("inductor", calls, largest)
    return Comparison(without, run_process("fxwarm", calls, largest))


def run_process(backend: str, calls: int, largest: int) -> Run:
    """Time the calls in a fresh process whose caches are empty. Raises LibraryError where it fails."""
    with tempfile.TemporaryDirectory(prefix="fxwarm-demo-") as folder:
        output = Path(folder, "run.json")
        environ = {k: v for k, v in os.environ.items() if not k.startswith("FXWARM_")}
        environ |= {name: str(Path(folder, part)) for name, part in CACHES.items()}
        environ.setdefault(
            "OMP_WAIT_POLICY", "PASSIVE"
        )  # on busy cores, threads that spin are timed too
        # a checkout that is on the path but not installed
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", "fxwarm.demo.mhc_moe", "--backend", backend]
        command += ["--calls", str(calls), "--largest", str(largest), "--output", str(output)]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        if done.returncode or not output.exists():
            last = "\n".join(done.stderr.splitlines()[-20:])
            raise exc.LibraryError(
                f"the {backend} process of the demo ended with {done.returncode}:\n{last}"
            )
        run: Run = msgspec.json.decode(output.read_bytes(), type=Run)
        return run
