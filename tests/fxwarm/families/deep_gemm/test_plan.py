"""Every entry point with a model is planned from records alone, for any build and device that is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fxwarm
from fxwarm.families.deep_gemm import DeepGemm, entries
from fxwarm.records import Library, Planned, Target
from passes.records import Gap, KernelCall, ShapeSet, Site
from tests.conftest import cases
from tests.fxwarm.families.deep_gemm.samples import (
    BF16,
    F32,
    FP8,
    I32,
    call,
    contiguous,
    dense,
    dim,
    masked,
    prenorm,
    sgl,
    spec,
)

H200, B200 = Target.named("h200"), Target.named("b200")
TOKENSPEED = Library("tokenspeed-deepgemm", "2.5.0.post20260629", settings=(("generation", "A"),))


def plan(calls: list[KernelCall], target: Target = H200, library: Library = TOKENSPEED):
    found = list(DeepGemm().keys(calls, target, library))
    assert all(isinstance(p, Planned) for p in found), found
    return found


def dense_form(form: str, kind: str, upper: int = 64) -> KernelCall:
    n, k = 512, 1024
    a = ("s0", k) if form[0] == "n" else (k, "s0")
    b = (n, k) if form[1] == "t" else (k, n)
    dtype = FP8 if kind == "fp8" else BF16
    tensors = [("a", spec(dtype, *a)), ("b", spec(dtype, *b)), ("d", spec(BF16, "s0", n))]
    if kind == "fp8":
        a_sf = ("s0", 8) if form[0] == "n" else (8, "s0")
        b_sf = (4, 8) if form[1] == "t" else (8, 4)
        tensors[1:1] = [("a_sf", spec(F32, *a_sf))]
        tensors[3:3] = [("b_sf", spec(F32, *b_sf))]
    return call(f"{kind}_gemm_{form}", tensors, upper, {})


def grouped_bf16(op: str) -> KernelCall:
    g, n, k = 4, 512, 1024
    if op.endswith("masked"):
        tensors = (
            ("a", spec(BF16, g, 256, k)), ("b", spec(BF16, g, n, k)), ("d", spec(BF16, g, 256, n)),
            ("masked_m", spec(I32, g)),
        )  # fmt: skip
        return call(op, tensors, 256, {"expected_m": dim("s0", 1, 256)})
    b = (g, n, k) if "_nt_" in op else (g, k, n)
    tensors = (
        ("a", spec(BF16, "128*s0", k, upper=1024)), ("b", spec(BF16, *b)),
        ("d", spec(BF16, "128*s0", n, upper=1024)), ("grouped_layout", spec(I32, "128*s0", upper=1024)),
    )  # fmt: skip
    return call(op, tensors, 8, {})


def k_grouped(op: str) -> KernelCall:
    m, n, ks = 256, 512, (1024, 2048)
    d, c = spec(F32, len(ks), m, n), spec(F32, len(ks), m, n)
    layout = spec(I32, len(ks))
    if "bf16" in op:
        tensors = (
            ("a", spec(BF16, sum(ks), m)), ("b", spec(BF16, sum(ks), n)), ("d", d), ("c", c),
            ("grouped_layout", layout),
        )  # fmt: skip
    else:
        tensors = (
            ("a", spec(FP8, m * sum(ks))), ("a_sf", spec(F32, m, sum(ks) // 128)),
            ("b", spec(FP8, n * sum(ks))), ("b_sf", spec(F32, n, sum(ks) // 128)), ("d", d), ("c", c),
            ("grouped_layout", layout),
        )  # fmt: skip
    return call(op, tensors, None, {"ks": ks})


def einsum(expr: str, op: str = "einsum") -> KernelCall:
    h, r, d = 16, 512, 256
    if expr == "bmk,bnk->mn":
        tensors = (
            ("a", spec(BF16, "s0", 128, 64)), ("b", spec(BF16, "s0", 128, 64)), ("d", spec(F32, 128, 128)),
        )  # fmt: skip
    elif op == "fp8_einsum":
        tensors = (
            ("a", spec(FP8, "s0", h, r)), ("a_sf", spec(F32, "s0", h, r // 128)),
            ("b", spec(FP8, h, d, r)), ("b_sf", spec(F32, h, d // 128, r // 128)), ("d", spec(BF16, "s0", h, d)),
        )  # fmt: skip
    else:
        last, out = (r, d) if expr == "bhr,hdr->bhd" else (d, r)
        tensors = (
            ("a", spec(BF16, "s0", h, last)), ("b", spec(BF16, h, d, r)), ("d", spec(BF16, "s0", h, out)),
        )  # fmt: skip
    attrs = {"expr": expr} | ({"recipe": (128, 128)} if op == "fp8_einsum" else {})
    return call(op, tensors, 64, attrs)


CALLS = {
    **{f"fp8_gemm_{form}": dense_form(form, "fp8") for form in ("nt", "nn", "tn", "tt")},
    **{f"bf16_gemm_{form}": dense_form(form, "bf16") for form in ("nt", "nn", "tn", "tt")},
    "m_grouped_fp8_gemm_nt_contiguous": contiguous(8, 512, 1024, upper=8),
    "m_grouped_fp8_gemm_nt_masked": masked(4, 512, 1024, most=512, upper=200),
    "m_grouped_bf16_gemm_nt_contiguous": grouped_bf16("m_grouped_bf16_gemm_nt_contiguous"),
    "m_grouped_bf16_gemm_nn_contiguous": grouped_bf16("m_grouped_bf16_gemm_nn_contiguous"),
    "m_grouped_bf16_gemm_nt_masked": grouped_bf16("m_grouped_bf16_gemm_nt_masked"),
    "k_grouped_fp8_gemm_nt_contiguous": k_grouped("k_grouped_fp8_gemm_nt_contiguous"),
    "k_grouped_bf16_gemm_tn_contiguous": k_grouped("k_grouped_bf16_gemm_tn_contiguous"),
    "einsum": einsum("bmk,bnk->mn"),
    "einsum bhr": einsum("bhr,hdr->bhd"),
    "einsum bhd": einsum("bhd,hdr->bhr"),
    "fp8_einsum": einsum("bhr,hdr->bhd", "fp8_einsum"),
    "tf32_hc_prenorm_gemm": prenorm(24, 1024, upper=64),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_entry_point_with_a_model_is_planned(name):
    planned = plan([CALLS[name]])
    assert planned
    gemms = [p for p in planned if p.key.tag != "transpose_fp32"]
    assert gemms
    assert all(p.key.kernel.startswith("sm90_") for p in gemms)
    assert all(not p.witness.symbols for p in planned)


def test_no_entry_point_is_forgotten():
    tried = {name.split()[0] for name in CALLS} | {"m_grouped_fp8_gemm_nn_contiguous"}
    assert set(entries.ENTRIES) - set(entries.NO_MODEL) - tried == {"get_paged_mqa_logits_metadata"}


def test_m_literal_forms_have_a_kernel_of_each_m():
    assert len({p.key for p in plan([CALLS["fp8_gemm_nt"]])}) < 10
    assert len(plan([CALLS["bf16_gemm_tn"]])) == 64


@pytest.mark.parametrize(
    ("calls", "count"),
    [
        pytest.param([dense(2048, 4096, upper=512)], None, id="dense"),
        pytest.param([contiguous(8, 4096, 7168, upper=64)], 1, id="grouped"),
    ],
)
def test_blackwell_is_planned_from_the_same_records(calls, count):
    planned = plan(calls, B200, Library("deep-gemm", "2.5.0+54e2261"))
    gemms = [p for p in planned if "gemm" in p.key.tag]
    assert gemms
    assert all(p.key.kernel.startswith("sm100_") for p in gemms)
    assert count is None or len(gemms) == count
    packs = [p for p in planned if p not in gemms]
    assert packs
    assert all("ue8m0" in p.key.kernel for p in packs)


def test_what_a_wheel_does_with_scales_on_blackwell_is_not_guessed():
    found = list(DeepGemm().keys([dense(2048, 4096, upper=512)], B200, sgl("0.1.2")))
    assert [p.key.kernel[:5] for p in found if isinstance(p, Planned)]
    assert [
        "layout" in f.reason or "scale" in f.reason or "pack" in f.reason
        for f in found
        if isinstance(f, Gap)
    ] == [True]


@pytest.mark.parametrize(
    "libraries",
    [{"sgl-deep-gemm": "0.1.2"}, {"tokenspeed-deepgemm": "2.5.0.post20260629"}, None],
    ids=str,
)
def test_a_build_is_planned_for_by_its_name_and_version(libraries):
    shapes = ShapeSet((dense(2112, 7168, upper=300),), (Site(),))
    made = fxwarm.plan(shapes, target=H200, libraries=libraries)
    assert made.planned
    assert not made.gaps
    (library,) = made.libraries
    expected = next(iter((libraries or {"sgl-deep-gemm": "0.2.5"}).items()))
    assert (library.distribution, library.version) == expected
    literal = any({"2112", "7168"} <= set(p.key.template) for p in made.planned)
    assert literal == (library.distribution == "tokenspeed-deepgemm")


def test_planning_imports_no_kernel_library_and_opens_no_device():
    code = (
        "import sys, fxwarm\n"
        "from tests.fxwarm.families.deep_gemm.samples import dense\n"
        "from passes.records import ShapeSet, Site\n"
        "shapes = ShapeSet((dense(2112, 7168, upper=99),), (Site(),))\n"
        "plan = fxwarm.plan(shapes, target=fxwarm.Target.named('h200'))\n"
        "import torch\n"
        "print(len(plan) > 3, 'deep_gemm' in sys.modules, torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parents[4])  # fmt: skip
    assert done.stdout.split() == ["True", "False", "False"]


@pytest.mark.parametrize("case", cases("memory"))
def test_every_memory_case_of_this_library_has_a_test(case):
    root = Path(__file__).parents[4]
    if case["id"] in ("B3", "B6"):  # on a GPU, by what the issue says
        assert case["source"].rpartition("/")[2] in (root / "tests/gpu/memory.py").read_text()
    else:
        assert f"# {case['id']}\n" in (Path(__file__).parent / "test_load.py").read_text()
