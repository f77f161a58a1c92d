"""The modelled plan: every kernel that collected calls can need, by the heuristics, with a witness.

Pure arithmetic over the attainable sizes: no library imported, no device touched. What the model
does not know becomes a gap; with a GPU the recorder answers instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fxwarm.families.deep_gemm import heuristics as h
from fxwarm.families.deep_gemm import shapes
from fxwarm.families.deep_gemm.describe import describe, place_of, settings_of, version_of
from fxwarm.families.deep_gemm.entries import NO_MODEL, spelling
from fxwarm.families.deep_gemm.match import FAMILY
from fxwarm.families.mhc import splits
from fxwarm.records import CompileKey, Library, Planned, Target
from passes.records import Dim, Gap, KernelCall, TensorSpec

if TYPE_CHECKING:
    from passes.bound import Image

__all__ = ["goes_to_cublaslt", "image_of", "key_of", "keys", "strides_of", "witness_at"]


def keys(calls: Sequence[KernelCall], target: Target, library: Library) -> Iterator[Planned | Gap]:
    """Yield each distinct kernel that ``calls`` can need on ``target``, and what is not modelled.

    The witness is the call with the smallest attainable M among all calls that share the kernel.
    On a CPU target every call runs as a reference implementation: nothing to yield.
    """
    if target.device == "cpu":
        return
    try:
        version, settings = version_of(library), settings_of(target, library)
    except ValueError as error:
        for call in calls:
            yield Gap(call.op, str(error), family=FAMILY)
        return
    found: dict[CompileKey, tuple[int, Planned]] = {}
    for unresolved in calls:
        call = unresolved
        try:
            call = splits.resolve(call, target.num_sms)
            for kernel, rows, witness in _kernels(call, version, settings, library):
                key = key_of(kernel)
                if key not in found or rows < found[key][0]:
                    found[key] = (rows, Planned(key, witness()))
        except ValueError as error:
            yield Gap(call.op, f"{call}: {error}", family=FAMILY)
    for _, planned in sorted(found.values(), key=lambda item: item[0]):
        yield planned


def key_of(kernel: h.Kernel) -> CompileKey:
    """Return the plan's name of a kernel."""
    return CompileKey(FAMILY, kernel.kernel, kernel.template, kernel.tag)


_Found = tuple[h.Kernel, int, Callable[[], KernelCall]]
"""A kernel, the M of its witness, and how to make that."""


def _kernels(
    call: KernelCall, version: h.Version, settings: h.Settings, library: Library
) -> Iterator[_Found]:
    canonical = spelling(call.op)
    if canonical is None or canonical in NO_MODEL:
        raise h.Unmodelled(NO_MODEL.get(call.op, f"the kernels of {call.op}"))
    if call.op == "tf32_hc_prenorm_gemm":
        yield from _prenorm(call, settings)
    elif call.op == "get_paged_mqa_logits_metadata":
        yield from _metadata(call, version, settings)
    elif call.op == "einsum" and str(call.attr("expr")).replace(" ", "") == "bmk,bnk->mn":
        yield from _split_einsum(call, settings)
    elif not _through_cublaslt(call, version, settings, library):
        yield from _gemm(call, version, settings)
        if "a_sf" in call:
            yield from _layout(call, version, settings)


def _gemm(call: KernelCall, version: h.Version, settings: h.Settings) -> Iterator[_Found]:
    described = describe(call, version, settings)
    image = image_of(call, described.swept, described.rows)
    values = np.unique(image.rows[image.rows[:, 1] > 0, 0])
    for kernel, value in h.gemm_kernels(described.gemm, values, version).items():
        at = _first(image, 0, value)
        yield kernel, int(image.rows[at, 1]), witness_at(call, image, at)


def _layout(call: KernelCall, version: h.Version, settings: h.Settings) -> Iterator[_Found]:
    """Scales that are contiguous go through a kernel of their own, also where M = 1 makes them so."""
    for name in ("a_sf", "b_sf"):
        spec = call[name]
        if spec.dtype != "float32" or (name == "b_sf" and not _per_row(call, settings)):
            continue
        order = _order(call, name)
        dims = [spec.dims[i].expr for i in order]
        strides = [strides_of(spec)[i] for i in order]
        where = shapes.form(call.op, dict(call.attrs))
        rows = place_of(call, where.m).expr if where else dims[-2]
        image = image_of(call, rows, *dims, *strides)
        seen: set[h.Kernel] = set()
        widths: set[int] = set()
        for at, row in enumerate(image.rows.tolist()):
            if row[0] < 1:
                continue  # the library returns before it looks at the scales
            shape, stride = row[1 : 1 + len(dims)], row[1 + len(dims) :]
            if settings.arch == 90:
                if shape[-1] in widths:
                    continue  # whatever the rest of it is: on SM90 a width has one kernel or none
                kernel = h.get_mn_major_tma_aligned_tensor(shape, stride, version)
            else:
                kernel = _packed(call, name, shape, stride, version)
            if kernel is not None and kernel not in seen:
                seen.add(kernel)
                widths.add(shape[-1])
                yield kernel, row[0], witness_at(call, image, at)


def _order(call: KernelCall, name: str) -> list[int]:
    """Return the dims of scales in the order in which the library looks at them."""
    order = list(range(len(call[name].dims)))
    forms = call.op.split("_")
    if call.op == "fp8_einsum" and name == "a_sf":
        order[:2] = [1, 0]
    elif "nn" in forms or "tn" in forms or "tt" in forms:
        form = next(f for f in forms if f in ("nn", "tn", "tt"))
        if (name == "a_sf" and form[0] == "t") or (name == "b_sf" and form[1] == "n"):
            order[-2:] = [order[-1], order[-2]]  # the form passes this operand transposed
    return order


def _packed(
    call: KernelCall, name: str, shape: list[int], stride: list[int], version: h.Version
) -> h.Kernel | None:
    """SM100 packs scales of B too, once they are broadcast to rows; it knows the psum layout."""
    psum = call.attr("use_psum_layout") is True and name == "a_sf"
    if name == "b_sf":
        where = shapes.form(call.op, dict(call.attrs))
        assert where is not None
        n = int(place_of(call, where.n))
        shape = [*shape[:-2], n, shape[-1]]
        stride = [n * shape[-1], shape[-1], 1][-len(shape) :]
    return h.get_mn_major_tma_aligned_packed_ue8m0_tensor(
        shape, stride, version, psum_groups=int(call["b"].dims[0]) if psum else None
    )


def _per_row(call: KernelCall, settings: h.Settings) -> bool:
    """Whether the scales of B go through a layout kernel: per row (1D1D), and always on SM100."""
    if settings.arch != 90:
        return True
    recipe = call.attr("recipe")
    per_row = isinstance(recipe, tuple) and recipe[-2] == 1
    return per_row or call.op.startswith("k_grouped")


def _prenorm(call: KernelCall, settings: h.Settings) -> Iterator[_Found]:
    n, k = (int(d) for d in call["b"].dims)
    splits = call.attr("num_splits")
    expr = splits.expr if isinstance(splits, Dim) else str(splits or 1)
    image = image_of(call, expr, call["a"].dims[0].expr)
    for value in np.unique(image.rows[image.rows[:, 1] > 0, 0]).tolist():
        at = _first(image, 0, value)
        kernel = h.tf32_hc_prenorm_gemm(n, k, value, settings.arch)
        yield kernel, int(image.rows[at, 1]), witness_at(call, image, at)


def _metadata(call: KernelCall, version: h.Version, settings: h.Settings) -> Iterator[_Found]:
    import dataclasses

    sms = call.attr("num_sms", settings.num_sms)
    image = image_of(call, call["context_lens"].dims[0].expr)
    settings = dataclasses.replace(settings, num_sms=int(str(sms)))
    batches = h.paged_mqa_logits_metadata_kernels(image.rows[:, 0], version, settings)
    for kernel, batch in batches.items():
        yield kernel, batch, witness_at(call, image, _first(image, 0, batch))


def _split_einsum(call: KernelCall, settings: h.Settings) -> Iterator[_Found]:
    m, k = (int(d) for d in call["a"].dims[1:])
    image = image_of(call, call["a"].dims[0].expr)
    found = h.einsum_bmk_bnk_mn_kernels(m, int(call["b"].dims[1]), k, image.rows[:, 0], settings)
    for kernel, batch in found.items():
        yield kernel, batch, witness_at(call, image, _first(image, 0, batch))


def _through_cublaslt(
    call: KernelCall, version: h.Version, settings: h.Settings, library: Library
) -> bool:
    """Dense bf16 GEMMs of generation B compile nothing unless determinism is asked for."""
    given = dict(library.settings)
    return call.op.startswith("bf16_gemm") and h.uses_cublaslt(
        version,
        deterministic=given.get("deterministic") == "True",
        num_sms=settings.num_sms,
        device_sms=int(given.get("device_sms", settings.num_sms)),
    )


def goes_to_cublaslt(call: KernelCall, target: Target, library: Library) -> bool:
    """Return whether ``library`` hands ``call`` to cuBLASLt, so that it compiles nothing."""
    try:
        return _through_cublaslt(call, version_of(library), settings_of(target, library), library)
    except ValueError:  # an unknown build: its gap says so
        return False


def strides_of(spec: TensorSpec) -> tuple[str, ...]:
    """Return a tensor's strides as expressions, those of a contiguous one spelled out."""
    if spec.strides:
        return spec.strides
    found = []
    for at in range(len(spec.dims)):
        behind = spec.dims[at + 1 :]
        if all(d.is_static for d in behind):
            found.append(str(math.prod(int(d) for d in behind)))
        else:
            found.append("*".join(f"({d.expr})" for d in behind))
    return tuple(found)


def image_of(call: KernelCall, *exprs: str) -> Image:
    """Return the attainable values of expressions over a call, in ``passes.bound``'s order.

    Raises ValueError for a dim without an upper bound.
    """
    from passes import bound

    return bound.image(call, *exprs)


def _first(image: Image, column: int, value: int) -> int:
    """Return the first row that has ``value``: rows are sorted, so the one with the smallest M > 0."""
    fits = (image.rows[:, column] == value) & (image.rows[:, -1] > 0)
    return int(np.flatnonzero(fits)[0])


def witness_at(call: KernelCall, image: Image, row: int) -> Callable[[], KernelCall]:
    """Return what makes the static call at one row of an image."""

    def make() -> KernelCall:
        from passes import bound

        witness: Any = bound.at(call, image.at(row))
        assert isinstance(witness, KernelCall)
        return witness

    return make
