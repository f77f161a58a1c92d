"""The recorder's child process: makes the library name the kernels that calls would need.

Run as ``python -m fxwarm.families.deep_gemm.recorder_child <config as JSON>``, with the library's
compiler variable naming a stand-in and its cache variable a private folder. Reads a request a
line from stdin and answers in lines of JSON; exits at the end of stdin. The process imports torch
and the library once, then serves each request in a fork of itself: what the library keeps in
memory, a kernel that does nothing among it, ends with the request, so every request is told all
of its kernels. Where the import has already opened the device, which no fork survives, it serves
one request and ends.

Request: {"id": 1, "settings": {...}, "memory": bytes, "first": 0,
          "calls": [{"op": ..., "tensors": {name: [dtype, dims, strides]}, "attrs": {...},
                     "rows": [[...], ...]}, ...]}
A dim, stride or attribute is a value, or ["$", i] for the i-th number of the row. The first number
of a row is its M: all calls are swept together, ascending, so the first call that asks for a
kernel is the smallest one that needs it. As many as "first" says are made before, in their order.

Answers: {"entry": ..., "code": ..., "flags": [...], "call": i, "row": j},
         {"failed": text, "call": i, "row": j}, {"at": calls made so far}, {"done": id, ...}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fxwarm.families.deep_gemm.buffers import Buffers, Call
from fxwarm.families.deep_gemm.entries import invoke

SETTERS = {
    "num_sms": ("set_num_sms",),
    "mk_alignment": ("set_mk_alignment_for_contiguous_layout",),
    "pdl": ("set_pdl",),
    "tc_util": ("set_tc_util",),
}
NO_DEVICE = 77 << 8
"""Status of a fork that could not open the device."""
BEAT = 2.0
"""Seconds between two signs of life."""


def main(config: dict[str, Any]) -> None:
    """Serve requests until the end of stdin."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what the library prints must not look like an answer
    torch: Any = importlib.import_module("torch")
    library = importlib.import_module(config["module"])
    forks = not torch.cuda.is_initialized()
    say(answers, {"ready": True, "forks": forks})
    for request in iter(sys.stdin.buffer.readline, b""):
        status = (
            in_fork(json.loads(request), config, torch, library, answers) if forks else NO_DEVICE
        )
        if status == NO_DEVICE:
            say(answers, {"forks": False})
            serve(json.loads(request), config, torch, library, answers)
            return
        if status:
            say(answers, {"died": describe_status(status)})


def in_fork(
    request: dict[str, Any], config: dict[str, Any], torch: Any, library: Any, answers: int
) -> int:
    """Serve a request in a fork of this process; return how that ended, 0 for well."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if opens(torch, config["device"]):
                serve(request, config, torch, library, answers)
                code = 0
            else:
                code = os.WEXITSTATUS(NO_DEVICE)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(child, 0)[1]


def opens(torch: Any, device: str) -> bool:
    """Return whether a fork can use the device: not if an import has touched the driver already."""
    try:
        torch.zeros(1, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        print(f"the device does not open in a fork: {error}", file=sys.stderr)
        return False
    return True


def serve(
    request: dict[str, Any], config: dict[str, Any], torch: Any, library: Any, answers: int
) -> None:
    """Make every call of a request and report each new entry of the private cache."""
    start = time.monotonic()
    root = Path(config["root"], f"r{request['id']}")
    root.mkdir(parents=True, exist_ok=True)
    os.environ["DG_JIT_CACHE_DIR"] = str(root)
    repeat(request["settings"], library)
    calls = [Call(spec, torch) for spec in request["calls"]]
    operands = max((c.operand_bytes for c in calls), default=0)
    buffers = Buffers(torch, config["device"], min(operands, request["memory"]))
    for call in calls:
        call.allocate(buffers)
    points = order(calls, request["first"])
    made = sweep(calls, points, library, answers, root=root, log=config["log"])
    if config["device"] == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - start
    shutil.rmtree(root, ignore_errors=True)
    say(answers, {"done": request["id"], "made": made, "seconds": seconds})


def repeat(settings: dict[str, str], library: Any) -> None:
    """Make the library's settings those of the parent."""
    for name, value in settings.items():
        setter = next((s for n in SETTERS[name] if (s := getattr(library, n, None))), None)
        if setter is not None:
            setter(value in ("True", "1") if name == "pdl" else int(value))


def sweep(
    calls: list[Call],
    points: Iterable[tuple[int, int]],
    library: Any,
    answers: int,
    *,
    root: Path,
    log: str,
) -> int:
    """Make the calls at (call, row); return how many were made."""
    made, beat = 0, time.monotonic()
    seen: set[str] = set()
    size = os.stat(log).st_size
    for index, row in points:
        call = calls[index]
        if call.is_hopeless:
            continue
        made += 1
        try:
            invoke(library, call.op, call.values(row))
            call.succeeded = True
        except Exception as error:
            call.failures += 1
            if call.failures == 1:
                text = f"{type(error).__name__}: {error}"
                say(answers, {"failed": text[-2000:], "call": index, "row": row})
        grown = os.stat(log).st_size
        if grown != size:  # it asked its compiler for something
            size = grown
            for found in new_entries(root, seen, log):
                say(answers, {**found, "call": index, "row": row})
        if time.monotonic() - beat > BEAT:
            beat = time.monotonic()
            say(answers, {"at": made})
    return made


def order(calls: list[Call], first: int) -> Iterator[tuple[int, int]]:
    """Yield (call, row) over the ``first`` calls as they come, then over all others by ascending M."""
    points = [(row[0], i, j) for i, call in enumerate(calls) for j, row in enumerate(call.rows)]
    yield from ((i, row) for _, i, row in points if i < first)
    for _, index, row in sorted(p for p in points if p[1] >= first):
        yield index, row


def new_entries(root: Path, seen: set[str], log: str) -> Iterator[dict[str, Any]]:
    """Yield the entries that the library published since the last look."""
    folder = root / "cache"
    names = sorted(set(os.listdir(folder)) - seen) if folder.is_dir() else []
    for name in names:
        code, flags = folder / name / "kernel.cu", folder / name / "fxwarm.flags"
        if code.is_file():
            seen.add(name)
            # builds of 2025 move file by file and leave ours behind: the log has it last
            text = flags.read_text() if flags.is_file() else last_block(log)
            yield {
                "entry": name,
                "code": code.read_text(),
                "flags": command_flags(text.splitlines()),
            }


def last_block(log: str) -> str:
    """Return the arguments of the stand-in's latest run: blocks end with an empty line."""
    return Path(log).read_text().rstrip("\n").rpartition("\n\n")[2]


def command_flags(arguments: list[str]) -> list[str]:
    """Return the compiler's arguments without its input, its output and the kind of output."""
    found: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("-o", "--output-file"):
            skip = True
        elif argument not in ("-cubin", "--cubin") and not argument.endswith("kernel.cu"):
            found.append(argument)
    return found


def describe_status(status: int) -> str:
    """Return how a process ended, in words."""
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


def say(descriptor: int, answer: dict[str, Any]) -> None:
    """Write one line; the parent being gone is no error of ours."""
    data = (json.dumps(answer) + "\n").encode()
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
