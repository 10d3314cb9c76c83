"""What two tensors of a GEMM are to each other, which the statistics of neither tell: its sums, and how their errors add up.

`numerics.predict` takes rounding errors as independent from element to element. That is so on average over weights, and
off for any one: activations of a trained model lie near a line, so what the errors of a weight make of them is the luck of
a few sums (a third of a decibel in the median on small models, up to 2 dB), as fixed as the weight is. And rows that are alike,
positions of one sequence, have like errors, which add up in a weight gradient as the signal does (up to 8 dB).

So the noise of either operand's rounding is measured, recipe by recipe, on a few batches when statistics are collected.
What is kept are two numbers a recipe; a prediction uses their ratio to what independent errors would have given.

In a weight gradient errors of different samples add up too, as far as they have a mean: small gradients are lost to
underflow and large ones are not, values of few octaves meet the same steps of a coarse grid in every sample. That part of
the noise grows with the square of the rows (in batches of 128, to 9 dB above the rest of it for a plain cast to e4m3, 6 dB
for mxfp4, 4 dB for mxfp8, and a few tenths under tensorwise and rowwise scales). It is measured between different samples
of all batches, as the signal's `quadratic` is (`numerics.gradient`); but where few samples leave it open whether there is
such a part, it is kept, not dropped: noise is rather over- than underestimated, the more so for batches far larger than
what was seen. Samples are taken as independent. Where batches are cut from a stream in its order, of samples that are
alike, sums and their noise are larger (by 2 to 4 dB in the noise of Criteo's sequences, as much in the signal).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from numerics.errors import MERE_FLOOR
from numerics.recipe import Recipe
from numerics.sizes import check_shape, check_whole

if TYPE_CHECKING:
    import torch

# The recipes that are measured unless told otherwise; others take the average of these.
RECIPES = (
    "bf16", "e4m3", "e4m3/tensorwise", "e4m3/rowwise", "e4m3/columnwise", "e4m3/block1x128", "e4m3/block128x128",
    "e5m2/tensorwise", "e5m2/rowwise", "int8/rowwise", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp4", "mxint8",
    "mx9", "mx6", "mx4", "msfp12",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class PairStatistics:
    """Two operands a (M, K) and b (N, K) as they meet in a GEMM.

    Attributes:
        shape: (M, N, K) of the batches that were seen.
        power: Mean square of y = a b^T, over that of independent products: sum over k of E[a_k^2] E[b_k^2].
        nearness: Mean of s / max(|y|, floor), s the size |a_m| |b_n| of an output's row and column, either in its root mean
            square: by how much the mean relative error exceeds the relative error of the whole.
        rounding: Mean square error of rounding y to bf16, over that of y.
        recipes: Names of the recipes that were measured.
        noise_a: Mean square of (Q(a) - a) b^T for each, over that of independent products.
        noise_b: The same for b.
        coherent_a: Of sums over rows of a batch, what to add to `noise_a` for each row of it; empty where nothing is.
        coherent_b: The same for b.
    """

    shape: tuple[int, int, int]
    power: float
    nearness: float
    rounding: float
    recipes: tuple[str, ...]
    noise_a: tuple[float, ...]
    noise_b: tuple[float, ...]
    coherent_a: tuple[float, ...] = ()
    coherent_b: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no tensors have.

        Raises:
            ValueError: naming the field.
        """
        check_shape(self.shape, "pair: shape")
        for field in fields(self):
            values = getattr(self, field.name)
            optional = field.name.startswith("coherent") and not values
            if field.name.startswith(("noise", "coherent")) and not optional and len(values) != len(self.recipes):
                raise ValueError(f"pair: {field.name} has {len(values)} values for {len(self.recipes)} recipes")
            numbers = () if field.name == "recipes" else values if isinstance(values, tuple) else (values,)
            if not all(math.isfinite(value) and value >= 0 for value in numbers):
                raise ValueError(f"pair: {field.name} is {values}; it must be finite and not negative")
        for name in self.recipes:
            Recipe.parse(name)

    def noise(self, recipe: str, k: Any) -> tuple[Any, Any]:
        """Noise of a and of b in sums over k products (a number, or an array of them), over that of independent products.

        Raises:
            ValueError: the recipe was not measured.
        """
        index = self.recipes.index(recipe)
        a, b = (side[index] if side else 0.0 for side in (self.coherent_a, self.coherent_b))
        return self.noise_a[index] + k * a, self.noise_b[index] + k * b

    def to_dict(self) -> dict[str, Any]:
        """Numbers of four digits for a manifest: recipes by name, each the noise of a and of b, and what of it is coherent."""
        coherent = (self.coherent_a, self.coherent_b) if self.coherent_a else ()
        noises = zip(self.noise_a, self.noise_b, *coherent, strict=True)
        rounded = {name: [float(f"{x:.4g}") for x in both] for name, both in zip(self.recipes, noises, strict=True)}
        plain = {name: float(f"{getattr(self, name):.5g}") for name in ("power", "nearness", "rounding")}
        return {"shape": list(self.shape), **plain, "noise": rounded}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PairStatistics:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field is missing or out of range.
        """
        try:
            noise = values["noise"]
            parts = max((len(numbers) for numbers in noise.values()), default=2)
            if parts not in (2, 4) or any(len(numbers) != parts for numbers in noise.values()):
                raise ValueError("pair: noise must hold two numbers a recipe, or four a recipe")
            sides = [tuple(float(numbers[part]) for numbers in noise.values()) for part in range(parts)]
            shape = tuple(values["shape"])
            numbers = (float(values[name]) for name in ("power", "nearness", "rounding"))
            return cls(shape, *numbers, tuple(noise), *sides)  # type: ignore[arg-type, call-arg, misc]
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"pair: {type(error).__name__} {error}") from None


def measure_pair(
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]], recipes: Sequence[str] = RECIPES, each: int | None = None
) -> PairStatistics | None:
    """Measure a GEMM's operands on some batches, each (a, b) contracted over the last axis; None where all are zero.

    Blocks that a shape does not fill are filled with zeros, as whoever runs such a kernel would.

    Args:
        batches: Pairs a (M, K) and b (N, K).
        recipes: Names of recipes to measure.
        each: For a weight gradient, whose K are rows of a batch: the rows of one sample, which may be alike.

    Raises:
        ValueError: there is no batch, shapes do not fit, a value is not finite, or `each` does not divide K.
    """
    import torch

    if not batches:
        raise ValueError("a pair is measured on at least one batch")
    if each is not None:
        check_whole(each=each)
    signal = independent = nearness = rounding = 0.0
    seen = []
    for a, b in batches:
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
            raise ValueError(f"a is {tuple(a.shape)} and b is {tuple(b.shape)}; both must be (rows, K) with the same K")
        if each is not None and a.shape[1] % each:
            raise ValueError(f"each = {each} does not divide the {a.shape[1]} rows of a batch; give the rows of one sample")
        a, b = (x.detach().to(torch.float32) for x in (a, b))
        y = a @ b.T
        power = _mean_square(y)
        if not power:
            continue
        single = float(a.double().square().mean(0) @ b.double().square().mean(0))
        sizes = torch.outer(a.double().square().sum(1), b.double().square().sum(1)).sqrt()
        floored = (y.double().abs() / power**0.5).clamp(min=MERE_FLOOR)
        nearness += float((sizes / floored).mean() / sizes.square().mean().sqrt()) * single
        rounding += _mean_square(y.to(torch.bfloat16).to(torch.float32) - y)
        signal, independent = signal + power, independent + single
        seen.append((a, b))
    if not independent:
        return None
    m, n, k = batches[-1][0].shape[0], batches[-1][1].shape[0], batches[-1][0].shape[1]
    noises = [_noise(seen, name, each) for name in recipes]
    sides = [tuple(numbers[part] / independent for numbers in noises) for part in range(2 if each is None else 4)]
    return PairStatistics((m, n, k), signal / independent, nearness / independent, rounding / signal, tuple(recipes), *sides)


def _noise(batches: list[tuple[torch.Tensor, torch.Tensor]], recipe: str, each: int | None) -> list[float]:
    """Summed over batches: noise of a, noise of b; and with `each`, what is coherent in either, per row."""
    noise = [0.0, 0.0]
    sums: list[Any] = [0.0, 0.0]
    rows = own = 0
    for a, b in batches:
        for side, (left, right) in enumerate(((_rounded(a, recipe) - a, b), (a, _rounded(b, recipe) - b))):
            noise[side] += _mean_square_product(left, right, each)
            if each is not None:
                sums[side] = sums[side] + (left @ right.T).double()
        rows, own = rows + a.shape[1], own + a.shape[1] * (each or 0)
    if each is None:
        return noise
    whole = [float(values.square().mean()) for values in sums]
    # Pairs of rows of different samples only: an estimate without bias, but for those below zero.
    pairs = max(rows**2 - own, 1)
    coherent = [max(total - single, 0.0) / pairs for total, single in zip(whole, noise, strict=True)]
    alone = [max(single - part * own, 0.0) for single, part in zip(noise, coherent, strict=True)]
    return [*alone, *(part * rows for part in coherent)]


def _mean_square(values: torch.Tensor) -> float:
    return float(values.double().square().mean())


def _mean_square_product(a: torch.Tensor, b: torch.Tensor, each: int | None) -> float:
    """Mean square of a b^T, or the sum of the mean squares of its parts of `each` terms."""
    if each is None:
        return _mean_square(a @ b.T)
    # |a b^T|^2 is the sum of the elementwise product of the two Gram matrices.
    parts = (x.T.reshape(-1, each, x.shape[0]) for x in (a, b))
    left, right = (x @ x.transpose(1, 2) for x in parts)
    return float((left.double() * right.double()).sum()) / (a.shape[0] * b.shape[0])


def _rounded(x: torch.Tensor, recipe: str) -> torch.Tensor:
    import torch

    from numerics.quantization import fake_quantize

    rows, columns = (-size % max(block, 1) for size, block in zip(x.shape, Recipe.parse(recipe).block or (1, 1), strict=True))
    padded = torch.nn.functional.pad(x, (0, columns, 0, rows))
    return fake_quantize(padded, recipe)[: x.shape[0], : x.shape[1]]
