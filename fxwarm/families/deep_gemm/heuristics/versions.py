"""Which builds of DeepGEMM are known, and what each does its own way.

Three models of the SM90 heuristics: *old* (waves, fewest SMs), *mid* (waves), *new* (cycles).
Two JIT generations, A and B. The template of a kernel is longer in some builds than in others.
None in a field means that the build's host code could not be read: what depends on it raises
``Unmodelled``.

Sources: upstream commits by their host code; sgl-deep-gemm and tokenspeed-deepgemm by what their
wheels generated, 2026-04 to 2026-10.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from fxwarm.families.deep_gemm.heuristics.errors import UnknownVersion

__all__ = ["Version", "default_compiled_dims", "newest", "resolve_version", "uses_cublaslt"]

SGL, TOKENSPEED, UPSTREAM = "sgl-deep-gemm", "tokenspeed-deepgemm", "deep-gemm"
_MASKED = "m_grouped_fp8_gemm_nt_masked"
_K_GROUPED = ("k_grouped_fp8_gemm_nt_contiguous", "k_grouped_bf16_gemm_tn_contiguous")


@dataclass(frozen=True)
class Version:
    """One build of the library, as far as the heuristics and the templates go."""

    distribution: str
    number: str
    """The full version; for upstream the abbreviated commit."""
    heuristics: Literal["old", "mid", "new"]
    jit: Literal["A", "B"] = "A"
    tail: tuple[str, ...] | None = ()
    """Last template arguments of 1D2D kernels: of cd_dtype, epilogue, sf_gran."""
    dense_dims: str = "nk"
    """Default ``compiled_dims`` of dense ``_nt`` and ``_nn`` calls."""
    wide_tiles_compile_n: bool | None = False
    """Dense 1D2D with block 128 x >128 and no cluster has N literal whatever compiled_dims say."""
    late_tensor_memory: bool | None = None
    """SM100: the accumulator is counted once (late) or twice (early) in tensor memory."""
    mk_steps: tuple[int, int] | None = None
    """SM100: largest and step of ``get_theoretical_mk_alignment_for_contiguous_layout``."""
    transpose_arity: int | None = 3
    """Template arguments of ``transpose_fp32``."""
    pack_psum: bool | None = None
    """SM100: pack kernels have the psum layout in their template."""
    metadata: tuple[str, int] | None = None
    """Prefix and template arguments of the SM90 ``paged_mqa_logits_metadata``."""
    lacks: frozenset[str] = frozenset()
    """Calls that other versions export and this one does not."""

    def exports(self, name: str) -> bool:
        """Return whether the call ``name`` of the library is there, as far as is known."""
        return name not in self.lacks


_EPI: tuple[str, ...] = ("epilogue",)
_CD_EPI: tuple[str, ...] = ("cd_dtype", "epilogue")
_COMMITS = (
    Version(UPSTREAM, "79f48ee", "old", pack_psum=False, lacks=frozenset(_K_GROUPED)),
    Version(UPSTREAM, "0f5f266", "mid", tail=_EPI, pack_psum=False, metadata=("smxx", 3)),
    Version(UPSTREAM, "d30fc36", "mid", tail=_EPI, pack_psum=False, metadata=("smxx", 3)),
    Version(
        UPSTREAM, "7f2a703", "new", tail=_EPI, late_tensor_memory=False, pack_psum=False,
        metadata=("sched::smxx", 3),
    ),
    Version(
        UPSTREAM, "a6b593d", "new", tail=_CD_EPI, pack_psum=False, metadata=("sched::smxx", 4)
    ),
    Version(
        UPSTREAM, "54e2261", "new", tail=_CD_EPI, late_tensor_memory=False, mk_steps=(224, 32),
        pack_psum=True, metadata=("sched::sm90", 4),
    ),
)  # fmt: skip
_TOKENSPEED = (
    Version(TOKENSPEED, "2.5.0.post20260424", "new", tail=_EPI),
    Version(TOKENSPEED, "2.5.0.post20260604", "new", tail=_CD_EPI),
    Version(TOKENSPEED, "2.5.0.post20260629", "new", tail=_CD_EPI),
    Version(
        TOKENSPEED, "2.8.2.post20261020", "new", "B", tail=("cd_dtype",), late_tensor_memory=True,
        mk_steps=(256, 0), transpose_arity=None,
    ),
)  # fmt: skip
_KNOWN = (
    "sgl-deep-gemm 0.1.0 to 0.1.7 and 0.2.0 to 0.2.5, "
    f"tokenspeed-deepgemm {', '.join(v.number for v in _TOKENSPEED)}, "
    f"deep-gemm built from commit {', '.join(v.number for v in _COMMITS)}"
)


def resolve_version(distribution: str, number: str) -> Version:
    """Return what is known of an installed or named build.

    ``distribution`` is its name in the package metadata, since ``deep_gemm.__version__`` is not
    an identity; ``number`` its full version. Upstream is known by commit, which its builds carry
    as local version (``2.5.0+54e2261``); the bare commit is taken too.

    Raises UnknownVersion, which lists the known ones; so for the 1.0.0 of 2025, another library.
    """
    name = re.sub(r"[-_.]+", "-", distribution).lower()
    found: Version | None = None
    if name == SGL:
        found = _resolve_sgl(number)
    elif name == TOKENSPEED:
        found = next((v for v in _TOKENSPEED if v.number == number), None)
    elif name == UPSTREAM:
        commit = number.rpartition("+")[2]
        found = next((v for v in _COMMITS if commit.startswith(v.number)), None)
    if found is None:
        raise UnknownVersion(distribution, number, _KNOWN)
    return found


def newest(distribution: str = SGL) -> Version:
    """Return the latest known build of a distribution."""
    latest = {SGL: "0.2.5", TOKENSPEED: _TOKENSPEED[-1].number, UPSTREAM: _COMMITS[-1].number}
    return resolve_version(distribution, latest.get(distribution, "?"))


def _resolve_sgl(number: str) -> Version | None:
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", number)
    if match is None:
        return None
    at = tuple(int(part or 0) for part in match.groups())
    base = Version(SGL, number, "new", dense_dims="")
    if (0, 1, 0, 0) <= at <= (0, 1, 7, 0):
        # 0.1.0 and 0.1.1 were not looked at for k-grouped calls; 0.1.2 has none
        missing = {_MASKED, "set_ignore_compile_dims", *_K_GROUPED} if at[2] == 2 else {_MASKED}
        tail = _EPI if at <= (0, 1, 3, 0) else _CD_EPI if at >= (0, 1, 4, 0) else None
        return replace(
            base,
            tail=tail,
            late_tensor_memory=False,
            mk_steps=(240, 16) if at == (0, 1, 2, 0) else None,
            metadata=("sched::sm90", 4) if at == (0, 1, 5, 1) else None,
            lacks=frozenset(missing),
        )
    if not (0, 2, 0, 0) <= at <= (0, 2, 5, 0):
        return None
    tail = (
        _CD_EPI
        if at <= (0, 2, 1, 1)
        else ("cd_dtype", "epilogue", "sf_gran")
        if (0, 2, 2, 0) <= at <= (0, 2, 3, 2)
        else ("cd_dtype", "sf_gran")
        if at == (0, 2, 5, 0)
        else None
    )
    last = at == (0, 2, 5, 0)
    return replace(
        base,
        jit="B",
        tail=tail,
        wide_tiles_compile_n=True if last else None,
        late_tensor_memory=True if last else None,
        transpose_arity=4 if last else None,
    )


def default_compiled_dims(op: str, version: Version) -> str:
    """Return the ``compiled_dims`` that the library uses when the call ``op`` names none.

    ``op`` is a name of the library: ``fp8_gemm_nt``, ``m_grouped_bf16_gemm_nt_masked``, ...
    """
    if op.startswith("k_grouped"):
        return "mn"
    if "m_grouped" in op or "einsum" in op:
        return "nk"
    if version.distribution == SGL:
        return ""
    # upstream exposes _tn and _tt with M literal: one kernel for each M
    return "mn" if op.endswith(("_tn", "_tt")) else version.dense_dims


def uses_cublaslt(version: Version, *, deterministic: bool, num_sms: int, device_sms: int) -> bool:
    """Return whether dense ``bf16_gemm_*`` calls go to cuBLASLt, which compiles nothing.

    Generation B does so unless ``use_deterministic_algorithms(True)`` or fewer SMs are set.
    """
    return version.jit == "B" and not deterministic and num_sms >= device_sms
