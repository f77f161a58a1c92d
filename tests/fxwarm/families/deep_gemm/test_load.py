"""One launch a kernel: legal, finite and small inputs, whatever the witness or the model's own sizes."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from fxwarm.families.deep_gemm import DeepGemm, inputs, library
from fxwarm.families.deep_gemm import load as module
from fxwarm.families.deep_gemm.keys import strides_of
from fxwarm.families.deep_gemm.load import load
from fxwarm.records import Planned, Target
from passes.records import Dim, KernelCall, TensorSpec
from tests.fxwarm.families.deep_gemm.samples import (
    BF16,
    F32,
    contiguous,
    dense,
    masked,
    prenorm,
    sgl,
    spec,
)
from tests.fxwarm.families.deep_gemm.samples import call as sample

CPU = torch.device("cpu")
H200 = Target.named("h200")


def plan(*calls: KernelCall) -> list[Planned]:
    return [p for p in DeepGemm().keys(calls, H200, sgl()) if isinstance(p, Planned)]


def nothing(call: KernelCall) -> None:
    return None


@pytest.mark.parametrize("m", [1, 2, 127, 128, 129])
@pytest.mark.parametrize("packed", [False, True])
def test_synthetic_scales_are_ones_padding_included(m, packed):  # B7
    aligned = -(-m // 4) * 4
    dtype, columns = ("int32", 14) if packed else ("float32", 56)
    scales = TensorSpec(dtype, (Dim.static(m), Dim.static(columns)), ("1", str(aligned)))
    first, second = (inputs.make_tensor("a_sf", scales, CPU) for _ in range(2))
    storage = torch.empty(0, dtype=first.dtype).set_(first.untyped_storage())
    assert storage.numel() == aligned * columns
    if packed:
        exponents = storage.view(torch.uint8).int()
        bits = exponents << 23
    else:
        bits = storage.view(torch.int32)
    assert bool((bits & -0x7F800001 == 0).all())  # 0x807fffff: sign and mantissa
    values = bits.view(torch.float32)
    assert bool(values.isfinite().all())
    assert bool((values > 0).all())
    assert torch.equal(first, second)


def test_synthetic_fp8_holds_no_nan():  # B7
    tensor = inputs.make_tensor("a", spec("float8_e4m3fn", 5, 128), CPU)
    assert tensor.dtype == torch.float8_e4m3fn
    assert bool((tensor.float() == 1).all())


@pytest.mark.parametrize("groups", [1, 4, 32])
@pytest.mark.parametrize(("m", "legal_m"), [(1, 128), (127, 128), (128, 128), (129, 256)])
def test_group_ids_are_whole_aligned_blocks(groups, m, legal_m):  # B10
    call = inputs.legal(contiguous(groups, 256, 128, m=str(m)))
    values = inputs.arguments(call, CPU)
    ids = values["grouped_layout"]
    assert ids.numel() == values["a"].shape[0] == values["d"].shape[0] == legal_m
    assert values["a_sf"].shape[0] == legal_m
    blocks = ids.view(-1, 128)
    assert bool((blocks == blocks[:, :1]).all())
    assert 0 <= int(ids.min()) <= int(ids.max()) < groups


def test_an_unaligned_length_makes_no_ids():
    with pytest.raises(ValueError, match="no whole blocks of 128"):
        inputs.group_ids(129, 4)


def test_rounding_rows_keeps_the_kernel_and_the_layout_of_scales():
    call = contiguous(4, 256, 512, m="1000")
    column = TensorSpec("float32", call["a_sf"].dims, ("1", "1000"))
    tensors = tuple((n, column if n == "a_sf" else t) for n, t in call.tensors)
    call = KernelCall(call.family, call.op, tensors, call.attrs)
    legal = inputs.legal(call)
    assert strides_of(legal["a_sf"]) == ("1", "1024")
    gemm = [p.key for c in (call, legal) for p in plan(c) if "gemm" in p.key.tag]
    assert gemm[0] == gemm[1]


def test_a_masked_launch_is_as_large_as_the_expected_rows():  # B13
    call = masked(16, 1536, 2048, most=262400, expected="300")
    whole = inputs.bytes_of(call)
    assert whole > 16 * 262400 * (2048 + 2 * 1536)
    legal = inputs.legal(call)
    assert int(legal["a"].dims[1]) == 384
    assert inputs.bytes_of(legal) < 2048 << 20
    values = inputs.arguments(inputs.legal(masked(4, 256, 256, most=262400, expected="300")), CPU)
    assert int(values["masked_m"].max()) == 300 <= values["a"].shape[1]
    keys = [{p.key for p in plan(masked(16, 1536, 2048, most=m))} for m in (1024, 262400)]
    gemms = [{k for k in found if "gemm" in k.tag} for found in keys]
    assert gemms[0] == gemms[1]  # keys follow the expected rows alone


def test_the_smallest_size_of_each_kernel_is_its_witness():
    biggest = max(int(p.witness["a"].dims[0]) for p in plan(dense(2112, 7168)))
    assert biggest <= 3392  # of 8192: the last new kernel's interval begins there


def summed(c: tuple[str, ...] | None) -> KernelCall:
    """Return a sum over the batch into ``d`` that adds ``c``, of these strides."""
    tensors = [("a", spec(BF16, 3, 128, 64)), ("b", spec(BF16, 3, 256, 64))]
    tensors += [("d", spec(F32, 128, 256))]
    tensors += [("c", spec(F32, 128, 256, strides=c))] if c is not None else []
    return sample("einsum", tensors, None, {"expr": "bmk,bnk->mn"})


def test_c_of_the_shape_of_d_is_d():
    values = inputs.arguments(summed(()), CPU)
    assert values["c"] is values["d"]  # the library asserts it
    assert inputs.is_in_place(summed(("256", "1")))  # contiguous, spelled out
    assert inputs.bytes_of(summed(())) == inputs.bytes_of(summed(None))
    padded = summed(("512", "1"))
    values = inputs.arguments(padded, CPU)
    assert values["c"].data_ptr() != values["d"].data_ptr()
    assert values["c"].stride() == (512, 1)
    assert inputs.bytes_of(padded) > inputs.bytes_of(summed(()))


class Counting:
    """A library that only counts, in place of the CUDA one."""

    def __init__(self, fail: str = "") -> None:
        self.sizes: list[int] = []
        self.fail = fail
        self.largest = 0

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, grouped_layout, **_):
        if self.fail:
            raise torch.OutOfMemoryError(self.fail)
        tensors = (*a, *b, d, grouped_layout)
        self.largest = max(self.largest, sum(t.untyped_storage().nbytes() for t in tensors))
        self.sizes.append(a[0].shape[0])

    def fp8_gemm_nt(self, a, b, d, **_):
        self.sizes.append(a[0].shape[0])


def test_nothing_beyond_the_budget_is_allocated_and_what_is_left_out_is_listed():  # B1
    planned = plan(contiguous(160, 6144, 640, m="128*s0", upper=671))
    budget = 256 << 20
    counting = Counting()
    loaded = list(load(planned, counting, nothing, memory=budget, device="cpu"))
    assert {x.key for x in loaded} == {p.key for p in planned}
    assert all("built, not launched" in x.error and "at full size" in x.error for x in loaded)
    assert counting.sizes == []

    weights = {
        "b": torch.empty(160, 6144, 640, dtype=torch.float8_e4m3fn),
        "b_sf": torch.ones(160, 48, 5),
    }
    loaded = list(load(planned, counting, lambda call: weights, memory=budget, device="cpu"))
    launched = [x for x in loaded if not x.error]
    assert launched
    own = counting.largest - sum(t.untyped_storage().nbytes() for t in weights.values())
    assert own <= budget
    assert all("built, not launched" in x.error for x in loaded if x.error)


def test_out_of_memory_ends_one_kernel():
    planned = plan(contiguous(4, 256, 256, m="128*s0", upper=4))
    loaded = list(load(planned, Counting("out of memory"), nothing, memory=1 << 30, device="cpu"))
    assert len(loaded) == len(planned)
    assert all("OutOfMemoryError: out of memory" in x.error for x in loaded)


def test_every_kernel_is_launched_once_and_never_at_zero_rows():
    planned = plan(dense(256, 256, upper=600), prenorm(24, 1024, upper=10))
    planned = [p for p in planned if p.witness.op == "fp8_gemm_nt"]
    counting = Counting()
    before = torch.random.get_rng_state()
    loaded = list(load(planned, counting, nothing, memory=1 << 30, device="cpu"))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not [x.error for x in loaded if x.error]
    assert len(counting.sizes) == len(planned)
    assert counting.sizes == sorted(counting.sizes, reverse=True)  # the peak is that of one launch
    assert min(counting.sizes) == 1


def test_witnesses_run_on_the_current_device_and_never_under_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert module._current(torch) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    counting = Counting()
    loaded = list(load(plan(dense(256, 256, upper=40)), counting, nothing, memory=1 << 30))
    assert loaded
    assert all("call fxwarm.warm_all() before the capture" in x.error for x in loaded)
    assert counting.sizes == []


def test_load_leaves_no_entry_unplanned_and_verify_shows_one(fake, toolkit, monkeypatch, tmp_path):
    toolkit()
    fake(real_torch=True)
    family = DeepGemm(memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    planned = list(family.keys([dense(256, 256, upper=100)], H200, library.find_library({})))
    assert len(family.missing(planned, H200)) == len(planned)
    loaded = list(family.load(planned, H200, nothing))
    assert not [x.error for x in loaded if x.error]
    module = importlib.import_module("deep_gemm")
    assert len(module.launches) >= len(planned)
    assert family.missing(planned, H200) == []
    assert family.verify(planned) == []
    assert list(family.load(planned, H200, nothing))
    built = len(module._loaded)
    values = inputs.arguments(dense(512, 512, m="700"), CPU)
    module.fp8_gemm_nt((values["a"], values["a_sf"]), (values["b"], values["b_sf"]), values["d"])
    assert len(module._loaded) > built
    gaps = family.verify(planned)
    assert gaps
    assert all("not planned" in g.reason for g in gaps)
    assert family.verify(planned) == []


def test_loading_twice_builds_nothing(fake, toolkit, monkeypatch):
    from tests.fxwarm.families.deep_gemm.conftest import runs_of

    home = toolkit()
    fake(real_torch=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    family = DeepGemm(memory=1 << 30)
    planned = list(family.keys([dense(256, 256, upper=40)], H200, library.find_library({})))
    list(family.load(planned, H200, nothing))
    runs = runs_of(home)
    assert runs == len(planned)
    assert not [x.error for x in family.load(planned, H200, nothing) if x.error]
    assert runs_of(home) == runs
    assert np.all([len(p.key.template) > 0 for p in planned])


def test_each_sequence_of_a_schedule_has_a_key():
    """Of none at all the kernel of sgl-deep-gemm 0.1.5.post1 reads beyond its sums, where the batch is a multiple of 32."""
    lens = TensorSpec("int32", (Dim.static(64), Dim.static(1)), ("1", "1"))
    attrs = (("block_kv", 64), ("num_sms", 132))
    call = KernelCall(
        "deep_gemm", "get_paged_mqa_logits_metadata", (("context_lens", lens),), attrs
    )
    assert inputs.arguments(call, CPU)["context_lens"].tolist() == [[1]] * 64
