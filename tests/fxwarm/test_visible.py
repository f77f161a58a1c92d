"""Plain library calls are nodes of the graph while fxwarm traces, and are nobody else's business."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

import fxwarm
import fxwarm.backend
from fxwarm import substitute
from fxwarm.ops import _gemm, per_token_cast_to_fp8, use_library
from fxwarm.ops import _library as libraries
from fxwarm.ops.mhc_factories import get_factory
from fxwarm.ops.mhc_reference import mhc_post_reference, mhc_pre_reference

EXTENSION = r"""
#include <Python.h>
static PyObject *hook = NULL;
static PyObject *set_hook(PyObject *self, PyObject *f) { Py_XDECREF(hook); Py_INCREF(f); hook = f; Py_RETURN_NONE; }
static PyObject *gemm(PyObject *self, PyObject *args, PyObject *kwargs) { return PyObject_Call(hook, args, kwargs); }
static PyMethodDef methods[] = {
    {"set_hook", set_hook, METH_O, ""},
    {"fp8_gemm_nt", (PyCFunction)gemm, METH_VARARGS | METH_KEYWORDS,
     "fp8_gemm_nt(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], d: torch.Tensor, "
     "c: Optional[torch.Tensor] = None, recipe: object = None, compiled_dims: str = 'nk') -> None\n"},
    {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "pybind_like", NULL, -1, methods};
PyMODINIT_FUNC PyInit_pybind_like(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="session")
def pybind_like(tmp_path_factory):
    """A builtin function with a pybind11 docstring, compiled from C."""
    folder = tmp_path_factory.mktemp("extension")
    source, built = folder / "m.c", folder / "pybind_like.so"
    source.write_text(EXTENSION)
    include = sysconfig.get_paths()["include"]
    command = ["cc", "-shared", "-fPIC", "-w", f"-I{include}", str(source), "-o", str(built)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler, or no Python headers")
    spec = importlib.util.spec_from_file_location("pybind_like", built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Calls(list):
    """What the library's own function was called with."""


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def deep_gemm(monkeypatch, calls, fresh):
    """A DeepGEMM whose functions are Python and compute on the CPU."""
    module = types.ModuleType("deep_gemm")

    def fp8_gemm_nt(
        a,
        b,
        d,
        c=None,
        recipe=None,
        recipe_a=None,
        recipe_b=None,
        compiled_dims="nk",
        disable_ue8m0_cast=False,
    ):
        calls.append("fp8_gemm_nt")
        _gemm.dense(a=a[0], a_sf=a[1], b=b[0], b_sf=b[1], d=d, c=c, recipe=recipe)

    def m_grouped_fp8_gemm_nt_contiguous(a, b, d, m_indices):
        calls.append("grouped")
        _gemm.contiguous(a=a[0], a_sf=a[1], b=b[0], b_sf=b[1], d=d, grouped_layout=m_indices)

    def bf16_gemm_nn(a, b, d, c=None, compiled_dims="nk"):
        calls.append("bf16_gemm_nn")
        _gemm.dense(a=a, b=b.mT, d=d, c=c)

    for function in (fp8_gemm_nt, m_grouped_fp8_gemm_nt_contiguous, bf16_gemm_nn):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr(libraries, "_chosen", {})
    substitute.install()
    return module


def weight(n: int = 256, k: int = 128, groups: int = 0):
    generator = torch.Generator().manual_seed(0)
    shape = (groups, n, k) if groups else (n, k)
    bits = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    return bits, torch.rand(*shape[:-2], n // 128, k // 128, generator=generator)


class Seen(list):
    """A backend that fxwarm's view is switched on for, keeping the graphs."""

    def __call__(self, gm, inputs):
        self.append(gm)
        return gm.forward


@pytest.fixture
def seen():
    found = Seen()
    substitute.mark(found)
    return found


def ops(graphs) -> list[str]:
    return [str(n.target) for gm in graphs for n in gm.graph.nodes if "fxwarm" in str(n.target)]


def linear(gemm):
    """Return a user's function that calls ``gemm``, which it got hold of by itself."""

    def forward(x, w, sf):
        a = per_token_cast_to_fp8(x)
        d = torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16)
        gemm(a, (w, sf), d)
        return d

    return forward


def test_a_python_function_becomes_a_node_by_attribute_and_by_earlier_name(deep_gemm, calls, seen):
    early = deep_gemm.fp8_gemm_nt

    def forward(x, w, sf):
        a = per_token_cast_to_fp8(x)
        d, e = (torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16) for _ in range(2))
        sys.modules["deep_gemm"].fp8_gemm_nt(a, (w, sf), d)
        early(list(a), b=(w, sf), d=e, compiled_dims="nk")
        return d, e

    x, (w, sf) = torch.randn(6, 128), weight()
    expected = forward(x, w, sf)
    calls.clear()
    out = torch.compile(forward, backend=seen, fullgraph=True)(x, w, sf)
    assert ops(seen) == ["fxwarm.fp8_gemm_nt"] * 2
    assert not calls
    assert all(map(torch.equal, out, expected))


@pytest.mark.parametrize("form", ["python", "builtin", "partial", "tvm-ffi", "object"])
def test_every_form_of_function_becomes_a_node(form, request, deep_gemm, calls, seen):
    python = deep_gemm.fp8_gemm_nt
    if form == "builtin":
        extension = request.getfixturevalue("pybind_like")
        extension.set_hook(python)
        deep_gemm.fp8_gemm_nt = extension.fp8_gemm_nt
    elif form == "partial":
        deep_gemm.fp8_gemm_nt = functools.partial(python)
    elif form == "tvm-ffi":
        tvm_ffi = pytest.importorskip("tvm_ffi")
        deep_gemm.fp8_gemm_nt = tvm_ffi.convert(lambda *args: calls.append("fp8_gemm_nt"))
    elif form == "object":
        deep_gemm.fp8_gemm_nt = type(
            "Kernel", (), {"__call__": lambda self, *args: python(*args)}
        )()
    x, (w, sf) = torch.randn(6, 128), weight()
    expected = linear(python)(x, w, sf)
    calls.clear()
    out = torch.compile(linear(deep_gemm.fp8_gemm_nt), backend=seen, fullgraph=True)(x, w, sf)
    assert ops(seen) == ["fxwarm.fp8_gemm_nt"]
    assert not calls
    assert torch.equal(out, expected)


@pytest.mark.parametrize("form", ["python", "tvm-ffi"])
def test_another_backend_in_the_same_process_sees_the_original(form, deep_gemm, calls, seen):
    if form == "tvm-ffi":
        tvm_ffi = pytest.importorskip("tvm_ffi")
        deep_gemm.fp8_gemm_nt = tvm_ffi.convert(lambda *args: calls.append("fp8_gemm_nt"))
    forward = linear(deep_gemm.fp8_gemm_nt)
    x, (w, sf) = torch.randn(6, 128), weight()
    torch.compile(forward, backend=seen)(x, w, sf)
    others = []

    def other(gm, inputs):
        others.append(gm)
        return gm.forward

    for backend in (other, "inductor"):
        calls.clear()
        torch.compile(forward, backend=backend)(x, w, sf)
        # Dynamo inlines a Python function, and leaves any other to Python
        assert calls == ["fp8_gemm_nt"]
    assert ops(seen) == ["fxwarm.fp8_gemm_nt"]
    assert ops(others) == []


def test_eager_code_and_a_removed_hook_see_the_original(deep_gemm, calls, seen):
    forward = linear(deep_gemm.fp8_gemm_nt)
    x, (w, sf) = torch.randn(6, 128), weight()
    forward(x, w, sf)
    assert calls == ["fp8_gemm_nt"]
    substitute.remove()
    torch.compile(forward, backend=seen)(x, w, sf)
    assert ops(seen) == []
    assert substitute.install()
    torch._dynamo.reset()
    torch.compile(forward, backend=seen)(x, w, sf)
    assert ops(seen) == ["fxwarm.fp8_gemm_nt"]


def test_a_function_that_is_replaced_is_seen_anew(deep_gemm, seen):
    def forward(x, w, sf):
        return linear(sys.modules["deep_gemm"].fp8_gemm_nt)(x, w, sf)

    compiled = torch.compile(forward, backend=seen)
    x, (w, sf) = torch.randn(6, 128), weight()
    compiled(x, w, sf)
    deep_gemm.fp8_gemm_nt = lambda a, b, d: d.fill_(7)
    assert compiled(x, w, sf).eq(7).all() or len(seen) == 2
    assert ops(seen)


def test_a_visible_function_is_itself_and_no_other(deep_gemm, seen):
    functions = [deep_gemm.fp8_gemm_nt, deep_gemm.bf16_gemm_nn]

    def forward(x):
        for function in functions:
            if function is functions[0]:
                x = x + 1
        return x

    assert torch.compile(forward, backend=seen, fullgraph=True)(torch.zeros(1)).tolist() == [1]


def test_grouped_calls_of_2025_bind_their_old_argument_name(deep_gemm, seen):
    def forward(x, w, sf, ids):
        d = torch.empty(x.shape[0], w.shape[1], dtype=torch.bfloat16)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            per_token_cast_to_fp8(x), (w, sf), d, m_indices=ids
        )
        return d

    x, (w, sf), ids = (
        torch.randn(256, 128),
        weight(groups=2),
        torch.arange(2).repeat_interleave(128).int(),
    )
    expected = forward(x, w, sf, ids)
    out = torch.compile(forward, backend=seen, fullgraph=True)(x, w, sf, ids)
    assert ops(seen) == ["fxwarm.m_grouped_fp8_gemm_nt_contiguous"]
    assert torch.equal(out, expected)


def test_what_no_op_can_express_stays_as_it_is_and_is_a_gap(deep_gemm, calls):
    def forward(x, w, sf):
        d = torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16)
        e = torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt(per_token_cast_to_fp8(x), (w, sf), d, recipe_a=(1, 128))
        deep_gemm.bf16_gemm_nn(d, w.new_ones(256, 256).bfloat16(), e, c=d.float())
        return d

    x, (w, sf) = torch.randn(6, 128), weight()
    shapes = fxwarm.trace(forward, x, w, sf)
    assert [gap.op for gap in shapes.gaps] == ["deep_gemm.fp8_gemm_nt", "deep_gemm.bf16_gemm_nn"]
    assert "has no argument recipe_a" in shapes.gaps[0].reason
    assert "give it as bfloat16" in shapes.gaps[1].reason  # c, which d is
    assert "test_visible.py" in shapes.gaps[0].place
    assert not substitute.take_refusals()


def test_a_call_that_the_op_finds_impossible_is_left_to_the_library(deep_gemm, calls, seen, caplog):
    deep_gemm.fp8_gemm_nt = lambda a, b, d: calls.append("packed")
    forward = linear(deep_gemm.fp8_gemm_nt)
    x, sf = torch.randn(6, 128), torch.ones(256, 1)
    torch.compile(forward, backend=seen)(x, torch.zeros(256, 64, dtype=torch.int8), sf)
    assert calls == ["packed"]
    assert ops(seen) == []
    (gap,) = substitute.take_refusals()
    assert "int8" in gap.reason
    assert str(gap) in caplog.text  # said at once: no graph may be left to carry it


def test_another_build_than_the_one_that_the_ops_call_is_not_confused_with_it(
    deep_gemm, calls, seen
):
    other = types.ModuleType("hub_build")
    other.fp8_gemm_nt = lambda a, b, d: None
    use_library("deep_gemm", other)
    x, (w, sf) = torch.randn(6, 128), weight()
    torch.compile(linear(deep_gemm.fp8_gemm_nt), backend=seen)(x, w, sf)
    assert ops(seen) == []
    (gap,) = substitute.take_refusals()
    assert "the ops call hub_build" in gap.reason


def test_a_library_that_registers_ops_itself_is_left_alone(deep_gemm, seen):
    with torch.library._scoped_library("deep_gemm", "DEF") as lib:
        lib.define(
            "fp8_fp4_gemm_nt(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(d!) d) -> ()"
        )
        lib.impl("fp8_fp4_gemm_nt", lambda a, a_sf, b, b_sf, d: None, "CPU")
        torch.library.register_fake(
            "deep_gemm::fp8_fp4_gemm_nt", lambda a, a_sf, b, b_sf, d: None, lib=lib
        )
        deep_gemm.fp8_gemm_nt = lambda a, b, d: torch.ops.deep_gemm.fp8_fp4_gemm_nt(*a, *b, d)
        x, (w, sf) = torch.randn(6, 128), weight()
        torch.compile(linear(deep_gemm.fp8_gemm_nt), backend=seen, fullgraph=True)(x, w, sf)
        targets = [str(n.target) for gm in seen for n in gm.graph.nodes]
    assert "deep_gemm.fp8_fp4_gemm_nt" in targets
    assert ops(seen) == []


def test_the_installed_backend_sees_the_call_and_its_shapes(deep_gemm, calls):
    forward = linear(deep_gemm.fp8_gemm_nt)
    x, (w, sf) = torch.randn(6, 128), weight()
    shapes = fxwarm.trace(forward, x, w, sf)
    (call,) = shapes.calls
    assert (call.family, call.op) == ("deep_gemm", "fp8_gemm_nt")
    assert (call["a"].dims[0].lower, call["a"].dims[0].upper) == (1, 8192)
    assert not shapes.gaps
    assert not calls
    expected = forward(x, w, sf)
    calls.clear()
    with torch.no_grad():
        out = torch.compile(forward, backend=fxwarm.backend.fxwarm, fullgraph=True)(x, w, sf)
    assert torch.equal(out, expected)
    assert not calls


def entry(module, name: str, parameters: str):
    """Give ``module`` a function of DeepGEMM's that computes nothing."""
    scope: dict = {}
    exec(f"def {name}({parameters}): return None", scope)
    setattr(module, name, scope[name])
    return scope[name]


def f8(*shape):
    return torch.zeros(shape).to(torch.float8_e4m3fn)


def test_einsum_masked_and_prenorm_calls_are_seen_with_their_arguments(deep_gemm):
    einsum = entry(deep_gemm, "einsum", "expr, a, b, d, c=None, use_cublaslt=False")
    fp8_einsum = entry(deep_gemm, "fp8_einsum", "expr, a, b, d, c=None, recipe=(1, 128, 128)")
    masked = entry(
        deep_gemm, "fp8_m_grouped_gemm_nt_masked", "a, b, d, masked_m, expected_m, recipe=None"
    )
    prenorm = entry(deep_gemm, "tf32_hc_prenorm_gemm", "a, b, d, sqr_sum, num_splits=None")
    w, w8, sf = torch.randn(8, 512, 128).bfloat16(), f8(8, 256, 128), torch.ones(8, 2, 1)
    fn = torch.randn(24, 4096)

    def forward(x):
        rows = x.shape[0]
        a = (x + 0).bfloat16().view(rows, 8, 128)
        einsum("bhr,hdr->bhd", a, w, a.new_empty(rows, 8, 512))
        a8 = a.to(torch.float8_e4m3fn)
        fp8_einsum(
            "bhr,hdr->bhd", (a8, torch.ones(rows, 8, 1)), (w8, sf), a.new_empty(rows, 8, 256)
        )
        counts, out = torch.zeros(8, dtype=torch.int32), a.new_empty(8, 64, 256)
        masked((f8(8, 64, 128), torch.ones(8, 64, 1)), (w8, sf), out, counts, rows)
        streams = x.bfloat16().repeat(1, 4)
        prenorm(streams, fn, x.new_empty(16, rows, 24), x.new_empty(16, rows), num_splits=16)
        return out

    shapes = fxwarm.trace(forward, torch.randn(6, 1024))
    assert not shapes.gaps, shapes.gaps
    found = {c.op for c in shapes.calls}
    assert found == {"einsum", "fp8_einsum", "m_grouped_fp8_gemm_nt_masked", "tf32_hc_prenorm_gemm"}
    assert next(c for c in shapes.calls if "masked" in c.op).attr("expected_m").upper == 8192


def test_attention_and_weight_gradient_calls_are_seen_in_both_builds_words(deep_gemm, monkeypatch):
    logits = entry(deep_gemm, "fp8_mqa_logits", "q, kv, weights, ks, ke, clean_logits=False")
    either = entry(
        deep_gemm,
        "fp8_fp4_mqa_logits",
        "q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=False, logits_dtype=None",
    )
    paged = entry(
        deep_gemm,
        "fp8_paged_mqa_logits",
        "q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False",
    )
    pages = entry(
        deep_gemm,
        "fp8_fp4_paged_mqa_logits",
        "q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, logits_dtype=None",
    )
    short = torch.bfloat16
    metadata = entry(
        deep_gemm, "get_paged_mqa_logits_metadata", "context_lens, block_kv, num_sms, indices=None"
    )
    bf16 = entry(
        deep_gemm, "k_grouped_bf16_gemm_tn_contiguous", "a, b, d, ks, grouped_layout, c=None"
    )
    fp8 = entry(
        deep_gemm,
        "k_grouped_fp8_gemm_nt_contiguous",
        "a, b, d, ks, ks_tensor, c=None, recipe=(1, 1, 128)",
    )
    total = entry(deep_gemm, "einsum", "expr, a, b, d, c=None, use_cublaslt=False")
    sizes = torch.zeros(2, dtype=torch.int32, device="meta")
    kv, cache = (
        f8(512, 128).to("meta"),
        torch.zeros(64, 64, 1, 132, dtype=torch.uint8, device="meta"),
    )

    def forward(x):
        rows = x.shape[0]
        q, edge = (
            x.to(torch.float8_e4m3fn).view(rows, 32, 128),
            x.new_zeros(rows, dtype=torch.int32),
        )
        logits(q, (kv, x.new_ones(512)), x[:, :32].contiguous(), edge, edge, clean_logits=False)
        either(
            (q, None),
            (kv, x.new_ones(512)),
            x[:, :32].contiguous(),
            edge,
            edge,
            logits_dtype=torch.float,
        )
        either(
            (q, None), (kv, x.new_ones(512)), x[:, :32].contiguous(), edge, edge, logits_dtype=short
        )
        lens, table = (
            x.new_zeros(rows, 1, dtype=torch.int32),
            x.new_zeros(rows, 4, dtype=torch.int32),
        )
        schedule = metadata(lens, 64, 132)
        tensors = cache, x[:, :32].contiguous(), lens, table, schedule
        pages((q.unsqueeze(1), None), *tensors, 256, logits_dtype=short)
        out = paged(q.unsqueeze(1), cache, x[:, :32].contiguous(), lens, table, schedule, 256)
        d = x.new_zeros(2, 256, 128)
        bf16(
            x.new_zeros(384, 256).bfloat16(),
            x.new_zeros(384, 128).bfloat16(),
            d,
            [128, 256],
            sizes,
            d,
        )
        a, b = (x.new_zeros(384 * n).to(torch.float8_e4m3fn) for n in (256, 128))
        fp8((a, x.new_ones(256, 3)), (b, x.new_ones(128, 3)), d, [128, 256], sizes, c=d)
        y = x.bfloat16().view(rows, 64, 64)
        sums = x.new_zeros(64, 64)
        total("bmk,bnk->mn", y, y, sums, c=sums)
        return out

    shapes = fxwarm.trace(forward, torch.randn(6, 4096, device="meta"))
    assert not shapes.gaps, shapes.gaps
    assert {c.op for c in shapes.calls} == {
        "fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "einsum",
        "k_grouped_bf16_gemm_tn_contiguous", "k_grouped_fp8_gemm_nt_contiguous",
    }  # fmt: skip
    kinds = [(c.op, c.attr("logits_dtype")) for c in shapes.calls if "mqa_logits" in c.op]
    assert kinds == [
        # float32 is what it is without being said: the first two calls are one but for what they clean
        ("fp8_mqa_logits", None), ("fp8_mqa_logits", None), ("fp8_mqa_logits", "bfloat16"),
        ("get_paged_mqa_logits_metadata", None),
        ("fp8_paged_mqa_logits", "bfloat16"), ("fp8_paged_mqa_logits", None),
    ]  # fmt: skip
    monkeypatch.delitem(sys.modules, "deep_gemm")
    library = {"sgl-deep-gemm": "0.1.5.post1"}
    plan = fxwarm.plan(shapes, target=fxwarm.Target.named("h200"), libraries=library)
    assert not [g for g in plan.gaps if "logits" not in g.op], plan.gaps
    kinds = {p.witness.op for p in plan.planned}
    assert {"get_paged_mqa_logits_metadata", "einsum"} <= kinds
    assert {"k_grouped_bf16_gemm_tn_contiguous", "k_grouped_fp8_gemm_nt_contiguous"} <= kinds
    batches = [
        p.witness["context_lens"].dims[0] for p in plan.planned if "metadata" in p.witness.op
    ]
    assert len(batches) == 256  # 8192 in steps of 32
    assert {gap.op for gap in plan.gaps} == {"fp8_mqa_logits", "fp8_paged_mqa_logits"}


_OPTIONS = 'recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk", disable_ue8m0_cast=False'
_GROUPED = "a, b, d, grouped_layout, {}use_psum_layout=False, ensure_zero_padding=True"
FORMS = {
    **{f"fp8_gemm_{form}": f"a, b, d, c=None, {_OPTIONS}" for form in ("nn", "tn", "tt")},
    **{f"bf16_gemm_{form}": "a, b, d, c=None, compiled_dims=''" for form in ("nn", "tn", "tt")},
    "m_grouped_fp8_fp4_gemm_nn_contiguous": _GROUPED.format(f"{_OPTIONS}, "),
    "m_grouped_bf16_gemm_nn_contiguous": _GROUPED.format("compiled_dims='nk', "),
    "m_grouped_bf16_gemm_nt_masked": "a, b, d, masked_m, expected_m, compiled_dims='nk'",
    "fp8_gemm_nt_skip_head_mid": f"a, b, d, head_splits, {_OPTIONS}",
}
"""DeepGEMM's parameters at 54e2261."""


def test_transposed_masked_and_gapped_gemms_are_seen_and_break_no_graph(
    deep_gemm, seen, monkeypatch
):
    entry_of = {name: entry(deep_gemm, name, parameters) for name, parameters in FORMS.items()}
    (w, sf), (g, g_sf) = weight(512, 256), weight(512, 256, groups=4)
    plain, groups = w.bfloat16(), g.bfloat16()

    def forward(x):
        rows = x.shape[0]
        a, a_sf = per_token_cast_to_fp8(x)
        y, d = x.bfloat16(), x.new_zeros(rows, 512, dtype=torch.bfloat16)
        at, bt = (a.t(), a_sf.t()), (w.t(), sf.t())
        entry_of["fp8_gemm_nn"]((a, a_sf), bt, d, disable_ue8m0_cast=True)
        entry_of["fp8_gemm_tn"](at, bt, d)
        entry_of["fp8_gemm_tt"](at, (w, sf), d)
        entry_of["bf16_gemm_nn"](y, plain.t(), d, c=d)
        entry_of["bf16_gemm_tn"](y.t(), plain.t(), d)
        entry_of["bf16_gemm_tt"](y.t(), plain, d, compiled_dims="nk")
        ids = x.new_zeros(rows, dtype=torch.int32)
        pair = g.mT, g_sf.mT
        entry_of["m_grouped_fp8_fp4_gemm_nn_contiguous"]((a, a_sf), pair, d, ids)
        entry_of["m_grouped_bf16_gemm_nn_contiguous"](y, groups.mT, d, ids, use_psum_layout=False)
        counts, out = ids.new_zeros(4), d.new_zeros(4, 64, 512)
        entry_of["m_grouped_bf16_gemm_nt_masked"](
            d.new_zeros(4, 64, 256), groups, out, counts, rows
        )
        wide = x.new_zeros(rows, 640)
        entry_of["fp8_gemm_nt_skip_head_mid"]((a, a_sf), (w, sf), wide, (128, 64, 128))
        return d

    torch.compile(forward, backend=seen, fullgraph=True)(torch.randn(6, 256))
    # tn and tt have a kernel for each M
    shapes = fxwarm.trace(forward, torch.randn(6, 256), max_size=64)
    assert not shapes.gaps, shapes.gaps
    names = [name.replace("fp8_fp4", "fp8") for name in FORMS]
    assert ops(seen) == [f"fxwarm.{name}" for name in names]
    assert [call.op for call in shapes.calls] == names
    calls = dict(zip(names, shapes.calls, strict=True))
    assert all(c.symbols[0].upper == 64 for c in shapes.calls)
    assert calls["bf16_gemm_nn"]["c"] == calls["bf16_gemm_nn"]["d"]
    assert calls["fp8_gemm_nt_skip_head_mid"].attr("head_splits") == (128, 64, 128)
    assert calls["fp8_gemm_tn"]["a_sf"].dims[1] == calls["fp8_gemm_tn"]["d"].dims[0]
    monkeypatch.delitem(sys.modules, "deep_gemm")
    library = {"tokenspeed-deepgemm": "2.5.0.post20260629"}
    plan = fxwarm.plan(shapes, target=fxwarm.Target.named("h200"), libraries=library)
    without_model = {"fp8_gemm_nt_skip_head_mid"}  # only the library itself knows its kernels
    assert {gap.op for gap in plan.gaps} == without_model
    same = {"fp8_gemm_tt"}  # what it stores as tn does makes tn's kernels
    assert {p.witness.op for p in plan.planned} == {*names} - without_model - same


def test_what_a_step_brings_is_no_weight_although_it_is_an_input(deep_gemm, tile_kernels):
    metadata = entry(
        deep_gemm, "get_paged_mqa_logits_metadata", "context_lens, block_kv, num_sms, indices=None"
    )
    lens = torch.zeros(6, 1, dtype=torch.int32, device="meta")
    (call,) = fxwarm.trace(lambda lens: metadata(lens, 64, 132), lens).calls
    assert (call["context_lens"].dims[0].lower, call["context_lens"].dims[0].upper) == (1, 8192)
    x, residual, post, comb = (
        torch.zeros(6, 3, *rest, device="meta") for rest in ((64,), (4, 64), (4, 1), (4, 4))
    )
    args = x.bfloat16(), residual.bfloat16(), post, comb
    with torch.no_grad():
        (call,) = fxwarm.trace(lambda *a: tile_kernels.mhc_post(*a), *args).calls
    assert call["residual"].dims[0].upper == 8192


def test_entry_points_without_an_op_are_gaps_and_never_vanish(deep_gemm):
    names = {
        "fp8_fp4_mqa_logits": "q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, logits_dtype=None",
        "fp8_fp4_mega_moe": "y, l1_weights, l2_weights, sym_buffer",
        "transform_sf_into_required_layout": "sf, mn, k, recipe",
    }
    first, second, third = (entry(deep_gemm, n, p) for n, p in names.items())
    host = entry(deep_gemm, "get_symm_buffer_for_mega_moe", "group")

    def forward(x):
        first((x, x), (x, x), x, x, x)
        second(x, x, x, x)
        third(x, 4, 4, (1, 128, 128))
        host(x)
        return x + 1

    shapes = fxwarm.trace(forward, torch.randn(6, 8))
    assert [gap.op for gap in shapes.gaps] == [f"deep_gemm.{name}" for name in names]


@pytest.fixture
def flashinfer(monkeypatch, fresh):
    module = types.ModuleType("flashinfer")
    fused = types.ModuleType("flashinfer.fused_moe")

    def cutlass_fused_moe(
        input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype,
        quant_scales, output=None, tune_max_num_tokens=8192,
    ):  # fmt: skip
        raise AssertionError("the library was called")

    def trtllm_fp8_block_scale_moe(
        routing_logits, routing_bias, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale,
        gemm2_weights, gemm2_weights_scale, num_experts, top_k, n_group, topk_group, intermediate_size,
        local_expert_offset, local_num_experts, routed_scaling_factor, routing_method_type=0,
        use_shuffled_weight=False, weight_layout=0, do_finalize=True, enable_pdl=None, tune_max_num_tokens=8192,
        fp8_quantization_type=1, activation_type=3, norm_topk_prob=True, output=None,
    ):  # fmt: skip
        return hidden_states

    def trtllm_bf16_moe(hidden_states):
        return hidden_states

    fused.trtllm_fp8_block_scale_moe = trtllm_fp8_block_scale_moe
    fused.trtllm_bf16_moe = trtllm_bf16_moe
    fused.cutlass_fused_moe = cutlass_fused_moe
    module.fused_moe = fused
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", fused)
    substitute.install()
    return fused


@pytest.mark.parametrize("given", [False, True])
def test_a_moe_layer_of_flashinfer_returns_its_list_or_fills_its_output(given, flashinfer, seen):
    def forward(x, ids, scales, w13, w2):
        if given:
            out = torch.empty_like(x)
            flashinfer.cutlass_fused_moe(x, ids, scales, w13, w2, x.dtype, None, output=out)
            return out
        return flashinfer.cutlass_fused_moe(x, ids, scales, w13, w2, x.dtype, quant_scales=[])[0]

    x = torch.randn(5, 16, dtype=torch.bfloat16)
    ids, scales = torch.randint(0, 4, (5, 2)).int(), torch.rand(5, 2)
    w13, w2 = torch.randn(4, 16, 16).bfloat16(), torch.randn(4, 16, 8).bfloat16()
    expected = torch.ops.fxwarm.cutlass_fused_moe(x, ids, scales, w13, w2, x.dtype, [])
    out = torch.compile(forward, backend=seen, fullgraph=True)(x, ids, scales, w13, w2)
    assert ops(seen) == ["fxwarm.cutlass_fused_moe"]
    assert torch.equal(out, expected)


class Method(enum.IntEnum):
    DEEP_SEEK = 2


def test_a_moe_layer_for_sm100_becomes_an_op_or_a_gap(flashinfer):
    weights = f8(4, 512, 256), torch.ones(4, 4, 2), f8(4, 256, 256), torch.ones(4, 2, 2)
    w13, sf13, w2, sf2 = (w.to("meta") for w in weights)

    def forward(x, **options):
        rows = x.shape[0]
        out = flashinfer.trtllm_fp8_block_scale_moe(
            x.new_zeros(rows, 4), None, x.to(torch.float8_e4m3fn), x.new_ones(2, rows), w13, sf13, w2, sf2,
            4, 2, None, None, 256, 0, 4, 2.5, routing_method_type=Method.DEEP_SEEK, **options,
        )  # fmt: skip
        return flashinfer.trtllm_bf16_moe(x), out

    shapes = fxwarm.trace(forward, torch.randn(6, 256, device="meta"))
    (call,) = shapes.calls
    assert (call.family, call.op) == ("flashinfer", "trtllm_fp8_block_scale_moe")
    assert call.attr("routing_method_type") == 2
    assert [gap.op for gap in shapes.gaps] == ["flashinfer.trtllm_bf16_moe"]
    # with unfinalized outputs it is another function, which an op cannot stand for
    shapes = fxwarm.trace(
        lambda x: forward(x, do_finalize=False), torch.randn(6, 256, device="meta")
    )
    assert not shapes.calls
    assert "do_finalize" in shapes.gaps[0].reason


@pytest.fixture
def tile_kernels(fresh):
    pytest.importorskip("tilelang")
    if importlib.util.find_spec("tile_kernels") is None:
        pytest.skip("TileKernels is not installed")
    get_factory(
        "tile_kernels.modeling.mhc.ops:mhc_post"
    )  # without the package's own start, which needs a GPU
    substitute.install()
    return sys.modules["tile_kernels.modeling.mhc.ops"]


def mhc_layer(big_fuse, post):
    """Return a layer as TileKernels' users write it, around a sublayer that does nothing."""

    def forward(x, fn, scale, base):
        mix, comb, inner = big_fuse(
            x, fn, scale, base, rms_eps=1e-6, mhc_pre_eps=1e-6, mhc_sinkhorn_eps=1e-6, mhc_post_mult_value=2.0,
            sinkhorn_repeat=20,
        )  # fmt: skip
        return post(inner, x, mix, comb)

    return forward


def mhc_inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, 4, 64, generator=generator).bfloat16()
    return (
        x,
        torch.randn(24, 256, generator=generator) * 0.1,
        torch.randn(3, generator=generator),
        torch.randn(24, generator=generator),
    )


def test_the_mhc_functions_of_tile_kernels_become_nodes_with_the_same_numbers(tile_kernels, seen):
    early = tile_kernels.mhc_pre_big_fuse  # as `from tile_kernels.modeling.mhc.ops import ...` does
    forward = mhc_layer(early, lambda *args: sys.modules[tile_kernels.__name__].mhc_post(*args))
    x, fn, scale, base = mhc_inputs()
    post, comb, inner = mhc_pre_reference(
        x[0], fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 20, dtype=torch.float32
    )
    expected = mhc_post_reference(inner.bfloat16(), x[0], post, comb, torch.float32).bfloat16()
    with torch.no_grad():
        out = torch.compile(forward, backend=seen, fullgraph=True)(x, fn, scale, base)
    assert ops(seen) == ["fxwarm.mhc_pre_big_fuse", "fxwarm.mhc_post_fwd"]
    assert torch.equal(out[0], expected)


def test_the_mhc_layer_of_tile_kernels_itself_is_seen_through(tile_kernels, seen):
    functional = importlib.import_module("tile_kernels.modeling.mhc.functional")
    x, fn, scale, base = mhc_inputs()
    with torch.no_grad():
        torch.compile(functional.mhc_pre, backend=seen, fullgraph=True)(x, fn, scale, base)
        torch.compile(functional.mhc_head, backend=seen, fullgraph=True)(
            x, fn[:4], scale[:1], base[:4]
        )
    assert ops(seen) == [
        f"fxwarm.{n}"
        for n in (
            "mhc_pre_big_fuse",
            "mhc_pre_norm_fn",
            "mhc_head_compute_mix",
            "mhc_pre_apply_mix",
        )
    ]


def test_a_call_whose_gradient_is_asked_for_stays_the_librarys(tile_kernels, seen, monkeypatch):
    calls = []
    monkeypatch.setattr(  # where the library's own function arrives without a GPU
        sys.modules["tile_kernels.modeling.mhc.ops.post"], "mhc_post_fwd",
        lambda x, residual, *rest: calls.append("mhc_post") or residual * 2,
    )  # fmt: skip
    x = mhc_inputs()[0].requires_grad_()
    args = x[:, :, 0], x, torch.randn(1, 6, 4, 1), torch.randn(1, 6, 4, 4)
    substitute.take_refusals()
    torch.compile(lambda *a: tile_kernels.mhc_post(*a) + 1, backend=seen)(*args)
    assert calls
    assert ops(seen) == []
    assert "its gradient is the library's own" in substitute.take_refusals()[0].reason


def test_another_backend_sees_tile_kernels_original(tile_kernels, seen, monkeypatch):
    calls = []
    monkeypatch.setattr(
        sys.modules["tile_kernels.modeling.mhc.ops.post"], "mhc_post_fwd",
        lambda x, residual, *rest: calls.append("mhc_post") or residual * 2,
    )  # fmt: skip
    x = mhc_inputs()[0]
    args = x[:, :, 0].contiguous(), x, torch.randn(1, 6, 4, 1), torch.randn(1, 6, 4, 4)

    def forward(*a):
        return tile_kernels.mhc_post(*a) + 1

    with torch.no_grad():
        torch.compile(forward, backend=seen)(*args)
        assert not calls
        for backend in ("eager", "inductor"):
            torch.compile(forward, backend=backend)(*args)
    assert calls
    assert ops(seen) == ["fxwarm.mhc_post_fwd"]


def test_the_file_that_holds_torchs_private_api_is_one():
    folder = Path(substitute.__file__).parent
    users = [
        p.name for p in folder.glob("*.py") if "torch._dynamo" in p.read_text().split('"""', 2)[2]
    ]
    assert users == ["dynamo.py"]
