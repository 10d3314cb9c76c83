"""torch's GEMMs on Hopper: `torch.mm`, `torch.bmm` and `torch._scaled_mm` in its scalings, all with bf16 results.

bf16 in every layout of its operands, and with a bias (`torch.addmm`); FP8's as `torch._scaled_mm` wants them: the left one (M, K)
row-major, the right one (K, N) column-major, which is an (N, K) row-major tensor transposed. Timings use unit scales: the kernels
do the same work whatever the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hil.kernels.base import E4M3, GEMM_LIMIT, Runner, Shape, product_error
from hil.timing import BufferPool
from perfmodel.kernels import BF16, BF16_BATCHED, BIASED, KERNELS, KernelSpec


def _mm_bytes(element: int) -> Callable[[Shape], int]:
    return lambda s: s.groups * (element * (s.m * s.k + s.n * s.k) + 2 * s.m * s.n)


def _bf16(spec: KernelSpec) -> Runner:
    """`torch.mm`, `torch.addmm` or `torch.bmm` of operands that lie as the kernel's layout says; a bias is one of zeros."""
    batched, biased = spec.kind == "batched_gemm", spec.layout == BIASED
    by_rows = [lies == "row" for lies in spec.layout]

    def operands(shape: Shape, pool: BufferPool, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        lead = (shape.groups,) if batched else ()
        found = []
        for number, (rows, columns) in enumerate(((shape.m, shape.k), (shape.k, shape.n))):
            size = (rows, columns) if by_rows[number] else (columns, rows)
            stored = pool.view((*lead, *size), index, number)
            found.append(stored if by_rows[number] else stored.mT)
        return found[0], found[1]

    def bind(shape: Shape, pool: BufferPool) -> Callable[[int], torch.Tensor]:
        multiply = torch.bmm if batched else torch.mm
        if biased:
            multiply = partial(torch.addmm, torch.zeros(shape.n, dtype=torch.bfloat16, device=operands(shape, pool, 0)[0].device))
        return lambda index: multiply(*operands(shape, pool, index))

    def error(shape: Shape, pool: BufferPool, result: Any) -> float:
        a, b = operands(shape, pool, 0)
        return product_error(result[-1], a[-1], b[-1].mT) if batched else product_error(result, a, b.mT)

    return Runner(spec.name, _mm_bytes(2), bind, error, GEMM_LIMIT)


def _bind_scaled(scaling: str, fast: bool) -> Callable[[Shape, BufferPool], Callable[[int], torch.Tensor]]:
    def bind(shape: Shape, pool: BufferPool) -> Callable[[int], torch.Tensor]:
        rows, columns = (1, 1) if scaling == "tensorwise" else (shape.m, shape.n)
        scale_a = torch.ones((rows, 1), device="cuda")
        scale_b = torch.ones((1, columns), device="cuda")
        if scaling == "tensorwise":
            scale_a, scale_b = scale_a.squeeze(), scale_b.squeeze()

        def launch(index: int) -> torch.Tensor:
            a = pool.view((shape.m, shape.k), index, 0, E4M3)
            b = pool.view((shape.n, shape.k), index, 1, E4M3)
            return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)

        return launch

    return bind


def _bind_block128(shape: Shape, pool: BufferPool) -> Callable[[int], torch.Tensor]:
    from torch.nn.functional import ScalingType, scaled_mm

    blocks = shape.k // 128
    # cuBLAS wants 1x128 scales M-major, and 128x128 scales K-major with K's extent padded to a multiple of 4.
    scale_a = torch.ones((blocks, shape.m), device="cuda").t()
    scale_b = torch.ones((shape.n // 128, -(-blocks // 4) * 4), device="cuda").t()

    def launch(index: int) -> torch.Tensor:
        a = pool.view((shape.m, shape.k), index, 0, E4M3)
        b = pool.view((shape.n, shape.k), index, 1, E4M3)
        return scaled_mm(
            a, b.t(), scale_a, ScalingType.BlockWise1x128, scale_b, ScalingType.BlockWise128x128, output_dtype=torch.bfloat16
        )

    return launch


def _error(dtype: torch.dtype) -> Callable[[Shape, BufferPool, Any], float]:
    def error(shape: Shape, pool: BufferPool, result: Any) -> float:
        return product_error(result, pool.view((shape.m, shape.k), 0, 0, dtype), pool.view((shape.n, shape.k), 0, 1, dtype))

    return error


GEMM_RUNNERS = (
    *(_bf16(spec) for name, spec in KERNELS.items() if name in (BF16, BF16_BATCHED) or spec.across),
    Runner("torch/fp8_tensorwise_fast", _mm_bytes(1), _bind_scaled("tensorwise", True), _error(E4M3), GEMM_LIMIT),
    Runner("torch/fp8_tensorwise_split", _mm_bytes(1), _bind_scaled("tensorwise", False), _error(E4M3), GEMM_LIMIT),
    Runner("torch/fp8_rowwise_fast", _mm_bytes(1), _bind_scaled("rowwise", True), _error(E4M3), GEMM_LIMIT),
    Runner("torch/fp8_rowwise_split", _mm_bytes(1), _bind_scaled("rowwise", False), _error(E4M3), GEMM_LIMIT),
    Runner("torch/fp8_block128", _mm_bytes(1), _bind_block128, _error(E4M3), GEMM_LIMIT),
)
