"""What a generated source says: which kernel it instantiates, with which template arguments.

Source:
    auto ptr = reinterpret_cast<void*>(&transpose_fp32<
        512, 64, 56
    >);

Facts:
    CompileKey(deep_gemm, transpose_fp32, ("512", "64", "56"), tag="transpose_fp32")
"""

from __future__ import annotations

import re

from fxwarm.records import CompileKey

__all__ = ["key_in", "tag_of"]

_FAMILY = "deep_gemm"
_INSTANCE = re.compile(r"reinterpret_cast<\s*void\s*\*\s*>\s*\(\s*&\s*([\w:]+)\s*(<)?")
_ENTRY = re.compile(r"(?:kernel\.)?(.+)\.([0-9a-f]{32})")


def key_in(code: str, tag: str) -> CompileKey:
    """Return the key of a generated source. Raises ValueError if it instantiates no kernel."""
    found = _INSTANCE.search(code)
    if found is None:
        raise ValueError(f"this source of {tag!r} instantiates no kernel; is it DeepGEMM's?")
    template = _arguments(code, found.end()) if found.group(2) else ()
    return CompileKey(_FAMILY, found.group(1), template, tag)


def tag_of(entry: str) -> str:
    """Return the tag in an entry's name of either generation.

    Raises ValueError for a name that is none, as of a folder that somebody else put there.
    """
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise ValueError(f"{entry!r} is no name of a DeepGEMM cache entry")
    return found.group(1)


def _arguments(code: str, start: int) -> tuple[str, ...]:
    """Split at the top level up to the closing bracket, each argument with single spaces."""
    depth, begin, found = 0, start, []
    for at in range(start, len(code)):
        char = code[at]
        if char in "<([{":
            depth += 1
        elif char in ">)]}" and depth:
            depth -= 1
        elif char == ">" or (char == "," and not depth):
            found.append(" ".join(code[begin:at].split()))
            begin = at + 1
            if char == ">":
                return tuple(found)
    raise ValueError("the template arguments of this source do not end")
