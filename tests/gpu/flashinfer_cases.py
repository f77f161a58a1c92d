"""The layers that ``flashinfer.py`` warms: how each is traced, called at a number of tokens, and checked."""

from __future__ import annotations

from typing import Any

import torch

import fxwarm.ops.flashinfer  # noqa: F401
from passes.records import ShapeSet


class Case:
    """One layer with up to ``most`` tokens. Weights are made once for a device."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: list[Any] = []

    def inputs(self, tokens: int, device: str) -> list[Any]:
        """Return what changes from call to call."""
        raise NotImplementedError

    def make_weights(self, device: str) -> list[Any]:
        raise NotImplementedError

    def op(self, *args: Any) -> Any:
        raise NotImplementedError

    def weights(self, device: str) -> list[Any]:
        """Return the same weights each time."""
        if device == "meta":
            return self.make_weights(device)
        self._held = self._held or self.make_weights(device)
        return self._held

    def shapes(self) -> ShapeSet:
        """Return what the layer asks for, traced on meta tensors for 1 to ``most`` tokens."""
        from fxwarm.tracing import trace

        torch._dynamo.reset()
        case = self
        weights = [torch.nn.Parameter(w, requires_grad=False) for w in self.weights("meta")]

        class Layer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.held = torch.nn.ParameterList(weights)

            def forward(self, *inputs: Any) -> Any:
                # torch 2.11 does not unpack a list of parameters
                return case.op(*inputs, *[self.held[i] for i in range(len(weights))])

        inputs = self.inputs(min(7, self.most), "meta")
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, tensor.dim() - 2, min=1, max=self.most)
        return trace(Layer(), *inputs, max_size=self.most)

    def error(self, device: str) -> float:
        """Return the relative error against plain float32."""
        raise NotImplementedError


def normal(shape: tuple[int, ...], device: str, dtype: Any, std: float = 1.0) -> Any:
    made = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return (made if device == "meta" else made.normal_(std=std)).to(dtype)


def relative(got: Any, want: Any) -> float:
    got, want = got.float(), want.float()
    return float((got - want).norm() / want.norm())


class Bmm(Case):
    """An LM head's slice and a side projection in a decode step."""

    N, K = 4096, 2048

    def inputs(self, tokens: int, device: str) -> list[Any]:
        return [normal((1, tokens, self.K), device, torch.float8_e4m3fn)]

    def make_weights(self, device: str) -> list[Any]:
        weight = normal((1, self.N, self.K), device, torch.float8_e4m3fn).transpose(1, 2)
        return [weight, torch.ones(1, device=device), torch.ones(1, device=device)]

    def op(self, a: Any, b: Any, a_scale: Any, b_scale: Any) -> Any:
        return torch.ops.fxwarm.bmm_fp8(a, b, a_scale, b_scale, torch.bfloat16)

    def error(self, device: str) -> float:
        (a,), (b, *scales) = self.inputs(5, device), self.weights(device)
        return relative(self.op(a, b, *scales), a.float() @ b.float())


class MonoMoe(Case):
    """The one shape that ``mono_moe`` has, up to 8 tokens, its up weights interleaved once as a loader would."""

    E, N, K = 256, 512, 2048

    def inputs(self, tokens: int, device: str) -> list[Any]:
        return [normal((tokens, width), device, torch.bfloat16) for width in (self.K, self.E)]

    def make_weights(self, device: str) -> list[Any]:
        held = []
        for rows, width in ((2 * self.N, self.K), (self.K, self.N)):
            held += [
                normal((self.E, rows, width), device, torch.float8_e4m3fn),
                torch.full((self.E, rows // 128, width // 128), 0.02, device=device),
            ]
        if device != "meta":
            from flashinfer.fused_moe.monomoe import interleave_for_tma_wgmma_up

            held[0] = interleave_for_tma_wgmma_up(held[0])
        return held

    def op(self, x: Any, logits: Any, up: Any, up_sf: Any, down: Any, down_sf: Any) -> Any:
        return torch.ops.fxwarm.mono_moe(
            x, logits, up, up_sf, down, down_sf, 8, interleave_up=False
        )

    def error(self, device: str) -> float:
        arguments = [*self.inputs(2, device), *self.weights(device)]
        return relative(self.op(*arguments).cpu(), self.op(*[t.cpu() for t in arguments]))


class BlockScale(Case):
    """A dense GEMM in DeepSeek's blocks, whose kernels the library's C++ compiles by nvcc at call time."""

    N, K = 2112, 7168

    def inputs(self, tokens: int, device: str) -> list[Any]:
        return [normal((tokens, self.K), device, torch.bfloat16)]

    def make_weights(self, device: str) -> list[Any]:
        scale = torch.full((-(-self.N // 128), self.K // 128), 0.01, device=device)
        return [normal((self.N, self.K), device, torch.float8_e4m3fn), scale]

    def op(self, x: Any, weight: Any, scale: Any) -> Any:
        return torch.ops.fxwarm.fp8_blockscale_gemm_sm90(x, weight, None, scale)

    def error(self, device: str) -> float:
        (x,), (weight, scale) = self.inputs(33, device), self.weights(device)
        whole = scale.repeat_interleave(128, 0)[: self.N].repeat_interleave(128, 1)
        return relative(self.op(x, weight, scale), x.float() @ (weight.float() * whole).T)


class FusedMoe(Case):
    """Qwen3-30B-A3B's layer with the experts of one of four ranks, in bf16."""

    E, H, I, K = 32, 2048, 768, 8  # noqa: E741

    def inputs(self, tokens: int, device: str) -> list[Any]:
        x = normal((tokens, self.H), device, torch.bfloat16)
        ids = torch.empty(tokens, self.K, dtype=torch.int32, device=device)
        scales = torch.empty(tokens, self.K, device=device)
        if device != "meta":
            ids.copy_(torch.rand(tokens, self.E, device=device).argsort(1)[:, : self.K])
            scales.uniform_().div_(scales.sum(1, keepdim=True))
        return [x, ids, scales]

    def make_weights(self, device: str) -> list[Any]:
        shapes = ((self.E, 2 * self.I, self.H), (self.E, self.H, self.I))
        return [normal(shape, device, torch.bfloat16, 0.02) for shape in shapes]

    def op(self, x: Any, ids: Any, scales: Any, w13: Any, w2: Any) -> Any:
        return torch.ops.fxwarm.cutlass_fused_moe(
            x, ids, scales, w13, w2, torch.bfloat16, [], use_fused_finalize=False
        )

    def error(self, device: str) -> float:
        worst = 0.0
        for tokens in (1, 77):
            x, ids, scales = self.inputs(min(tokens, self.most), device)
            w13, w2 = self.weights(device)
            got = self.op(x, ids, scales, w13, w2).float()
            want = torch.zeros_like(got)
            for e in range(self.E):
                weight = (scales * (ids == e)).sum(1, keepdim=True)
                up, gate = (x.float() @ w13[e].float().T).split(self.I, 1)
                want += weight * ((torch.nn.functional.silu(gate) * up) @ w2[e].float().T)
            worst = max(worst, relative(got, want))
        return worst


CASES: dict[str, tuple[type[Case], int]] = {
    "bmm_fp8": (Bmm, 64),
    "mono_moe": (MonoMoe, 8),
    "fp8_blockscale_gemm_sm90": (BlockScale, 512),
    "cutlass_fused_moe bf16": (FusedMoe, 1024),
}
"""Name -> layer and its most tokens, quick ones first."""
