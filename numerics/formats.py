"""Number formats as data: one frozen record each. `numerics.rounding` rounds to all of them with one algorithm.

Sources: OCP 8-bit Floating Point Specification 1.0 (e4m3, e5m2), OCP Microscaling Formats 1.0 (e3m2, e2m3, e2m1,
e8m0), Noune et al. 2022 (the fnuz pair), IEEE 754-2019 (fp16).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary number format.

    A magnitude is a whole multiple of 2**(exponent - fraction_bits), its exponent at least `min_exponent`. An
    integer is the case where the exponent never leaves `min_exponent`.

    Attributes:
        name: The key in `FORMATS`.
        bits: Bits of a code.
        fraction_bits: Bits after the leading one of a normal number.
        min_exponent: Exponent of the least normal number; subnormals share it.
        max: Greatest finite value.
        infinity: Whether codes for infinities exist.
        nan_code: A code that is NaN; None when there is none.
        signed: Whether there is a sign bit.
        negative_zero: Whether -0 has a code of its own.
        twos_complement: Codes are two's complement (integers), not sign and magnitude.
        zero: Whether zero has a code (e8m0 has none: its least value stands for it).
    """

    name: str
    bits: int
    fraction_bits: int
    min_exponent: int
    max: float
    infinity: bool = False
    nan_code: int | None = None
    signed: bool = True
    negative_zero: bool = True
    twos_complement: bool = False
    zero: bool = True

    @property
    def min_normal(self) -> float:
        """Least normal value."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """Least positive value."""
        return 2.0 ** (self.min_exponent - (self.fraction_bits if self.zero else 0))

    @property
    def max_exponent(self) -> int:
        """Exponent of the greatest finite value."""
        return int(np.frexp(self.max)[1]) - 1

    @property
    def epsilon(self) -> float:
        """Spacing above 1, of a format that reaches it with normal numbers."""
        return 2.0**-self.fraction_bits

    def values(self) -> np.ndarray:
        """(2**bits,) float64: the value of every code in order; for formats of at most 16 bits.

        Raises:
            ValueError: the format is wider.
        """
        if self.bits > 16:
            raise ValueError(f"{self.name} has {self.bits} bits; its codes are not listed")
        return _values(self).copy()


@functools.cache
def _values(fmt: Format) -> np.ndarray:
    codes = np.arange(2**fmt.bits)
    if fmt.twos_complement:
        return np.where(codes >= 2 ** (fmt.bits - 1), codes - 2**fmt.bits, codes).astype(np.float64)
    if not fmt.zero:
        values = np.ldexp(1.0, codes + fmt.min_exponent)
    else:
        magnitude_bits = fmt.bits - int(fmt.signed)
        magnitude = codes & (2**magnitude_bits - 1)
        field, fraction = np.divmod(magnitude, 2**fmt.fraction_bits)
        significand = fraction + np.where(field > 0, 2**fmt.fraction_bits, 0)
        values = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - 1 + fmt.min_exponent - fmt.fraction_bits)
        sign = codes >> magnitude_bits
        beyond = values > fmt.max
        values = np.where(sign > 0, -values, values)
        first = field == 2 ** (magnitude_bits - fmt.fraction_bits) - 1
        infinite = first & (fraction == 0) & fmt.infinity
        values[beyond] = np.nan
        values[infinite] = np.where(sign[infinite] > 0, -np.inf, np.inf)
        if not fmt.negative_zero and fmt.signed:
            values[2**magnitude_bits] = np.nan if fmt.nan_code == 2**magnitude_bits else 0.0
    if fmt.nan_code is not None:
        values[fmt.nan_code] = np.nan
    return values


# int8 and int4 are symmetric: the most negative code (-128, -8) is decoded, never produced.
FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("e4m3", 8, 3, -6, 448.0, nan_code=0x7F),
        Format("e5m2", 8, 2, -14, 57344.0, infinity=True, nan_code=0x7F),
        Format("e4m3fnuz", 8, 3, -7, 240.0, nan_code=0x80, negative_zero=False),
        Format("e5m2fnuz", 8, 2, -15, 57344.0, nan_code=0x80, negative_zero=False),
        Format("e3m2", 6, 2, -2, 28.0),
        Format("e2m3", 6, 3, 0, 7.5),
        Format("e2m1", 4, 1, 0, 6.0),
        Format("e8m0", 8, 0, -127, 2.0**127, nan_code=0xFF, signed=False, negative_zero=False, zero=False),
        Format("bf16", 16, 7, -126, (2 - 2.0**-7) * 2.0**127, infinity=True, nan_code=0x7FC0),
        Format("fp16", 16, 10, -14, 65504.0, infinity=True, nan_code=0x7E00),
        Format("tf32", 19, 10, -126, (2 - 2.0**-10) * 2.0**127, infinity=True, nan_code=0x3FE00),
        Format("int8", 8, 6, 6, 127.0, negative_zero=False, twos_complement=True),
        Format("int4", 4, 2, 2, 7.0, negative_zero=False, twos_complement=True),
    )
}


def get_format(fmt: str | Format) -> Format:
    """The record of that name; a record is returned as it is.

    Raises:
        ValueError: there is no such format.
    """
    if isinstance(fmt, Format):
        return fmt
    if not isinstance(fmt, str) or fmt not in FORMATS:
        raise ValueError(f"unknown format {fmt!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[fmt]
