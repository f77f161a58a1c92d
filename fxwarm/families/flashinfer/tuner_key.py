"""The keys of FlashInfer's tuner: what one stored entry is good for, and the text that its file knows it by.

    cutlass_fused_moe(input=bf16[5, 2048], fc1=bf16[32, 1536, 2048], ..., top_k=8)
        -> ('trtllm::fused_moe::gemm1', 'MoERunner', ((8, 2048), (32, 1536, 2048), (0,), ...), (torch.bfloat16, ...))

Shapes with the tokens rounded up to their bucket, then every option that decides which tactics are valid. Pure: no
torch, no library. Source: ``get_cache_key_extras`` of FlashInfer 0.6.18.post1, 0.7.2.post1 and 0.7.4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fxwarm.families.flashinfer.entries import ENTRIES, OPTIONS
from fxwarm.families.flashinfer.match import FAMILY
from fxwarm.families.flashinfer.versions import Version
from fxwarm.records import CompileKey
from passes.records import KernelCall

__all__ = ["RANKS", "Entry", "bucket_in", "entries_at", "is_tuned", "options_of"]

RANKS = ("tp_rank", "ep_rank", "cluster_rank")
_MOE_PROFILE = (
    "input",
    "fc1_expert_weights",
    "fc1_expert_biases",
    "fc2_expert_weights",
    "fc2_expert_biases",
)
_NOT_TACTICS = ("tune_max_num_tokens", "profile_ids", "max_rows", "routed_scaling_factor")
"""Arguments that neither the tuner's key nor the list of valid tactics knows."""
_SHORT = {"trtllm::fused_moe::gemm1": "gemm1", "trtllm::fused_moe::gemm2": "gemm2"}


class _Dtype(str):
    """A dtype that shows itself as torch's does inside a tuple."""

    def __repr__(self) -> str:
        return f"torch.{self}"


class Entry(NamedTuple):
    """One entry of the tuner's table."""

    op: str
    """The tuner's own name of what is tuned."""
    runner: str
    profile: tuple[tuple[str, tuple[int, ...]], ...]
    """Tensors by name with their shapes; (0,) stands for one that is absent, -1 for a dim that does not count."""
    options: tuple[tuple[str, Any], ...]
    """What the library itself has in its key besides shapes."""
    more: tuple[tuple[str, Any], ...] = ()
    """Arguments that differ from their default and that the library does not tell apart."""

    @property
    def key(self) -> CompileKey:
        """The plan's name of this entry."""
        shapes = [f"{name}{list(shape)}" for name, shape in self.profile]
        named = [f"{name}={value}" for name, value in (*self.options, *self.more)]
        return CompileKey(FAMILY, _SHORT.get(self.op, self.op), (*shapes, *named), self.op)

    @property
    def file_key(self) -> str:
        """The text by which the library's tactics file knows this entry."""
        shapes = tuple(shape for _, shape in self.profile)
        return str((self.op, self.runner, shapes, tuple(value for _, value in self.options)))


def is_tuned(key: CompileKey) -> bool:
    """Whether ``key`` names an entry of the tuner's table, not a binary."""
    return any(key.tag in entry.tuned for entry in ENTRIES.values())


def bucket_in(key: CompileKey) -> int:
    """Return the bucket, in tokens, of a tuned entry's key: ``A[1, 8, 2048]`` of ``bmm_fp8`` is 8."""
    name, _, shape = key.template[0].rstrip("]").partition("[")
    entry = next(entry for entry in ENTRIES.values() if key.tag in entry.tuned)
    return int(shape.split(", ")[dict(entry.rows)[name]])


def entries_at(call: KernelCall, bucket: int, arch: str, version: Version) -> tuple[Entry, ...]:
    """Return the entries that ``call`` looks up with its tokens in ``bucket``: one, or one for each of two GEMMs.

    None where it is not tuned: in DeepSeek's block scale the tactic is ignored, ``profile_ids`` bypass the tuner.
    """
    if call.op == "cutlass_fused_moe":
        if (
            call.attr("use_deepseek_fp8_block_scale") is True
            or call.attr("profile_ids") is not None
        ):
            return ()
        profile = tuple((name, _shape(call, name, bucket)) for name in _MOE_PROFILE)
        options = tuple(
            (n, v) for n, v in options_of(call, arch) if version.ranks_in_key or n not in RANKS
        )
        more = _more(call, {name for name, _ in OPTIONS})
        return tuple(
            Entry(op, "MoERunner", profile, options, more) for op in ENTRIES[call.op].tuned
        )
    if call.op == "bmm_fp8":
        return (_bmm(call, bucket),)
    if ENTRIES[call.op].tuned:
        profile = tuple((name, _shape(call, name, bucket)) for name, _ in call.tensors)
        dtypes = tuple((f"{name}_dtype", _Dtype(spec.dtype)) for name, spec in call.tensors)
        return (Entry(ENTRIES[call.op].tuned[0], "MoERunner", profile, dtypes, _more(call, set())),)
    return ()


def options_of(call: KernelCall, arch: str) -> tuple[tuple[str, Any], ...]:
    """Return every option of ``cutlass_fused_moe`` that decides its tactics, in the library's order."""
    derived: dict[str, Any] = {
        "x_dtype": _Dtype(call["input"].dtype),
        "weight_dtype": _Dtype(call["fc1_expert_weights"].dtype),
        "output_dtype": _Dtype(str(call.attr("output_dtype", call["input"].dtype))),
        "top_k": int(call["token_selected_experts"].dims[1]),
        # None becomes "what the device can do", which is yes from SM90 on
        "enable_pdl": call.attr(
            "enable_pdl", int(arch.removeprefix("sm_").rstrip("af") or 0) >= 90
        ),
    }
    return tuple((name, derived.get(name, call.attr(name, default))) for name, default in OPTIONS)


def _bmm(call: KernelCall, bucket: int) -> Entry:
    batch, _, n = _shape(call, "B", 0)
    scales = tuple(
        (name, _shape(call, name, 0) if name in call else (1,)) for name in ("A_scale", "B_scale")
    )
    profile = (
        ("A", _shape(call, "A", bucket)),
        ("B", _shape(call, "B", 0)),
        *scales,
        ("out", (batch, -1, n)),
        ("workspace", (-1,)),
    )
    dtypes = {
        "a_dtype": call["A"].dtype,
        "b_dtype": call["B"].dtype,
        "out_dtype": str(call.attr("dtype", "bfloat16")),
    }
    options = tuple((name, _Dtype(value)) for name, value in dtypes.items())
    return Entry("fp8_gemm", "CublasFp8GemmRunner", profile, options, _more(call, {"dtype"}))


def _shape(call: KernelCall, name: str, bucket: int) -> tuple[int, ...]:
    """Return the shape of a tensor with its tokens, where it has any, at ``bucket``; (0,) where it is absent."""
    if name not in call:
        return (0,)
    place = dict(ENTRIES[call.op].rows).get(name)
    spec = call[name]
    return tuple(bucket if at == place else int(dim) for at, dim in enumerate(spec.dims))


def _more(call: KernelCall, known: set[str]) -> tuple[tuple[str, Any], ...]:
    named = {name: value for name, value in call.attrs if value is not None}
    return tuple(
        sorted((n, v) for n, v in named.items() if n not in known and n not in _NOT_TACTICS)
    )
