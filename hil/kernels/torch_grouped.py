"""torch's grouped FP8 GEMM over equal groups: `torch._scaled_grouped_mm` of (groups, m, k) by (groups, n, k).

N and K are multiples of 16, M is any, and there are at most 1,023 groups (torch refuses 1,024).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hil.kernels.base import E4M3, GEMM_LIMIT, Runner, Shape, product_error
from hil.timing import BufferPool

MAX_GROUPS = 1023


def multiply(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, fast: bool) -> torch.Tensor:
    """Products of every group, bf16 (groups, m, n).

    Args:
        a: e4m3 (groups, m, k).
        b: e4m3 (groups, n, k).
        scale_a: FP32 (groups, m), one for every row; an e4m3 value times its scale is the value meant.
        scale_b: FP32 (groups, n).
        fast: Whether sums stay in the tensor core's own accumulator.
    """
    return torch._scaled_grouped_mm(a, b.transpose(1, 2), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _bind(fast: bool, shape: Shape, pool: BufferPool) -> Callable[[int], torch.Tensor]:
    scale_a = torch.ones((shape.groups, shape.m), device=pool.device)
    scale_b = torch.ones((shape.groups, shape.n), device=pool.device)

    def launch(index: int) -> torch.Tensor:
        a = pool.view((shape.groups, shape.m, shape.k), index, 0, E4M3)
        b = pool.view((shape.groups, shape.n, shape.k), index, 1, E4M3)
        return multiply(a, b, scale_a, scale_b, fast)

    return launch


def _error(shape: Shape, pool: BufferPool, result: Any) -> float:
    a = pool.view((shape.groups, shape.m, shape.k), 0, 0, E4M3)
    b = pool.view((shape.groups, shape.n, shape.k), 0, 1, E4M3)
    groups = {0, shape.groups // 3, shape.groups // 2, shape.groups - 1}
    return max(product_error(result[g], a[g], b[g]) for g in groups)


def _bytes(shape: Shape) -> int:
    return shape.groups * (shape.m * shape.k + shape.n * shape.k + 2 * shape.m * shape.n)


GROUPED_RUNNERS = (
    Runner("torch/fp8_grouped_rowwise_fast", _bytes, partial(_bind, True), _error, GEMM_LIMIT),
    Runner("torch/fp8_grouped_rowwise_split", _bytes, partial(_bind, False), _error, GEMM_LIMIT),
)
