"""The DeepGEMM family: everything that knows DeepGEMM lives in this room.

graph -> ``match`` -> calls -> ``keys`` (the heuristics, modelled) or ``recorder`` (the library
itself, asked) -> ``build`` (nvcc, in parallel, into the library's ``cache``; in NVRTC mode ``workers``) -> ``load``
(one launch of each). Importing this imports nothing else: the children come through here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxwarm.families.deep_gemm.family import DeepGemm

__all__ = ["DeepGemm"]


def __getattr__(name: str) -> Any:
    if name == "DeepGemm":
        from fxwarm.families.deep_gemm.family import DeepGemm

        return DeepGemm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
