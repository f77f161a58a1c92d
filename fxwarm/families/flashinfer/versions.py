"""What is known of FlashInfer's releases: which rules the planning may rely on.

Read from the wheels of each version; 0.6.18.post1 was also run on an H200.
"""

from __future__ import annotations

from typing import NamedTuple

from fxwarm import exc

__all__ = ["KNOWN", "NEWEST", "Version", "find_version"]


class Version(NamedTuple):
    """One release, as far as planning cares."""

    number: str
    hybrid: bool = True
    """Buckets round up on the hybrid grid. Before 0.6.13 they were powers of two that round down."""
    options_in_key: bool = True
    """The stored key tells layers of equal shapes and other options apart. Since 0.6.18."""
    ranks_in_key: bool = True
    """It holds the ranks as well, so that a file of rank 0 never matches on rank 1. Until 0.7.0."""


KNOWN: dict[str, Version] = {
    v.number: v
    for v in (
        Version("0.6.7.post3", hybrid=False, options_in_key=False),
        Version("0.6.9", hybrid=False, options_in_key=False),
        Version("0.6.13", options_in_key=False),
        Version("0.6.17", options_in_key=False),
        Version("0.6.18.post1"),
        Version("0.7.0.post1"),
        Version("0.7.2.post1", ranks_in_key=False),
        Version("0.7.4", ranks_in_key=False),
    )
}

NEWEST = "0.7.4"


def find_version(number: str, *, installed: bool) -> Version:
    """Return what is known of release ``number``.

    An installed one that is unknown counts as the newest before it: the look-up after tuning shows whether that was
    right. Raises LibraryError for one that is unknown and absent, and for the old rules.
    """
    known = KNOWN.get(number)
    if known is None and installed:
        older = [v for v in KNOWN.values() if _order(v.number) <= _order(number)]
        known = max(older, key=lambda v: _order(v.number), default=None)
    if known is None:
        names = ", ".join(KNOWN)
        raise exc.LibraryError(
            f"flashinfer-python {number} is not known and not installed; install it, or plan for one of {names}"
        )
    if not known.hybrid:
        raise exc.LibraryError(
            f"flashinfer-python {number} rounds token counts down to powers of two, which is not modelled; "
            "install 0.6.18 or later"
        )
    return known


def _order(number: str) -> tuple[int, ...]:
    """Return a release as comparable integers: 0.6.18.post1 and 0.6.18 count the same."""
    parts = number.split("+", maxsplit=1)[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)
