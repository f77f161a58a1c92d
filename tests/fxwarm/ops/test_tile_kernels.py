"""TileKernels' mHC functions as ops: references held against the library's own, and calls that contradict themselves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import fxwarm.ops  # noqa: F401  (defines the ops)
from fxwarm import exc
from tests.fxwarm.ops.tensors import BF16, close, randn

OPS = torch.ops.fxwarm
B, T, M, H = 2, 3, 4, 64
N = M * (2 + M)


@pytest.fixture(scope="module")
def theirs():
    """TileKernels' own references, in plain torch; read from their file, since its package wants another TileLang."""
    package = importlib.util.find_spec("tile_kernels")
    if package is None:
        pytest.skip("TileKernels is not installed")
    file = Path(package.submodule_search_locations[0], "torch", "mhc.py")
    spec = importlib.util.spec_from_file_location("tile_kernels_references", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def streams():
    return randn(B, T, M, H, dtype=BF16)


def test_each_reference_agrees_with_the_librarys(theirs):
    x, f = streams(), randn(B, T, H, dtype=BF16)
    mix, comb = randn(B, T, M, 1), randn(B, T, M, M)
    fn, weight, scale, base = randn(N, M * H) * 0.1, randn(M * H), randn(3), randn(N)
    assert close(OPS.mhc_post_fwd(f, x, mix, comb), theirs.mhc_post_ref(f, x, mix, comb))
    for w in (None, weight):
        mixes = OPS.mhc_pre_norm_fn(x, fn, w, 1e-6)
        assert close(mixes, theirs.mhc_pre_norm_fn_ref(x, fn, w, 1e-6), 1e-5)
    split = OPS.mhc_pre_split_mixes(mixes, scale, base, M, 2.0, 1e-6)
    wanted = theirs.mhc_pre_split_mixes_ref(mixes, scale, base, M, 2.0, 1e-6)
    assert all(close(a, b, 1e-6) for a, b in zip(split, wanted, strict=True))
    assert close(OPS.sinkhorn_normalize(comb), theirs.sinkhorn_normalize_ref(comb), 1e-6)
    assert close(OPS.mhc_pre_apply_mix(x, mix), theirs.mhc_pre_apply_mix_ref(x, mix))
    head = mixes[..., :M].contiguous(), scale[:1], base[:M], 1e-6
    assert close(OPS.mhc_head_compute_mix(*head), theirs.mhc_head_compute_mix_ref(*head), 1e-6)
    assert torch.equal(OPS.expand_to_mhc(f, M), theirs.expand_to_mhc_ref(f, M))


def test_the_fused_function_is_its_parts():
    x, fn, scale, base = streams(), randn(N, M * H) * 0.1, randn(3), randn(N)
    fused = OPS.mhc_pre_big_fuse(x, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 20)
    mixes = OPS.mhc_pre_norm_fn(x, fn, None, 1e-6)
    pre, post, comb = OPS.mhc_pre_split_mixes(mixes, scale, base, M, 2.0, 1e-6)
    parts = post, OPS.sinkhorn_normalize(comb, 20, 1e-6), OPS.mhc_pre_apply_mix(x, pre)
    assert all(close(a, b) for a, b in zip(fused, parts, strict=True))


@pytest.mark.parametrize(
    "name",
    ["mhc_pre_big_fuse", "mhc_post_fwd", "mhc_pre_norm_fn", "mhc_pre_split_mixes", "sinkhorn_normalize",
     "mhc_pre_apply_mix", "mhc_head_compute_mix", "expand_to_mhc"],
)  # fmt: skip
def test_each_fake_has_the_shapes_dtypes_and_strides_of_the_result(name):
    given = {
        "mhc_pre_big_fuse": (streams(), randn(N, M * H), randn(3), randn(N), 1e-6, 1e-6, 1e-6, 2.0, 20),
        "mhc_post_fwd": (randn(B, T, H, dtype=BF16), streams(), randn(B, T, M, 1), randn(B, T, M, M)),
        "mhc_pre_norm_fn": (streams(), randn(N, M * H), None, 1e-6),
        "mhc_pre_split_mixes": (randn(B, T, N), randn(3), randn(N), M, 2.0, 1e-6),
        "sinkhorn_normalize": (randn(B, T, M, M),),
        "mhc_pre_apply_mix": (streams(), randn(B, T, M, 1)),
        "mhc_head_compute_mix": (randn(B, T, M), randn(1), randn(M), 1e-6),
        "expand_to_mhc": (randn(B, T, H, dtype=BF16), M),
    }[name]  # fmt: skip
    torch.library.opcheck(
        getattr(OPS, name).default, given, test_utils=("test_schema", "test_faketensor")
    )


def test_a_contradiction_is_refused_with_both_shapes():
    with pytest.raises(
        exc.ShapeMismatchError,
        match=r"residual is bfloat16\[2, 3, 4, 64\].*fn = float32\[24, 512\]",
    ):
        OPS.mhc_pre_big_fuse(
            streams(), randn(N, 512), randn(3), randn(N), 1e-6, 1e-6, 1e-6, 2.0, 20
        )
    with pytest.raises(exc.ShapeMismatchError, match="give it as bfloat16"):
        OPS.expand_to_mhc(randn(B, T, H), M)
