"""Quantizing a matrix under a recipe: codes and scales, or the values that they stand for.

One entry for every device. `numerics.gpu` and `numerics.cpu` have compiled kernels for most recipes; the torch code
here is what they are held equal to, and what runs where they do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch

from numerics import cpu
from numerics.recipe import Recipe
from numerics.rounding import cast, check_dense, check_out, decode, encode, round_to_integer
from numerics.scaling import AmaxHistory, block_amax, expand_scales, scale_of, scales_shape, shared_steps

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NUMPY = {torch.float32: np.float32, torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32}


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized (rows, K) matrix.

    Attributes:
        codes: (rows, K) uint8 codes (int32 for formats over 8 bits; int16 signed magnitudes for mx9, mx6, mx4, msfp16
            and msfp12).
        scales: float32 multipliers that give values back: a scalar, (rows, 1), (1, K), (rows, K / block) or
            (rows / 128, K / 128); (rows, K / 2) for mx9, mx6, mx4, each pair's exponents combined; a scalar one
            without a scale.
        recipe: How it was made.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    recipe: Recipe

    def dequantize(self) -> torch.Tensor:
        """(rows, K) float32; infinite where rounding up an amax next to float32's greatest value leaves its range."""
        shared = self.recipe.shared is not None
        values = self.codes.to(torch.float32) if shared else decode(self.codes, self.recipe.element)
        return values * expand_scales(self.scales, self.recipe, self.codes.shape)


def quantize(
    x: torch.Tensor,
    recipe: str | Recipe,
    *,
    amax: torch.Tensor | float | AmaxHistory | None = None,
    out: QuantizedTensor | None = None,
    generator: torch.Generator | None = None,
) -> QuantizedTensor:
    """Quantize a matrix.

    The scale is amax / format max in FP32, or a power of two, and values are divided by it; a scope whose amax is zero
    has scale 1. No gradient flows.

    Args:
        x: (rows, K) float32, float64, bfloat16 or float16, any strides and device; float64 is rounded to float32 first.
        recipe: A `Recipe` or its name.
        amax: For `amax="given"`: one value, or a tensor of the scales' shape, finite and not negative. For
            `amax="delayed"`: the tensor's `AmaxHistory`, which is read, then told of x.
        out: What an earlier call with the same recipe and shape returned, to be refilled.
        generator: For stochastic rounding.

    Returns:
        Codes and scales; `out` where that was passed.

    Raises:
        TypeError: x is not a floating-point tensor, or `amax` or `out` is of another type.
        ValueError: x is not a matrix, is empty or not finite (what `out` holds then means nothing); a block does not
            divide it; or `amax` or `out` does not fit.
    """
    recipe = Recipe.parse(recipe)
    x = _checked(x)
    shape = scales_shape(recipe, *x.shape)
    dtype = _code_type(recipe)
    if out is None:
        out = QuantizedTensor(_empty(x.shape, dtype, x.device), _empty(shape, torch.float32, x.device), recipe)
    else:
        if not isinstance(out, QuantizedTensor):
            raise TypeError(f"out must be a QuantizedTensor, got {type(out).__name__}; pass what quantize returned")
        if out.recipe != recipe:
            raise ValueError(f"out was made with recipe {out.recipe.name}, this call has {recipe.name}; use one recipe")
        check_out(out.codes, x, x.shape, dtype, "out.codes")
        check_out(out.scales, x, shape, torch.float32, "out.scales")
    _run(x, recipe, amax, generator, out.scales, codes=out.codes)
    return out


def fake_quantize(
    x: torch.Tensor,
    recipe: str | Recipe,
    *,
    amax: torch.Tensor | float | AmaxHistory | None = None,
    out: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """What `quantize(x, recipe).dequantize()` returns, without the codes: (rows, K) float32.

    Args:
        x: As for `quantize`.
        recipe: As for `quantize`.
        amax: As for `quantize`.
        out: (rows, K) float32 to write to, which saves the making of a new tensor; it may be x.
        generator: For stochastic rounding.

    Raises:
        TypeError: As for `quantize`.
        ValueError: As for `quantize`.
    """
    recipe = Recipe.parse(recipe)
    x = _checked(x)
    scales_shape(recipe, *x.shape)
    if out is None:
        out = _empty(x.shape, torch.float32, x.device)
    else:
        check_out(out, x, x.shape, torch.float32, "out", may_be_x=True)
    _run(x, recipe, amax, generator, None, values=out)
    return out


def codes_and_values(x: torch.Tensor, recipe: Recipe, *, codes: bool) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Codes (None unless wanted), scales and values of one pass, and so of one draw where rounding is stochastic.

    Raises:
        TypeError: As for `quantize`.
        ValueError: As for `quantize`.
    """
    x = _checked(x)
    made = _empty(x.shape, _code_type(recipe), x.device) if codes else None
    scales = _empty(scales_shape(recipe, *x.shape), torch.float32, x.device)
    values = _empty(x.shape, torch.float32, x.device)
    _run(x, recipe, None, None, scales, made, values)
    return made, scales, values


def _code_type(recipe: Recipe) -> torch.dtype:
    return torch.int16 if recipe.shared else torch.uint8 if recipe.element.bits <= 8 else torch.int32


def _checked(x: torch.Tensor) -> torch.Tensor:
    """The matrix, off the autograd graph."""
    check_dense(x, "x")
    if x.dtype not in _DTYPES:
        raise TypeError(f"x must be a floating-point tensor of 16, 32 or 64 bits, got {x.dtype}; convert with .float()")
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must be a matrix (rows, K) with at least one element, got shape {tuple(x.shape)}; reshape it")
    return x.detach().resolve_neg()


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    # numpy asks the system for huge pages, torch does not: first touching small ones takes longer than quantizing.
    return torch.from_numpy(np.empty(shape, _NUMPY[dtype]))


def _run(
    x: torch.Tensor,
    recipe: Recipe,
    amax: torch.Tensor | float | AmaxHistory | None,
    generator: torch.Generator | None,
    scales: torch.Tensor | None,
    codes: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> None:
    """Write the outputs that are not None."""
    chosen, current = _chosen_amax(x, recipe, amax)
    kernels = _kernels(x, recipe)
    if kernels is None:
        finite = _run_torch(x, recipe, chosen, generator, scales, codes, values)
    else:
        outputs = [scales, codes, values]
        if scales is None and kernels is not cpu:
            outputs[0] = _empty(scales_shape(recipe, *x.shape), torch.float32, x.device)
        dense = [None if y is None else y if y.is_contiguous() else torch.empty_like(y).contiguous() for y in outputs]
        finite = kernels.quantize_into(x, recipe, chosen, *dense)
        for y, written in zip(outputs, dense, strict=True):
            if y is not None and written is not None and y is not written:
                y.copy_(written)
    if not finite:
        raise ValueError(f"x is not finite (in float32) everywhere; quantization takes finite values: {_count(x)}")
    if isinstance(amax, AmaxHistory) and current is not None:
        amax.record(current)


def _count(x: torch.Tensor) -> str:
    return f"{int((~torch.isfinite(x.to(torch.float32))).sum())} of {x.numel()} values are not finite"


def _kernels(x: torch.Tensor, recipe: Recipe) -> Any:
    """The module whose `quantize_into` takes this matrix; None for torch."""
    if x.is_cuda:
        try:
            from numerics import gpu
        except ImportError:  # no triton
            return None
        return gpu if gpu.supports(x, recipe) else None
    return cpu if cpu.supports(x, recipe) else None


def _chosen_amax(x: torch.Tensor, recipe: Recipe, amax: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What the scales come from, None for the tensor's own amax; and that amax where a history is to be told of it."""
    if recipe.amax == "current":
        if amax is not None:
            raise ValueError(f"{recipe.name} takes its amax from x; leave amax= away, or use a recipe with amax='given'")
        return None, None
    shape = scales_shape(recipe, *x.shape)
    if recipe.amax == "delayed":
        if not isinstance(amax, AmaxHistory):
            raise TypeError(f"{recipe.name} needs amax=AmaxHistory(), one per tensor; got {type(amax).__name__}")
        current = block_amax(x.to(torch.float32), recipe)
        amax.check(current)
        return amax.amax(), current
    if isinstance(amax, torch.Tensor):
        check_dense(amax, "amax")
        if amax.is_complex() or amax.dtype == torch.bool:
            raise TypeError(f"amax must hold real numbers, got {amax.dtype}; convert with .float()")
        given = amax.detach().to(x.device, torch.float32)
    elif isinstance(amax, Real) and not isinstance(amax, bool):
        given = torch.tensor(_as_float(amax), dtype=torch.float32, device=x.device)
    else:
        raise TypeError(f"{recipe.name} needs amax=, a number or a tensor of shape {shape}; got {type(amax).__name__}")
    if given.numel() == 1:
        given = given.reshape(()).expand(shape)
    if given.shape != shape:
        raise ValueError(f"amax has shape {tuple(given.shape)}; {recipe.name} needs one value or shape {shape}")
    if not bool((torch.isfinite(given) & (given >= 0)).all()):
        raise ValueError("amax holds values that are negative or not finite in float32; give magnitudes")
    return given.contiguous(), None


def _as_float(number: Real) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _run_torch(
    x: torch.Tensor,
    recipe: Recipe,
    amax: torch.Tensor | None,
    generator: torch.Generator | None,
    scales: torch.Tensor | None,
    codes: torch.Tensor | None,
    values: torch.Tensor | None,
) -> bool:
    """The readable path, and the one for every device: whether all of x is finite, and the outputs written."""
    x = x.to(torch.float32)
    if not bool(torch.isfinite(x).all()):
        return False
    if recipe.shared is not None:
        steps = shared_steps(x, recipe)
        limit = 2.0**recipe.shared.magnitude_bits - 1
        scaled = x.to(torch.float64) / expand_scales(steps, recipe, x.shape)
        # Codes have one zero, so values have one as well.
        elements = (torch.clamp(round_to_integer(scaled, recipe.rounding, generator), -limit, limit) + 0.0).to(torch.float32)
        made = steps.to(torch.float32)
    else:
        if recipe.block is None:
            made = torch.ones((), dtype=torch.float32, device=x.device)
        else:
            made = scale_of(block_amax(x, recipe) if amax is None else amax, recipe)
        quotient = x / expand_scales(made, recipe, x.shape)
        elements = cast(quotient, recipe.element, rounding=recipe.rounding, overflow=recipe.overflow, generator=generator)
    if codes is not None:
        codes.copy_(elements if recipe.shared is not None else encode(elements, recipe.element))
    if values is not None:
        values.copy_(elements * expand_scales(made, recipe, x.shape))
    if scales is not None:
        scales.copy_(made)
    return True
