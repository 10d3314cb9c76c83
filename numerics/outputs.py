"""What a GEMM's outputs are before anything is rounded, from the statistics of its operands: their power, sizes and rows.

y = sum over K of a_k b_k, the operands independent of each other. With mean mu and covariance C of each,
E[y^2] = sum over k, k' of (C_a + mu_a mu_a^T)(C_b + mu_b mu_b^T): means and correlation count, not only variances.

In grad_weight the operands are not independent: what they share is the gradient. A `numerics.gradient.GradientSignal`,
collected beside the operands, says how large their sums are; without one they count as independent.

GEMMs of the same operands at many widths are worked on at once: a wider record repeats features, so that its sums are those
over the measured features, each as often as it is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from numerics.distributions import TensorStatistics
from numerics.formats import get_format
from numerics.gradient import GradientSignal
from numerics.normal import normal_quantile

Array = npt.NDArray[np.float64]

# Where |y| is looked at, in its root mean square: evenly in the logarithm, since 1/|y| is averaged.
_SIZES = np.exp2(np.linspace(-12.0, 2.75, 148))
_MIDDLE = np.sqrt(_SIZES[1:] * _SIZES[:-1])
_WIDTH = np.diff(_SIZES)
_POINTS = normal_quantile((np.arange(32) + 0.5) / 32)
# Nine places among 256, evenly.
_NINE = np.round(np.linspace(0, 255, 19)).astype(int)[1::2]
# Shares of a tensor's rows.
_SHARES = (np.arange(16) + 0.5) / 16
# Elements of arrays that are worked on at once, about.
_AT_ONCE = 2**18


@dataclass(frozen=True, eq=False)
class Outputs:
    """The outputs of a GEMM with these operands.

    Attributes:
        mean: Mean of y.
        power: Mean square of y.
        independent: Sum over K of the products' mean squares: what y's variance is for independent products.
        k: Products in a sum.
        spread: Nine sizes of an output's row and column against the whole, mean square 1.
        coupling: How far the error's power follows y^2 beyond that. Of a Gaussian row, |a|^2 varies by 2 / d (d its effective
            dimension) and y with it; what varies beyond are samples of different scale. And an output near zero has lost one
            of its effective number of products.
    """

    mean: float
    power: float
    independent: float
    k: int
    spread: Array
    coupling: float

    @cached_property
    def figures(self) -> tuple[float | bytes, ...]:
        """What makes two equal."""
        return self.mean, self.power, self.independent, self.k, self.coupling, self.spread.tobytes()

    @property
    def centre(self) -> float:
        """Size of the mean in the root mean square."""
        return abs(self.mean) / math.sqrt(self.power)

    @property
    def far(self) -> bool:
        """Whether y, normal around its mean, hardly comes near zero."""
        return self.centre > 4.0 * math.sqrt(max(1.0 - self.centre**2, 0.0))


class Meeting(NamedTuple):
    """Two operands of a GEMM, oriented alike.

    Attributes:
        a: Left operand.
        b: Right operand.
        widths: Features that a and b are stretched to.
        k: Products in a sum.
        signal: Of operands contracted along rows, what they sum to.
        seen: Of operands contracted along features, y's power over that of independent products, where it is known.
    """

    a: TensorStatistics
    b: TensorStatistics
    widths: tuple[int, int]
    k: int
    signal: GradientSignal | None = None
    seen: float | None = None


def outputs_of(meetings: Sequence[Meeting]) -> list[Outputs]:
    """The outputs of each GEMM, one object for all that are equal; none depends on what is asked with it."""
    found: dict[Meeting, Outputs] = {}
    over_features: dict[tuple[TensorStatistics, TensorStatistics], list[Meeting]] = {}
    over_rows = []
    for meeting in dict.fromkeys(meetings):
        a, b, widths, *_ = meeting
        if a.contraction == "rows":
            over_rows.append(meeting)
            continue
        records = a.stretched(widths[0]), b.stretched(widths[1])
        if records[0].features != records[1].features:
            records = a.resized(widths[0]), b.resized(widths[1])
        over_features.setdefault(records, []).append(meeting)
    for records, some in over_features.items():
        each = max(1, _AT_ONCE // records[0].features)
        for part in (some[start : start + each] for start in range(0, len(some), each)):
            found.update(zip(part, _over_features(*records, part), strict=True))
    if over_rows:
        found.update(zip(over_rows, _over_rows(over_rows), strict=True))
    distinct: dict[tuple[float | bytes, ...], Outputs] = {}
    return [distinct.setdefault(each.figures, each) for each in map(found.__getitem__, meetings)]


def _over_features(a: TensorStatistics, b: TensorStatistics, meetings: Sequence[Meeting]) -> Iterator[Outputs]:
    """Sums over the features of two records, which have equally many."""
    widths = np.array([meeting.widths[0] for meeting in meetings])
    times = a.repeats(widths)
    second_a, second_b = a.second_moment.astype(np.float64), b.second_moment.astype(np.float64)
    shared_a, shared_b = _shared(a), _shared(b)
    products = second_a * second_b
    diagonals = np.square(shared_a).sum(0) * np.square(shared_b).sum(0)
    sums = _sums(times, products, shared_a[0] * shared_b[0], diagonals, np.square(products))
    overlaps = np.array([np.square(some).sum() for some in _inner(shared_a, shared_b, times)])
    spreads, couplings = _rows_of(_rows_over_features(a, times), _rows_over_features(b, times))
    for meeting, width, (product, mean, diagonal, square), overlap, spread, coupling in zip(
        meetings, widths.tolist(), sums.tolist(), overlaps.tolist(), spreads, couplings.tolist(), strict=True
    ):
        stand = meeting.k / width
        independent, mean = stand * product, stand * mean
        if meeting.seen is not None:
            power = meeting.seen * independent
            mean = math.copysign(min(abs(mean), math.sqrt(power)), mean)
        else:
            power = max(stand**2 * overlap + independent - stand * diagonal, mean**2, 0.0)
        count = stand * product**2 / max(square, 1e-300)
        yield Outputs(mean, power, independent, meeting.k, spread, min(max(coupling, 1.0 / count if count else 1.0), 1.0))


def _shared(record: TensorStatistics) -> Array:
    """Mean and factor of a record, (1 + R, F)."""
    return np.concatenate([record.mean[None], record.factor]).astype(np.float64)


def _sums(times: Array, *values: Array) -> Array:
    """Sums of each of these over features, each counted so many times, (times, values); none depends on the others."""
    return (times[:, :, None] * np.stack(values, axis=1)).sum(1)


def _inner(first: Array, second: Array, times: Array) -> Iterator[Array]:
    """Inner products of all rows of one matrix with all of another, each feature counted so many times; for each `times`."""
    some = max(1, _AT_ONCE // first.size)
    for start in range(0, len(times), some):
        yield from (first * times[start : start + some, None, :]) @ second.T


def _over_rows(meetings: Sequence[Meeting]) -> Iterator[Outputs]:
    """Sums over rows, which are independent samples: products of different rows correlate by their means alone."""
    left, sizes_left = _features_of((meeting.a, meeting.widths[0]) for meeting in meetings)
    right, sizes_right = _features_of((meeting.b, meeting.widths[1]) for meeting in meetings)
    nothing = np.zeros(len(meetings))
    spreads, _ = _rows_of((sizes_left, nothing), (sizes_right, nothing))
    for meeting, (second_a, mean_a, square_a), (second_b, mean_b, square_b), spread in zip(
        meetings, left.tolist(), right.tolist(), spreads, strict=True
    ):
        k, signal = meeting.k, meeting.signal
        independent, mean = k * second_a * second_b, k * mean_a * mean_b
        if signal is not None:
            power = independent / k * signal.power(k)
            mean = math.copysign(min(abs(mean), k * math.sqrt(independent / k * signal.quadratic), math.sqrt(power)), mean)
            independent *= signal.independent
        else:
            power = max(independent + k * (k - 1.0) * square_a * square_b, mean**2)
        yield Outputs(mean, power, independent, k, spread, min(1.0 / k, 1.0))


def _features_of(records: Iterable[tuple[TensorStatistics, int]]) -> tuple[Array, Array]:
    """Of records and their widths: means over features, and sizes of features.

    Returns:
        Mean of the mean square, the mean and the squared mean, (records, 3); sixteen sizes, mean square 1, (records, 16).
    """
    places: dict[TensorStatistics, tuple[list[int], list[int]]] = {}
    for place, (record, width) in enumerate(records):
        some, widths = places.setdefault(record.stretched(width), ([], []))
        some.append(place)
        widths.append(width)
    number = sum(len(some) for some, _ in places.values())
    means, sizes = np.empty((number, 3)), np.empty((number, len(_SHARES)))
    for record, (some, widths) in places.items():
        distinct, inverse = np.unique(widths, return_inverse=True)
        each = max(1, _AT_ONCE // record.features)
        parts = [_features_at(record, distinct[start : start + each]) for start in range(0, len(distinct), each)]
        means[some] = np.concatenate([part[0] for part in parts])[inverse]
        sizes[some] = np.concatenate([part[1] for part in parts])[inverse]
    return means, sizes


def _features_at(record: TensorStatistics, widths: npt.NDArray[np.int64]) -> tuple[Array, Array]:
    """As `_features_of`, of one record at so many widths."""
    times = record.repeats(widths)
    second, mean = record.second_moment.astype(np.float64), record.mean.astype(np.float64)
    square = np.square(mean)
    columns = _sums(times, second, mean, square, second - square) / widths[:, None]
    # A mean over n rows is off by a variance of 1/n; squared, that would pass for a mean.
    columns[:, 2] = np.maximum(columns[:, 2] - columns[:, 3] / max(record.rows_seen, 1), 0.0)
    size = _quantiles(np.sqrt(np.maximum(second, 0.0)), times)
    size = np.maximum(size / np.maximum(np.sqrt(np.mean(size**2, axis=1)), 1e-300)[:, None], 1e-30)
    return columns[:, :3], size


def _quantiles(values: Array, times: Array) -> Array:
    """Quantiles of values at `_SHARES`, each value counted so many times, (times, shares)."""
    order = np.argsort(values, kind="stable")
    values, below = values[order], np.cumsum(times[:, order], axis=1)
    places = (below[:, -1:] - 1.0) * _SHARES
    whole = np.floor(places)
    # One search for all: each one's counts lie above those of the one before.
    above = np.cumsum(np.append(0.0, below[:-1, -1] + 1.0))[:, None]
    counts, first = (below + above).reshape(-1), np.arange(len(times))[:, None] * len(values)
    lower, upper = (
        values[np.minimum(np.searchsorted(counts, at + above, side="right") - first, len(values) - 1)]
        for at in (whole, whole + 1.0)
    )
    return lower + (places - whole) * (upper - lower)


def _rows_over_features(record: TensorStatistics, times: Array) -> tuple[Array, Array]:
    """How a record's rows vary in size.

    Returns:
        Sixteen sizes, mean square 1, that a Gaussian's own variation does not explain, (times, 16); and half of what it does,
        (times,).
    """
    size = np.maximum(record.row_rms.astype(np.float64), 1e-30)
    size /= math.sqrt(float(np.mean(size**2)))
    variance = float(np.mean(size**4)) - 1.0
    shared, residual = _shared(record), record.residual.astype(np.float64)
    each = np.square(shared).sum(0)
    trace, rest = _sums(times, each + residual, np.square(residual) + 2 * each * residual).T
    overlap = np.array([np.square(some).sum() for some in _inner(shared, shared, times)]) + rest
    expected = 2.0 * overlap / np.maximum(trace**2, 1e-300)
    beyond = np.maximum(math.log1p(variance) - np.log1p(expected), 0.0)
    exponent = beyond / math.log1p(variance) if variance > 1e-9 else np.zeros(len(times))
    sizes = size ** exponent[:, None]
    return sizes / np.sqrt(np.mean(sizes**2, axis=1))[:, None], np.minimum(variance, expected) / 2.0


def _rows_of(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    """`Outputs.spread` of each, and what operands' rows add to the coupling."""
    products = np.sort((left[0][:, :, None] * right[0][:, None, :]).reshape(len(left[0]), -1), axis=1)
    spread = products[:, _NINE]
    return spread / np.sqrt(np.mean(spread**2, axis=1))[:, None], left[1] + right[1]


def densities(outputs: Sequence[Outputs]) -> tuple[Array, Array]:
    """Sizes |y| in each GEMM's root mean square, and the share of each, (GEMMs, sizes); all are `far`, or none is."""
    centre = np.array([each.centre for each in outputs])[:, None]
    deviation = np.sqrt(np.maximum(1.0 - centre**2, 0.0))
    if outputs[0].far:
        # Far from zero: a few normal points around the mean, no floor in reach.
        return centre + deviation * _POINTS, np.full((len(outputs), len(_POINTS)), 1.0 / len(_POINTS))
    density = sum(np.exp(-0.5 * np.square((_MIDDLE + side) / deviation)) for side in (centre, -centre))
    share = density * _WIDTH
    return np.broadcast_to(_MIDDLE, share.shape), share / share.sum(1)[:, None]


def rounding(outputs: Sequence[Outputs], sizes: Array, output: str) -> Array:
    """Mean square error of rounding each size of `densities`, relative to the outputs' mean square, (GEMMs, sizes).

    Below the format's steps an output is lost; beyond its range it saturates, if it has 8 bits or less. Wider ones are taken to
    hold every output.
    """
    if output == "fp32":
        return np.zeros(sizes.shape)
    fmt = get_format(output)
    scale = np.sqrt(np.array([each.power for each in outputs]))[:, None]
    binade = np.exp2(np.maximum(np.floor(np.log2(sizes * scale)), fmt.min_exponent))
    error: Array = np.minimum(np.square(binade * fmt.epsilon / scale) / 12.0, np.square(sizes))
    most = fmt.max / scale
    return np.where(sizes > most, np.square(sizes - most), error) if fmt.bits <= 8 else error
