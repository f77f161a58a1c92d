"""FlashInfer on a machine without a GPU: the real tuner and the real functions, over a module that does nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = importlib.util.find_spec("flashinfer") is not None
REASON = "flashinfer-python is not installed: the tests against its own functions need it"


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

    def run_moe(self, *args) -> None:
        self.ran.append(next(list(a) for a in args if isinstance(a, list) and len(a) == 2))

    def run_gemm_profile(self, *args) -> None:
        pass


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The installed FlashInfer with a fake ``fused_moe_90``, a fake clock and a private workspace."""
    if not HERE:
        pytest.skip(REASON)
    # read at import: without a GPU the architecture must be named
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp(prefix="flashinfer-"))
    import torch
    from flashinfer.autotuner import AutoTuner
    from flashinfer.fused_moe import core
    from flashinfer.jit import env

    from fxwarm.families.flashinfer import tuning

    monkeypatch.setattr(env, "FLASHINFER_WORKSPACE_DIR", tmp_path)
    runner, measured = FakeRunner(), []
    module = SimpleNamespace(
        init=lambda *a: runner,
        set_deepgemm_jit_include_dirs=lambda d: None,
        interleave_moe_weights_for_sm90_mixed_gemm=None,
    )
    spec = SimpleNamespace(build_and_load=lambda: module)
    monkeypatch.setattr(core, "gen_cutlass_fused_moe_sm90_module", lambda *a: spec)
    monkeypatch.setattr(core, "get_compute_capability", lambda d: (9, 0))
    monkeypatch.setattr(core, "device_support_pdl", lambda d: True)
    monkeypatch.setattr(core, "is_cuda_version_at_least", lambda v: True)
    monkeypatch.setattr(torch.cuda, "device", lambda d: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def profile(self, tunable, inputs, tactic, config, *args, **kwargs) -> float:
        measured.append((tuple(inputs[0].shape), tactic))
        return 1.0 + tactic

    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", profile)
    monkeypatch.setattr(AutoTuner, "_instance", None)
    monkeypatch.setattr(tuning, "_largest", 1)
    core.get_cutlass_fused_moe_module.cache_clear()
    for name in ("fused_moe_90", "trtllm_utils"):
        path = Path(tmp_path) / "cached_ops" / name / f"{name}.so"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"not really")

    def restart() -> None:
        """Forget what a process keeps in memory."""
        AutoTuner._instance = None
        core.get_cutlass_fused_moe_module.cache_clear()
        measured.clear()
        tuning._largest = 1

    yield SimpleNamespace(
        core=core, runner=runner, measured=measured, restart=restart, folder=Path(tmp_path)
    )
    core.get_cutlass_fused_moe_module.cache_clear()
