"""The token counts that FlashInfer's tuner keeps an entry for, and which one a call looks up.

Arithmetic alone: no torch, no library. Powers of two to 256, steps of 256 to 2048, steps of 512 to 4096, powers
of two above. A limit (``tune_max_num_tokens``) on this grid makes the library's list the same as ours; one off the
grid adds itself to it, and below 256 the library then maps to a power of two that it never stored (65..99 to 128
with a limit of 100, 0.6.13 to 0.7.4). So a limit is always rounded up to the grid.

Source: FlashInfer ``fused_moe/utils.py``; checked against it in the tests.
"""

from __future__ import annotations

__all__ = ["LARGEST", "bucket_of", "buckets_up_to"]

LARGEST = 1 << 24
"""No larger token count is planned for."""

_POWERS_TO, _STEPS = 256, ((2048, 256), (4096, 512))


def bucket_of(tokens: int) -> int:
    """Return the bucket that a call with ``tokens`` rows looks up: the smallest one that holds them.

    It is also the limit to give for at most ``tokens`` rows. Raises ValueError below 1 and above ``LARGEST``.
    """
    if not 1 <= tokens <= LARGEST:
        raise ValueError(f"{tokens} is no number of tokens; give one in 1..{LARGEST}")
    if tokens > _POWERS_TO:
        for last, step in _STEPS:
            if tokens <= last:
                return -(-tokens // step) * step
    return 1 << (tokens - 1).bit_length()


def buckets_up_to(limit: int) -> tuple[int, ...]:
    """Return every bucket up to that of ``limit``, ascending: 21 of them for 8192, 23 for 32768."""
    found, bucket, last = [], 1, bucket_of(limit)
    while bucket < last:
        found.append(bucket)
        bucket = bucket_of(bucket + 1)
    return (*found, last)
