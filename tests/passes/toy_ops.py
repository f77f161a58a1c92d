"""Ops of no library, for graphs of the tests: they compute nothing worth compiling, and have the schemas that matter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from passes.collect import Collected, collect
from passes.flatten import OpCall
from passes.records import Gap, KernelCall

lib = torch.library.Library("toypasses", "FRAGMENT")


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    lib.define(schema)
    lib.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"toypasses::{name}", fake, lib=lib)


def _linear_fake(x, w, dtype=None, groups=1):
    torch._check(x.shape[-1] == w.shape[1])
    return x.new_empty((*x.shape[:-1], w.shape[0]))


_define(
    "gemm(Tensor a, Tensor b, Tensor(d!) out, int n=3) -> ()",
    lambda a, b, out, n=3: None,
    lambda a, b, out, n=3: None,
)
_define(
    "linear(Tensor x, Tensor w, ScalarType? dtype=None, int groups=1) -> Tensor",
    lambda x, w, dtype=None, groups=1: x @ w.t(),
    _linear_fake,
)
_define(
    "pairs(Tensor[] xs, int[] recipe=[1, 128], Device? device=None, float eps=1e-6) -> Tensor",
    lambda xs, recipe=(1, 128), device=None, eps=1e-6: xs[0].clone(),
    lambda xs, recipe=(1, 128), device=None, eps=1e-6: torch.empty_like(xs[0]),
)
_define("touch(Tensor x) -> Tensor", lambda x: x.clone(), lambda x: torch.empty_like(x))
lib.define("touch.twice(Tensor x, Tensor y) -> Tensor")
lib.impl("touch.twice", lambda x, y: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("toypasses::touch.twice", lambda x, y: torch.empty_like(x), lib=lib)


@torch.library.custom_op("toypasses::functional", mutates_args=())
def functional(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x * scale


@functional.register_fake
def _(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return torch.empty_like(x)


def match(op: OpCall) -> Iterable[KernelCall | Gap]:
    """The family of gemm and linear."""
    if op.name == "gemm":
        yield op.call(
            "toy",
            "gemm",
            {"a": op.tensor("a"), "b": op.tensor("b"), "d": op.tensor("out")},
            {"n": op["n"]},
        )
    elif op.name == "linear":
        yield op.call("toy", "linear", {"x": op.tensor("x"), "w": op.tensor("w")})


def collect_all(
    model: Callable[..., Any],
    *args: Any,
    matchers: Any = (match,),
    given: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[Collected]:
    """Return what is collected of each graph that torch.compile makes of ``model(*args)``; no guard may be added."""
    found: list[Collected] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        before = guards_of(gm)
        found.append(collect(gm, inputs, matchers, **(given or {})))
        assert guards_of(gm) == before
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, **kwargs)(*args)
    return found


def guards_of(gm: torch.fx.GraphModule) -> tuple[int, int, dict[Any, Any]]:
    """Return how much the ShapeEnv of ``gm`` knows: guards, runtime asserts, ranges."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        for size in (*getattr(value, "shape", ()), value):
            if isinstance(size, torch.SymInt):
                env = size.node.shape_env
                return len(env.guards), len(env.deferred_runtime_asserts), dict(env.var_to_range)
    return 0, 0, {}
