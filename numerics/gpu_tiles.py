"""Triton kernels that cast tiles of bfloat16 under scales of rows and of columns: of a tile's own, or of a whole matrix's.

They write the transpose, and the codes as they lie where those are wanted, with the arithmetic of `numerics.gpu_pairs`, whose
words of two values they take. Their instructions bind them on an H200, not its memory: so maxima are of both halves of a word
at once, and few warps share a tile. Where whole lines have scales, a launch before writes the maxima of every tile's lines,
two a word, and each program of the cast reduces those of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from numerics.gpu_constants import Constants
from numerics.gpu_kernels import report
from numerics.gpu_pairs import HIGH_MAGNITUDE, MAGNITUDES, Outputs, rows_of, scale_and_inverse, store_row, store_turned
from numerics.sizes import cdiv, next_power_of_2, unit_of

_LOW_MAGNITUDE = tl.constexpr(0x7FFF)
_LARGER = tl.constexpr("max.u16x2 $0, $1, $2;")
# Rows of a tile: those of a block of a column.
_ROWS = 128
# Words of a tile, warps and registers a thread of a program, and whether its threads share the work on scales: of casts into both
# layouts and into the transpose alone under scales of blocks, and of one under those of lines. The fastest on an H200.
_BOTH = (64, 4, 168, False)
_TURNED = (32, 4, 0, True)
_LINES = (64, 4, 168, True)
# Words and warps of a search for maxima.
_SEARCH = (64, 8)
# Values, and tiles down or across, up to which two launches of these kernels are faster than others where lines have scales:
# every program reduces what was found in all tiles of its lines.
_MOST_VALUES, _MOST_TILES = 2**23, 64
# Maxima of a line that a program reduces at once.
_PARTS = 16

# Nothing is gained by kernels of their own for 1 tile or 16.
_COUNTS = ["wide", "tall", "across_parts", "down_parts"]


@triton.jit
def larger(left, right):
    """The larger of both halves of two words, each a magnitude."""
    return tl.inline_asm_elementwise(_LARGER, "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def largest(words, AXIS: tl.constexpr, HALVES: tl.constexpr):
    """The largest of the lower and of the upper halves of words along an axis; with HALVES by the instruction for both."""
    if HALVES:
        both = tl.reduce(words, AXIS, larger)
    else:
        both = tl.max(words & HIGH_MAGNITUDE, AXIS) | tl.max(words & _LOW_MAGNITUDE, AXIS)
    return both


@triton.jit
def columns_largest(w0, w1, w2, w3, HALVES: tl.constexpr):
    """Words of the magnitudes that are the largest of pairs of columns."""
    m0, m1, m2, m3 = w0 & MAGNITUDES, w1 & MAGNITUDES, w2 & MAGNITUDES, w3 & MAGNITUDES
    if HALVES:
        four = larger(larger(m0, m1), larger(m2, m3))
    else:
        high = tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3)) & HIGH_MAGNITUDE
        n0, n1, n2, n3 = m0 & _LOW_MAGNITUDE, m1 & _LOW_MAGNITUDE, m2 & _LOW_MAGNITUDE, m3 & _LOW_MAGNITUDE
        four = high | tl.maximum(tl.maximum(n0, n1), tl.maximum(n2, n3))
    return largest(four, 0, HALVES)


@triton.jit
def row_largest(word, HALVES: tl.constexpr):
    """Bits of float32 of the largest magnitude of every row."""
    both = largest(word & MAGNITUDES, 1, HALVES)
    return tl.maximum(both & HIGH_MAGNITUDE, both << 16)


@triton.jit
def words_of(source, x_stride, mask):
    """As `rows_of`; all words where there is no mask."""
    if mask is None:
        w0, w1 = tl.load(source), tl.load(source + x_stride)
        w2, w3 = tl.load(source + 2 * x_stride), tl.load(source + 3 * x_stride)
    else:
        w0, w1, w2, w3 = rows_of(source, x_stride, mask, "")
    return w0, w1, w2, w3


@triton.jit
def lines_largest(parts, step, count, inside, LINES: tl.constexpr, PARTS: tl.constexpr, HALVES: tl.constexpr):
    """The largest of `count` words each of LINES pairs of lines, `step` apart."""
    part = tl.arange(0, PARTS)[:, None]
    found = tl.zeros((PARTS, LINES), tl.int32)
    for first in range(0, count, PARTS):
        mask = (first + part < count) & inside[None, :]
        more = tl.load(parts[None, :] + (first + part).to(tl.int64) * step, mask=mask, other=0)
        if HALVES:
            found = larger(found, more)
        else:
            high = tl.maximum(found & HIGH_MAGNITUDE, more & HIGH_MAGNITUDE)
            found = high | tl.maximum(found & _LOW_MAGNITUDE, more & _LOW_MAGNITUDE)
    return largest(found, 0, HALVES)


@triton.jit
def store_scales(scales, scale, line, lines, tile, tiles, LINES: tl.constexpr):
    """Store those of `lines` lines in all, or, without LINES, of the part of each in this one of the `tiles` along them."""
    if LINES:
        if tile == 0:
            tl.store(scales + line, scale, mask=line < lines)
    else:
        tl.store(scales + line.to(tl.int64) * tiles + tile, scale)


@triton.jit(do_not_specialize=_COUNTS)
def search_kernel(
    x, row_parts, column_parts, quarter, words, x_stride, wide,
    HALVES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A tile's largest magnitudes: row_parts[across, pair of rows] and column_parts[down, pair of columns], two a word."""
    words, x_stride = words * UNIT, x_stride * UNIT
    down = tl.program_id(0) // wide
    across = tl.program_id(0) - down * wide
    group = down * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = across * WIDTH + tl.arange(0, WIDTH)
    in_row, in_column = group < quarter, column < words
    mask = None if EVEN else in_row[:, None] & in_column[None, :]
    w0, w1, w2, w3 = words_of(x + (4 * group.to(tl.int64))[:, None] * x_stride + column[None, :], x_stride, mask)
    both = columns_largest(w0, w1, w2, w3, HALVES)
    tl.store(column_parts + down.to(tl.int64) * words + column, both, mask=in_column)
    low = tl.join(row_largest(w0, HALVES), row_largest(w2, HALVES)) >> 16
    pairs = low | tl.join(row_largest(w1, HALVES), row_largest(w3, HALVES))
    pair = 2 * group.to(tl.int64)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(row_parts + across.to(tl.int64) * 2 * quarter + pair, pairs, mask=in_row[:, None])


@triton.jit(do_not_specialize=_COUNTS)
def cast_kernel(
    x, row_parts, column_parts, codes, turned, scales, turned_scales, flag, quarter, words, x_stride, wide, tall, across_parts,
    down_parts, LINES: tl.constexpr, ONCE: tl.constexpr, PARTS: tl.constexpr, HALVES: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One of `tall` x `wide` tiles of ROWS x 2 WIDTH values into its transpose and, where `codes` is given, as it lies.

    The scales are those of the tile's own rows and columns, or, with LINES, of the matrix's, of which `search_kernel` found
    `across_parts` maxima of every row and `down_parts` of every column. `words` and `x_stride` count pairs of columns, in UNITs,
    `quarter` rows by four; with EVEN no tile goes beyond them. Tiles are visited from the end: what was searched last, the L2
    still holds. Every thread that casts values of a line works out its scale, or, with ONCE, one thread does: what is gathered
    is spread over all threads, and gathered back by those that need it.
    """
    words, x_stride = words * UNIT, x_stride * UNIT
    tile = tall * wide - 1 - tl.program_id(0)
    down = tile // wide
    across = tile - down * wide
    group = down * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = across * WIDTH + tl.arange(0, WIDTH)
    in_row, in_column = group < quarter, column < words
    mask = None if EVEN else in_row[:, None] & in_column[None, :]
    row = 4 * group.to(tl.int64)
    w0, w1, w2, w3 = words_of(x + row[:, None] * x_stride + column[None, :], x_stride, mask)
    if LINES:
        both = lines_largest(column_parts + column, words, down_parts, in_column, WIDTH, PARTS, HALVES)
    else:
        both = columns_largest(w0, w1, w2, w3, HALVES)
    odd, even = both & HIGH_MAGNITUDE, both << 16
    if flag is not None:
        report(flag, tl.max(tl.maximum(odd, even), 0))
    if codes is not None:
        # Rows as [group, row & 1, row >> 1].
        index = tl.arange(0, ROWS)
        line = (index & -4) + ((index >> 1) & 1) + 2 * (index & 1)
        if LINES:
            pair = 2 * down * (ROWS // 4) + tl.arange(0, ROWS // 2)
            pairs = lines_largest(row_parts + pair, 2 * quarter, across_parts, pair < 2 * quarter, ROWS // 2, PARTS, HALVES)
            bits = tl.gather(tl.reshape(tl.join(pairs << 16, pairs & HIGH_MAGNITUDE), (ROWS,)), line, 0)
        else:
            first_two = tl.join(row_largest(w0, HALVES), row_largest(w1, HALVES))
            bits = tl.join(first_two, tl.join(row_largest(w2, HALVES), row_largest(w3, HALVES)))
            bits = tl.reshape(bits, (ROWS,))
            if ONCE:
                bits = tl.gather(bits, index, 0)
        scale, first, second = scale_and_inverse(bits, C)
        store_scales(scales, scale, down * ROWS + line, 4 * quarter, across, wide, LINES)
        if ONCE:
            first, second = tl.gather(first, index, 0), tl.gather(second, index, 0)
        left, right = tl.split(tl.reshape(first, (ROWS // 4, 2, 2)))
        f0, f1 = tl.split(left)
        f2, f3 = tl.split(right)
        left, right = tl.split(tl.reshape(second, (ROWS // 4, 2, 2)))
        s0, s1 = tl.split(left)
        s2, s3 = tl.split(right)
        target = codes + row[:, None] * words + column[None, :]
        store_row(target, mask, w0, f0[:, None], s0[:, None], C)
        store_row(target + words, mask, w1, f1[:, None], s1[:, None], C)
        store_row(target + 2 * words, mask, w2, f2[:, None], s2[:, None], C)
        store_row(target + 3 * words, mask, w3, f3[:, None], s3[:, None], C)
    bits = tl.reshape(tl.join(even, odd), (2 * WIDTH,))
    index = tl.arange(0, 2 * WIDTH)
    if ONCE:
        bits = tl.gather(bits, index, 0)
    scale, first, second = scale_and_inverse(bits, C)
    store_scales(turned_scales, scale, 2 * across * WIDTH + index, 2 * words, down, tall, LINES)
    if ONCE:
        first, second = tl.gather(first, index, 0), tl.gather(second, index, 0)
    first, next_first = tl.split(tl.reshape(first, (WIDTH, 2)))
    second, next_second = tl.split(tl.reshape(second, (WIDTH, 2)))
    goal = turned + 2 * column.to(tl.int64)[:, None] * quarter + group[None, :]
    turned_mask = None if EVEN else in_column[:, None] & in_row[None, :]
    store_turned(
        goal, quarter, turned_mask, w0, w1, w2, w3, first[None, :], second[None, :], next_first[None, :], next_second[None, :], C
    )  # fmt: skip


def takes_lines(x: torch.Tensor) -> bool:
    """Whether both layouts under scales of lines are cast fastest by these kernels."""
    return x.numel() <= _MOST_VALUES and max(cdiv(x.shape[0], _ROWS), cdiv(x.shape[1], 2 * _SEARCH[0])) <= _MOST_TILES


def quantize(x: torch.Tensor, out: Outputs, constants: Constants, *, lines: bool) -> None:
    """Codes of a matrix that `numerics.gpu_pairs.supports` accepts, turned and, where they are wanted, as they lie.

    Args:
        x: (rows, columns); 128 divides both where blocks have the scales.
        out: Written: codes, the scales of rows and of columns or of their blocks, and the flag.
        constants: Of the recipe.
        lines: Whole rows and columns have a scale, not 128 values of them; both layouts are wanted then.
    """
    rows, columns = x.shape
    quarter, words, stride = rows // 4, columns // 2, x.stride(0) // 2
    halves, unit = _halves(x.device), unit_of(words, stride)
    row_parts = column_parts = None
    across_parts = down_parts = 0
    if lines:
        width, warps = _SEARCH
        across_parts, down_parts = cdiv(words, width), cdiv(rows, _ROWS)
        parts = torch.empty(across_parts * 2 * quarter + down_parts * words, dtype=torch.int32, device=x.device)
        row_parts, column_parts = parts, parts[across_parts * 2 * quarter :]
        search_kernel[(across_parts * down_parts,)](
            x.view(torch.int32), row_parts, column_parts, quarter, words // unit, stride // unit, across_parts, HALVES=halves,
            EVEN=rows % _ROWS == 0 and words % width == 0, ROWS=_ROWS, WIDTH=width, UNIT=unit, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    width, warps, registers, once = _LINES if lines else _BOTH if out.codes is not None else _TURNED
    options: dict[str, Any] = {"maxnreg": registers} if registers and x.is_cuda else {}
    wide, tall = cdiv(words, width), cdiv(rows, _ROWS)
    cast_kernel[(wide * tall,)](
        x.view(torch.int32), row_parts, column_parts, *out.by_words(), quarter, words // unit, stride // unit, wide, tall,
        across_parts, down_parts, LINES=lines, ONCE=once, PARTS=min(_PARTS, next_power_of_2(max(across_parts, down_parts))),
        HALVES=halves, EVEN=rows % _ROWS == 0 and words % width == 0, ROWS=_ROWS, WIDTH=width, UNIT=unit, C=constants,
        num_warps=warps, enable_fp_fusion=False, **options,
    )  # fmt: skip


@functools.cache
def _halves(device: torch.device) -> bool:
    """Whether the device has the instruction for the larger of both halves of a word."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
