"""Predicted times of kernel launches, and sums and differences of them with their intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loka_sim.dispatch.candidates import Row
from perfmodel.step import combine

if TYPE_CHECKING:
    from perfmodel.model import PerfModel

Array = npt.NDArray[np.float64]


class Time(NamedTuple):
    """A predicted time with the ends of its 90% interval, in microseconds."""

    us: float
    low_us: float
    high_us: float


@dataclass(frozen=True)
class Times:
    """Predicted time of every launch that a decision may need. Methods take launches one by one, or a `Counter` of some of each.

    Attributes:
        of: Time per row.
        outside: Rows outside the sweep that the time model was fitted on.
    """

    of: Mapping[Row, Time]
    outside: frozenset[Row] = frozenset()

    @classmethod
    def predict(cls, model: PerfModel, rows: Iterable[Row]) -> Times:
        """Ask the time model once for all rows, kernels of one GEMM together, in their order."""
        ordered = list(dict.fromkeys(rows))
        asked = dict(zip(Row._fields, zip(*ordered, strict=True), strict=True)) if ordered else dict.fromkeys(Row._fields, ())
        predicted = model.predict_together(asked)
        columns = (predicted[name].tolist() for name in ("time_us", "low_us", "high_us"))
        inside = model.in_range(asked).tolist()
        return cls(
            dict(zip(ordered, map(Time, *columns), strict=True)),
            frozenset(row for row, known in zip(ordered, inside, strict=True) if not known),
        )

    def columns(self, rows: Iterable[tuple[str, int, int, int, int]]) -> Array:
        """Time and both ends of its interval of launches, given as `Row` or as tuples that are equal to one, (launches, 3)."""
        of: Mapping[Any, Time] = self.of
        return np.fromiter(chain.from_iterable(map(of.__getitem__, rows)), dtype=np.float64).reshape(-1, 3)

    def sum(self, rows: Iterable[Row]) -> float:
        """Total time of launches, in microseconds."""
        of = self.of
        return sum(count * of[row].us for row, count in _counted(rows).items())

    def interval(self, rows: Iterable[Row]) -> Time:
        """Total of launches with its 90% interval, what all kernels are off together included."""
        counts, of = _counted(rows), self.of
        if not counts:
            return Time(0.0, 0.0, 0.0)
        ends = (of[row] if count == 1 else [count * end for end in of[row]] for row, count in counts.items())
        return Time(*combine(*zip(*ends, strict=True)))

    def difference(self, rows: Iterable[Row], without: Iterable[Row]) -> Time:
        """Time of `rows` less that of `without`, with its 90% interval.

        Launches on both sides cancel, and with them their errors; what all kernels are off together scales the
        difference and cannot turn its sign, so it is left out. Of the others, equal launches are off together,
        different ones independently: half-widths add within a row and combine in quadrature over rows.
        """
        new, gone = _counted(rows), _counted(without)
        if gone:
            new, gone = new - gone, gone - new
        us = below = above = 0.0
        of = self.of
        for row, count in new.items():
            time, low, high = of[row]
            us += count * time
            below += (count * (time - low)) ** 2
            above += (count * (high - time)) ** 2
        for row, count in gone.items():
            time, low, high = of[row]
            us -= count * time
            below += (count * (high - time)) ** 2
            above += (count * (time - low)) ** 2
        return Time(us, us - below**0.5, us + above**0.5)


def _counted(rows: Iterable[Row]) -> Counter[Row]:
    return rows if isinstance(rows, Counter) else Counter(rows)
