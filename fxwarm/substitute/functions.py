"""Which functions of which libraries have an op, and how a call of one is written as a call of the other.

    deep_gemm.fp8_gemm_nt((x, x_sf), (w, w_sf), d, compiled_dims="nk")
    {"a": x, "a_sf": x_sf, "b": w, "b_sf": w_sf, "d": d, "compiled_dims": "nk"}

Arguments are bound by the signature of the build at hand, as optional ones have moved between versions. No torch._dynamo
here: a value is whatever the caller passes.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxwarm.families.deep_gemm.entries import ENTRIES, OF_DTYPE, uncovered
from fxwarm.families.flashinfer import entries as flashinfer
from passes.records import Gap

log = logging.getLogger(__name__)

UNKNOWN = object()
"""A value that is not known while tracing: a tensor, a symbolic size."""


class Refused(Exception):
    """A call that no op can express. The text says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Substitute:
    """A function of a library and the op that stands for it in a graph.

    ``positional`` are its leading arguments under the op's names, "a,a_sf" being one that it takes as a pair;
    ``output`` the argument that the op cannot have, into which the result is copied; ``wraps`` says that the function
    returns a list. ``op`` is empty where there is none, and ``reason`` says why.
    """

    library: str
    name: str
    function: Any
    op: str = ""
    positional: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    output: str = ""
    wraps: bool = False
    reason: str = ""
    has_gradient: bool = False
    """Whether gradients flow through the function, as they do not through the op."""


def find_substitutes() -> dict[int, Substitute]:
    """Return the functions of the libraries that this process has imported, by the id of the function object.

    Imports nothing. A library whose ops torch knows by itself (sgl-deep-gemm from 0.2.3) needs no substitute.
    """
    found: dict[int, Substitute] = {}
    for library, homes, entries in _LIBRARIES:
        for home in homes:
            holder = sys.modules.get(home)
            for name, make in entries(holder).items() if holder is not None else ():
                function = getattr(holder, name, None)
                if callable(function) and not _is_op(function) and not _registers(library, name):
                    found.setdefault(id(function), make(library, name, function))
    return found


def check_build(known: Substitute) -> None:
    """Raise Refused unless the op calls the build that ``known.function`` is of: several may be installed."""
    from fxwarm.exc import LibraryError
    from fxwarm.ops import _library

    if known.library == "tile_kernels":  # one package, whose functions the ops import by name
        return
    try:
        module = _library.load_library(known.library)
    except LibraryError as error:
        raise Refused(str(error)) from error
    if known.library == "deep_gemm" and getattr(module, known.name, None) is not known.function:
        raise Refused(
            f"the ops call {module.__name__}, this is another build; name this one with fxwarm.ops.use_library"
        )


def bind(
    known: Substitute,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    constant: Callable[[Any], Any],
    unpack: Callable[[Any], Sequence[Any]],
) -> tuple[dict[str, Any], Any]:
    """Return the arguments of the op by name, and the tensor that the result goes to, if the call names one.

    ``constant`` gives the Python value of an argument, or UNKNOWN; ``unpack`` the parts of a tuple or list. Raises
    Refused where the op lacks an argument that the call sets.
    """
    names, defaults = parameters(known.function)
    names = (*known.positional, *names[len(known.positional) :])
    aliases = dict(zip(parameters(known.function)[0], names, strict=False))
    if len(args) > len(names):
        raise Refused(f"it gets {len(args)} positional arguments, of which {len(names)} are known")
    given: dict[str, Any] = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        given[_part_of(known, aliases.get(name, name))] = value
    output = given.pop(known.output, None) if known.output else None
    if output is not None and constant(output) is None:
        output = None
    out: dict[str, Any] = {}
    for part in known.positional:
        if part not in given:
            raise Refused(f"it lacks the argument {part.partition(',')[0]}")
        value = given.pop(part)
        if "," not in part:
            out[part] = value
            continue
        parts = unpack(value)
        if len(parts) != part.count(",") + 1:
            raise Refused(f"{part.partition(',')[0]} is no pair of a tensor and its scales")
        out.update(zip(part.split(","), parts, strict=True))
    if constant(out.pop("q_sf", None)) is not None:
        raise Refused("its queries are FP4, for which there is no op")
    for name, value in given.items():
        if name in known.optional and (name, str(constant(value))) != _FLOAT32_LOGITS:
            out[name] = value
        elif not _is_default(constant(value), name, defaults):
            raise Refused(f"the op has no argument {name}")
    return out, output


def parameters(function: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of the parameters of ``function`` in order, and their defaults; empty where none can be told.

    A pybind11 function has no signature, but its docstring begins with one.
    """
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        head = (getattr(function, "__doc__", None) or "").partition("->")[0]
        return tuple(re.findall(r"[(,]\s*(\w+):", head)), {}
    plain = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return tuple(p.name for p in plain), {
        p.name: p.default for p in plain if p.default is not p.empty
    }


def refuse(known: Substitute, reason: str, place: str = "") -> None:
    """Note that a call stays as it is; the graph that is being traced gets a gap."""
    gap = Gap(
        f"{known.library}.{known.name}",
        f"{reason}; the call is left as it is and not warmed",
        place,
    )
    _refused[gap] = None
    if (
        gap not in _said
    ):  # the graph may be one that never comes: nothing may be left of it but this call
        _said[gap] = None
        log.warning("fxwarm: %s", gap)


def take_refusals() -> tuple[Gap, ...]:
    """Return the gaps noted since the last call, and forget them."""
    gaps = tuple(_refused)
    _refused.clear()
    return gaps


_refused: dict[Gap, None] = {}
_said: dict[Gap, None] = {}
_FLOAT32_LOGITS = ("logits_dtype", "torch.float32")
"""A default that a pybind11 function does not name."""
_QUIET = ("ensure_zero_padding", "fuse_grad_acc")
"""Arguments that change nothing that one may rely on: zeroed padding, and how gradients are added up."""


def _deep_gemm(holder: Any) -> dict[str, Callable[..., Substitute]]:
    found = {name: _deep_gemm_substitute for entry in ENTRIES.values() for name in entry.names}
    others = {name: reason for name in vars(holder) if (reason := uncovered(name))}
    gaps = {name: _gap(reason) for name, reason in others.items()}
    return {**gaps, **found, **dict.fromkeys(_EITHER, _either)}


_EITHER = {name: op for op, name in OF_DTYPE.items()}
"""Functions that take FP4 queries with their scales or FP8 ones without, and the op for the latter."""


def _either(library: str, name: str, function: Any) -> Substitute:
    made = _deep_gemm_substitute(library, _EITHER[name], function)
    positional = tuple("q,q_sf" if part == "q" else part for part in made.positional)
    return dataclasses.replace(made, name=name, positional=positional)


def _gap(reason: str) -> Callable[..., Substitute]:
    """Return what makes the substitute of a function that no op stands for."""

    def make(library: str, name: str, function: Any) -> Substitute:
        return Substitute(library, name, function, reason=reason)

    return make


def _deep_gemm_substitute(library: str, name: str, function: Any) -> Substitute:
    entry = next(e for e in ENTRIES.values() if name in e.names)
    optional = frozenset(entry.optional) & frozenset(_op_arguments(entry.op))
    return Substitute(library, name, function, entry.op, entry.positional, optional)


def _flashinfer(holder: Any) -> dict[str, Callable[..., Substitute]]:
    names = {*flashinfer.ENTRIES, *flashinfer.UNCOVERED}
    return {name: _by_name if _op_arguments(name) else _gap(_without_op(name)) for name in names}


def _without_op(name: str) -> str:
    more = flashinfer.UNCOVERED.get(name)
    return f"fxwarm has no op for {name}" + (f": {more}" if more else "")


_TILE_KERNELS = {
    "mhc_post": "mhc_post_fwd",
    **{
        name: name
        for name in (
            "mhc_pre_big_fuse", "mhc_post_fwd", "mhc_pre_norm_fn", "mhc_pre_split_mixes",
            "sinkhorn_normalize", "mhc_pre_apply_mix", "mhc_head_compute_mix", "expand_to_mhc",
        )
    },
}  # fmt: skip
_NO_OP = {
    "mhc_post_bwd": "it is a backward pass",
    "mhc_multilayer_recompute": "its kernel has the number of layers in it",
}


def _tile_kernels(holder: Any) -> dict[str, Callable[..., Substitute]]:
    gaps = {n: _gap(f"fxwarm has no op for {n}: {why}") for n, why in _NO_OP.items()}
    return {**gaps, **dict.fromkeys(_TILE_KERNELS, _tile_kernel)}


def _tile_kernel(library: str, name: str, function: Any) -> Substitute:
    made = _by_name(library, name, function, op=_TILE_KERNELS[name])
    return dataclasses.replace(made, output="out", has_gradient=True)


def _by_name(library: str, name: str, function: Any, op: str = "") -> Substitute:
    op = op or name
    arguments = _op_arguments(op)
    required = tuple(n for n, has_default in arguments.items() if not has_default)
    known = parameters(function)[0]
    # what the library lets one leave out may be required by the op, and the other way round
    positional = tuple(n for n in known if n in required) or required
    while positional and known[: len(positional)] != positional:
        positional = positional[:-1]
    optional = frozenset(arguments) - frozenset(positional)
    output = "out" if name == "bmm_fp8" else "output"
    return Substitute(
        library,
        name,
        function,
        op,
        positional,
        optional,
        output,
        wraps=name == "cutlass_fused_moe",
    )


_LIBRARIES: tuple[
    tuple[str, tuple[str, ...], Callable[[Any], dict[str, Callable[..., Substitute]]]], ...
] = (
    ("deep_gemm", ("deep_gemm", "vllm.third_party.deep_gemm"), _deep_gemm),
    ("flashinfer", ("flashinfer", "flashinfer.fused_moe", "flashinfer.gemm"), _flashinfer),
    ("tile_kernels", ("tile_kernels.modeling.mhc.ops",), _tile_kernels),
)


def _op_arguments(op: str) -> dict[str, bool]:
    """Return the arguments of ``fxwarm::op`` with whether each has a default; empty where there is no such op."""
    import torch

    import fxwarm.ops  # noqa: F401  (defines the ops)

    packet = getattr(torch.ops.fxwarm, op, None)
    if packet is None:
        return {}
    return {a.name: a.has_default_value() for a in packet.default._schema.arguments}


def _registers(library: str, name: str) -> bool:
    import torch

    if library != "deep_gemm":
        return False
    names = next((e.names for e in ENTRIES.values() if _EITHER.get(name, name) in e.names), (name,))
    return any(hasattr(torch.ops.deep_gemm, n) for n in names)


def _is_op(function: Any) -> bool:
    import torch

    return isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def _part_of(known: Substitute, name: str) -> str:
    """Return the positional part called ``name``: the pair "a,a_sf" is passed as ``a=``."""
    return next((p for p in known.positional if p.partition(",")[0] == name), name)


def _is_default(value: Any, name: str, defaults: Mapping[str, Any]) -> bool:
    if value is UNKNOWN:
        return False
    if value is None or name in _QUIET or (name, str(value)) == _FLOAT32_LOGITS:
        return True
    if name in defaults:
        return type(value) is type(defaults[name]) and bool(value == defaults[name])
    return value is False  # a pybind11 function names no defaults that we can read
