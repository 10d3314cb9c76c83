"""Quantization on the CPU by compiled loops, equal to the last bit to the torch code of `numerics.quantization`.

Measured by `python benchmarks/emulation.py`. numba is imported when a matrix is first met that is large enough to pay
for it; without numba, or with NUMBA_DISABLE_JIT set, nothing is supported and torch does the work.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from numerics.recipe import Recipe
from numerics.scaling import scale_of

# Elements for which torch takes longer than importing numba and reading its cache.
_WORTH_IMPORTING = 1 << 20
# Elements of a piece that is converted on its way: it fits in a core's cache. Below this one thread does it all.
_PIECE = 1 << 18
_FLOAT32_INFINITY = 0x7F800000


def supports(x: torch.Tensor, recipe: Recipe) -> bool:
    """Whether `quantize_into` takes this matrix under this recipe, and is worth it; torch computes what it does not."""
    if x.device.type != "cpu" or recipe.rounding != "nearest_even":
        return False
    # float32's own exponents (bf16, tf32) leave no room for the numbers that the rounding adds.
    if recipe.shared is None and recipe.element.min_exponent <= -126:
        return False
    return ("numerics.jit" in sys.modules or x.numel() >= _WORTH_IMPORTING) and _jit() is not None


@functools.cache
def _jit() -> Any:
    """The compiled loops; None where there is no numba or it does not compile."""
    try:
        import numba

        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
            return None
        from numerics import jit
    except ImportError:
        return None
    return jit


def quantize_into(
    x: torch.Tensor,
    recipe: Recipe,
    amax: torch.Tensor | None,
    scales: torch.Tensor | None,
    codes: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> bool:
    """Quantize a matrix that `supports` accepts, on as many threads as torch uses.

    Args:
        x: (rows, K) of a floating-point type, any strides.
        recipe: How.
        amax: None for the matrix's own; else float32 of the scales' shape, finite and not negative.
        scales: Written unless None: contiguous float32, of the shape that `numerics.QuantizedTensor` says.
        codes: Written unless None: contiguous (rows, K) of the type that it says.
        values: Written unless None: contiguous (rows, K) float32, what the codes stand for.

    Returns:
        Whether all of x is finite in float32. When not, what was written means nothing.
    """
    jit = _jit()
    outputs = [None if y is None else y.numpy() for y in (codes, values)]

    def each(function: Callable[..., Any], *arrays: tuple[Any, int]) -> list[Any]:
        """Call with every piece of x and of the arrays, each with the rows of x that one row of it stands for."""

        def call(rows: slice) -> Any:
            piece = x[rows].to(torch.float32).contiguous().numpy()
            return function(piece, *(a if a is None or not n else a[rows.start // n : rows.stop // n] for a, n in arrays))

        return _map(call, list(_pieces(x, 128 if recipe.scaling == "block128x128" else 1)))

    if recipe.shared is not None:
        shared = recipe.shared
        steps = None if scales is None else scales.numpy()

        def blocks(piece: Any, steps: Any, *outputs: Any) -> Any:
            return jit.quantize_shared(piece, steps, shared.magnitude_bits, shared.pairs, *outputs)

        return max(each(blocks, (steps, 1), *((y, 1) for y in outputs))) < _FLOAT32_INFINITY
    rows, columns = x.shape
    own = amax is None
    if recipe.scaling == "tensorwise" and own:
        amax = _from_bits(np.array(max(each(jit.greatest)), np.int32))
    elif recipe.scaling == "columnwise" and own:

        def of_columns(piece: Any) -> Any:
            top = np.zeros(columns, np.int32)
            jit.greatest_of_columns(piece, top)
            return top

        amax = _from_bits(np.maximum.reduce(each(of_columns))[None])
    if amax is not None and own and not bool(torch.isfinite(amax).all()):
        return False
    if recipe.block is None:
        made = torch.ones((), dtype=torch.float32, device=x.device)
    elif amax is not None:
        made = scale_of(amax, recipe)
    else:
        # torch.empty would take the caller's default type and device.
        shape = _block_scales(recipe, rows, columns)
        made = torch.from_numpy(np.empty(shape, np.float32)) if scales is None else scales
    grid = _grid(recipe, amax is not None or recipe.block is None)
    if recipe.scaling == "columnwise":
        flat = made.numpy().reshape(-1)
        tops = each(lambda piece, *y: jit.quantize_columns(piece, flat, grid, *y), *((y, 1) for y in outputs))
    else:
        whole = made.ndim == 0
        block_rows = 1 if whole else rows // made.shape[0]
        table = made.numpy().reshape(1, 1) if whole else made.numpy()

        def strips(piece: Any, scales: Any, *outputs: Any) -> Any:
            return jit.quantize_blocks(piece, scales, len(piece) if whole else block_rows, grid, *outputs)

        tops = each(strips, (table, 0 if whole else block_rows), *((y, 1) for y in outputs))
    if scales is not None and made is not scales:
        scales.copy_(made)
    return max(tops) < _FLOAT32_INFINITY


def _block_scales(recipe: Recipe, rows: int, columns: int) -> tuple[int, int]:
    assert recipe.block is not None
    block_rows, block_columns = recipe.block
    return rows // block_rows, columns // (block_columns or columns)


def _from_bits(bits: Any) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.float32))


def _pieces(x: torch.Tensor, multiple: int) -> Iterator[slice]:
    """Runs of rows, each a multiple: some for each thread where they are used as they lie, else as many as fit a cache."""
    rows, columns = x.shape
    threads = torch.get_num_threads()
    # More than one, so that a thread that is kept waiting leaves its share to the others.
    size = -(-rows // (1 if threads == 1 else 4 * threads))
    if x.dtype != torch.float32 or not x.is_contiguous():
        size = min(size, _PIECE // columns)
    if x.numel() < _PIECE:
        size = rows
    size = max(-(-size // multiple), 1) * multiple
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _map(call: Callable[[slice], Any], pieces: list[slice]) -> list[Any]:
    threads = min(torch.get_num_threads(), len(pieces))
    if threads == 1:
        return [call(piece) for piece in pieces]
    todo = iter(pieces)

    def work() -> list[Any]:
        return [call(piece) for piece in todo]  # the threads take turns

    # Made anew for each call: threads that wait would not survive a fork. This one works too, not only waits.
    with ThreadPoolExecutor(threads - 1) as pool:
        helpers = []
        with contextlib.suppress(RuntimeError):  # no new threads while the interpreter shuts down
            helpers = [pool.submit(work) for _ in range(threads - 1)]
        return [*work(), *(result for helper in helpers for result in helper.result())]


@functools.cache
def _grid(recipe: Recipe, ready: bool) -> Any:
    fmt = recipe.element
    shift = 23 - fmt.fraction_bits
    top = int(fmt.max / 2.0 ** (fmt.max_exponent - fmt.fraction_bits))
    max_code = ((fmt.max_exponent - fmt.min_exponent) << fmt.fraction_bits) + top
    nonfinite = recipe.overflow == "nonfinite"
    over, over_code = fmt.max, max_code
    if nonfinite:
        over, over_code = (np.inf, max_code + 1) if fmt.infinity else (np.nan, fmt.nan_code or 0)
    add, less = 0, fmt.max_exponent
    if recipe.scale_rounding == "nearest_even":
        add = 1 << (shift - 1)
    elif recipe.scale_rounding == "ceil":
        add = 0x7FFFFF - (int(np.float32(fmt.max).view(np.int32)) & 0x7FFFFF)
    return _jit().Grid(
        least=np.int32((fmt.min_exponent + 127) << 23),
        most=np.int32((fmt.max_exponent + 1 + 127) << 23),
        shift=np.int32(shift),
        limit=np.float32(fmt.max),
        over=np.float32(over),
        zero=np.float32(-0.0 if fmt.negative_zero else 0.0),
        over_code=np.int32(over_code),
        over_sign=np.int32(0 if nonfinite and not fmt.infinity else -1),
        sign_code=np.int32(1 << (fmt.bits - 1)),
        full_code=np.int32((1 << fmt.bits) - 1),
        integer=fmt.twos_complement,
        one_zero=not fmt.negative_zero,
        power=recipe.block is None or recipe.is_power_of_two,
        scale_add=np.int32(add),
        scale_less=np.int32(less),
        ready=ready,
    )
