"""What the dims of a canonical call mean (M, N, K, groups), and whether its tensors agree.

Works on ints and on sympy expressions alike: two dims contradict each other only where both are
plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fxwarm import exc
from fxwarm.families.deep_gemm.entries import LOGITS_DTYPES, unsummed

if TYPE_CHECKING:
    from passes.calls import SymTensor
    from passes.records import KernelCall

__all__ = ["Form", "at_least", "check", "form", "local_experts", "unify"]

Shape = tuple[Any, ...]


class Form:
    """Where M, N, K and the groups stand in the tensors of one op: (tensor, dim) each."""

    def __init__(
        self,
        m: tuple[tuple[str, int], ...] = (),
        n: tuple[tuple[str, int], ...] = (),
        k: tuple[tuple[str, int], ...] = (),
        groups: tuple[tuple[str, int], ...] = (),
    ) -> None:
        self.m, self.n, self.k, self.groups = m, n, k, groups

    def with_scales(self) -> Form:
        """Return the form of a product of heads whose rows have scales: [M, heads, K / 128]."""
        return Form((*self.m, ("a_sf", 0)), self.n, self.k, (*self.groups, ("a_sf", 1)))


def form(op: str, attrs: Mapping[str, Any] | None = None) -> Form | None:
    """Return where the dims of ``op`` stand, None for an op without a GEMM's dims.

    The first place of each is the one to read, that of M the one in A, then the one in D; the
    others must agree with it.
    """
    attrs = attrs or {}
    per_row = (attrs.get("recipe") or (1,))[0] == 1
    if op.endswith("einsum"):
        found = _EINSUMS.get(str(attrs.get("expr", "")).replace(" ", ""))
        return found.with_scales() if found and op.startswith("fp8") and per_row else found
    if op.startswith("k_grouped"):
        return Form(m=(("d", 1),), n=(("d", 2),), groups=(("d", 0),))
    if op == "tf32_hc_prenorm_gemm":
        rows = (("a", 0), ("d", -2), ("sqr_sum", -1))
        return Form(rows, (("b", 0), ("d", -1)), (("a", 1), ("b", 1)))
    if "_gemm_" not in op or "logits" in op:
        return None
    if "masked" in op:
        return Form(
            (("a", 1), ("d", 1), *((("a_sf", 1),) if per_row else ())),
            (("b", 1), ("d", 2)),
            (("a", 2), ("b", 2)),
            (("a", 0), ("b", 0), ("d", 0), ("a_sf", 0), ("masked_m", 0)),
        )
    layout = next(part for part in op.split("_") if part in ("nt", "nn", "tn", "tt"))
    b_n, b_k = (-2, -1) if layout[1] == "t" else (-1, -2)
    a_m, a_k = (0, 1) if layout[0] == "n" else (1, 0)
    m: tuple[tuple[str, int], ...] = (("a", a_m), ("d", 0), ("c", 0))
    m = (*m, *((("a_sf", a_m),) if per_row else ()))
    groups: tuple[tuple[str, int], ...] = (("b", 0),) if "m_grouped" in op else ()
    if groups and attrs.get("use_psum_layout"):
        groups = (*groups, ("grouped_layout", 0))
    elif groups:
        m = (*m, ("grouped_layout", 0))
    d_n = () if op == "fp8_gemm_nt_skip_head_mid" else (("d", 1),)
    return Form(m, (("b", b_n), *d_n), (("a", a_k), ("b", b_k)), groups)


_EINSUMS = {
    "bhr,hdr->bhd": Form(
        (("a", 0), ("d", 0)), (("b", 1), ("d", 2)), (("a", 2), ("b", 2)),
        (("a", 1), ("b", 0), ("d", 1)),
    ),
    "bhd,hdr->bhr": Form(
        (("a", 0), ("d", 0)), (("b", 2), ("d", 2)), (("a", 2), ("b", 1)),
        (("a", 1), ("b", 0), ("d", 1)),
    ),
    "bmk,bnk->mn": Form(
        (("a", 1), ("d", 0)), (("b", 1), ("d", 1)), (("a", 2), ("b", 2)),
        (("a", 0), ("b", 0)),
    ),
}  # fmt: skip


_EQUAL: dict[str, tuple[tuple[tuple[str, int], ...], ...]] = {
    "fp8_mqa_logits": (
        (("q", 0), ("weights", 0), ("cu_seq_len_k_start", 0), ("cu_seq_len_k_end", 0)),
        (("kv", 0), ("kv_sf", 0)),
    ),
    "fp8_paged_mqa_logits": ((("q", 0), ("context_lens", 0), ("block_table", 0)),),
    "k_grouped_bf16_gemm_tn_contiguous": ((("a", 0), ("b", 0)),),
}
"""Dims that are equal in ops without a GEMM's, or beside them: queries, keys, the sum of all K."""


def check(
    op: str, tensors: Mapping[str, Shape], dtypes: Mapping[str, str], attrs: Mapping[str, Any]
) -> None:
    """Raise ShapeMismatchError, with both shapes, if the tensors contradict each other."""
    dtype = attrs.get("logits_dtype", "float32")
    if dtype not in LOGITS_DTYPES:
        known = " or ".join(LOGITS_DTYPES)
        raise exc.ShapeMismatchError(f"{op}: logits_dtype is {dtype!r}; the library writes {known}")
    reason = unsummed(str(attrs.get("expr", "")), dtypes.get("d", ""), "c" in tensors)
    if reason:
        raise exc.ShapeMismatchError(f"{op}: {reason}")
    where = form(op, attrs)
    if where is None:
        return
    for dim, places in (("M", where.m), ("N", where.n), ("K", where.k), ("groups", where.groups)):
        seen = [(name, tensors[name], at) for name, at in places if _has(tensors, name, at)]
        for name, shape, at in seen[1:]:
            first, shape0, at0 = seen[0]
            _agree(op, dim, (first, shape0, shape0[at0]), (name, shape, shape[at]))
    if dtypes.get("b_sf") == "float32" and not op.startswith("k_grouped"):
        _check_scales(op, tensors, where, attrs)


def unify(
    op: str, tensors: Mapping[str, SymTensor], attrs: Mapping[str, Any]
) -> dict[str, SymTensor]:
    """Return the tensors with dims that the library takes as equal written the same.

        a: [s0, 256], a_sf: [s1, 2], d: [s0, 192]   ->   a_sf: [s0, 2]

    Values and their scales are often two inputs of a graph, whose sizes torch keeps apart. A number
    wins over an expression; strides follow.
    """
    where = form(op, attrs)
    found = dict(tensors)
    equal = _EQUAL.get(op, ())
    if where is not None:
        equal = (*equal, where.m, where.n, where.k, where.groups)
    if "c" in found:  # mostly D itself, which the record must still show
        equal = (*equal, *((("d", at), ("c", at)) for at in range(len(found["d"].shape))))
    for places in equal:
        here = [(name, at) for name, at in places if _has_rank(found, name, at)]
        sizes = [found[name].shape[at] for name, at in here]
        if sizes:
            same = next((size for size in sizes if isinstance(size, int)), sizes[0])
            for name, at in here:
                found[name] = _with_size(found[name], at, same)
    if op == "fp8_paged_mqa_logits" and _has_rank(found, "q", 1):
        rows = found["q"].shape[0] * found["q"].shape[1]  # one weight a head of each new token
        found["weights"] = _with_size(found["weights"], 0, rows)
    if where is None:
        return found
    if attrs.get("num_splits") is not None and op == "tf32_hc_prenorm_gemm":
        for name in ("d", "sqr_sum"):
            found[name] = _with_size(found[name], 0, attrs["num_splits"])
    k = found[where.k[0][0]].shape[where.k[0][1]] if where.k else None
    recipe = attrs.get("recipe") or (1, 1, 128)
    if isinstance(k, int) and "a_sf" in found and "recipe_a" not in attrs and recipe[-1] == 128:
        span = 128 if found["a_sf"].dtype == "float32" else 512  # four packed scales an int32
        at = where.k[0][1] - len(found["a"].shape) if where.k[0][1] >= 0 else where.k[0][1]
        found["a_sf"] = _with_size(found["a_sf"], at, -(-k // span))
    return found


def _with_size(tensor: SymTensor, at: int, size: Any) -> SymTensor:
    """Return ``tensor`` with the dim ``at`` written as ``size``, in its strides too."""
    import dataclasses

    old = tensor.shape[at]
    if isinstance(old, int) or old == size:
        return tensor
    shape = list(tensor.shape)
    shape[at] = size
    strides = tensor.strides
    if strides is not None:
        strides = tuple(s if isinstance(s, int) else _plain(s.subs(old, size)) for s in strides)
    return dataclasses.replace(tensor, shape=tuple(shape), strides=strides)


def _plain(size: Any) -> Any:
    return int(size) if getattr(size, "is_Integer", False) else size


def _has_rank(tensors: Mapping[str, SymTensor], name: str, at: int) -> bool:
    return name in tensors and -len(tensors[name].shape) <= at < len(tensors[name].shape)


def _check_scales(
    op: str, tensors: Mapping[str, Shape], where: Form, attrs: Mapping[str, Any]
) -> None:
    grouped = bool(where.groups) and len(tensors["b"]) == 3
    if grouped:
        _agree(op, "groups", ("b", tensors["b"], tensors["b"][0]),
               ("b_sf", tensors["b_sf"], tensors["b_sf"][0]))  # fmt: skip
    recipe = attrs.get("recipe") or (1, 128, 128)
    if attrs.get("recipe_a") or len(recipe) != 3 or recipe[2] != 128:
        return  # other granularities: the library itself says what it takes
    by_dim: tuple[tuple[str, tuple[str, int], Callable[[int], int]], ...] = (
        ("K / 128", where.k[0], lambda k: -(-k // 128)),
        (f"N / {recipe[1]}", where.n[0], lambda n: -(-n // int(recipe[1]))),
    )
    for label, (name, at), scaled in by_dim:
        value = tensors[name][at]
        if not isinstance(value, int):
            continue
        sf_at = _sf_dim(where, label, len(tensors["b_sf"]))
        have = tensors["b_sf"][sf_at]
        if isinstance(have, int) and have != scaled(value):
            raise exc.ShapeMismatchError(
                f"{op}: {name} is {_show(tensors[name])} but its scales b_sf are "
                f"{_show(tensors['b_sf'])}: {label} needs {scaled(value)}, not {have}; "
                "pass the scales that belong to this weight"
            )


def _sf_dim(where: Form, label: str, rank: int) -> int:
    """Scales of B lie as B does: its N and K dims, read from the end."""
    places = where.k if label.startswith("K") else where.n
    at = next(at for name, at in places if name == "b")
    return at if at < 0 else at - rank


def _has(tensors: Mapping[str, Shape], name: str, at: int) -> bool:
    return name in tensors and -len(tensors[name]) <= at < len(tensors[name])


def _agree(
    op: str, dim: str, first: tuple[str, Shape, Any], second: tuple[str, Shape, Any]
) -> None:
    (name0, shape0, value0), (name1, shape1, value1) = first, second
    if isinstance(value0, int) and isinstance(value1, int) and value0 != value1:
        raise exc.ShapeMismatchError(
            f"{op}: {name0} is {_show(shape0)} but {name1} is {_show(shape1)}: "
            f"{dim} is {value0} against {value1}; pass tensors of the same {dim}"
        )


def _show(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def at_least(call: KernelCall, tensor: str, dim: int, least: int) -> KernelCall | None:
    """Return ``call`` where a dim of it is at least ``least``, None where it never is."""
    import msgspec

    from passes.bound import bound_dim

    at = call[tensor].dims[dim]
    if at.is_static:
        return call if int(at) >= least else None
    if at.upper is not None and at.upper < least:
        return None
    guards = tuple(sorted({*call.guards, f"{at.expr} >= {least}"}))
    tensors = tuple(
        (
            name,
            msgspec.structs.replace(
                spec, dims=tuple(bound_dim(d.expr, call.symbols, guards) for d in spec.dims)
            ),
        )
        for name, spec in call.tensors
    )
    return msgspec.structs.replace(call, tensors=tensors, guards=guards)


def local_experts(experts: int, ranks: int) -> int:
    """Return how many experts each of ``ranks`` holds: the group count of its kernels.

    Raises ShapeMismatchError, with the remainder, where they cannot be shared evenly.
    """
    if ranks < 1 or experts % ranks:
        left = experts % ranks if ranks > 0 else experts
        raise exc.ShapeMismatchError(
            f"{experts} experts over {ranks} ranks leave a remainder of {left}; "
            "give a number of ranks that divides the experts"
        )
    return experts // ranks
