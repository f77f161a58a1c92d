"""What ``import fxwarm`` adds to a process that has torch, in seconds: the median of nine fresh processes.

python tests/bench/bench_import.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

CODE = "import torch, time; t = time.perf_counter(); import fxwarm; print(time.perf_counter() - t)"


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", CODE]
    seconds = [
        float(subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout)
        for _ in range(9)
    ]
    print(
        f"import fxwarm after torch: {statistics.median(seconds):.3f} s, at most {max(seconds):.3f} s"
    )


if __name__ == "__main__":
    main()
