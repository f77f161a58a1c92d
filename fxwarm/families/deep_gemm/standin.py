"""The stand-in compiler: answers like nvcc, compiles nothing, hands out one kernel that does nothing.

DeepGEMM's compiler is a program that can be named (``DG_JIT_NVCC_COMPILER``). Given this one, the
library runs its own heuristics and writes the exact source, flags and cache name of every kernel
that it would have compiled. The compiler's path is in no key, so the names are those of a real run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fxwarm import exc
from fxwarm.families.deep_gemm.toolchain import Compiler

__all__ = ["compile_stub", "environment", "make_room", "write_standin"]

SCRIPT = """\
#!/bin/sh
# fxwarm's stand-in for nvcc
room={room}
if [ "$1" = --version ]; then exec cat "$room/version.txt"; fi
printf '%s\\n' "$@" '' >> "$room/log.txt"
out=
previous=
for argument in "$@"; do
  case "$previous" in -o|--output-file) out=$argument ;; esac
  previous=$argument
done
printf '%s\\n' "$@" > "${{out%/*}}/fxwarm.flags"
exec cp "$room/stub.cubin" "$out"
"""
# exactly one kernel: the library loads "the" kernel of a cubin. It takes any arguments, clusters,
# and all of the shared memory (measured on an H200)
STUB = 'extern "C" __global__ void fxwarm_stub() {}\n'


def make_room(folders: Iterable[Path | None] = (None,)) -> Path:
    """Return a new private folder in which programs may run, in the first of ``folders`` that allows.

    None is the system's temporary folder. Raises LibraryError that names those tried.
    """
    tried: list[str] = []
    for folder in folders:
        try:
            room = Path(tempfile.mkdtemp(prefix="fxwarm-deep_gemm-", dir=folder))
        except OSError as error:
            tried.append(f"{folder}: {error}")
            continue
        probe = room / "probe"
        probe.write_text("#!/bin/sh\nexit 0\n")
        probe.chmod(0o700)
        try:
            if " " in str(room):  # the library's command line has no quotes
                raise OSError("its path holds a space")
            subprocess.run([probe], check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(room, ignore_errors=True)
            tried.append(f"{room.parent}: {error}")
            continue
        probe.unlink()
        return room
    raise exc.LibraryError(
        f"no folder to run the stand-in compiler in ({'; '.join(tried)}); "
        "set TMPDIR to a folder that is not mounted noexec and has no space in its path"
    )


def write_standin(room: Path, version_text: str) -> Path:
    """Write the stand-in into ``room``; return its path. It needs ``stub.cubin`` beside it."""
    (room / "version.txt").write_text(version_text)
    (room / "log.txt").touch()
    script = room / "nvcc"
    script.write_text(SCRIPT.format(room=room))
    script.chmod(0o700)
    return script


def environment(room: Path) -> dict[str, str]:
    """Return the variables that make the library use the stand-in in ``room`` and a cache of its own."""
    return {
        "DG_JIT_CACHE_DIR": str(room / "unused"),
        "DG_JIT_NVCC_COMPILER": str(room / "nvcc"),
        "DG_JIT_USE_NVRTC": "0",  # it compiles in process: nothing could be stood in for
    }


def compile_stub(room: Path, compiler: Compiler, arch: str, timeout: float = 120.0) -> None:
    """Compile the kernel that does nothing for ``arch``, once (about 1 s).

    Raises LibraryError with the compiler's own words.
    """
    source = room / "stub.cu"
    source.write_text(STUB)
    made = room / "stub.part"
    command = [str(compiler.path), "-cubin", f"-arch={arch}", "-o", str(made), str(source)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=room, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise exc.LibraryError(
            f"{compiler} does not compile ({error}); repair the toolkit"
        ) from None
    if done.returncode or not made.is_file():
        words = (done.stderr or done.stdout).strip()[-400:]
        raise exc.LibraryError(
            f"{compiler} cannot compile an empty kernel for {arch} (exit code {done.returncode}): "
            f"{words}; repair the toolkit, or set CUDA_HOME to another"
        )
    os.replace(made, room / "stub.cubin")
