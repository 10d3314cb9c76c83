"""The error of one GEMM from the statistics of its operands: no tensors, no torch, a fraction of a millisecond.

y = sum over K of a_k b_k, the operands independent of each other. With mean mu and covariance C of each,
E[y^2] = sum over k, k' of (C_a + mu_a mu_a^T)(C_b + mu_b mu_b^T): means and correlation count, not only variances.
Quantizing adds to each element an error that is independent between elements (power from `numerics.noise`), so its
power goes with the sum over k of E[a_k^2] E[b_k^2] alone; what quantizing and accumulating (`numerics.drift`) take off
systematically goes with y itself. Rounding the outputs comes last.

In grad_weight the operands are not independent: what they share is the gradient. A `numerics.gradient.GradientSignal`,
collected beside the operands, says how large their sums are; without one they count as independent.

For one weight, and for rows that are alike, errors are not independent either: a `numerics.pair.PairStatistics` says how the
two operands' sums and errors went in the tensors that were seen. With it, predictions on new samples are within 0.5 dB for
19 of 20 output and input-gradient GEMMs of trained models; from the operands alone, for three in four. A weight gradient's
size in a few batches is luck that nobody knows beforehand (`python benchmarks/error.py`).
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
from numerics.pair import PairStatistics
from numerics.recipe import Recipe

# Where |y| is looked at, in its root mean square: evenly in the logarithm, since 1/|y| is averaged.
_SIZES = np.exp2(np.linspace(-12.0, 2.75, 148))
_MIDDLE = np.sqrt(_SIZES[1:] * _SIZES[:-1])
_WIDTH = np.diff(_SIZES)
# Records that are stretched are so up to here; beyond it a feature stands for several of its kind.
_WIDEST = 2**14
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
    pair: PairStatistics | None = None,
    output: str = "bf16",
    split_k: int = 1,
    headroom: tuple[float | None, float | None] = (None, None),
) -> GemmError:
    """Predict what `numerics.gemm_error` would measure.

    Args:
        a_distribution: Statistics of the left operand, oriented by `along_features` or `along_rows`.
        b_distribution: Statistics of the right operand (N, K), oriented alike.
        shape: (M, N, K). Statistics of another width are resized to it.
        recipe_a: Recipe or name, of the left operand.
        recipe_b: Recipe or name, of the right operand.
        accumulation: As of `numerics.gemm_error`.
        signal: What operands contracted along rows sum to (`numerics.gradient`); None takes them as independent.
        pair: How the two meet (`numerics.pair`): what their sums and errors are beyond what either operand shows. None takes
            errors as independent. Along features it belongs to its own N and K, and is left aside for others.
        output: Format that the outputs are rounded to; `fp32` for none.
        split_k: Parts of K that the kernel sums apart (`numerics.estimated_split_k`): shorter chains lose less.
        headroom: Of each operand whose recipe has `amax` delayed or given: that amax over the operand's own; values beyond
            it saturate. None for `current`.

    Raises:
        ValueError: the orientations differ, a size is not positive, a name is unknown, operands along features come with a
            signal, or an amax is not the operand's own and its headroom is missing.
    """
    recipes = Recipe.parse(recipe_a), Recipe.parse(recipe_b)
    return _predict(
        a_distribution, b_distribution, tuple(shape), *recipes, accumulation, signal, pair, output, split_k, tuple(headroom)
    )


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
    pair: PairStatistics | None,
    output: str,
    split_k: int,
    headroom: tuple[float | None, float | None],
) -> GemmError:
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"shape {shape} must be three positive numbers (M, N, K)")
    if split_k < 1:
        raise ValueError(f"split_k = {split_k}; give the number of parts that K is split into, 1 for none")
    if a.contraction != b.contraction:
        raise ValueError(f"a is contracted along {a.contraction} and b along {b.contraction}; orient both alike")
    if accumulation not in ACCUMULATIONS:
        raise ValueError(f"unknown accumulation {accumulation!r}; choose one of {', '.join(ACCUMULATIONS)}")
    m, n, k = shape
    over_features = a.contraction == "features"
    if over_features and signal is not None:
        raise ValueError("a gradient's signal belongs to operands contracted along rows; orient both by along_rows()")
    a, b = a.resized(_width(k if over_features else m, a, b)), b.resized(_width(k if over_features else n, a, b))
    if pair is not None and over_features and pair.shape[1:] != (n, k):
        pair = None
    outputs = _outputs(a, b, k, signal, pair.power if pair is not None and over_features else None)
    noise_a, noise_b = operand_noise(a, recipe_a, m, k, headroom[0]), operand_noise(b, recipe_b, n, k, headroom[1])
    shares = max(noise_a.underflow, noise_b.underflow), max(noise_a.overflow, noise_b.overflow)
    if outputs.power <= 0:
        # All outputs are zero and stay so.
        return GemmError(0.0, math.inf, 0.0, 1.0, *shares)
    bits = sum(0 if recipe.shared else recipe.element.fraction_bits for recipe in (recipe_a, recipe_b))
    spread, coupling = _rows(a, b, outputs)
    lost = _drift(a, b, outputs, accumulation, bits, coupling, split_k)
    sums = outputs.power / max(outputs.independent, 1e-300)
    quantized = _random_noise(noise_a, noise_b, *_coherence(a, b, pair, recipe_a, recipe_b, k, sums), sums) / sums
    power = quantized + lost.power
    kept = (1.0 - noise_a.shrinkage) * (1.0 - noise_b.shrinkage)
    shrinkage = 1.0 - kept * (1.0 - lost.shrinkage)
    z, share = _density(outputs)
    rounded = _rounding(outputs, output)
    rounding = float(rounded @ share)
    if pair is not None and output == "bf16" and rounding > 0:
        rounded, rounding = rounded * (pair.rounding / rounding), pair.rounding
    total = power + shrinkage**2 + rounding
    # At each size its own loss; what is random in the rest is alike at all.
    losses = 1.0 - kept * (1.0 - np.interp(z, lost.sizes, lost.shares))
    mere = _mere(z, share, quantized + lost.noise, losses, rounded, spread, coupling)
    if pair is not None and mere > 0:
        # What of it is noise stands as far above the noise of the whole as it did in the tensors that were seen.
        noise = _mere(z, share, quantized, 0.0 * losses, 0.0 * rounded, spread, coupling)
        seen = math.sqrt(2.0 / math.pi * quantized) * pair.nearness
        mere += min(noise / mere, 1.0) * (seen - noise)
    return GemmError(
        mere=mere,
        sqnr_db=-10.0 * math.log10(total) if total > 0 else math.inf,
        relative_frobenius=math.sqrt(total),
        cosine=1.0 / math.sqrt(1.0 + (power + rounding) / (1.0 - shrinkage) ** 2) if shrinkage < 1 else 0.0,
        underflow_share=shares[0],
        overflow_share=shares[1],
    )


def _width(features: int, a: TensorStatistics, b: TensorStatistics) -> int:
    """How wide records are made for an axis of so many features: no wider than was measured, or than serves."""
    return min(features, max(_WIDEST, a.origin.features, b.origin.features))


@functools.lru_cache(maxsize=16384)
def _outputs(
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
def _drift(
    a: TensorStatistics, b: TensorStatistics, outputs: Outputs, accumulation: str, bits: int, coupling: float, split_k: int
) -> Drift:
    return drift(a, b, outputs, accumulation, bits, coupling, split_k)


def _random_noise(a: OperandNoise, b: OperandNoise, coherence_a: float, coherence_b: float, sums: float) -> float:
    """Power of the operands' errors, over that of independent products, beyond what a common shrinkage explains.

    `sums` is y's own power over that of independent products.
    """
    seen_a, seen_b = (
        max(coherence * _noise_in_sums(x, sums) - x.shrinkage**2 * sums, 0.0)
        for coherence, x in ((coherence_a, a), (coherence_b, b))
    )
    both = max(a.power - a.shrinkage**2, 0.0) * max(b.power - b.shrinkage**2, 0.0)
    return seen_a * (1 - b.correlation) ** 2 + seen_b * (1 - a.correlation) ** 2 + both


def _noise_in_sums(noise: OperandNoise, sums: float) -> float:
    """Power of an operand's errors over that of independent products: independent ones, and a shrinkage, which is y's own."""
    return max(noise.power - noise.shrinkage**2, 0.0) + noise.shrinkage**2 * sums


@functools.lru_cache(maxsize=16384)
def _coherence(
    a: TensorStatistics, b: TensorStatistics, pair: PairStatistics | None, recipe_a: Recipe, recipe_b: Recipe, k: int, sums: float
) -> tuple[float, float]:
    """Noise of either operand in the products that were seen, over that of independent errors; 1 where none were seen.

    In sums over a batch's rows, at k of them, what is coherent included.
    """
    if pair is None:
        return 1.0, 1.0
    m, n, measured_k = pair.shape
    factors = []
    for side, (statistics, recipe, rows) in enumerate(((a, recipe_a, m), (b, recipe_b, n))):
        names = (recipe.name,) if recipe.name in pair.recipes else pair.recipes
        logs = []
        for name in names:
            expected = _noise_in_sums(operand_noise(statistics, Recipe.parse(name), rows, measured_k), sums)
            seen = pair.noise(name, k)[side]
            if seen > 0 and expected > 0:
                logs.append(math.log(seen / expected))
        factors.append(math.exp(sum(logs) / len(logs)) if logs else 1.0)
    return factors[0], factors[1]


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
