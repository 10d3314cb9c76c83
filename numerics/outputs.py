"""What a GEMM's outputs are before anything is rounded, from the statistics of its operands: their power, sizes and rows.

y = sum over K of a_k b_k, the operands independent of each other. With mean mu and covariance C of each,
E[y^2] = sum over k, k' of (C_a + mu_a mu_a^T)(C_b + mu_b mu_b^T): means and correlation count, not only variances.

In grad_weight the operands are not independent: what they share is the gradient. A `numerics.gradient.GradientSignal`,
collected beside the operands, says how large their sums are; without one they count as independent.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from numerics.distributions import TensorStatistics
from numerics.formats import get_format
from numerics.gradient import GradientSignal
from numerics.normal import normal_quantile

# Where |y| is looked at, in its root mean square: evenly in the logarithm, since 1/|y| is averaged.
_SIZES = np.exp2(np.linspace(-12.0, 2.75, 148))
_MIDDLE = np.sqrt(_SIZES[1:] * _SIZES[:-1])
_WIDTH = np.diff(_SIZES)
_POINTS = normal_quantile((np.arange(32) + 0.5) / 32)
# Nine places among 256, evenly.
_NINE = np.round(np.linspace(0, 255, 19)).astype(int)[1::2]


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


@functools.lru_cache(maxsize=16384)
def outputs_of(
    a: TensorStatistics, b: TensorStatistics, k: int, signal: GradientSignal | None = None, seen: float | None = None
) -> Outputs:
    """Mean and mean square of y over all outputs, and the part that independent products would give (`seen` times it is y's)."""
    second_a, second_b = a.second_moment.astype(np.float64), b.second_moment.astype(np.float64)
    mean_a, mean_b = a.mean.astype(np.float64), b.mean.astype(np.float64)
    if a.contraction == "rows":
        # Rows are independent samples: products of different rows correlate by their means alone.
        independent = k * float(second_a.mean()) * float(second_b.mean())
        # A mean over n rows is off by a variance of 1/n; squared, that would pass for a mean.
        squares = [
            max(float(np.square(mean).mean()) - float((second - np.square(mean)).mean()) / max(x.rows_seen, 1), 0.0)
            for x, mean, second in ((a, mean_a, second_a), (b, mean_b, second_b))
        ]
        pairs = squares[0] * squares[1]
        mean = k * float(mean_a.mean()) * float(mean_b.mean())
        if signal is not None:
            power = independent / k * signal.power(k)
            mean = math.copysign(min(abs(mean), k * math.sqrt(independent / k * signal.quadratic), math.sqrt(power)), mean)
            return Outputs(mean, power, independent * signal.independent, k)
        return Outputs(mean, max(independent + k * (k - 1.0) * pairs, mean**2), independent, k)
    stand = k / a.features
    shared_a = np.concatenate([mean_a[None], a.factor.astype(np.float64)])
    shared_b = np.concatenate([mean_b[None], b.factor.astype(np.float64)])
    diagonal_a, diagonal_b = np.square(shared_a).sum(0), np.square(shared_b).sum(0)
    independent = stand * float(second_a @ second_b)
    mean = stand * float(mean_a @ mean_b)
    if seen is not None:
        power = seen * independent
        return Outputs(math.copysign(min(abs(mean), math.sqrt(power)), mean), power, independent, k)
    coherent = stand**2 * float(np.square(shared_a @ shared_b.T).sum())
    power = coherent + independent - stand * float(diagonal_a @ diagonal_b)
    return Outputs(mean, max(power, mean**2, 0.0), independent, k)


@functools.lru_cache(maxsize=16384)
def density(outputs: Outputs) -> tuple[np.ndarray, np.ndarray]:
    """Sizes |y| in the outputs' root mean square, and the share of each; y is normal around its mean."""
    centre = abs(outputs.mean) / math.sqrt(outputs.power)
    deviation = math.sqrt(max(1.0 - centre**2, 0.0))
    if centre > 4.0 * deviation:
        # Far from zero: a few normal points around the mean, no floor in reach.
        return centre + deviation * _POINTS, np.full(len(_POINTS), 1.0 / len(_POINTS))
    density = sum(np.exp(-0.5 * np.square((_MIDDLE + side) / deviation)) for side in (centre, -centre))
    share = density * _WIDTH
    return _MIDDLE, share / share.sum()


@functools.lru_cache(maxsize=16384)
def rounding(outputs: Outputs, output: str) -> np.ndarray:
    """Mean square error of rounding each size of `density`, relative to the outputs' mean square."""
    z, _ = density(outputs)
    if output == "fp32":
        return np.zeros(len(z))
    scale = math.sqrt(outputs.power)
    binade = np.exp2(np.floor(np.log2(z * scale)))
    return np.square(binade * get_format(output).epsilon / scale) / 12.0


@functools.lru_cache(maxsize=16384)
def rows_of(a: TensorStatistics, b: TensorStatistics, outputs: Outputs) -> tuple[np.ndarray, float]:
    """How outputs and their errors vary in size together.

    Returns:
        Nine sizes of an output's row and column against the whole, mean square 1; and the coupling: how far the
        error's power follows y^2 beyond that. Of a Gaussian row, |a|^2 varies by 2 / d (d its effective dimension) and
        y with it; what varies beyond are samples of different scale. And an output near zero has lost one of its
        effective number of products.
    """
    sizes, coupling = [], 0.0
    for statistics in (a, b):
        size, shared = _row_sizes(statistics)
        sizes.append(size)
        coupling += shared
    products = np.sort(np.outer(*sizes).reshape(-1))
    spread = products[_NINE]
    spread = spread / math.sqrt(float(np.mean(spread**2)))
    count = float(outputs.k)
    if a.contraction == "features":
        product = a.second_moment.astype(np.float64) * b.second_moment.astype(np.float64)
        count = outputs.k / a.features * float(product.sum()) ** 2 / max(float(np.square(product).sum()), 1e-300)
    return spread, min(max(coupling, 1.0 / count), 1.0)


@functools.lru_cache(maxsize=4096)
def _row_sizes(statistics: TensorStatistics) -> tuple[np.ndarray, float]:
    """Sixteen sizes of rows, mean square 1, that a Gaussian's own variation does not explain; and half of what it does."""
    if statistics.contraction == "rows":
        size = np.sqrt(np.maximum(statistics.second_moment.astype(np.float64), 0.0))
        size = np.quantile(size, (np.arange(16) + 0.5) / 16)
        return np.maximum(size / max(math.sqrt(float(np.mean(size**2))), 1e-300), 1e-30), 0.0
    size = np.maximum(statistics.row_rms.astype(np.float64), 1e-30)
    size /= math.sqrt(float(np.mean(size**2)))
    variance = float(np.mean(size**4)) - 1.0
    shared = np.concatenate([statistics.mean[None], statistics.factor]).astype(np.float64)
    residual = statistics.residual.astype(np.float64)
    trace = float(np.square(shared).sum() + residual.sum())
    overlap = float(np.square(shared @ shared.T).sum() + np.square(residual).sum() + 2 * np.square(shared).sum(0) @ residual)
    expected = 2.0 * overlap / max(trace, 1e-300) ** 2
    own = min(variance, expected)
    beyond = max(math.log1p(variance) - math.log1p(expected), 0.0)
    exponent = beyond / math.log1p(variance) if variance > 1e-9 else 0.0
    size = size**exponent
    return size / math.sqrt(float(np.mean(size**2))), own / 2.0
