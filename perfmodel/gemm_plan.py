"""How our FP8 GEMM (`loka/fp8_*`, `hil.kernels.loka_gemm`) cuts a shape: its tile, and the parts of K that it sums apart.

Worked out from the size, never by trial: a shape always gives the same bits. The parts decide both the time of a GEMM and,
with fast accumulation, its error; so the rule stands here, where whoever predicts either can ask without a GPU or torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

STEP = 128
"""Elements of K that are loaded at once; parts are whole steps."""
_MULTIPROCESSORS = 132
# Tiles that are tried: rows, columns, steps loaded ahead, warps. Larger ones spill registers where an FP32 sum stands beside
# the chain: 128 x 256 took 2.5 times as long split as fast.
_TILES = ((64, 32, 6, 4), (64, 64, 6, 4), (64, 128, 4, 4), (128, 64, 4, 4))
# Programs per launch that parts of K are to make.
_PROGRAMS = (66, 132, 198, 264, 396)
# A fit to 1,115 timings of 38 shapes on an H200, 10% off on average. Its choices take 3.8% longer than the fastest cut timed
# (geometric mean of the 35 shapes where both were), 15% at most but for 49% on (1024, 512, 65536), which wants a larger tile.
# In ns: a launch, a step's latency, the second launch, one part's turn in it; bytes and FLOPs of a multiprocessor a ns, bytes of
# partial sums that all of them move.
_LAUNCH_NS, _STEP_NS, _SECOND_NS, _PART_NS = 2500.0, 56.0, 480.0, 40.0
_BYTES_A_NS, _FLOPS_A_NS, _SUMMED_BYTES_A_NS = 81.0, 29000.0, 2000.0


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
def plan_of(m: int, n: int, k: int) -> Plan:
    """The plan of a shape: the tile and the parts of K whose time is estimated least.

    The smaller extent is a tile's columns where it is below 64, as the tensor core takes no fewer rows.
    """
    swapped = m < 64 and m < n
    high, wide = (n, m) if swapped else (m, n)
    plans = []
    for rows, columns, stages, warps in _TILES:
        tiles = _ceil(high, rows) * _ceil(wide, columns)
        wanted = {1} | {min(max(round(programs / tiles), 1), _ceil(k, STEP)) for programs in _PROGRAMS}
        plans += [Plan(swapped, rows, columns, len(parts_of(k, parts)), stages, warps) for parts in sorted(wanted)]
    return min(plans, key=lambda plan: _estimated_ns(high, wide, k, plan))


def _estimated_ns(high: int, wide: int, k: int, plan: Plan) -> float:
    programs = _ceil(high, plan.rows) * _ceil(wide, plan.columns) * plan.parts
    waves = _ceil(programs, _MULTIPROCESSORS)
    loaded, computed = (plan.rows + plan.columns) * STEP, 2 * plan.rows * plan.columns * STEP
    step = max(_STEP_NS, waves * loaded / _BYTES_A_NS, waves * computed / _FLOPS_A_NS)
    time = _LAUNCH_NS + _ceil(_ceil(k, STEP), plan.parts) * step
    if plan.parts > 1:
        time += _SECOND_NS + plan.parts * (_PART_NS + 4 * high * wide / _SUMMED_BYTES_A_NS)
    return time


def parts_of(k: int, parts: int) -> list[slice]:
    """The parts of K that are summed apart: of whole steps of 128, as even as they get. Some fewer where steps do not suffice."""
    length = STEP * _ceil(_ceil(k, STEP), parts)
    return [slice(start, min(start + length, k)) for start in range(0, k, length)]


def _ceil(size: int, divisor: int) -> int:
    return -(-size // divisor)
