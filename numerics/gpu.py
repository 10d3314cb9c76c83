"""Quantization on a GPU by Triton kernels, equal to the last bit to `numerics.quantization` in torch.

Importing this module needs triton. With TRITON_INTERPRET=1 the kernels run on CPU tensors, which is how they are tested
without a GPU. `quantize_dual` in `numerics.gpu_dual` writes both layouts at once.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
import triton

from numerics import gpu_kernels as kernels
from numerics import gpu_meeting, gpu_pairs, gpu_words
from numerics.gpu_columns import column_kernel, line_amax_kernel, line_scale_kernel
from numerics.gpu_constants import Constants, constants_of
from numerics.recipe import Recipe
from numerics.sizes import cdiv, next_power_of_2

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Values of one program: 32 a thread keeps enough loads in flight.
_BLOCK = 8192
# The same where each row or block of a row has a scale.
_GROUPS = 2048
# A row up to this long is held in registers between its amax and its cast.
_LONGEST_ROW = 16384
# Rows so far apart are copied first: a program takes up to 2,048 of them, and places inside of it have 32 bits.
_FAR = 2**20
# Elements of the smallest program: the instructions that convert take four values of a thread at once.
_LEAST = 128
# Programs of the two-pass kernels; as many partial maxima are reduced by every program of the second pass.
_PROGRAMS = 1024
# Programs of one pass that also finds the amax.
_RAISING = 528
# Programs of one warp where every column has a scale: their number, the values of a turn, the columns of a cast, and
# rows and columns of the search for maxima.
_WARPS = 2112
_WARP = 1024
_COLUMNS = 128
_LINES = (16, 256)


def supports(x: torch.Tensor, recipe: Recipe) -> bool:
    """Whether `quantize_into` takes this matrix under this recipe; what it does not, torch computes (or refuses)."""
    if not _runs_on(x.device) or x.dtype not in _DTYPES or x.ndim != 2 or x.numel() == 0:
        return False
    if recipe.shared is not None:
        return x.shape[1] % 16 == 0 and recipe.rounding != "stochastic"
    fmt = recipe.element
    if recipe.rounding == "stochastic" or (fmt.bits > 8 and recipe.scaling != "none"):
        return False
    if recipe.overflow == "nonfinite" and not fmt.infinity and fmt.nan_code is None:
        return False
    return all(not size or extent % size == 0 for extent, size in zip(x.shape, recipe.block or (), strict=False))


def quantize_into(
    x: torch.Tensor,
    recipe: Recipe,
    amax: torch.Tensor | None,
    scales: torch.Tensor | None,
    codes: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    *,
    check: bool = True,
    amax_out: torch.Tensor | None = None,
) -> bool:
    """Quantize a matrix that `supports` accepts.

    Args:
        x: (rows, K) float32, bfloat16 or float16; rows may be strided, other strides cost a copy.
        recipe: How.
        amax: None for the matrix's own; else float32 of the scales' shape, finite and not negative. A
            shared-exponent recipe (mx9, mx6, mx4, msfp) takes none.
        scales: Written: float32, of the shape that `numerics.QuantizedTensor` says; None when not wanted.
        codes: Written: (rows, K) uint8; int16 for shared exponents; int32 for formats over 8 bits.
        values: Written: (rows, K) float32, what the codes stand for; may be x.
        check: Look at the result of the check for NaN and infinities, which waits for the GPU. Without it nothing
            waits and nothing is allocated that a CUDA graph could not hold.
        amax_out: Raised, in the same pass, to x's largest magnitude: one float32, zero for that alone. Delayed scaling
            needs it: tensorwise, with `amax` given. NaN or infinite when x is not finite.

    Returns:
        Whether all of x is finite; True without a look when `check` is False. When not, what was written means nothing.

    Raises:
        ValueError: an amax was given to a shared-exponent recipe, or `amax_out` to one that is not tensorwise.
    """
    if amax_out is not None and recipe.scaling != "tensorwise":
        raise ValueError(f"{recipe.name}: amax_out is one tensor's; use a tensorwise recipe or leave it out")
    if amax is not None and recipe.shared is not None:
        raise ValueError(f"{recipe.name} takes its exponents from the tensor, not from a given amax")
    if recipe.scaling in ("none", "tensorwise", "block1x128", "mx32", "bdr16") or x.stride(1) != 1 or x.stride(0) >= _FAR:
        x = x.contiguous()
    dense = {
        name: tensor if tensor is None or tensor.is_contiguous() else tensor.new_empty(tensor.shape)
        for name, tensor in (("scales", scales), ("codes", codes), ("values", values))
    }
    flag = torch.zeros((), dtype=torch.int32, device=x.device) if check else None
    with on(x.device):
        _launch(x, recipe, None if amax is None else amax.contiguous(), flag=flag, amax_out=amax_out, **dense)
    for tensor, written in zip((scales, codes, values), dense.values(), strict=True):
        if tensor is not None and written is not None and written is not tensor:
            tensor.copy_(written)
    return flag is None or not int(flag)


def _launch(x: torch.Tensor, recipe: Recipe, amax: Any, scales: Any, codes: Any, values: Any, flag: Any, amax_out: Any) -> None:
    rows, columns = x.shape
    size = x.numel()
    if recipe.shared is not None:
        groups = size // 16
        height = min(_BLOCK // 2 // 16, next_power_of_2(groups))
        run(
            kernels.shared_kernel, (cdiv(groups, height),), height * 16, x, scales, codes, values, flag, groups,
            MAGNITUDE_BITS=recipe.shared.magnitude_bits, PAIRS=recipe.shared.pairs, TRUNCATE=recipe.rounding == "toward_zero",
            ROWS=height, EVEN=groups % height == 0,
        )  # fmt: skip
        return
    constants = constants_of(recipe, amax is not None, converts(x.device))
    outputs = scales, codes, values, flag
    # Codes by their own amax, of which two can be written as one.
    pairs = codes is not None and values is None and amax is None and amax_out is None and codes.storage_offset() % 2 == 0
    if pairs and gpu_words.supports(x, recipe):
        gpu_words.quantize(x, recipe, codes, scales, flag, constants)
        return
    if recipe.scaling in ("none", "tensorwise"):
        pairs = pairs and recipe.scaling == "tensorwise" and gpu_pairs.takes(x.view(-1), recipe)
        if pairs and gpu_meeting.quantize(x, codes, scales, flag, constants):
            return
        partials = 0
        block, programs = flat_grid(size)
        if recipe.scaling == "tensorwise" and amax is None:
            amax = tensor_amax(x)
            partials = next_power_of_2(programs)
        elif recipe.scaling == "tensorwise":
            # Nothing to reduce first: a block a program. Each program's atomic maximum costs more than its share of a loop.
            programs = cdiv(size, block) if amax_out is None else min(programs, _RAISING)
        run(
            kernels.flat_kernel, (programs,), block, x, amax, *outputs,
            None if amax_out is None else amax_out.view(torch.int32), size, programs,
            PARTIALS=partials, BLOCK=block, EVEN=size % block == 0, C=constants,
        )  # fmt: skip
    elif recipe.scaling == "columnwise":
        width = min(_COLUMNS, next_power_of_2(columns))
        height = max(min(_WARP // width, next_power_of_2(rows)), _LEAST // width)
        across = cdiv(columns, width)
        chunk = height * cdiv(cdiv(rows, height) * across, _WARPS)
        inverses = None
        if amax is None:
            scales = torch.empty(columns, dtype=torch.float32, device=x.device) if scales is None else scales
            inverses = torch.empty(columns, dtype=torch.float32, device=x.device)
            line_scales(x, scales, inverses, flag, constants, by_rows=False)
        run(
            column_kernel, (across, cdiv(rows, chunk)), height * width,
            x, amax, scales, inverses, codes, values, flag, rows, columns, x.stride(0), chunk,
            ROWS=height, WIDTH=width, C=constants,
        )  # fmt: skip
    elif recipe.scaling == "block128x128":
        run(
            kernels.tile_kernel, (columns // 128 * (rows // 128),), 128 * 128, x, amax, *outputs, columns // 128, columns,
            x.stride(0), TILE=128, C=constants,
        )  # fmt: skip
    elif recipe.scaling == "rowwise" and columns > _LONGEST_ROW:
        run(
            kernels.long_row_kernel, (rows,), _BLOCK, x, amax, *outputs, columns, x.stride(0),
            WIDTH=_BLOCK, C=constants,
        )  # fmt: skip
    else:
        length, stride = (columns, x.stride(0)) if recipe.scaling == "rowwise" else (_group(recipe), _group(recipe))
        groups = size // length
        width = next_power_of_2(length)
        height = max(min(max(_GROUPS // width, 1), next_power_of_2(groups)), _LEAST // width)
        run(
            kernels.group_kernel, (cdiv(groups, height),), height * width, x, amax, *outputs, groups, length, stride,
            ROWS=height, WIDTH=width, EVEN=width == length and groups % height == 0, C=constants,
        )  # fmt: skip


def run(kernel: Any, grid: tuple[int, ...], elements: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel whose program handles this many elements, 32 by a thread."""
    warps = next_power_of_2(max(1, min(16, elements // 1024)))
    # Products and sums are never contracted unless the kernel says so.
    kernel[grid](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)


def flat_grid(size: int) -> tuple[int, int]:
    """Elements of one block, and programs, of a pass over a flat tensor."""
    block = max(min(_BLOCK, next_power_of_2(size)), _LEAST)
    return block, min(cdiv(size, block), _PROGRAMS)


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """Partial maxima of |x| as bits of float32, one of each program of `flat_grid`; x is contiguous."""
    block, programs = flat_grid(x.numel())
    partials = torch.empty(programs, dtype=torch.int32, device=x.device)
    run(kernels.amax_kernel, (programs,), block, x, partials, x.numel(), BLOCK=block, EVEN=x.numel() % block == 0)
    return partials


def line_scales(
    x: torch.Tensor,
    scales: torch.Tensor,
    inverses: torch.Tensor | None,
    flag: torch.Tensor | None,
    constants: Constants,
    *,
    by_rows: bool,
) -> None:
    """Scales of rows (with `by_rows`), then of columns, and the inverses that a cast may want, from one read of a matrix."""
    height, width = _LINES
    rows, columns = x.shape
    across = cdiv(columns, width)
    chunk = height * cdiv(cdiv(rows, height) * across, _WARPS)
    down = cdiv(rows, chunk)
    heads = rows if by_rows else 0
    parts = torch.empty(across * heads + down * columns, dtype=torch.int32, device=x.device)
    line_amax_kernel[(across, down)](
        x, parts if by_rows else None, parts[across * heads :], rows, columns, x.stride(0), chunk,
        ROWS=height, WIDTH=width, num_warps=1,
    )  # fmt: skip
    line_scale_kernel[(cdiv(heads, 32) + cdiv(columns, 32),)](
        parts, scales, inverses, flag, heads, columns, across, down,
        PARTS=64, WIDTH=32, C=constants, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _group(recipe: Recipe) -> int:
    assert recipe.block is not None
    return recipe.block[1]


def on(device: torch.device) -> Any:
    """The context in which a kernel is launched on the device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def converts(device: torch.device) -> bool:
    """Whether the device has instructions that convert to e4m3 and e5m2."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def _runs_on(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and triton.knobs.runtime.interpret
