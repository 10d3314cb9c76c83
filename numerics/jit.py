"""The loops of `numerics.cpu`, compiled by numba when first called and kept on disk for the next process.

Importing this module imports numba. Each loop works on rows that lie densely in memory, holds no interpreter lock, and
has neither calls nor branches inside, so that LLVM makes vector code of it for the processor at hand. An output that is
None is compiled away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

_SIGN = np.int32(-(2**31))
_MAGNITUDE = np.int32(2**31 - 1)
_EXPONENT = np.int32(0x7F800000)
_ONE = np.float32(1.0)
_LEAST_SCALE = np.float32(2.0**-126)
# 1.5 * 2^23: a sum with it has no fraction bits, so that adding rounds to a whole number, to even on a tie.
_WHOLE = np.float32(12582912.0)


class Grid(NamedTuple):
    """A format's grid and scale rule in float32's bits; see `numerics.cpu` for how they are made."""

    least: Any  # int32 exponent field of the least normal number
    most: Any  # and of the binade above the greatest
    shift: Any  # 23 less the fraction bits: the bits of a float32 that go
    limit: Any  # float32 greatest value
    over: Any  # float32 that stands for what is beyond it
    zero: Any  # float32 +0 where the format has no -0, else -0, which adds nothing
    over_code: Any  # int32 code of `over`
    over_sign: Any  # int32 -1 where that code has a sign, else 0
    sign_code: Any  # int32 sign bit of a code
    full_code: Any  # int32 all bits of a code
    integer: Any  # codes are two's complement
    one_zero: Any  # the code of zero has no sign
    power: Any  # scales are powers of two
    scale_add: Any  # int32 added to amax's bits before its exponent is read
    scale_less: Any  # int32 taken from that exponent
    ready: Any  # scales are there; else they are made from amax


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # numpy's error model: a division by zero is an infinity, and no test in the loop.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        compiled: Any = njit(cache=True, **options)(function)
    except RuntimeError:  # no place on disk can be written to
        return njit(**options)(function)
    keep = compiled._cache.save_overload

    def keep_if_there_is_room(*arguments: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk, a quota
            keep(*arguments)

    compiled._cache.save_overload = keep_if_there_is_room
    return compiled


_inlined = njit(inline="always", error_model="numpy")


@_inlined
def _bits(value):  # type: ignore[no-untyped-def]
    return np.float32(value).view(np.int32)


@_inlined
def _float(bits):  # type: ignore[no-untyped-def]
    return np.int32(bits).view(np.float32)


@_inlined
def _power_of_two(exponent):  # type: ignore[no-untyped-def]
    """2^exponent for exponents from -149 to 127."""
    normal = np.int32(exponent + 127) << np.int32(23)
    return _float(normal if exponent >= -126 else np.int32(1) << np.int32(exponent + 149))


@_inlined
def _value(y, grid):  # type: ignore[no-untyped-def]
    """The grid's value nearest to y: a number 2^23 steps large has no bits to spare, so that adding it rounds."""
    bits = _bits(y)
    magic = _float(min(max(bits & _EXPONENT, grid.least), grid.most) + (grid.shift << np.int32(23)))
    rounded = (_float(bits & _MAGNITUDE) + magic) - magic
    rounded = grid.over if rounded > grid.limit else rounded
    return _float(_bits(rounded) | (bits & _SIGN)) + grid.zero


@_inlined
def _code(y, grid):  # type: ignore[no-untyped-def]
    """Its code: the sum's last bits are the significand, whose leading one carries into the exponent field."""
    bits = _bits(y)
    field = min(max(bits & _EXPONENT, grid.least), grid.most)
    magic = _float(field + (grid.shift << np.int32(23)))
    total = _float(bits & _MAGNITUDE) + magic
    over = (total - magic) > grid.limit
    code = grid.over_code if over else (_bits(total) - _bits(magic)) + ((field - grid.least) >> grid.shift)
    negative = bits >> np.int32(31)
    if grid.integer:
        return ((code ^ negative) - negative) & grid.full_code
    if grid.one_zero:
        negative = np.int32(0) if code == 0 else negative
    sign = negative & grid.sign_code
    return code | (sign & grid.over_sign if over else sign)


@_inlined
def _scale(amax, grid):  # type: ignore[no-untyped-def]
    """The scale of an amax, given as bits."""
    if amax == 0:
        return _ONE
    if grid.power:
        return _power_of_two(min(max(((amax + grid.scale_add) >> np.int32(23)) - 127 - grid.scale_less, -127), 127))
    return max(_float(amax) / grid.limit, _LEAST_SCALE)


@_inlined
def _whole(y, limit):  # type: ignore[no-untyped-def]
    """The nearest whole number within the limit; its zero is +0."""
    return min(max((y + _WHOLE) - _WHOLE, -limit), limit)


@_inlined
def _greatest(values):  # type: ignore[no-untyped-def]
    """The greatest magnitude's bits: they are ordered as the magnitudes are, NaN above infinity above the rest."""
    top = np.int32(0)
    for i in range(values.size):
        top = max(top, _bits(values[i]) & _MAGNITUDE)
    return top


@_compiled
def greatest(x):  # type: ignore[no-untyped-def]
    """The bits of the greatest magnitude of (rows, K)."""
    top = np.int32(0)
    for r in range(x.shape[0]):
        top = max(top, _greatest(x[r]))
    return top


@_compiled
def greatest_of_columns(x, top):  # type: ignore[no-untyped-def]
    """Raise (K,) int32 bits of magnitudes to the greatest of each column."""
    for r in range(x.shape[0]):
        row = x[r]
        for c in range(row.size):
            top[c] = max(top[c], _bits(row[c]) & _MAGNITUDE)


@_compiled
def quantize_blocks(x, scales, block_rows, grid, codes, values):  # type: ignore[no-untyped-def]
    """Scales, codes and values of blocks of `block_rows` by K / scales.shape[1]; returns the greatest magnitude's bits."""
    width = x.shape[1] // scales.shape[1]
    top = np.int32(0)
    for strip in range(scales.shape[0]):
        first, last = strip * block_rows, (strip + 1) * block_rows
        if not grid.ready:
            for s in range(scales.shape[1]):
                amax = np.int32(0)
                for r in range(first, last):
                    amax = max(amax, _greatest(x[r, s * width : (s + 1) * width]))
                scales[strip, s] = _scale(amax, grid)
                top = max(top, amax)
        for r in range(first, last):
            if grid.ready:
                top = max(top, _greatest(x[r]))
            for s in range(scales.shape[1]):
                part = x[r, s * width : (s + 1) * width]
                scale = scales[strip, s]
                if values is not None:
                    into = values[r, s * width : (s + 1) * width]
                    for i in range(part.size):
                        into[i] = _value(part[i] / scale, grid) * scale
                if codes is not None:
                    into_codes = codes[r, s * width : (s + 1) * width]
                    for i in range(part.size):
                        into_codes[i] = _code(part[i] / scale, grid)
    return top


@_compiled
def quantize_columns(x, scales, grid, codes, values):  # type: ignore[no-untyped-def]
    """Codes and values under (K,) scales; returns the greatest magnitude's bits."""
    top = np.int32(0)
    for r in range(x.shape[0]):
        row = x[r]
        top = max(top, _greatest(row))
        if values is not None:
            into = values[r]
            for c in range(row.size):
                into[c] = _value(row[c] / scales[c], grid) * scales[c]
        if codes is not None:
            into = codes[r]
            for c in range(row.size):
                into[c] = _code(row[c] / scales[c], grid)
    return top


@_compiled
def quantize_shared(x, steps, bits, pairs, codes, values):  # type: ignore[no-untyped-def]
    """Steps, codes and values of 16 elements under one exponent; returns the greatest magnitude's bits."""
    limit = np.float32((1 << bits) - 1)
    top = np.int32(0)
    greatest = np.empty(x.shape[1] // 2, np.int32)  # of each pair
    step = np.empty(x.shape[1] // 2, np.float32)
    for r in range(x.shape[0]):
        row = x[r]
        for j in range(greatest.size):
            greatest[j] = max(_bits(row[2 * j]) & _MAGNITUDE, _bits(row[2 * j + 1]) & _MAGNITUDE)
        for b in range(row.size // 16):
            block = greatest[8 * b : 8 * b + 8]
            amax = np.int32(0)
            for j in range(8):
                amax = max(amax, block[j])
            top = max(top, amax)
            exponent = min((amax >> np.int32(23)) - 127, 127)
            whole = _power_of_two(exponent - (bits - 1)) if amax > 0 else _ONE
            half = whole * np.float32(0.5) if pairs and amax > 0 else whole
            binade = _bits(_power_of_two(exponent))
            into = step[8 * b : 8 * b + 8]
            for j in range(8):
                into[j] = half if block[j] < binade else whole
            if steps is not None and not pairs:
                steps[r, b] = whole
        if steps is not None and pairs:
            steps[r, :] = step
        # A step may be subnormal and have no inverse; divided by, it is exact.
        if values is not None:
            to = values[r]
            for j in range(step.size):
                to[2 * j] = _whole(row[2 * j] / step[j], limit) * step[j]
                to[2 * j + 1] = _whole(row[2 * j + 1] / step[j], limit) * step[j]
        if codes is not None:
            to_codes = codes[r]
            for j in range(step.size):
                to_codes[2 * j] = np.int16(_whole(row[2 * j] / step[j], limit))
                to_codes[2 * j + 1] = np.int16(_whole(row[2 * j + 1] / step[j], limit))
    return top
