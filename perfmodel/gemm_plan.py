"""How our FP8 GEMM (`loka/fp8_*`, `hil.kernels.loka_gemm`) cuts a shape: its tile, and the parts of K that it sums apart.

Worked out from the size, never by trial: a shape always gives the same bits. The parts decide both the time of a GEMM and,
with fast accumulation, its error; so the rule stands here, where whoever predicts either can ask without a GPU or torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

STEP = 128
"""Elements of K that are loaded at once; parts are whole steps."""
_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class _Tile:
    """A tile that is tried.

    Attributes:
        rows: Of outputs.
        columns: Likewise.
        stages: Steps of K loaded ahead.
        warps: Of a program.
        resident: Programs that a multiprocessor holds at once.
        fast_ns: With fast accumulation, a step's time where a multiprocessor has one program, and each's where it has many.
        split_ns: The same with an FP32 sum every 128: the larger tiles spill registers.
    """

    rows: int
    columns: int
    stages: int
    warps: int
    resident: int
    fast_ns: tuple[float, float]
    split_ns: tuple[float, float]


# A fit to 2,418 timings of 55 shapes on an H200, 9% off on average; 64 x 16's second figures are set by hand, as none of those
# shapes fills a GPU with it. On shapes held out of the fit a choice took 2.2% longer than the fastest of twelve tiles' cuts with
# fast accumulation, 15% at most, and 3.2% with FP32 sums, 26% at most.
_TILES = (
    _Tile(64, 16, 6, 4, 3, (198.0, 100.0), (221.0, 100.0)),
    _Tile(64, 32, 6, 4, 3, (162.0, 123.0), (202.0, 136.0)),
    _Tile(64, 64, 4, 4, 3, (265.0, 147.0), (287.0, 163.0)),
    _Tile(64, 64, 6, 4, 2, (193.0, 160.0), (234.0, 186.0)),
    _Tile(64, 128, 4, 4, 2, (301.0, 179.0), (430.0, 259.0)),
    _Tile(64, 128, 6, 4, 1, (262.0, 137.0), (413.0, 137.0)),
    _Tile(128, 64, 6, 4, 1, (258.0, 137.0), (591.0, 137.0)),
)
# Programs per launch that parts of K are to make.
_PROGRAMS = (66, 132, 198, 264, 396)
# Of the same fit: a launch, the second one, which sums parts, and a part's turn in it; bytes of outputs or of parts a ns.
_LAUNCH_NS, _SECOND_NS, _PART_NS, _WRITTEN_BYTES_A_NS = 2050.0, 667.0, 22.0, 1318.0


@dataclass(frozen=True)
class Plan:
    """How a GEMM is cut.

    Attributes:
        swapped: The right operand's rows are the tiles' rows: tiles have 64 rows at least.
        rows: Of a tile of outputs.
        columns: Of a tile.
        parts: Parts of K, summed in FP32 from the first to the last.
        stages: Steps of 128 along K that are loaded ahead.
        warps: Of a program.
    """

    swapped: bool
    rows: int
    columns: int
    parts: int
    stages: int
    warps: int


@functools.cache
def plan_of(m: int, n: int, k: int, fast: bool = True) -> Plan:
    """The plan of a shape: the tile and the parts of K whose time is estimated least.

    The smaller extent is a tile's columns where it is below 64, as the tensor core takes no fewer rows.

    Args:
        m: Rows of the left operand.
        n: Rows of the right one.
        k: What they share.
        fast: With Hopper's fast accumulation, where the parts decide the error, too; else with an FP32 sum every 128.
    """
    swapped = m < 64 and m < n
    high, wide = (n, m) if swapped else (m, n)
    steps = _ceil(k, STEP)
    least, chosen = float("inf"), (_TILES[0], 1)
    for tile in _TILES:
        tiles = _ceil(high, tile.rows) * _ceil(wide, tile.columns)
        for wanted in sorted({1, *(min(round(programs / tiles), steps) for programs in _PROGRAMS if programs > tiles)}):
            parts = _ceil(k, _length(k, wanted))
            time = _estimated_ns(tile, tiles * parts, _ceil(steps, parts), parts, high * wide, fast)
            if time < least:
                least, chosen = time, (tile, parts)
    tile, parts = chosen
    return Plan(swapped, tile.rows, tile.columns, parts, tile.stages, tile.warps)


class Plans(NamedTuple):
    """The plans of many GEMMs, each an array of as many.

    Attributes:
        swapped: As of `Plan`, as the next four.
        rows: Of a tile of outputs.
        columns: Of a tile.
        parts: Parts of K.
        stages: Steps of 128 along K that are loaded ahead.
        resident: Programs that a multiprocessor holds at once.
        tiles_down: Tiles along a tile's rows.
        tiles_across: Tiles along its columns.
        steps: Steps of 128 along K of a part.
        ns: The estimate by which it was chosen, in nanoseconds.
    """

    swapped: npt.NDArray[np.bool_]
    rows: Whole
    columns: Whole
    parts: Whole
    stages: Whole
    resident: Whole
    tiles_down: Whole
    tiles_across: Whole
    steps: Whole
    ns: Array


def plans_of_many(m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike, fast: bool = True) -> Plans:
    """The plan of each shape as `plan_of` finds it, of many shapes at once; arguments as there, arrays of whole numbers."""
    m, n, k = (np.asarray(size, dtype=np.int64) for size in (m, n, k))
    swapped = (m < 64) & (m < n)
    high, wide, steps = np.where(swapped, n, m), np.where(swapped, m, n), -(-k // STEP)
    least, tile_number, chosen = np.full(len(m), np.inf), np.zeros(len(m), dtype=np.int64), np.ones(len(m), dtype=np.int64)
    for number, tile in enumerate(_TILES):
        tiles = -(-high // tile.rows) * -(-wide // tile.columns)
        for programs in (0, *_PROGRAMS):
            wanted = np.maximum(np.minimum(np.rint(programs / tiles).astype(np.int64), steps), 1)
            parts = -(-k // (STEP * -(-steps // wanted)))
            time = _estimated_many_ns(tile, tiles * parts, -(-steps // parts), parts, high * wide, fast)
            better = np.flatnonzero((time < least) & ((programs == 0) | (programs > tiles)))
            least[better], tile_number[better], chosen[better] = time[better], number, parts[better]
    names = ("rows", "columns", "stages", "resident")
    rows, columns, stages, resident = (np.array([getattr(tile, name) for tile in _TILES])[tile_number] for name in names)
    return Plans(
        swapped, rows, columns, chosen, stages, resident, -(-high // rows), -(-wide // columns), -(-steps // chosen), least
    )


def parts_of_many(shapes: Sequence[tuple[int, int, int]], fast: bool = True) -> list[int]:
    """The parts of K in the plan of each shape (M, N, K)."""
    m, n, k = np.array(shapes, dtype=np.int64).reshape(-1, 3).T
    parts: list[int] = plans_of_many(m, n, k, fast).parts.tolist()
    return parts


def _estimated_many_ns(tile: _Tile, programs: Whole, steps: Whole, parts: Whole, outputs: Whole, fast: bool) -> Array:
    """As `_estimated_ns`."""
    alone, further = tile.fast_ns if fast else tile.split_ns
    each = -(-programs // _MULTIPROCESSORS)
    time = _LAUNCH_NS + steps * np.maximum(alone * -(-each // tile.resident), further * each)
    several = time + _SECOND_NS + parts * (_PART_NS + 4 * outputs / _WRITTEN_BYTES_A_NS)
    return np.where(parts == 1, time + 2 * outputs / _WRITTEN_BYTES_A_NS, several)


def _estimated_ns(tile: _Tile, programs: int, steps: int, parts: int, outputs: int, fast: bool) -> float:
    alone, further = tile.fast_ns if fast else tile.split_ns
    each = _ceil(programs, _MULTIPROCESSORS)
    time = _LAUNCH_NS + steps * max(alone * _ceil(each, tile.resident), further * each)
    if parts == 1:
        return time + 2 * outputs / _WRITTEN_BYTES_A_NS
    return time + _SECOND_NS + parts * (_PART_NS + 4 * outputs / _WRITTEN_BYTES_A_NS)


def parts_of(k: int, parts: int) -> list[slice]:
    """The parts of K that are summed apart: of whole steps of 128, as even as they get. Some fewer where steps do not suffice."""
    length = _length(k, parts)
    return [slice(start, min(start + length, k)) for start in range(0, k, length)]


def _length(k: int, parts: int) -> int:
    """Products of a part, but for the last."""
    return STEP * _ceil(_ceil(k, STEP), parts)


def _ceil(size: int, divisor: int) -> int:
    return -(-size // divisor)
