"""DeepGEMM's FP8 GEMM of 1 x 128 by 128 x 128 blocks, with bf16 results.

Written against the interface that DeepGEMM documents (`fp8_gemm_nt` on Hopper: FP32 scales, the left operand's M-fastest
and padded for the tensor copy engine) and checked against a stand-in only: it has never run on a GPU here, since DeepGEMM
is installed from its repository and not from PyPI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hil.kernels.base import E4M3, GEMM_LIMIT, Runner, Shape, product_error
from hil.timing import BufferPool


def _bind(shape: Shape, pool: BufferPool) -> Callable[[int], torch.Tensor]:
    import deep_gemm

    blocks = -(-shape.k // 128)
    # Brought into its layout once: a kernel that makes the scales can write them so.
    scale_a = deep_gemm.get_mn_major_tma_aligned_tensor(torch.ones((shape.m, blocks), device=pool.device))
    scale_b = torch.ones((-(-shape.n // 128), blocks), device=pool.device)

    def launch(index: int) -> torch.Tensor:
        a = pool.view((shape.m, shape.k), index, 0, E4M3)
        b = pool.view((shape.n, shape.k), index, 1, E4M3)
        y = torch.empty((shape.m, shape.n), dtype=torch.bfloat16, device=pool.device)
        deep_gemm.fp8_gemm_nt((a, scale_a), (b, scale_b), y)
        return y

    return launch


def _error(shape: Shape, pool: BufferPool, result: Any) -> float:
    return product_error(result, pool.view((shape.m, shape.k), 0, 0, E4M3), pool.view((shape.n, shape.k), 0, 1, E4M3))


DEEPGEMM_RUNNERS = (Runner("deepgemm/fp8_block128", lambda s: s.m * s.k + s.n * s.k + 2 * s.m * s.n, _bind, _error, GEMM_LIMIT),)
