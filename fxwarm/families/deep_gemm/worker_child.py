"""A worker of NVRTC mode: launches one witness after the other, so that the library compiles each into its cache.

Run as ``python -m fxwarm.families.deep_gemm.worker_child <config as JSON>``, with the environment of the process that
will load the kernels: its cache, its NVRTC. Reads a request a line from stdin, answers in lines of JSON, and exits at
the end of stdin or when the device is of no use any more.

Request: {"witness": a KernelCall, "settings": {...}, "alignment": rows, "memory": bytes}
Answers: {"ready": true}, {"seconds": ..., "error": text, "words": what the compiler printed, "usable": bool}.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from typing import Any

import msgspec

from fxwarm.families.deep_gemm.load import load
from fxwarm.families.deep_gemm.recorder_child import opens, repeat, say
from fxwarm.records import CompileKey, Planned
from passes.records import KernelCall

_LOG = "NVRTC log:"
"""What the library prints in front of the compiler's messages, and only where a compile failed."""


def main(config: dict[str, Any]) -> None:
    """Serve requests until the end of stdin."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what the library prints must not look like an answer
    torch: Any = importlib.import_module("torch")
    library: Any = importlib.import_module(config["module"])
    if not opens(torch, config["device"]):
        sys.exit(1)
    say(answers, {"ready": True})
    for line in iter(sys.stdin.buffer.readline, b""):
        answer = serve(json.loads(line), config["device"], library)
        # an illegal access stays with the context: the next witness gets another worker
        usable = not answer["error"] or opens(torch, config["device"])
        say(answers, {**answer, "usable": usable})
        if not usable:
            sys.exit(1)


def serve(request: dict[str, Any], device: str, library: Any) -> dict[str, Any]:
    """Launch one witness; return how that went."""
    repeat(request["settings"], library)
    call = msgspec.convert(request["witness"], KernelCall)
    planned = Planned(CompileKey("deep_gemm", call.op), call)
    start = os.fstat(2).st_size
    (loaded,) = load(
        [planned],
        library,
        lambda call: None,
        memory=request["memory"],
        alignment=request["alignment"],
        device=device,
    )
    words = printed(start) if loaded.error else ""
    _, found, log = words.partition(_LOG)
    return {"seconds": loaded.seconds, "error": loaded.error, "words": log.strip() if found else ""}


def printed(start: int) -> str:
    """Return what came to stderr, a file, since it had ``start`` bytes."""
    ctypes.CDLL(None).fflush(None)  # C++ keeps it back as long as it is no terminal
    with open(f"/proc/self/fd/{sys.stderr.fileno()}", "rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
