"""Small inputs from public bug reports: what each would have needed, as a claim. Ids as in the list of cases."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

import fxwarm
import fxwarm.ops
import fxwarm.records
from fxwarm import artifacts, exc, family, warmup
from fxwarm.backend import fxwarm as backend
from fxwarm.families.deep_gemm import DeepGemm
from fxwarm.records import CompileKey, Planned, Target, WarmPlan, digest
from passes import bound
from passes.records import KernelCall
from tests import toy_family
from tests.conftest import cases
from tests.toy_family import Toy

H200 = Target.named("h200")
SGL = {"sgl-deep-gemm": "0.1.5.post1"}
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(*shape: int, dtype: torch.dtype = FP8) -> nn.Parameter:
    return nn.Parameter(meta(*shape, dtype=dtype), requires_grad=False)


def up(x: int) -> int:
    return -(-x // 128)


class Dense(nn.Module):
    """fp8_gemm_nt on rows of its own making: only their number matters."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.k, self.w, self.sf = k, weight(n, k), weight(up(n), up(k), dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        a, a_sf = (
            x.new_empty(rows, self.k, dtype=FP8),
            x.new_empty(rows, up(self.k), dtype=torch.float32),
        )
        d = x.new_empty(rows, self.w.shape[0], dtype=BF16)
        torch.ops.fxwarm.fp8_gemm_nt(a, a_sf, self.w, self.sf, d)
        return d


class Einsum(nn.Module):
    """fp8_einsum 'bhr,hdr->bhd'."""

    def __init__(self, h: int, d: int, r: int) -> None:
        super().__init__()
        self.h, self.d, self.r = h, d, r
        self.w, self.sf = weight(h, d, r), weight(h, up(d), up(r), dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b = x.shape[0]
        a, a_sf = (
            x.new_empty(b, self.h, self.r, dtype=FP8),
            x.new_empty(b, self.h, up(self.r), dtype=torch.float32),
        )
        d = x.new_empty(b, self.h, self.d, dtype=BF16)
        torch.ops.fxwarm.fp8_einsum("bhr,hdr->bhd", a, a_sf, self.w, self.sf, d)
        return d


class Both(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part(x) for part in self.parts)


class Prenorm(nn.Module):
    """tf32_hc_prenorm_gemm with the callers' split rule."""

    def __init__(self, n: int, k: int, num_sms: int) -> None:
        super().__init__()
        self.k, self.num_sms, self.w = k, num_sms, weight(n, k, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        blocks = (rows + 63) // 64
        splits = torch.sym_max(1, torch.sym_min(self.num_sms // blocks, up(self.k) * 2 // 4))
        d = x.new_empty(splits, rows, self.w.shape[0], dtype=torch.float32)
        sqr_sum = x.new_empty(splits, rows, dtype=torch.float32)
        a = x.new_empty(rows, self.k, dtype=BF16)
        torch.ops.fxwarm.tf32_hc_prenorm_gemm(a, self.w, d, sqr_sum, splits)
        return d


def trace(model: nn.Module, max_size: int = 8192) -> fxwarm.ShapeSet:
    return fxwarm.trace(model, meta(64, 16, dtype=BF16), max_size=max_size)


def plan(shapes: fxwarm.ShapeSet, target: Target = H200) -> WarmPlan:
    return fxwarm.plan(shapes, target, SGL)


def gemms(made: WarmPlan) -> list[Planned]:
    return [p for p in made.planned if "gemm" in p.key.tag]


def keys_at(call: KernelCall, m: int) -> set[CompileKey]:
    """What the library picks at exactly ``m`` rows, as a plan of that one size says."""
    (symbol,) = call.symbols
    static = bound.at(call, {symbol.name: m})
    library = DeepGemm().library(SGL)
    return {p.key for p in DeepGemm().keys([static], H200, library) if isinstance(p, Planned)}


@pytest.fixture(autouse=True)
def clean(fresh):
    toy_family._loaded.clear()
    toy_family.events.clear()
    warmup._resident.clear()
    artifacts.pending.clear()
    yield
    family.unregister("toy")


# Graphs


def a1(case, monkeypatch):
    h, d, r = (case["graph"][1][x] for x in "hdr")
    model = Both(Dense(case["graph"][0]["N"], case["graph"][0]["K"]), Einsum(h, d, r))
    whole = trace(model)
    assert {c.op for c in whole.calls} == {"fp8_gemm_nt", "fp8_einsum"}
    assert plan(whole).gaps == () and {
        k.template[-3] for k in plan(whole).keys if "gemm" in k.tag
    } >= {"GemmType::Batched"}
    original = DeepGemm.match
    monkeypatch.setattr(
        DeepGemm, "match", lambda self, op: () if op.name == "fp8_einsum" else original(self, op)
    )
    monkeypatch.setenv("FXWARM_JIT_OPS", "fp8_einsum")
    partial = trace(model)
    (gap,) = partial.gaps
    assert gap.op == "fxwarm::fp8_einsum" and all(f"{x}" in gap.reason for x in (h, d, r))
    made = plan(partial)
    assert gemms(made) and not made.is_complete
    strict = {"fxwarm.strict": True}
    cpu = Both(Dense(128, 128), Einsum(2, 128, 128)).to_empty(device="cpu")
    with pytest.raises(Exception, match="fp8_einsum"), torch.no_grad():
        torch.compile(cpu, backend=backend, options=strict)(torch.zeros(4, 16, dtype=BF16))


def a3(case, monkeypatch):
    shapes = trace(Prenorm(case["N"], case["K"], case["num_sms"]), case["tokens_max"])
    splits = [int(p.key.template[5]) for p in gemms(plan(shapes))]
    assert sorted(splits, reverse=True) == [
        64,
        44,
        33,
        26,
        22,
        18,
        16,
        14,
        13,
        12,
        11,
        10,
        9,
        8,
        7,
        6,
        5,
        4,
        3,
        2,
        1,
    ]
    monkeypatch.setattr(DeepGemm, "keys", lambda *args: [])
    (gap,) = plan(shapes).gaps
    assert "planned no kernel and gave no reason" in gap.reason


def a11(case, monkeypatch):
    n, k = case["branches"][0]["N"], case["branches"][0]["K"]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = weight(n, k, dtype=BF16)

        def forward(self, flag, x):
            def branch(dtype):
                def run(x):
                    d = x.new_empty(x.shape[0], n, dtype=dtype)
                    torch.ops.fxwarm.bf16_gemm_nt(x, self.w, d)
                    return d.sum(-1, dtype=torch.float32)

                return run

            return torch.cond(flag, branch(torch.float32), branch(BF16), (x,))

    x = meta(64, k, dtype=BF16)
    shapes = fxwarm.trace(Model(), torch.tensor(True), x, max_size=case["tokens_max"])
    assert {c["d"].dtype for c in shapes.calls} == {"float32", "bfloat16"}
    one, two = ({p.key for p in gemms(plan(type(shapes)((c,), (s,))))} for c, s in shapes.items())
    assert one and two and not one & two


def a33(case, monkeypatch):
    spec = case["layers"][1]

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = weight(spec["G"], spec["N"], spec["K"])
            self.sf = weight(spec["G"], up(spec["N"]), up(spec["K"]), dtype=torch.float32)

        def forward(self, x):
            t = spec["topk"] * x.shape[0]
            rows = 128 * ((t + torch.sym_min(t, spec["G"]) * 127 + 127) // 128)
            a, a_sf = (
                x.new_empty(rows, spec["K"], dtype=FP8),
                x.new_empty(rows, up(spec["K"]), dtype=torch.float32),
            )
            d, ids = x.new_empty(rows, spec["N"], dtype=BF16), x.new_empty(rows, dtype=torch.int32)
            torch.ops.fxwarm.m_grouped_fp8_gemm_nt_contiguous(a, a_sf, self.w, self.sf, d, ids)
            return d

    shapes = trace(Both(Experts()))
    (call,) = shapes.calls
    assert [int(d) for d in call["b"].dims] == [spec["G"], spec["N"], spec["K"]]
    wrong = Both(Experts())
    wrong.parts[0].sf = weight(64, up(spec["N"]), up(spec["K"]), dtype=torch.float32)
    with pytest.raises(exc.ShapeMismatchError, match=r"parts\.0 .*64, 32, 56.*256, 4096, 7168"):
        trace(wrong)


def a34(case, monkeypatch):
    union = fxwarm.ShapeSet()
    for low, high in case["compile_ranges"]:
        x = meta(max(low, 2), 16, dtype=BF16)
        torch._dynamo.mark_dynamic(x, 0, min=max(low, 2), max=high)
        union |= fxwarm.trace(Dense(case["N"], case["K"]), x)
    covered = {int(m) for c in union.calls for m in c["a"].dims[0].attainable()}
    assert covered == set(range(1, 65))
    keys = plan(union).keys
    assert len(keys) == len(set(keys))
    family.register(Toy)
    for how in ("dynamic", "unbacked"):
        toy_family._loaded.clear()
        warmup._resident.clear()
        torch._dynamo.reset()
        model = lambda x: torch.ops.toy.scale(x, torch.ones(8))  # noqa: E731
        compiled = torch.compile(
            model, backend=backend, options={"fxwarm.symbolic": how, "fxwarm.max_size": 64}
        )
        compiled(torch.ones(case["call_M"][0], 8))
        toy_family.events.clear()
        for rows in case["call_M"]:
            compiled(torch.ones(rows, 8))
        assert toy_family.events == [], how


# Bounds


def a2(case, monkeypatch):
    shapes = trace(Einsum(case["h"], case["d"], case["r"]), case["tokens_max"])
    (call,) = shapes.calls
    planned = set(plan(shapes).keys)
    for m in case["served_M"]:
        assert keys_at(call, m) <= planned
    (narrow,) = trace(Einsum(case["h"], case["d"], case["r"]), 8192).calls
    assert 10349 not in narrow["a"].dims[0].attainable()


def a7(case, monkeypatch):
    for tokens, count in ((8192, 22), (2048, 19), (1024, 15)):
        made = gemms(plan(trace(Prenorm(case["N"], case["K"], case["num_sms"]), tokens)))
        assert len(made) == count
        assert all(int(p.witness["a"].dims[0]) <= tokens for p in made)
    made = gemms(plan(trace(Prenorm(case["N"], case["K"], case["num_sms"]), 8192)))
    first = {int(p.key.template[5]): int(p.witness["a"].dims[0]) for p in made}
    splits = [112, 66, 44, 33, 26, 22, 18, 16, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    tokens = [
        1,
        65,
        129,
        193,
        257,
        321,
        385,
        449,
        513,
        577,
        641,
        705,
        769,
        833,
        897,
        1025,
        1153,
        1409,
        1665,
        2113,
        2817,
        4225,
    ]
    assert first == dict(zip(splits, tokens, strict=True))


def a8(case, monkeypatch):
    family.register(Toy)

    def kinds(rows, max_size) -> set[str]:
        shapes = fxwarm.trace(
            lambda x, w: torch.ops.toy.scale(x.new_empty(rows(x), 8), w),
            meta(4, 8),
            meta(8),
            max_size=max_size,
        )
        return {k.template[1] for k in fxwarm.plan(shapes, Target.named("cpu")).keys}

    assert kinds(lambda x: x.shape[0], 64) == {"one", "mult16", "other"}
    assert kinds(lambda x: 16 * x.shape[0], 8) == {"mult16"}
    statics = [
        fxwarm.trace(
            lambda x, w, n=n: torch.ops.toy.scale(x.new_empty(n, 8), w), meta(4, 8), meta(8)
        )
        for n in (1, 16, 17)
    ]
    assert {k.template[1] for s in statics for k in fxwarm.plan(s, Target.named("cpu")).keys} == {
        "one",
        "mult16",
        "other",
    }


def a15(case, monkeypatch):
    (call,) = trace(Dense(case["N"], case["K"]), case["tokens_max"]).calls
    planned = {p.key for p in gemms(plan(trace(Dense(case["N"], case["K"]), case["tokens_max"])))}
    for m in case["tails"]:
        assert {k for k in keys_at(call, m) if "gemm" in k.tag} <= planned
    old = {k for m in case["warmed_before"] for k in keys_at(call, m) if "gemm" in k.tag}
    tails = {k for m in case["tails"] for k in keys_at(call, m) if "gemm" in k.tag}
    assert (len(planned), len(old), len(tails), len(old & tails)) == (24, 2, 6, 0)


def a30(case, monkeypatch):
    g, hidden, inter, ranks = case["G"], case["hidden"], case["inter"], case["DP"]

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2 = (
                weight(g, 2 * inter, hidden, dtype=BF16),
                weight(g, hidden, inter, dtype=BF16),
            )

        def forward(self, x):
            rows = ranks * x.shape[0]
            a = x.new_empty(rows, hidden)
            ids, scales = (
                x.new_empty(rows, 8, dtype=torch.int32),
                x.new_empty(rows, 8, dtype=torch.float32),
            )
            return torch.ops.fxwarm.cutlass_fused_moe(a, ids, scales, self.w1, self.w2, BF16, [])

    shapes = trace(Experts(), case["T_max"])
    (call,) = (c for c in shapes.calls if c.family == "flashinfer")
    assert call["input"].dims[0].upper == 32768
    made = fxwarm.plan(shapes, H200, {"flashinfer-python": "0.6.18.post1"})
    buckets = {
        int(k.template[0].split("[")[1].split(",")[0]) for k in made.keys if k.kernel == "gemm1"
    }
    # Of FlashInfer's 23 buckets up to 32768 those that a multiple of 4 rows can meet.
    assert buckets == {2**i for i in range(2, 9)} | set(range(512, 2049, 256)) | set(
        range(2560, 4097, 512)
    ) | {8192, 16384, 32768}


def b4(case, monkeypatch):
    made = plan(trace(Dense(case["N"], case["K"]), case["tokens_max"]))
    assert max(int(p.witness["a"].dims[0]) for p in made.planned) <= case["tokens_max"]
    other = plan(trace(Dense(case["N"], case["K"]), 8192))
    assert digest(made.shapes.calls) != digest(other.shapes.calls)


# Plans and toolchains that no other file has


class Extra(Toy):
    def extra(self, target: Target, library: object) -> Iterable[Planned]:
        return [Planned(CompileKey("toy", "zero_block", (str(width),))) for width in (1, 16, 17)]

    def missing(self, planned, target):
        return [
            p
            for p in planned
            if not (
                toy_family.cache_dir() / toy_family.name_of(p.key.template[0], "other")
            ).exists()
        ]

    def build(self, planned, target, jobs):
        for p in planned:
            toy_family.compile_kernel(toy_family.name_of(p.key.template[0], "other"))
            yield fxwarm.records.Built(p.key)

    def load(self, planned, target, bind):
        for p in planned:
            toy_family.get_kernel(toy_family.name_of(p.key.template[0], "other"))
            yield fxwarm.records.Loaded(p.key)

    def cached(self, planned):
        return [
            toy_family.cache_dir() / toy_family.name_of(p.key.template[0], "other") / "kernel.so"
            for p in planned
        ]


def a9(case, monkeypatch):
    family.register(Extra)
    family.register(Extra)
    made = fxwarm.plan(fxwarm.ShapeSet(), Target.named("cpu"))
    assert [k.template for k in made.keys] == [("1",), ("16",), ("17",)]
    report = fxwarm.warm(made)
    assert (
        len(report.built) == len(report.loaded) == len(report.entries) == 3
        and report.status == "complete"
    )


def a14(case, monkeypatch):
    class Wrapped(torch.Tensor):
        pass

    for n, k in case["shapes"]:
        found = []
        for holder in ("parameter", "subclass", "tied"):
            model = Dense(n, k)
            if holder == "subclass":
                model.w = nn.Parameter(
                    meta(n, k, dtype=FP8).as_subclass(Wrapped), requires_grad=False
                )
            if holder == "tied":
                model = Both(model)
                model.head = model.parts[0].w
            shapes = trace(model)
            assert len(shapes) == 1, holder
            found.append({p.key for p in gemms(plan(shapes))})
        assert found[0] == found[1] == found[2]
        assert len(found[0]) == {2112: 24, 576: 19}[n]


class EveryM(Toy):
    """M itself is in the key up to 64 rows."""

    def keys(self, calls, target, library):
        for call in calls:
            rows = call["x"].dims[0]
            image = bound.image(call, rows)
            for i, (m,) in enumerate(image.rows.tolist()):
                if m <= 65:
                    yield Planned(
                        CompileKey("toy", "scale", ("8", str(m) if m <= 64 else "large")),
                        bound.at(call, image.at(i)),
                    )


def a25(case, monkeypatch):
    family.register(EveryM)
    shapes = fxwarm.trace(
        lambda x, w: torch.ops.toy.scale(x, w), meta(4, 8), meta(8), max_size=case["chunk"]
    )
    for most, left in zip(case["max_keys"], (0, 49), strict=True):
        made = fxwarm.plan(shapes, Target.named("cpu"), max_keys=most)
        assert any("M is in the key, one kernel for each of 1..64" in note for note in made.notes)
        if left:
            (gap,) = made.gaps
            assert f"{left} more than fxwarm.max_keys={most}" in gap.reason
        else:
            assert {str(m) for m in range(1, 65)} <= {k.template[1] for k in made.keys}


def e6(case, monkeypatch):
    model, x = nn.Linear(8, 8, dtype=BF16), torch.ones(4, 8, dtype=BF16)
    monkeypatch.setattr(family, "_is_installed", lambda name: False)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    (report,) = fxwarm.reports()
    assert report.status == "complete" and report.built == () and fxwarm.plans()[0].keys == ()
    assert all(
        name in report.notes[-1] for name in ("sgl-deep-gemm", "flashinfer-python", "tilelang")
    )


class Unproven(Toy):
    archs = ("sm_90a",)

    def load(self, planned, target, bind):
        for p in planned:
            yield fxwarm.records.Loaded(p.key, error="no kernel image is available for this device")


def e7(case, monkeypatch):
    family.register(Unproven)
    shapes = fxwarm.trace(lambda x, w: torch.ops.toy.scale(x, w), meta(4, 8), meta(8))
    target = Target("gb10", device="cpu", arch="sm_121a", num_sms=48)
    report = fxwarm.warm(fxwarm.plan(shapes, target))
    assert (len(report.built) == 1 and len(report.loaded) == 0) or len(report.loaded) == 1
    assert any("sm_121a" in g.reason and "no kernel image" in g.reason for g in report.gaps)


def e10(case, monkeypatch):
    family.register(Toy)
    monkeypatch.setattr(Toy, "library", lambda *a: pytest.fail("probed"))
    x = torch.ones(4, 8)
    compiled = torch.compile(
        lambda x: torch.ops.toy.scale(x, torch.ones(8)),
        backend=backend,
        options={"fxwarm.coverage": "off"},
    )
    torch.testing.assert_close(compiled(x), x)
    assert [r.status for r in fxwarm.reports()] == ["off"] and not list(
        toy_family.cache_dir().parent.glob("fxwarm/*")
    )


CHECKS = {
    name.upper(): check
    for name, check in list(globals().items())
    if name[:1] in "abe" and name[1:].isdigit()
}
ELSEWHERE = {
    "A5", "A6", "A16", "A21", "A23", "A27", "B10", "C11", "C14", "E1", "E2", "E3", "E5",
}  # fmt: skip  # in the rooms of their families


@pytest.mark.parametrize(
    "case", [*cases("graph"), *cases("bounds"), *cases("plan"), *cases("toolchain")]
)
def test_case(case, monkeypatch):
    if case["id"] in ELSEWHERE:
        pytest.skip("tested in the room of its family")
    CHECKS[case["id"]](case["input"], monkeypatch)


def test_every_case_has_a_check():
    known = {
        p.values[0].get("id")
        for kind in ("graph", "bounds", "plan", "toolchain")
        for p in cases(kind)
    }
    assert known - {None} <= set(CHECKS) | ELSEWHERE
