"""The Hopper FP8 dot product one step at a time, in whole numbers: what `numerics.accumulate` does at speed.

Read this to know the arithmetic; nothing but tests calls it. Source: checked bit for bit against an H200
(`torch._scaled_mm`, e4m3 and e5m2 mixes), and the same as Hopper in X. Xie et al., mmasim 2.1.1.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from numerics.formats import Format

GROUP = 32  # products that one step adds
FRACTION_BITS = 13  # kept below the largest exponent, and in the accumulator
PROMOTION = 128  # elements of K after which `hopper_split` moves the accumulator into an FP32 sum


def hopper_dot(a: Sequence[float], b: Sequence[float], format_a: Format, format_b: Format, accumulation: str) -> float:
    """Dot product of finite values on the formats' grids under `hopper_fast` or `hopper_split`."""
    if accumulation == "hopper_fast":
        return _chain(a, b, format_a, format_b)
    total = 0.0
    for start in range(0, len(a), PROMOTION):
        stop = start + PROMOTION
        total = _to_float32(total + _chain(a[start:stop], b[start:stop], format_a, format_b))
    return total


def _chain(a: Sequence[float], b: Sequence[float], format_a: Format, format_b: Format) -> float:
    accumulator = 0.0
    for start in range(0, len(a), GROUP):
        terms = []
        for left, right in zip(a[start : start + GROUP], b[start : start + GROUP], strict=True):
            if left * right != 0:
                # The significand product is left in [1, 4): its exponent is the sum of the operands' exponents.
                terms.append((left * right, _exponent(left, format_a.min_exponent) + _exponent(right, format_b.min_exponent)))
        if accumulator != 0:
            terms.append((accumulator, _exponent(accumulator, -126)))
        if not terms:
            continue
        unit = max(exponent for _, exponent in terms) - FRACTION_BITS
        total = sum(int(math.ldexp(value, -unit)) for value, _ in terms)  # int() cuts toward zero
        # Normalized, and cut again to 13 bits after the leading one.
        excess = max(abs(total).bit_length() - 1 - FRACTION_BITS, 0)
        kept = (abs(total) >> excess) << excess
        accumulator = math.copysign(math.ldexp(kept, unit), total) if kept else 0.0
    return accumulator


def _exponent(value: float, least: int) -> int:
    return max(math.frexp(value)[1] - 1, least)


def _to_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]
