"""Triton kernels that cast bfloat16 two values at a time, as they lie, under scales of rows and of blocks.

As `numerics.gpu_pairs`, whose arithmetic they share, and equal to the last bit to `numerics.quantization`: maxima are of words
of 32 bits, and a quotient is a product and a fused multiply-add. An H200 takes bytes fastest from many small programs: with
eight words a thread rows reach 95 to 101% of a copy's bandwidth at 8 to 268 MB, blocks of 128 x 128 84 to 101%
(`python benchmarks/kernels_gpu.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from numerics.gpu_constants import Constants
from numerics.gpu_kernels import report
from numerics.gpu_pairs import HIGH_MAGNITUDE, raised, scale_and_inverse, store_row, takes
from numerics.recipe import Recipe
from numerics.sizes import cdiv, next_power_of_2, unit_of

# Words of a program that takes several runs; of a warp; most warps of a program; words of the longest run that it holds.
_WORDS, _OF_A_WARP, _WARPS, _LONGEST = 1024, 256, 8, 8192
# Warps of a program that takes a block of 128 x 128.
_BLOCK_WARPS = 16


@triton.jit
def runs_kernel(
    x, codes, scales, flag, runs, words, x_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One scale for each of `runs` runs of `words` <= WIDTH words, `x_stride` apart, both in UNITs: rows, blocks of a row."""
    words, x_stride = words * UNIT, x_stride * UNIT
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    within = tl.arange(0, WIDTH)[None, :]
    source = x + first * x_stride + row[:, None] * x_stride + within
    if EVEN:
        inside = None
        mask = None
        word = tl.load(source)
    else:
        inside = row < runs - first
        mask = inside[:, None] & (within < words)
        word = tl.load(source, mask=mask, other=0)
    bits = tl.max(raised(tl.zeros((ROWS, WIDTH), tl.int32), word), 1) & HIGH_MAGNITUDE
    if flag is not None:
        report(flag, tl.max(bits, 0))
    scale, inverse, rest = scale_and_inverse(bits, C)
    if scales is not None:
        tl.store(scales + first + row, scale, mask=inside)
    store_row(codes + first * words + row[:, None] * words + within, mask, word, inverse[:, None], rest[:, None], C)


@triton.jit
def block_kernel(x, codes, scales, flag, wide, words, x_stride, TILE: tl.constexpr, C: tl.constexpr):
    """One scale for each TILE x TILE block of a matrix that they divide, `wide` of them side by side."""
    # On one axis, since the second of a grid ends at 65,535.
    down = tl.program_id(0) // wide
    row = (down * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tl.program_id(0) - down * wide) * (TILE // 2) + tl.arange(0, TILE // 2)[None, :]
    word = tl.load(x + row * x_stride + column)
    bits = tl.max(tl.max(raised(tl.zeros((TILE, TILE // 2), tl.int32), word), 1), 0) & HIGH_MAGNITUDE
    report(flag, bits)
    scale, inverse, rest = scale_and_inverse(bits, C)
    if scales is not None:
        tl.store(scales + tl.program_id(0), scale)
    store_row(codes + row * words + column, None, word, inverse, rest, C)


def supports(x: torch.Tensor, recipe: Recipe) -> bool:
    """Whether `quantize` takes what `numerics.gpu.supports` accepts, values side by side in rows."""
    own = recipe.scaling in ("block1x128", "block128x128") or (recipe.scaling == "rowwise" and x.shape[1] <= 2 * _LONGEST)
    return own and takes(x, recipe) and x.stride(0) % 2 == 0


def quantize(
    x: torch.Tensor,
    recipe: Recipe,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    flag: torch.Tensor | None,
    constants: Constants,
) -> None:
    """Codes, contiguous and at an even place of their storage, and scales of a matrix that `supports` accepts."""
    rows, columns = x.shape
    source, target, stride = x.view(torch.int32), codes.view(torch.int16), x.stride(0) // 2
    if recipe.scaling == "block128x128":
        wide = columns // 128
        block_kernel[(wide * (rows // 128),)](
            source, target, scales, flag, wide, columns // 2, stride, TILE=128, C=constants,
            num_warps=_BLOCK_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        return
    length = columns // 2
    if recipe.scaling == "block1x128":
        length = stride = 64
    runs = x.numel() // (2 * length)
    width = next_power_of_2(length)
    # Codes are converted four at a time.
    height = max(min(_WORDS // width, next_power_of_2(runs)), 64 // width, 1)
    unit = unit_of(length, stride)
    runs_kernel[(cdiv(runs, height),)](
        source, target, scales, flag, runs, length // unit, stride // unit, ROWS=height, WIDTH=width,
        EVEN=width == length and runs % height == 0, UNIT=unit, C=constants,
        num_warps=max(1, min(_WARPS, height * width // _OF_A_WARP)), enable_fp_fusion=False,
    )  # fmt: skip
