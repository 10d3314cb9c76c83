"""Distributions without data, as `TensorStatistics` made from their parameters: for what-ifs, and for what a paper assumes.

Moments, shares of zeros and quantiles are exact (the mixture's quantiles and every profile come from seeded draws: half a
million values); a profile is moved to the length at hand when a prediction is made. `numerics.gaussian` is the
normal one. A Gaussian copula over empirical marginals is any record with a covariance: `copula` gives it another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from numerics.distributions import LEVELS, TensorStatistics, sample
from numerics.normal import normal_cdf, normal_density, normal_quantile
from numerics.sizes import is_whole

# Draws as wide as the operand, up to a bound.
_WIDTH = 1024
_DRAWS, _VALUES = 4, 2**17
# The first and last level stand for the extremes of the draws.
_INNER = np.concatenate([[2.0**-26], LEVELS[1:-1], [1 - 2.0**-26]])
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


@functools.lru_cache(maxsize=64, typed=True)
def uniform(features: int, low: float = -1.0, high: float = 1.0) -> TensorStatistics:
    """Independent values, uniform between two bounds.

    Raises:
        ValueError: `features` is not positive, or the bounds are not finite and rising.
    """
    _check("uniform", features, low=low, high=high)
    if not low < high:
        raise ValueError(f"uniform: low = {low} and high = {high}; give bounds that rise")
    second = (low**2 + low * high + high**2) / 3
    return _independent(
        features, lambda rng, shape: rng.uniform(low, high, shape), (low + high) / 2, second, low + (high - low) * _INNER
    )


@functools.lru_cache(maxsize=64, typed=True)
def student_t(features: int, df: float, scale: float = 1.0) -> TensorStatistics:
    """Independent values of a Student-t distribution times `scale`: tails that fall as a power, |x|^-(df + 1).

    Raises:
        ValueError: `features` or `scale` is not positive, or `df` is 2 or less (no variance, and so no SQNR).
    """
    _check("student_t", features, df=df, scale=scale)
    if not df > 2 or not scale > 0:
        raise ValueError(
            f"student_t: df = {df} and scale = {scale}; give df over 2 (else it has no variance) and a positive scale"
        )
    # The cumulative density on a grid that is even near zero and in the logarithm of the tails.
    x = np.sinh(np.linspace(-24.0, 24.0, 96001))
    density = np.exp(-(df + 1) / 2 * np.log1p(np.square(x) / df))
    steps = (density[1:] + density[:-1]) / 2 * np.diff(x)
    share = np.concatenate([[0.0], np.cumsum(steps)]) / steps.sum()
    quantiles = scale * np.interp(_INNER, share, x)
    quantiles = (quantiles - quantiles[::-1]) / 2
    return _independent(features, lambda rng, shape: scale * rng.standard_t(df, shape), 0.0, scale**2 * df / (df - 2), quantiles)


@functools.lru_cache(maxsize=64, typed=True)
def log_normal(features: int, sigma: float, scale: float = 1.0, signed: bool = False) -> TensorStatistics:
    """Independent values scale e^(sigma z), z normal; `signed` gives each a sign by chance, as gradients have.

    Raises:
        ValueError: a parameter is not positive, or `sigma` is over 4 (its squares have no mean that samples would show).
    """
    _check("log_normal", features, sigma=sigma, scale=scale)
    if not 0 < sigma <= 4 or not scale > 0:
        raise ValueError(f"log_normal: sigma = {sigma} and scale = {scale}; give sigma over 0 and up to 4 and a positive scale")

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        values = scale * np.exp(sigma * rng.standard_normal(shape))
        return values * rng.choice([-1.0, 1.0], shape) if signed else values

    if signed:
        half = np.abs(2 * _INNER - 1)
        inner = np.clip(half, 2.0**-26, 1 - 2.0**-26)
        quantiles = np.sign(_INNER - 0.5) * scale * np.exp(sigma * normal_quantile(inner))
    else:
        quantiles = scale * np.exp(sigma * normal_quantile(_INNER))
    mean = 0.0 if signed else scale * math.exp(sigma**2 / 2)
    return _independent(features, draw, mean, scale**2 * math.exp(2 * sigma**2), quantiles)


@functools.lru_cache(maxsize=64, typed=True)
def relu(features: int, mean: float = 0.0, std: float = 1.0) -> TensorStatistics:
    """max(x, 0) of independent normal values: a spike at zero, and half a normal.

    Raises:
        ValueError: `features` or `std` is not positive, or fewer than one value in a thousand is not zero.
    """
    _check("relu", features, mean=mean, std=std)
    if not std > 0 or mean / std < -3:
        raise ValueError(f"relu: mean = {mean} and std = {std}; give a positive std, and a mean of at least -3 std")
    zero = float(normal_cdf(np.array(-mean / std)))
    density = float(normal_density(np.array(mean / std)))
    first = mean * (1 - zero) + std * density
    second = (mean**2 + std**2) * (1 - zero) + mean * std * density
    quantiles = np.maximum(mean + std * normal_quantile(_INNER), 0.0)
    positive = mean + std * normal_quantile(np.clip(zero + (1 - zero) * _INNER, 2.0**-26, 1 - 2.0**-26))
    return _independent(
        features, lambda rng, shape: np.maximum(mean + std * rng.standard_normal(shape), 0.0), first, second, quantiles,
        zero_share=zero, positive=np.maximum(positive, 0.0),
    )  # fmt: skip


def mixture(parts: Sequence[tuple[float, TensorStatistics]], zero_share: float = 0.0) -> TensorStatistics:
    """Every value from one of several distributions, by chance; independent of its neighbours'.

    Args:
        parts: Pairs of a weight and a distribution, all of the same features; weights are shares of what is not zero.
        zero_share: Share of further exact zeros.

    Raises:
        ValueError: no parts, widths that differ, weights that are not positive, or a share outside [0, 1).
    """
    if not parts or len({part.features for _, part in parts}) != 1:
        raise ValueError("mixture: give at least one (weight, distribution), all of the same features")
    weights = np.array([weight for weight, _ in parts], np.float64)
    if not (np.isfinite(weights).all() and (weights > 0).all() and 0 <= zero_share < 1):
        raise ValueError(f"mixture: weights {weights.tolist()} must be positive and zero_share = {zero_share} in [0, 1)")
    weights = weights / weights.sum() * (1 - zero_share)
    features = parts[0][1].features
    edges = np.cumsum(weights)

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        chosen = np.searchsorted(edges, rng.random(shape), side="right")
        drawn = [sample(_without_factors(part.resized(shape[1])), shape[0], rng) for _, part in parts]
        return np.choose(chosen, [*drawn, np.zeros(shape)])

    def average(name: str) -> np.ndarray:
        return sum(weight * getattr(part, name).astype(np.float64) for weight, (_, part) in zip(weights, parts, strict=True))

    drawn = _collected(draw, min(features, _WIDTH)).resized(features)
    mean, second, single = average("mean"), average("second_moment"), np.float32
    return dataclasses.replace(
        drawn, mean=mean.astype(single), second_moment=second.astype(single),
        zero_share=(zero_share + average("zero_share")).astype(single),
        residual=np.maximum(second - np.square(mean), 0.0).astype(single), _views={},
    )  # fmt: skip


def copula(marginals: TensorStatistics, correlation: np.ndarray) -> TensorStatistics:
    """The marginals of a record under another correlation of its features (of their normal scores, exact for normal values).

    Args:
        marginals: Any record.
        correlation: (F, F), symmetric, ones on the diagonal, no negative eigenvalue.

    Raises:
        ValueError: the matrix is none of this.
    """
    f = marginals.features
    correlation = np.asarray(correlation, np.float64)
    if correlation.shape != (f, f) or not np.isfinite(correlation).all():
        raise ValueError(f"copula: correlation has shape {correlation.shape}; give finite numbers ({f}, {f})")
    if not np.allclose(correlation, correlation.T, atol=1e-6) or not np.allclose(np.diag(correlation), 1.0, atol=1e-6):
        raise ValueError("copula: correlation must be symmetric with ones on its diagonal")
    factor = _factor(correlation, "copula: correlation")
    deviation = np.sqrt(np.maximum(marginals.second_moment - np.square(marginals.mean), 0.0))
    return dataclasses.replace(
        marginals, factor=(factor * deviation).astype(np.float32), residual=np.zeros(f, np.float32), _views={}
    )


def matrix_normal(mean: np.ndarray, row_covariance: np.ndarray, column_covariance: np.ndarray, seed: int = 0) -> TensorStatistics:
    """A weight W = M + L_U Z L_V^T with Z standard normal (LoKA, arXiv 2605.10886): rows alike by U, columns by V.

    As an operand its rows count with equal weight: E[W^T W] / N = tr(U) / N V + M^T M / N is exact, profiles and quantiles are
    of 4,096 drawn rows or more.

    Args:
        mean: M (N, K).
        row_covariance: U (N, N).
        column_covariance: V (K, K).
        seed: Of the draws.

    Raises:
        ValueError: shapes do not fit, a value is not finite, or a covariance is not symmetric or has a negative eigenvalue.
    """
    mean, u, v = (np.asarray(x, np.float64) for x in (mean, row_covariance, column_covariance))
    if mean.ndim != 2 or 0 in mean.shape:
        raise ValueError(f"matrix_normal: mean has shape {mean.shape}; give a matrix (N, K)")
    rows, columns = mean.shape
    for name, matrix, size in (("row_covariance", u, rows), ("column_covariance", v, columns)):
        if matrix.shape != (size, size):
            raise ValueError(f"matrix_normal: {name} has shape {matrix.shape}; a mean {mean.shape} takes ({size}, {size})")
        if not np.isfinite(matrix).all() or not np.allclose(
            matrix, matrix.T, atol=1e-6 * max(float(np.abs(matrix).max()), 1e-300)
        ):
            raise ValueError(f"matrix_normal: {name} must be finite and symmetric")
    if not np.isfinite(mean).all():
        raise ValueError("matrix_normal: mean holds values that are not finite")
    left, right = _factor(u, "matrix_normal: row_covariance"), _factor(v, "matrix_normal: column_covariance")
    from numerics.collect import StatisticsAccumulator

    accumulator, rng = StatisticsAccumulator(columns), np.random.default_rng(seed)
    for _ in range(math.ceil(4096 / rows)):
        accumulator.update(mean + left.T @ rng.standard_normal((left.shape[0], right.shape[0])) @ right)
    centre = mean.mean(0)
    spread = np.trace(u) / rows * v + mean.T @ mean / rows - np.outer(centre, centre)
    single = np.float32
    return dataclasses.replace(
        accumulator.result(rank=0), mean=centre.astype(single), factor=_factor(spread, "matrix_normal: mean").astype(single),
        second_moment=(np.diag(spread) + centre**2).astype(single), residual=np.zeros(columns, single), _views={},
    )  # fmt: skip


def _independent(
    features: int, draw: Draw, mean: float, second: float, quantiles: np.ndarray, zero_share: float = 0.0,
    positive: np.ndarray | None = None,
) -> TensorStatistics:  # fmt: skip
    """A record of independent features that are all alike; `positive` are the quantiles of what is not zero."""
    width, single = min(features, _WIDTH), np.float32
    drawn = _collected(draw, width)

    def full(value: float) -> np.ndarray:
        return np.full(width, value, single)

    variance = second - mean**2
    shape = (quantiles - mean) / math.sqrt(variance)
    if drawn.spiked and positive is not None:
        shape = positive / math.sqrt(second / (1 - zero_share))
    return dataclasses.replace(
        drawn, mean=full(mean), second_moment=full(second), zero_share=full(zero_share), residual=full(variance),
        quantiles=quantiles.astype(single), shape_quantiles=shape.astype(single), _views={},
    ).resized(features)  # fmt: skip


def _collected(draw: Draw, width: int) -> TensorStatistics:
    """Statistics of draws, without a covariance."""
    from numerics.collect import StatisticsAccumulator

    accumulator, rng = StatisticsAccumulator(width), np.random.default_rng(20)
    for _ in range(_DRAWS):
        accumulator.update(draw(rng, (_VALUES // width, width)).astype(np.float32))
    return _without_factors(accumulator.result())


def _without_factors(statistics: TensorStatistics) -> TensorStatistics:
    variance = statistics.residual + np.square(statistics.factor).sum(0)
    return dataclasses.replace(statistics, factor=statistics.factor[:0], residual=variance.astype(np.float32), _views={})


def _factor(covariance: np.ndarray, what: str) -> np.ndarray:
    """(R, F) with factor^T factor the covariance, leading rows first."""
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    if values[0] < -1e-6 * max(float(values[-1]), 1e-300):
        raise ValueError(f"{what} has a negative eigenvalue ({values[0]:.3g}); give a covariance")
    return ((vectors * np.sqrt(np.maximum(values, 0.0))).T)[::-1]


def _check(family: str, features: int, **parameters: Any) -> None:
    if not is_whole(features):
        raise ValueError(f"{family}: features = {features!r}; give a whole number, 1 or more")
    for name, value in parameters.items():
        if not math.isfinite(value):
            raise ValueError(f"{family}: {name} = {value}; give a finite number")
