"""Quantization of bfloat16 under scales of columns, turned, in one launch.

A strip of columns is shared by a few programs, which look for its maxima, tell each other, and cast what they have read, some of
which the L2 still holds. As in `numerics.gpu_meeting`, they run all at once, and nothing is reset between launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from numerics import gpu_meeting
from numerics.gpu_constants import Constants
from numerics.gpu_kernels import report
from numerics.gpu_meeting import next_count
from numerics.gpu_pairs import HIGH_MAGNITUDE, MAGNITUDES, rows_of, scale_and_inverse, store_turned
from numerics.sizes import cdiv, next_power_of_2, unit_of

# Rows that a program takes at once, of a strip of columns; of a tile: rows, words; of a program: warps, registers a thread, and
# how many of it a multiprocessor runs at once. What all take at once fits the L2.
_STRIP = (512, 128, 32, 4, 128, 4)
# Where in a place programs that are done count themselves.
_DONE = tl.constexpr(gpu_meeting.ROOM - 1)


@triton.jit
def lacking(slots, count, stage, valid):
    """Whether a program has not come to its stage of this launch."""
    seen = tl.load(slots, mask=valid, other=0, volatile=True)
    return tl.max(tl.where(valid & (((seen >> 32) != count) | (tl.cast(seen, tl.int32) < stage)), 1, 0), 0)


@triton.jit
def wait_for(slots, count, stage, valid):
    """Until every program has come to its stage; what it wrote before is then seen by loads that pass the L1."""
    late = lacking(slots, count, stage, valid)
    while late > 0:
        late = lacking(slots, count, stage, valid)
    tl.debug_barrier()


@triton.jit
def publish(place, count, stage):
    """Say that this program has come to a stage, and has written what belongs to it."""
    tl.debug_barrier()
    tl.atomic_xchg(place + 1 + tl.program_id(0), (count << 32) | tl.cast(stage, tl.int64), sem="release", scope="gpu")


@triton.jit
def column_scales(even_bits, odd_bits, scales, column, in_column, first, C: tl.constexpr):
    """Inverses of a strip's scales, which its first program stores."""
    scale, inverse, rest = scale_and_inverse(even_bits, C)
    next_scale, next_inverse, next_rest = scale_and_inverse(odd_bits, C)
    if first:
        tl.store(scales + 2 * column, scale, mask=in_column)
        tl.store(scales + 2 * column + 1, next_scale, mask=in_column)
    return inverse[None, :], rest[None, :], next_inverse[None, :], next_rest[None, :]


@triton.jit
def columns_kernel(
    x, turned, scales, flag, parts, place, quarter, words, x_stride, items, steps,
    MEMBERS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Codes turned, under the scales of columns. An item is `steps` tiles of a strip, which MEMBERS items share.

    A program publishes the launch's count and how many of its items' maxima are written; items are taken in order, so that
    whoever waits, waits for programs that are at an earlier item, or at this strip's. `words` and `x_stride` count pairs of
    columns, in UNITs.
    """
    words, x_stride = words * UNIT, x_stride * UNIT
    program, programs = tl.program_id(0), tl.num_programs(0)
    count = next_count(place)
    member_index = tl.arange(0, MEMBERS)
    for item in range(program, items, programs):
        strip = item // MEMBERS
        member = item - strip * MEMBERS
        column = strip * WIDTH + tl.arange(0, WIDTH)
        in_column = column < words
        first = member * steps * (ROWS // 4)
        even = tl.zeros((ROWS // 4, WIDTH), tl.int32)
        odd = tl.zeros((ROWS // 4, WIDTH), tl.int32)
        for step in range(0, steps):
            group = first + step * (ROWS // 4) + tl.arange(0, ROWS // 4)
            mask = (group < quarter)[:, None] & in_column[None, :]
            source = x + (4 * group.to(tl.int64))[:, None] * x_stride + column[None, :]
            w0, w1, w2, w3 = rows_of(source, x_stride, mask, "")
            m0, m1, m2, m3 = w0 & MAGNITUDES, w1 & MAGNITUDES, w2 & MAGNITUDES, w3 & MAGNITUDES
            odd = tl.maximum(tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3)), odd)
            even = tl.maximum(tl.maximum(tl.maximum(m0 << 16, m1 << 16), tl.maximum(m2 << 16, m3 << 16)), even)
        part = parts + tl.cast(item, tl.int64) * (2 * WIDTH) + tl.arange(0, WIDTH)
        tl.store(part, tl.max(even, 0), cache_modifier=".cg")
        tl.store(part + WIDTH, tl.max(odd, 0) & HIGH_MAGNITUDE, cache_modifier=".cg")
        publish(place, count, item // programs + 1)
        mates = strip * MEMBERS + member_index
        wait_for(place + 1 + mates % programs, count, mates // programs + 1, member_index < MEMBERS)
        part = parts + mates.to(tl.int64)[:, None] * (2 * WIDTH) + tl.arange(0, WIDTH)[None, :]
        even_bits = tl.max(tl.load(part, cache_modifier=".cg"), 0)
        odd_bits = tl.max(tl.load(part + WIDTH, cache_modifier=".cg"), 0)
        if flag is not None:
            report(flag, tl.max(tl.maximum(even_bits, odd_bits), 0))
        inverse, rest, next_inverse, next_rest = column_scales(even_bits, odd_bits, scales, column, in_column, member == 0, C)
        for back in range(1, steps + 1):
            group = first + (steps - back) * (ROWS // 4) + tl.arange(0, ROWS // 4)
            in_row = group < quarter
            source = x + (4 * group.to(tl.int64))[:, None] * x_stride + column[None, :]
            w0, w1, w2, w3 = rows_of(source, x_stride, in_row[:, None] & in_column[None, :], "evict_first")
            target = turned + 2 * column.to(tl.int64)[:, None] * quarter + group[None, :]
            mask = in_column[:, None] & in_row[None, :]
            store_turned(target, quarter, mask, w0, w1, w2, w3, inverse, rest, next_inverse, next_rest, C)
    # Whoever is last has seen all others read the count.
    if tl.atomic_add(place + _DONE, 1) == programs - 1:
        tl.store(place + _DONE, tl.full((), 0, tl.int64))
        tl.store(place, count)


def quantize_columns(
    x: torch.Tensor, turned: torch.Tensor, scales: torch.Tensor, flag: torch.Tensor | None, constants: Constants
) -> bool:
    """Codes of a matrix's columns, turned, and their scales; False where no place is left to meet."""
    place = gpu_meeting.place_of(x.device)
    if place is None:
        return False
    rows, height, width, warps, registers, resident = _STRIP
    programs = gpu_meeting.resident(x.device, resident)
    quarter, words, stride = x.shape[0] // 4, x.shape[1] // 2, x.stride(0) // 2
    unit = unit_of(words, stride)
    strips = cdiv(words, width)
    # Those of a strip wait for each other: there must be as many. A small matrix is shared by more than its rows ask for.
    members = next_power_of_2(cdiv(x.shape[0], rows))
    while members > programs:
        members //= 2
    while 2 * strips * members <= programs and members * height < x.shape[0]:
        members *= 2
    items = strips * members
    parts = torch.empty(items * 2 * width, dtype=torch.int32, device=x.device)
    columns_kernel[(min(items, programs),)](
        x.view(torch.int32), turned.view(torch.int32), scales, flag, parts, place, quarter, words // unit, stride // unit,
        items, cdiv(x.shape[0], members * height), MEMBERS=members, ROWS=height, WIDTH=width, UNIT=unit, C=constants,
        **gpu_meeting.options(x, warps, registers),
    )  # fmt: skip
    return True
