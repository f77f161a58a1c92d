"""Whatever host makes a DeepGEMM call, it is the same record."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from torch.library import Library as Registry

from fxwarm import exc
from fxwarm.families.deep_gemm import inputs
from fxwarm.families.deep_gemm.buffers import Buffers, Call
from fxwarm.families.deep_gemm.entries import OF_DTYPE, invoke
from fxwarm.families.deep_gemm.match import match
from fxwarm.families.deep_gemm.shapes import check, unify
from fxwarm.families.deep_gemm.sweep import make_sweep
from passes.calls import SymTensor
from passes.flatten import OpCall
from passes.records import Dim, Gap, KernelCall, Symbol, TensorSpec

M, N, K, G = 64, 2112, 7168, 64
FP8, F32, BF16, I32 = "float8_e4m3fn", "float32", "bfloat16", "int32"
A, A_SF = SymTensor(FP8, (M, K)), SymTensor(F32, (M, K // 128))
B, B_SF = SymTensor(FP8, (N, K)), SymTensor(F32, (17, K // 128))
D = SymTensor(BF16, (M, N))
QUIET = {"c": None, "recipe": None, "compiled_dims": None, "disable_ue8m0_cast": False}
PLAIN = {"a": A, "a_sf": A_SF, "b": B, "b_sf": B_SF, "d": D}


def one(namespace: str, name: str, **arguments):
    (found,) = match(OpCall(namespace, name, arguments))
    return found


@pytest.mark.parametrize(
    ("namespace", "name", "arguments"),
    [
        ("fxwarm", "fp8_gemm_nt", {**PLAIN, **QUIET}),
        ("deep_gemm", "fp8_fp4_gemm_nt", {**PLAIN, **QUIET, "recipe_a": None, "recipe_b": None}),
        (
            "_deep_gemm_cuda_5f3ab01",
            "fp8_fp4_gemm_nt",
            {"a_data": A, "a_sf": A_SF, "b_data": B, "b_sf": B_SF, "d": D, "c": None}
            | {f"recipe_{i}": 0 for i in range(3)},
        ),
        (
            "vllm",
            "fp8_gemm_nt_op",
            {"q_input": A, "input_scale": A_SF, "weight": B, "weight_scale": B_SF, "output": D}
            | {"use_deep_gemm_e8m0": True},
        ),
        ("sglang", "deep_gemm_fp8_fp8_bf16_nt", {"A": A, "As": A_SF, "B": B, "Bs": B_SF, "C": D}),
    ],
)
def test_every_host_gives_one_form(namespace, name, arguments):
    assert one(namespace, name, **arguments) == one("any", "fp8_gemm_nt", **PLAIN)


def test_what_enters_a_key_is_kept():
    found = one("deep_gemm", "fp8_gemm_nt", **PLAIN, compiled_dims="", recipe=[1, 128, 128])
    assert found.attr("compiled_dims") == ""
    assert found.attr("recipe") == (1, 128, 128)
    assert one("d", "fp8_gemm_nt", **PLAIN).attrs == ()
    hub = one("hub", "fp8_gemm_nt", **PLAIN, recipe_0=1, recipe_1=128, recipe_2=128)
    assert hub.attr("recipe") == (1, 128, 128)


def test_grouped_masked_and_prenorm():
    w, w_sf = SymTensor(FP8, (G, N, K)), SymTensor(F32, (G, 17, K // 128))
    ids = SymTensor(I32, (M,))
    grouped = {"a": A, "a_sf": A_SF, "b": w, "b_sf": w_sf, "d": D, "grouped_layout": ids}
    found = one("x", "m_grouped_fp8_fp4_gemm_nt_contiguous", **grouped, use_psum_layout=True)
    assert (found.op, found.attr("use_psum_layout")) == ("m_grouped_fp8_gemm_nt_contiguous", True)
    old = {n: t for n, t in grouped.items() if n != "grouped_layout"}
    assert one("x", "m_grouped_fp8_gemm_nt_contiguous", **old, m_indices=ids) == one(
        "x", "m_grouped_fp8_gemm_nt_contiguous", **grouped
    )
    masked = {
        "a": SymTensor(FP8, (G, M, K)), "a_sf": SymTensor(F32, (G, M, K // 128)), "b": w,
        "b_sf": w_sf, "d": SymTensor(BF16, (G, M, N)), "masked_m": SymTensor(I32, (G,)),
    }  # fmt: skip
    found = one("x", "fp8_m_grouped_gemm_nt_masked", **masked, expected_m=7)
    assert (found.op, found.attr("expected_m")) == ("m_grouped_fp8_gemm_nt_masked", 7)
    found = one(
        "x", "tf32_hc_prenorm_gemm", a=SymTensor(BF16, (M, K)), b=SymTensor(F32, (24, K)),
        d=SymTensor(F32, (3, M, 24)), sqr_sum=SymTensor(F32, (3, M)), num_splits=3,
    )  # fmt: skip
    assert found.attr("num_splits") == 3


def test_scales_of_other_groups_are_refused_with_both_shapes():
    w, w_sf = SymTensor(FP8, (256, 4096, 7168)), SymTensor(F32, (64, 32, 56))
    with pytest.raises(exc.ShapeMismatchError) as error:
        one(
            "x", "m_grouped_fp8_gemm_nt_contiguous", a=SymTensor(FP8, (128, 7168)),
            a_sf=SymTensor(F32, (128, 56)), b=w, b_sf=w_sf, d=SymTensor(BF16, (128, 4096)),
            grouped_layout=SymTensor(I32, (128,)),
        )  # fmt: skip
    assert "[256, 4096, 7168]" in str(error.value)
    assert "[64, 32, 56]" in str(error.value)
    assert "256 against 64" in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": SymTensor(FP8, (M, 4096))}, "K is 4096 against 7168"),
        ({"d": SymTensor(BF16, (M, 2048))}, "N is 2112 against 2048"),
        ({"b_sf": SymTensor(F32, (16, 56))}, "N / 128 needs 17, not 16"),
        ({"b_sf": SymTensor(F32, (17, 55))}, "K / 128 needs 56, not 55"),
    ],
)
def test_contradicting_shapes_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        one("x", "fp8_gemm_nt", **{**PLAIN, **change})


def test_ops_of_others_are_left_alone():
    x = SymTensor(BF16, (M, K))
    assert match(OpCall("aten", "einsum", {"equation": "ij,jk", "tensors": (x, x)})) == ()
    assert match(OpCall("mine", "fp8_gemm_nt", {"x": x, "y": x})) == ()
    assert match(OpCall("aten", "mm", {"self": x, "mat2": x})) == ()


@pytest.mark.parametrize(
    "name", ["fp8_fp4_mega_moe", "fp8_fp4_paged_mqa_logits", "deepgemm_mxfp8_bmm"]
)
def test_entry_points_that_are_not_covered_are_gaps(name):
    gap = one("deep_gemm", name, x=A)
    assert isinstance(gap, Gap)
    assert gap.reason


def test_the_hopper_default_of_vllm_starts_at_32_rows():
    x = SymTensor(BF16, (M, K))
    found = one("vllm", "dynamic_flashinfer_deepgemm_blockscale_gemm", x=x, w=B, w_scale=B_SF,
                group=128, e8m0=False)  # fmt: skip
    assert found.op == "fp8_gemm_nt"
    assert found["a"].dtype == FP8
    assert found["a_sf"].strides == ("1", str(M))
    small = SymTensor(BF16, (16, K))
    arguments = {"x": small, "w": B, "w_scale": B_SF, "group": 128, "e8m0": False}
    assert match(OpCall("vllm", "dynamic_flashinfer_deepgemm_blockscale_gemm", arguments)) == ()


def test_a_traced_graph_gives_m_as_a_range():
    from passes.collect import collect

    registry = Registry("deep_gemm_hub_0a1b2c3", "DEF")
    registry.define(
        "fp8_fp4_gemm_nt(Tensor a, Tensor a_sf, Tensor b, Tensor b_sf, Tensor(a!) d, Tensor? c=None, "
        "int[]? recipe=None, str compiled_dims='', bool disable_ue8m0_cast=False) -> ()"
    )
    seen = []

    def backend(gm, inputs):
        seen.append(collect(gm, inputs, [match]))
        return gm.forward

    def model(a, a_sf, b, b_sf):
        d = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
        torch.ops.deep_gemm_hub_0a1b2c3.fp8_fp4_gemm_nt(a, a_sf, b, b_sf, d)
        return d

    tensors = [torch.zeros(n, 256 // k) for n, k in ((48, 1), (48, 128), (128, 1), (1, 128))]
    a, a_sf, b, b_sf = tensors
    arguments = (a.to(torch.float8_e4m3fn), a_sf, b.to(torch.float8_e4m3fn), b_sf)
    for tensor in arguments[:2]:  # two inputs: torch gives them two sizes
        torch._dynamo.mark_dynamic(tensor, 0, min=1, max=1000)
    registry.impl("fp8_fp4_gemm_nt", lambda *a, **k: None, "CPU")
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*arguments)
    (call,) = getattr(seen[0], "shapes", seen[0]).calls
    assert call.op == "fp8_gemm_nt"
    assert call.attr("compiled_dims") == ""
    m = call["a"].dims[0]
    assert not m.is_static
    assert (m.lower, m.upper) == (1, 1000)
    assert call["a_sf"].dims[0] == m
    assert len(call.symbols) == 1
    registry._destroy()


def test_values_and_scales_that_are_two_inputs_have_one_size():
    import sympy

    s0, s1, s2, s3 = sympy.symbols("s0 s1 s2 s3", integer=True, positive=True)
    tensors = {
        "a": SymTensor(FP8, (s0, s2)),
        "a_sf": SymTensor(F32, (s1, s3), (1, s1)),
        "b": B,
        "b_sf": B_SF,
        "d": SymTensor(BF16, (s0, N)),
    }
    same = unify("fp8_gemm_nt", tensors, {})
    assert same["a"].shape == (s0, K)  # K is the weight's
    assert same["a_sf"].shape == (s0, K // 128)
    assert same["a_sf"].strides == (1, s0)
    split = unify(
        "tf32_hc_prenorm_gemm",
        {
            "a": SymTensor(BF16, (s0, K)), "b": SymTensor(F32, (24, K)),
            "d": SymTensor(F32, (s1, s2, 24)), "sqr_sum": SymTensor(F32, (s1, s3)),
        },
        {"num_splits": 4},
    )  # fmt: skip
    assert split["d"].shape == (4, s0, 24)
    assert split["sqr_sum"].shape == (4, s0)
    heads = unify(
        "fp8_einsum",
        {
            "a": SymTensor(FP8, (s0, 8, 4096)), "a_sf": SymTensor(F32, (s1, s2, 32)),
            "b": SymTensor(FP8, (8, 1024, 4096)), "b_sf": SymTensor(F32, (8, 8, 32)),
            "d": SymTensor(BF16, (s3, 8, 1024)),
        },
        {"expr": "bhr,hdr->bhd"},
    )  # fmt: skip
    assert heads["a_sf"].shape == (s0, 8, 32)
    assert heads["d"].shape == (s0, 8, 1024)
    logits = unify(
        "fp8_paged_mqa_logits",
        {
            "q": SymTensor(FP8, (s0, 2, 64, 128)), "kv_cache": SymTensor("uint8", (s1, 64, 1, 132)),
            "weights": SymTensor(F32, (s2, 64)), "context_lens": SymTensor("int32", (s3,)),
            "block_table": SymTensor("int32", (s3, 16)),
        },
        {},
    )  # fmt: skip
    assert logits["weights"].shape == (2 * s0, 64)
    assert logits["context_lens"].shape == logits["block_table"].shape[:1] == (s0,)


def test_c_that_is_d_stays_equal_to_it():
    import sympy

    s0, s1, s2, s3 = sympy.symbols("s0 s1 s2 s3", integer=True, positive=True)
    d = SymTensor(F32, (s2, s3), (s3 + 8, 1))
    same = unify(
        "einsum",
        {"a": SymTensor(BF16, (s0, 128, s1)), "b": SymTensor(BF16, (s0, 256, s1)), "d": d, "c": d},
        {"expr": "bmk,bnk->mn"},
    )
    assert same["d"] == same["c"] == SymTensor(F32, (128, 256), (264, 1))


def test_a_float32_sum_without_c_contradicts_itself():
    shapes = {"a": (5, 128, 64), "b": (5, 64, 64), "d": (128, 64)}
    attrs, dtypes = {"expr": "bmk, bnk -> mn"}, {"d": "float32"}
    with pytest.raises(exc.ShapeMismatchError, match="without c the library crashes"):
        check("einsum", shapes, dtypes, attrs)
    check("einsum", {**shapes, "c": (128, 64)}, dtypes, attrs)
    check("einsum", shapes, {"d": "bfloat16"}, attrs)


LOGITS = {
    "q": SymTensor(FP8, (M, 32, 64)), "kv": SymTensor(FP8, (256, 64)), "kv_sf": SymTensor(F32, (256,)),
    "weights": SymTensor(F32, (M, 32)), "cu_seq_len_k_start": SymTensor(I32, (M,)),
    "cu_seq_len_k_end": SymTensor(I32, (M,)),
}  # fmt: skip
PAGED = {
    "q": SymTensor(FP8, (M, 1, 32, 64)), "kv_cache": SymTensor("uint8", (8, 64, 1, 68)),
    "weights": SymTensor(F32, (M, 32)), "context_lens": SymTensor(I32, (M, 1)),
    "block_table": SymTensor(I32, (M, 4)), "schedule_meta": SymTensor(I32, (133, 2)),
    "max_context_len": 256,
}  # fmt: skip


class Recording:
    """A library that keeps what its functions are called with."""

    def __init__(self, *names: str) -> None:
        self.calls: list[tuple] = []
        for name in names:
            setattr(self, name, lambda *a, __name=name, **k: self.calls.append((__name, a, k)))


def asked(call: KernelCall, library: Recording) -> None:
    """Make a call as the recorder's child does, its request through JSON, and as a load does."""
    request = json.loads(json.dumps(make_sweep(call).request()))
    child = Call(request, torch)
    child.allocate(Buffers(torch, "cpu", child.operand_bytes))
    invoke(library, child.op, child.values(0))
    stored = msgspec.json.decode(msgspec.json.encode(call), type=KernelCall)
    assert stored == call
    invoke(library, stored.op, inputs.arguments(stored, torch.device("cpu")))


@pytest.mark.parametrize(
    ("op", "tensors"), [("fp8_mqa_logits", LOGITS), ("fp8_paged_mqa_logits", PAGED)]
)
def test_the_dtype_of_logits_reaches_the_function_that_is_told_one(op, tensors):
    plain = one("fxwarm", op, **tensors, clean_logits=False)
    assert one("fxwarm", op, **tensors, clean_logits=False, logits_dtype="float32") == plain
    call = one("fxwarm", op, **tensors, clean_logits=False, logits_dtype="bfloat16")
    assert call != plain
    both = Recording(op, OF_DTYPE[op])
    asked(call, both)
    asked(plain, both)
    names = [name for name, _, _ in both.calls]
    assert names == [OF_DTYPE[op]] * 2 + [op] * 2
    for _, args, options in both.calls[:2]:
        assert args[0][0].shape == tensors["q"].shape
        assert args[0][1] is None
        assert options == {"clean_logits": False, "logits_dtype": torch.bfloat16}
    for _, args, options in both.calls[2:]:
        assert args[0].shape == tensors["q"].shape
        assert options == {"clean_logits": False}
    with pytest.raises(AttributeError, match=f"has no {OF_DTYPE[op]}; this build writes float32"):
        asked(call, Recording(op))
    with pytest.raises(exc.ShapeMismatchError, match="writes float32 or bfloat16"):
        one("fxwarm", op, **tensors, logits_dtype="float16")


def test_head_splits_reach_the_library_as_a_tuple():
    heads = {"b": SymTensor(FP8, (512, K)), "b_sf": SymTensor(F32, (4, K // 128))}
    wide = {**PLAIN, **heads, "d": SymTensor(BF16, (M, 640)), "head_splits": (128, 64, 128)}
    call = one("fxwarm", "fp8_gemm_nt_skip_head_mid", **wide, recipe=None, compiled_dims="mn")
    library = Recording("fp8_gemm_nt_skip_head_mid")
    asked(call, library)
    for _, (a, b, d, splits), options in library.calls:
        assert (a[0].shape, b[0].shape, d.shape) == ((M, K), (512, K), (M, 640))
        assert splits == (128, 64, 128)
        assert options == {"compiled_dims": "mn"}
    assert len(library.calls) == 2


@pytest.mark.parametrize("form", ["nn", "tn", "tt"])
def test_operands_of_a_form_keep_their_strides_up_to_the_library(form):
    def stored(dtype: str, size: tuple[int, int], flip: bool) -> SymTensor:
        first, second = size
        return SymTensor(dtype, (second, first), (1, second)) if flip else SymTensor(dtype, size)

    flip_a, flip_b = form[0] == "t", form[1] == "n"
    tensors = {
        "a": stored(FP8, (M, K), flip_a), "a_sf": stored(F32, (M, K // 128), flip_a),
        "b": stored(FP8, (N, K), flip_b), "b_sf": stored(F32, (17, K // 128), flip_b), "d": D,
    }  # fmt: skip
    library = Recording(f"fp8_fp4_gemm_{form}")
    asked(one("fxwarm", f"fp8_gemm_{form}", **tensors, **QUIET), library)
    for _, ((a, _), (b, _), _), options in library.calls:
        assert (a.shape, a.stride()) == (((K, M), (1, K)) if flip_a else ((M, K), (K, 1)))
        assert (b.shape, b.stride()) == (((K, N), (1, K)) if flip_b else ((N, K), (K, 1)))
        assert options == {}
    assert len(library.calls) == 2


def test_logits_of_any_size_are_asked_once():
    def tensor(dtype: str, *dims: Dim) -> TensorSpec:
        return TensorSpec(dtype, dims)

    rows, keys = Dim("s0", 2, 8192), Dim("s1", 2, 1 << 20)
    heads, dim = Dim.static(32), Dim.static(64)
    call = KernelCall(
        "deep_gemm",
        "fp8_mqa_logits",
        (
            ("q", tensor(FP8, rows, heads, dim)), ("kv", tensor(FP8, keys, dim)), ("kv_sf", tensor(F32, keys)),
            ("weights", tensor(F32, rows, heads)), ("cu_seq_len_k_start", tensor("int32", rows)),
            ("cu_seq_len_k_end", tensor("int32", rows)),
        ),
        symbols=(Symbol("s0", 2, 8192), Symbol("s1", 2, 1 << 20)),
    )  # fmt: skip
    made = make_sweep(call)
    assert len(made.points) == 1
    assert made.witness(0)["kv"].dims[0].expr == "2"
