"""Quantization that writes a matrix and its transpose at once, or its transpose alone, contiguous along the contracted axis.

A weight's gradient contracts over the batch, so its operands are needed turned; a pass of its own for that costs as much
as the quantization. Here one read of the tensor (two where amax comes first) serves both layouts, or turns what it casts.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from numerics import gpu, gpu_meeting, gpu_pairs, gpu_strips, gpu_tiles
from numerics.gpu_constants import Constants, constants_of
from numerics.gpu_kernels import PACK_E4M3, PACK_E5M2, divide, magnitude_bits, report, round_to_grid, scale_of
from numerics.gpu_pairs import Outputs
from numerics.quantization import QuantizedTensor
from numerics.recipe import Recipe
from numerics.scaling import scales_shape
from numerics.sizes import cdiv, next_power_of_2

_SCALINGS = ("tensorwise", "rowwise", "block1x128", "block128x128")
# Rows, columns and warps of a program: of a block, of a cast under one scale, of a cast under those of rows and columns.
_BLOCK = (128, 128, 4)
_CAST = (64, 64, 4)
_LINES = (32, 128, 4)
# Of a cast under the scales of 128 rows of a column, where rows of x need none: fewer columns are held.
_TURNED = (128, 64, 4)


@triton.jit
def row_scale(bits, slots, C: tl.constexpr):
    """Scales, stored, and inverses of rows, to be broadcast along them."""
    scale, inverse = scale_of(bits, C)
    tl.store(slots, scale)
    return scale[:, None], inverse[:, None]


@triton.jit
def byte(quotient, C: tl.constexpr):
    """Codes as int32."""
    return round_to_grid(quotient, C)[0].to(tl.uint8).to(tl.int32)


@triton.jit
def dual_kernel(
    x, amax, inverses, codes, turned, scales, turned_scales, flag, rows, columns, x_stride, partials, wide, tall,
    PARTIALS: tl.constexpr, LINES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """One of `tall` x `wide` tiles, each ROWS x WIDTH, into both layouts.

    `turned` is of int32, each the codes of four rows, and 4 divides `rows`.

    Without `codes`, `turned` alone is written, and `inverses` are of columns alone.

    The scale is the tensor's (PARTIALS > 0: that many partial maxima or less, in `amax`), or those of rows and of columns
    (LINES: there already, with `inverses`, rows first), or those of the tile's rows and of its columns
    (BLOCKS), or the tile's. Four tensors hold every fourth row each, so that threads exchange words, not bytes. Tiles
    are visited from the end: what was read last for the maxima is what the L2 still holds.
    """
    # On one axis, since the second of a grid ends at 65,535.
    across = wide - 1 - tl.program_id(0) % wide
    down = tall - 1 - tl.program_id(0) // wide
    group = down * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = across * WIDTH + tl.arange(0, WIDTH)
    in_row, in_column = group < rows // 4, column < columns
    mask = in_row[:, None] & in_column[None, :]
    row = 4 * group.to(tl.int64)
    source = x + row[:, None] * x_stride + column[None, :]
    x0 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    x1 = tl.load(source + x_stride, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + 2 * x_stride, mask=mask, other=0.0).to(tl.float32)
    x3 = tl.load(source + 3 * x_stride, mask=mask, other=0.0).to(tl.float32)
    if LINES:
        if codes is not None:
            s0, i0 = tl.load(scales + row, mask=in_row)[:, None], tl.load(inverses + row, mask=in_row)[:, None]
            s1, i1 = tl.load(scales + row + 1, mask=in_row)[:, None], tl.load(inverses + row + 1, mask=in_row)[:, None]
            s2, i2 = tl.load(scales + row + 2, mask=in_row)[:, None], tl.load(inverses + row + 2, mask=in_row)[:, None]
            s3, i3 = tl.load(scales + row + 3, mask=in_row)[:, None], tl.load(inverses + row + 3, mask=in_row)[:, None]
        scale = tl.load(turned_scales + column, mask=in_column)[None, :]
        inverse = tl.load(inverses + (0 if codes is None else rows) + column, mask=in_column)[None, :]
    elif PARTIALS > 0:
        index = tl.arange(0, PARTIALS)
        amax_bits = tl.max(tl.load(amax + index, mask=index < partials, other=0), 0)
    else:
        b0, b1, b2, b3 = magnitude_bits(x0), magnitude_bits(x1), magnitude_bits(x2), magnitude_bits(x3)
        column_bits = tl.max(tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3)), 0)
        if BLOCKS:
            if flag is not None:
                report(flag, tl.max(column_bits, 0))
            if codes is not None:
                slots = scales + row * wide + across
                s0, i0 = row_scale(tl.max(b0, 1), slots, C)
                s1, i1 = row_scale(tl.max(b1, 1), slots + wide, C)
                s2, i2 = row_scale(tl.max(b2, 1), slots + 2 * wide, C)
                s3, i3 = row_scale(tl.max(b3, 1), slots + 3 * wide, C)
            scale, inverse = scale_of(column_bits, C)
            tl.store(turned_scales + column.to(tl.int64) * tall + down, scale)
            scale, inverse = scale[None, :], inverse[None, :]
        else:
            amax_bits = tl.max(column_bits, 0)
    if not (LINES or BLOCKS):
        report(flag, amax_bits)
        scale, inverse = scale_of(amax_bits, C)
        s0, s1, s2, s3, i0, i1, i2, i3 = scale, scale, scale, scale, inverse, inverse, inverse, inverse
        if PARTIALS == 0 or (across == 0) & (down == 0):
            if codes is not None:
                tl.store(scales + down * wide + across, scale)
            tl.store(turned_scales + across * tall + down, scale)
    if codes is not None:
        q0, q1, q2, q3 = divide(x0, s0, i0, C), divide(x1, s1, i1, C), divide(x2, s2, i2, C), divide(x3, s3, i3, C)
        target = codes + row[:, None] * columns + column[None, :]
        tl.store(target, round_to_grid(q0, C)[0].to(tl.uint8), mask=mask)
        tl.store(target + columns, round_to_grid(q1, C)[0].to(tl.uint8), mask=mask)
        tl.store(target + 2 * columns, round_to_grid(q2, C)[0].to(tl.uint8), mask=mask)
        tl.store(target + 3 * columns, round_to_grid(q3, C)[0].to(tl.uint8), mask=mask)
    if LINES or BLOCKS or codes is None:
        q0, q1 = divide(x0, scale, inverse, C), divide(x1, scale, inverse, C)
        q2, q3 = divide(x2, scale, inverse, C), divide(x3, scale, inverse, C)
    if C.e4m3 and (C.bounded or not C.nonfinite):
        words = tl.inline_asm_elementwise(PACK_E4M3, "=r,r,r,r,r", [q0, q1, q2, q3], dtype=tl.int32, is_pure=True, pack=1)
    elif C.e5m2 and (C.bounded or not C.nonfinite):
        words = tl.inline_asm_elementwise(PACK_E5M2, "=r,r,r,r,r", [q0, q1, q2, q3], dtype=tl.int32, is_pure=True, pack=1)
    else:
        words = byte(q0, C) | (byte(q1, C) << 8) | (byte(q2, C) << 16) | (byte(q3, C) << 24)
    turned += column.to(tl.int64)[:, None] * (rows // 4) + group[None, :]
    tl.store(turned, tl.trans(words), mask=in_column[:, None] & in_row[None, :])


def supports_dual(x: torch.Tensor, recipe: str | Recipe) -> bool:
    """Whether `quantize_dual` takes this matrix under this recipe."""
    recipe = Recipe.parse(recipe)
    own = recipe.scaling in _SCALINGS and recipe.amax == "current"
    return own and gpu.supports(x, recipe) and gpu.supports(x.t(), recipe)


def quantize_dual(x: torch.Tensor, recipe: str | Recipe, *, check: bool = True) -> tuple[QuantizedTensor, QuantizedTensor]:
    """`quantize(x, recipe)` and `quantize(x.t(), recipe)`, both contiguous, for little more than the price of one.

    Args:
        x: (rows, K) float32, bfloat16 or float16 on the GPU; rows may be strided, other strides cost a copy. Where 4
            does not divide their number, this is two quantizations and a copy.
        recipe: Scaled tensorwise, rowwise (the second result: by columns of x), block1x128 (by 128 rows of a column of
            x) or block128x128, with a format of at most 8 bits; amax is the tensor's own.
        check: As in `numerics.gpu.quantize_into`.

    Returns:
        (rows, K) codes with their scales, and (K, rows) codes with theirs.

    Raises:
        ValueError: `supports_dual` says no, or x is not finite.
    """
    recipe, x = _taken(x, recipe)
    rows, columns = x.shape
    shapes = scales_shape(recipe, rows, columns), scales_shape(recipe, columns, rows)
    sizes = [math.prod(shape) for shape in shapes]
    every = torch.empty(sum(sizes), dtype=torch.float32, device=x.device)
    scales, turned_scales = (part.view(shape) for part, shape in zip(every.split(sizes), shapes, strict=True))
    codes, turned = (torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in ((rows, columns), (columns, rows)))
    if rows % 4:
        finite = gpu.quantize_into(x, recipe, None, scales, codes, check=check)
        finite &= gpu.quantize_into(x.t(), recipe, None, turned_scales, turned, check=False)
    else:
        finite = _launch(x, recipe, Outputs(codes, turned, scales, turned_scales, _flag(x, check)), every)
    _refuse_unless(finite, recipe, x)
    return QuantizedTensor(codes, scales, recipe), QuantizedTensor(turned, turned_scales, recipe)


def quantize_turned(x: torch.Tensor, recipe: str | Recipe, *, check: bool = True) -> QuantizedTensor:
    """`quantize(x.t(), recipe)`, contiguous, without a copy of x: the second result of `quantize_dual`, alone.

    Returns:
        (K, rows) codes with their scales.

    Raises:
        ValueError: as `quantize_dual`.
    """
    recipe, x = _taken(x, recipe)
    rows, columns = x.shape
    scales = torch.empty(scales_shape(recipe, columns, rows), dtype=torch.float32, device=x.device)
    turned = torch.empty((columns, rows), dtype=torch.uint8, device=x.device)
    if rows % 4:
        finite = gpu.quantize_into(x.t(), recipe, None, scales, turned, check=check)
    else:
        finite = _launch(x, recipe, Outputs(None, turned, None, scales, _flag(x, check)), scales)
    _refuse_unless(finite, recipe, x)
    return QuantizedTensor(turned, scales, recipe)


def _taken(x: torch.Tensor, recipe: str | Recipe) -> tuple[Recipe, torch.Tensor]:
    """The recipe, and x with its values side by side in rows."""
    recipe = Recipe.parse(recipe)
    if not supports_dual(x, recipe):
        raise ValueError(f"{recipe.name} of a {x.dtype} {tuple(x.shape)} on {x.device}: not supported; quantize x and x.t()")
    return recipe, x.contiguous() if recipe.scaling == "tensorwise" or x.stride(1) != 1 else x


def _flag(x: torch.Tensor, check: bool) -> torch.Tensor | None:
    return torch.zeros((), dtype=torch.int32, device=x.device) if check else None


def _refuse_unless(finite: bool, recipe: Recipe, x: torch.Tensor) -> None:
    if not finite:
        raise ValueError(f"{recipe.name}: a matrix of shape {tuple(x.shape)} is not finite")


def _launch(x: torch.Tensor, recipe: Recipe, out: Outputs, every: torch.Tensor) -> bool:
    """Whether all of x is finite, as far as anybody looks; its values lie side by side in rows, whose number 4 divides.

    `every` is both scales, one after the other; without `out.codes`, the turned ones.
    """
    constants = constants_of(recipe, False, gpu.converts(x.device))
    with gpu.on(x.device):
        if gpu_pairs.supports(x, recipe):
            _cast_words(x, recipe, out, every, constants)
        else:
            _cast_values(x, recipe, out, every, constants)
    return out.flag is None or not int(out.flag)


def _cast_words(x: torch.Tensor, recipe: Recipe, out: Outputs, every: torch.Tensor, constants: Constants) -> None:
    """Two values at a time, in as few launches as can be where an amax of more than a tile comes first."""
    both, lines = out.codes is not None, recipe.scaling == "rowwise"
    if recipe.scaling == "block1x128" or (lines and both and gpu_tiles.takes_lines(x)):
        gpu_tiles.quantize(x, out, constants, lines=lines)
    elif recipe.scaling == "block128x128":
        gpu_pairs.launch(x, "tile", None, out, constants)
    elif recipe.scaling == "tensorwise":
        if not gpu_meeting.quantize_turned(x, out, constants):
            gpu_pairs.launch(x, "tensor", gpu.tensor_amax(x), out, constants)
    elif both or not gpu_strips.quantize_columns(x, out.turned, out.turned_scales, out.flag, constants):
        gpu.line_scales(x, every, None, out.flag, constants, by_rows=both)
        gpu_pairs.launch(x, "lines", None, out, constants)


def _cast_values(x: torch.Tensor, recipe: Recipe, out: Outputs, every: torch.Tensor, constants: Constants) -> None:
    """One value at a time, of any type."""
    rows, columns = x.shape
    tensorwise, lines, blocks = (recipe.scaling == name for name in ("tensorwise", "rowwise", "block1x128"))
    both = out.codes is not None
    amax = inverses = None
    partials = 0
    if tensorwise:
        amax = gpu.tensor_amax(x)
        partials = amax.numel()
    elif lines:
        inverses = torch.empty_like(every)
        gpu.line_scales(x, every, inverses, out.flag, constants, by_rows=both)
    height, width, warps = _CAST if tensorwise else _LINES if lines else _TURNED if blocks and not both else _BLOCK
    wide, tall = cdiv(columns, width), cdiv(rows, height)
    dual_kernel[(wide * tall,)](
        x, amax, inverses, out.codes, out.turned.view(torch.int32), out.scales, out.turned_scales, out.flag, rows, columns,
        x.stride(0), partials, wide, tall, PARTIALS=next_power_of_2(partials) if partials else 0, LINES=lines, BLOCKS=blocks,
        ROWS=height, WIDTH=width, C=constants, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
