"""How an op finds its library on CUDA and which arguments it passes. The library is a stand-in: no GPU here."""

from __future__ import annotations

import enum
import sys
import types

import pytest
import torch

from fxwarm import ops
from fxwarm.exc import LibraryError
from fxwarm.ops import _library, deep_gemm, flashinfer, gemm_forms, mqa_logits

x = torch.ones(2, 2)


@pytest.fixture
def installed(monkeypatch):
    """Make a module of functions be the installed library, and forget it afterwards."""

    def install(name: str, **functions: object) -> None:
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setattr(_library, "_chosen", {})
        ops.use_library(name, module)

    yield install
    monkeypatch.undo()
    for function in _library._functions:
        function.forget()


def recorder(*names: str):
    """Return a list and a function that puts its arguments there and accepts ``names`` as keywords."""
    calls: list = []
    exec(
        f"def f(*args, {', '.join(n + '=0' for n in names)}): calls.append((args, "
        "{k: v for k, v in locals().items() if k != 'args' and v != 0}))",
        scope := {"calls": calls},
    )
    return calls, scope["f"]


def test_pairs_are_put_together_and_defaults_are_left_to_the_library(installed):
    calls, function = recorder("c", "recipe", "compiled_dims", "disable_ue8m0_cast")
    installed("deep_gemm", fp8_gemm_nt=function)
    deep_gemm._call_fp8_gemm_nt(x, x, x, x, x)
    deep_gemm._call_fp8_gemm_nt(x, x, x, x, x, None, [1, 1, 128], "nk", True)
    assert calls[0] == (((x, x), (x, x), x), {})
    assert calls[1][1] == {"recipe": (1, 1, 128), "compiled_dims": "nk", "disable_ue8m0_cast": True}


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (
            lambda: deep_gemm._call_fp8_masked(x, x, x, x, x, x, 4),
            ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked",
             "m_grouped_fp8_fp4_gemm_nt_masked"),
        ),
        (
            lambda: deep_gemm._call_fp8_contiguous(x, x, x, x, x, x),
            ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
        ),
        (lambda: deep_gemm._call_fp8_gemm_nt(x, x, x, x, x), ("fp8_gemm_nt", "fp8_fp4_gemm_nt")),
    ],
)  # fmt: skip
def test_every_name_that_a_build_exports_will_do(installed, call, names):
    for name in names:
        calls, function = recorder("recipe")
        installed("deep_gemm", **{name: function})
        call()
        assert len(calls) == 1
    installed("deep_gemm")
    with pytest.raises(LibraryError, match=f"has no {' or '.join(names)}"):
        call()


FORMS = {
    "fp8_gemm_nn": ("fp8_fp4_gemm_nn", (x, x, x, x, x), ((x, x), (x, x), x)),
    "bf16_gemm_tt": ("", (x, x, x), (x, x, x)),
    "m_grouped_fp8_gemm_nn_contiguous": (
        "m_grouped_fp8_fp4_gemm_nn_contiguous", (x, x, x, x, x, x), ((x, x), (x, x), x, x),
    ),
    "m_grouped_bf16_gemm_nt_masked": (
        "bf16_m_grouped_gemm_nt_masked", (x, x, x, x, 7), (x, x, x, x, 7),
    ),
    "fp8_gemm_nt_skip_head_mid": ("", (x, x, x, x, x, [1, 2, 3]), ((x, x), (x, x), x, (1, 2, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_what_is_defined_from_a_schema_is_called_as_the_library_has_it(installed, name):
    other, given, wanted = FORMS[name]
    schema = str(getattr(torch.ops.fxwarm, name).default._schema).removeprefix("fxwarm::")
    call = gemm_forms._call_by_schema(
        _library.Function("deep_gemm", *filter(None, (name, other))), schema
    )
    more = {"compiled_dims": "mn"} | ({"recipe": [1, 1, 128]} if "fp8" in name else {})
    for spelling in filter(None, (name, other)):
        calls, function = recorder("recipe", "compiled_dims")
        installed("deep_gemm", **{spelling: function})
        call(*given)
        call(*given, **more)
        assert calls[0] == (wanted, {})
        assert calls[1] == (
            wanted,
            {n: (1, 1, 128) if n == "recipe" else v for n, v in more.items()},
        )


def test_an_argument_that_an_old_build_lacks_is_named(installed):
    calls, function = recorder("recipe", "compiled_dims", "disable_ue8m0_cast")
    installed("deep_gemm", m_grouped_fp8_gemm_nt_contiguous=function)
    deep_gemm._call_fp8_contiguous(x, x, x, x, x, x)
    assert len(calls) == 1
    with pytest.raises(LibraryError, match="has no use_psum_layout in m_grouped_fp8_gemm_nt_cont"):
        deep_gemm._call_fp8_contiguous(x, x, x, x, x, x, use_psum_layout=True)


def test_logits_of_another_dtype_come_from_the_function_that_is_told_one(installed):
    plain, either = torch.zeros(2, 512)[:, :2], []
    full = {"clean_logits": True, "max_seqlen_k": 0, "logits_dtype": torch.float32}

    def fp8_fp4_mqa_logits(q, kv, weights, start, end, **options):
        either.append((q, kv, {**full, **options}))
        return torch.zeros(2, 512, dtype=torch.bfloat16)[:, :2]

    def fp8_fp4_paged_mqa_logits(q, cache, weights, lens, table, meta, most, **options):
        either.append((q, most, options))
        return torch.zeros(2, 512, dtype=torch.bfloat16)[:, :most]

    installed("deep_gemm", fp8_mqa_logits=lambda *args, **options: plain)
    for dtype in (None, torch.float32):
        assert mqa_logits._mqa_cuda(x, x, x, x, x, x, logits_dtype=dtype) is plain
    with pytest.raises(LibraryError, match="has no fp8_fp4_mqa_logits"):
        mqa_logits._mqa_cuda(x, x, x, x, x, x, logits_dtype=torch.bfloat16)
    with pytest.raises(LibraryError, match="has no fp8_fp4_paged_mqa_logits"):
        mqa_logits._paged_cuda(x, x, x, x, x, x, 2, logits_dtype=torch.bfloat16)
    installed(
        "deep_gemm",
        fp8_fp4_mqa_logits=fp8_fp4_mqa_logits,
        fp8_fp4_paged_mqa_logits=fp8_fp4_paged_mqa_logits,
    )
    out = mqa_logits._mqa_cuda(x, x, x, x, x, x, False, logits_dtype=torch.bfloat16)
    assert (out.dtype, out.stride()) == (torch.bfloat16, (512, 1))
    out = mqa_logits._paged_cuda(x, x, x, x, x, x, 2, logits_dtype=torch.bfloat16)
    assert (out.dtype, out.stride()) == (torch.bfloat16, (512, 1))
    assert either == [
        ((x, None), (x, x), {**full, "clean_logits": False, "logits_dtype": torch.bfloat16}),
        ((x, None), 2, {"logits_dtype": torch.bfloat16}),
    ]


def test_a_pybind_function_says_in_its_docstring_what_it_accepts():
    class Built:
        def __call__(self):
            raise AssertionError

        __signature__ = "none"
        __doc__ = (
            "fp8_gemm_nt(a: tuple[torch.Tensor, torch.Tensor], d: torch.Tensor, "
            "c: torch.Tensor | None = None, recipe: tuple[typing.SupportsInt, typing.SupportsInt] | "
            "None = None, compiled_dims: str = 'nk') -> None"
        )

    assert _library.accepted_names(Built()) == {"a", "d", "c", "recipe", "compiled_dims"}
    assert _library.accepted_names(lambda a, **rest: None) is None
    assert _library.accepted_names(type("Bare", (Built,), {"__doc__": None})()) is None


def test_flashinfer_gets_every_default_that_it_knows(installed):
    class Activation(enum.IntEnum):
        Swiglu = 3

    calls = []

    def cutlass_fused_moe(
        input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights,
        output_dtype, quant_scales, tp_size=7, tune_max_num_tokens=1, activation_type=None,
    ):  # fmt: skip
        calls.append((tp_size, tune_max_num_tokens, activation_type))
        return ["out", 1, 2, 3]

    installed(
        "flashinfer.fused_moe", cutlass_fused_moe=cutlass_fused_moe, ActivationType=Activation
    )
    function = _library.Function("flashinfer.fused_moe", "cutlass_fused_moe")
    schema = str(torch.ops.fxwarm.cutlass_fused_moe.default._schema).removeprefix("fxwarm::")
    call = flashinfer._call_by_name(schema, function, flashinfer._name_activation)
    assert call(x, x, x, x, x, torch.bfloat16, [x]) == "out"
    assert calls == [(1, 8192, Activation.Swiglu)]
    assert isinstance(calls[0][2], Activation)
    with pytest.raises(LibraryError, match="has no use_fused_finalize"):
        call(x, x, x, x, x, torch.bfloat16, [x], use_fused_finalize=False)
    with pytest.raises(LibraryError, match="has no swiglu_limit"):
        call(x, x, x, x, x, torch.bfloat16, [x], swiglu_limit=x)


def test_a_hub_build_that_is_loaded_serves(monkeypatch):
    monkeypatch.setattr(_library, "_MODULES", {"deep_gemm": ("no_such_module_here",)})
    with pytest.raises(LibraryError, match=r"install fxwarm\[deepgemm\]"):
        _library.load_library("deep_gemm")
    module = types.ModuleType("deep_gemm_1f9ca0b")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert _library.load_library("deep_gemm") is module


def test_a_library_that_does_not_import_says_why(monkeypatch, tmp_path):
    (tmp_path / "broken_kernels.py").write_text("assert False, 'CUDA_HOME is not set'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_library, "_MODULES", {"deep_gemm": ("absent.inner", "broken_kernels")})
    with pytest.raises(LibraryError, match="AssertionError: CUDA_HOME is not set"):
        _library.load_library("deep_gemm")


def test_an_unknown_library_is_refused():
    with pytest.raises(LibraryError, match="known are deep_gemm"):
        ops.use_library("deepgemm", types.ModuleType("deepgemm"))


def test_a_sum_over_the_batch_gets_d_as_c_also_where_a_compiler_made_two_of_them(installed):
    calls = []

    def function(expr, a, b, d, *, c, use_cublaslt=False):
        calls.append((d, c))

    installed("deep_gemm", einsum=function)
    d, c = torch.zeros(2, 2), torch.full((2, 2), 3.0)
    deep_gemm._call_einsum("bmk,bnk->mn", x, x, d, c)
    ((given, added),) = calls
    assert given is added is d and torch.equal(d, c)
    with pytest.raises(ValueError, match="pass it as c as well"):
        deep_gemm._call_einsum("bmk,bnk->mn", x, x, d)
