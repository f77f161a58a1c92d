"""What the model of DeepGEMM's heuristics does not know, as exceptions.

Nothing is guessed: a kernel that is named wrongly is compiled for nothing, and the right one is
then compiled in front of a user.
"""

from __future__ import annotations

__all__ = ["HeuristicsError", "UnknownVersion", "Unmodelled"]


class HeuristicsError(ValueError):
    """Base of what this package raises on purpose."""


class UnknownVersion(HeuristicsError):
    """This build of DeepGEMM is none of those whose heuristics are known."""

    def __init__(self, distribution: str, number: str, known: str) -> None:
        self.distribution, self.number = distribution, number
        super().__init__(
            f"the heuristics of {distribution} {number} are not known; known are {known}; "
            "record the kernels from the library itself, or plan for a known version"
        )


class Unmodelled(HeuristicsError):
    """The version is known, but not what it does with this call; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}; record the kernels from the library itself")
