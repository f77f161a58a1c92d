"""DeepGEMM's other GEMMs as torch ops: operands stored the other way round, bfloat16 under a mask, heads with a gap.

d[M, N] = A[M, K] @ B[K, N] (+ c), where the letters of a form say how A and B are stored, "t" being transposed:

    nn: a [M, K], b [K, N]        tn: a [K, M], b [K, N]        tt: a [K, M], b [N, K]

``deep_gemm`` has nt. Scales lie as their operand does: b_sf of nn is [K / 128, N / 128]. The library's default of
``compiled_dims`` is "mn" for tn and tt, so that each M is a kernel of its own. On SM90 it takes FP8 operands only
where K has stride 1, such as ``w.t()`` of a weight [N, K] for b of nn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fxwarm.ops import _gemm, _gemm_checks
from fxwarm.ops._define import define_op
from fxwarm.ops._library import Function
from fxwarm.ops._schemas import BF16_OPTIONS, FP8_OPTIONS, PLAIN, SCALED

_OPTIONS = {SCALED: FP8_OPTIONS, PLAIN: BF16_OPTIONS}


def _define(
    name: str,
    operands: str,
    rest: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    other: str = "",
) -> torch._ops.OpOverload:
    """Define the op ``name`` for the library's function of that name, or of the ``other`` one."""
    schema = f"{name}({operands}, {rest}) -> ()"
    cuda = _call_by_schema(Function("deep_gemm", *dict.fromkeys((name, other or name))), schema)
    return define_op(schema, fake=partial(fake, name), cpu=cpu, cuda=cuda, by_name=True)


def _call_by_schema(function: Function, schema: str) -> Callable[..., None]:
    """Return what calls ``function``: operands as pairs with their scales, and by name what has a default."""
    arguments = torch._C.parse_schema(f"fxwarm::{schema}").arguments
    names = [a.name for a in arguments]
    required = sum(not a.has_default_value() for a in arguments)
    options = names[required:]
    is_scaled = "a_sf" in names

    def call(*args: Any, **kwargs: Any) -> None:
        # pybind11 takes no list for a tuple
        given = [tuple(v) if isinstance(v, list) else v for v in args[:required]]
        if is_scaled:
            given[:4] = [(given[0], given[1]), (given[2], given[3])]
        more = {**dict(zip(options, args[required:], strict=False)), **kwargs}
        function(*given, **{n: tuple(v) if isinstance(v, list) else v for n, v in more.items()})

    return call


for _kind, _operands, _other in (("fp8", SCALED, "fp8_fp4"), ("bf16", PLAIN, "bf16")):
    for _form in ("nn", "tn", "tt"):
        _define(
            f"{_kind}_gemm_{_form}",
            _operands,
            f"Tensor? c=None, {_OPTIONS[_operands]}",
            fake=partial(_gemm_checks.check_gemm, form=_form),
            cpu=partial(_gemm.in_form, _form, _gemm.dense),
            other=f"{_other}_gemm_{_form}",
        )
    # b [G, K, N]; the layout is as in nt, but of a psum layout nobody can say what rows to expect
    _define(
        f"m_grouped_{_kind}_gemm_nn_contiguous",
        _operands,
        f"Tensor grouped_layout, {_OPTIONS[_operands]}, bool use_psum_layout=False",
        fake=partial(_gemm_checks.check_contiguous, form="nn"),
        cpu=partial(_gemm.in_form, "nn", _gemm.contiguous),
        other=f"m_grouped_{_other}_gemm_nn_contiguous",
    )

m_grouped_bf16_gemm_nt_masked = _define(
    "m_grouped_bf16_gemm_nt_masked",
    PLAIN,
    f"Tensor masked_m, SymInt expected_m, {_OPTIONS[PLAIN]}",
    fake=_gemm_checks.check_masked,
    cpu=_gemm.masked,
    other="bf16_m_grouped_gemm_nt_masked",
)
"""The first masked_m[g] rows of d[g, Mmax, N] = a[g, Mmax, K] @ b[g, N, K].T. ``expected_m`` decides the kernel."""

fp8_gemm_nt_skip_head_mid = _define(
    "fp8_gemm_nt_skip_head_mid",
    SCALED,
    f"int[] head_splits, {_OPTIONS[SCALED]}",
    fake=_gemm_checks.check_gemm,
    cpu=_gemm.skip_head_mid,
)
"""d[M, heads * (left + mid + right)] from b [N, K], N = heads * (left + right): mid of each head stays as it is."""
