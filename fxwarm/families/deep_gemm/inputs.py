"""Synthetic inputs for one launch of a witness: legal, finite, small, the same on every run.

Pure but for torch's allocations: no random numbers, nothing read from the model. Group ids are
aligned and whole (a misaligned group hangs, DeepGEMM#178), scales are ones (garbage trips a device
assert, vllm#49783), the rows of a masked call are few whatever the model's own maximum is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from fxwarm.families.deep_gemm import shapes
from fxwarm.families.deep_gemm.keys import strides_of
from passes.records import Dim, KernelCall, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["arguments", "bytes_of", "group_ids", "is_in_place", "legal", "make_tensor", "span"]

ALIGNMENT = 128
"""Rows that each group starts on, unless the library was told otherwise."""
_FP8_ONE = 0x38  # 1.0 in e4m3: any one code that is not NaN would do
_UE8M0_ONE = 0x7F  # 2**0: four of them are packed into an int32
ITEM = {
    "float8_e4m3fn": 1, "uint8": 1, "int8": 1, "bool": 1, "bfloat16": 2, "float16": 2,
    "float32": 4, "int32": 4, "float64": 8, "int64": 8,
}  # fmt: skip
"""Bytes of an element, by dtype."""


def legal(witness: KernelCall, alignment: int = ALIGNMENT) -> KernelCall:
    """Return the smallest call with the witness's kernel that the library can run.

    Contiguous groups: M is rounded up to whole blocks, which share a kernel (1 row in 1 group
    becomes 128, 129 rows become 256). Masked: max_m shrinks to what ``expected_m`` rows need, since
    the kernel follows ``expected_m`` alone. All else is as it is.
    """
    where = shapes.form(witness.op, dict(witness.attrs))
    if where is None or "m_grouped" not in witness.op or "m" in str(witness.attr("compiled_dims")):
        return witness
    m = int(witness["a"].dims[where.m[0][1]])
    if "masked" in witness.op:
        expected = int(str(witness.attr("expected_m")))
        new = min(m, _align(expected, alignment))
    else:
        new = _align(m, alignment)
    if new == m:
        return witness
    places = {("a", where.m[0][1]), ("d", where.m[1][1]), ("a_sf", where.m[0][1])}
    if not witness.attr("use_psum_layout") and "grouped_layout" in witness:
        places.add(("grouped_layout", 0))
    tensors = tuple(
        (name, _resized(spec, next((at for n, at in places if n == name), None), m, new))
        for name, spec in witness.tensors
    )
    return msgspec.structs.replace(witness, tensors=tensors)


def _resized(spec: TensorSpec, at: int | None, old: int, new: int) -> TensorSpec:
    """Return ``spec`` with dim ``at`` of size ``new``, in the layout it had."""
    if at is None:
        return spec
    dims = list(spec.dims)
    dims[at] = Dim.static(new)
    known = {_align(old, 4): _align(new, 4), old: new}  # MN-major, padded to 16 bytes or not
    numbers = [int(s) for s in spec.strides]
    strides = [known.get(s, s) for s in numbers]
    if len(strides) == 3:  # groups: as many whole inner extents as before
        wide = max(range(1, 3), key=lambda i: strides[i])
        strides[0] = strides[wide] * int(dims[wide])
    return TensorSpec(spec.dtype, tuple(dims), tuple(map(str, strides)))


def span(spec: TensorSpec) -> int:
    """Return how many elements of storage a static tensor takes, padding included."""
    dims, strides = [int(d) for d in spec.dims], [int(s) for s in strides_of(spec)]
    if any(d == 0 for d in dims):
        return 0
    whole = 1 + sum((d - 1) * s for d, s in zip(dims, strides, strict=True))
    # an MN-major tensor is read by whole columns, so its last one is allocated in full
    return max(whole, max((d * s for d, s in zip(dims, strides, strict=True)), default=1))


def is_in_place(call: KernelCall) -> bool:
    """Return whether C of a call can be D itself: a sum over the batch demands that, all other ops allow it.

    The kernel is the same: the others copy C into D where it is another tensor (DeepGEMM ``early_return``).
    """
    if "c" not in call:
        return False
    c, d = call["c"], call["d"]
    return (c.dtype, c.dims, strides_of(c)) == (d.dtype, d.dims, strides_of(d))


def bytes_of(call: KernelCall) -> int:
    """Return the device memory that the tensors of a static call take."""
    own = [spec for name, spec in call.tensors if name != "c" or not is_in_place(call)]
    return sum(span(spec) * ITEM.get(spec.dtype, 8) for spec in own)


def group_ids(rows: int, groups: int, alignment: int = ALIGNMENT) -> list[int]:
    """Return one group id a row: whole blocks of ``alignment`` rows, ascending, 0 to groups - 1.

    Raises ValueError for a number of rows that is no multiple of ``alignment``.
    """
    if rows % alignment:
        raise ValueError(f"{rows} rows are no whole blocks of {alignment}; round them up first")
    blocks = rows // alignment
    return [block * groups // blocks for block in range(blocks) for _ in range(alignment)]


def arguments(
    call: KernelCall, device: torch.device, live: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return every argument of a legal static call by name.

    ``live`` are the model's own tensors (its weights), used where they are just what is wanted.
    """
    import torch

    values: dict[str, Any] = {}
    in_place = is_in_place(call)
    for name, spec in call.tensors:
        if in_place and name == "c":
            continue
        mine = (live or {}).get(name)
        if mine is not None and name in ("b", "b_sf") and _is_like(mine, spec, device):
            values[name] = mine
        else:
            values[name] = make_tensor(name, spec, device)
    if in_place:
        values["c"] = values["d"]
    values.update({n: v for n, v in call.attrs if v is not None})
    if "grouped_layout" in values:
        layout, groups = values["grouped_layout"], int(call["b"].dims[0])
        if call.attr("use_psum_layout"):
            layout.fill_(int(call["a"].dims[0]))  # group 0 has all rows, the others none
        elif call.op.startswith("m_grouped"):
            ids = group_ids(layout.numel(), groups)
            layout.copy_(torch.tensor(ids, dtype=layout.dtype))
        else:
            ks = call.attr("ks")
            layout.copy_(torch.tensor(ks, dtype=layout.dtype))
    if "context_lens" in values:
        # where no sequence has a key, the kernel of sgl-deep-gemm 0.1.5.post1 reads past its sums
        values["context_lens"].fill_(1)
    if "masked_m" in values:
        rows = int(call["a"].dims[1])
        values["masked_m"].fill_(min(rows, int(str(call.attr("expected_m")))))
    return values


def make_tensor(name: str, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Return one tensor of a static call, its padding filled as well.

    Scales and values are ones; a packed scale holds four times 2**0; integers are zeros.
    """
    import torch

    size, dtype = span(spec), getattr(torch, spec.dtype)
    if spec.dtype.startswith("float8"):
        flat = torch.full((size,), _FP8_ONE, dtype=torch.uint8, device=device).view(dtype)
    elif name.endswith("_sf") and spec.dtype == "int32":
        flat = torch.full((4 * size,), _UE8M0_ONE, dtype=torch.uint8, device=device).view(dtype)
    elif dtype.is_floating_point:
        flat = torch.ones(size, dtype=dtype, device=device)
    else:
        flat = torch.zeros(size, dtype=dtype, device=device)
    return flat.as_strided([int(d) for d in spec.dims], [int(s) for s in strides_of(spec)])


def _is_like(tensor: Any, spec: TensorSpec, device: Any) -> bool:
    dims, strides = [int(d) for d in spec.dims], [int(s) for s in strides_of(spec)]
    return (
        list(tensor.shape) == dims
        and list(tensor.stride()) == strides
        and str(tensor.dtype).removeprefix("torch.") == spec.dtype
        and tensor.device == device
        and tensor.data_ptr() % 16 == 0
    )


def _align(value: int, to: int) -> int:
    return math.ceil(value / to) * to
