"""One class an error. The text names the thing and its numbers, and ends with what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FxwarmError(Exception):
    """Base of every error that fxwarm raises on purpose."""


class OptionError(FxwarmError, ValueError):
    """An option is unknown or has a value that it cannot have."""


class UnknownTargetError(FxwarmError, ValueError):
    """No target has this name."""


class UnknownFamilyError(FxwarmError, KeyError):
    """No kernel family has this name."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class FamilyError(FxwarmError, TypeError):
    """An object is no kernel family, or two families claim one name."""


class LibraryError(FxwarmError, RuntimeError):
    """A kernel library is absent, unknown, or does not work here."""


class ShapeMismatchError(FxwarmError, ValueError):
    """The tensors of one call contradict each other."""


class IncompleteError(FxwarmError, RuntimeError):
    """``strict`` is set and not everything could be warmed."""


class ColdCaptureError(FxwarmError, RuntimeError):
    """A warmup would load kernels while this thread captures a stream. A model's own call raises it under ``strict`` only."""


class JitError(FxwarmError, RuntimeError):
    """``no_jit(mode="raise")`` is active and a library compiled, loaded or tuned a kernel."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an unknown-name error: the nearest known name, else all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(map(repr, known))}"
