"""Whole-number arithmetic of launches. Triton's own `cdiv` and `next_power_of_2` take 8 us a call outside of a kernel."""

from __future__ import annotations


def cdiv(size: int, divisor: int) -> int:
    """Size / divisor, rounded up; both positive."""
    return -(-size // divisor)


def next_power_of_2(size: int) -> int:
    """The least power of two that is at least `size`, which is positive."""
    return 1 << (size - 1).bit_length()
