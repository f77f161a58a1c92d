"""FlashInfer's fused MoE, planned without FlashInfer and without a GPU: which modules, which entries of its tuner.

One layer's experts with the sizes of Qwen3-30B-A3B in bf16, and a language head in fp8. Nothing is built or tuned: the
modules are CUDA, and a tactic is a measurement on the card. What would be is known from the shapes alone.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from fxwarm.ops import flashinfer  # noqa: F401  (registers the ops)
from fxwarm.records import WarmPlan
from passes.records import Record

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCABULARY = 2048, 768, 128, 8, 151936
TARGET = "h200"
LIBRARY = {"flashinfer-python": "0.6.18.post1"}
"""The build that is planned for; it need not be installed."""


class FusedMoe(nn.Module):
    """A mixture of experts and a language head, each one call of FlashInfer."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.bfloat16)
        up_gate = torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16)
        down = torch.empty(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16)
        head = torch.empty(1, VOCABULARY, HIDDEN, dtype=torch.float8_e4m3fn)
        self.up_gate = nn.Parameter(up_gate, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)
        # column-major, as cuBLAS wants the second factor
        self.head = nn.Parameter(head.transpose(1, 2), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each token, [T, H] -> [T, V]."""
        weights, experts = self.router(x).float().softmax(-1).topk(TOP_K)
        y = torch.ops.fxwarm.cutlass_fused_moe(
            x, experts.int(), weights, self.up_gate, self.down, torch.bfloat16, []
        )
        y = y.to(torch.float8_e4m3fn).unsqueeze(0)
        out: Tensor = torch.ops.fxwarm.bmm_fp8(
            y, self.head, self.scale, self.scale, torch.bfloat16, backend="cublas"
        )
        return out.squeeze(0)


class Tuned(Record, frozen=True):
    """The entries of FlashInfer's tuner that one of its GEMMs needs."""

    op: str
    gemm: str
    buckets: tuple[int, ...]
    """Token counts that a tactic is kept for; a call takes that of the smallest bucket that holds its tokens."""


class Fused(Record, frozen=True):
    """What planning the model found, and what it cost."""

    plan: WarmPlan
    modules: tuple[str, ...]
    """Shared objects that FlashInfer compiles at first use, each for every shape."""
    tuned: tuple[Tuned, ...]
    seconds: float

    @property
    def entries(self) -> int:
        """Tactics to measure once, or to read from the file of an earlier start."""
        return sum(len(one.buckets) for one in self.tuned)


def plan_model(tokens: int = 8192) -> Fused:
    """Trace the model on the meta device and plan it for an H200, for steps of up to ``tokens`` tokens."""
    import fxwarm
    from fxwarm.families.flashinfer.tuner_key import bucket_in, is_tuned

    begin = time.perf_counter()
    with torch.device("meta"):
        model = FusedMoe().eval()
        x = torch.empty(min(64, tokens), HIDDEN, dtype=torch.bfloat16)
    shapes = fxwarm.trace(model, x, max_size=tokens)
    plan = fxwarm.plan(shapes, fxwarm.Target.named(TARGET), LIBRARY)
    modules = tuple(key.kernel for key in plan.keys if not is_tuned(key))
    buckets: dict[tuple[str, str], list[int]] = {}
    for planned in plan.planned:
        if is_tuned(planned.key) and planned.witness is not None:
            name = planned.witness.op, planned.key.kernel
            buckets.setdefault(name, []).append(bucket_in(planned.key))
    tuned = tuple(Tuned(op, gemm, tuple(found)) for (op, gemm), found in buckets.items())
    return Fused(plan, modules, tuned, time.perf_counter() - begin)
