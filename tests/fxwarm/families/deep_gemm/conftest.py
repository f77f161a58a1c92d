"""A toolchain and a fake DeepGEMM for the tests of this room."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (before a stub of it can be found in its place)

from fxwarm.families.deep_gemm import library, recorder
from tests.fxwarm.families.deep_gemm.samples import write_package

VERSION_TEXT = (
    "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {0}, V{0}.88\n"
)
NVCC = """\
#!/bin/sh
if [ "$1" = --version ]; then exec cat {home}/version.txt; fi
echo run >> {home}/runs.txt
out=
for argument in "$@"; do
  case "$previous" in -o|--output-file) out=$argument ;; esac
  case "$argument" in *.cu) if grep -q 'does not compile' "$argument"; then
    echo 'kernel.cu(3): error: identifier is undefined' >&2; exit 2; fi
    if grep -q 'takes for ever' "$argument"; then sleep 300; fi ;;
  esac
  previous=$argument
done
sleep {seconds}
exec cp {home}/some.cubin "$out"
"""


def elf(size: int = 256) -> bytes:
    """A whole 64-bit ELF file: a header, and one section that ends with the file."""
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + bytes(16)
    header += (0).to_bytes(8, "little") + (64).to_bytes(8, "little") + bytes(4)
    header += b"".join(n.to_bytes(2, "little") for n in (64, 56, 0, 64, 1, 0))
    section = bytes(4) + (1).to_bytes(4, "little") + bytes(16)
    section += (128).to_bytes(8, "little") + (size - 128).to_bytes(8, "little") + bytes(24)
    return header + section + bytes(size - 128)


@pytest.fixture(scope="session")
def real_nvcc() -> Path:
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("no nvcc in PATH")
    return Path(found)


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """Return what makes a toolkit whose nvcc copies a file, takes ``seconds`` and says its version."""

    def make(version: str = "13.0", seconds: float = 0.0, name: str = "cuda") -> Path:
        home = tmp_path / name
        (home / "bin").mkdir(parents=True)
        (home / "version.txt").write_text(VERSION_TEXT.format(version))
        (home / "some.cubin").write_bytes(elf())
        nvcc = home / "bin" / "nvcc"
        nvcc.write_text(NVCC.format(home=home, seconds=seconds))
        nvcc.chmod(0o700)
        monkeypatch.setenv("CUDA_HOME", str(home))
        monkeypatch.delenv("DG_JIT_NVCC_COMPILER", raising=False)
        return home

    return make


def runs_of(home: Path) -> int:
    """How many compiles a toolkit has made."""
    return len((home / "runs.txt").read_text().split()) if (home / "runs.txt").exists() else 0


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return what installs the fake DeepGEMM of a generation, with a private cache."""

    def install(generation: str = "A", body: str = "", *, real_torch: bool = False) -> Path:
        package = write_package(tmp_path / "site", generation, body, real_torch=real_torch)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        importlib.invalidate_caches()
        monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
        return package

    library._headers.cache_clear()
    yield install
    for r in list(recorder._recorders.values()):
        r.close()
    recorder._recorders.clear()
    sys.modules.pop("deep_gemm", None)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.fixture(scope="session")
def real_elf(real_nvcc, tmp_path_factory) -> bytes:
    """A cubin of the real compiler."""
    folder = tmp_path_factory.mktemp("cubin")
    source, out = folder / "x.cu", folder / "x.cubin"
    source.write_text("__global__ void f(int* x) { *x = 1; }")
    subprocess.run([real_nvcc, "-cubin", "-arch=sm_90a", "-o", out, source], check=True)
    return out.read_bytes()
