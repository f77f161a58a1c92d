"""Records of mHC calls for the tests, as a graph would give them."""

from __future__ import annotations

from passes import bound
from passes.records import Dim, KernelCall, Symbol, TensorSpec

EPS = 1e-6


def pre(hidden: int, top: int, *, op: str = "mhc_pre", eps: float = EPS, **attrs) -> KernelCall:
    """Return the call of one pre layer over 1..top tokens; ``attrs`` override."""
    symbols = (Symbol("s0", 1, top),)
    tokens = bound.bound_dim("s0", symbols, ())
    given = {
        "origin": "tile_kernels", "tokens": tokens, "hidden": hidden, "mult": 4, "k": 4 * hidden, "rule": "mhc",
        "rms_eps": eps, "hc_pre_eps": EPS, "hc_sinkhorn_eps": EPS, "hc_post_mult_value": 2.0, "sinkhorn_repeat": 20,
        **attrs,
    }  # fmt: skip
    residual = TensorSpec("bfloat16", (tokens, Dim.static(4), Dim.static(hidden)))
    fn = TensorSpec("float32", (Dim.static(24), Dim.static(given["k"])))
    return KernelCall(
        "tilelang", op, (("residual", residual), ("fn", fn)), tuple(given.items()), symbols
    )


def post(hidden: int, top: int = 8192, origin: str = "tile_kernels") -> KernelCall:
    """Return the call of one post layer."""
    symbols = (Symbol("s0", 1, top),)
    tokens = bound.bound_dim("s0", symbols, ())
    residual = TensorSpec("bfloat16", (tokens, Dim.static(4), Dim.static(hidden)))
    attrs = (("origin", origin), ("tokens", tokens), ("hidden", hidden), ("mult", 4))
    return KernelCall("tilelang", "mhc_post", (("residual", residual),), attrs, symbols)
