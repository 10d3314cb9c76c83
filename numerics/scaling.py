"""Amax and scales: how large the elements are that share a scale, and what they are divided by."""

from __future__ import annotations

from collections import deque

import torch

from numerics.formats import Format
from numerics.recipe import Recipe
from numerics.rounding import check_dense, exponent_of, power_of_two

# An FP32 scale below the least normal number would not divide exactly; amax below it quantizes towards zero.
LEAST_SCALE = 2.0**-126


class AmaxHistory:
    """What the tensors before this one were as large as, for recipes with `amax="delayed"` (as TransformerEngine scales).

    A scale comes from the amaxes recorded so far, then the tensor's own is recorded. A tensor that meets an empty
    history is scaled by its own amax.

    Args:
        length: Tensors remembered.
        algorithm: `max` of those remembered, or the `most_recent`.

    Raises:
        TypeError: the length is no whole number.
        ValueError: the length is not positive, or the algorithm unknown.
    """

    def __init__(self, length: int = 16, algorithm: str = "max") -> None:
        """See the class."""
        if not isinstance(length, int) or isinstance(length, bool):
            raise TypeError(f"amax history: length = {length!r}; it must be a whole number")
        if length < 1:
            raise ValueError(f"amax history: length = {length}; it must be at least 1")
        if algorithm not in ("max", "most_recent"):
            raise ValueError(f"amax history: algorithm = {algorithm!r}; choose one of max, most_recent")
        self.algorithm = algorithm
        self._recorded: deque[torch.Tensor] = deque(maxlen=length)

    def __len__(self) -> int:
        """Tensors remembered now."""
        return len(self._recorded)

    def __repr__(self) -> str:
        """Length and algorithm."""
        return f"AmaxHistory(length={self._recorded.maxlen}, algorithm={self.algorithm!r})"

    def amax(self) -> torch.Tensor | None:
        """float32 of the scales' shape; None of an empty history."""
        if not self._recorded:
            return None
        return self._recorded[-1] if self.algorithm == "most_recent" else torch.stack(tuple(self._recorded)).amax(0)

    def record(self, amax: torch.Tensor) -> None:
        """Remember one more amax: magnitudes, of the scales' shape.

        Raises:
            TypeError: it is not a floating-point tensor.
            ValueError: its shape or device is not that of those recorded, or it is negative or not finite.
        """
        check_dense(amax, "amax")
        if not amax.is_floating_point():
            raise TypeError(f"amax must be a floating-point tensor, got {amax.dtype}; convert with .float()")
        self.check(amax)
        amax = amax.detach().to(torch.float32, copy=True)
        if not bool((torch.isfinite(amax) & (amax >= 0)).all()):
            raise ValueError("amax holds values that are negative or not finite in float32; give magnitudes")
        self._recorded.append(amax)

    def check(self, amax: torch.Tensor) -> None:
        """Refuse an amax that is not like those recorded.

        Raises:
            ValueError: its shape or device is another.
        """
        if not self._recorded:
            return
        last = self._recorded[-1]
        if last.shape != amax.shape:
            raise ValueError(
                f"amax history holds scales of shape {tuple(last.shape)}, this tensor has {tuple(amax.shape)}; "
                "keep one history per tensor"
            )
        if last.device != amax.device:
            raise ValueError(f"amax history is on {last.device}, this tensor on {amax.device}; keep one history per tensor")


def scales_shape(recipe: Recipe, rows: int, columns: int) -> tuple[int, ...]:
    """Shape of the scales of a matrix.

    Raises:
        ValueError: a block does not divide the matrix.
    """
    if recipe.shared is not None:
        _check_blocks(recipe, rows, columns)
        return (rows, columns // (2 if recipe.shared.pairs else 16))
    if recipe.block is None or recipe.scaling == "tensorwise":
        return ()
    _check_blocks(recipe, rows, columns)
    block_rows, block_columns = (block or size for block, size in zip(recipe.block, (rows, columns), strict=True))
    return (rows // block_rows, columns // block_columns)


def _check_blocks(recipe: Recipe, rows: int, columns: int) -> None:
    assert recipe.block is not None
    for size, block, what in zip((rows, columns), recipe.block, ("rows", "columns (K)"), strict=True):
        if block and size % block:
            raise ValueError(f"{recipe.name}: {size} {what} are no multiple of the block's {block}; pad the tensor")


def block_amax(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The greatest magnitude under each scale: float32 of `scales_shape`, of a recipe with a scale per block."""
    assert recipe.block is not None
    block_rows, block_columns = recipe.block
    rows, columns = x.shape
    magnitude = x.abs()
    if recipe.scaling == "tensorwise":
        return magnitude.amax()
    if recipe.scaling == "columnwise":
        return magnitude.amax(0, keepdim=True)
    if recipe.scaling == "rowwise":
        return magnitude.amax(1, keepdim=True)
    blocks = magnitude.reshape(rows // block_rows, block_rows, columns // block_columns, block_columns)
    return blocks.amax((1, 3))


def scale_of(amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """float32 scales of float32 amaxes; 1 where nothing but zeros is."""
    fmt = recipe.element
    scales = _power_of_two_scale(amax, recipe) if recipe.is_power_of_two else torch.clamp(_over_max(amax, fmt), min=LEAST_SCALE)
    return torch.where(amax == 0, torch.ones_like(scales), scales)


def expand_scales(scales: torch.Tensor, recipe: Recipe, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Scales spread so that they multiply a matrix of `shape`."""
    if recipe.shared is not None:
        return scales.repeat_interleave(shape[1] // scales.shape[1], 1)
    block = recipe.block
    if block is None or 0 in block:
        return scales
    for axis, size in enumerate(block):
        if size > 1:
            scales = scales.repeat_interleave(size, axis)
    return scales


def shared_steps(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """float64 steps of a format of shared exponents, of `scales_shape`; 1 where nothing but zeros is.

    16 elements share the exponent of their amax, in a field of 8 bits biased by 127 as e8m0's. A pair that lies
    below that binade sets its own bit, and has half the step.
    """
    shared = recipe.shared
    assert shared is not None
    rows, columns = x.shape
    pair = x.abs().to(torch.float64).reshape(rows, columns // 16, 8, 2).amax(3)
    block = pair.amax(2, keepdim=True)
    exponent = torch.clamp(exponent_of(block), -127, 127)
    step = power_of_two(exponent - (shared.magnitude_bits - 1), torch.float64)
    if shared.pairs:
        step = torch.where(pair < power_of_two(exponent, torch.float64), step / 2, step)
    return torch.where(block == 0, torch.ones_like(step), step).reshape(rows, -1)


def _over_max(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """A true division on every device: by a Python number, CUDA multiplies with the reciprocal."""
    return amax / torch.full_like(amax, fmt.max)


def _power_of_two_scale(amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """E8M0 scales (OCP MX 1.0, section 6.3 for `floor`), clamped to the exponents that e8m0 has."""
    fmt = recipe.element
    wide = amax.to(torch.float64)
    if recipe.scale_rounding == "ceil":
        exponent = exponent_of(_over_max(wide, fmt))
        exponent = exponent + (power_of_two(exponent, torch.float64) * fmt.max < wide).to(exponent.dtype)
    else:
        if recipe.scale_rounding == "nearest_even":
            # Round amax to the element's significand first, so that a carry moves the exponent up.
            step = power_of_two(exponent_of(wide) - fmt.fraction_bits, torch.float64)
            wide = torch.where(wide > 0, torch.round(wide / step) * step, wide)
        exponent = exponent_of(wide) - fmt.max_exponent
    return power_of_two(torch.clamp(exponent, -127, 127), torch.float64).to(torch.float32)
