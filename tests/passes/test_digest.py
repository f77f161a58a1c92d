"""The digest of a graph: equal for equal graphs in any process, another for any other graph."""

from __future__ import annotations

import pytest
import torch

from passes import digest


def graphs(function, *args) -> list[torch.fx.GraphModule]:
    found: list[torch.fx.GraphModule] = []

    def backend(gm, inputs):
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=True)(*args)
    return found


X = torch.ones(5, 8)


def base(x, w):
    return torch.relu(x[:, 1:] @ w[1:]).to(torch.float64) + 1


def renamed(longer, name):
    return torch.relu(longer[:, 1:] @ name[1:]).to(torch.float64) + 1


OTHERS = {
    "op": lambda x, w: torch.sigmoid(x[:, 1:] @ w[1:]).to(torch.float64) + 1,
    "constant": lambda x, w: torch.relu(x[:, 1:] @ w[1:]).to(torch.float64) + 2,
    "slice": lambda x, w: torch.relu(x[:, 1:] @ w[1:]).to(torch.float64)[1:] + 1,
    "dtype": lambda x, w: torch.relu(x[:, 1:] @ w[1:]).to(torch.float16) + 1,
    "connection": lambda x, w: torch.relu(x[:, 1:] @ w[1:] + x[:, :1]).to(torch.float64) + 1,
}


def digests(function) -> list[str]:
    return [digest.digest_of(gm) for gm in graphs(function, X, torch.ones(8, 3))]


def test_names_of_inputs_and_the_symbols_that_follow_them_are_left_out():
    assert digests(base) == digests(renamed)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_graph_has_another_digest(other):
    assert digests(other) != digests(base)


def branches(first, second):
    return lambda flag, x: torch.cond(flag, first, second, (x,))


def test_graphs_inside_count_and_higher_order_ops_have_their_names():
    def of(model):
        (gm,) = graphs(model, torch.tensor(True), X)
        return gm

    one, two = (
        of(branches(lambda x: x.sin(), last)) for last in (lambda x: x.cos(), lambda x: x.tan())
    )
    assert digest.digest_of(one) != digest.digest_of(two)
    assert "call_function cond " in "\n".join(digest._lines(one))


def test_a_custom_op_is_named_as_it_was_called_and_nothing_holds_an_address():
    (gm,) = graphs(lambda x: torch.ops.aten.add.Tensor(torch.ops.aten.sin(x), x), X)
    text = "\n".join(digest._lines(gm))
    assert "call_function aten.add.Tensor " in text and "call_function aten.sin " in text
    assert "0x" not in text


def test_a_method_of_a_c_class_has_no_module_and_a_name():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.Tensor.relu, (graph.placeholder("x"),)))
    assert digest.digest_of(torch.fx.GraphModule(torch.nn.Module(), graph)).startswith("d")
