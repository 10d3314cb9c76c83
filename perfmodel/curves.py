"""Time over size, drawn through measured points in logarithms of both, never falling, without a bend that they do not have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Piecewise cubic Hermite interpolation that keeps the order of its points (Fritsch and Butland, 1984).

    More bytes never take less time: points that say so are noise, and stand at their mean (isotonic regression). Below the
    first point its value: there latency alone counts. Beyond the last one, the bandwidth of the last two intervals: time
    grows by as much a byte as it did there.

    Attributes:
        sizes: Bytes, increasing; at least three.
        times: Microseconds, as measured.
    """

    sizes: Array
    times: Array

    @cached_property
    def _rising(self) -> Array:
        """Logarithms of the times, none below the one before it."""
        groups: list[tuple[float, int]] = []
        for value in np.log(self.times).tolist():
            groups.append((value, 1))
            while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
                (first, few), (second, more) = groups[-2:]
                groups[-2:] = [((first * few + second * more) / (few + more), few + more)]
        return np.repeat([value for value, _ in groups], [count for _, count in groups])

    def __call__(self, size: npt.ArrayLike) -> Array:
        """Time in microseconds at each size in bytes."""
        wanted = np.atleast_1d(np.asarray(size, dtype=np.float64))
        inside = np.clip(wanted, self.sizes[0], self.sizes[-1])
        result = np.exp(_hermite(np.log(self.sizes), self._rising, np.log(inside)))
        ends = np.exp(self._rising[[-3, -1]])
        a_byte = (ends[1] - ends[0]) / (self.sizes[-1] - self.sizes[-3])
        return result + np.maximum(wanted - self.sizes[-1], 0.0) * a_byte

    def without(self, index: int) -> Curve:
        """The same without one of its points, for judging it by that point."""
        keep = np.arange(len(self.sizes)) != index
        return Curve(self.sizes[keep], self.times[keep])

    def beyond(self, octaves: float) -> float | None:
        """The largest size predicted from those at least so many octaves below it, over its time; None if they are too few."""
        keep = self.sizes <= self.sizes[-1] / 2**octaves
        if keep.sum() < 3:
            return None
        return float(Curve(self.sizes[keep], self.times[keep])(self.sizes[-1])[0] / self.times[-1])


def _hermite(x: Array, y: Array, at: Array) -> Array:
    width, rise = np.diff(x), np.diff(y) / np.diff(x)
    left, right = 2 * width[1:] + width[:-1], width[1:] + 2 * width[:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        harmonic = (left + right) / (left / rise[:-1] + right / rise[1:])
    inner = np.where(rise[:-1] * rise[1:] > 0, harmonic, 0.0)
    slope = np.concatenate([[_end(width[:2], rise[:2])], inner, [_end(width[:-3:-1], rise[:-3:-1])]])
    i = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    t = (at - x[i]) / width[i]
    ends = y[i] * (1 + 2 * t) * (1 - t) ** 2 + y[i + 1] * t**2 * (3 - 2 * t)
    return ends + width[i] * t * (1 - t) * (slope[i] * (1 - t) - slope[i + 1] * t)


def _end(width: Array, rise: Array) -> float:
    """Slope at an end: of the parabola through three points, cut back where it would overshoot."""
    slope = ((2 * width[0] + width[1]) * rise[0] - width[0] * rise[1]) / (width[0] + width[1])
    if slope * rise[0] <= 0:
        return 0.0
    if rise[0] * rise[1] <= 0 and abs(slope) > 3 * abs(rise[0]):
        return float(3 * rise[0])
    return float(slope)
