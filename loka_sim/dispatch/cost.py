"""Predicted times of kernel launches, sums of them, and whether a gain is sure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from loka_sim.dispatch.candidates import Row
from perfmodel.step import combine

if TYPE_CHECKING:
    from perfmodel.model import PerfModel


class Time(NamedTuple):
    """A predicted time with the ends of its 90% interval, in microseconds."""

    us: float
    low_us: float
    high_us: float


@dataclass(frozen=True)
class Times:
    """Predicted time of every launch that a decision may need. Methods take launches one by one, or a `Counter` of them.

    Attributes:
        of: Time per row.
        outside: Rows outside the sweep that the time model was fitted on.
    """

    of: Mapping[Row, Time]
    outside: frozenset[Row] = frozenset()

    @classmethod
    def predict(cls, model: PerfModel, rows: Iterable[Row]) -> Times:
        """Ask the time model once for all rows."""
        ordered = sorted(set(rows))
        asked = dict(zip(Row._fields, zip(*ordered, strict=True), strict=True)) if ordered else dict.fromkeys(Row._fields, ())
        predicted = model.predict(asked)
        columns = (predicted[name].tolist() for name in ("time_us", "low_us", "high_us"))
        inside = model.in_range(asked).tolist()
        return cls(
            {row: Time(*entry) for row, entry in zip(ordered, zip(*columns, strict=True), strict=True)},
            frozenset(row for row, known in zip(ordered, inside, strict=True) if not known),
        )

    def sum(self, rows: Iterable[Row]) -> float:
        """Total time of launches, in microseconds."""
        return sum(count * self.of[row].us for row, count in Counter(rows).items())

    def interval(self, rows: Iterable[Row]) -> Time:
        """Total of launches with its 90% interval, what all kernels are off together included."""
        counts = Counter(rows)
        if not counts:
            return Time(0.0, 0.0, 0.0)
        columns = zip(*([count * end for end in self.of[row]] for row, count in counts.items()), strict=True)
        return Time(*combine(*columns))

    def difference(self, rows: Iterable[Row], without: Iterable[Row]) -> Time:
        """Time of `rows` less that of `without`, with its 90% interval.

        Launches on both sides cancel, and with them their errors; what all kernels are off together scales the
        difference and cannot turn its sign, so it is left out. Of the others, equal launches are off together,
        different ones independently: half-widths add within a row and combine in quadrature over rows.
        """
        new, gone = Counter(rows), Counter(without)
        new, gone = new - gone, gone - new
        us = below = above = 0.0
        for sign, counts in ((1, new), (-1, gone)):
            for row, count in counts.items():
                time = self.of[row]
                ends = (count * (time.us - time.low_us), count * (time.high_us - time.us))[::sign]
                us += sign * count * time.us
                below += ends[0] ** 2
                above += ends[1] ** 2
        return Time(us, us - below**0.5, us + above**0.5)

    def surely_less(self, rows: Iterable[Row], than: Iterable[Row]) -> bool:
        """Whether launching `rows` instead of `than` saves time even at the bad end of the difference's interval.

        One end of a 90% interval: a gain that passes is sure at 95%.
        """
        return self.difference(rows, than).high_us < 0
