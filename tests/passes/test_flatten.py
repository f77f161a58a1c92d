from __future__ import annotations

import subprocess
import sys

import pytest
import sympy
import torch

from passes.calls import SymTensor
from passes.flatten import BUILTIN, OpCall, flatten
from passes.graphs import make_bounder
from tests.passes import toy_ops
from tests.passes.toy_ops import guards_of

ops = torch.ops.toypasses
W = torch.randn(16, 8)


def ops_of(model, *args, **kwargs) -> list[list[OpCall]]:
    """The ops of each graph that torch.compile makes."""
    found: list[list[OpCall]] = []

    def backend(gm, inputs):
        before = guards_of(gm)
        found.append(list(flatten(gm, make_bounder(gm, inputs))))
        assert guards_of(gm) == before
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, **kwargs)(*args)
    return found


def aot_ops_of(model, *args, dynamic=None) -> list[OpCall]:
    """The ops of the graph behind AOTAutograd, where mutating ops are functionalised."""
    from torch._dynamo.backends.common import aot_autograd

    found: list[OpCall] = []

    def compiler(gm, inputs):
        found.extend(flatten(gm))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=aot_autograd(fw_compiler=compiler), dynamic=dynamic)(*args)
    return found


def shapes(op: OpCall) -> dict[str, tuple]:
    return {name: v.shape for name, v in op.arguments.items() if isinstance(v, SymTensor)}


def test_an_overload_packet_is_read_by_its_schema_with_defaults_filled_in():
    [[op]] = ops_of(lambda x: ops.linear(x, w=W, dtype=torch.bfloat16), torch.randn(4, 8))
    assert (op.qualified_name, str(op.overload)) == (
        "toypasses::linear",
        "toypasses.linear.default",
    )
    assert list(op.arguments) == ["x", "w", "dtype", "groups"]
    assert (op["dtype"], op["groups"]) == ("bfloat16", 1)
    assert op.schema.startswith("toypasses::linear(Tensor x, Tensor w")
    assert op.tensor("w").placeholder is not None


def test_an_overload_is_read_as_well():
    [[op]] = ops_of(lambda x: toy_ops.functional(x, scale=3.0), torch.randn(4, 8))
    assert (op.name, op["scale"]) == ("functional", 3.0)


def test_the_overload_that_fits_the_arguments_is_taken():
    [[one, two]] = ops_of(lambda x: ops.touch(ops.touch(x, x)), torch.randn(4, 8))
    assert [str(one.overload), str(two.overload)] == [
        "toypasses.touch.twice",
        "toypasses.touch.default",
    ]


def test_lists_devices_and_numbers_come_as_plain_values():
    def model(x):
        return ops.pairs([x, x + 1], device=torch.device("cpu"))

    [[op]] = ops_of(model, torch.randn(4, 8))
    assert [t.shape for t in op["xs"]] == [(4, 8), (4, 8)]
    assert (op["recipe"], op["device"], op["eps"]) == ((1, 128), "cpu", 1e-6)


def test_a_mutating_op_keeps_its_out_argument():
    def model(x):
        out = x.new_empty(x.shape[0], 16)
        ops.gemm(x, W, out)
        return out

    [[op]] = ops_of(model, torch.randn(4, 8))
    assert shapes(op) == {"a": (4, 8), "b": (16, 8), "out": (4, 16)}
    [functional] = aot_ops_of(model, torch.randn(4, 8))
    assert functional.name == "gemm"
    assert shapes(functional) == shapes(op)
    assert functional["n"] == 3


@pytest.mark.parametrize(
    "cut",
    [
        lambda t: t[2:6],
        lambda t: t[:, 8:],
        lambda t: t.view(2, 4, 16)[1],
        lambda t: t.t(),
        lambda t: t[-3:-1],
    ],
)
def test_a_mutated_view_has_the_shape_and_strides_that_the_op_gets(cut):
    def model(x):
        out = x.new_empty(8, 16)
        ops.gemm(x, W, cut(out))
        return out

    expected = cut(torch.empty(8, 16))
    [op] = aot_ops_of(model, torch.randn(4, 8))
    out = op.tensor("out")
    assert out.shape == tuple(expected.shape)
    assert (out.strides or expected.contiguous().stride()) == expected.stride()


def test_a_mutated_dynamic_view_keeps_its_symbols():
    def model(x):
        out = x.new_empty(2 * x.shape[0], 16)
        ops.gemm(x, W, out[: x.shape[0]])
        return out

    x = torch.randn(12, 8)
    torch._dynamo.mark_dynamic(x, 0)
    [op] = aot_ops_of(model, x)
    assert op.tensor("out").shape == (op.tensor("a").shape[0], 16)
    assert isinstance(op.tensor("a").shape[0], sympy.Symbol)


def test_the_first_auto_functionalized_is_read_too():
    def model(x):
        out = x.new_empty(x.shape[0], 16)
        ops.gemm(x, W, out)
        return out

    # not monkeypatch: what it undoes stays hidden in a config module of torch
    with torch._inductor.config.patch(enable_auto_functionalized_v2=False):
        [op] = aot_ops_of(model, torch.randn(4, 8))
    assert shapes(op) == {"a": (4, 8), "b": (16, 8), "out": (4, 16)}


def test_both_branches_of_cond_are_seen():
    [found] = ops_of(
        lambda x: torch.cond(x.sum() > 0, ops.touch, lambda y: ops.touch(y + 1), (x,)),
        torch.randn(4, 8),
    )
    assert [op.name for op in found] == ["touch", "touch"]


def test_a_nested_region_counts_as_often_as_it_is_called():
    @torch.compiler.nested_compile_region
    def region(x, w):
        return ops.linear(x, w)

    square = torch.randn(8, 8)
    [found] = ops_of(lambda x, w: region(region(region(x, w), w), w), torch.randn(4, 8), square)
    assert [op.name for op in found] == ["linear"] * 3
    assert {op.tensor("w").placeholder for op in found} != {None}  # traced through the region


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_body_is_seen(reentrant):
    from torch.utils.checkpoint import checkpoint

    def model(x):
        return checkpoint(lambda y: ops.touch(y).sin(), x, use_reentrant=reentrant)

    found = ops_of(model, torch.randn(4, 8, requires_grad=True))
    assert [op.name for graph in found for op in graph] == ["touch"]


def test_the_body_of_map_is_seen_and_its_slices_are_no_inputs():
    from torch._higher_order_ops.map import map as hop_map

    [[op]] = ops_of(
        lambda xs, w: hop_map(lambda x, w: ops.linear(x, w), xs, w), torch.randn(3, 4, 8), W
    )
    assert shapes(op) == {"x": (4, 8), "w": (16, 8)}
    assert op.tensor("x").placeholder is None


def test_a_submodule_is_walked():
    class Inner(torch.nn.Module):
        def forward(self, x):
            return torch.ops.toypasses.touch(x)

    inner = torch.fx.symbolic_trace(Inner())
    root = torch.nn.Module()
    root.inner = inner
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8)
    y = graph.call_module("inner", (x,))
    graph.output(graph.call_module("inner", (y,)))
    for node in inner.graph.nodes:
        node.meta["val"] = torch.empty(4, 8)
    assert [op.name for op in flatten(torch.fx.GraphModule(root, graph))] == ["touch", "touch"]


def test_a_tensor_that_the_module_holds_gives_its_real_shape():
    root = torch.nn.Module()
    root.weight = torch.nn.Parameter(torch.randn(16, 8))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8)
    graph.output(graph.call_function(ops.linear, (x, graph.get_attr("weight"))))
    [op] = flatten(torch.fx.GraphModule(root, graph))
    assert op.tensor("w") == SymTensor("float32", (16, 8))
    assert op.tensor("w").placeholder is None


@torch._dynamo.allow_in_graph
def opaque(x, scale):
    return x * scale


def test_a_python_function_in_the_graph_is_an_opaque_op():
    [[op]] = ops_of(lambda x: opaque(x, 2) + torch.relu(x), torch.randn(4, 8))
    assert op.qualified_name == f"{__name__}::opaque"
    assert (op.overload, op.schema, op["arg1"]) == (None, "", 2)
    assert op["arg0"] == SymTensor("float32", (4, 8))


def test_torchs_own_ops_are_left_out():
    [found] = ops_of(
        lambda x: torch.nn.functional.linear(x.sin() @ x.t(), torch.ones(3, 4)) + 1,
        torch.randn(4, 8),
    )
    assert found == []


def test_every_namespace_that_torch_registers_is_known_as_its_own():
    code = (
        "import torch; print(*{s.name.partition('::')[0] for s in torch._C._jit_get_all_schemas()})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(out.stdout.split()) <= BUILTIN


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleDict({"up": Leaf()})

    def forward(self, x):
        return self.experts["up"](x)


class Leaf(torch.nn.Module):
    def forward(self, x):
        return torch.ops.toypasses.touch(x)


def test_a_place_is_a_module_path_and_a_line_without_directories():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    [found] = ops_of(Model(), torch.randn(4, 8))
    line = Leaf.forward.__code__.co_firstlineno + 1
    assert [op.place for op in found] == [
        f"layers.{i}.experts.up (test_flatten.py:{line})" for i in range(2)
    ]
    exported = torch.export.export(Model(), (torch.randn(4, 8),))
    assert [op.place for op in flatten(exported.graph_module)] == [op.place for op in found]


def test_strides_are_kept_where_a_tensor_is_not_contiguous():
    def model(x):
        return ops.linear(x.t().contiguous().t(), W), ops.linear(x, W)

    [[strided, plain]] = ops_of(model, torch.randn(4, 8))
    assert (strided.tensor("x").strides, plain.tensor("x").strides) == ((1, 4), None)


def test_a_dtensor_has_its_local_shape():
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.randn(4, 8), mesh, [Shard(0)])
        graph = torch.fx.Graph()
        node = graph.placeholder("x")
        node.meta["val"] = x
        graph.output(graph.call_function(ops.touch.default, (node,)))
        [op] = flatten(torch.fx.GraphModule(torch.nn.Module(), graph))
        assert tuple(x.shape) == (8, 8)
        assert op.tensor("x").shape == (4, 8)
    finally:
        dist.destroy_process_group()


def test_a_wrapper_subclass_has_its_outer_shape_and_dtype():
    from torch.testing._internal.two_tensor import TwoTensor

    wrapped = TwoTensor(torch.randn(16, 8), torch.randn(16, 8))
    graph = torch.fx.Graph()
    node = graph.placeholder("w")
    node.meta["val"] = wrapped
    graph.output(graph.call_function(ops.touch.default, (node,)))
    [op] = flatten(torch.fx.GraphModule(torch.nn.Module(), graph))
    assert op.tensor("x") == SymTensor("float32", (16, 8))
    assert op.tensor("x").placeholder == 0


def test_an_op_says_which_arguments_it_has():
    op = OpCall("ns", "op", {"x": 1})
    with pytest.raises(ValueError, match="no argument y; it has x"):
        op["y"]
    with pytest.raises(ValueError, match="no tensor"):
        op.tensor("x")


def test_an_op_made_by_hand_makes_static_records():
    op = OpCall("ns", "op", {"x": SymTensor("float32", (4, 8), placeholder=2)})
    call = op.call("f", "o", {"x": op.tensor("x")}, {"n": 3, "flags": (True, None, "a")})
    assert str(call) == "f.o(x=float32[4, 8], n=3, flags=(True, None, 'a'))"
    assert op.bound[call] == {"x": 2}
    with pytest.raises(TypeError, match="give a number"):
        op.call("f", "o", {}, {"n": object()})


def test_true_one_and_one_point_zero_are_told_apart():
    op = OpCall("ns", "op", {})
    made = [op.call("f", "o", {}, {"n": n}).attr("n") for n in (1, True, 1.0)]
    assert [type(n) for n in made] == [int, bool, float]
