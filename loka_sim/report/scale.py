"""Axes: where a value stands on a plot, in percent of its width or height, and the ticks to label."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`; logarithmic ones need positive ends."""

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Position of a value in percent, 0 at `low`; values beyond an end stand at that end."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(100 * share, 3)

    def ticks(self, at_most: int = 6) -> list[float]:
        """Round values to label, inside the axis, ascending."""
        if not self.logarithmic or self.high / self.low < 4:
            step = nice_step((self.high - self.low) / at_most)
            first = math.ceil(self.low / step - 1e-9)
            last = math.floor(self.high / step + 1e-9)
            return [round(index * step, 10) for index in range(first, last + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for mantissas in ((1, 1.25, 1.5, 2, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            values = [float(f"{mantissa}e{decade}") for decade in decades for mantissa in mantissas]
            inside = [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]
            if len(inside) <= at_most:
                return inside
        return inside[:: math.ceil(len(inside) / at_most)]


def nice_step(least: float) -> float:
    """The least of 1, 2, 2.5 or 5 times a power of ten that is not below `least`."""
    magnitude = 10.0 ** math.floor(math.log10(least))
    return next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= least * (1 - 1e-9))


def linear_around(values: Iterable[float], margin: float = 0.08) -> Scale:
    """A linear axis that holds the values, with a margin on both sides."""
    some = list(values)
    low, high = min(some), max(some)
    pad = (high - low) * margin or abs(high) * 0.1 or 1.0
    return Scale(low - pad, high + pad)


def log_around(values: Iterable[float], margin: float = 0.06) -> Scale:
    """A logarithmic axis that holds the values (positive), with a margin on both sides."""
    some = [value for value in values if value > 0] or [1.0]
    low, high = min(some), max(some)
    pad = max((high / low) ** margin, 1.03)
    return Scale(low / pad, high * pad, logarithmic=True)
