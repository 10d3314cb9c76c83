"""Our own FP8 GEMM: e4m3 (M, K) by e4m3 (N, K), both row-major, to bf16; for the small shapes where cuBLAS is weak.

How a shape is cut is worked out from its size (`perfmodel.gemm_plan`), never by trial: a shape always gives the same bits, and
nothing waits for a search in a training step or a CUDA graph. Any M and N; K a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from hil.kernels.base import E4M3, GEMM_LIMIT, Runner, Shape, product_error
from hil.timing import BufferPool
from numerics.sizes import cdiv
from perfmodel.gemm_plan import STEP, Plan, parts_of, plan_of


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
    plan = plan or plan_of(m, n, k, fast)
    pieces = parts_of(k, plan.parts)
    out = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    split = len(pieces) > 1
    overlap = split and a.is_cuda
    target = torch.empty((len(pieces), m, n), dtype=torch.float32, device=a.device) if split else out
    operands = (b, a, target, scale_b, scale_a, n, m) if plan.swapped else (a, b, target, scale_a, scale_b, m, n)
    high, wide = operands[5:]
    tiles = cdiv(high, plan.rows) * cdiv(wide, plan.columns)
    with torch.cuda.device(a.device) if a.is_cuda else nullcontext():
        kernels.gemm_kernel[(tiles, len(pieces))](
            *operands, k, pieces[0].stop, *((1, n) if plan.swapped else (n, 1)),
            BLOCK_M=plan.rows, BLOCK_N=plan.columns, BLOCK_K=kernels.STEP, STAGES=plan.stages, IMPRECISE=None if fast else STEP,
            EVEN=k % STEP == 0, SPLIT=split, ROWWISE=rowwise, SWAPPED=plan.swapped, OVERLAP=overlap,
            num_warps=plan.warps, enable_fp_fusion=False,
        )  # fmt: skip
        if split:
            # Few outputs of many parts: small programs, many loads in flight.
            block, ahead = (32, 32) if m * n <= 2**14 and len(pieces) > 16 else (128, 16 if len(pieces) > 8 else 8)
            kernels.sum_kernel[(cdiv(m * n, block),)](
                target, out, scale_a, scale_b, len(pieces), m * n, n,
                BLOCK=block, AHEAD=ahead, ROWWISE=rowwise, OVERLAP=overlap,
                num_warps=1, enable_fp_fusion=False, launch_pdl=overlap,
            )  # fmt: skip
    return out


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
