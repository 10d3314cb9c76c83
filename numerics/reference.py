"""A tensor core's dot product one step at a time, in whole numbers: what `numerics.accumulate` does at speed.

Read this to know the arithmetic that the records of `numerics.tensor_core` stand for; nothing but tests calls it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from numerics.formats import Format
from numerics.tensor_core import LEAST_EXPONENT, TENSOR_CORES, TensorCore

GROUP = TENSOR_CORES["hopper_fast"].group
FRACTION_BITS = TENSOR_CORES["hopper_fast"].fraction_bits
PROMOTION = 128  # elements of K after which `hopper_split` moves the accumulator into an FP32 sum


def hopper_dot(a: Sequence[float], b: Sequence[float], format_a: Format, format_b: Format, accumulation: str) -> float:
    """Dot product of finite values on the formats' grids under an accumulation of `TENSOR_CORES`."""
    core = TENSOR_CORES[accumulation]
    if core.promotion is None:
        return _chain(a, b, format_a, format_b, core)
    total = 0.0
    for start in range(0, len(a), core.promotion):
        stop = start + core.promotion
        total = _to_float32(total + _chain(a[start:stop], b[start:stop], format_a, format_b, core))
    return total


def _chain(a: Sequence[float], b: Sequence[float], format_a: Format, format_b: Format, core: TensorCore) -> float:
    accumulator = 0.0
    for places in _groups(len(a), core):
        terms = []
        for left, right in ((a[place], b[place]) for place in places):
            if left * right != 0:
                # The significand product is left in [1, 4): its exponent is the sum of the operands' exponents.
                terms.append((left * right, _exponent(left, format_a.min_exponent) + _exponent(right, format_b.min_exponent)))
        if accumulator != 0:
            terms.append((accumulator, _exponent(accumulator, -126)))
        if not terms:
            continue
        unit = max(LEAST_EXPONENT, *(exponent for _, exponent in terms)) - core.fraction_bits
        total = sum(int(math.ldexp(value, -unit)) for value, _ in terms)  # int() cuts toward zero
        # Normalized, and cut again to the kept bits after the leading one, or to the last bit of an FP32 subnormal.
        excess = max(abs(total).bit_length() - 1 - core.kept_bits, -149 - unit if core.kept_bits == 23 else 0, 0)
        kept = (abs(total) >> excess) << excess
        accumulator = math.copysign(math.ldexp(kept, unit), total) if kept else 0.0
    return accumulator


def _groups(k: int, core: TensorCore) -> list[list[int]]:
    if core.order is None:
        return [list(range(start, min(start + core.group, k))) for start in range(0, k, core.group)]
    span = len(core.order)
    taken = [start + place for start in range(0, k, span) for place in core.order]
    return [[place for place in taken[i : i + core.group] if place < k] for i in range(0, len(taken), core.group)]


def _exponent(value: float, least: int) -> int:
    return max(math.frexp(value)[1] - 1, least)


def _to_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]
