"""Triton kernels for scales by column, and for scales of rows and of columns from one read of a matrix."""

from __future__ import annotations

import triton
import triton.language as tl

from numerics.gpu_kernels import emit, magnitude_bits, report, scale_of


@triton.jit
def line_amax_kernel(x, row_parts, column_parts, rows, columns, x_stride, chunk, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Largest magnitudes, as bits: row_parts[program 0, row], when wanted, and column_parts[program 1, column].

    A program is one warp: a tile's column is in one thread's registers, so that its maximum takes no exchange.
    """
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    largest = tl.zeros((WIDTH,), tl.int32)
    first = tl.program_id(1) * chunk
    for start in range(first, tl.minimum(first + chunk, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        loaded = tl.load(x + row.to(tl.int64)[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
        bits = magnitude_bits(loaded.to(tl.float32))
        if row_parts is not None:
            tl.store(row_parts + tl.program_id(0).to(tl.int64) * rows + row, tl.max(bits, 1), mask=row < rows)
        largest = tl.maximum(largest, tl.max(bits, 0))
    tl.store(column_parts + tl.program_id(1).to(tl.int64) * columns + column, largest, mask=column < columns)


@triton.jit
def line_scale_kernel(
    parts, scales, inverses, flag, rows, columns, row_parts, column_parts,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Scales of rows, then of columns, and, where wanted, what `divide` wants, from (row_parts, rows) maxima and so on."""
    ahead = tl.cdiv(rows, WIDTH)
    of_rows = tl.program_id(0) < ahead
    size = tl.where(of_rows, rows, columns)
    count = tl.where(of_rows, row_parts, column_parts)
    parts += tl.where(of_rows, 0, rows.to(tl.int64) * row_parts)
    place = (tl.program_id(0) - tl.where(of_rows, 0, ahead)) * WIDTH + tl.arange(0, WIDTH)
    largest = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)[:, None]
        mask = (part < count) & (place < size)[None, :]
        loaded = tl.load(parts + part.to(tl.int64) * size + place[None, :], mask=mask, other=0)
        largest = tl.maximum(largest, tl.max(loaded, 0))
    if flag is not None:
        report(flag, tl.max(largest, 0))
    scale, inverse = scale_of(largest, C)
    target = tl.where(of_rows, 0, rows) + place
    tl.store(scales + target, scale, mask=place < size)
    if inverses is not None:
        tl.store(inverses + target, inverse, mask=place < size)


@triton.jit
def column_kernel(
    x, amax, scales, inverses, codes, values, flag, rows, columns, x_stride, chunk,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One scale a column, of a given amax or, when that is None, there already, with `inverses`.

    Rows are visited from the end: what `line_amax_kernel` read last is what the L2 still holds.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    valid = column < columns
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * chunk
    last = tl.minimum(first + chunk, rows)
    inputs = row * x_stride + column[None, :]
    # As many columns a thread as it loads in one go: it holds numbers of each.
    offsets = tl.max_contiguous(row * columns + column[None, :], (1, 8))
    ahead = tl.load(x + tl.full((), first, tl.int64) * x_stride + inputs, mask=(row < last - first) & valid[None, :], other=0.0)
    if amax is None:
        scale, inverse = tl.load(scales + column, mask=valid), tl.load(inverses + column, mask=valid)
    else:
        scale, inverse = scale_of(tl.load(amax + column, mask=valid, other=0.0).to(tl.int32, bitcast=True), C)
        if scales is not None:
            if first == 0:
                tl.store(scales + column, scale, mask=valid)
    scale, inverse = scale[None, :], inverse[None, :]
    for start in range(first, last, ROWS):
        offset = tl.full((), start, tl.int64)
        mask = (row < last - start) & valid[None, :]
        more = (row < last - start - ROWS) & valid[None, :]
        loaded = ahead.to(tl.float32)
        ahead = tl.load(x + (offset + ROWS) * x_stride + inputs, mask=more, other=0.0)
        if amax is not None and flag is not None:
            report(flag, tl.max(tl.max(magnitude_bits(loaded), 1), 0))
        if codes is not None:
            emit(codes + offset * columns, None, offsets, mask, loaded, scale, inverse, C)
        if values is not None:
            emit(None, values + offset * columns, offsets, mask, loaded, scale, inverse, C)
