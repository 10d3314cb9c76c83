"""The plainest FP8 GEMM in Triton, to see what `tl.dot` computes on a Hopper GPU under each of its settings."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(
    a, b, c, columns, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IMPRECISE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = tl.load(a + i[:, None] * depth + (start + k)[None, :])
        right = tl.load(b + j[None, :] * depth + (start + k)[:, None])
        accumulator = tl.dot(left, right, accumulator, max_num_imprecise_acc=IMPRECISE)
    tl.store(c + i[:, None] * columns + j[None, :], accumulator)


def triton_dot(a: torch.Tensor, b: torch.Tensor, block_m: int, imprecise: int | None) -> torch.Tensor:
    """FP32 (M, N) of FP8 a (M, K) and b (N, K), tiles of `block_m` x 64, 128 of K at a time; all sizes whole tiles.

    Args:
        a: Left operand, row-major.
        b: Right operand, row-major.
        block_m: Rows of a tile; from 64 on Triton uses wgmma, below that FP16 mma.sync.
        imprecise: `max_num_imprecise_acc`: elements of K after which Triton adds the chain to an FP32 sum; None for never.
    """
    (m, k), n = a.shape, b.shape[0]
    out: Any = torch.empty((m, n), dtype=torch.float32, device=a.device)
    _kernel[(m // block_m, n // 64)](a, b, out, n, k, block_m, 64, 128, imprecise, num_warps=4)
    return out
