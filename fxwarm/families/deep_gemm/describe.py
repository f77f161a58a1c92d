"""From a collected call to what the heuristics want to know of it: a ``Gemm`` and the swept dim."""

from __future__ import annotations

from typing import NamedTuple

from fxwarm.families.deep_gemm import heuristics as h
from fxwarm.families.deep_gemm import shapes
from fxwarm.families.deep_gemm.heuristics.descriptor import Dtype, Major
from fxwarm.records import Library, Target
from passes.records import Dim, KernelCall, TensorSpec

__all__ = ["Described", "describe", "place_of", "settings_of", "version_of"]

_SCALED = (1, 128, 128)
_DTYPES: dict[str, Dtype] = {"float8_e4m3fn": "fp8", "bfloat16": "bf16", "float32": "fp32"}


class Described(NamedTuple):
    """A GEMM call: its heuristics' descriptor, and the expressions of what varies."""

    gemm: h.Gemm
    swept: str
    """Expression of the dim whose values decide between kernels."""
    rows: str
    """Expression of M, which decides how large a launch is."""


class _Case(NamedTuple):
    call: KernelCall
    version: h.Version
    settings: h.Settings
    compiled: str


def version_of(library: Library) -> h.Version:
    """Return what the heuristics know of ``library``. Raises UnknownVersion."""
    return h.resolve_version(library.distribution, library.version)


def settings_of(target: Target, library: Library) -> h.Settings:
    """Return the settings that enter kernels: the library's own, else the device's.

    Raises Unmodelled for an architecture without a model.
    """
    given = dict(library.settings)
    number = "".join(c for c in target.arch if c.isdigit())
    if number not in ("90", "100"):
        raise h.Unmodelled(f"the heuristics on {target.arch or target.name}")
    return h.Settings(
        arch=int(number),
        num_sms=int(given.get("num_sms", target.num_sms)),
        mk_alignment=int(given.get("mk_alignment", 128)),
        block_m_multiple_of=int(given.get("block_m_multiple_of", 1)),
        block_n_multiple_of=int(given.get("block_n_multiple_of", 1)),
        ignore_compile_dims=given.get("ignore_compile_dims") == "True",
        minimize_num_sms=dict(library.environment).get("DG_JIT_MINIMIZE_NUM_SMS") == "1",
    )


def describe(call: KernelCall, version: h.Version, settings: h.Settings) -> Described:
    """Return the descriptor of a GEMM or einsum call.

    Raises Unmodelled, or ValueError for a dim that would have to be static and is not, and for
    what the library itself refuses.
    """
    where = shapes.form(call.op, dict(call.attrs))
    if where is None:
        raise h.Unmodelled(f"the kernels of {call.op}")
    _refuse_fp4(call)
    m = place_of(call, where.m)
    n = _static(call, where.n, "N")
    groups = _static(call, where.groups, "the number of groups") if where.groups else 1
    dims = call.attr("compiled_dims")
    compiled = str(dims) if dims is not None else h.default_compiled_dims(call.op, version)
    case = _Case(call, version, settings, compiled)
    if call.op.startswith("k_grouped"):
        return _k_grouped(case, groups, int(m), n)
    k = _static(call, where.k, "K")
    if call.op.endswith("einsum"):
        return Described(_einsum(case, groups, n, k), m.expr, m.expr)
    if "masked" in call.op:
        return _masked(case, (groups, n, k), m)
    if "m_grouped" in call.op:
        return _contiguous(case, (groups, n, k), m)
    return Described(_dense(case, n, k), m.expr, m.expr)


def _dense(case: _Case, n: int, k: int) -> h.Gemm:
    call, version, settings, compiled = case
    layout = call.op.rsplit("_", 1)[1]
    d_dtype = _DTYPES[call["d"].dtype]
    if call.op.startswith("bf16"):
        return h.bf16_gemm_nt(
            n,
            k,
            version,
            settings,
            d_dtype=d_dtype,
            with_accumulation="c" in call,
            major_a=_major(call["a"], layout[0] == "t"),
            major_b=_major(call["b"], layout[1] == "n"),
            compiled_dims=compiled,
        )
    gran_n, gran_k = _granularity(call)
    one_d_one_d = gran_n == 1
    wanted = ("fp32", True) if one_d_one_d else ("bf16", False)
    if settings.arch == 90 and (d_dtype, "c" in call) != wanted:
        takes = "a float32 d and c" if one_d_one_d else "a bfloat16 d and no c"
        raise ValueError(
            f"with scales of B over {gran_n} rows the library takes {takes}, not {call['d']}; "
            "change d, c or the recipe"
        )
    return h.fp8_gemm_nt(
        n,
        k,
        version,
        settings,
        one_d_one_d=one_d_one_d,
        compiled_dims=compiled,
        major_sfb="K" if one_d_one_d else _major(call["b_sf"], layout[1] == "n"),
        gran_k=gran_k,
    )


def _contiguous(case: _Case, dims: tuple[int, int, int], m: Dim) -> Described:
    call, version, settings, compiled = case
    psum = call.attr("use_psum_layout") is True
    expected = call.attr("expected_m_for_psum_layout")
    transposed = call.op.endswith("_nn_contiguous")
    if "bf16" in call.op:
        gemm = h.m_grouped_bf16_gemm_nt_contiguous(
            *dims,
            version,
            settings,
            use_psum_layout=psum,
            has_expected_m=expected is not None,
            major_b=_major(call["b"], transposed),
            compiled_dims=compiled,
        )
    else:
        gemm = h.m_grouped_fp8_gemm_nt_contiguous(
            *dims,
            version,
            settings,
            use_psum_layout=psum,
            has_expected_m=expected is not None,
            compiled_dims=compiled,
            major_sfb=_major(call["b_sf"], transposed),
            gran_k=_granularity(call)[1],
        )
    return Described(gemm, m.expr if expected is None else _expr(expected), m.expr)


def _masked(case: _Case, dims: tuple[int, int, int], m: Dim) -> Described:
    call, version, settings, compiled = case
    most = int(m) if m.is_static else None
    if "bf16" in call.op:
        gemm = h.m_grouped_bf16_gemm_nt_masked(
            *dims, version, settings, max_m=most, compiled_dims=compiled
        )
    else:
        gemm = h.m_grouped_fp8_gemm_nt_masked(
            *dims,
            version,
            settings,
            max_m=most,
            compiled_dims=compiled,
            major_sfb=_major(call["b_sf"], False),
            gran_k=_granularity(call)[1],
        )
    return Described(gemm, _expr(call.attr("expected_m")), m.expr)


def _einsum(case: _Case, groups: int, n: int, k: int) -> h.Gemm:
    call, version, settings, _ = case
    expr = str(call.attr("expr")).replace(" ", "")
    if call.op == "fp8_einsum":
        if expr != "bhr,hdr->bhd" or _granularity(call) != (128, 128):
            raise h.Unmodelled(f"fp8_einsum {expr!r} with recipe {call.attr('recipe')}")
        major = _major(call["b_sf"], False)
        return h.fp8_einsum_bhr_hdr_bhd(groups, n, k, version, settings, major_sfb=major)
    if expr == "bhr,hdr->bhd":
        return h.einsum_bhr_hdr_bhd(groups, n, k, version, settings)
    if expr == "bhd,hdr->bhr":
        return h.einsum_bhd_hdr_bhr(groups, k, n, version, settings)
    raise h.Unmodelled(f"einsum {expr!r}")


def _k_grouped(case: _Case, groups: int, m: int, n: int) -> Described:
    call, version, settings, compiled = case
    given = call.attr("ks")
    ks = [k for k in given if isinstance(k, int)] if isinstance(given, tuple) else []
    if not ks or not isinstance(given, tuple) or len(ks) != len(given):
        raise ValueError("the K of each group is not static; pass ks as plain numbers")
    if call.op == "k_grouped_bf16_gemm_tn_contiguous":
        gemm = h.k_grouped_bf16_gemm_tn_contiguous(
            groups,
            m,
            n,
            version,
            settings,
            d_dtype=_DTYPES[call["d"].dtype],
            with_accumulation="c" in call,
            compiled_dims=compiled,
        )
    elif call.op == "k_grouped_fp8_gemm_nt_contiguous":
        gemm = h.k_grouped_fp8_gemm_nt_contiguous(
            groups, m, n, version, settings, compiled_dims=compiled
        )
    else:
        raise h.Unmodelled(f"the kernels of {call.op}")
    return Described(gemm, str(max(ks)), str(m))


def place_of(call: KernelCall, places: tuple[tuple[str, int], ...]) -> Dim:
    """Return the dim at the first of ``places`` that the call has."""
    name, at = next((name, at) for name, at in places if name in call)
    return call[name].dims[at]


def _static(call: KernelCall, places: tuple[tuple[str, int], ...], what: str) -> int:
    dims = [call[name].dims[at] for name, at in places if name in call]
    for dim in dims:
        if dim.is_static:
            return int(dim)
    raise ValueError(f"{what} of {call} is not static; give the weight a static shape")


def _granularity(call: KernelCall) -> tuple[int, int]:
    """Return (N, K) elements of B behind one scale: (128, 128) unless a recipe says otherwise."""
    given = call.attr("recipe_b")
    if isinstance(given, tuple):
        gran_n, gran_k = (int(x) for x in given if isinstance(x, int))
        return gran_n, gran_k
    recipe = call.attr("recipe") or _SCALED
    if not isinstance(recipe, tuple) or not all(isinstance(x, int) for x in recipe):
        raise h.Unmodelled(f"the recipe {recipe}")
    numbers = [int(x) for x in recipe if isinstance(x, int)]
    return numbers[-2], numbers[-1]


def _major(spec: TensorSpec, transposed: bool) -> Major:
    """Return K if the last dim, after the transposition that the form implies, has stride 1."""
    if not spec.strides:
        last = len(spec.dims) - 1
        at = last - 1 if transposed else last
        inner = spec.dims[last]
        stride_one = at == last or (inner.is_static and int(inner) == 1)
    else:
        stride_one = spec.strides[-2 if transposed else -1] == "1"
    return "K" if stride_one else "MN"


def _refuse_fp4(call: KernelCall) -> None:
    for name in ("a", "b"):
        if call[name].dtype not in _DTYPES:
            raise h.Unmodelled(f"operands of type {call[name].dtype} in {call.op}")


def _expr(value: object) -> str:
    return value.expr if isinstance(value, Dim) else str(value)
