"""The error of one GEMM by sampling: operands drawn from their distributions, quantized, multiplied and measured.

The reference that `numerics.predict_gemm_error` is tested against, as in LoKA (arXiv 2605.10886, 100 pairs a layer): far
slower, and sure of its own figures within the standard errors that it states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from numerics.distributions import TensorStatistics, sample
from numerics.errors import GemmError, gemm_error
from numerics.recipe import Recipe
from numerics.sizes import check_shape, is_whole


@dataclass(frozen=True)
class SampledGemmError:
    """A GEMM's error over sampled pairs of operands.

    Attributes:
        error: SQNR and Frobenius error of the pairs' summed powers, the rest averaged.
        standard_error: Of each of these figures, in its own unit.
        pairs: How many were drawn.
    """

    error: GemmError
    standard_error: GemmError
    pairs: int


def sample_gemm_error(
    a_distribution: TensorStatistics,
    b_distribution: TensorStatistics,
    shape: tuple[int, int, int],
    recipe_a: str | Recipe,
    recipe_b: str | Recipe,
    accumulation: str,
    *,
    output: str = "bf16",
    pairs: int = 100,
    least_pairs: int = 8,
    standard_error_db: float | None = None,
    seed: int = 0,
) -> SampledGemmError:
    """Draw pairs of operands with `numerics.sample`, independent of each other, and measure each with `numerics.gemm_error`.

    Args:
        a_distribution: Of the left operand, oriented by `along_features` or `along_rows`.
        b_distribution: Of the right operand (N, K), oriented alike.
        shape: (M, N, K). Statistics of another width are resized to it.
        recipe_a: Recipe or name, of the left operand.
        recipe_b: Recipe or name, of the right operand.
        accumulation: As in `gemm_error`.
        output: As in `gemm_error`.
        pairs: How many to draw, at most.
        least_pairs: How many to draw before stopping early; at least 2.
        standard_error_db: Stop when the SQNR's standard error is this small; None draws all.
        seed: Of the draws.

    Raises:
        ValueError: the orientations differ, a size or count is out of range, or a recipe does not fit the shape.
    """
    a, b = a_distribution, b_distribution
    check_shape(shape)
    if a.contraction != b.contraction:
        raise ValueError(f"a is contracted along {a.contraction} and b along {b.contraction}; orient both alike")
    if not (is_whole(least_pairs, 2) and is_whole(pairs, least_pairs)):
        raise ValueError(f"least_pairs = {least_pairs!r} and pairs = {pairs!r}; give whole numbers from 2, no more than pairs")
    if standard_error_db is not None and not standard_error_db > 0:
        raise ValueError(f"standard_error_db = {standard_error_db}; give a positive number, or None")
    import torch

    m, n, k = shape
    rng = np.random.default_rng(seed)
    errors: list[GemmError] = []
    powers: list[tuple[float, float]] = []
    while len(errors) < pairs:
        drawn = []
        for statistics, rows in ((a, m), (b, n)):
            if a.contraction == "features":
                drawn.append(sample(statistics.resized(k), rows, rng))
            else:
                drawn.append(np.ascontiguousarray(sample(statistics.resized(rows), k, rng).T))
        left, right = (torch.from_numpy(x) for x in drawn)
        errors.append(gemm_error(left, right, recipe_a, recipe_b, accumulation, output=output))
        signal = float((left.double() @ right.double().T).square().mean())
        powers.append((signal, signal * errors[-1].relative_frobenius ** 2))
        if standard_error_db is not None and len(errors) >= least_pairs:
            if _summary(errors, powers).standard_error.sqnr_db <= standard_error_db:
                break
    return _summary(errors, powers)


def _summary(errors: list[GemmError], powers: list[tuple[float, float]]) -> SampledGemmError:
    count = len(errors)
    signal, noise = np.array(powers).T
    figures, deviations = {}, {}
    for field in fields(GemmError):
        values = np.array([getattr(error, field.name) for error in errors])
        figures[field.name] = float(values.mean())
        deviations[field.name] = float(values.std(ddof=1) / math.sqrt(count)) if np.isfinite(values).all() else 0.0
    total = float(noise.sum() / signal.sum()) if signal.sum() > 0 else 0.0
    figures["relative_frobenius"] = math.sqrt(total)
    figures["sqnr_db"] = -10 * math.log10(total) if total > 0 else math.inf
    # Of a ratio of sums, to first order.
    relative = float(np.std(noise - total * signal, ddof=1)) / math.sqrt(count) / float(noise.mean()) if total > 0 else 0.0
    deviations["relative_frobenius"] = math.sqrt(total) * relative / 2
    deviations["sqnr_db"] = 10 / math.log(10) * relative
    return SampledGemmError(GemmError(**figures), GemmError(**deviations), count)
