"""CPU references of DeepGEMM's calls: float32 over dequantised blocks, a few MB at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fxwarm.ops.scales import dequantize, scale_recipe

_ROWS = 1024  # of A or B held in float32 at once: 28 MiB at K=7168; a multiple of every scale block
PSUM_ALIGNMENT = 128
"""Rows that a group starts on in the psum layout: DeepGEMM's default alignment, its only one on SM90."""

Rows = slice | Tensor


def dense(
    *,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    a_sf: Tensor | None = None,
    b_sf: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Sequence[int] | None = None,
    rows: Rows | None = None,
    **_: Any,
) -> None:
    """Set ``d[rows] = a[rows] @ b.T (+ c[rows])`` for ``a[M, K]``, ``b[N, K]``; ``c`` may be ``d``."""
    gran_m, gran_n, gran_k = scale_recipe(recipe, b_sf)
    for low, high in _steps(b.shape[0]):
        if b_sf is None:
            weight = b[low:high].float()
        else:
            scales = b_sf[low // gran_n : -(-high // gran_n)]
            weight = dequantize(b[low:high], scales, gran_n, gran_k)
        for part in _parts(rows, a.shape[0]):
            if a_sf is None:
                x = a[part].float()
            else:
                x = dequantize(a[part], a_sf[_blocks(part, gran_m)], gran_m, gran_k)
            out = x @ weight.t()
            if c is not None:
                out += c[part, low:high].float()
            d[part, low:high] = out.to(d.dtype)


def contiguous(
    *,
    b: Tensor,
    grouped_layout: Tensor,
    b_sf: Tensor | None = None,
    use_psum_layout: bool = False,
    **rest: Any,
) -> None:
    """Run each group that has rows; padding rows belong to none and stay as they are."""
    for group, rows in _groups(grouped_layout, b.shape[0], use_psum_layout):
        dense(b=b[group], b_sf=None if b_sf is None else b_sf[group], rows=rows, **rest)


def masked(
    *,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    masked_m: Tensor,
    a_sf: Tensor | None = None,
    b_sf: Tensor | None = None,
    recipe: Sequence[int] | None = None,
    **_: Any,
) -> None:
    """Run the first ``masked_m[g]`` rows of each group; the others stay as they are."""
    for g, count in enumerate(masked_m.tolist()):
        sf_a, sf_b = (None if sf is None else sf[g] for sf in (a_sf, b_sf))
        rows = slice(0, count)
        dense(a=a[g], a_sf=sf_a, b=b[g], b_sf=sf_b, d=d[g], recipe=recipe, rows=rows)


def in_form(
    form: str,
    run: Callable[..., None],
    *,
    a: Tensor,
    b: Tensor,
    a_sf: Tensor | None = None,
    b_sf: Tensor | None = None,
    **rest: Any,
) -> None:
    """Run ``run``, which takes ``[M, K]`` and ``[N, K]``, on operands stored in ``form``, such as "tn"."""
    if form[0] == "t":
        a, a_sf = a.mT, None if a_sf is None else a_sf.mT
    if form[1] == "n":
        b, b_sf = b.mT, None if b_sf is None else b_sf.mT
    run(a=a, b=b, a_sf=a_sf, b_sf=b_sf, **rest)


def skip_head_mid(*, b: Tensor, d: Tensor, head_splits: Sequence[int], **rest: Any) -> None:
    """Run a dense product of ``left + right`` columns a head into the ends of heads that have ``mid`` between."""
    left, mid, right = head_splits
    out = d.new_empty(d.shape[0], b.shape[0])
    dense(b=b, d=out, **rest)
    parts, heads = out.unflatten(1, (-1, left + right)), d.unflatten(1, (-1, left + mid + right))
    heads[..., :left] = parts[..., :left]
    heads[..., left + mid :] = parts[..., left:]


def einsum(
    *,
    expr: str,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    a_sf: Tensor | None = None,
    b_sf: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Sequence[int] | None = None,
    **_: Any,
) -> None:
    """Run one dense product a head; 'bhd,hdr->bhr' reads each head of B, and its scales, transposed.

    'bmk,bnk->mn' sums one a batch.
    """
    if expr == "bmk,bnk->mn":
        out = sum(
            (x.float() @ y.float().T for x, y in zip(a, b, strict=True)),
            d.new_zeros(d.shape).float(),
        )
        d.copy_(out if c is None else out + c.float())
        return
    if expr == "bhd,hdr->bhr":
        b, b_sf = b.mT, None if b_sf is None else b_sf.mT
    for h in range(b.shape[0]):
        dense(
            a=a[:, h],
            a_sf=None if a_sf is None else a_sf[:, h],
            b=b[h],
            b_sf=None if b_sf is None else b_sf[h],
            d=d[:, h],
            c=None if c is None else c[:, h],
            recipe=recipe,
        )


def prenorm(
    *, a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None
) -> None:
    """Set ``d = a @ b.T`` and ``sqr_sum`` to the row sums of ``a**2``, over each of the parts of K.

    K is cut into blocks of 64, and each split takes a contiguous run of floor(blocks / splits), the first
    ones one more until none is left, as DeepGEMM 54e2261 does. The sum over splits is the whole. The
    library rounds B to TF32, this does not.
    """
    blocks, count = -(-a.shape[1] // 64), num_splits or 1
    if num_splits is None:
        d, sqr_sum = d.unsqueeze(0), sqr_sum.unsqueeze(0)
    edges = [64 * (i * (blocks // count) + min(i, blocks % count)) for i in range(count + 1)]
    for split in range(count):
        low, high = edges[split], edges[split + 1]
        for part in _parts(None, a.shape[0]):
            x = a[part, low:high].float()
            d[split, part] = x @ b[:, low:high].t()
            sqr_sum[split, part] = x.square_().sum(1)


def _groups(layout: Tensor, count: int, use_psum: bool) -> Iterator[tuple[int, Rows]]:
    if use_psum:
        start = 0
        for group, end in enumerate(layout.tolist()):
            if end > start:
                yield group, slice(start, end)
            start = -(-end // PSUM_ALIGNMENT) * PSUM_ALIGNMENT
        return
    for group in layout.unique().tolist():
        if group >= count:
            raise ValueError(f"grouped_layout names group {group} of {count}; number them from 0")
        if group >= 0:
            yield group, (layout == group).nonzero().squeeze(1)


def _steps(size: int) -> Iterator[tuple[int, int]]:
    for low in range(0, size, _ROWS):
        yield low, min(low + _ROWS, size)


def _parts(rows: Rows | None, size: int) -> Iterator[Rows]:
    """Yield ``rows`` (all where None), at most ``_ROWS`` at a time."""
    if isinstance(rows, Tensor):
        yield from rows.split(_ROWS)
        return
    first, last = (0, size) if rows is None else (rows.start, rows.stop)
    for low, high in _steps(last - first):
        yield slice(first + low, first + high)


def _blocks(rows: Rows, gran: int) -> Rows:
    """Return which rows of the scales cover ``rows``."""
    if gran == 1:
        return rows
    if isinstance(rows, Tensor):
        raise NotImplementedError("no CPU reference where one scale covers rows of two groups")
    return slice(rows.start // gran, -(-rows.stop // gran))
