"""Our own quantizers (`numerics.gpu`, `numerics.gpu_dual`) as registry entries: bf16 in, e4m3 and FP32 scales out.

Codes and scales are those of `numerics.quantize`, to the last bit: scale = amax / 448 in FP32, values divided by it. Scales
are row-major: a scalar, (rows, 1), (rows, columns / 128) or (rows / 128, columns / 128). Three forms of each scaling: as the
tensor lies; `_transposed`, the result contiguous (columns, rows) and scaled along its own rows; `_dual`, both from one read.
`loka/quantize_tensorwise_delayed` takes the amax of the tensors before it, and finds this one's on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hil.kernels.base import Runner, Shape
from hil.timing import BufferPool
from numerics.quantization import QuantizedTensor
from numerics.recipe import Recipe
from numerics.scaling import scales_shape

E4M3 = torch.float8_e4m3fn
SCALINGS = ("tensorwise", "rowwise", "block1x128", "block128x128")
# Error of codes times scales against the input: e4m3's is about 0.026 on normal values.
_LIMIT = 0.05
# What the timed delayed quantizer is given: just above the largest of the pool's normal values.
_GIVEN_AMAX = 6.5

Result = tuple[torch.Tensor, torch.Tensor]


def quantize(x: torch.Tensor, scaling: str) -> Result:
    """e4m3 (rows, columns) and its scales, in one launch; tensorwise reads again what the chip could not hold.

    Args:
        x: (rows, columns) on the GPU; 128 divides columns (and rows) where blocks have the scales.
        scaling: One of `SCALINGS`.

    Raises:
        ValueError: no such scaling, or x does not fit it.
    """
    from numerics import gpu

    recipe = _recipe(x, scaling)
    codes, scales = _outputs(x, recipe)
    gpu.quantize_into(x, recipe, None, scales, codes, check=False)
    return codes.view(E4M3), scales


def quantize_transposed(x: torch.Tensor, scaling: str) -> Result:
    """e4m3 (columns, rows), contiguous, and its scales: `quantize(x.t(), scaling)` without a copy of x."""
    from numerics.gpu_dual import quantize_turned

    return _pair(quantize_turned(x, _recipe(x.t(), scaling), check=False))


def quantize_dual(x: torch.Tensor, scaling: str) -> tuple[Result, Result]:
    """`quantize(x, scaling)` and `quantize_transposed(x, scaling)` at once."""
    from numerics import gpu_dual

    row_major, turned = gpu_dual.quantize_dual(x, _recipe(x, scaling), check=False)
    return _pair(row_major), _pair(turned)


def quantize_delayed(
    x: torch.Tensor, amax: torch.Tensor, amax_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 (rows, columns), its scale and the tensor's own amax, in one pass.

    Args:
        x: (rows, columns) on the GPU.
        amax: One float32: what the scale comes from. Values beyond it saturate.
        amax_out: One float32, raised to x's largest magnitude; zero for that alone. Where a step's are zeroed all at once,
            as slots of one tensor, that costs one launch for the whole model.
    """
    from numerics import gpu

    recipe = _recipe(x, "tensorwise")
    codes, scales = _outputs(x, recipe)
    gpu.quantize_into(x, recipe, amax, scales, codes, check=False, amax_out=amax_out)
    return codes.view(E4M3), scales, amax_out


def _recipe(x: torch.Tensor, scaling: str) -> Recipe:
    if scaling not in SCALINGS:
        raise ValueError(f"scaling = {scaling!r}; choose one of {', '.join(SCALINGS)}")
    recipe = Recipe.parse(f"e4m3/{scaling}")
    for what, extent, size in zip(("rows", "columns"), x.shape, recipe.block or (0, 0), strict=True):
        if size and extent % size:
            raise ValueError(f"{what} = {extent}: {scaling} needs a multiple of {size}; pad, or use rowwise")
    return recipe


def _outputs(x: torch.Tensor, recipe: Recipe) -> Result:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return codes, torch.empty(scales_shape(recipe, *x.shape), dtype=torch.float32, device=x.device)


def _pair(made: QuantizedTensor) -> Result:
    return made.codes.view(E4M3), made.scales


def _bind(function: Callable[..., Any], scaling: str, shape: Shape, pool: BufferPool) -> Callable[[int], Any]:
    return lambda index: function(pool.view((shape.m, shape.k), index, 0), scaling)


def _bind_delayed(shape: Shape, pool: BufferPool) -> Callable[[int], Any]:
    x = pool.view((shape.m, shape.k), 0, 0)
    amax = torch.full((), _GIVEN_AMAX, device=x.device)
    slots = torch.zeros(1024, device=x.device)
    return lambda index: quantize_delayed(pool.view((shape.m, shape.k), index, 0), amax, slots[index % len(slots)])


def _error(scaling: str, transposed: bool, shape: Shape, pool: BufferPool, result: Result) -> float:
    """Of codes times scales against the input, on up to 2,048 of its rows; infinite for a wrong layout."""
    x = pool.view((shape.m, shape.k), 0, 0)
    source = (x.t() if transposed else x)[:2048].double()
    codes, scales = result
    if not codes.is_contiguous() or codes.shape != (x.t() if transposed else x).shape:
        return float("inf")
    tall, wide = {"block1x128": (1, 128), "block128x128": (128, 128)}.get(scaling, (1, 1))
    scales = scales.repeat_interleave(tall, 0).repeat_interleave(wide, 1) if scales.ndim else scales
    values = codes[:2048].double() * (scales[:2048] if scales.ndim else scales).double()
    return float((values - source).norm() / source.norm().clamp(min=1e-300))


def _dual_error(scaling: str, shape: Shape, pool: BufferPool, result: tuple[Result, Result]) -> float:
    return max(_error(scaling, turned, shape, pool, half) for turned, half in zip((False, True), result, strict=True))


def _delayed_error(shape: Shape, pool: BufferPool, result: Any) -> float:
    """As `_error`; infinite where the new amax is not the tensor's."""
    codes, scale, amax = result
    if amax != pool.view((shape.m, shape.k), 0, 0).abs().amax():
        return float("inf")
    return _error("tensorwise", False, shape, pool, (codes, scale))


def _runners(scaling: str) -> tuple[Runner, ...]:
    name = f"loka/quantize_{scaling}"
    forms: tuple[tuple[str, int, Callable[..., Any], Callable[..., float]], ...] = (
        ("", 3, quantize, partial(_error, scaling, False)),
        ("_transposed", 3, quantize_transposed, partial(_error, scaling, True)),
        ("_dual", 4, quantize_dual, partial(_dual_error, scaling)),
    )
    return tuple(
        Runner(name + suffix, partial(_bytes, moved), partial(_bind, function, scaling), error, _LIMIT)
        for suffix, moved, function, error in forms
    )


def _bytes(an_element: int, shape: Shape) -> int:
    return an_element * shape.m * shape.k


LOKA_QUANTIZE_RUNNERS = (
    *(runner for scaling in SCALINGS for runner in _runners(scaling)),
    Runner("loka/quantize_tensorwise_delayed", partial(_bytes, 3), _bind_delayed, _delayed_error, _LIMIT),
)
