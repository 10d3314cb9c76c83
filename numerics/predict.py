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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from numerics.distributions import TensorStatistics
from numerics.drift import Accumulation, drifts
from numerics.errors import ACCUMULATIONS, GemmError
from numerics.formats import get_format
from numerics.gradient import GradientSignal
from numerics.noise import operand_noise, operand_noises
from numerics.pair import PairStatistics
from numerics.products import Pair, Placed, Products, products_of
from numerics.recipe import Recipe
from numerics.sizes import check_shape, is_whole

Array = npt.NDArray[np.float64]

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

    Returns:
        The error; all but its shares NaN where values beyond the range of a recipe whose `overflow` is `nonfinite` make outputs
        infinite or NaN.

    Raises:
        ValueError: the orientations differ, a size is no positive whole number, a name is unknown, operands along features come
            with a signal, or an amax is not the operand's own and its headroom is missing.
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
    numbers: dict[_Request, int] = {}
    asked = [numbers.setdefault(_Request.of(*request), len(numbers)) for request in requests]
    answers = _predict(list(numbers))
    return [answers[number] for number in asked]


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
            ValueError: a name is unknown, or a size no positive whole number.
        """
        # Here, not later: True is equal to 1 wherever an answer is looked up.
        check_shape(shape)
        if not is_whole(split_k):
            raise ValueError(f"split_k = {split_k!r}; give the number of parts that K is split into, 1 for none")
        if accumulation not in ACCUMULATIONS:
            raise ValueError(f"unknown accumulation {accumulation!r}; choose one of {', '.join(ACCUMULATIONS)}")
        if output != "fp32" and not get_format(output).signed:
            raise ValueError(f"output = {output!r} has no sign; choose a format of signed values, or fp32")
        recipes = Recipe.parse(recipe_a), Recipe.parse(recipe_b)
        return cls(a, b, tuple(shape), *recipes, accumulation, signal, pair, output, split_k, tuple(headroom))

    @property
    def fraction_bits(self) -> int:
        """Bits of both elements' fractions together."""
        return _fraction_bits(self.recipe_a) + _fraction_bits(self.recipe_b)


@functools.lru_cache(maxsize=4096)
def _fraction_bits(recipe: Recipe) -> int:
    return 0 if recipe.shared else recipe.element.fraction_bits


@functools.lru_cache(maxsize=4096)
def _product(pair: Pair) -> Placed:
    return products_of([pair])


@functools.lru_cache(maxsize=65536)
def _predict_one(request: _Request) -> GemmError:
    return _predict([request])[0]


def _predict(requests: Sequence[_Request]) -> list[GemmError]:
    """Errors of distinct requests."""
    if not requests:
        return []
    numbers: dict[Pair, int] = {}
    pairs = [numbers.setdefault(Pair(r.a, r.b, r.shape, r.signal, r.pair, r.output), len(numbers)) for r in requests]
    groups, places = _product(*numbers) if len(numbers) == 1 else products_of(list(numbers))
    sides = [(r.a, r.recipe_a, r.shape[0], r.shape[2], r.headroom[0]) for r in requests]
    sides += [(r.b, r.recipe_b, r.shape[1], r.shape[2], r.headroom[1]) for r in requests]
    left, right = np.split(operand_noises(sides), 2)
    shares = np.maximum(left[:, 3:], right[:, 3:])
    found: dict[int, GemmError] = {}
    members: dict[tuple[bool, str], tuple[list[int], list[int]]] = {group: ([], []) for group in groups}
    for number, pair in enumerate(pairs):
        if (place := places[pair]) is None:
            found[number] = GemmError(0.0, math.inf, 0.0, 1.0, *shares[number].tolist())
        else:
            some, at = members[place[0]]
            some.append(number)
            at.append(place[1])
    for group, (some, at) in members.items():
        figures = _figures([requests[number] for number in some], groups[group], at, left[some], right[some])
        for number, each, share in zip(some, figures.tolist(), shares[some].tolist(), strict=True):
            found[number] = GemmError(*each, *share)
    for number in np.flatnonzero(shares[:, 1] > 0).tolist():
        sides_of = (requests[number].recipe_a, left[number, 4]), (requests[number].recipe_b, right[number, 4])
        if any(recipe.overflow == "nonfinite" and share > 0 for recipe, share in sides_of):
            found[number] = GemmError(*[math.nan] * 4, *shares[number].tolist())
    return [found[number] for number in range(len(requests))]


def _figures(requests: Sequence[_Request], products: Products, at: list[int], left: Array, right: Array) -> Array:
    """MERE, SQNR, relative Frobenius error and cosine, (requests, 4).

    Args:
        requests: What is asked.
        products: Their operands, among others.
        at: Which of `products` are each request's.
        left: Power, shrinkage and correlation of the left operand's errors, (requests, 3 or more).
        right: Of the right one's.
    """
    sums = [
        Accumulation(r.a.origin, r.b.origin, products.outputs[p], r.accumulation, r.fraction_bits, r.split_k)
        for r, p in zip(requests, at, strict=True)
    ]
    place_of = dict(zip(sums, at, strict=True))
    number = {each: place for place, each in enumerate(place_of)}
    lost, places = drifts(list(place_of)), list(place_of.values())
    # At each size its own loss.
    shares = np.stack([np.interp(products.sizes[p], each.sizes, each.shares) for p, each in zip(places, lost, strict=True)])
    whole = np.array([(each.shrinkage, each.power, each.noise) for each in lost])
    which = [number[each] for each in sums]
    coherence = _coherence(requests, products, at)
    return np.concatenate([
        _some_figures(products, at[some], left[some], right[some], coherence[some], whole[which[some]], shares[which[some]])
        for some in (slice(start, start + _AT_ONCE) for start in range(0, len(at), _AT_ONCE))
    ])  # fmt: skip


def _some_figures(
    products: Products, at: list[int], left: Array, right: Array, coherence: Array, lost: Array, shares: Array
) -> Array:
    """As `_figures`.

    Args:
        products: As of `_figures`, as the next three.
        at: Of the requests.
        left: Of the left operands.
        right: Of the right ones.
        coherence: Of both, see `_coherence`, (requests, 2).
        lost: What accumulating loses: shrinkage, power and noise of `numerics.drift.Drift`, (requests, 3).
        shares: Its share at each size of an output, (requests, sizes).
    """
    sums, rounding, coupling = products.sums[at], products.rounding[at], products.coupling[at]
    quantized = _random_noise(left, right, coherence, sums) / sums
    shrunk, lost_power, noise = lost.T
    power = quantized + lost_power
    kept = (1.0 - left[:, 1]) * (1.0 - right[:, 1])
    shrinkage = 1.0 - kept * (1.0 - shrunk)
    total = power + shrinkage**2 + rounding
    # At each size its own loss; what is random in the rest is alike at all.
    sizes, weights, rounded = products.sizes[at], products.weights[at], products.rounded[at]
    losses = 1.0 - kept[:, None] * (1.0 - shares)
    follows = coupling[:, None]
    deviation = np.sqrt((quantized + noise)[:, None] * ((1 - follows) + follows * sizes**2) + rounded)
    # The error is normal around what y loses.
    mere = (_mean_magnitude(losses * sizes, np.maximum(deviation, 1e-300)) * weights).sum(1)
    for number, place in enumerate(at):
        pair = products.pairs[place]
        if pair is not None and mere[number] > 0:
            # What of it is noise stands as far above the noise of the whole as it did in the tensors that were seen.
            random = math.sqrt(quantized[number])
            expected, seen = random * products.nearness[place], random * math.sqrt(2.0 / math.pi) * pair.nearness
            mere[number] += min(expected / mere[number], 1.0) * (seen - expected)
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr_db = np.where(total > 0, -10.0 * np.log10(total), math.inf)
        cosine = np.where(shrinkage < 1, 1.0 / np.sqrt(1.0 + (power + rounding) / (1.0 - shrinkage) ** 2), 0.0)
    return np.stack([mere, sqnr_db, np.sqrt(total), cosine], axis=1)


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


def _coherence(requests: Sequence[_Request], products: Products, at: list[int]) -> Array:
    """Noise of either operand in the products that were seen, over that of independent errors; 1 where none were seen.

    In sums over a batch's rows, at so many of them, what is coherent included.
    """
    result = np.ones((len(requests), 2))
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, (request, place) in enumerate(zip(requests, at, strict=True)):
        pair = products.pairs[place]
        if pair is not None:
            alike.setdefault((request.a.origin, request.b.origin, pair, request.recipe_a, request.recipe_b), []).append(number)
    for (*operands, pair, recipe_a, recipe_b), numbers in alike.items():
        sums = products.sums[[at[number] for number in numbers]]
        rows = np.array([requests[number].shape[2] for number in numbers])
        for side, (statistics, recipe) in enumerate(zip(operands, (recipe_a, recipe_b), strict=True)):
            names = (recipe.name,) if recipe.name in pair.recipes else pair.recipes
            logs, count = np.zeros(len(numbers)), np.zeros(len(numbers))
            for name in names:
                noise = operand_noise(statistics, Recipe.parse(name), pair.shape[side], pair.shape[2])
                expected = _noise_in_sums(np.array(noise.power), np.array(noise.shrinkage), sums)
                seen = pair.noise(name, rows)[side]
                some = (seen > 0) & (expected > 0)
                logs[some] += np.log(seen[some] / expected[some])
                count += some
            result[numbers, side] = np.exp(logs / np.maximum(count, 1))
    return result


def _mean_magnitude(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """E|x| of a normal x."""
    ratio = np.abs(mean) / deviation
    # erf(ratio / sqrt 2) by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7.
    t = 1.0 / (1.0 + 0.3275911 / math.sqrt(2.0) * ratio)
    bell = np.exp(-0.5 * np.square(ratio))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return deviation * (math.sqrt(2.0 / math.pi) * bell + ratio * (1.0 - series * bell))
