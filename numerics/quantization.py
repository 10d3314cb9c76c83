"""Quantizing a matrix under a recipe: codes and scales, or the values that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from numerics.formats import Format
from numerics.recipe import BDR_BITS, Recipe
from numerics.rounding import cast, decode, encode, exponent_of, power_of_two

# An FP32 scale below the least normal number would not divide exactly; amax below it quantizes towards zero.
_LEAST_SCALE = 2.0**-126


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized (rows, K) matrix.

    Attributes:
        codes: (rows, K) uint8 codes (int32 for formats over 8 bits; int16 signed magnitudes for mx9, mx6, mx4).
        scales: float32 multipliers that give values back: a scalar, (rows, 1), (1, K), (rows, K / block) or
            (rows / 128, K / 128); (rows, K / 2) for mx9, mx6, mx4, each pair's exponents combined; ones without a scale.
        recipe: How it was made.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    recipe: Recipe

    def dequantize(self) -> torch.Tensor:
        """(rows, K) float32."""
        if self.recipe.format in BDR_BITS:
            return self.codes.to(torch.float32) * self.scales.repeat_interleave(2, 1)
        return decode(self.codes, self.recipe.element) * expand_scales(self.scales, self.recipe, self.codes.shape)


def quantize(x: torch.Tensor, recipe: str | Recipe, *, generator: torch.Generator | None = None) -> QuantizedTensor:
    """Quantize a matrix.

    The scale is amax / format max in FP32, and values are divided by it; a scope that is all zero has scale 1.

    Args:
        x: (rows, K) float32, float64, bfloat16 or float16, any strides and device.
        recipe: A `Recipe` or its name.
        generator: For stochastic rounding.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: x is not a matrix, is empty or not finite, or a block does not divide it.
    """
    recipe = Recipe.parse(recipe)
    values, scales = _scaled(x, recipe, generator)
    if recipe.format in BDR_BITS:
        return QuantizedTensor(values.to(torch.int16), scales, recipe)
    return QuantizedTensor(encode(values, recipe.element), scales, recipe)


def fake_quantize(x: torch.Tensor, recipe: str | Recipe, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """What `quantize(x, recipe).dequantize()` returns, without the codes: (rows, K) float32."""
    recipe = Recipe.parse(recipe)
    values, scales = _scaled(x, recipe, generator)
    if recipe.format in BDR_BITS:
        return values * scales.repeat_interleave(2, 1)
    return values * expand_scales(scales, recipe, values.shape)


def expand_scales(scales: torch.Tensor, recipe: Recipe, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Scales spread so that they multiply a matrix of `shape`."""
    block = recipe.block
    if block is None or 0 in block:
        return scales
    for axis, size in enumerate(block):
        if size > 1:
            scales = scales.repeat_interleave(size, axis)
    return scales


def _scaled(x: torch.Tensor, recipe: Recipe, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Values on the element grid, and the scales."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"quantize takes a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"quantize takes a matrix (rows, K) with at least one element, got shape {tuple(x.shape)}")
    x = x.to(torch.float32)
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"{int((~torch.isfinite(x)).sum())} of {x.numel()} values are not finite (in float32)")
    if recipe.format in BDR_BITS:
        return _shared_microexponents(x, recipe)
    fmt = recipe.element
    if recipe.block is None:
        one = torch.ones((), dtype=torch.float32, device=x.device)
        return cast(x, fmt, rounding=recipe.rounding, overflow=recipe.overflow, generator=generator), one
    amax = _block_amax(x, recipe)
    scales = _power_of_two_scale(amax, recipe) if recipe.is_power_of_two else torch.clamp(_over_max(amax, fmt), min=_LEAST_SCALE)
    scales = torch.where(amax == 0, torch.ones_like(scales), scales)
    quotient = x / expand_scales(scales, recipe, x.shape)
    return cast(quotient, fmt, rounding=recipe.rounding, overflow=recipe.overflow, generator=generator), scales


def _block_amax(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    assert recipe.block is not None
    block_rows, block_columns = recipe.block
    rows, columns = x.shape
    for size, block, what in ((rows, block_rows, "rows"), (columns, block_columns, "columns (K)")):
        if block and size % block:
            raise ValueError(f"{recipe.name}: {size} {what} are no multiple of the block's {block}; pad the tensor")
    magnitude = x.abs()
    if recipe.scaling == "tensorwise":
        return magnitude.amax()
    if recipe.scaling == "columnwise":
        return magnitude.amax(0, keepdim=True)
    if recipe.scaling == "rowwise":
        return magnitude.amax(1, keepdim=True)
    blocks = magnitude.reshape(rows // block_rows, block_rows, columns // block_columns, block_columns)
    return blocks.amax((1, 3))


def _over_max(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """A true division on every device: by a Python number, CUDA multiplies with the reciprocal."""
    return amax / torch.full_like(amax, fmt.max)


def _power_of_two_scale(amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """E8M0 scales (OCP MX 1.0, section 6.3 for `floor`), clamped to the exponents that e8m0 has."""
    fmt = recipe.element
    wide = amax.to(torch.float64)
    if recipe.scale_rounding == "ceil":
        ratio = _over_max(wide, fmt)
        exponent = exponent_of(ratio)
        exponent = exponent + (power_of_two(exponent, torch.float64) * fmt.max < wide).to(exponent.dtype)
    else:
        if recipe.scale_rounding == "nearest_even":
            # Round amax to the element's significand first, so that a carry moves the exponent up.
            step = power_of_two(exponent_of(wide) - fmt.fraction_bits, torch.float64)
            wide = torch.where(wide > 0, torch.round(wide / step) * step, wide)
        exponent = exponent_of(wide) - fmt.max_exponent
    return power_of_two(torch.clamp(exponent, -127, 127), torch.float64).to(torch.float32)


def _shared_microexponents(x: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """mx9, mx6, mx4: 16 elements share an 8-bit exponent, pairs of them one bit that halves their step."""
    bits = BDR_BITS[recipe.format]
    rows, columns = x.shape
    if columns % 16:
        raise ValueError(f"{recipe.name}: {columns} columns (K) are no multiple of the block's 16; pad the tensor")
    pair = x.abs().to(torch.float64).reshape(rows, columns // 16, 8, 2).amax(3)
    block = pair.amax(2, keepdim=True)
    # The exponent field is biased by 127 as in e8m0.
    exponent = torch.clamp(exponent_of(block), -127, 127)
    lower = (pair < power_of_two(exponent, torch.float64)).to(exponent.dtype)
    step = power_of_two(exponent - lower - (bits - 1), torch.float64).reshape(rows, columns // 2)
    step = torch.where(block.expand(-1, -1, 8).reshape(rows, columns // 2) == 0, torch.ones_like(step), step)
    limit = 2.0**bits - 1
    values = torch.clamp(torch.round(x.to(torch.float64) / step.repeat_interleave(2, 1)), -limit, limit)
    return values.to(torch.float32), step.to(torch.float32)
