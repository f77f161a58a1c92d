"""Whether torch alone loads a package that it made: AOTInductor's ``.pt2`` of ``x * 2 + 1``, without fxwarm.

    python tests/gpu/plain_package.py [--device cuda]

Made in one process, loaded in a fresh one. On the H200 machine of 2026-11-30 (torch 2.11.0+cu130) the second process
ended with a segmentation fault in torch's loader, so that fxwarm's packages could not be tested there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

# this file's folder holds files with the names of libraries: it must not be where imports look first
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]


def run_stage(what: str, path: str, device: str) -> None:
    """Make the package, or load it and check one result."""
    import torch

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 + 1

    x = torch.randn(4, 1024, device=device)
    if what == "save":
        batch = torch.export.Dim("batch", min=1, max=64)
        with torch.no_grad():
            program = torch.export.export(Model(), (x,), dynamic_shapes={"x": {0: batch}})
            torch._inductor.aoti_compile_and_package(program, package_path=path)
        return
    assert torch.allclose(torch._inductor.aoti_load_package(path)(x), x * 2 + 1)


def main() -> int:
    """Run both stages; return the exit code of the one that failed, 0 if none did."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stage", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        run_stage(*args.stage, args.device)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "plain.pt2"))
        for what in ("save", "load"):
            command = [sys.executable, __file__, "--device", args.device, "--stage", what, path]
            code = subprocess.run(command, check=False).returncode
            print(f"{what}: exit code {code}", flush=True)
            if code:
                return abs(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
