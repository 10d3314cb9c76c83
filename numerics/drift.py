"""What Hopper's FP8 accumulation adds to a GEMM's error, from statistics alone: its bias toward zero and its noise.

A step adds 32 products to the accumulator in a unit 13 bits below the largest exponent among them. Once the sum
has outgrown the products, bits of every product lie below that unit and are cut toward zero; so are the accumulator's
own when a product is larger, or when the sum moves up an octave. The model follows the accumulator over K for several
outcomes y: given y, after a share t of K it is about normal, mean y t and variance D t (1 - t), D the variance that the
products would sum to if they were independent. All sizes are relative to the products' root mean square.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np

from numerics.distributions import BINS_PER_OCTAVE, PROFILE_BINS, SCOPES, TensorStatistics
from numerics.normal import normal_quantile
from numerics.outputs import Outputs
from numerics.reference import FRACTION_BITS, GROUP, PROMOTION

_LEAST = -60
# Octaves below amax at the middle of each bin of a profile.
_DEPTH = np.maximum(np.arange(PROFILE_BINS) - 0.5, 0.0) / BINS_PER_OCTAVE
_OUTCOMES = normal_quantile((np.arange(8) + 0.5) / 8)
_PATHS = normal_quantile((np.arange(4) + 0.5) / 4)
_PEAKS = (np.arange(3) + 0.5) / 3
# An exponent is the floor of a logarithm: on average of 2**, 0.47 octaves less. A product's exponent is the sum of
# two such floors, so that its significand is left in [1, 4).
_FLOOR = 0.47
# Places along K that are looked at, of every path, that are worked on at once: few enough for a core's cache.
_AT_ONCE = 960


@dataclass(frozen=True)
class Drift:
    """The accumulator's error.

    Attributes:
        shrinkage: Share of y that is lost toward zero (least squares over outcomes).
        power: Mean square of the rest, relative to the mean square of y.
        sizes: Some sizes |y|, rising, in the root mean square of y.
        shares: Share of y lost at those sizes: large sums lose more.
        noise: Mean square of what is lost or gained at random, relative to the mean square of y.
    """

    shrinkage: float
    power: float
    sizes: tuple[float, ...] = (1.0,)
    shares: tuple[float, ...] = (0.0,)
    noise: float = 0.0


class Accumulation(NamedTuple):
    """How the products of one GEMM are summed.

    Attributes:
        a: Left operand.
        b: Right operand.
        outputs: What they sum to.
        accumulation: As in `numerics.fp8_matmul`.
        fraction_bits: Fraction bits of both formats together (6 for two e4m3).
        split_k: Parts of K that are summed apart.
    """

    a: TensorStatistics
    b: TensorStatistics
    outputs: Outputs
    accumulation: str
    fraction_bits: int
    split_k: int = 1

    @property
    def exact(self) -> bool:
        """Whether there is nothing to lose: another accumulation than Hopper's, which keeps FP32's bits, or no output."""
        return (
            self.accumulation not in ("hopper_fast", "hopper_split") or self.outputs.independent <= 0 or self.outputs.power <= 0
        )

    @property
    def chains(self) -> float:
        """Chains of additions in the tensor core that make one output."""
        return max(self.outputs.k / PROMOTION, 1.0) if self.accumulation == "hopper_split" else float(self.split_k)

    @property
    def steps(self) -> int:
        """Additions of a group of products to a chain."""
        return max(math.ceil(self.outputs.k / self.chains / GROUP), 1)


def drifts(requests: Sequence[Accumulation]) -> list[Drift]:
    """The error of each accumulation; what it is does not depend on those that are asked with it."""
    found = [Drift(0.0, 0.0)] * len(requests)
    lossy = [place for place, asked in enumerate(requests) if not asked.exact]
    if lossy:
        for place, drift in zip(lossy, _drifts([requests[place] for place in lossy]), strict=True):
            found[place] = drift
    return found


def _drifts(requests: Sequence[Accumulation]) -> list[Drift]:
    """Errors of accumulations that lose something."""
    figures = [(y.mean, y.power, y.independent, y.k, y.coupling) for y in (asked.outputs for asked in requests)]
    mean, power, independent, k, coupling = np.array(figures, dtype=np.float64).T
    chains, steps = np.array([(asked.chains, asked.steps) for asked in requests], dtype=np.float64).T
    unit = np.sqrt(independent / k)  # root mean square of a product
    deviation = np.sqrt(np.maximum(power - mean**2, 0.0)) / unit
    # Of a chain, given the whole: its part of y, and the spread of an independent part around it.
    outcomes = (mean / unit)[:, None] + deviation[:, None] * _OUTCOMES
    power = np.mean(outcomes**2, axis=1)
    # The arithmetic knows sizes only against the products at hand.
    scale = np.sqrt((1 - coupling)[:, None] + coupling[:, None] * outcomes**2 / power[:, None])
    spread = k / chains
    wander = spread * (1.0 - 1.0 / chains)
    results, loss, noise = outcomes / scale / chains[:, None], np.empty(outcomes.shape), np.empty(outcomes.shape)
    products = [_products(asked.a.origin, asked.b.origin, asked.fraction_bits) for asked in requests]
    for some in _alike(products, steps, chains):
        few = [products[place] for place in some]
        loss[some], noise[some] = _chains(few, results[some], wander[some], spread[some], steps[some])
    loss, noise = loss * chains[:, None] * scale, noise * chains[:, None] * scale**2
    first = np.mean(loss * outcomes, axis=1) / power
    # What is lost early is not there to be lost again: for a loss in proportion to the sum, 2 first is its rate.
    much = first > 1e-4
    rate = np.where(much, 2.0 * first, 1.0)
    shrinkage = np.where(much, 1.0 + np.expm1(-rate) / rate, first)
    loss *= np.where(much, shrinkage / np.where(much, first, 1.0), 1.0)[:, None]
    noise = np.mean(noise, axis=1) / power
    rest = np.mean(np.square(loss - shrinkage[:, None] * outcomes), axis=1) / power + noise
    order = np.argsort(np.abs(outcomes), axis=1)
    outcomes, loss = np.take_along_axis(outcomes, order, 1), np.take_along_axis(loss, order, 1)
    sizes = np.abs(outcomes) / np.sqrt(power)[:, None]
    shares = loss / np.where(outcomes == 0, 1.0, outcomes)
    columns = (shrinkage.tolist(), rest.tolist(), map(tuple, sizes.tolist()), map(tuple, shares.tolist()), noise.tolist())
    return [Drift(*figures) for figures in zip(*columns, strict=True)]


def _alike(products: Sequence[_Products], steps: np.ndarray, chains: np.ndarray) -> Iterator[list[int]]:
    """Which chains are looked at in equally many places, all or none of them whole sums: some at once, like products together."""
    found: dict[tuple[int, bool], dict[_Products, list[int]]] = {}
    for place, (each, taken, parts) in enumerate(zip(products, steps.tolist(), chains.tolist(), strict=True)):
        found.setdefault((_schedule(int(taken)).shape[1], parts == 1), {}).setdefault(each, []).append(place)
    for (looked_at, whole), by_products in found.items():
        places = list(chain.from_iterable(by_products.values()))
        at_once = max(_AT_ONCE // (looked_at * len(_paths(whole))), 1)
        yield from (places[start : start + at_once] for start in range(0, len(places), at_once))


@dataclass(frozen=True, eq=False)
class _Products:
    """Integrals over the products, by the exponent of the accumulator; means over three levels of the largest in a group.

    Straight between places, level outside them: a unit is the larger of two exponents, so it bends where they are equal.
    """

    exponents: np.ndarray  # log2 of the accumulator, the places
    # At the places: mean magnitude cut from a product; the same, times the product's magnitude; mean square of it.
    integrals: np.ndarray
    peaks: np.ndarray  # the largest product's power of two in a group, at three levels
    magnitude: float  # mean magnitude of a product

    @functools.cached_property
    def _lines(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where the line begins that an exponent below each place is on, and one above the last; its values there, its slopes."""
        slopes = np.diff(self.integrals) / np.diff(self.exponents)
        starts = np.insert(self.exponents, 0, self.exponents[0])
        return starts, np.insert(self.integrals, 0, self.integrals[:, 0], axis=1), np.pad(slopes, ((0, 0), (1, 1)))

    def at(self, exponent: np.ndarray, out: np.ndarray) -> None:
        """The three integrals into `out`, as `np.interp` finds each, the places looked up once."""
        starts, values, slopes = self._lines
        line = np.searchsorted(self.exponents, exponent, side="right")
        beyond = exponent - starts.take(line)
        for value, slope, found in zip(values, slopes, out, strict=True):
            np.multiply(slope.take(line), beyond, out=found)
            found += value.take(line)


@functools.lru_cache(maxsize=4096)
def _products(a: TensorStatistics, b: TensorStatistics, fraction_bits: int) -> _Products:
    # Within one sum, a row's own scale cancels: magnitudes come from the profile below the row's amax.
    counts, sizes = [], []
    for statistics in (a, b):
        scope = SCOPES.index("row" if statistics.contraction == "features" else "column")
        counts.append(statistics.profile_counts[scope].astype(np.float64))
        sizes.append(counts[-1] @ np.exp2(-2.0 * _DEPTH))
    weight = np.convolve(*counts)
    rms = math.log2(max(sizes[0] * sizes[1], 1e-300)) / 2
    magnitude = -(np.arange(len(weight)) - 1.0) / BINS_PER_OCTAVE - rms  # log2, the root mean square being 1
    centre = magnitude[::-1] - 1.0  # exponent of a significand product in [1, 4), which is 2 on average
    weight = weight[::-1]
    units = np.arange(-70, 60) / 2.0
    first, second = _cut_table(fraction_bits)
    # Bits of a product below the unit.
    bits = units[:, None] - (centre[None, :] - fraction_bits)
    grid = np.arange(len(first)) / 8.0
    occupied = weight > 0
    bits, size, weight_kept = bits[:, occupied], np.exp2(centre[occupied] - fraction_bits), weight[occupied]
    lost = np.interp(bits, grid, first) * size
    loss, weighted = lost @ weight_kept, (lost * np.exp2(centre[occupied] + 1.0)) @ weight_kept
    square = (np.interp(bits, grid, second) * size**2) @ weight_kept
    # The largest of 32: its distribution is that of one, to the 32nd power.
    below = (1.0 - weight.sum()) + np.cumsum(weight)
    peaks = np.interp(_PEAKS ** (1.0 / GROUP), below, centre)
    exponents = np.unique(np.concatenate([units + FRACTION_BITS, peaks]))
    unit = np.maximum(exponents[:, None], peaks) - FRACTION_BITS
    integrals = np.stack([np.interp(unit, units, table).mean(-1) for table in (loss, weighted, square)])
    return _Products(exponents, integrals, np.exp2(peaks), float(weight @ np.exp2(centre + 1.0)))


@functools.cache
def _cut_table(fraction_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and mean square of what a cut of c bits takes off a product, in units of its last bit, c in eighths."""
    left = fraction_bits // 2 + fraction_bits % 2
    right = fraction_bits - left
    significands = np.outer(np.arange(2**left, 2 ** (left + 1)), np.arange(2**right, 2 ** (right + 1))).reshape(-1)
    cuts = np.arange(fraction_bits + 3)
    taken = significands[None, :] % (2 ** cuts[:, None])
    grid = np.arange(8 * (len(cuts) - 1) + 1) / 8.0
    return np.interp(grid, cuts, taken.mean(1)), np.interp(grid, cuts, np.square(taken).mean(1).astype(float))


@functools.cache
def _schedule(steps: int) -> np.ndarray:
    """(2, places): after how many of a chain's steps it is looked at, and how many steps each place stands for."""
    if steps <= 12:
        return np.stack([np.arange(1, steps + 1), np.ones(steps)])
    # Steps stand for more of their kind as the sum grows slowly.
    edges = np.unique(np.round(np.concatenate([[0, 1, 2, 3], np.geomspace(4, steps, 12)])))
    return np.stack([(edges[1:] + edges[:-1] + 1) / 2, np.diff(edges)])


def _paths(whole: bool) -> np.ndarray:
    """Where a chain may end around its share of a result, in deviations: a chain that makes all of it ends there."""
    return np.zeros(1) if whole else _PATHS


def _chains(
    products: Sequence[_Products], results: np.ndarray, wander: np.ndarray, spread: np.ndarray, steps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean loss toward zero (signed as y) and variance of chains, for each of their results.

    Args:
        products: What is summed in each chain.
        results: What each chain comes to, (chains, outcomes).
        wander: Variance of its end around its result, (chains,); of all zero, or of none.
        spread: Products in it, (chains,).
        steps: Steps that it takes, (chains,).
    """
    # Axes from here on: (bridges, outcomes, paths, places, chains). The longest is the last one: numpy's loops run along it.
    after, count = np.stack([_schedule(int(each)) for each in steps.tolist()], axis=1)
    after = np.ascontiguousarray(after.T)
    # The chain's own result spreads around its share of y; a path inside it spreads as a bridge.
    ends = (np.ascontiguousarray(results.T)[:, None] + np.sqrt(wander) * _paths(not wander.any())[:, None])[:, :, None]

    def sums(share: np.ndarray) -> np.ndarray:
        return ends * share + np.sqrt(np.maximum(spread * share * (1 - share), 0.0)) * _PATHS[:, None, None, None, None]

    share = np.maximum(after - 1, 0) / steps
    before, behind = sums(share), sums(np.minimum(after / steps, 1.0))
    # At the first place nothing is summed yet.
    least = 2.0**_LEAST
    size = np.maximum(np.abs(before) * 2.0**-_FLOOR, least)
    exponent, integrals, first = np.log2(size), np.empty((3, *size.shape)), 0
    for each, same in groupby(products):
        run = slice(first, first := first + len(list(same)))
        each.at(exponent[..., run], integrals[..., run])
    per_product, per_weighted, per_square = integrals
    peaks = np.stack([each.peaks for each in products], axis=1)
    aligned, final, variance = _cut(size, np.maximum(np.abs(behind), least) * 2.0**-_FLOOR, peaks)
    cut = np.copysign(aligned, before)
    cut += np.copysign(final, behind)
    # Products lean toward the sign of their sum: all alike where nearly all of them have it, else the large ones most.
    toward = ends / spread
    lean = np.clip(toward / np.array([each.magnitude for each in products]), -1.0, 1.0)
    # Beyond what a sum of independent products reaches, that is; below it a few large ones may make all of it.
    alike = lean**4 * np.clip(1.0 - 9.0 * spread / np.maximum(np.square(ends), 1e-30), 0.0, 1.0)
    added = spread / steps
    per_product *= added * alike * lean
    per_weighted *= added * (1 - alike) * toward
    loss = per_product
    loss += per_weighted
    loss += cut
    per_square *= added
    per_square += variance
    mean = loss.mean(0)
    loss -= mean
    deviation = np.sqrt(np.square(loss, out=loss).mean(0))
    # Chains come first again, and a chain's places, which are added up, last.
    noise, mean, deviation = (np.ascontiguousarray(np.moveaxis(each, -1, 0)) for each in (per_square.mean(0), mean, deviation))
    noise = (noise.mean(2) * count[:, None]).sum(-1)
    count = count[:, None, None]
    total = (mean * count).sum(-1)  # (chains, outcomes, paths)
    # Signs of a path persist over steps: their deviations add up about half coherently.
    persistent = 0.5 * np.square((deviation * count).sum(-1))
    return total.mean(-1), noise + persistent.mean(-1) + total.var(-1)


def _cut(before: np.ndarray, behind: np.ndarray, peaks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is cut from an accumulator as it is aligned to larger products, and then from the sum, to its own 13 bits.

    Args:
        before: Sizes of the accumulator, nothing yet at the first place.
        behind: Sizes of the sum.
        peaks: Sizes of the largest products in each chain, of equal likelihood, (peaks, chains).

    Returns:
        Mean magnitude of either cut, and the variance of both.
    """
    bit = 2.0**-FRACTION_BITS
    own, last = before * bit, behind * bit
    aligned, final, variance = (np.zeros(own.shape) for _ in range(3))
    unit, cut = np.empty(own.shape), np.empty(own.shape)
    for peak in peaks:
        np.maximum(own, peak * bit, out=unit)
        np.subtract(unit, own, out=cut)
        cut[..., 0, :] = 0.0
        aligned += cut
        variance += np.square(cut, out=cut)
        np.maximum(np.subtract(last, unit, out=cut), 0.0, out=cut)
        final += cut
        variance += np.square(cut, out=cut)
    # On average half of a unit; evenly spread, a twelfth of its square.
    aligned /= 2 * len(peaks)
    final /= 2 * len(peaks)
    variance /= 12 * len(peaks)
    return aligned, final, variance
