"""Forward and backward of one linear layer without bias, as a library converts it: one launch makes all three products.

x (m, k) times the weight (n, k) is y (m, n); then the gradients of x and of the weight from a given gradient of y. All
bf16 at the layer's border. Inputs and output gradients rotate; the weight is one tensor, as in a model, and a small one
may stay in the L2 (a training step's other layers would have pushed it out).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from hil.kernels.base import GEMM_LIMIT, Runner, Shape, product_error
from hil.timing import BufferPool

Convert = Callable[[nn.Linear], tuple[Callable[[torch.Tensor], torch.Tensor], nn.Parameter]]
"""From a bf16 layer to what is timed: its forward, x to y, and the parameter that the gradient is of."""


def _weight(shape: Shape, pool: BufferPool) -> torch.Tensor:
    generator = torch.Generator(device=pool.device).manual_seed(shape.n + shape.k)
    return torch.randn((shape.n, shape.k), generator=generator, device=pool.device, dtype=torch.bfloat16)


def _bind(convert: Convert, shape: Shape, pool: BufferPool) -> Callable[[int], tuple[torch.Tensor, ...]]:
    layer = nn.Linear(shape.k, shape.n, bias=False, device="meta")
    layer.weight = nn.Parameter(_weight(shape, pool))
    forward, parameter = convert(layer)

    @cache
    def operands(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = pool.view((shape.m, shape.k), index, 0).detach().requires_grad_()
        return x, pool.view((shape.m, shape.n), index, 1)

    def launch(index: int) -> tuple[torch.Tensor, ...]:
        x, gradient = operands(index)
        y = forward(x)
        # Gradients come back as new tensors: no .grad accumulates, so that a CUDA graph can hold many launches.
        grad_x, grad_weight = torch.autograd.grad(y, (x, parameter), gradient)
        return y.detach(), grad_x, grad_weight

    return launch


def _error(shape: Shape, pool: BufferPool, result: Any) -> float:
    y, grad_x, grad_weight = result
    x, gradient = pool.view((shape.m, shape.k), 0, 0), pool.view((shape.m, shape.n), 0, 1)
    weight = _weight(shape, pool)
    return max(
        product_error(y, x, weight),
        product_error(grad_x, gradient, weight.t()),
        product_error(grad_weight, gradient.t(), x.t()),
    )


def linear_runner(name: str, convert: Convert) -> Runner:
    """The runner of a converted layer; a launch returns y (m, n) and the gradients of x (m, k) and of the weight (n, k)."""
    # Read once: x, the weight, y's gradient; written once: y and the two gradients.
    return Runner(
        name, lambda s: 4 * (s.m * s.k + s.n * s.k + s.m * s.n), partial(_bind, convert), _error, GEMM_LIMIT
    )  # fmt: skip
