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
from dataclasses import dataclass

import numpy as np

from numerics.distributions import BINS_PER_OCTAVE, PROFILE_BINS, SCOPES, TensorStatistics
from numerics.normal import normal_quantile
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


@dataclass(frozen=True)
class Outputs:
    """The outputs of a GEMM with these operands.

    Attributes:
        mean: Mean of y.
        power: Mean square of y.
        independent: Sum over K of the products' mean squares: what y's variance is for independent products.
        k: Products in a sum.
    """

    mean: float
    power: float
    independent: float
    k: int


def drift(
    a: TensorStatistics,
    b: TensorStatistics,
    outputs: Outputs,
    accumulation: str,
    fraction_bits: int,
    coupling: float = 0.0,
    split_k: int = 1,
) -> Drift:
    """The error of `hopper_fast` or `hopper_split`; none for the other accumulations, which keep FP32's bits.

    Args:
        a: Left operand.
        b: Right operand.
        outputs: What they sum to.
        accumulation: As in `numerics.fp8_matmul`.
        fraction_bits: Fraction bits of both formats together (6 for two e4m3).
        coupling: How far the products' power follows y^2: rows that are large make both large.
        split_k: Parts of K that are summed apart.
    """
    if accumulation not in ("hopper_fast", "hopper_split") or outputs.independent <= 0 or outputs.power <= 0:
        return Drift(0.0, 0.0)
    products = _products(a, b, fraction_bits)
    unit = math.sqrt(outputs.independent / outputs.k)  # root mean square of a product
    mean = outputs.mean / unit
    deviation = math.sqrt(max(outputs.power - outputs.mean**2, 0.0)) / unit
    chains = max(outputs.k / PROMOTION, 1.0) if accumulation == "hopper_split" else float(split_k)
    steps = max(math.ceil(outputs.k / chains / GROUP), 1)
    # Of a chain, given the whole: its part of y, and the spread of an independent part around it.
    outcomes = mean + deviation * _OUTCOMES
    power = float(np.mean(outcomes**2))
    # The arithmetic knows sizes only against the products at hand.
    scale = np.sqrt((1 - coupling) + coupling * outcomes**2 / power)
    results = outcomes / scale
    spread = outputs.k / chains
    wander = spread * (1.0 - 1.0 / chains)
    loss, noise = _chain(products, results / chains, wander, spread, steps)
    loss, noise, results = loss * chains * scale, noise * chains * scale**2, outcomes
    first = float(np.mean(loss * results)) / power
    # What is lost early is not there to be lost again: for a loss in proportion to the sum, 2 first is its rate.
    shrinkage = 1.0 + math.expm1(-2.0 * first) / (2.0 * first) if first > 1e-4 else first
    loss = loss * (shrinkage / first if first > 1e-4 else 1.0)
    rest = float(np.mean(np.square(loss - shrinkage * results)) + np.mean(noise)) / power
    order = np.argsort(np.abs(results))
    sizes = np.abs(results[order]) / math.sqrt(power)
    shares = loss[order] / np.where(results[order] == 0, 1.0, results[order])
    return Drift(shrinkage, rest, tuple(sizes.tolist()), tuple(shares.tolist()), float(np.mean(noise)) / power)


@dataclass(frozen=True)
class _Products:
    """Integrals over the products, by the exponent of the unit that they are cut at."""

    units: np.ndarray  # log2 of the unit
    loss: np.ndarray  # mean magnitude cut from a product
    weighted: np.ndarray  # the same, times the product's magnitude
    square: np.ndarray  # mean square of it
    peaks: np.ndarray  # log2 of the largest exponent in a group, at three levels
    magnitude: float  # mean magnitude of a product


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
    return _Products(units, loss, weighted, square, peaks, float(weight @ np.exp2(centre + 1.0)))


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


def _chain(products: _Products, results: np.ndarray, wander: float, spread: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean loss toward zero (signed as y) and variance of one chain, for each result."""
    # Steps stand for more of their kind as the sum grows slowly.
    if steps <= 12:
        after, count = np.arange(1, steps + 1, dtype=float), np.ones(steps)
    else:
        edges = np.unique(np.round(np.concatenate([[0, 1, 2, 3], np.geomspace(4, steps, 12)])))
        after, count = (edges[1:] + edges[:-1] + 1) / 2, np.diff(edges)
    t = np.minimum(after / steps, 1.0)
    before = np.maximum(after - 1, 0) / steps
    step_products = spread / steps
    # The chain's own result spreads around its share of y; a path inside it spreads as a bridge.
    ends = results[:, None] + math.sqrt(wander) * _PATHS[None, :]  # (outcomes, paths)

    def magnitude(share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bridge = np.sqrt(np.maximum(spread * share * (1 - share), 0.0))
        value = ends[:, :, None, None] * share + bridge * _PATHS[:, None]
        return np.log2(np.maximum(np.abs(value), 2.0**_LEAST)), np.sign(value)

    log_before, sign_before = magnitude(before)
    log_after, sign_after = magnitude(t)
    log_before = np.where(before > 0, log_before, _LEAST)
    # (outcomes, paths, bridges, steps, peaks): the unit of the step.
    exponent = np.maximum(log_before - _FLOOR, _LEAST)[..., None]
    unit = np.maximum(exponent, products.peaks) - FRACTION_BITS
    per_product = np.interp(unit, products.units, products.loss).mean(-1)
    per_weighted = np.interp(unit, products.units, products.weighted).mean(-1)
    per_square = np.interp(unit, products.units, products.square).mean(-1)
    size = np.exp2(unit)
    # The accumulator, aligned to larger products; then the sum, cut to its own 13 bits.
    own = np.exp2(exponent - FRACTION_BITS)
    aligned = np.where(before[:, None] > 0, np.maximum(size - own, 0.0) / 2, 0.0)
    final = np.maximum(np.exp2(log_after - _FLOOR - FRACTION_BITS)[..., None] - size, 0.0) / 2
    cut = sign_before * aligned.mean(-1) + sign_after * final.mean(-1)
    variance = (np.square(aligned) / 3 + np.square(final) / 3).mean(-1)
    # Products lean toward the sign of their sum: all alike where nearly all of them have it, else the large ones most.
    toward = ends[:, :, None, None] / spread
    lean = np.clip(toward / products.magnitude, -1.0, 1.0)
    # Beyond what a sum of independent products reaches, that is; below it a few large ones may make all of it.
    alike = lean**4 * np.clip(1.0 - 9.0 * spread / np.maximum(np.square(ends[:, :, None, None]), 1e-30), 0.0, 1.0)
    mean_loss = step_products * (alike * lean * per_product + (1 - alike) * toward * per_weighted) + cut
    loss = (mean_loss.mean(2) * count).sum(-1)  # (outcomes, paths)
    noise = ((step_products * per_square + variance).mean((1, 2)) * count).sum(-1)
    # Signs of a path persist over steps: their deviations add up about half coherently.
    persistent = 0.5 * np.square((mean_loss.std(2) * count).sum(-1))
    return loss.mean(1), noise + persistent.mean(1) + loss.var(1)
