"""Tensorwise quantization of bfloat16 in one launch, whose programs meet between the search for the amax and the cast.

Two launches read the tensor twice and pay for a launch more. Here every program keeps what it loaded first in registers,
publishes the largest magnitude that it found, waits for all others, and casts; what does not fit is read again, from the
end, where the L2 still holds it. Nothing is reset between launches: a place of meeting counts them, and what a program
publishes carries the count. The programs must all run at once, so the launch is a cooperative one, which starts them
together or not at all: two such kernels on two streams cannot wait for each other's room.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from numerics.gpu_constants import Constants
from numerics.gpu_kernels import report
from numerics.gpu_pairs import HIGH_MAGNITUDE, Outputs, raised, rows_of, scale_and_inverse, store_row, store_turned
from numerics.sizes import cdiv, next_power_of_2, unit_of

# Of a flat tensor: words that a program loads at once, 16 a thread; registers a thread, and programs on a multiprocessor, so that
# they fit.
_FLAT = (4096, 128, 2)
# Of tiles: rows, words, warps, registers a thread, programs on a multiprocessor.
_TILES = (128, 64, 8, 128, 2)
ROOM = 544
"""int64 of a place: the count, one for each program, and one more."""
# Places that are kept ready for captured launches.
_READY = 1024

_by_stream: dict[tuple[torch.device, int], torch.Tensor] = {}
_ready: dict[torch.device, list[torch.Tensor]] = {}
# All places ever made ready: a graph knows only their addresses, and would write to memory that others were given.
_kept: list[torch.Tensor] = []


def place_of(device: torch.device) -> torch.Tensor | None:
    """Where the programs of the next launch meet; None while a graph is captured and no place is left.

    A stream has one, since its launches follow each other. Every captured launch has its own for good, since its graph may
    run beside anything: they are made outside of captures, where launches on that device left fewer than half of `_READY`.
    """
    if device.type != "cuda":
        return torch.zeros(ROOM, dtype=torch.int64, device=device)
    ready = _ready.setdefault(device, [])
    if torch.cuda.is_current_stream_capturing():
        return ready.pop() if ready else None
    stream = torch.cuda.current_stream(device)
    key = device, stream.cuda_stream
    if key not in _by_stream:
        _by_stream[key] = torch.zeros(ROOM, dtype=torch.int64, device=device)
    if len(ready) < _READY // 2:
        _kept.append(torch.zeros(_READY, ROOM, dtype=torch.int64, device=device))
        ready += _kept[-1].unbind()
        stream.synchronize()  # A graph may run on any stream.
    return _by_stream[key]


@triton.jit
def met(place, count, mine, PROGRAMS: tl.constexpr):
    """The largest of all programs' bits, once all have come here; `count` is the launch's."""
    tl.store(place + 1 + tl.program_id(0), (count << 32) | mine.to(tl.int64))
    index = tl.arange(0, PROGRAMS)
    valid = index < tl.num_programs(0)
    seen = tl.load(place + 1 + index, mask=valid, other=0, volatile=True)
    late = tl.max(tl.where(valid & ((seen >> 32) != count), 1, 0), 0)
    while late > 0:
        seen = tl.load(place + 1 + index, mask=valid, other=0, volatile=True)
        late = tl.max(tl.where(valid & ((seen >> 32) != count), 1, 0), 0)
    # All have read the old count: they have published.
    if tl.program_id(0) == 0:
        tl.store(place, count)
    return tl.max(tl.where(valid, tl.cast(seen, tl.int32), 0), 0)


@triton.jit
def next_count(place):
    """This launch's, of 32 bits, which may come round."""
    return ((tl.load(place, volatile=True) + 1) << 32) >> 32


@triton.jit
def flat_kernel(
    x, codes, scales, flag, place, words, blocks,
    HELD: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One scale for a flat tensor of words. A program holds its first block, or two (HELD); with MORE, there are others."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    within = tl.arange(0, BLOCK)
    count = next_count(place)
    start = program.to(tl.int64) * BLOCK
    mask = within < words - start
    held = tl.load(x + start + within, mask=mask, other=0, eviction_policy="evict_first")
    largest = raised(tl.zeros((BLOCK,), tl.int32), held)
    if HELD > 1:
        start_2 = start + tl.cast(programs, tl.int64) * BLOCK
        mask_2 = within < words - start_2
        held_2 = tl.load(x + start_2 + within, mask=mask_2, other=0, eviction_policy="evict_first")
        largest = raised(largest, held_2)
    if MORE:
        for block in range(program + HELD * programs, blocks, programs):
            first = tl.cast(block, tl.int64) * BLOCK
            largest = raised(largest, tl.load(x + first + within, mask=within < words - first, other=0))
    bits = met(place, count, tl.max(largest, 0) & HIGH_MAGNITUDE, PROGRAMS)
    report(flag, bits)
    scale, inverse, rest = scale_and_inverse(bits, C)
    if program == 0:
        if scales is not None:
            tl.store(scales, scale)
    store_row(codes + start + within, mask, held, inverse, rest, C)
    if HELD > 1:
        store_row(codes + start_2 + within, mask_2, held_2, inverse, rest, C)
    if MORE:
        turns = tl.cdiv(blocks - program, programs)
        for back in range(1, turns - HELD + 1):
            first = (program + (turns - back) * programs).to(tl.int64) * BLOCK
            inside = within < words - first
            again = tl.load(x + first + within, mask=inside, other=0, eviction_policy="evict_first")
            store_row(codes + first + within, inside, again, inverse, rest, C)


@triton.jit
def tile_words(x, tile, across, quarter, words, POLICY: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A tile's words of rows four apart, and of those that follow."""
    down = tile // across
    group = down * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = (tile - down * across) * WIDTH + tl.arange(0, WIDTH)
    mask = (group < quarter)[:, None] & (column < words)[None, :]
    return rows_of(x + (4 * group.to(tl.int64))[:, None] * words + column[None, :], words, mask, POLICY)


@triton.jit
def raised_by_four(largest, w0, w1, w2, w3):
    """As `raised`."""
    return raised(raised(raised(raised(largest, w0), w1), w2), w3)


@triton.jit
def store_tile(
    codes, turned, tile, across, quarter, words, w0, w1, w2, w3, inverse, rest, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Codes of a tile, as they lie where wanted, and turned."""
    down = tile // across
    group = down * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = (tile - down * across) * WIDTH + tl.arange(0, WIDTH)
    in_row, in_column = group < quarter, column < words
    if codes is not None:
        mask = in_row[:, None] & in_column[None, :]
        target = codes + (4 * group.to(tl.int64))[:, None] * words + column[None, :]
        store_row(target, mask, w0, inverse, rest, C)
        store_row(target + words, mask, w1, inverse, rest, C)
        store_row(target + 2 * words, mask, w2, inverse, rest, C)
        store_row(target + 3 * words, mask, w3, inverse, rest, C)
    target = turned + 2 * column.to(tl.int64)[:, None] * quarter + group[None, :]
    mask = in_column[:, None] & in_row[None, :]
    store_turned(target, quarter, mask, w0, w1, w2, w3, inverse, rest, inverse, rest, C)


@triton.jit
def tiles_kernel(
    x, codes, turned, scales, turned_scales, flag, place, quarter, words, across, tiles,
    HELD: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PROGRAMS: tl.constexpr,
    UNIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One scale; the codes turned, and as they lie where `codes` is given. A program holds its first tile, or two (HELD).

    `words` are pairs of columns, in UNITs.
    """
    words *= UNIT
    program, programs = tl.program_id(0), tl.num_programs(0)
    count = next_count(place)
    h0, h1, h2, h3 = tile_words(x, program, across, quarter, words, "evict_first", ROWS, WIDTH)
    largest = raised_by_four(tl.zeros((ROWS // 4, WIDTH), tl.int32), h0, h1, h2, h3)
    if HELD > 1:
        # Of a tile that is beyond the last one, all rows are: zeros.
        g0, g1, g2, g3 = tile_words(x, program + programs, across, quarter, words, "evict_first", ROWS, WIDTH)
        largest = raised_by_four(largest, g0, g1, g2, g3)
    if MORE:
        for tile in range(program + HELD * programs, tiles, programs):
            w0, w1, w2, w3 = tile_words(x, tile, across, quarter, words, "", ROWS, WIDTH)
            largest = raised_by_four(largest, w0, w1, w2, w3)
    bits = met(place, count, tl.max(tl.max(largest, 1), 0) & HIGH_MAGNITUDE, PROGRAMS)
    report(flag, bits)
    scale, inverse, rest = scale_and_inverse(bits, C)
    if program == 0:
        tl.store(turned_scales, scale)
        if codes is not None:
            tl.store(scales, scale)
    store_tile(codes, turned, program, across, quarter, words, h0, h1, h2, h3, inverse, rest, ROWS, WIDTH, C)
    if HELD > 1:
        store_tile(codes, turned, program + programs, across, quarter, words, g0, g1, g2, g3, inverse, rest, ROWS, WIDTH, C)
    if MORE:
        turns = tl.cdiv(tiles - program, programs)
        for back in range(1, turns - HELD + 1):
            tile = program + (turns - back) * programs
            w0, w1, w2, w3 = tile_words(x, tile, across, quarter, words, "evict_first", ROWS, WIDTH)
            store_tile(codes, turned, tile, across, quarter, words, w0, w1, w2, w3, inverse, rest, ROWS, WIDTH, C)


def quantize(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None, flag: torch.Tensor | None, constants: Constants
) -> bool:
    """Codes and the scale of a contiguous tensor of an even number of values; False where no place is left to meet."""
    place = place_of(x.device)
    if place is None:
        return False
    words = x.numel() // 2
    block, registers, each = _FLAT
    block = min(block, max(next_power_of_2(words), 128))
    blocks = cdiv(words, block)
    programs = min(blocks, resident(x.device, each))
    held = min(2, cdiv(blocks, programs))
    flat_kernel[(programs,)](
        x.view(-1).view(torch.int32), codes.view(-1).view(torch.int16), scales, flag, place, words, blocks,
        HELD=held, MORE=blocks > held * programs, BLOCK=block, PROGRAMS=next_power_of_2(programs), C=constants,
        **options(x, max(block // 512, 1), registers),
    )  # fmt: skip
    return True


def quantize_turned(x: torch.Tensor, out: Outputs, constants: Constants) -> bool:
    """The codes of a contiguous matrix turned, and, where wanted, as they lie; False where no place is left to meet."""
    place = place_of(x.device)
    if place is None:
        return False
    height, width, warps, registers, each = _TILES
    quarter, words = x.shape[0] // 4, x.shape[1] // 2
    across = cdiv(words, width)
    tiles = across * cdiv(x.shape[0], height)
    programs = min(tiles, resident(x.device, each))
    # The turned codes alone gain nothing by a second one.
    held = 1 if out.codes is None else min(2, cdiv(tiles, programs))
    unit = unit_of(words)
    tiles_kernel[(programs,)](
        x.view(torch.int32), *out.by_words(), place, quarter, words // unit, across, tiles,
        HELD=held, MORE=tiles > held * programs, ROWS=height, WIDTH=width, PROGRAMS=next_power_of_2(programs), UNIT=unit,
        C=constants,
        **options(x, warps, registers),
    )  # fmt: skip
    return True


def options(x: torch.Tensor, warps: int, registers: int) -> dict[str, Any]:
    """Of a launch whose programs meet."""
    own = {"maxnreg": registers, "launch_cooperative_grid": True} if x.is_cuda else {}
    return {"num_warps": warps, "enable_fp_fusion": False, **own}


@functools.cache
def resident(device: torch.device, each: int) -> int:
    """Programs that run at once, of which a multiprocessor holds `each`.

    The interpreter runs them one after the other: there it is one, that waits for itself.
    """
    if device.type != "cuda":
        return 1
    return min(each * torch.cuda.get_device_properties(device).multi_processor_count, ROOM - 2)
