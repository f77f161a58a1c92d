from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from passes import bound
from passes.calls import SymTensor
from passes.collect import collect
from passes.flatten import OpCall
from passes.records import Gap, Symbol, unite
from tests.passes.toy_ops import collect_all, guards_of, match

ops = torch.ops.toypasses
W = torch.randn(16, 8)
dynamo = torch._dynamo


@pytest.fixture(autouse=True)
def _capture():
    with dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


def dynamic(*shape, dims=(0,), dtype=torch.float32, **limits):
    x = torch.zeros(*shape, dtype=dtype)
    for dim in dims:
        dynamo.mark_dynamic(x, dim, **limits)
    return x


def only(found):
    """The one call of the one graph."""
    [collected] = found
    assert not collected.shapes.gaps
    [call] = collected.shapes.calls
    return call


def rows(call, name="x", dim=0):
    return call[name].dims[dim]


def linear(x):
    return ops.linear(x, W)


def test_the_graph_of_the_docstring_gives_its_facts():
    [collected] = collect_all(linear, dynamic(4, 8))
    [call] = collected.shapes.calls
    assert str(call) == "toy.linear(x=float32[s0, 8], w=float32[16, 8])"
    assert call.symbols == (Symbol("s0", 1, 8192),)
    assert rows(call).values == ((1, 8192, 1),)
    assert collected.used_max_size == ("x.shape[0] <= 8192",)


def test_a_static_graph_gives_a_static_call_and_needs_no_max_size():
    [collected] = collect_all(linear, torch.zeros(4, 8), dynamic=False)
    assert collected.shapes.calls[0].symbols == ()
    assert collected.used_max_size == ()


def test_a_call_at_a_size_is_the_call_of_the_graph_of_that_size():
    def model(x):
        out = x.new_empty(2 * x.shape[0], 16)
        ops.gemm(torch.cat([x, x]), W, out, n=5)
        return out

    symbolic = only(collect_all(model, dynamic(4, 8)))
    for size in (1, 5, 64):
        static = only(collect_all(model, torch.zeros(size, 8), dynamic=False))
        assert bound.at(symbolic, {"s0": size}) == static


def test_batch_one_is_covered_before_its_own_graph_exists():
    call = only(collect_all(linear, dynamic(4, 8, min=1, max=512)))
    assert rows(call).values == ((1, 512, 1),)  # torch says [2, 512]


def test_a_range_of_the_user_needs_no_max_size():
    [collected] = collect_all(linear, dynamic(4, 8, min=1, max=100_000))
    assert rows(collected.shapes.calls[0]).upper == 100_000
    assert collected.used_max_size == ()


def test_dynamic_true_leaves_n_and_k_to_the_weight():
    call = only(collect_all(linear, torch.zeros(4, 8), dynamic=True))
    assert str(call) == "toy.linear(x=float32[s0, 8], w=float32[16, 8])"


def test_a_weight_in_a_closure_keeps_its_real_size_as_well():
    w = torch.zeros(16, 8)
    call = only(collect_all(lambda x: ops.linear(x, w), torch.zeros(4, 8), dynamic=True))
    assert str(call) == "toy.linear(x=float32[s0, 8], w=float32[16, 8])"


def test_a_weight_that_is_an_argument_is_as_dynamic_as_its_caller_makes_it():
    def model(x, w):
        return ops.linear(x, w)

    call = only(collect_all(model, torch.zeros(4, 8), torch.zeros(16, 8), dynamic=True))
    assert str(call) == "toy.linear(x=float32[s0, s1], w=float32[s2, s1])"


def test_a_weight_without_a_parameter_keeps_its_real_size_under_dynamic_true():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.quantized = [torch.zeros(16, 8)]

        def forward(self, x):
            out = x.new_empty(x.shape[0], self.quantized[0].shape[0])
            ops.gemm(x, self.quantized[0], out)
            return out

    call = only(collect_all(Model(), torch.zeros(4, 8), dynamic=True))
    assert str(call) == "toy.gemm(a=float32[s0, 8], b=float32[16, 8], d=float32[s0, 16], n=3)"


def test_an_unbacked_batch_is_an_input_that_max_size_bounds():
    x = torch.zeros(4, 8)
    dynamo.decorators.mark_unbacked(x, 0)
    [collected] = collect_all(linear, x, given={"max_size": 64})
    assert rows(collected.shapes.calls[0]).values == ((1, 64, 1),)
    assert collected.used_max_size == ("x.shape[0] <= 64",)


def selected(x):
    n = x[:, 0].nonzero().squeeze(1)
    return x[n]


def test_a_size_that_the_data_decide_is_bounded_by_a_check():
    def model(x):
        y = selected(x)
        torch._check(y.shape[0] <= 100)
        return ops.linear(y, W)

    call = only(collect_all(model, dynamic(4, 8)))
    assert (rows(call).values, call.symbols) == (((1, 100, 1),), (Symbol("s0", 1, 100),))


def test_a_check_against_another_size_bounds_as_well():
    def model(x):
        y = selected(x)
        torch._check(y.shape[0] <= 2 * x.shape[0])
        return ops.linear(y, W)

    [collected] = collect_all(model, dynamic(4, 8), given={"max_size": 64})
    assert rows(collected.shapes.calls[0]).values == ((1, 128, 1),)
    assert collected.used_max_size == ("x.shape[0] <= 64",)
    [collected] = collect_all(model, dynamic(4, 8, min=1, max=32))
    assert rows(collected.shapes.calls[0]).values == (
        (1, 32, 1),
    )  # nonzero finds no more than there are
    assert collected.used_max_size == ()


def test_a_size_that_nothing_bounds_is_a_gap_that_says_what_to_do():
    [collected] = collect_all(lambda x: ops.linear(selected(x), W), dynamic(4, 8))
    [gap] = collected.shapes.gaps
    assert gap.op == "toypasses::linear"
    assert gap.reason.endswith("torch._check(n <= ...)")
    assert "test_collect.py:" in gap.place
    assert not collected.shapes.calls


def test_a_padded_count_of_unbounded_data_is_bounded_where_its_formula_is():
    def model(x):
        n = x.sum().to(torch.int64).item()
        torch._check(n >= 0)
        y = x.new_zeros(min(64, 3), 8)
        return ops.linear(y, W), n

    assert rows(only(collect_all(model, torch.zeros(4, 8), dynamic=False))).is_static


def test_a_branch_on_the_size_is_a_guard_that_thins_the_set():
    def model(x):
        return ops.linear(x * 2 if x.shape[0] % 8 == 0 else x, W)

    call = only(collect_all(model, dynamic(16, 8)))
    assert call.guards == ("Mod(s0, 8) == 0",)
    assert rows(call).values == ((8, 8192, 8),)


def test_batch_times_sequence_is_capped_as_a_product():
    def model(x):
        return ops.linear(x.flatten(0, 1), W)

    [collected] = collect_all(model, dynamic(4, 3, 8, dims=(0, 1)))
    [call] = collected.shapes.calls
    assert call.guards == ("s0*s1 <= 8192",)
    assert rows(call).values == ((1, 8192, 1),)
    assert "x.shape[0]*x.shape[1] <= 8192" in collected.used_max_size


def test_a_derived_size_is_never_capped():
    call = only(collect_all(lambda x: ops.linear(x.repeat(16, 1), W), dynamic(4, 8)))
    assert rows(call).upper == 16 * 8192


def test_the_rows_of_a_padded_moe_batch_follow_its_formula():
    def model(x):
        rows = x.shape[0] * 8
        return ops.linear(x.new_zeros(rows + min(rows, 128) * 127, 8), W)

    tokens = np.arange(1, 8193)
    found = rows(only(collect_all(model, dynamic(64, 8))))
    padded = lambda x: x * 8 + torch.sym_min(x * 8, 128) * 127  # noqa: E731
    assert found.upper == 81792
    call = only(
        collect_all(lambda x: ops.linear(x.new_zeros(padded(x.shape[0]), 8), W), dynamic(64, 8))
    )
    expected = np.unique(8 * tokens + 127 * np.minimum(8 * tokens, 128)).tolist()
    assert rows(call).attainable().tolist() == expected


def test_a_guard_against_a_size_that_only_max_size_bounds_shrinks_nothing():
    def model(x, cache):
        return ops.linear(x * 2 if cache.shape[0] >= 10 * x.shape[0] else x, W), cache.sum()

    call = only(collect_all(model, dynamic(4, 8), dynamic(400, 8), given={"max_size": 64}))
    assert rows(call).values == ((1, 64, 1),)
    narrow = dynamic(400, 8, min=20, max=400)
    call = only(collect_all(model, dynamic(4, 8), narrow, given={"max_size": 64}))
    assert rows(call).values == ((1, 40, 1),)
    assert call.guards == ("s1 >= 10*s0",)


def test_two_inputs_of_one_call_are_independent():
    def model(a, b):
        return ops.linear(torch.cat([a, b]), W)

    [collected] = collect_all(model, dynamic(4, 8), dynamic(5, 8))
    [call] = collected.shapes.calls
    assert (rows(call).lower, rows(call).upper, rows(call).is_exact) == (2, 16384, False)
    assert collected.used_max_size == ("a.shape[0] <= 8192", "b.shape[0] <= 8192")


def test_an_integer_argument_bounds_a_slice():
    call = only(collect_all(lambda x, n: ops.linear(x[:n], W), dynamic(14, 8), 5, dynamic=True))
    assert rows(call).upper == 8192


def test_a_cap_never_shrinks_a_size_of_another_input():
    def model(x, table):
        return ops.linear(x, W), table.sum() + x.shape[0]

    x, table = torch.zeros(4, 8), torch.zeros(4, 9, dtype=torch.int32)
    dynamo.mark_dynamic(x, 0)
    dynamo.mark_dynamic(table, 0)
    dynamo.mark_dynamic(table, 1)
    [collected] = collect_all(model, x, table)
    [call] = collected.shapes.calls
    assert (rows(call).values, call.guards) == (((1, 8192, 1),), ())
    assert collected.used_max_size == ("x.shape[0] <= 8192",)


def test_the_last_dim_of_a_float_input_is_no_part_of_the_batch():
    def model(x, ids):
        out = x.new_empty(x.shape[0], 16)
        ops.gemm(x, ids.to(torch.float32), out)
        return out

    x, ids = dynamic(4, 8, dims=(0, 1)), dynamic(16, 8, dims=(0, 1))
    [collected] = collect_all(model, x, ids)
    assert collected.shapes.calls[0].guards == ()
    assert rows(collected.shapes.calls[0], "a", 1).upper == 8192


def test_bounded_symbols_are_not_capped_as_a_product():
    x = dynamic(4, 3, 8, dims=(0, 1), min=1, max=1000)
    call = only(collect_all(lambda x: ops.linear(x.flatten(0, 1), W), x))
    assert rows(call).upper == 1_000_000
    assert call.guards == ()


def test_an_input_that_max_size_excludes_is_a_gap():
    def model(x):
        torch._check(x.shape[0] >= 100)
        return ops.linear(x, W)

    [collected] = collect_all(model, dynamic(200, 8), given={"max_size": 64})
    [gap] = collected.shapes.gaps
    assert "x.shape[0] is at least 100, more than max_size=64; raise max_size" in gap.reason


@pytest.mark.parametrize("max_size", [0, -1, True, "8192", 2.0, None])
def test_a_max_size_that_is_no_size_is_refused(max_size):
    gm = torch.fx.symbolic_trace(lambda x: x)
    with pytest.raises(ValueError, match=f"max_size={max_size!r}"):
        collect(gm, [], [], max_size=max_size)


def test_functions_with_other_names_give_equal_records():
    def one(x):
        return ops.linear(x.flatten(0, 1), W)

    def other(unrelated, hidden_states):
        return ops.linear(hidden_states.flatten(0, 1), W) + unrelated.sum()

    x = lambda: dynamic(4, 3, 8, dims=(0, 1))  # noqa: E731
    assert only(collect_all(one, x())) == only(collect_all(other, dynamic(7, 8), x()))


def test_symbols_that_first_appear_together_are_named_by_what_they_do():
    def one(a, b):
        return ops.linear(a.new_zeros(a.shape[0] * 3 + b.shape[0], 8), W)

    def other(z, a):
        return ops.linear(a.new_zeros(a.shape[0] + 3 * z.shape[0], 8), W)

    make = lambda: (dynamic(4, 8), dynamic(5, 8))  # noqa: E731
    assert only(collect_all(one, *make())) == only(collect_all(other, *make()))


CHILD = """
import sys
from tests.passes.test_collect import collect_all, dynamic, padded, unite
sys.stdout.write(unite(c.shapes for c in collect_all(padded, dynamic(4, 3, 8, dims=(0, 1)))).to_json())
"""


def padded(x):
    y = x.flatten(0, 1)
    return ops.linear(y * 2 if y.shape[0] % 4 == 0 else y, W)


def test_processes_agree_on_every_byte():
    env = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    out = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, env=env
    )
    [here] = collect_all(padded, dynamic(4, 3, 8, dims=(0, 1)))
    assert out.stdout == here.shapes.to_json()
    assert len(here.shapes.calls) == 1


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)

    def forward(self, x):
        return ops.linear(x, self.w)


class Model(torch.nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_equal_layers_are_one_call_with_a_count_and_the_first_place():
    model = Model()
    inputs = []
    [collected] = collect_all(
        model, dynamic(4, 8), matchers=[lambda op: inputs.append(op) or match(op)]
    )
    [(call, site)] = collected.shapes.items()
    assert site.count == 3
    assert site.place.startswith("layers.0 (test_collect.py:")
    assert collected.weights[call] == {"w": inputs[0].tensor("w").placeholder}


def test_the_weight_index_finds_the_live_weight():
    model, live = Model(1), []

    def backend(gm, inputs):
        collected = collect(gm, inputs, [match])
        [places] = collected.weights.values()
        live.append(inputs[places["w"]])
        return gm.forward

    dynamo.reset()
    torch.compile(model, backend=backend)(dynamic(4, 8))
    assert live[0] is model.layers[0].w


def test_each_side_of_a_graph_break_is_collected_and_the_union_adds_up():
    def model(x):
        x = ops.linear(x, torch.zeros(8, 8))
        dynamo.graph_break()
        return ops.linear(x, torch.zeros(8, 8))

    found = collect_all(model, torch.zeros(4, 8), dynamic=True)
    assert len(found) == 2
    both = unite(c.shapes for c in found)
    assert [s.count for s in both.sites] == [2]


def test_a_shared_region_counts_each_call():
    @torch.compiler.nested_compile_region
    def region(x, w):
        return ops.linear(ops.linear(x, w), w)

    def model(x, w):
        for _ in range(4):
            x = region(x, w)
        return x

    [collected] = collect_all(model, dynamic(4, 8), torch.zeros(8, 8))
    assert [s.count for s in collected.shapes.sites] == [8]


def test_several_matchers_may_claim_one_op():
    def other(op):
        if op.name == "linear":
            yield op.call(
                "other", "scale", {"x": op.tensor("x")}, {"k": op.tensor("x").shape[0] * 2}
            )

    [collected] = collect_all(linear, dynamic(4, 8), matchers=[match, other])
    assert [c.family for c in collected.shapes.calls] == ["toy", "other"]
    assert collected.shapes.calls[1].attr("k").values == ((2, 16384, 2),)


def test_what_nobody_claims_is_unknown_and_a_jit_op_among_it_is_a_gap():
    def model(x):
        return ops.touch(ops.touch(x)) + ops.pairs([x])

    [collected] = collect_all(model, dynamic(4, 8))
    assert [(u.op, u.count) for u in collected.shapes.unknown] == [
        ("toypasses::touch", 2),
        ("toypasses::pairs", 1),
    ]
    assert collected.shapes.is_complete
    for name in ("touch", "toypasses::touch"):
        [collected] = collect_all(model, dynamic(4, 8), given={"jit_ops": {name}})
        assert [g.op for g in collected.shapes.gaps] == ["toypasses::touch"]
        assert [u.op for u in collected.shapes.unknown] == ["toypasses::pairs"]


@dynamo.allow_in_graph
def opaque(x):
    return x * 2


def test_an_opaque_function_is_listed_as_unknown():
    [collected] = collect_all(lambda x: opaque(x), dynamic(4, 8))
    assert [u.op for u in collected.shapes.unknown] == [f"{__name__}::opaque"]


class Broken:
    name = "broken"

    def match(self, op):
        yield Gap(op.qualified_name, "half of it", op.place, "broken")
        raise ValueError(f"w is {list(op.tensor('w').shape)}, x has other columns; transpose it")


def test_shapes_that_contradict_each_other_are_a_gap_with_a_place_or_raised_if_strict():
    [collected] = collect_all(linear, dynamic(4, 8), matchers=[Broken().match])
    assert [g.reason for g in collected.shapes.gaps] == [
        "half of it",
        "w is [16, 8], x has other columns; transpose it",
    ]
    assert [g.family for g in collected.shapes.gaps] == ["broken", "broken"]
    with pytest.raises(Exception, match=r"test_collect.py:\d+: toypasses::linear: w is \[16, 8\]"):
        collect_all(linear, dynamic(4, 8), matchers=[Broken().match], given={"strict": True})


def test_a_matcher_that_fails_does_not_break_the_compile():
    def failing(op):
        raise RuntimeError("oh")

    [collected] = collect_all(linear, dynamic(4, 8), matchers=[failing, match])
    assert [g.reason for g in collected.shapes.gaps] == [
        "the matcher failed: RuntimeError('oh'); report it to its author"
    ]
    assert len(collected.shapes.calls) == 1


def test_the_range_of_an_exported_program_wins():
    class Exported(torch.nn.Module):
        def forward(self, x):
            return torch.ops.toypasses.linear(x, W)

    batch = torch.export.Dim("b", min=1, max=777)
    program = torch.export.export(Exported(), (torch.zeros(4, 8),), dynamic_shapes=({0: batch},))
    gm = program.graph_module
    before = guards_of(gm)
    [call] = collect(gm, [], [match], ranges=program.range_constraints).shapes.calls
    assert rows(call).values == ((1, 777, 1),)
    batch = torch.export.Dim("b", min=4, max=8)
    program = torch.export.export(Exported(), (torch.zeros(4, 8),), dynamic_shapes=({0: batch},))
    [call] = collect(
        program.graph_module, [], [match], ranges=program.range_constraints
    ).shapes.calls
    assert rows(call).values == ((4, 8, 1),)
    assert guards_of(gm) == before


def test_strides_are_text_over_the_symbols_of_the_call():
    def model(x):
        return ops.linear(x.t().contiguous().t(), W)

    call = only(collect_all(model, dynamic(4, 8)))
    assert call["x"].strides == ("1", "s0")
    assert bound.at(call, {"s0": 65})["x"].strides == ("1", "65")


def test_rules_over_sizes_become_attributes():
    def splits(op):
        tokens = op.tensor("x").shape[0]
        blocks = (tokens + 63) // 64
        yield op.call(
            "f", "o", {"x": op.tensor("x")}, {"num_splits": 132 // blocks, "blocks": (blocks, 1)}
        )

    call = only(collect_all(linear, dynamic(4, 8), matchers=[splits]))
    expected = sorted({132 // -(-t // 64) for t in range(1, 8193)})
    assert call.attr("num_splits").attainable().tolist() == expected
    assert call.attr("blocks")[0].values == ((1, 128, 1),)


@pytest.mark.parametrize("count", [100, 1000, 10_000])
def test_collecting_is_linear_at_less_than_a_millisecond_a_call(count):
    gm = None

    def backend(traced, inputs):
        nonlocal gm
        gm = traced
        return traced.forward

    dynamo.reset()
    torch.compile(linear, backend=backend)(dynamic(4, 8))
    [node] = [n for n in gm.graph.nodes if "linear" in str(n.target)]
    with gm.graph.inserting_after(node):
        for _ in range(count - 1):
            copy = gm.graph.node_copy(node)
            copy.meta = dict(node.meta)
    collect(gm, [], [match])  # imports, first compilation of expressions
    begin = time.perf_counter()
    collected = collect(gm, [], [match])
    spent = time.perf_counter() - begin
    assert [s.count for s in collected.shapes.sites] == [count]
    print(f"{count} calls: {spent / count * 1e3:.3f} ms each")
    assert spent / count < 1e-3


def test_a_call_made_by_hand_needs_no_graph():
    op = OpCall(
        "ns", "linear", {"x": SymTensor("float32", (4, 8)), "w": SymTensor("float32", (16, 8))}
    )
    [call] = match(op)
    assert str(call) == "toy.linear(x=float32[4, 8], w=float32[16, 8])"
