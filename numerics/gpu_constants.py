"""What the kernels on a GPU are compiled for, worked out from a recipe."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass

import numpy as np

from numerics.recipe import Recipe

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, repr=False)
class Constants:
    """What a kernel is compiled for: a format's grid, how it rounds and how its scales are chosen.

    Attributes:
        integer: The grid is the integers.
        wide: The format has FP32's exponents, so that rounding is cutting FP32's bits.
        e4m3: The hardware's conversion makes the codes.
        e5m2: Likewise.
        truncate: Rounding is toward zero, not to nearest even.
        bounded: No quotient rounds to a value beyond the range.
        nonfinite: What is beyond the range becomes infinity or NaN.
        infinite: The format has infinities.
        negative_zero: The format has a -0.
        max: Greatest finite value.
        limit: Greatest float32 that does not round to a value beyond the range.
        twice_max: Twice that.
        max_code: Code of `max`.
        top_code: The next one.
        min_bits: FP32 bits of the least normal value.
        magic: A magnitude's power of two times this is the rounding summand.
        shift: FP32's fraction bits less the format's.
        half_less: Half of what is cut from a wide format's bits, less one.
        step: Fraction bits, at FP32's exponent field.
        code_mask: All bits of a code but the sign's.
        full_mask: All bits of a code.
        sign_mask: The sign bit of a code.
        sign_shift: From FP32's sign bit to the code's.
        nan_code: Code of NaN, 0 when there is none.
        special_bits: FP32 bits of what replaces a value beyond the range.
        scaled: There are scales.
        power: They are powers of two.
        scale_add: Added to amax's bits before its exponent is read.
        scale_less: Subtracted from that exponent.
        exact: Divide by the division instruction sequence, not by fused multiply-adds.
    """

    integer: bool
    wide: bool
    e4m3: bool
    e5m2: bool
    truncate: bool
    bounded: bool
    nonfinite: bool
    infinite: bool
    negative_zero: bool
    max: float
    limit: float
    twice_max: float
    max_code: int
    top_code: int
    min_bits: int
    magic: float
    shift: int
    half_less: int
    step: int
    code_mask: int
    full_mask: int
    sign_mask: int
    sign_shift: int
    nan_code: int
    special_bits: int
    scaled: bool
    power: bool
    scale_add: int
    scale_less: int
    exact: bool

    def __repr__(self) -> str:
        """Every field, in characters that a kernel's name may hold."""
        return "_".join(str(value) for value in astuple(self)).replace("-", "m").replace(".", "d").replace("+", "p")


@functools.cache
def constants_of(recipe: Recipe, given: bool, hardware: bool) -> Constants:
    """What the kernels are compiled for.

    Args:
        recipe: With an element format.
        given: The amax is given: values may be beyond it.
        hardware: The device has instructions that convert to e4m3 and e5m2.
    """
    fmt = recipe.element
    shift = 23 - fmt.fraction_bits
    step = 2.0 ** (fmt.max_exponent - fmt.fraction_bits)
    truncate = recipe.rounding == "toward_zero"
    wide = fmt.min_exponent == -126
    top = int(fmt.max / step)
    limit = _FLOAT32_MAX
    if not truncate and not wide:
        # The tie above the greatest value goes to it where its significand is even.
        tie = np.float32(fmt.max + step / 2)
        limit = float(tie if top % 2 == 0 else np.nextafter(tie, np.float32(0)))
    nonfinite = recipe.overflow == "nonfinite"
    bounded = recipe.scaling != "none" and not recipe.is_power_of_two and not given
    max_code = ((fmt.max_exponent - fmt.min_exponent) << fmt.fraction_bits) + top
    # Half as much again as the power of two whose last place is the grid's step there, less a code for every step below.
    magic = ((127 + shift) << 23) + 0x400000 - ((fmt.min_exponent + 127) << fmt.fraction_bits)
    less, add = 127 + fmt.max_exponent, 0
    if recipe.scale_rounding == "nearest_even":
        add = 1 << (shift - 1)
    elif recipe.scale_rounding == "ceil":
        less, add = 0, 0x7FFFFF - int(np.float32(fmt.max).view(np.int32))
    return Constants(
        integer=fmt.twos_complement,
        wide=wide,
        e4m3=hardware and fmt.name == "e4m3" and not truncate,
        e5m2=hardware and fmt.name == "e5m2" and not truncate,
        truncate=truncate,
        bounded=bounded,
        nonfinite=nonfinite,
        infinite=fmt.infinity,
        negative_zero=fmt.negative_zero,
        max=fmt.max,
        twice_max=min(2 * fmt.max, _FLOAT32_MAX),
        limit=limit,
        max_code=max_code,
        top_code=max_code + 1,
        min_bits=(fmt.min_exponent + 127) << 23,
        magic=float(np.int32(magic).view(np.float32)),
        shift=shift,
        half_less=(1 << shift >> 1) - 1,
        step=fmt.fraction_bits << 23,
        code_mask=(1 << (fmt.bits - 1)) - 1,
        full_mask=(1 << fmt.bits) - 1,
        sign_mask=1 << (fmt.bits - 1),
        sign_shift=32 - fmt.bits,
        nan_code=fmt.nan_code or 0,
        special_bits=0x7F800000 if fmt.infinity else 0x7FC00000,
        scaled=recipe.scaling != "none",
        power=recipe.is_power_of_two,
        scale_add=add,
        scale_less=less,
        exact=truncate and nonfinite and not bounded,
    )
