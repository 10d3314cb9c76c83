"""The error of one GEMM from the statistics of its operands: no tensors, no torch, a fraction of a millisecond.

y = sum over K of a_k b_k, the operands independent of each other. With mean mu and covariance C of each,
E[y^2] = sum over k, k' of (C_a + mu_a mu_a^T)(C_b + mu_b mu_b^T): means and correlation count, not only variances.
Quantizing adds to each element an error that is independent between elements (power from `numerics.noise`), so its
power goes with the sum over k of E[a_k^2] E[b_k^2] alone; what quantizing and accumulating (`numerics.drift`) take off
systematically goes with y itself. Rounding the outputs comes last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np

from numerics.distributions import LEVELS, TensorStatistics
from numerics.drift import Drift, Outputs, drift
from numerics.errors import ACCUMULATIONS, MERE_FLOOR, GemmError
from numerics.formats import get_format
from numerics.noise import OperandNoise, operand_noise
from numerics.normal import normal_quantile
from numerics.recipe import Recipe

# Where |y| is looked at, in its root mean square: evenly in the logarithm, since 1/|y| is averaged.
_SIZES = np.exp2(np.linspace(-12.0, 2.75, 148))
_MIDDLE = np.sqrt(_SIZES[1:] * _SIZES[:-1])
_WIDTH = np.diff(_SIZES)


def predict_gemm_error(
    a_distribution: TensorStatistics,
    b_distribution: TensorStatistics,
    shape: tuple[int, int, int],
    recipe_a: str | Recipe,
    recipe_b: str | Recipe,
    accumulation: str,
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
        output: Format that the outputs are rounded to; `fp32` for none.

    Raises:
        ValueError: the orientations differ, a size is not positive, or a name is unknown.
    """
    return _predict(
        a_distribution, b_distribution, tuple(shape), Recipe.parse(recipe_a), Recipe.parse(recipe_b), accumulation, output
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
    a, b = (a.resized(k), b.resized(k)) if over_features else (a.resized(m), b.resized(n))
    outputs = _outputs(a, b, k)
    noise_a, noise_b = operand_noise(a, recipe_a, m, k), operand_noise(b, recipe_b, n, k)
    shares = max(noise_a.underflow, noise_b.underflow), max(noise_a.overflow, noise_b.overflow)
    if outputs.power <= 0:
        # All outputs are zero and stay so.
        return GemmError(0.0, math.inf, 0.0, 1.0, *shares)
    bits = sum(0 if recipe.format in ("mx9", "mx6", "mx4") else recipe.element.fraction_bits for recipe in (recipe_a, recipe_b))
    lost = _drift(a, b, outputs, accumulation, bits)
    ratio = outputs.independent / outputs.power
    power = _independent_noise(noise_a, noise_b) * ratio + lost.power
    shrinkage = 1.0 - (1.0 - noise_a.shrinkage) * (1.0 - noise_b.shrinkage) * (1.0 - lost.shrinkage)
    rounding = 0.0 if output == "fp32" else _relative_rounding(output)
    total = power + shrinkage**2 + rounding
    kept = 1.0 - shrinkage
    return GemmError(
        mere=_mere(outputs, power, shrinkage, rounding, _row_spread(a, b), _coupling(a, b, outputs)),
        sqnr_db=-10.0 * math.log10(total) if total > 0 else math.inf,
        relative_frobenius=math.sqrt(total),
        cosine=1.0 / math.sqrt(1.0 + (power + rounding) / kept**2) if kept > 0 else 0.0,
        underflow_share=shares[0],
        overflow_share=shares[1],
    )


@functools.lru_cache(maxsize=16384)
def _outputs(a: TensorStatistics, b: TensorStatistics, k: int) -> Outputs:
    """Mean and mean square of y over all outputs, and the part that independent products would give."""
    second_a, second_b = a.second_moment.astype(np.float64), b.second_moment.astype(np.float64)
    mean_a, mean_b = a.mean.astype(np.float64), b.mean.astype(np.float64)
    if a.contraction == "rows":
        # Rows are independent samples: products of different rows correlate by their means alone.
        independent = k * float(second_a.mean()) * float(second_b.mean())
        pairs = float(np.square(mean_a).mean()) * float(np.square(mean_b).mean())
        mean = k * float(mean_a.mean()) * float(mean_b.mean())
        return Outputs(mean, max(independent + k * (k - 1.0) * pairs, mean**2), independent, k)
    shared_a = np.concatenate([mean_a[None], a.factor.astype(np.float64)])
    shared_b = np.concatenate([mean_b[None], b.factor.astype(np.float64)])
    diagonal_a, diagonal_b = np.square(shared_a).sum(0), np.square(shared_b).sum(0)
    independent = float(second_a @ second_b)
    power = float(np.square(shared_a @ shared_b.T).sum()) + independent - float(diagonal_a @ diagonal_b)
    mean = float(mean_a @ mean_b)
    return Outputs(mean, max(power, mean**2, 0.0), independent, k)


@functools.lru_cache(maxsize=16384)
def _drift(a: TensorStatistics, b: TensorStatistics, outputs: Outputs, accumulation: str, bits: int) -> Drift:
    return drift(a, b, outputs, accumulation, bits)


def _independent_noise(a: OperandNoise, b: OperandNoise) -> float:
    """Power of the operands' errors in a product, relative to it, beyond what a common shrinkage explains."""
    noise_a, noise_b = (max(x.power - x.shrinkage**2, 0.0) for x in (a, b))
    return noise_a * (1 - b.correlation) ** 2 + noise_b * (1 - a.correlation) ** 2 + noise_a * noise_b


@functools.cache
def _relative_rounding(output: str) -> float:
    """Mean square relative error of rounding to a format's normal numbers, values even in their logarithm."""
    step = get_format(output).epsilon
    return step**2 / 12.0 * 3.0 / (8.0 * math.log(2.0))


@functools.lru_cache(maxsize=4096)
def _row_spread(a: TensorStatistics, b: TensorStatistics) -> np.ndarray:
    """Nine sizes of an output row and column against the whole, mean square 1: large and small samples differ."""
    sizes = []
    for statistics in (a, b):
        if statistics.contraction == "features":
            size = statistics.row_rms.astype(np.float64)
        else:
            spread = np.sqrt(np.maximum(statistics.second_moment.astype(np.float64), 0.0))
            size = np.quantile(spread, (np.arange(16) + 0.5) / 16)
        sizes.append(np.maximum(size, 1e-30))
    products = np.sort(np.outer(*sizes).reshape(-1))
    spread = products[np.round(np.linspace(0, 255, 19)).astype(int)[1::2]]
    return spread / math.sqrt(float(np.mean(spread**2)))


@functools.lru_cache(maxsize=4096)
def _coupling(a: TensorStatistics, b: TensorStatistics, outputs: Outputs) -> float:
    """How far the error's power follows y^2: few products that vary much make both large together.

    For y = sum p_k and errors in proportion to p_k, E[e^2 y^2] = E[e^2] E[y^2] (1 + (kurtosis(p) - 1) / K).
    """
    kurtosis = 1.0
    for statistics in (a, b):
        values = np.interp((np.arange(128) + 0.5) / 128, LEVELS, statistics.quantiles.astype(np.float64))
        square = np.square(values)
        kurtosis *= float(np.mean(square**2)) / max(float(np.mean(square)) ** 2, 1e-300)
    return min(max(kurtosis - 1.0, 0.0) / (2.0 * outputs.k), 1.0)


def _mere(outputs: Outputs, power: float, shrinkage: float, rounding: float, spread: np.ndarray, coupling: float) -> float:
    """Mean of |error| / max(|y|, floor), y normal with its mean, the error normal around what y loses."""
    centre = outputs.mean / math.sqrt(outputs.power)
    deviation = math.sqrt(max(1.0 - centre**2, 0.0))
    if abs(centre) > 4.0 * deviation:
        # Far from zero: a few normal points around the mean, no floor in reach.
        z = np.abs(centre) + deviation * normal_quantile((np.arange(32) + 0.5) / 32)
        share = np.full(32, 1.0 / 32)
    else:
        z = _MIDDLE
        density = np.exp(-0.5 * np.square((z - centre) / deviation)) + np.exp(-0.5 * np.square((z + centre) / deviation))
        share = density * _WIDTH
        share = share / share.sum()
    sigma = np.sqrt(power * ((1 - coupling) + coupling * z**2) + rounding * z**2)
    error = _mean_magnitude(shrinkage * z, np.maximum(sigma, 1e-300))
    size = np.maximum(z[None, :], MERE_FLOOR / spread[:, None])
    return float((error / size @ share).mean())


def _mean_magnitude(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """E|x| of a normal x."""
    ratio = np.abs(mean) / deviation
    # erf(ratio / sqrt 2) by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
    t = 1.0 / (1.0 + 0.3275911 / math.sqrt(2.0) * ratio)
    bell = np.exp(-0.5 * np.square(ratio))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return deviation * (math.sqrt(2.0 / math.pi) * bell + ratio * (1.0 - series * bell))
