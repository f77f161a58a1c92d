"""The hashes by which DeepGEMM names a cache entry, in both of its JIT generations.

From a ``kernel.cu``, the flags and the compiler an entry's name is one digest away, so a cache can
be checked, and filled, without the library. Plain Python: about 0.2 us a byte, a source has 1 to
2 KB.

Source: DeepGEMM ``csrc/utils/hash.hpp``, ``csrc/jit/compiler.hpp``, ``include_parser.hpp``
(generation A); names made by sgl-deep-gemm 0.2.5 and tokenspeed-deepgemm 2.8.2 (B).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["digest_a", "digest_b", "includes_hash", "name_a", "name_b"]

_MASK = (1 << 64) - 1
_PRIME, _GOLDEN = 0x100000001B3, 0x9E3779B97F4A7C15
_SEED, _SEED_B = 0xC6A4A7935BD1E995, 0xFF51AFD7ED558CCD
_INCLUDE = re.compile(r"#include <(deep_gemm[^>]+)>")


def digest_a(data: bytes) -> str:
    """Return generation A's 32 hex digits: two FNV-1a passes of 64 bits, each finished by splitmix."""
    return _hex(_fnv1a(data, _SEED, _PRIME), _fnv1a(data, _GOLDEN, _PRIME))


def digest_b(parts: Iterable[bytes]) -> str:
    """Return generation B's 32 hex digits of a sequence of updates, each led by its length."""
    first, second = _SEED, _SEED_B
    for part in parts:
        data = len(part).to_bytes(8, "little") + part
        first, second = _fnv1a(data, first, _PRIME), _fnv1a(data, second, _GOLDEN)
    return _hex(first, second)


def name_a(tag: str, code: str, flags: Iterable[str], compiler: tuple[int, int]) -> str:
    """Return the name of an entry below ``cache/`` in generation A.

    ``flags`` are those of the command line, in order; they hold the absolute include path.
    ``compiler`` is nvcc's (major, minor). ``code`` is the whole kernel.cu.
    """
    signature = f"NVCC{compiler[0]}.{compiler[1]}"
    key = "$$".join((tag, signature, " ".join(flags), code))
    return f"kernel.{tag}.{digest_a(key.encode())}"


def name_b(
    tag: str, code: str, flags: Iterable[str], *, compiler_text: str, include: Path, cutlass: str
) -> str:
    """Return the name of an entry below ``cache/`` in generation B.

    ``flags`` without the include path, which is not in the key; ``compiler_text`` all that
    ``nvcc --version`` prints; ``cutlass`` as in "481".
    """
    known: dict[str, str] = {}
    source = [code.encode()]
    source += [_file_digest_b(n, include, known).encode() for n in _INCLUDE.findall(code)]
    parts = (
        f"cutlass-{cutlass}",
        digest_b([compiler_text.encode()]),
        " ".join(flags),
        "",  # the post-hook, which nobody sets
        digest_b(source),
    )
    return f"{tag}.{digest_b(part.encode() for part in parts)}"


def includes_hash(code: str, include: Path, *, known: dict[Path, str] | None = None) -> str:
    """Return the first line's hash in generation A: of all ``deep_gemm`` headers behind ``code``.

    ``code`` is the generated source, with or without that line. ``known`` keeps the hashes of
    headers between calls.
    """
    known = {} if known is None else known
    return digest_a(
        "".join(f"{_header(p, include, known)}$" for p in _INCLUDE.findall(code)).encode()
    )


def _header(name: str, include: Path, known: dict[Path, str]) -> str:
    path = include / name
    if path not in known:
        text = path.read_bytes()
        behind = "".join(
            f"{_header(n, include, known)}$"
            for n in _INCLUDE.findall(text.decode("utf-8", "replace"))
        )
        known[path] = digest_a(f"{behind}#{digest_a(text)}".encode())
    return known[path]


def _file_digest_b(name: str, include: Path, known: dict[str, str]) -> str:
    if name not in known:
        text = (include / name).read_bytes()
        behind = _INCLUDE.findall(text.decode("utf-8", "replace"))
        parts = [text, *(_file_digest_b(n, include, known).encode() for n in behind)]
        known[name] = digest_b(parts)
    return known[name]


def _fnv1a(data: bytes, state: int, prime: int) -> int:
    for byte in data:
        state = ((state ^ byte) * prime) & _MASK
    return state


def _hex(*states: int) -> str:
    return "".join(f"{_finish(state):016x}" for state in states)


def _finish(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
