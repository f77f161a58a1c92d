"""TileKernels' own mHC functions as torch ops: what ``tile_kernels.modeling.mhc.ops`` exports, as it is called.

They are Python around TileLang kernels, which no graph shows. Arguments have the library's names and shapes:

    post_mix, comb_mix, layer_input = torch.ops.fxwarm.mhc_pre_big_fuse(
        residual, fn, mhc_scale, mhc_base, 1e-6, 1e-6, 1e-6, 2.0, 20)

On CUDA an op calls the library's function and nothing else, on the CPU it is a reference in float32. For inference: no
gradient flows. ``n_splits`` is the library's: up to 1.0.0 it takes any and computes with one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxwarm.exc import LibraryError
from fxwarm.ops import _tile_kernels as cpu
from fxwarm.ops import mhc_factories as factories
from fxwarm.ops._checks import check_dtype, check_rank, check_shape, describe
from fxwarm.ops._define import define_op

HOME = "tile_kernels.modeling.mhc.ops"
"""Where the functions are."""

BF16, F32 = torch.bfloat16, torch.float32


def _call(name: str) -> Callable[..., Any]:
    """Return the CUDA side of the op ``name``: the library's function, on the device of its first tensor."""

    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            function = factories.get_factory(f"{HOME}:{name}")
        except (ImportError, AttributeError) as error:
            raise LibraryError(
                f"TileKernels has no {name} here ({error}); install fxwarm[tilelang]"
            ) from error
        with torch.cuda.device(first.device):  # TileKernels launches on the current device
            return function(first, *args, **kwargs)

    return call


def _define(
    schema: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Define the op of ``schema``; on CUDA it is the library's function of the same name."""
    cuda = cuda or _call(schema[: schema.index("(")])
    return define_op(schema, fake=fake, cpu=cpu, cuda=cuda, by_name=True)


def _streams(op: str, residual: Tensor, fn: Tensor | None = None) -> tuple[Any, Any]:
    """Check ``residual[..., m, H]``; return m and H: from fn ``[m*(2+m), m*H]`` where there is one, as numbers."""
    if residual.dim() < 3:
        check_rank(op, "residual", residual, "[T, m, H]")
    check_dtype(op, "residual", residual, (BF16,))
    mult, hidden = residual.shape[-2:]
    if fn is not None:
        check_rank(op, "fn", fn, "[m*(2+m), m*H]")
        check_dtype(op, "fn", fn, (F32,))
        rows, width = fn.shape
        mult = math.isqrt(int(rows) + 1) - 1
        hidden = width // mult
        check_shape(op, "fn", fn, [mult * (2 + mult), mult * hidden], f"{mult} streams")
        wanted, outer = [*residual.shape[:-2], mult, hidden], range(residual.dim() - 2)
        check_shape(op, "residual", residual, wanted, f"fn = {describe(fn)}", rows=outer)
    return mult, hidden


def _check_mixes(op: str, scale: Tensor, base: Tensor, columns: int, scales: int) -> None:
    for name, tensor, size in (("mhc_scale", scale, scales), ("mhc_base", base, columns)):
        check_dtype(op, name, tensor, (F32,))
        check_shape(op, name, tensor, [size], f"{columns} columns")


def _big_fuse(
    *, residual: Tensor, fn: Tensor, mhc_scale: Tensor, mhc_base: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    mult, hidden = _streams("mhc_pre_big_fuse", residual, fn)
    _check_mixes("mhc_pre_big_fuse", mhc_scale, mhc_base, mult * (2 + mult), 3)
    outer = residual.shape[:-2]
    return (
        residual.new_empty((*outer, mult, 1), dtype=F32),
        residual.new_empty((*outer, mult, mult), dtype=F32),
        residual.new_empty((*outer, hidden)),
    )


mhc_pre_big_fuse = _define(
    "mhc_pre_big_fuse(Tensor residual, Tensor fn, Tensor mhc_scale, Tensor mhc_base, float rms_eps, "
    "float mhc_pre_eps, float mhc_sinkhorn_eps, float mhc_post_mult_value, int sinkhorn_repeat, "
    "int n_splits=16) -> (Tensor, Tensor, Tensor)",
    fake=_big_fuse,
    cpu=cpu.big_fuse,
)
"""residual [..., m, H] -> post_mix [..., m, 1], comb_mix [..., m, m] in float32, layer_input [..., H]."""


def _post(*, x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    check_rank("mhc_post_fwd", "residual", residual, "[B, T, m, H]")
    mult, hidden = _streams("mhc_post_fwd", residual)
    outer, because = residual.shape[:-2], f"residual = {describe(residual)}"
    check_dtype("mhc_post_fwd", "x", x, (BF16,))
    check_shape("mhc_post_fwd", "x", x, [*outer, hidden], because, rows=(0, 1))
    for name, mix, width in (
        ("post_layer_mix", post_layer_mix, 1),
        ("comb_res_mix", comb_res_mix, mult),
    ):
        check_dtype("mhc_post_fwd", name, mix, (F32,))
        check_shape("mhc_post_fwd", name, mix, [*outer, mult, width], because, rows=(0, 1))
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


mhc_post_fwd = _define(
    "mhc_post_fwd(Tensor x, Tensor residual, Tensor post_layer_mix, Tensor comb_res_mix) -> Tensor",
    fake=_post,
    cpu=cpu.post,
)
"""x [B, T, H] and residual [B, T, m, H] -> [B, T, m, H]; also what ``mhc_post`` does without gradients."""


def _norm_fn(
    *, residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None, **_: Any
) -> Tensor:
    mult, hidden = _streams("mhc_pre_norm_fn", residual)
    check_rank("mhc_pre_norm_fn", "mhc_fn", mhc_fn, "[n, m*H]")
    check_dtype("mhc_pre_norm_fn", "mhc_fn", mhc_fn, (F32,))
    wanted = [mhc_fn.shape[0], mult * hidden]
    check_shape("mhc_pre_norm_fn", "mhc_fn", mhc_fn, wanted, f"residual = {describe(residual)}")
    if mhc_norm_weight is not None:
        check_dtype("mhc_pre_norm_fn", "mhc_norm_weight", mhc_norm_weight, (F32,))
        because = f"residual = {describe(residual)}"
        check_shape("mhc_pre_norm_fn", "mhc_norm_weight", mhc_norm_weight, [mult * hidden], because)
    return residual.new_empty((*residual.shape[:-2], mhc_fn.shape[0]), dtype=F32)


_norm_fn_of_library = _call("mhc_pre_norm_fn")


def _call_norm_fn(
    residual: Tensor, fn: Tensor, weight: Tensor | None, eps: float, n_splits: int = 16
) -> Any:
    return _norm_fn_of_library(residual, fn, weight, eps, n_splits=n_splits)


mhc_pre_norm_fn = _define(
    "mhc_pre_norm_fn(Tensor residual, Tensor mhc_fn, Tensor? mhc_norm_weight, float mhc_norm_eps, "
    "int n_splits=16) -> Tensor",
    fake=_norm_fn,
    cpu=cpu.norm_fn,
    cuda=_call_norm_fn,
)
"""residual [..., m, H], mhc_fn [n, m*H] -> mixes [..., n] in float32."""


def _split_mixes(
    *, input_mixes: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_mult: int, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    op, mult, columns = "mhc_pre_split_mixes", mhc_mult, mhc_mult * (2 + mhc_mult)
    check_rank(op, "input_mixes", input_mixes, "[B, T, m*(2+m)]")
    check_dtype(op, "input_mixes", input_mixes, (F32,))
    outer = input_mixes.shape[:-1]
    check_shape(op, "input_mixes", input_mixes, [*outer, columns], f"mhc_mult={mult}", rows=(0, 1))
    _check_mixes(op, mhc_scale, mhc_base, columns, 3)
    one = input_mixes.new_empty((*outer, mult, 1))
    return one, torch.empty_like(one), input_mixes.new_empty((*outer, mult, mult))


mhc_pre_split_mixes = _define(
    "mhc_pre_split_mixes(Tensor input_mixes, Tensor mhc_scale, Tensor mhc_base, int mhc_mult, "
    "float mhc_post_mult_value, float mhc_pre_eps) -> (Tensor, Tensor, Tensor)",
    fake=_split_mixes,
    cpu=cpu.split_mixes,
)
"""input_mixes [B, T, m*(2+m)] -> pre [B, T, m, 1], post [B, T, m, 1], comb [B, T, m, m]."""


def _sinkhorn(*, x: Tensor, **_: Any) -> Tensor:
    check_dtype("sinkhorn_normalize", "x", x, (F32,))
    because = "a square matrix a token"
    check_shape("sinkhorn_normalize", "x", x, [*x.shape[:-1], x.shape[-2]], because)
    return x.new_empty(x.shape)


sinkhorn_normalize = _define(
    "sinkhorn_normalize(Tensor x, int repeat=10, float eps=1e-06) -> Tensor",
    fake=_sinkhorn,
    cpu=cpu.sinkhorn,
)
"""x [..., m, m] float32 -> rows and columns that sum to about one."""


def _apply_mix(*, x: Tensor, mix: Tensor) -> Tensor:
    mult, hidden = _streams("mhc_pre_apply_mix", x)
    check_dtype("mhc_pre_apply_mix", "mix", mix, (F32,))
    outer = x.shape[:-2]
    rows = range(len(outer))
    check_shape("mhc_pre_apply_mix", "mix", mix, [*outer, mult, 1], f"x = {describe(x)}", rows=rows)
    return x.new_empty((*outer, hidden))


mhc_pre_apply_mix = _define(
    "mhc_pre_apply_mix(Tensor x, Tensor mix) -> Tensor",
    fake=_apply_mix,
    cpu=cpu.apply_mix,
)
"""x [..., m, H] and mix [..., m, 1] -> [..., H]."""


def _head_mix(*, input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, **_: Any) -> Tensor:
    op = "mhc_head_compute_mix"
    check_rank(op, "input_mix", input_mix, "[B, T, m]")
    check_dtype(op, "input_mix", input_mix, (F32,))
    _check_mixes(op, mhc_scale, mhc_base, input_mix.shape[-1], 1)
    return torch.empty_like(input_mix)


mhc_head_compute_mix = _define(
    "mhc_head_compute_mix(Tensor input_mix, Tensor mhc_scale, Tensor mhc_base, float mhc_pre_eps) -> Tensor",
    fake=_head_mix,
    cpu=cpu.head_mix,
)
"""input_mix [B, T, m] -> the mix of the last streams, [B, T, m]."""


def _expand(*, hidden: Tensor, mhc_mult: int) -> Tensor:
    check_dtype("expand_to_mhc", "hidden", hidden, (BF16,))
    return hidden.new_empty((*hidden.shape[:-1], mhc_mult, hidden.shape[-1]))


expand_to_mhc = _define(
    "expand_to_mhc(Tensor hidden, int mhc_mult) -> Tensor",
    fake=_expand,
    cpu=cpu.expand,
)
"""hidden [..., H] -> residual streams [..., m, H], all alike."""
