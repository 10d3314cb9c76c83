"""Memory-bound kernels around a GEMM, as torch.compile makes them: quantization, layout change, norms, activations.

All take a row-major (rows, columns) tensor. Quantization follows torchao's arithmetic: scale = 448 / amax in FP32, the
product clamped and rounded to e4m3; the scale handed on is its reciprocal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hil.kernels.base import Runner, Shape
from hil.timing import BufferPool

E4M3 = torch.float8_e4m3fn
_MAX = 448.0
_EPS = 1e-12
BLOCKNORM_WIDTH = 256


def _scale(amax: torch.Tensor) -> torch.Tensor:
    return _MAX / amax.float().clamp(min=_EPS)


def _cast(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() * scale).clamp(-_MAX, _MAX).to(E4M3)


def quantize_tensorwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for the tensor: e4m3 (rows, columns) and a scalar."""
    scale = _scale(x.abs().amax())
    return _cast(x, scale), scale.reciprocal()


def quantize_rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a row: e4m3 (rows, columns) and (rows, 1)."""
    scale = _scale(x.abs().amax(dim=1, keepdim=True))
    return _cast(x, scale), scale.reciprocal()


def quantize_block1x128(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for 128 consecutive columns of a row: e4m3 and (rows, columns / 128), row index fastest in memory."""
    blocks = x.view(x.shape[0], -1, 128)
    scale = _scale(blocks.abs().amax(dim=2))
    return _cast(blocks, scale.unsqueeze(2)).view(x.shape), scale.reciprocal().t().contiguous().t()


def quantize_block128x128(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for a 128 x 128 tile: e4m3 and (rows / 128, columns / 128)."""
    blocks = x.view(x.shape[0] // 128, 128, -1, 128)
    scale = _scale(blocks.abs().amax(dim=(1, 3), keepdim=True))
    return _cast(blocks, scale).view(x.shape), scale.reciprocal()[:, 0, :, 0]


def _transposed(
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = quantize(x.t())
    return codes.contiguous(), scale


def _quantize_rows_of_transpose(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _transposed(quantize_rowwise, x)


def _quantize_tensor_transposed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _transposed(quantize_tensorwise, x)


def _quantize_1x128_of_transpose(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.view(-1, 128, x.shape[1])
    scale = _scale(blocks.abs().amax(dim=1))
    codes = _cast(blocks, scale.unsqueeze(1)).view(x.shape).t().contiguous()
    return codes, scale.reciprocal().t()


def _quantize_128x128_of_transpose(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = quantize_block128x128(x)
    return codes.t().contiguous(), scale.t()


def _transpose(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8).t().contiguous()


def blocknorm(x: torch.Tensor, width: int = BLOCKNORM_WIDTH) -> torch.Tensor:
    """RMS norm without parameters over blocks of `width` features (of all features where there are fewer)."""
    blocks = x.view(x.shape[0], -1, min(width, x.shape[1]))
    wide = blocks.float()
    return (wide * (wide.square().mean(dim=2, keepdim=True) + 1e-5).rsqrt()).to(x.dtype).view(x.shape)


def _layernorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.relu(F.layer_norm(x, (x.shape[1],), weight, bias))


def _rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.relu(F.rms_norm(x, (x.shape[1],), weight))


def _blocknorm(x: torch.Tensor) -> torch.Tensor:
    return F.hardswish(blocknorm(x))


def _vjp(function: Callable[..., torch.Tensor], gradient: torch.Tensor, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of every argument; the forward's intermediates are recomputed inside the kernel."""
    return torch.func.vjp(function, *arguments)[1](gradient)


def _bias_backward(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.sum(dim=0)


# Pointwise kernels: (function, how many vectors of parameters it takes).
_POINTWISE: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "layernorm": (_layernorm, 2),
    "rmsnorm": (_rmsnorm, 1),
    "blocknorm": (_blocknorm, 0),
    "relu": (F.relu, 0),
    "silu": (F.silu, 0),
    "hardswish": (F.hardswish, 0),
}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Static shapes: a training job's are, and a kernel compiled for a dynamic shape is another kernel.
    return torch.compile(function, dynamic=False)


def _bind_unary(
    function: Callable[[torch.Tensor], Any], dtype: torch.dtype, shape: Shape, pool: BufferPool
) -> Callable[[int], Any]:
    compiled = _compiled(function)
    return lambda index: compiled(pool.view((shape.m, shape.k), index, 0, dtype))


def _bind_pointwise(
    function: Callable[..., Any], vectors: int, backward: bool, shape: Shape, pool: BufferPool
) -> Callable[[int], Any]:
    compiled = _compiled(partial(_vjp, function) if backward else function)
    parameters = [torch.ones(shape.k, dtype=torch.bfloat16, device="cuda") for _ in range(vectors)]

    def launch(index: int) -> Any:
        x = pool.view((shape.m, shape.k), index, 0)
        return compiled(pool.view((shape.m, shape.k), index, 1), x, *parameters) if backward else compiled(x, *parameters)

    return launch


def _relative(got: torch.Tensor, reference: torch.Tensor) -> float:
    return float((got.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-300))


def _quantize_error(block: tuple[int, int] | None, transposed: bool, shape: Shape, pool: BufferPool, result: Any) -> float:
    """Error of codes x scales against the input, on up to 2,048 rows; e4m3's own is at most 2^-4."""
    x = pool.view((shape.m, shape.k), 0, 0)[:2048].double()
    codes, scale = result
    values = codes.float()
    if block is not None:
        rows, columns = block
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    values = values.double() * scale.double()
    return _relative((values.t() if transposed else values)[:2048], x)


def _transpose_error(shape: Shape, pool: BufferPool, result: Any) -> float:
    x = pool.view((shape.m, shape.k), 0, 0, E4M3).view(torch.uint8)
    return 0.0 if torch.equal(result, x.t()) else 1.0


def _pointwise_error(
    function: Callable[..., Any], vectors: int, backward: bool, shape: Shape, pool: BufferPool, result: Any
) -> float:
    """Error of the first result against FP64 on up to 512 rows (rows are independent)."""
    rows = min(shape.m, 512)
    x = pool.view((shape.m, shape.k), 0, 0)[:rows].double()
    parameters = [torch.ones(shape.k, dtype=torch.float64, device=x.device) for _ in range(vectors)]
    if not backward:
        return _relative(result[:rows], function(x, *parameters))
    gradient = pool.view((shape.m, shape.k), 0, 1)[:rows].double()
    return _relative(result[0][:rows], _vjp(function, gradient, x, *parameters)[0])


def _bias_error(shape: Shape, pool: BufferPool, result: Any) -> float:
    return _relative(result, pool.view((shape.m, shape.k), 0, 0).double().sum(dim=0))


# What torch.compile is given, by scaling and form; and the block that has a scale, where one has.
QUANTIZERS: dict[str, tuple[Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], tuple[int, int] | None]] = {
    "tensorwise": (quantize_tensorwise, None),
    "rowwise": (quantize_rowwise, None),
    "block1x128": (quantize_block1x128, (1, 128)),
    "block128x128": (quantize_block128x128, (128, 128)),
    "tensorwise_transposed": (_quantize_tensor_transposed, None),
    "rowwise_transposed": (_quantize_rows_of_transpose, None),
    "block1x128_transposed": (_quantize_1x128_of_transpose, (1, 128)),
    "block128x128_transposed": (_quantize_128x128_of_transpose, (128, 128)),
}


def _quantizer(name: str) -> Runner:
    function, block = QUANTIZERS[name]
    return Runner(
        f"torch/quantize_{name}", lambda s: 3 * s.m * s.k, partial(_bind_unary, function, torch.bfloat16),
        partial(_quantize_error, block, name.endswith("_transposed")), 0.05,
    )  # fmt: skip


def _pointwise(name: str, backward: bool) -> Runner:
    function, vectors = _POINTWISE[name]
    return Runner(
        f"torch/{name}_{'backward' if backward else 'forward'}", lambda s: (6 if backward else 4) * s.m * s.k,
        partial(_bind_pointwise, function, vectors, backward), partial(_pointwise_error, function, vectors, backward), 0.02,
    )  # fmt: skip


MEMORY_RUNNERS = (
    *(_quantizer(name) for name in QUANTIZERS),
    Runner("torch/transpose_e4m3", lambda s: 2 * s.m * s.k, partial(_bind_unary, _transpose, E4M3), _transpose_error, 0.0),
    *(_pointwise(name, backward) for name in _POINTWISE for backward in (False, True)),
    Runner(
        "torch/bias_backward", lambda s: 2 * s.m * s.k, partial(_bind_unary, _bias_backward, torch.bfloat16), _bias_error, 0.02
    ),
)
