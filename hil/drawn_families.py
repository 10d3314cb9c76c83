"""Families of fused kernels at drawn sizes, for `hil.fused` to measure: what falls between the round ones.

Norms of turned operands and gradients, plain ones, activations, table gradients that lie apart, and quantization with what makes
its input; and a norm's gradient beside the turned 8-bit copy of the norm's result, which a backward in FP8 makes anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hil import fused_families as some
from hil import quantized_families as quantized
from hil.fused_families import Case, _random, sums_both_ways, uniform

DRAWN = "_drawn"
WIDTHS = (32, 48, 64, 80, 96, 128, 160, 192)
LEAST, MOST = 2.0**20, 2.0**25.6  # elements of a matrix or cube


def drawn_cubes(number: int = 20, seed: int = 1) -> tuple[tuple[int, int, int], ...]:
    """Samples, tokens and features; no two have as many elements."""
    source, found = random.Random(f"cubes {seed}"), dict[int, tuple[int, int, int]]()
    while len(found) < number:
        tokens, width = round(2 ** source.uniform(4, 8.3)), source.choice(WIDTHS)
        batch = 8 * round(2 ** source.uniform(6.5, 9.6))
        if LEAST <= (elements := batch * tokens * width) <= MOST:
            found.setdefault(elements, (batch, tokens, width))
    return tuple(found.values())


def drawn_matrices(number: int = 20, seed: int = 1, both: bool = False) -> tuple[tuple[int, int], ...]:
    """Rows and columns; no two have as many elements.

    Args:
        number: Of them.
        seed: The same sizes for the same seed.
        both: So large that torch.compile sums them both ways in one kernel.
    """
    source, found = random.Random(f"matrices {seed} {both}"), dict[int, tuple[int, int]]()
    while len(found) < number:
        columns = 8 * round(2 ** source.uniform(1.6, 9.0))
        rows = 8 * round(2 ** source.uniform(6, 16))
        if LEAST / 4 <= (elements := rows * columns) <= MOST and (sums_both_ways(rows, columns) or not both):
            found.setdefault(elements, (rows, columns))
    return tuple(found.values())


def drawn_wide(number: int = 30, seed: int = 1) -> tuple[tuple[int, int], ...]:
    """Rows and columns of what is as wide as a layer that takes all features; no two have as many elements."""
    source, found = random.Random(f"wide {seed}"), dict[int, tuple[int, int]]()
    while len(found) < number:
        rows, columns = 16 * round(2 ** source.uniform(5.5, 9.5)), 16 * round(2 ** source.uniform(5.5, 9))
        if (elements := rows * columns) <= MOST:
            found.setdefault(elements, (rows, columns))
    return tuple(found.values())


def drawn_parts(number: int = 300, seed: int = 1) -> tuple[tuple[int, int], ...]:
    """Parts of sums and sums, as kernels that sum both ways leave them."""
    source = random.Random(f"parts {seed}")
    return tuple((round(2 ** source.uniform(5, 13.2)), 8 * round(2 ** source.uniform(0, 9.2))) for _ in range(number))


def drawn_copies(number: int = 60, seed: int = 1) -> tuple[tuple[int, int], ...]:
    """Rows and columns of products whose rows are padded: 8 divides the columns, 64 does not."""
    source, found = random.Random(f"copies {seed}"), list[tuple[int, int]]()
    while len(found) < number:
        rows, columns = 16 * round(2 ** source.uniform(5, 11)), 8 * round(2 ** source.uniform(6.5, 10))
        if columns % 64 and rows * columns <= MOST:
            found.append((rows, columns))
    return tuple(found)


CUBES, MATRICES, LARGE = drawn_cubes(), drawn_matrices(), drawn_matrices(14, both=True)
COPIED = tuple(
    (m // 16 * 16, -(-n // 16) * 16)
    for m, n in LARGE + drawn_matrices(40, seed=2) + drawn_matrices(14, 2, both=True) + drawn_wide()
)
"""Matrices as FP8 products take them."""
STRIDED = ((2048, 39, 96), (4096, 14, 48), (1536, 96, 128), (6144, 32, 32), (3072, 60, 96), (8192, 27, 160), (1024, 120, 64))
"""Samples, fields and features."""


def _norm_backward_copied(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, left: Tensor
) -> tuple[Tensor, ...]:
    """The product that reads the copy is there, too: for it torch.compile writes the copy in the order of the rows."""
    gradients = torch.ops.aten.native_layer_norm_backward(gradient, x, [x.shape[1]], mean, rstd, weight, bias, [True, True, True])
    normed = ((x - mean) * rstd * weight + bias).to(x.dtype)
    turned = quantized._turned(quantized._cast(normed, scale)).t()
    return (*gradients, torch._scaled_mm(left, turned, scale, scale, out_dtype=x.dtype))


def _strided_sums_table_gradient(ids: Tensor, rows: int, field: int, *gradients: Tensor) -> Tensor:
    """Of one field among many, whose gradients lie beside those of the other fields."""
    return some._table_gradient(some._sum(*(gradient[:, :, field] for gradient in gradients)), ids, rows)


def drawn_families() -> Iterator[tuple[str, list[Case]]]:
    """Every family's computations; operands are made when it is their turn."""

    def cube(b: int, t: int, d: int) -> tuple[Tensor, Tensor]:
        return _random(b, t, d), _random(b, d, t)

    def of_rows(*rows: int) -> tuple[Tensor, Tensor]:
        return torch.rand(*rows, 1, device="cuda"), torch.rand(*rows, 1, device="cuda")

    def named(family: str, computation: Callable[..., object], operands: Callable[..., tuple[object, ...]],
              sizes: tuple[tuple[int, ...], ...]) -> tuple[str, list[Case]]:  # fmt: skip
        return family + DRAWN, [(computation, operands(*size)) for size in sizes]

    yield named("turned_sum", some._turned_sum, cube, CUBES)
    yield named("turned_norm", some._turned_norm, lambda b, t, d: (*cube(b, t, d), _random(d), _random(d)), CUBES)
    yield named("norm_turned", some._norm_turned, lambda b, t, d: (*cube(b, t, d), _random(d), _random(d)), CUBES)
    yield named(
        "turned_norm_backward", some._turned_norm_backward,
        lambda b, t, d: (*cube(b, t, d), _random(b, t, d), *of_rows(b, t), _random(d), _random(d)), CUBES,
    )  # fmt: skip
    yield named(
        "turned_sums_norm_backward", some._turned_sums_norm_backward,
        lambda b, t, d: (
            _random(b, t, d), *cube(b, t, d), _random(b, d, t), _random(b, t, d), *of_rows(b, t), _random(d), _random(d)
        ),
        CUBES,
    )  # fmt: skip
    yield named("norm", some._norm, lambda m, n: (_random(m, n), _random(m, n), _random(n), _random(n)), MATRICES)
    yield named("plain_norm", quantized._layer_norm, lambda m, n: (_random(m, n), _random(n), _random(n)), MATRICES)
    yield named(
        "norm_backward", some._norm_backward, lambda m, n: (_random(m, n), _random(m, n), _random(n), _random(n)),
        MATRICES + LARGE,
    )  # fmt: skip
    yield named(
        "norm_backward_copied", _norm_backward_copied,
        lambda m, n: (
            _random(m, n), _random(m, n), *of_rows(m), _random(n), _random(n), torch.rand((), device="cuda"),
            _random(64, m).to(quantized.FORMAT),
        ),
        COPIED,
    )  # fmt: skip
    for terms in (1, 3):
        yield named(f"sum{terms}", some._sum, lambda m, n, t=terms: tuple(_random(m, n) for _ in range(t)), MATRICES)
    yield named("silu_backward", some._silu_backward, lambda m, n: (_random(m, n), _random(m, n)), MATRICES)
    for terms in (1, 3):
        yield (
            f"table_gradient_strided{terms}{DRAWN}",
            [
                (_strided_sums_table_gradient, (uniform(b, 10_000), 10_000, field, *gradients))
                for b, f, d in STRIDED
                for gradients in [[_random(b, d, f) for _ in range(terms)]]
                for field in (0, f // 2, f - 1)
            ],
        )
    of_one, of_two = (lambda m, n, k=k: tuple(_random(m, n) for _ in range(k)) for k in (1, 2))
    for name, make, operands, readings in (
        ("same", quantized._same, of_one, "rt"), ("silu_backward", quantized._silu_backward, of_two, "rt"),
        ("relu", quantized._relu, lambda m, n: (_random(m, n), _random(n)), "rt"),
        ("relu_backward", quantized._relu_backward, of_two, "rt"),
        ("norm", quantized._layer_norm, lambda m, n: (_random(m, n), _random(n), _random(n)), "r"),
        ("relu", quantized._relu, lambda m, n: (_random(m, n), _random(n)), "r"),
        ("cross", quantized._cross, lambda m, n: (*(_random(m, n) for _ in range(3)), _random(n)), "r"),
    ):  # fmt: skip
        yield named(f"tensorwise_{name}_{readings}", quantized.tensorwise(make, readings), operands, MATRICES)
