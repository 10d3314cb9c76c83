"""The error of one GEMM from the statistics of its operands: no tensors, no torch, a fraction of a millisecond.

y = sum over K of a_k b_k, the operands independent of each other. With mean mu and covariance C of each,
E[y^2] = sum over k, k' of (C_a + mu_a mu_a^T)(C_b + mu_b mu_b^T): means and correlation count, not only variances.
Quantizing adds to each element an error that is independent between elements (power from `numerics.noise`), so its
power goes with the sum over k of E[a_k^2] E[b_k^2] alone; what quantizing and accumulating (`numerics.drift`) take off
systematically goes with y itself. Rounding the outputs comes last.

In grad_weight the operands are not independent: what they share is the gradient. A `numerics.gradient.GradientSignal`,
collected beside the operands, says how large their sums are; without one they count as independent, and the SQNR is
predicted too low (by 1 dB in the median on small trained models, `python benchmarks/error.py`). Rounding errors count as
independent from row to row: their power goes with the rows of the batch, and with the products' own mean square. That is
so within 0.5 dB over samples, and not for rows that are much alike inside one: in InterFormer's projections of sequences
(`key_value`, `qkv`) errors add up as the signal does, and the SQNR in e4m3 is predicted 1 to 8 dB too high (40 for 33).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np

from numerics.distributions import TensorStatistics
from numerics.drift import Drift, Outputs, drift
from numerics.errors import ACCUMULATIONS, MERE_FLOOR, GemmError
from numerics.formats import get_format
from numerics.gradient import GradientSignal
from numerics.noise import OperandNoise, operand_noise
from numerics.normal import normal_quantile
from numerics.recipe import Recipe

# Where |y| is looked at, in its root mean square: evenly in the logarithm, since 1/|y| is averaged.
_SIZES = np.exp2(np.linspace(-12.0, 2.75, 148))
_MIDDLE = np.sqrt(_SIZES[1:] * _SIZES[:-1])
_WIDTH = np.diff(_SIZES)
_POINTS = normal_quantile((np.arange(32) + 0.5) / 32)


def predict_gemm_error(
    a_distribution: TensorStatistics,
    b_distribution: TensorStatistics,
    shape: tuple[int, int, int],
    recipe_a: str | Recipe,
    recipe_b: str | Recipe,
    accumulation: str,
    signal: GradientSignal | None = None,
    *,
    output: str = "bf16",
) -> GemmError:
    """Predict what `numerics.gemm_error` would measure.

    Args:
        a_distribution: Statistics of the left operand, oriented by `along_features` or `along_rows`.
        b_distribution: Statistics of the right operand (N, K), oriented alike.
        shape: (M, N, K). Statistics of another width are resized to it.
        recipe_a: Recipe or name, of the left operand.
        recipe_b: Recipe or name, of the right operand.
        accumulation: `hopper_fast`, `hopper_split`, `fp32` or `exact`.
        signal: What operands contracted along rows sum to (`numerics.gradient`); None takes them as independent.
        output: Format that the outputs are rounded to; `fp32` for none.

    Raises:
        ValueError: the orientations differ, a size is not positive, a name is unknown, or operands along features
            come with a signal.
    """
    recipes = Recipe.parse(recipe_a), Recipe.parse(recipe_b)
    return _predict(a_distribution, b_distribution, tuple(shape), *recipes, accumulation, signal, output)


def predict_gemm_errors(requests: Iterable[tuple]) -> list[GemmError]:
    """`predict_gemm_error` for many requests, each a tuple of its positional arguments; equal ones are answered once."""
    return [predict_gemm_error(*request) for request in requests]


@functools.lru_cache(maxsize=65536)
def _predict(
    a: TensorStatistics,
    b: TensorStatistics,
    shape: tuple[int, int, int],
    recipe_a: Recipe,
    recipe_b: Recipe,
    accumulation: str,
    signal: GradientSignal | None,
    output: str,
) -> GemmError:
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"shape {shape} must be three positive numbers (M, N, K)")
    if a.contraction != b.contraction:
        raise ValueError(f"a is contracted along {a.contraction} and b along {b.contraction}; orient both alike")
    if accumulation not in ACCUMULATIONS:
        raise ValueError(f"unknown accumulation {accumulation!r}; choose one of {', '.join(ACCUMULATIONS)}")
    m, n, k = shape
    over_features = a.contraction == "features"
    if over_features and signal is not None:
        raise ValueError("a gradient's signal belongs to operands contracted along rows; orient both by along_rows()")
    a, b = (a.resized(k), b.resized(k)) if over_features else (a.resized(m), b.resized(n))
    outputs = _outputs(a, b, k, signal)
    noise_a, noise_b = operand_noise(a, recipe_a, m, k), operand_noise(b, recipe_b, n, k)
    shares = max(noise_a.underflow, noise_b.underflow), max(noise_a.overflow, noise_b.overflow)
    if outputs.power <= 0:
        # All outputs are zero and stay so.
        return GemmError(0.0, math.inf, 0.0, 1.0, *shares)
    bits = sum(0 if recipe.format in ("mx9", "mx6", "mx4") else recipe.element.fraction_bits for recipe in (recipe_a, recipe_b))
    spread, coupling = _rows(a, b, outputs)
    lost = _drift(a, b, outputs, accumulation, bits, coupling)
    ratio = outputs.independent / outputs.power
    quantized = _independent_noise(noise_a, noise_b) * ratio
    power = quantized + lost.power
    kept = (1.0 - noise_a.shrinkage) * (1.0 - noise_b.shrinkage)
    shrinkage = 1.0 - kept * (1.0 - lost.shrinkage)
    z, share = _density(outputs)
    rounded = _rounding(outputs, output)
    rounding = float(rounded @ share)
    total = power + shrinkage**2 + rounding
    # At each size its own loss; what is random in the rest is alike at all.
    losses = 1.0 - kept * (1.0 - np.interp(z, lost.sizes, lost.shares))
    return GemmError(
        mere=_mere(z, share, quantized + lost.noise, losses, rounded, spread, coupling),
        sqnr_db=-10.0 * math.log10(total) if total > 0 else math.inf,
        relative_frobenius=math.sqrt(total),
        cosine=1.0 / math.sqrt(1.0 + (power + rounding) / (1.0 - shrinkage) ** 2) if shrinkage < 1 else 0.0,
        underflow_share=shares[0],
        overflow_share=shares[1],
    )


@functools.lru_cache(maxsize=16384)
def _outputs(a: TensorStatistics, b: TensorStatistics, k: int, signal: GradientSignal | None = None) -> Outputs:
    """Mean and mean square of y over all outputs, and the part that independent products would give."""
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
    shared_a = np.concatenate([mean_a[None], a.factor.astype(np.float64)])
    shared_b = np.concatenate([mean_b[None], b.factor.astype(np.float64)])
    diagonal_a, diagonal_b = np.square(shared_a).sum(0), np.square(shared_b).sum(0)
    independent = float(second_a @ second_b)
    power = float(np.square(shared_a @ shared_b.T).sum()) + independent - float(diagonal_a @ diagonal_b)
    mean = float(mean_a @ mean_b)
    return Outputs(mean, max(power, mean**2, 0.0), independent, k)


@functools.lru_cache(maxsize=16384)
def _drift(a: TensorStatistics, b: TensorStatistics, outputs: Outputs, accumulation: str, bits: int, coupling: float) -> Drift:
    return drift(a, b, outputs, accumulation, bits, coupling)


def _independent_noise(a: OperandNoise, b: OperandNoise) -> float:
    """Power of the operands' errors in a product, relative to it, beyond what a common shrinkage explains."""
    noise_a, noise_b = (max(x.power - x.shrinkage**2, 0.0) for x in (a, b))
    return noise_a * (1 - b.correlation) ** 2 + noise_b * (1 - a.correlation) ** 2 + noise_a * noise_b


@functools.lru_cache(maxsize=16384)
def _density(outputs: Outputs) -> tuple[np.ndarray, np.ndarray]:
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
def _rounding(outputs: Outputs, output: str) -> np.ndarray:
    """Mean square error of rounding each size of `_density`, relative to the outputs' mean square."""
    z, _ = _density(outputs)
    if output == "fp32":
        return np.zeros(len(z))
    scale = math.sqrt(outputs.power)
    binade = np.exp2(np.floor(np.log2(z * scale)))
    return np.square(binade * get_format(output).epsilon / scale) / 12.0


@functools.lru_cache(maxsize=16384)
def _rows(a: TensorStatistics, b: TensorStatistics, outputs: Outputs) -> tuple[np.ndarray, float]:
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
    spread = products[np.round(np.linspace(0, 255, 19)).astype(int)[1::2]]
    spread = spread / math.sqrt(float(np.mean(spread**2)))
    count = float(outputs.k)
    if a.contraction == "features":
        product = a.second_moment.astype(np.float64) * b.second_moment.astype(np.float64)
        count = float(product.sum()) ** 2 / max(float(np.square(product).sum()), 1e-300)
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


def _mere(
    z: np.ndarray, share: np.ndarray, power: float, losses: np.ndarray, rounding: np.ndarray, spread: np.ndarray, coupling: float
) -> float:
    """Mean of |error| / max(|y|, floor): the error normal around what y loses."""
    sigma = np.sqrt(power * ((1 - coupling) + coupling * z**2) + rounding)
    error = _mean_magnitude(losses * z, np.maximum(sigma, 1e-300)) * share
    return float((error / np.maximum(z[None, :], MERE_FLOOR / spread[:, None])).sum(1).mean())


def _mean_magnitude(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """E|x| of a normal x."""
    ratio = np.abs(mean) / deviation
    # erf(ratio / sqrt 2) by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
    t = 1.0 / (1.0 + 0.3275911 / math.sqrt(2.0) * ratio)
    bell = np.exp(-0.5 * np.square(ratio))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return deviation * (math.sqrt(2.0 / math.pi) * bell + ratio * (1.0 - series * bell))
