"""What a quantizer would take whose arithmetic cost nothing, where an amax of more than a tile must be known before it casts.

Two kernels that move its bytes and compute next to nothing: one launch whose programs read, meet once and write, holding what
they can, as `numerics.gpu_meeting` does; and two launches, of which the second reads again, from the end, what the L2 may
still hold. Both lie along memory: turning what is written, which some forms must, comes on top. What they write is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from kernel_peers import OURS

from hil.kernels.base import Runner, Shape
from hil.timing import BufferPool
from numerics import gpu_meeting
from numerics.gpu_meeting import met, next_count
from numerics.gpu_pairs import HIGH_MAGNITUDE
from numerics.sizes import cdiv, next_power_of_2

FLOORS = ("reads, meets, writes", "reads; reads, writes")
# Words of a program that meets, its warps, registers a thread and how many a multiprocessor runs; of one that does not, and
# its warps.
_MEETING = (4096, 8, 128, 2)
_BLOCK = (4096, 8)


@triton.jit
def put(out, place, mask, word, bits, WIDE: tl.constexpr):
    """Two bytes a word, or four (WIDE), that nobody knows without the maximum of all words."""
    if WIDE:
        tl.store(out + place, word ^ bits, mask=mask)
    else:
        tl.store(out + place, ((word ^ bits) >> 16).to(tl.int16), mask=mask)


@triton.jit
def meeting_kernel(
    x, out, place, words, blocks, HELD: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """A program holds its first block, or two (HELD); with MORE, there are others, which are read again."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    count = next_count(place)
    first = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(x + first, mask=first < words, other=0, eviction_policy="evict_first")
    largest = held
    if HELD > 1:
        second = first + programs.to(tl.int64) * BLOCK
        held_2 = tl.load(x + second, mask=second < words, other=0, eviction_policy="evict_first")
        largest = tl.maximum(largest, held_2)
    if MORE:
        for block in range(program + HELD * programs, blocks, programs):
            index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.load(x + index, mask=index < words, other=0))
    bits = met(place, count, tl.max(largest, 0) & HIGH_MAGNITUDE, PROGRAMS)
    put(out, first, first < words, held, bits, WIDE)
    if HELD > 1:
        put(out, second, second < words, held_2, bits, WIDE)
    if MORE:
        turns = tl.cdiv(blocks - program, programs)
        for back in range(1, turns - HELD + 1):
            index = (program + (turns - back) * programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            word = tl.load(x + index, mask=index < words, other=0, eviction_policy="evict_first")
            put(out, index, index < words, word, bits, WIDE)


@triton.jit
def read_kernel(x, parts, words, BLOCK: tl.constexpr):
    """The largest word of a block."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + tl.program_id(0), tl.max(tl.load(x + index, mask=index < words, other=0), 0) & HIGH_MAGNITUDE)


@triton.jit
def write_kernel(x, parts, out, words, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """With the first block's part alone: all would be one more thing to be optimized."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    put(out, index, index < words, tl.load(x + index, mask=index < words, other=0), tl.load(parts), WIDE)


def in_one_launch(x: torch.Tensor, wide: bool) -> torch.Tensor:
    """One byte a value, or two (wide)."""
    block, warps, registers, each = _MEETING
    out, place, words = _out(x, wide), gpu_meeting.place_of(x.device), x.numel() // 2
    assert place is not None
    blocks = cdiv(words, block)
    programs = min(blocks, gpu_meeting.resident(x.device, each))
    held = min(2, cdiv(blocks, programs))
    meeting_kernel[(programs,)](
        x.view(-1).view(torch.int32), out, place, words, blocks, HELD=held, MORE=blocks > held * programs, BLOCK=block,
        PROGRAMS=next_power_of_2(programs), WIDE=wide, **gpu_meeting.options(x, warps, registers),
    )  # fmt: skip
    return out


def in_two_launches(x: torch.Tensor, wide: bool) -> torch.Tensor:
    """As `in_one_launch`."""
    block, warps = _BLOCK
    out, words = _out(x, wide), x.numel() // 2
    blocks = cdiv(words, block)
    parts = torch.empty(blocks, dtype=torch.int32, device=x.device)
    source = x.view(-1).view(torch.int32)
    read_kernel[(blocks,)](source, parts, words, BLOCK=block, num_warps=warps)
    write_kernel[(blocks,)](source, parts, out, words, BLOCK=block, WIDE=wide, num_warps=warps)
    return out


def _out(x: torch.Tensor, wide: bool) -> torch.Tensor:
    return torch.empty(x.numel() // 2, dtype=torch.int32 if wide else torch.int16, device=x.device)


def wrong(x: torch.Tensor, wide: bool, whole: bool, result: torch.Tensor) -> float:
    """0 where all that was to be written was, else infinite; `whole`: with the maximum of all words, not of the first block."""
    words = x.contiguous().view(-1).view(torch.int32)
    bits = (words if whole else words[: _BLOCK[0]]).amax() & HIGH_MAGNITUDE.value
    wanted = words ^ bits
    return 0.0 if torch.equal(result, wanted if wide else (wanted >> 16).to(torch.int16)) else float("inf")


def floors(form: str) -> dict[str, Runner]:
    """The kernels that move the bytes of a form whose amax is of more than a tile, as runners beside ours."""
    wide = form.endswith("_dual")
    made: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
        FLOORS[0]: (in_one_launch, True),
        FLOORS[1]: (in_two_launches, False),
    }
    return {
        name: Runner(f"{name}/{form}", OURS[form].moved_bytes, partial(_bind, launch, wide), partial(_error, wide, whole), 0.0)
        for name, (launch, whole) in made.items()
    }


def _bind(launch: Callable[..., torch.Tensor], wide: bool, shape: Shape, pool: BufferPool) -> Callable[[int], Any]:
    return lambda index: launch(pool.view((shape.m, shape.k), index, 0), wide)


def _error(wide: bool, whole: bool, shape: Shape, pool: BufferPool, result: torch.Tensor) -> float:
    return wrong(pool.view((shape.m, shape.k), 0, 0), wide, whole, result)
