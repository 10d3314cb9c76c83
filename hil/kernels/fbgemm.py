"""FBGEMM's FP8 GEMMs and quantizers (fbgemm-gpu-genai), with bf16 results.

A left operand is (M, K), a right one (N, K), both row-major; scales multiply, in FP32. `f8f8bf16_blockwise` takes one scale
for a tile of 128 x 128 of either operand, K fastest: (ceil(M / 128), K / 128) and (ceil(N / 128), K / 128); the left
operand's scaling is thus coarser than the 1 x 128 of cuBLAS and DeepGEMM. Timings use unit scales: the kernels do the
same work whatever the scale.

Left out: FBGEMM's Triton GEMM (`matmul_fp8_row` of 1.6.0). Its default kernel calls `fill_1d_tma_descriptor`, which Triton
3.6 no longer has; the one without TMA descriptors is right, but tunes itself for over half a minute on every new shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hil.kernels.base import E4M3, GEMM_LIMIT, Runner, Shape, product_error, relative_error
from hil.timing import BufferPool

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def load() -> None:
    """Register FBGEMM's operators.

    Without its warning, in each process anew, that its table does not have the pair of its version and torch's.

    Raises:
        ImportError: it is not installed.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        import fbgemm_gpu.experimental.gen_ai  # noqa: F401  registers torch.ops.fbgemm
    finally:
        logging.disable(before)


def rowwise(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, fast: bool = True) -> torch.Tensor:
    """Product of a (M, K) and b (N, K) transposed, e4m3, scaled by scale_a (M,) and scale_b (N,)."""
    return torch.ops.fbgemm.f8f8bf16_rowwise(a, b, scale_a, scale_b, use_fast_accum=fast)


def block128(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """The same, scaled by scale_a (ceil(M / 128), K / 128) and scale_b (ceil(N / 128), K / 128), both contiguous."""
    return torch.ops.fbgemm.f8f8bf16_blockwise(a, b, row_major(scale_a), row_major(scale_b), 128, 128, 128)


def row_major(scale: torch.Tensor) -> torch.Tensor:
    """The same values with a last stride of 1: FBGEMM asks for it of one column, too, which any stride leaves contiguous."""
    return scale.reshape(-1).view(scale.shape)


def scale_shapes(shape: Shape, block: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of both operands' scales, by rows or by blocks of 128 x 128."""
    if not block:
        return (shape.m,), (shape.n,)
    return (-(-shape.m // 128), -(-shape.k // 128)), (-(-shape.n // 128), -(-shape.k // 128))


def _bind_gemm(multiply: Multiply, block: bool, shape: Shape, pool: BufferPool) -> Callable[[int], torch.Tensor]:
    load()
    scale_a, scale_b = (torch.ones(s, device=pool.device) for s in scale_shapes(shape, block))

    def launch(index: int) -> torch.Tensor:
        a = pool.view((shape.m, shape.k), index, 0, E4M3)
        b = pool.view((shape.n, shape.k), index, 1, E4M3)
        return multiply(a, b, scale_a, scale_b)

    return launch


def _gemm_error(shape: Shape, pool: BufferPool, result: Any) -> float:
    return product_error(result, pool.view((shape.m, shape.k), 0, 0, E4M3), pool.view((shape.n, shape.k), 0, 1, E4M3))


def _gemm(name: str, multiply: Multiply, block: bool = False) -> Runner:
    return Runner(
        f"fbgemm/{name}", lambda s: s.m * s.k + s.n * s.k + 2 * s.m * s.n, partial(_bind_gemm, multiply, block),
        _gemm_error, GEMM_LIMIT,
    )  # fmt: skip


def _bind_quantize(operator: str, shape: Shape, pool: BufferPool) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    load()
    quantize = getattr(torch.ops.fbgemm, operator)

    def launch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = quantize(pool.view((shape.m, shape.k), index, 0))
        return codes, scale

    return launch


def _quantize_error(shape: Shape, pool: BufferPool, result: Any) -> float:
    """Error of codes x scales against the input, on up to 2,048 rows; e4m3's own is at most 2^-4."""
    codes, scale = result
    values = codes[:2048].double() * (scale[:2048].double().view(-1, 1) if scale.numel() > 1 else scale.double())
    return relative_error(values, pool.view((shape.m, shape.k), 0, 0)[:2048])


def _quantizer(name: str, operator: str) -> Runner:
    return Runner(f"fbgemm/{name}", lambda s: 3 * s.m * s.k, partial(_bind_quantize, operator), _quantize_error, 0.05)


FBGEMM_RUNNERS = (
    _gemm("fp8_rowwise_fast", partial(rowwise, fast=True)),
    _gemm("fp8_rowwise_split", partial(rowwise, fast=False)),
    _gemm("fp8_block128", block128, block=True),
    _quantizer("quantize_rowwise", "quantize_fp8_per_row"),
    _quantizer("quantize_tensorwise", "quantize_fp8_per_tensor"),
)
