"""The error of one GEMM from the statistics of its operands: no tensors, no torch, a fraction of a millisecond.

y = sum over K of a_k b_k has a power of its own (`numerics.outputs`). Quantizing adds to each element an error that is
independent between elements (power from `numerics.noise`), so its power goes with the sum over k of E[a_k^2] E[b_k^2] alone;
what quantizing and accumulating (`numerics.drift`) take off systematically goes with y itself. Rounding the outputs comes last.

For one weight, and for rows that are alike, errors are not independent either: a `numerics.pair.PairStatistics` says how the
two operands' sums and errors went in the tensors that were seen. With it, predictions on new samples are within 0.5 dB for
19 of 20 output and input-gradient GEMMs of trained models; from the operands alone, for three in four. A weight gradient's
size in a few batches is luck that nobody knows beforehand (`python benchmarks/error.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from numerics.distributions import TensorStatistics
from numerics.drift import Accumulation, Drift, drifts
from numerics.errors import ACCUMULATIONS, MERE_FLOOR, GemmError
from numerics.gradient import GradientSignal
from numerics.noise import operand_noise, operand_noises
from numerics.outputs import Outputs, density, outputs_of, rounding, rows_of
from numerics.pair import PairStatistics
from numerics.recipe import Recipe

Array = npt.NDArray[np.float64]

# Records that are stretched are so up to here; beyond it a feature stands for several of its kind.
_WIDEST = 2**14
# Predictions whose sizes of outputs are worked on at once: few enough for a core's cache.
_AT_ONCE = 128


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
    request = _Request.of(
        a_distribution, b_distribution, shape, recipe_a, recipe_b, accumulation, signal, pair, output, split_k, headroom
    )
    return _predict_one(request)


def predict_gemm_errors(requests: Iterable[tuple]) -> list[GemmError]:
    """`predict_gemm_error` for many requests; equal ones are answered once, and many take less time each than one alone.

    Args:
        requests: Each a tuple of its arguments in their order, those with a default optional.

    Raises:
        ValueError: as `predict_gemm_error`.
    """
    asked = [_Request.of(*request) for request in requests]
    distinct = list(dict.fromkeys(asked))
    answers = dict(zip(distinct, _predict(distinct), strict=True))
    return [answers[request] for request in asked]


class _Request(NamedTuple):
    """The arguments of `predict_gemm_error`."""

    a: TensorStatistics
    b: TensorStatistics
    shape: tuple[int, ...]
    recipe_a: Recipe
    recipe_b: Recipe
    accumulation: str
    signal: GradientSignal | None
    pair: PairStatistics | None
    output: str
    split_k: int
    headroom: tuple[float | None, ...]

    @classmethod
    def of(
        cls,
        a: TensorStatistics,
        b: TensorStatistics,
        shape: Sequence[int],
        recipe_a: str | Recipe,
        recipe_b: str | Recipe,
        accumulation: str,
        signal: GradientSignal | None = None,
        pair: PairStatistics | None = None,
        output: str = "bf16",
        split_k: int = 1,
        headroom: Sequence[float | None] = (None, None),
    ) -> _Request:
        """The request, recipes parsed.

        Raises:
            ValueError: a name is unknown, or `split_k` is not positive.
        """
        if split_k < 1:
            raise ValueError(f"split_k = {split_k}; give the number of parts that K is split into, 1 for none")
        if accumulation not in ACCUMULATIONS:
            raise ValueError(f"unknown accumulation {accumulation!r}; choose one of {', '.join(ACCUMULATIONS)}")
        recipes = Recipe.parse(recipe_a), Recipe.parse(recipe_b)
        return cls(a, b, tuple(shape), *recipes, accumulation, signal, pair, output, split_k, tuple(headroom))

    @property
    def fraction_bits(self) -> int:
        """Bits of both elements' fractions together."""
        return sum(0 if recipe.shared else recipe.element.fraction_bits for recipe in (self.recipe_a, self.recipe_b))


@dataclass(frozen=True, eq=False)
class _Product:
    """Two operands as they meet in a GEMM, before anything is rounded but its outputs.

    Attributes:
        a: Left operand, as wide as the GEMM.
        b: Right operand.
        pair: What was seen of the two together, as far as it belongs to this GEMM.
        outputs: What they sum to.
        coupling: How far the error's power follows y^2.
        sizes: Sizes |y|, in the outputs' root mean square.
        weights: What an error counts at each size in the mean relative error: the size's share over the size, or over the
            floor of the outputs' rows where it is below that.
        rounded: Mean square error of rounding an output of each size, over the mean square of all.
        rounding: Of all of them.
    """

    a: TensorStatistics
    b: TensorStatistics
    pair: PairStatistics | None
    outputs: Outputs
    coupling: float
    sizes: Array
    weights: Array
    rounded: Array
    rounding: float

    @property
    def sums(self) -> float:
        """Power of y over that of independent products."""
        return self.outputs.power / max(self.outputs.independent, 1e-300)

    @functools.cached_property
    def nearness(self) -> float:
        """Mean relative error of noise whose power is 1 in that of the outputs."""
        deviation = np.sqrt((1 - self.coupling) + self.coupling * self.sizes**2)
        return math.sqrt(2.0 / math.pi) * float((deviation * self.weights).sum())


@functools.lru_cache(maxsize=4096)
def _product(
    a: TensorStatistics,
    b: TensorStatistics,
    shape: tuple[int, ...],
    signal: GradientSignal | None,
    pair: PairStatistics | None,
    output: str,
) -> _Product | None:
    """Two operands as they meet in a GEMM; None where all its outputs are zero, and stay so."""
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"shape {shape} must be three positive numbers (M, N, K)")
    if a.contraction != b.contraction:
        raise ValueError(f"a is contracted along {a.contraction} and b along {b.contraction}; orient both alike")
    m, n, k = shape
    over_features = a.contraction == "features"
    if over_features and signal is not None:
        raise ValueError("a gradient's signal belongs to operands contracted along rows; orient both by along_rows()")
    a, b = a.resized(_width(k if over_features else m, a, b)), b.resized(_width(k if over_features else n, a, b))
    if pair is not None and over_features and pair.shape[1:] != (n, k):
        pair = None
    outputs = outputs_of(a, b, k, signal, pair.power if pair is not None and over_features else None)
    if outputs.power <= 0:
        return None
    spread, coupling = rows_of(a, b, outputs)
    sizes, share = density(outputs)
    rounded = rounding(outputs, output)
    all_rounded = float((rounded * share).sum())
    if pair is not None and output == "bf16" and all_rounded > 0:
        rounded, all_rounded = rounded * (pair.rounding / all_rounded), pair.rounding
    weights = share * (1.0 / np.maximum(sizes, MERE_FLOOR / spread[:, None])).mean(0)
    return _Product(a, b, pair, outputs, coupling, sizes, weights, rounded, all_rounded)


@functools.lru_cache(maxsize=65536)
def _predict_one(request: _Request) -> GemmError:
    return _predict([request])[0]


def _predict(requests: Sequence[_Request]) -> list[GemmError]:
    """Errors of distinct requests."""
    if not requests:
        return []
    products = [_product(r.a, r.b, r.shape, r.signal, r.pair, r.output) for r in requests]
    sides = [(r.a, r.recipe_a, r.shape[0], r.shape[2], r.headroom[0]) for r in requests]
    sides += [(r.b, r.recipe_b, r.shape[1], r.shape[2], r.headroom[1]) for r in requests]
    left, right = np.split(operand_noises(sides), 2)
    shares = np.maximum(left[:, 3:], right[:, 3:])
    found = [GemmError(0.0, math.inf, 0.0, 1.0, *each) for each in shares.tolist()]
    live = [(place, request, product) for place, (request, product) in enumerate(zip(requests, products, strict=True)) if product]
    sums = [
        Accumulation(p.a.origin, p.b.origin, p.outputs, r.accumulation, r.fraction_bits, p.coupling, r.split_k)
        for _, r, p in live
    ]
    distinct = list(dict.fromkeys(sums))
    lost = dict(zip(distinct, drifts(distinct), strict=True))
    # Outputs far from zero are looked at in fewer sizes.
    alike: dict[int, list[int]] = {}
    for number, (_, _, product) in enumerate(live):
        alike.setdefault(len(product.sizes), []).append(number)
    for numbers in alike.values():
        for start in range(0, len(numbers), _AT_ONCE):
            some = numbers[start : start + _AT_ONCE]
            places = [live[number][0] for number in some]
            figures = _figures(
                [live[number][2] for number in some],
                left[places],
                right[places],
                np.array([_coherence(live[number][2], live[number][1]) for number in some]),
                [lost[sums[number]] for number in some],
            )
            for place, each in zip(places, figures.tolist(), strict=True):
                found[place] = GemmError(*each, *shares[place].tolist())
    return found


def _figures(products: Sequence[_Product], left: Array, right: Array, coherence: Array, lost: Sequence[Drift]) -> Array:
    """MERE, SQNR, relative Frobenius error and cosine, (requests, 4); all outputs are looked at in equally many sizes.

    Args:
        products: The operands of each.
        left: Power, shrinkage and correlation of the left operand's errors, (requests, 3 or more).
        right: Of the right one's.
        coherence: Of both, see `_coherence`, (requests, 2).
        lost: What accumulating loses.
    """
    sums = np.array([product.sums for product in products])
    quantized = _random_noise(left, right, coherence, sums) / sums
    shrunk, lost_power, noise = np.array([(each.shrinkage, each.power, each.noise) for each in lost]).T
    rounding, coupling = np.array([(product.rounding, product.coupling) for product in products]).T
    power = quantized + lost_power
    kept = (1.0 - left[:, 1]) * (1.0 - right[:, 1])
    shrinkage = 1.0 - kept * (1.0 - shrunk)
    total = power + shrinkage**2 + rounding
    # At each size its own loss; what is random in the rest is alike at all.
    sizes, weights, rounded = (
        np.stack([getattr(product, name) for product in products]) for name in ("sizes", "weights", "rounded")
    )
    shares = np.stack([np.interp(p.sizes, each.sizes, each.shares) for p, each in zip(products, lost, strict=True)])
    losses = 1.0 - kept[:, None] * (1.0 - shares)
    follows = coupling[:, None]
    deviation = np.sqrt((quantized + noise)[:, None] * ((1 - follows) + follows * sizes**2) + rounded)
    # The error is normal around what y loses.
    mere = (_mean_magnitude(losses * sizes, np.maximum(deviation, 1e-300)) * weights).sum(1)
    for number, product in enumerate(products):
        if product.pair is not None and mere[number] > 0:
            # What of it is noise stands as far above the noise of the whole as it did in the tensors that were seen.
            random = math.sqrt(quantized[number])
            expected, seen = random * product.nearness, random * math.sqrt(2.0 / math.pi) * product.pair.nearness
            mere[number] += min(expected / mere[number], 1.0) * (seen - expected)
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr_db = np.where(total > 0, -10.0 * np.log10(total), math.inf)
        cosine = np.where(shrinkage < 1, 1.0 / np.sqrt(1.0 + (power + rounding) / (1.0 - shrinkage) ** 2), 0.0)
    return np.stack([mere, sqnr_db, np.sqrt(total), cosine], axis=1)


def _width(features: int, a: TensorStatistics, b: TensorStatistics) -> int:
    """How wide records are made for an axis of so many features: no wider than was measured, or than serves."""
    return min(features, max(_WIDEST, a.origin.features, b.origin.features))


def _random_noise(left: Array, right: Array, coherence: Array, sums: Array) -> Array:
    """Power of the operands' errors, over that of independent products, beyond what a common shrinkage explains, (requests,).

    `sums` is y's own power over that of independent products; for the others see `_figures`.
    """
    seen = []
    for side, factor in ((left, coherence[:, 0]), (right, coherence[:, 1])):
        power, shrinkage = side[:, 0], side[:, 1]
        seen.append(np.maximum(factor * _noise_in_sums(power, shrinkage, sums) - shrinkage**2 * sums, 0.0))
    both = np.maximum(left[:, 0] - left[:, 1] ** 2, 0.0) * np.maximum(right[:, 0] - right[:, 1] ** 2, 0.0)
    related: Array = seen[0] * (1 - right[:, 2]) ** 2 + seen[1] * (1 - left[:, 2]) ** 2 + both
    return related


def _noise_in_sums(power: Array, shrinkage: Array, sums: Array) -> Array:
    """Power of an operand's errors over that of independent products: independent ones, and a shrinkage, which is y's own."""
    return np.maximum(power - shrinkage**2, 0.0) + shrinkage**2 * sums


def _coherence(product: _Product, request: _Request) -> tuple[float, float]:
    """Noise of either operand in the products that were seen, over that of independent errors; 1 where none were seen."""
    if product.pair is None:
        return 1.0, 1.0
    return _coherence_seen(
        product.a.origin, product.b.origin, product.pair, request.recipe_a, request.recipe_b, request.shape[2], product.sums
    )


@functools.lru_cache(maxsize=16384)
def _coherence_seen(
    a: TensorStatistics, b: TensorStatistics, pair: PairStatistics, recipe_a: Recipe, recipe_b: Recipe, k: int, sums: float
) -> tuple[float, float]:
    """As `_coherence`; in sums over a batch's rows, at k of them, what is coherent included."""
    m, n, measured_k = pair.shape
    factors = []
    for side, (statistics, recipe, rows) in enumerate(((a, recipe_a, m), (b, recipe_b, n))):
        names = (recipe.name,) if recipe.name in pair.recipes else pair.recipes
        logs = []
        for name in names:
            noise = operand_noise(statistics, Recipe.parse(name), rows, measured_k)
            expected = float(_noise_in_sums(*np.array([noise.power, noise.shrinkage, sums])))
            seen = pair.noise(name, k)[side]
            if seen > 0 and expected > 0:
                logs.append(math.log(seen / expected))
        factors.append(math.exp(sum(logs) / len(logs)) if logs else 1.0)
    return factors[0], factors[1]


def _mean_magnitude(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """E|x| of a normal x."""
    ratio = np.abs(mean) / deviation
    # erf(ratio / sqrt 2) by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
    t = 1.0 / (1.0 + 0.3275911 / math.sqrt(2.0) * ratio)
    bell = np.exp(-0.5 * np.square(ratio))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return deviation * (math.sqrt(2.0 / math.pi) * bell + ratio * (1.0 - series * bell))
