"""Quantization that writes a matrix and its transpose at once, each contiguous along its own contracted axis.

A weight's gradient contracts over the batch, so its operands are needed turned; a pass of its own for that costs as much
as the quantization. Here one read of the tensor (two where amax comes first) serves both layouts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from numerics import gpu
from numerics.gpu_kernels import Constants, divide, magnitude_bits, report, round_to_grid, scale_of
from numerics.quantization import QuantizedTensor
from numerics.recipe import Recipe

_SCALINGS = ("tensorwise", "rowwise", "block1x128", "block128x128")
_TILE = 128


@triton.jit
def cross_amax_kernel(x, row_amax, column_amax, rows, columns, x_stride, chunk, TILE: tl.constexpr):
    """Largest magnitudes, as bits, of rows and of columns, gathered into zeroed int32 vectors."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    largest = tl.zeros((TILE,), tl.int32)
    first = tl.program_id(1) * chunk
    for start in range(first, tl.minimum(first + chunk, rows), TILE):
        row = start + tl.arange(0, TILE)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        loaded = tl.load(x + row.to(tl.int64)[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
        bits = magnitude_bits(loaded.to(tl.float32))
        tl.atomic_max(row_amax + row, tl.max(bits, 1), mask=row < rows, sem="relaxed")
        largest = tl.maximum(largest, tl.max(bits, 0))
    tl.atomic_max(column_amax + column, largest, mask=column < columns, sem="relaxed")


@triton.jit
def dual_kernel(
    x, row_amax, column_amax, codes, turned, scales, turned_scales, flag, rows, columns, x_stride, partials,
    PARTIALS: tl.constexpr, CROSS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A TILE x TILE tile into both layouts.

    The scale is the tensor's (PARTIALS > 0: that many partial maxima or less), or those of rows and of columns (CROSS),
    or those of the tile's rows and of its columns (BLOCKS), or the tile's.
    """
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_row, in_column = row < rows, column < columns
    mask = in_row[:, None] & in_column[None, :]
    wide_row, wide_column = row.to(tl.int64), column.to(tl.int64)
    loaded = tl.load(x + wide_row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    corner = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    if PARTIALS > 0:
        index = tl.arange(0, PARTIALS)
        amax_bits = tl.max(tl.load(row_amax + index, mask=index < partials, other=0), 0)
        report(flag, amax_bits)
        scale, inverse = scale_of(amax_bits, C)
        if corner:
            tl.store(scales, scale)
            tl.store(turned_scales, scale)
    elif CROSS or BLOCKS:
        if CROSS:
            row_bits = tl.load(row_amax + row, mask=in_row, other=0)
            column_bits = tl.load(column_amax + column, mask=in_column, other=0)
        else:
            bits = magnitude_bits(loaded)
            row_bits = tl.max(bits, 1)
            column_bits = tl.max(bits, 0)
        if flag is not None:
            report(flag, tl.max(row_bits, 0))
        scale, inverse = scale_of(row_bits, C)
        turned_scale, turned_inverse = scale_of(column_bits, C)
        if CROSS:
            if tl.program_id(0) == 0:
                tl.store(scales + row, scale, mask=in_row)
            if tl.program_id(1) == 0:
                tl.store(turned_scales + column, turned_scale, mask=in_column)
        else:
            tl.store(scales + wide_row * tl.num_programs(0) + tl.program_id(0), scale, mask=in_row)
            tl.store(turned_scales + wide_column * tl.num_programs(1) + tl.program_id(1), turned_scale, mask=in_column)
        scale, inverse = scale[:, None], inverse[:, None]
    else:
        amax_bits = tl.max(tl.max(magnitude_bits(loaded), 1), 0)
        report(flag, amax_bits)
        scale, inverse = scale_of(amax_bits, C)
        tl.store(scales + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), scale)
        tl.store(turned_scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)
    code, value = round_to_grid(divide(loaded, scale, inverse, C), C)
    tl.store(codes + wide_row[:, None] * columns + column[None, :], code.to(tl.uint8), mask=mask)
    if CROSS or BLOCKS:
        code, value = round_to_grid(divide(loaded, turned_scale[None, :], turned_inverse[None, :], C), C)
    target = wide_column[:, None] * rows + row[None, :]
    tl.store(turned + target, tl.trans(code.to(tl.uint8)), mask=in_column[:, None] & in_row[None, :])


def supports_dual(x: torch.Tensor, recipe: str | Recipe) -> bool:
    """Whether `quantize_dual` takes this matrix under this recipe."""
    recipe = Recipe.parse(recipe)
    own = recipe.scaling in _SCALINGS and recipe.amax == "current"
    return own and gpu.supports(x, recipe) and gpu.supports(x.t(), recipe)


def quantize_dual(x: torch.Tensor, recipe: str | Recipe, *, check: bool = True) -> tuple[QuantizedTensor, QuantizedTensor]:
    """`quantize(x, recipe)` and `quantize(x.t(), recipe)`, both contiguous, for little more than the price of one.

    Args:
        x: (rows, K) float32, bfloat16 or float16 on the GPU; rows may be strided, other strides cost a copy.
        recipe: Scaled tensorwise, rowwise (the second result: by columns of x), block1x128 (by 128 rows of a column of
            x) or block128x128, with a format of at most 8 bits; amax is the tensor's own.
        check: As in `numerics.gpu.quantize_into`.

    Returns:
        (rows, K) codes with their scales, and (K, rows) codes with theirs.

    Raises:
        ValueError: `supports_dual` says no, or x is not finite.
    """
    recipe = Recipe.parse(recipe)
    if not supports_dual(x, recipe):
        raise ValueError(f"{recipe.name} of a {x.dtype} {tuple(x.shape)} on {x.device}: not supported; quantize x and x.t()")
    tensorwise, crossed, blocks = (recipe.scaling == name for name in ("tensorwise", "rowwise", "block1x128"))
    if tensorwise or x.stride(1) != 1:
        x = x.contiguous()
    rows, columns = x.shape
    shapes = {
        "tensorwise": ((), ()),
        "rowwise": ((rows, 1), (columns, 1)),
        "block1x128": ((rows, columns // 128), (columns, rows // 128)),
        "block128x128": ((rows // 128, columns // 128), (columns // 128, rows // 128)),
    }[recipe.scaling]
    scales, turned_scales = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in shapes)
    codes, turned = (torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in ((rows, columns), (columns, rows)))
    flag = torch.zeros((), dtype=torch.int32, device=x.device) if check else None
    grid = (triton.cdiv(columns, _TILE), triton.cdiv(rows, _TILE))
    constants: Constants = gpu.constants_of(recipe, False, gpu.converts(x.device))
    row_amax = column_amax = None
    programs = 0
    with gpu.on(x.device):
        if tensorwise:
            row_amax = gpu.tensor_amax(x)
            programs = row_amax.numel()
        elif crossed:
            row_amax, column_amax = torch.zeros(rows + columns, dtype=torch.int32, device=x.device).split([rows, columns])
            chunk = _TILE * triton.cdiv(grid[1], 16)
            gpu.run(
                cross_amax_kernel, (grid[0], triton.cdiv(rows, chunk)), _TILE * _TILE,
                x, row_amax, column_amax, rows, columns, x.stride(0), chunk, TILE=_TILE,
            )  # fmt: skip
        gpu.run(
            dual_kernel, grid, _TILE * _TILE,
            x, row_amax, column_amax, codes, turned, scales, turned_scales, flag, rows, columns, x.stride(0), programs,
            PARTIALS=triton.next_power_of_2(programs) if programs else 0, CROSS=crossed, BLOCKS=blocks, TILE=_TILE, C=constants,
        )  # fmt: skip
    if flag is not None and int(flag):
        raise ValueError(f"{recipe.name}: a matrix of shape {(rows, columns)} is not finite")
    return QuantizedTensor(codes, scales, recipe), QuantizedTensor(turned, turned_scales, recipe)
