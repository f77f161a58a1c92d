"""The recorder's tensors: arguments at any size out of a few buffers, for launches that do nothing.

Imported by the recorder's child, so nothing heavy here: torch is handed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["GIVE_UP", "Buffers", "Call", "is_in_place", "unread_in"]

GIVE_UP = 8
"""Failures of one call without a success after which its other sizes are left out."""
OPERANDS = ("a", "b", "d", "kv_cache")
"""Tensors that may be large, and that share one buffer: no launch does anything with them."""
UNREAD = ("a", "b", "kv_cache")
"""Operands that only the kernels read, whatever the call."""


def unread_in(op: str, tensors: Iterable[str], attrs: dict[str, Any]) -> tuple[str, ...]:
    """Return the operands of a call that nothing but its kernel touches.

    D too, unless C is copied into it or it is cleared first (DeepGEMM ``csrc/apis/gemm.hpp``).
    """
    plain = op.startswith(("fp8_gemm", "bf16_gemm", "m_grouped")) and "c" not in tensors
    return (*UNREAD, "d") if plain and not attrs.get("ensure_zero_padding") else UNREAD


def is_in_place(tensors: dict[str, Any]) -> bool:
    """Return whether C can be D itself, as ``inputs.is_in_place``, of tensors in the child's words."""
    return "c" in tensors and tensors["c"] == tensors["d"]


class Call:
    """One call to sweep: makes its arguments at each row, out of buffers that all rows share."""

    def __init__(self, spec: dict[str, Any], torch: Any) -> None:
        self.op: str = spec["op"]
        self.rows: list[list[int]] = spec["rows"]
        self.failures = 0
        self.succeeded = False
        self._attrs: dict[str, Any] = spec["attrs"]
        self._tensors: dict[str, Any] = dict(spec["tensors"])
        self._unread = unread_in(self.op, self._tensors, self._attrs)
        self._in_place = is_in_place(self._tensors)
        if self._in_place:
            del self._tensors["c"]
        self._fixed: dict[str, Any] = {}
        self._flat: dict[str, Any] = {}
        self._kinds = {name: getattr(torch, dtype) for name, (dtype, _, _) in self._tensors.items()}
        self._bytes = {name: self._extent(name) * k.itemsize for name, k in self._kinds.items()}

    @property
    def operand_bytes(self) -> int:
        """The size of the largest operand at the largest row."""
        return max((self._bytes[n] for n in OPERANDS if n in self._bytes), default=0)

    @property
    def is_hopeless(self) -> bool:
        """Whether it has failed so often, and never worked, that its other sizes are left out."""
        return self.failures >= GIVE_UP and not self.succeeded

    def allocate(self, buffers: Buffers) -> None:
        """Take the storage of every tensor."""
        for name, kind in self._kinds.items():
            size, pretends = self._bytes[name], name in self._unread
            self._flat[name] = buffers.take(name, size, unread=pretends).view(kind)
        for name, (_, dims, strides) in self._tensors.items():
            if not any(isinstance(x, list) for x in (*dims, *strides)):
                self._fixed[name] = self._flat[name].as_strided(dims, strides)
        for name, value in self._attrs.items():
            if not is_dynamic(value):
                self._fixed[name] = fill_one(value, [])

    def values(self, row: int) -> dict[str, Any]:
        """Return the call's arguments at one row."""
        numbers = self.rows[row]
        found: dict[str, Any] = dict(self._fixed)
        for name, (_, dims, strides) in self._tensors.items():
            if name not in found:
                shape, steps = fill(dims, numbers), fill(strides, numbers)
                found[name] = self._flat[name].as_strided(shape, steps)
        if self._in_place:
            found["c"] = found["d"]
        for name, value in self._attrs.items():
            if name not in found:
                found[name] = fill_one(value, numbers)
        return found

    def _extent(self, name: str) -> int:
        _, dims, strides = self._tensors[name]
        varies = any(isinstance(x, list) for x in (*dims, *strides))
        rows = self.rows if varies else self.rows[:1]
        return max((extent(fill(dims, r), fill(strides, r)) for r in rows), default=0)


class Buffers:
    """Device memory of a request: operands and outputs share one buffer, all else has its own.

    Nothing runs on the operands, so one beyond the buffer that nobody else touches only pretends its extent.
    """

    def __init__(self, torch: Any, device: str, size: int) -> None:
        self._torch, self._device = torch, device
        self._shared = self._zeros(max(size, 16))

    def take(self, name: str, size: int, *, unread: bool) -> Any:
        """Return ``size`` bytes of storage for the tensor ``name``; ``unread`` if only kernels touch it."""
        if name not in OPERANDS:
            return self._zeros(max(size, 16))[:size]
        if size <= len(self._shared):
            return self._shared[:size]
        if unread and self._device == "cuda":
            return self._torch.as_tensor(Pretence(self._zeros(1 << 20), size), device=self._device)
        return self._zeros(size)

    def _zeros(self, size: int) -> Any:
        return self._torch.zeros(size, dtype=self._torch.uint8, device=self._device)


class Pretence:
    """A small piece of device memory that claims to be ``size`` bytes; never to be read."""

    def __init__(self, base: Any, size: int) -> None:
        self.base = base
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (base.data_ptr(), False), "version": 3,
        }  # fmt: skip


def is_dynamic(value: Any) -> bool:
    """Return whether an attribute follows the row."""
    if isinstance(value, list):
        return value[:1] == ["$"] or any(is_dynamic(v) for v in value)
    return False


def extent(dims: list[int], strides: list[int]) -> int:
    """Return how many elements of storage a tensor spans."""
    if any(d == 0 for d in dims):
        return 0
    return 1 + sum((d - 1) * s for d, s in zip(dims, strides, strict=True))


def fill(values: list[Any], numbers: list[int]) -> list[Any]:
    """Return ``values`` with every ["$", i] replaced by the i-th number."""
    return [numbers[v[1]] if isinstance(v, list) else v for v in values]


def fill_one(value: Any, numbers: list[int]) -> Any:
    """As ``fill`` for an attribute: lists, which JSON made of tuples, become tuples again."""
    if isinstance(value, list) and value[:1] == ["$"]:
        return numbers[value[1]]
    return tuple(fill_one(v, numbers) for v in value) if isinstance(value, list) else value
