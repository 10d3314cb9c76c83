"""Quantization to FP8 with what makes its input, family by family, for `hil.fused` to measure as torch.compile fuses them.

Each computation quantizes as torchao does: a tensor's (or a row's) largest magnitude, a scale from it, the cast, and a
transposed copy of the 8-bit values where a GEMM of the backward wants one. What makes the tensor (an activation, a norm, the
gradient of an activation, a product) stands before it, so that torch.compile computes it inside both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hil.fused_families import Case, _mask_and_sum, _random, _silu_backward

SIZES = (
    (2048, 256), (2048, 1024), (2048, 3456), (2048, 8192), (8192, 1024), (16384, 256), (65536, 128), (1024, 1024), (4096, 512),
    (512, 512), (8192, 8192), (131072, 384), (2048, 40960),
)  # fmt: skip
FORMAT = torch.float8_e4m3fn
LARGEST, LEAST = torch.finfo(FORMAT).max, 1e-12
Maker = Callable[..., Tensor]


def _scale(amax: Tensor) -> Tensor:
    return (LARGEST / torch.clamp(amax.to(torch.float64), min=LEAST)).to(torch.float32)


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    return (x.to(torch.float32) * scale).clamp(-LARGEST, LARGEST).to(FORMAT)


def _turned(q: Tensor) -> Tensor:
    return q.t().contiguous()


def tensorwise(make: Maker, readings: str) -> Callable[..., tuple[Tensor, ...]]:
    """Quantize what `make` returns with one scale; `readings`: its rows (`r`), their transposition (`t`), or both."""

    def computation(*operands: Tensor) -> tuple[Tensor, ...]:
        x = make(*operands)
        scale = _scale(torch.max(torch.abs(x)))
        q = _cast(x, scale)
        return (scale, *([q] if "r" in readings else []), *([_turned(q)] if "t" in readings else []))

    return computation


def rowwise(make: Maker, readings: str) -> Callable[..., tuple[Tensor, ...]]:
    """The same with a scale for each row, and for each column of what is transposed."""

    def computation(*operands: Tensor) -> tuple[Tensor, ...]:
        x = make(*operands)
        found: list[Tensor] = []
        for reading in readings:
            scale = _scale(torch.amax(torch.abs(x), dim=1 if reading == "r" else 0, keepdim=True))
            q = _cast(x, scale)
            found += [scale, q if reading == "r" else _turned(q)]
        return tuple(found)

    return computation


def _same(x: Tensor) -> Tensor:
    return x


def _relu(x: Tensor, bias: Tensor) -> Tensor:
    return F.relu(x + bias)


def _relu_backward(gradient: Tensor, y: Tensor) -> Tensor:
    return _mask_and_sum(gradient, y)[0]


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[1],), weight, bias)


def _cross(x0: Tensor, u: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    return x0 * (u + bias) + x


def _silu(x: Tensor) -> Tensor:
    return F.silu(x)


def _hardswish(x: Tensor) -> Tensor:
    return F.hardswish(x)


def quantized_families() -> Iterator[tuple[str, list[Case]]]:
    """Every family's computations; operands are made when it is their turn."""
    makers: tuple[tuple[str, Maker, Callable[[int, int], tuple[Tensor, ...]]], ...] = (
        ("same", _same, lambda m, n: (_random(m, n),)),
        ("relu", _relu, lambda m, n: (_random(m, n), _random(n))),
        ("relu_backward", _relu_backward, lambda m, n: (_random(m, n), _random(m, n))),
        ("norm", _layer_norm, lambda m, n: (_random(m, n), _random(n), _random(n))),
        ("cross", _cross, lambda m, n: (_random(m, n), _random(m, n), _random(m, n), _random(n))),
        ("silu", _silu, lambda m, n: (_random(m, n),)),
        ("silu_backward", _silu_backward, lambda m, n: (_random(m, n), _random(m, n))),
        ("hardswish", _hardswish, lambda m, n: (_random(m, n),)),
    )
    by_name = {name: (make, operands) for name, make, operands in makers}
    wanted = (
        ("tensorwise", tensorwise, "same:r same:t relu:r relu:t relu_backward:rt norm:r norm:t cross:r silu:r silu_backward:rt"),
        ("rowwise", rowwise, "same:r relu:r norm:r relu_backward:rt silu:r same:t"),
        ("tensorwise", tensorwise, "hardswish:rt cross:rt same:rt"),
    )
    for scaling, quantized, listed in wanted:
        for name, readings in (entry.split(":") for entry in listed.split()):
            make, operands = by_name[name]
            # The largest of three operands and more would not fit a smaller GPU beside the rest.
            sizes = [size for size in SIZES if size[0] * size[1] <= (2**26 if "backward" in name or name == "cross" else 2**27)]
            yield f"{scaling}_{name}_{readings}", [(quantized(make, readings), operands(*size)) for size in sizes]
