"""What quantizing an operand costs, from its statistics alone: noise, shrinkage, underflow and saturation.

Rounding depends on where a value lies below the amax that it shares a scale with, and on nothing else. So a
recipe is a curve over octaves below amax, made once by rounding a fine grid; a tensor is its profile over
the same axis (`TensorStatistics.profile_energy`, `.profile_counts`); the noise is the one weighted by the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from numerics.distributions import BINS_PER_OCTAVE, LEVELS, PHASES, PROFILE_BINS, SCOPES, TensorStatistics
from numerics.formats import Format
from numerics.recipe import Recipe
from numerics.sizes import check_whole

Array = npt.NDArray[np.float64]

_FINE = 64  # pieces per octave of a curve
_DEEPEST = 48  # octaves below amax where a curve ends
_ABOVE = 32  # octaves above the format's max where the curve of an unscaled cast starts
# Octaves above the format's max where the curve of an amax that is not the tensor's own starts: how little it may be of it.
_BEYOND = 16
# The scope whose profile serves a scaling, by contracted axis.
_SCOPE_OF = {
    "features": {
        "tensorwise": "tensor", "rowwise": "row", "columnwise": "column", "block1x128": "row128",
        "block128x128": "tile128", "mx32": "row32", "bdr16": "row16",
    },
    "rows": {
        "tensorwise": "tensor", "rowwise": "column", "columnwise": "row", "block1x128": "column128",
        "block128x128": "tile128", "mx32": "column32", "bdr16": "column16",
    },
}  # fmt: skip
# Elements of an operand (rows, k) that share a scale.
_SPANS: dict[str, Callable[[int, int], int]] = {
    "none": lambda rows, k: 1,
    "tensorwise": lambda rows, k: rows * k,
    "rowwise": lambda rows, k: k,
    "columnwise": lambda rows, k: rows,
    "block1x128": lambda rows, k: min(k, 128),
    "block128x128": lambda rows, k: min(k, 128) * min(rows, 128),
    "mx32": lambda rows, k: min(k, 32),
    "bdr16": lambda rows, k: min(k, 16),
}
# Operands that are worked on at once: few enough for a core's cache.
_AT_ONCE = 64
# The figures of `OperandNoise` in order, by the power of the value that each is relative to.
_ORDERS = (2, 1, 2, 0, 0)
_LOW = np.concatenate([[-0.125], np.arange(PROFILE_BINS - 1) / BINS_PER_OCTAVE])
_HIGH = np.concatenate([[0.125], np.arange(1, PROFILE_BINS - 1) / BINS_PER_OCTAVE, [_DEEPEST]])
_MAGNITUDES = np.exp2(-np.arange(PROFILE_BINS) / BINS_PER_OCTAVE)


@dataclass(frozen=True)
class OperandNoise:
    """The quantization of one operand, relative to its values.

    Attributes:
        power: Mean square of the error over mean square of the values.
        shrinkage: What a sum of values of one sign loses: minus the error's mean over that of the magnitudes.
        correlation: Minus the mean product of error and value, over the mean square of the values.
        underflow: Share of elements that are not zero and become zero.
        overflow: Share of elements beyond the range by over half a step.
    """

    power: float
    shrinkage: float
    correlation: float
    underflow: float
    overflow: float


def operand_noise(statistics: TensorStatistics, recipe: Recipe, rows: int, k: int, headroom: float | None = None) -> OperandNoise:
    """The noise of an operand (rows, k) with these statistics, oriented as it is contracted.

    Args:
        statistics: Of the operand.
        recipe: How it is quantized.
        rows: Its rows.
        k: Its products in a sum.
        headroom: For recipes with `amax` delayed or given, and only for those: that amax over the operand's own, the same
            in every scope. Values that it does not reach saturate.

    Raises:
        ValueError: such a recipe comes without it, another one with it, it is not a number from 2^-16 to 2^16, or `rows` or `k`
            is no positive whole number.
    """
    check_whole(rows=rows, k=k)
    return _noise(statistics.origin, recipe, *_scope(recipe, rows, k, headroom))


def operand_noises(requests: Sequence[tuple[TensorStatistics, Recipe, int, int, float | None]]) -> Array:
    """`operand_noise` of many operands, each a tuple of its arguments: the figures in their order, (requests, 5)."""
    alike: dict[tuple[Recipe, float, str], dict[tuple[TensorStatistics, int], list[int]]] = {}
    for place, (statistics, recipe, rows, k, headroom) in enumerate(requests):
        length, above = _scope(recipe, rows, k, headroom)
        operands = alike.setdefault((recipe, above, statistics.contraction), {})
        operands.setdefault((statistics.origin, length), []).append(place)
    result = np.empty((len(requests), len(_ORDERS)))
    for (recipe, above, _), operands in alike.items():
        figures = _noises(list(operands), recipe, above)
        result[[place for places in operands.values() for place in places]] = np.repeat(
            figures, [len(places) for places in operands.values()], axis=0
        )
    return result


def _scope(recipe: Recipe, rows: int, k: int, headroom: float | None) -> tuple[int, float]:
    """Elements that share a scale, and how many octaves its amax lies above their own."""
    if (headroom is None) != (recipe.amax == "current"):
        if headroom is None:
            raise ValueError(
                f"recipe {recipe.name!r}: amax={recipe.amax} is not known from statistics; give headroom, that amax over the own"
            )
        raise ValueError(f"recipe {recipe.name!r} takes its own amax; leave out headroom = {headroom}")
    if headroom is not None and not 2.0**-_BEYOND <= headroom <= 2.0**_BEYOND:
        raise ValueError(f"headroom = {headroom}; give amax over the operand's own, from 2^-{_BEYOND} to 2^{_BEYOND}")
    return _SPANS[recipe.scaling](rows, k), math.log2(headroom or 1.0)


@functools.lru_cache(maxsize=16384)
def _noise(statistics: TensorStatistics, recipe: Recipe, length: int, above: float) -> OperandNoise:
    return OperandNoise(*_noises([(statistics, length)], recipe, above)[0].tolist())


def _noises(operands: Sequence[tuple[TensorStatistics, int]], recipe: Recipe, above: float) -> Array:
    """The noise of operands contracted alike, (operands, figures).

    Args:
        operands: Each with the number of elements that share a scale.
        recipe: Of all.
        above: Octaves by which the scale's amax lies above their own.
    """
    if recipe.scaling == "none":
        return np.stack([_unscaled(statistics, recipe) for statistics, _ in operands])
    scope = SCOPES.index(_SCOPE_OF[operands[0][0].contraction][recipe.scaling])
    records: dict[TensorStatistics, list[int]] = {}
    for place, (statistics, _) in enumerate(operands):
        records.setdefault(statistics, []).append(place)
    sizes = np.array([length for _, length in operands], dtype=np.float64)
    growth, stay = np.empty(len(sizes)), np.zeros((len(sizes), PROFILE_BINS))
    counts, weights = np.empty((len(sizes), PROFILE_BINS)), np.empty((len(_ORDERS), len(sizes), PROFILE_BINS))
    for statistics, some in records.items():
        counts[some] = count = statistics.profile_counts[scope].astype(np.float64)
        measured = max(float(statistics.profile_lengths[scope]), 1.0)
        growth[some] = _amax_growth(count, measured, sizes[some])
        if above == 0:
            stay[some] = _staying(count, measured, sizes[some], growth[some])
        energy, magnitudes = statistics.profile_energy[scope].astype(np.float64), count * _MAGNITUDES
        by_order = count, magnitudes / max(magnitudes.sum(), 1e-300), energy / max(energy.sum(), 1e-300)
        weights[:, some] = np.stack([by_order[order] for order in _ORDERS])[:, None]
    growth = growth + above
    figures = np.empty((len(sizes), len(_ORDERS)))
    if not recipe.is_power_of_two:
        # Where amax lies inside its octave does not matter.
        for start in range(0, len(sizes), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            figures[part] = _figures(recipe, None, counts[part], weights[:, part], growth[part, None], stay[part])
        return figures
    turns = np.round(growth * PHASES).astype(int)
    for statistics, some in records.items():
        for turn in np.unique(turns[some]):
            alike = [place for place in some if turns[place] == turn]
            place = np.roll(statistics.profile_phase[scope].astype(np.float64), turn)
            figures[alike] = _figures(recipe, place, counts[alike[0]], weights[:, alike], growth[alike, None], stay[alike])
    return figures


def _figures(recipe: Recipe, place: Array | None, counts: Array, weights: Array, growth: Array, stay: Array) -> Array:
    """The figures of `OperandNoise` for each growth of amax (operands, 1) that it `stay`s through in part, (operands, figures).

    Args:
        recipe: Of all operands.
        place: Where their amax lies inside its octave; None where that does not matter.
        counts: Their profile.
        weights: What its bins weigh in each figure, (figures, operands, bins).
        growth: In octaves.
        stay: Shares of each bin, (operands, bins).
    """
    # Mostly the first alone.
    most = int(np.flatnonzero(stay.any(0)).max(initial=-1)) + 1
    stay = stay[:, :most]

    def read(half_step: bool, where: Array | None) -> Array:
        curve = _curve(recipe, where, half_step)
        values = curve.mean(_LOW + growth, _HIGH + growth)
        values[..., :most] = stay * curve.at_amax[:, None, None] + (1 - stay) * values[..., :most]
        return (values * weights).sum(-1).T

    if recipe.shared is None or not recipe.shared.pairs or place is None:
        return read(False, place)
    # A pair halves its step when its other element, too, lies below the block's binade: the seldomer, the higher
    # amax stands in its octave.
    depths = (np.arange(PHASES) + 0.5) / PHASES
    edges = np.concatenate([[0.0], np.arange(PROFILE_BINS - 1) / BINS_PER_OCTAVE])
    below = 1.0 - np.interp(depths, edges[1:], np.cumsum(counts)[:-1])
    halved = float(place @ below) / max(float(place.sum()), 1e-30)
    return halved * read(True, place * below) + (1 - halved) * read(False, place * (1 - below))


def _staying(counts: Array, measured: float, lengths: Array, growth: Array) -> Array:
    """Shares of a profile's bins that are the amax of a scope of another length, (lengths, bins)."""
    # A longer scope's amax holds less of the energy: its square grew by 4^growth, and it stands for more values.
    stay = np.zeros((len(lengths), PROFILE_BINS))
    stay[:, 0] = np.minimum(1.0, 4.0**growth * measured / lengths)
    # A shorter one's are more of all values: the largest, all where it is alone.
    short = np.flatnonzero(lengths < measured)
    if len(short):
        before = np.cumsum(counts) - counts
        largest = (counts.sum() / lengths[short, None] - before) / np.maximum(counts, 1e-300)
        stay[short] = np.clip(largest, 0.0, 1.0)
    return stay


def _amax_growth(counts: Array, measured: float, lengths: Array) -> Array:
    """Octaves by which amax rises from `measured` elements to so many, by the slope of the profile's own tail.

    Of n values the greatest stands where a share of about 0.56/n lies above; how far the share 8/n lies below it
    gives octaves per doubling.
    """
    if measured < 2 or counts.sum() <= 0:
        return np.zeros(len(lengths))
    share = min(8.0 / measured, 0.5 * float(counts.sum()))
    position = np.concatenate([[0.0], np.arange(1, PROFILE_BINS) / BINS_PER_OCTAVE])
    below = float(np.interp(share, np.cumsum(counts), position))
    slope = min(below / math.log2(max(share * measured / 0.56, 2.0)), 1.0)
    return slope * np.log2(lengths / measured)


@dataclass(frozen=True)
class _Curve:
    """Integrals over depth, a row for each figure: of its error, and of the value that this is relative to."""

    start: int
    errors: np.ndarray
    values: np.ndarray
    at_amax: np.ndarray

    def mean(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Each figure for values spread evenly (in log) between two depths in octaves, (figures, *places)."""
        last = self.errors.shape[1] - 1
        low = np.clip((low - self.start) * _FINE, 0, last - 2)
        high = np.clip(np.maximum((high - self.start) * _FINE, low + 2), 0, last)
        (errors_low, values_low), (errors_high, values_high) = self._at(low), self._at(high)
        return (errors_high - errors_low) / (values_high - values_low)

    def _at(self, position: np.ndarray) -> Iterator[np.ndarray]:
        """Errors and values at places between those of the tables."""
        index = np.minimum(position.astype(np.int64), self.errors.shape[1] - 2)
        part, after = position - index, index + 1
        rest = 1 - part
        return (table.take(index, 1) * rest + table.take(after, 1) * part for table in (self.errors, self.values))


def _curve(recipe: Recipe, place: np.ndarray | None, half_step: bool) -> _Curve:
    """The recipe's curve, under powers of two mixed over where amax lies inside its octave (shares of sixteenths)."""
    curves = _curves(recipe, half_step)
    if len(curves) == 1 or place is None:
        return curves[0]
    weights = (place + 1e-9) / (place + 1e-9).sum()  # of an all-zero tensor: anywhere
    errors, at_amax = _stacked(recipe, half_step)
    return _Curve(curves[0].start, np.tensordot(weights, errors, 1), curves[0].values, weights @ at_amax)


@functools.lru_cache(maxsize=256)
def _stacked(recipe: Recipe, half_step: bool) -> tuple[np.ndarray, np.ndarray]:
    curves = _curves(recipe, half_step)
    return np.stack([curve.errors for curve in curves]), np.stack([curve.at_amax for curve in curves])


@functools.lru_cache(maxsize=256)
def _curves(recipe: Recipe, half_step: bool) -> tuple[_Curve, ...]:
    """One curve, or one for each sixteenth of an octave that amax may lie in."""
    start = -_ABOVE if recipe.scaling == "none" else 0 if recipe.amax == "current" else -_BEYOND - 1
    depth = np.arange(start * _FINE, _DEEPEST * _FINE) / _FINE
    groups = _scaled_amax(recipe)
    # Points inside a piece: enough that a format's steps do not beat with them.
    points = 32 // groups.shape[1]
    middle = np.exp2(-(depth[:, None] + (np.arange(points) + 0.5) / (points * _FINE)))
    values = np.stack([_from_deep_end((middle**order).mean(1)) for order in _ORDERS])
    curves = []
    for peaks in groups:
        scattered = _errors(peaks[:, None, None] * middle, recipe, half_step)
        errors = [_from_deep_end((error * middle**order).mean((0, 2))) for error, order in zip(scattered, _ORDERS, strict=True)]
        at_amax = np.array([value.mean() for value in _errors(_quotients(peaks, recipe), recipe, half_step)])
        curves.append(_Curve(start, np.stack(errors), values, at_amax))
    return tuple(curves)


def _from_deep_end(pieces: np.ndarray) -> np.ndarray:
    """Minus the integral from a depth to the end, where values are tiny: nothing is lost against larger sums."""
    return np.append(-np.cumsum(pieces[::-1])[::-1], 0.0)


def _scaled_amax(recipe: Recipe) -> np.ndarray:
    """Where amax comes to lie on the element's grid: (1, 1), or (16, 8) points of an octave under powers of two."""
    if recipe.scaling == "none":
        return np.array([[_unscaled_reference(recipe.element)]])
    if not recipe.is_power_of_two:
        return np.array([[recipe.element.max]])
    phases = ((np.arange(8 * PHASES) + 0.5) / (8 * PHASES)).reshape(PHASES, 8)
    if recipe.shared is not None:
        return np.exp2(recipe.shared.magnitude_bits - 1 + phases)
    fmt = recipe.element
    if recipe.scale_rounding == "ceil":
        return fmt.max * np.exp2(-((math.log2(fmt.max) - phases) % 1.0))
    peaks = np.exp2(fmt.max_exponent + phases)
    if recipe.scale_rounding == "nearest_even":
        step = 2.0 ** (fmt.max_exponent - fmt.fraction_bits)
        peaks = np.where(np.rint(peaks / step) * step >= 2.0 ** (fmt.max_exponent + 1), peaks / 2, peaks)
    return peaks


def _quotients(peaks: np.ndarray, recipe: Recipe) -> np.ndarray:
    """What amax over its scale comes to in float32, of an amax that is to lie at these peaks.

    A scale that is no power of two is rounded, and the quotient may lie below the format's max: rounding to nearest mends that,
    rounding toward zero takes a whole step off.
    """
    if recipe.is_power_of_two or recipe.scaling == "none":
        return peaks
    amax = np.linspace(1.0, 2.0, 4096, endpoint=False, dtype=np.float32)
    return (amax / (amax / np.float32(recipe.element.max))).astype(np.float64)


def _unscaled_reference(fmt: Format) -> float:
    return min(fmt.max, 2.0**16)


def _errors(values: np.ndarray, recipe: Recipe, half_step: bool) -> tuple[np.ndarray, ...]:
    """Of positive values on the element's grid: relative error squared, lost share twice, underflow, overflow."""
    if recipe.shared is not None:
        bits = recipe.shared.magnitude_bits
        step = np.where(values < 2.0 ** (bits - 1), 0.5 if half_step else 1.0, 1.0)
        rounded = np.minimum((np.trunc if recipe.rounding == "toward_zero" else np.rint)(values / step), 2.0**bits - 1) * step
        overflow, most = np.zeros_like(values), 2.0**bits - 1
    else:
        fmt = recipe.element
        step = np.exp2(np.maximum(np.floor(np.log2(values)), fmt.min_exponent) - fmt.fraction_bits)
        rounded, overflow = round_magnitudes(values, fmt, recipe.rounding)
        most = fmt.max
    error = rounded / values - 1.0
    power = np.square(error)
    if recipe.rounding == "stochastic":
        # Mean square f (1 - f) of a step at distance f from the value below, and no bias.
        part = values / step - np.floor(values / step)
        power = np.where(values < most, part * (1 - part) * np.square(step / values), power)
        error = np.where(values < most, 0.0, error)
    return power, -error, -error, (rounded == 0).astype(np.float64), overflow


def round_magnitudes(values: np.ndarray, fmt: Format, rounding: str = "nearest_even") -> tuple[np.ndarray, np.ndarray]:
    """Positive float64 values on the grid, saturated, and 1 where they lay beyond it: numpy's twin of `cast`."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(values, 1e-300))), fmt.min_exponent)
    step = np.exp2(exponent - fmt.fraction_bits)
    rounded = (np.trunc if rounding == "toward_zero" else np.rint)(values / step) * step
    top = fmt.max + 2.0 ** (fmt.max_exponent - fmt.fraction_bits - 1)
    return np.minimum(rounded, fmt.max), (values > top).astype(np.float64)


def _unscaled(statistics: TensorStatistics, recipe: Recipe) -> Array:
    """A plain cast: values keep their size, so the curve is read at the depth of the pooled marginal itself."""
    # Between two quantiles values are even; cut finely, a piece is about even in its logarithm too.
    position = np.arange(4 * (len(LEVELS) - 1) + 1) / 4
    values = np.interp(position, np.arange(len(LEVELS)), statistics.quantiles.astype(np.float64))
    share = np.repeat(np.diff(LEVELS) / 4, 4)
    inner, outer = np.sort(np.abs(np.stack([values[1:], values[:-1]])), 0)
    crossing = values[1:] * values[:-1] < 0
    inner[crossing] = 0.0
    kept = (outer > 0) & (share > 0)
    inner, outer, share = inner[kept], outer[kept], share[kept]
    if not outer.size:
        return np.zeros(len(_ORDERS))
    weights = {0: share, 1: share * (inner + outer) / 2, 2: share * (inner**2 + inner * outer + outer**2) / 3}
    curve = _curve(recipe, None, False)
    reference = math.log2(_unscaled_reference(recipe.element))
    low = reference - np.log2(outer)
    high = reference - np.log2(np.maximum(inner, outer * 2.0**-4))
    if recipe.element.max_exponent > _DEEPEST:
        # A wide format rounds alike in every octave; those that are far from the reference are off the curve.
        octaves = np.floor(low)
        low, high = low - octaves, high - octaves
    figures = []
    for values, order in zip(curve.mean(low, high), _ORDERS, strict=True):
        figures.append(float(values @ weights[order]) / (1.0 if order == 0 else float(weights[order].sum())))
    return np.array(figures)
