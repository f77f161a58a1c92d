"""FP8 with block scales, in plain torch: quantise, dequantise, and the shapes of scale factors.

A scale factor covers a block of ``gran_mn`` rows by ``gran_k`` columns. It is float32, or int32 with four
UE8M0 exponents of successive column blocks packed in it, the lowest byte first (SM100).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fxwarm.exc import ShapeMismatchError

FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_SMALLEST_AMAX = 1e-4  # as DeepGEMM: a block of zeros gets a finite scale


def per_token_cast_to_fp8(x: torch.Tensor, gran_k: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each run of ``gran_k`` elements of a row: ``[..., M, K] -> fp8, sf[..., M, ceil(K/gran_k)]``.

    ``x`` is ``fp8 * sf`` up to rounding; the scales are float32, row-major. K need not be a multiple.
    """
    blocks = _pad(x.float(), (gran_k,)).unflatten(-1, (-1, gran_k))
    return _scale_down(x, blocks.abs().amax(-1), (gran_k,))


def per_block_cast_to_fp8(w: torch.Tensor, gran: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise square blocks: ``[..., N, K] -> fp8, sf[..., ceil(N/gran), ceil(K/gran)]``, float32 scales.

    ``w`` is ``fp8 * sf`` up to rounding. N and K need not be multiples; leading dims are groups.
    """
    padded = _pad(w.float(), (gran, gran))
    blocks = padded.unflatten(-1, (-1, gran)).unflatten(-3, (-1, gran))  # [..., n/g, g, k/g, g]
    return _scale_down(w, blocks.abs().amax((-3, -1)), (gran, gran))


def scale_recipe(recipe: Sequence[int] | None, b_sf: torch.Tensor | None) -> tuple[int, int, int]:
    """Return (rows of A, rows of B, columns) that one scale covers; None as DeepGEMM understands it."""
    if recipe is None:
        return (1, 1, 128) if b_sf is not None and b_sf.dtype == torch.int32 else (1, 128, 128)
    if len(recipe) != 3:
        text = (
            f"recipe is {tuple(recipe)}; give (rows of A, rows of B, columns) that a scale covers"
        )
        raise ShapeMismatchError(text)
    gran_m, gran_n, gran_k = recipe
    return gran_m, gran_n, gran_k


def scale_shape(mn: Any, k: Any, gran_mn: int, gran_k: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the last two dims of the scales of ``[mn, k]``: float32 one a block, int32 four."""
    span = gran_k * (4 if dtype == torch.int32 else 1)
    return (mn if gran_mn == 1 else (mn + gran_mn - 1) // gran_mn), (k + span - 1) // span


def unpack_ue8m0(sf: torch.Tensor) -> torch.Tensor:
    """Return the float32 scales ``[..., 4 * P]`` that int32 ``sf[..., P]`` packs; float32 as it is."""
    if sf.dtype != torch.int32:
        return sf
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=sf.device)
    exponents = (sf.unsqueeze(-1) >> shifts) & 0xFF
    return (exponents << 23).view(torch.float32).flatten(-2)


def dequantize(x: torch.Tensor, sf: torch.Tensor, gran_mn: int, gran_k: int) -> torch.Tensor:
    """Return ``x[..., MN, K]`` times its block scales, in float32."""
    return x.float() * _spread(unpack_ue8m0(sf), x, (gran_k, gran_mn))


def _pad(x: torch.Tensor, grans: tuple[int, ...]) -> torch.Tensor:
    """Return ``x`` with its last dims rounded up to multiples of ``grans``, last dim first."""
    missing = [-size % gran for size, gran in zip(reversed(x.shape), grans, strict=False)]
    if not any(missing):  # F.pad would copy
        return x
    return F.pad(x, [pad for size in missing for pad in (0, size)])


def _spread(sf: torch.Tensor, like: torch.Tensor, grans: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of each element of ``like``: of each row where only columns share one."""
    for dim, gran in enumerate(grans, start=1):
        if gran != 1:
            sf = sf.repeat_interleave(gran, -dim).narrow(-dim, 0, like.shape[-dim])
    return sf


def _scale_down(
    x: torch.Tensor, amax: torch.Tensor, grans: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    sf = amax.clamp_min(_SMALLEST_AMAX) / _FP8_MAX
    # x as it is, not its blocks put together again: in a trace a symbolic K stays the symbol it was
    scaled = x.float() / _spread(sf, x, grans)
    return scaled.clamp(-_FP8_MAX, _FP8_MAX).to(FP8).contiguous(), sf
