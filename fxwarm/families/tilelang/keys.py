"""The plan: every TileLang kernel that collected calls can need, each with the smallest call that needs it.

Pure: no library imported, no device touched. Statics that follow from the tokens are enumerated over every token count
that the graph can reach, never over a grid of powers of two: 786 tokens need 6 splits where 512 and 1024 do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fxwarm.families.mhc.splits import BLOCK
from fxwarm.families.tilelang.declarations import Expr
from fxwarm.families.tilelang.kernels import Unknown, Use, uses
from fxwarm.families.tilelang.statics import FAMILY, Static, make_key
from fxwarm.records import CompileKey, Library, Planned, Target
from passes.records import Dim, Gap, KernelCall


def keys(calls: Sequence[KernelCall], target: Target, library: Library) -> Iterator[Planned | Gap]:
    """Yield each kernel that ``calls`` can need on ``target``, and what could not be named."""
    found: dict[CompileKey, tuple[int, Planned]] = {}
    for call in calls:
        try:
            for use in uses(call, target, library):
                if isinstance(use, Unknown):
                    yield Gap(call.op, use.reason, family=FAMILY)
                    continue
                for tokens, statics, witness in _enumerate(call, use):
                    key = make_key(use.factory, statics)
                    if key not in found or tokens < found[key][0]:
                        found[key] = (tokens, Planned(key, witness))
        except (ValueError, TypeError, KeyError) as error:
            yield Gap(call.op, f"{call}: {error}", family=FAMILY)
    for _, planned in sorted(found.values(), key=lambda item: item[0]):
        yield planned


def _enumerate(
    call: KernelCall, use: Use
) -> Iterator[tuple[int, dict[str, Static], KernelCall | None]]:
    """Yield the distinct statics of ``use`` with the fewest tokens that lead to them."""
    from passes import bound

    fixed = {name: _plain(value) for name, value in use.statics.items()}
    open_ = {name: value.text for name, value in fixed.items() if isinstance(value, Expr)}
    last = use.upper if use.upper is not None else float("inf")
    seen: set[tuple[int, ...]] = set()
    try:
        image = bound.image(call, use.tokens, *open_.values())
    except ValueError:
        yield from _from_bounds(call, use, fixed, open_)
        return
    for row, values in enumerate(image.rows.tolist()):  # ascending by tokens
        tokens, *statics = values
        if not use.lower <= tokens <= last or tuple(statics) in seen:
            continue
        seen.add(tuple(statics))
        witness = bound.at(call, image.at(row))
        yield tokens, {**fixed, **dict(zip(open_, statics, strict=True))}, witness


def _from_bounds(
    call: KernelCall, use: Use, fixed: dict[str, Any], open_: dict[str, str]
) -> Iterator[tuple[int, dict[str, Static], None]]:
    """Too many sizes to enumerate: take every token count between the bounds of their product as attainable.

    Only where the statics follow from the tokens alone, by the rule that changes at edges of 64. Raises ValueError
    where they do not, or where nothing bounds the tokens.
    """
    import numpy as np

    from passes import bound, expr

    tokens, one = expr.parse(use.tokens), expr.symbol("tokens")
    texts = {name: expr.parse(text).xreplace({tokens: one}) for name, text in open_.items()}
    if any(text.free_symbols - {one} for text in texts.values()):
        raise ValueError(
            f"{', '.join(open_.values())} cannot be enumerated; give its sizes smaller upper bounds"
        )
    dim = bound.bound_dim(use.tokens, call.symbols, call.guards)
    upper = min(n for n in (dim.upper, use.upper) if n is not None)
    lower = max(dim.lower, use.lower)
    edges = np.arange((lower + BLOCK - 1) // BLOCK * BLOCK + 1, upper + 1, BLOCK)
    points = np.concatenate([np.array([lower] if lower <= upper else [], np.int64), edges])
    columns = [expr.evaluate(text, {"tokens": points}) for text in texts.values()]
    rows = np.stack([points, *columns], axis=1)
    distinct, first = (
        np.unique(rows[:, 1:], axis=0, return_index=True) if open_ else (rows[:1, 1:], [0])
    )
    for statics, at in zip(distinct.tolist(), first, strict=True):
        yield int(points[at]), {**fixed, **dict(zip(open_, statics, strict=True))}, None


def _plain(value: Any) -> Any:
    """Return a static as a plain value, or as an Expr where it follows from sizes."""
    if isinstance(value, Dim):
        return int(value) if value.is_static else Expr(value.expr)
    if isinstance(value, Expr):
        from passes import expr

        parsed = expr.parse(value.text)
        return int(parsed) if parsed.is_Integer else value
    return value
