"""Static arguments of a TileLang factory as the text of a key, and back.

TileLang compares statics as Python values (2 and 2.0 are one kernel, whichever came first), so they are normalised
where they enter a key: bool, int, float and str, each in its own spelling.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from fxwarm.records import CompileKey

Static = bool | int | float | str | None
FAMILY = "tilelang"
_named: set[str] = set()
"""Factories that this process itself made keys of, beside those that came with a file."""


def make_key(path: str, statics: Mapping[str, Static]) -> CompileKey:
    """Return the key of the kernel that the factory ``path`` ("module:attribute") makes of ``statics``.

    >>> print(make_key("tile_kernels.mhc.post_kernel:_mhc_post_fwd", {"mhc": 4, "hidden": 7168}))
    _mhc_post_fwd<hidden=7168, mhc=4>
    """
    _named.add(path)
    template = tuple(f"{name}={_text(name, value)}" for name, value in sorted(statics.items()))
    return CompileKey(FAMILY, path.partition(":")[2], template, path)


def is_named(path: str) -> bool:
    """Whether this process itself made a key of the factory ``path``."""
    return path in _named


def factory_of(key: CompileKey) -> str:
    """Return "module:attribute" of the factory that makes the kernel ``key``."""
    return key.tag


def statics_of(key: CompileKey) -> dict[str, Static]:
    """Return the static arguments in ``key``. Raises ValueError for text that is no literal."""
    pairs = (item.partition("=") for item in key.template)
    return {name: ast.literal_eval(value) for name, _, value in pairs}


def _text(name: str, value: Static) -> str:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(
            f"the static {name} is a {type(value).__name__}; give bool, int, float, str or None"
        )
    return repr(value)
