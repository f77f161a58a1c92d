"""The installed FlashInfer over modules that do nothing: its real tuner, runners and functions, on a CPU.

What is not the library's own here: ``fused_moe_90`` and ``gemm`` as compiled modules, the device's capabilities, and
how long a tactic takes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MODULES = ("fused_moe_90", "trtllm_utils", "gemm")
ALGORITHMS = 2
"""What cuBLASLt would list for a shape."""


class FakeRunner:
    """What the module's C++ runner answers; ``ran`` are the tactics of real calls."""

    def __init__(self) -> None:
        self.ran: list[list[int]] = []

    def get_gemm1_tactic_count(self) -> int:
        return 3

    def get_gemm2_tactic_count(self) -> int:
        return 2

    def get_tactic_occupancy(self, tactic: int) -> int:
        return 1

    def run_moe(self, *args: Any) -> None:
        self.ran.append(next(list(a) for a in args if isinstance(a, list) and len(a) == 2))

    def run_gemm_profile(self, *args: Any) -> None:
        pass


def fake_gemm(ran: list[tuple[int, int]]) -> SimpleNamespace:
    """Return the module of ``bmm_fp8``; ``ran`` gets (rows, algorithm) of each launch, -1 for the default one."""

    def run(a: Any, *args: Any) -> None:
        ran.append((int(a.shape[1]), int(args[-1]) if len(args) > 6 else -1))

    return SimpleNamespace(
        bmm_fp8=run,
        bmm_fp8_run_with_algo=run,
        bmm_fp8_get_algos=lambda *args: ALGORITHMS,
        cutlass_segment_gemm=None,
    )


def make_library(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: Callable[[tuple[int, ...], int], float] = lambda shape, tactic: 1.0 + tactic,
    built: bool = True,
) -> SimpleNamespace:
    """Put the library's workspace into ``folder``; ``seconds(shape, tactic)`` is the clock of its tuner."""
    # read at import: without a GPU the architecture must be named
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    if "FLASHINFER_WORKSPACE_BASE" not in os.environ:
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp(prefix="flashinfer-"))
    import torch
    from flashinfer import tllm_utils, utils
    from flashinfer.autotuner import AutoTuner
    from flashinfer.fused_moe import core
    from flashinfer.gemm import gemm_base
    from flashinfer.jit import env

    from fxwarm.families.flashinfer import limit

    monkeypatch.setattr(env, "FLASHINFER_WORKSPACE_DIR", folder)
    runner, measured, gemms = FakeRunner(), [], []
    module = SimpleNamespace(
        init=lambda *a: runner,
        set_deepgemm_jit_include_dirs=lambda d: None,
        interleave_moe_weights_for_sm90_mixed_gemm=None,
    )
    spec = SimpleNamespace(build_and_load=lambda: module)
    gemm = SimpleNamespace(build_and_load=lambda: fake_gemm(gemms))
    monkeypatch.setattr(core, "gen_cutlass_fused_moe_sm90_module", lambda *a: spec)
    monkeypatch.setattr(gemm_base, "gen_gemm_module", lambda: gemm)
    monkeypatch.setattr(tllm_utils, "get_trtllm_utils_module", lambda: None)
    for home in (core, utils):
        monkeypatch.setattr(home, "get_compute_capability", lambda d: (9, 0))
    monkeypatch.setattr(core, "device_support_pdl", lambda d: True)
    monkeypatch.setattr(core, "is_cuda_version_at_least", lambda v: True)
    monkeypatch.setattr(torch.cuda, "device", lambda d: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def profile(
        self: Any, tunable: Any, inputs: Any, tactic: int, config: Any, *args: Any, **kwargs: Any
    ) -> float:
        measured.append((tuple(inputs[0].shape), tactic))
        return 1e3 * seconds(tuple(inputs[0].shape), tactic)

    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", profile)
    monkeypatch.setattr(AutoTuner, "_instance", None)
    monkeypatch.setattr(limit, "_largest", 1)
    for name in MODULES if built else ():
        put_module(folder, name)

    def restart() -> None:
        """Forget what a process keeps in memory."""
        AutoTuner._instance = None
        core.get_cutlass_fused_moe_module.cache_clear()
        gemm_base.get_gemm_module.cache_clear()
        measured.clear()
        gemms.clear()
        limit._largest = 1

    restart()
    return SimpleNamespace(
        core=core, runner=runner, measured=measured, gemms=gemms, restart=restart, folder=folder
    )


def put_module(folder: Path, name: str) -> Path:
    """Put a file where the built module ``name`` would lie."""
    path = folder / "cached_ops" / name / f"{name}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"not really")
    return path
