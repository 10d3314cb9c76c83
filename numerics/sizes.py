"""Whole numbers: sizes as a caller gives them, and the arithmetic of launches.

Triton's own `cdiv` and `next_power_of_2` take 8 us a call outside of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any


def is_whole(size: Any, least: int = 1) -> bool:
    """Whether a size is an integer, of Python or numpy and no bool, and no less than `least`."""
    return (type(size) is int or (isinstance(size, Integral) and not isinstance(size, bool))) and int(size) >= least


def check_whole(least: int = 1, **sizes: Any) -> None:
    """Refuse sizes, given by name, that are no integers or less than `least`.

    Raises:
        ValueError: naming the first of them.
    """
    for name, size in sizes.items():
        if not is_whole(size, least):
            raise ValueError(f"{name} = {size!r}; give a whole number, {least} or more")


def check_shape(shape: Sequence[Any], what: str = "shape") -> None:
    """Refuse what is no (M, N, K) of a GEMM.

    Raises:
        ValueError: naming `what`.
    """
    if len(shape) != 3 or not (is_whole(shape[0]) and is_whole(shape[1]) and is_whole(shape[2])):
        raise ValueError(f"{what} {tuple(shape)} must be three positive whole numbers (M, N, K)")


def cdiv(size: int, divisor: int) -> int:
    """Size / divisor, rounded up; both positive."""
    return -(-size // divisor)


def unit_of(*sizes: int) -> int:
    """The largest power of two, 16 at most, that divides all.

    Triton knows of a size only whether 16 divides it, and moves values under a mask one by one where it does not. A kernel
    that is told sizes in this unit, and the unit as a constant, moves as many together as can be.
    """
    return math.gcd(16, *sizes)


def next_power_of_2(size: int) -> int:
    """The least power of two that is at least `size`, which is positive."""
    return 1 << (size - 1).bit_length()
