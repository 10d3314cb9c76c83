"""Our own FP8 GEMM: e4m3 (M, K) by e4m3 (N, K), both row-major, to bf16; for the small shapes where cuBLAS is weak.

How a shape is cut is worked out from its size by `plan_of`, never by trial: a shape always gives the same bits, and nothing
waits for a search in a training step or a CUDA graph. Any M and N; K a multiple of 16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hil.kernels.base import E4M3, GEMM_LIMIT, Runner, Shape, product_error
from hil.timing import BufferPool

_STEP = 128
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
        wanted = {1} | {min(max(round(programs / tiles), 1), _ceil(k, _STEP)) for programs in _PROGRAMS}
        plans += [Plan(swapped, rows, columns, len(parts_of(k, parts)), stages, warps) for parts in sorted(wanted)]
    return min(plans, key=lambda plan: _estimated_ns(high, wide, k, plan))


def _estimated_ns(high: int, wide: int, k: int, plan: Plan) -> float:
    programs = _ceil(high, plan.rows) * _ceil(wide, plan.columns) * plan.parts
    waves = _ceil(programs, _MULTIPROCESSORS)
    loaded, computed = (plan.rows + plan.columns) * _STEP, 2 * plan.rows * plan.columns * _STEP
    step = max(_STEP_NS, waves * loaded / _BYTES_A_NS, waves * computed / _FLOPS_A_NS)
    time = _LAUNCH_NS + _ceil(_ceil(k, _STEP), plan.parts) * step
    if plan.parts > 1:
        time += _SECOND_NS + plan.parts * (_PART_NS + 4 * high * wide / _SUMMED_BYTES_A_NS)
    return time


def parts_of(k: int, parts: int) -> list[slice]:
    """The parts of K that are summed apart: of whole steps of 128, as even as they get. Some fewer where steps do not suffice."""
    length = _STEP * _ceil(_ceil(k, _STEP), parts)
    return [slice(start, min(start + length, k)) for start in range(0, k, length)]


def fp8_gemm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, fast: bool, plan: Plan | None = None
) -> torch.Tensor:
    """bf16 (M, N): a times b transposed, times the scales.

    Args:
        a: e4m3 (M, K), row-major.
        b: e4m3 (N, K), row-major.
        scale_a: float32, one value or M.
        scale_b: float32, one value or N; as many as rows of b where `scale_a` has one for each row.
        fast: Hopper's fast accumulation over all of a part of K; else into FP32 every 128.
        plan: How to cut it; None for `plan_of`.

    Raises:
        ValueError: types, shapes or scales do not fit, or K is no multiple of 16.
    """
    from hil.kernels import triton_gemm as kernels

    (m, k), n = a.shape, b.shape[0]
    rowwise = _check(a, b, scale_a, scale_b)
    plan = plan or plan_of(m, n, k)
    pieces = parts_of(k, plan.parts)
    out = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    split = len(pieces) > 1
    overlap = split and a.is_cuda
    target = torch.empty((len(pieces), m, n), dtype=torch.float32, device=a.device) if split else out
    operands = (b, a, target, scale_b, scale_a, n, m) if plan.swapped else (a, b, target, scale_a, scale_b, m, n)
    high, wide = operands[5:]
    tiles = _ceil(high, plan.rows) * _ceil(wide, plan.columns)
    with torch.cuda.device(a.device) if a.is_cuda else nullcontext():
        kernels.gemm_kernel[(tiles, len(pieces))](
            *operands, k, pieces[0].stop, *((1, n) if plan.swapped else (n, 1)),
            BLOCK_M=plan.rows, BLOCK_N=plan.columns, BLOCK_K=kernels.STEP, STAGES=plan.stages, IMPRECISE=None if fast else _STEP,
            EVEN=k % _STEP == 0, SPLIT=split, ROWWISE=rowwise, SWAPPED=plan.swapped, OVERLAP=overlap,
            num_warps=plan.warps, enable_fp_fusion=False,
        )  # fmt: skip
        if split:
            # Few outputs of many parts: small programs, many loads in flight.
            block, ahead = (32, 32) if m * n <= 2**14 and len(pieces) > 16 else (128, 16 if len(pieces) > 8 else 8)
            kernels.sum_kernel[(_ceil(m * n, block),)](
                target, out, scale_a, scale_b, len(pieces), m * n, n,
                BLOCK=block, AHEAD=ahead, ROWWISE=rowwise, OVERLAP=overlap,
                num_warps=1, enable_fp_fusion=False, launch_pdl=overlap,
            )  # fmt: skip
    return out


def _ceil(size: int, divisor: int) -> int:
    return -(-size // divisor)


def _check(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> bool:
    """Whether there is a scale for each row."""
    for name, x in (("a", a), ("b", b)):
        if x.dtype != E4M3 or x.ndim != 2 or not x.is_contiguous():
            raise ValueError(f"{name} is a {x.dtype} {tuple(x.shape)}; give a row-major float8_e4m3fn matrix, (rows, K)")
    if a.shape[1] != b.shape[1] or a.shape[1] % 16 or not a.shape[1]:
        raise ValueError(f"K = {a.shape[1]} of a and {b.shape[1]} of b; give both the same multiple of 16")
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
        raise ValueError(f"scales are {scale_a.dtype} and {scale_b.dtype}; give float32")
    rowwise = scale_a.numel() > 1 or scale_b.numel() > 1
    if rowwise and (scale_a.numel(), scale_b.numel()) != (len(a), len(b)):
        raise ValueError(f"{scale_a.numel()} and {scale_b.numel()} scales for ({len(a)}, {len(b)}); give one each or one a row")
    return rowwise


def _bind(rowwise: bool, fast: bool, shape: Shape, pool: BufferPool) -> Callable[[int], torch.Tensor]:
    device = pool.view((1, 1), 0, 0).device
    scale_a = torch.ones(shape.m if rowwise else 1, device=device)
    scale_b = torch.ones(shape.n if rowwise else 1, device=device)

    def launch(index: int) -> torch.Tensor:
        a = pool.view((shape.m, shape.k), index, 0, E4M3)
        b = pool.view((shape.n, shape.k), index, 1, E4M3)
        return fp8_gemm(a, b, scale_a, scale_b, fast=fast)

    return launch


def _bytes(shape: Shape) -> int:
    return shape.m * shape.k + shape.n * shape.k + 2 * shape.m * shape.n


def _error(shape: Shape, pool: BufferPool, result: Any) -> float:
    return product_error(result, pool.view((shape.m, shape.k), 0, 0, E4M3), pool.view((shape.n, shape.k), 0, 1, E4M3))


LOKA_GEMM_RUNNERS = tuple(
    Runner(
        f"loka/fp8_{scaling}_{'fast' if fast else 'split'}", _bytes, partial(_bind, scaling == "rowwise", fast), _error,
        GEMM_LIMIT,
    )
    for scaling in ("tensorwise", "rowwise")
    for fast in (True, False)
)  # fmt: skip
