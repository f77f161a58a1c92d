"""Every op of a graph that torch does not bring itself, with its arguments by schema name.

    graph:  y = cond(p, true_body(x, w), ...)          true_body:  fp8_gemm(x, w, out)
    yields: OpCall(deep_gemm::fp8_gemm(a=f8e4m3[s77, 7168], b=f8e4m3[2112, 7168], out=bf16[s77, 2112]))

Sees through submodules, higher-order ops (a body called twice counts twice), ``auto_functionalized``, and ops that
carry another op. A Python function that Dynamo was told to leave alone is seen as an opaque op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from passes.arguments import Reader, bind, overload_of, unfunctionalize
from passes.calls import Bounder, SymTensor, Value
from passes.graphs import flat, make_bounder, placeholders_of, value_of
from passes.places import Place, describe, place_of

if TYPE_CHECKING:
    import torch
    from torch._ops import OpOverload

    from passes.records import KernelCall

BUILTIN = frozenset(
    [
        "aten",
        "prims",
        "prim",
        "inductor",
        "inductor_prims",
        "higher_order",
        "c10d",
        "c10d_functional",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "_dtensor",
        "dtensor",
        "symm_mem",
        "fsdp",
        "profiler",
        "quantization",
        "quantized",
        "quantized_decomposed",
        "_quantized",
        "rngprims",
        "debugprims",
        "debug_mode_ops",
        "streams",
        "mkldnn",
        "mkldnn_prepacked",
        "mkl",
        "onednn",
        "onnx",
        "sparse",
        "prepacked",
        "xnnpack",
        "static_runtime",
        "export",
        "_export",
        "_native",
        "device_mesh",
        "_test",
    ]
)
"""Namespaces of ops that torch itself registers. None of them compiles a kernel of a library at its first call."""

BUILTIN_MODULES = frozenset(
    ["torch", "_operator", "operator", "builtins", "math", "cmath", "functools", "itertools"]
)

TRANSPARENT = frozenset(
    [
        "invoke_subgraph",
        "cond",
        "wrap",
        "tag_activation_checkpoint",
        "wrap_activation_checkpoint",
        "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
        "hints_wrapper",
        "invoke_quant",
        "inner_compile",
    ]
)
"""Higher-order ops that hand their last operands to a body unchanged: an operand that is a weight stays one."""


@dataclasses.dataclass(frozen=True, eq=False)
class OpCall:
    """One call of an op: what a family's ``match`` looks at.

    ``overload`` is None for an opaque Python function, whose arguments are named arg0, arg1, ...
    """

    namespace: str
    name: str
    arguments: Mapping[str, Value]
    overload: OpOverload | None = None
    place: str = ""
    bounder: Bounder = dataclasses.field(default_factory=Bounder, repr=False)
    bound: dict[KernelCall, dict[str, int]] = dataclasses.field(default_factory=dict, repr=False)
    """For each record made: which graph input each of its static tensors is."""

    @property
    def qualified_name(self) -> str:
        """The op as torch writes it, without the overload: ``deep_gemm::fp8_gemm_nt``."""
        return f"{self.namespace}::{self.name}"

    @property
    def schema(self) -> str:
        """The schema as text, empty for a Python function."""
        return "" if self.overload is None else str(self.overload._schema)

    def __getitem__(self, name: str) -> Value:
        if name not in self.arguments:
            raise ValueError(
                f"{self.qualified_name} has no argument {name}; it has {', '.join(self.arguments)}"
            )
        return self.arguments[name]

    def tensor(self, name: str) -> SymTensor:
        """Return the tensor argument ``name``. Raises ValueError, naming what it is instead."""
        value = self[name]
        if not isinstance(value, SymTensor):
            raise ValueError(
                f"{name} of {self.qualified_name} is {value!r}, no tensor; pass a tensor"
            )
        return value

    def call(
        self,
        family: str,
        op: str,
        tensors: Mapping[str, SymTensor],
        attrs: Mapping[str, Value] | None = None,
    ) -> KernelCall:
        """Return the record of the kernel call ``op`` of ``family`` that this op makes.

        ``tensors`` are tensors of this op or made from them, under the names that the family gives them; attributes may
        be expressions over their sizes. Raises passes.bound.Unbounded, a ValueError, where a dim cannot be bounded.
        """
        made = self.bounder.call(family, op, tensors, attrs or {})
        self.bound[made] = {
            name: t.placeholder
            for name, t in tensors.items()
            if t.placeholder is not None and t.is_static
        }
        return made

    def __str__(self) -> str:
        return f"{self.qualified_name}({', '.join(self.arguments)})"


def flatten(gm: torch.fx.GraphModule, bounder: Bounder | None = None) -> Iterator[OpCall]:
    """Yield each op of ``gm`` that is not torch's own, in the order of execution.

    A body that is called several times is yielded as often. ``bounder`` is made from the graph if not given.
    """
    bounder = make_bounder(gm) if bounder is None else bounder
    inputs = {node: at for at, node in enumerate(placeholders_of(gm))}
    return _Walk(bounder).walk(gm, inputs, ("", ""))


class _Walk:
    def __init__(self, bounder: Bounder) -> None:
        self._bounder = bounder
        self._bodies: dict[object, tuple[OpCall, ...]] = {}  # a shared body is read once

    def walk(
        self, gm: torch.fx.GraphModule, inputs: Mapping[torch.fx.Node, int], place: Place
    ) -> Iterator[OpCall]:
        reader = Reader(self._bounder.sizes, inputs)
        for node in gm.graph.nodes:
            if node.op == "call_function":
                yield from self._walk_function(gm, node, reader, inputs, place)
            elif node.op == "call_module":
                body: Any = gm.get_submodule(node.target)
                if hasattr(body, "graph"):
                    yield from self._walk_body(body, node.args, inputs, place_of(node, place))

    def _walk_function(
        self,
        gm: torch.fx.GraphModule,
        node: torch.fx.Node,
        reader: Reader,
        inputs: Mapping[torch.fx.Node, int],
        place: Place,
    ) -> Iterator[OpCall]:
        import torch

        target: Any = node.target
        args, kwargs = node.args, node.kwargs
        if isinstance(target, torch._ops.HigherOrderOperator):
            at = next((i for i, a in enumerate(args) if isinstance(a, torch._ops.OpOverload)), None)
            if at is None:
                bodies = [
                    b for a in (*args, *kwargs.values()) if (b := _body_of(gm, a)) is not None
                ]
                operands = flat(args) if target.name() in TRANSPARENT else ()
                for body in bodies:
                    yield from self._walk_body(body, operands, inputs, place_of(node, place))
                return
            functionalized = target.name().startswith("auto_functionalized")
            target, args = args[at], args[at + 1 :]  # type: ignore[assignment]
            if not _is_builtin(target.namespace):
                bound = (
                    unfunctionalize(target, kwargs)
                    if functionalized
                    else bind(target, args, kwargs)
                )
                yield self._make(target, bound, node, reader, place)
            return
        if isinstance(target, torch._ops.OpOverloadPacket):
            if _is_builtin(target._qualified_op_name.partition("::")[0]):
                return
            target = overload_of(target, args, kwargs)
        if isinstance(target, torch._ops.OpOverload):
            if not _is_builtin(target.namespace):
                yield self._make(target, bind(target, args, kwargs), node, reader, place)
        elif not _is_torchs(target):
            named = {f"arg{i}": a for i, a in enumerate(args)} | dict(kwargs)
            name = getattr(target, "__qualname__", type(target).__qualname__)
            arguments = {key: reader.read(value) for key, value in named.items()}
            module = getattr(target, "__module__", None) or "python"
            yield OpCall(
                module, name, arguments, None, describe(place_of(node, place)), self._bounder
            )

    def _make(
        self,
        overload: OpOverload,
        bound: Mapping[str, Any],
        node: torch.fx.Node,
        reader: Reader,
        place: Place,
    ) -> OpCall:
        name = overload._schema.name.partition("::")[2]
        arguments = {key: reader.read(value) for key, value in bound.items()}
        return OpCall(
            overload.namespace,
            name,
            arguments,
            overload,
            describe(place_of(node, place)),
            self._bounder,
        )

    def _walk_body(
        self,
        body: torch.fx.GraphModule,
        operands: Sequence[Any],
        inputs: Mapping[torch.fx.Node, int],
        place: Place,
    ) -> Iterator[OpCall]:
        """Yield the ops of a body, whose placeholders are the last of the operands where they look the same."""
        import torch

        holes = placeholders_of(body)
        traced = {}
        for hole, operand in zip(reversed(holes), reversed(operands), strict=False):
            if (
                isinstance(operand, torch.fx.Node)
                and operand in inputs
                and _shape(hole) == _shape(operand)
            ):
                traced[hole] = inputs[operand]
        key = body, tuple(traced.get(hole) for hole in holes)
        if key not in self._bodies:
            self._bodies[key] = tuple(self.walk(body, traced, place))
        yield from self._bodies[key]


def _body_of(gm: torch.fx.GraphModule, value: Any) -> torch.fx.GraphModule | None:
    """Return the graph that an operand of a higher-order op names, if it does."""
    if getattr(value, "op", None) == "get_attr":
        held: Any = gm
        for part in str(value.target).split("."):
            held = getattr(held, part, None)
        value = held
    return value if hasattr(value, "graph") and hasattr(value, "code") else None


def _shape(node: torch.fx.Node) -> tuple[str, ...] | None:
    """Return the shape of a node as text: comparing sizes would add guards."""
    shape = getattr(value_of(node), "shape", None)
    return (
        None
        if shape is None
        else tuple(str(getattr(getattr(s, "node", s), "expr", s)) for s in shape)
    )


def _is_builtin(namespace: str) -> bool:
    return namespace in BUILTIN


def _is_torchs(target: Any) -> bool:
    """Whether a Python target is torch's or Python's own: Dynamo's graphs are full of operator.add and torch.matmul."""
    module = getattr(target, "__module__", None) or type(target).__module__ or ""
    return module.partition(".")[0] in BUILTIN_MODULES
