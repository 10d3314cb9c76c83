"""What a tensor core makes of quantized operands: FP8 matrix products with Hopper's accumulation.

The arithmetic (see `numerics.reference` for it step by step): groups of 32 products along K, exact; products and
accumulator aligned to the largest exponent among them and cut toward zero 13 fraction bits below; the sum
cut to 13 fraction bits. `hopper_fast` chains that over all of K. `hopper_split` adds the chain to an FP32 sum every
128 of K. Checked bit for bit on an H200 for tensorwise and rowwise `torch._scaled_mm`, except where cuBLAS splits K
(few outputs, long K, fast). Blockwise promotion follows the same sum with the blocks' scales; that order is not checked.
"""

from __future__ import annotations

import torch

from numerics.errors import ACCUMULATIONS
from numerics.formats import FORMATS, Format
from numerics.reference import FRACTION_BITS, GROUP, PROMOTION
from numerics.rounding import decode, exponent_of, power_of_two

FLOAT8 = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}
_HOPPER_FORMATS = ("e4m3", "e5m2")
# Outputs worked on at once: small enough for a core's cache, large enough for a GPU.
_TILE = {"cpu": 64, "cuda": 1024}
# The exponent of a product that is zero: below every other, so that it never sets the unit.
_NO_EXPONENT = -512


def fp8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    accumulation: str,
    scale_a: torch.Tensor | float | None = None,
    scale_b: torch.Tensor | float | None = None,
    out_dtype: torch.dtype = torch.float32,
    format_a: str | None = None,
    format_b: str | None = None,
) -> torch.Tensor:
    """Multiply a (M, K) by b (N, K) transposed, as the hardware does.

    Args:
        a: float8 tensor, or uint8 codes with `format_a`.
        b: float8 tensor, or uint8 codes with `format_b`; on the device of `a`.
        accumulation: `hopper_fast`, `hopper_split`; `fp32` is torch's own float32 product (order not defined);
            `exact` is float64, rounded once to float32.
        scale_a: None, one value, M values, or (M, K / 128) for blocks 1 x 128. Multiplied in FP32.
        scale_b: None, one value, N values, (N, K / 128), or (N / 128, K / 128). Block scales need them on both sides.
        out_dtype: The FP32 result is rounded to nearest even into this type.
        format_a: Name in `FORMATS`, when `a` holds codes.
        format_b: The same for `b`.

    Returns:
        (M, N) of `out_dtype`. NaN and infinities give what IEEE arithmetic gives (not checked on hardware).

    Raises:
        TypeError: an operand is neither float8 nor codes with a format.
        ValueError: shapes or scales do not fit, or the accumulation is unknown or not defined for the formats.
    """
    if accumulation not in ACCUMULATIONS:
        raise ValueError(f"unknown accumulation {accumulation!r}; choose one of {', '.join(ACCUMULATIONS)}")
    values_a, fmt_a = _operand(a, format_a, "a")
    values_b, fmt_b = _operand(b, format_b, "b")
    if values_a.shape[1] != values_b.shape[1]:
        raise ValueError(f"a is {tuple(a.shape)} and b is {tuple(b.shape)}; both are contracted over their last axis")
    m, n, k = values_a.shape[0], values_b.shape[0], values_a.shape[1]
    left = _scale(scale_a, m, k, "scale_a", values_a.device)
    right = _scale(scale_b, n, k, "scale_b", values_a.device)
    blocked = left.ndim == 2 or right.ndim == 2
    if blocked and (left.ndim != 2 or right.ndim != 2):
        raise ValueError("block scales are needed on both operands or on none")
    if accumulation in ("fp32", "exact"):
        wide = torch.float64 if accumulation == "exact" else torch.float32
        if blocked:
            spread = (values_a * left.repeat_interleave(PROMOTION, 1)), (values_b * right.repeat_interleave(PROMOTION, 1))
            return (spread[0].to(wide) @ spread[1].to(wide).T).to(torch.float32).to(out_dtype)
        product = (values_a.to(wide) @ values_b.to(wide).T).to(torch.float32)
    else:
        for fmt in (fmt_a, fmt_b):
            if fmt.name not in _HOPPER_FORMATS:
                raise ValueError(f"{accumulation} is defined for {' and '.join(_HOPPER_FORMATS)}, not for {fmt.name}")
        if blocked and accumulation == "hopper_fast":
            raise ValueError("block scales are applied where the chain ends; use accumulation='hopper_split'")
        product = _hopper(values_a, values_b, fmt_a, fmt_b, accumulation, (left, right) if blocked else None)
    if not blocked:
        if left.numel() == 1 and right.numel() == 1:
            product = product * (left * right)
        else:
            product = product * right * left.reshape(-1, 1)
    return product.to(out_dtype)


def _operand(x: torch.Tensor, fmt: str | None, name: str) -> tuple[torch.Tensor, Format]:
    """float32 values and their format."""
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name} must be a matrix with at least one element, got shape {tuple(x.shape)}")
    if x.dtype in FLOAT8:
        return x.to(torch.float32), FORMATS[FLOAT8[x.dtype]]
    if x.dtype == torch.uint8 and fmt in FORMATS:
        return decode(x, FORMATS[fmt]), FORMATS[fmt]
    raise TypeError(f"{name} must be float8, or uint8 codes with format_{name} naming their format; got {x.dtype}, {fmt!r}")


def _scale(scale: torch.Tensor | float | None, rows: int, k: int, name: str, device: torch.device) -> torch.Tensor:
    """A scale as () for one, (rows,) for rowwise, (rows, K / 128) for blocks; float32."""
    value = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=device)
    if value.numel() == 1:
        return value.reshape(())
    if value.shape in ((rows,), (rows, 1)):
        return value.reshape(rows)
    blocks = k // PROMOTION
    if k % PROMOTION == 0 and value.shape == (rows, blocks):
        return value
    if k % PROMOTION == 0 and rows % PROMOTION == 0 and value.shape == (rows // PROMOTION, blocks):
        return value.repeat_interleave(PROMOTION, 0)
    raise ValueError(f"{name} has shape {tuple(value.shape)}; it must hold 1 value, {rows}, or blocks of 128 along K = {k}")


def _hopper(
    a: torch.Tensor,
    b: torch.Tensor,
    fmt_a: Format,
    fmt_b: Format,
    accumulation: str,
    block_scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    finite = bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())
    if not finite:
        plain = a.to(torch.float64) @ b.to(torch.float64).T
        clean = [torch.where(torch.isfinite(x), x, torch.zeros_like(x)) for x in (a, b)]
        emulated = _hopper(clean[0], clean[1], fmt_a, fmt_b, accumulation, block_scales)
        return torch.where(torch.isfinite(plain), emulated, plain.to(torch.float32))
    pad = -a.shape[1] % GROUP
    a, b = (torch.nn.functional.pad(x, (0, pad)) for x in (a, b))
    left, right = _planes(a, fmt_a), _planes(b, fmt_b)
    tile = _TILE["cuda" if a.is_cuda else "cpu"]
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for row in range(0, a.shape[0], tile):
        rows = slice(row, min(row + tile, a.shape[0]))
        for column in range(0, b.shape[0], tile):
            columns = slice(column, min(column + tile, b.shape[0]))
            scales = None if block_scales is None else (block_scales[0][rows], block_scales[1][columns])
            out[rows, columns] = _tile([p[:, rows] for p in left], [p[:, columns] for p in right], accumulation, scales)
    return out


def _planes(values: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """(K, rows) values and their exponents as float32: K outermost, so that a group is a stack of planes."""
    exponent = torch.clamp(exponent_of(values), min=fmt.min_exponent)
    exponent = torch.where(values == 0, torch.full_like(exponent, _NO_EXPONENT), exponent)
    return values.T.contiguous(), exponent.to(torch.float32).T.contiguous()


def _tile(
    left: list[torch.Tensor],
    right: list[torch.Tensor],
    accumulation: str,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """One tile of outputs. All numbers are whole multiples of the unit below 2**24, so float32 sums are exact."""
    depth = left[0].shape[0]
    shape = (left[0].shape[1], right[0].shape[1])
    accumulator = torch.zeros(shape, dtype=torch.float32, device=left[0].device)
    total = torch.zeros_like(accumulator)
    buffer = torch.empty((GROUP, *shape), dtype=torch.float32, device=left[0].device)
    for start in range(0, depth, GROUP):
        group = slice(start, start + GROUP)
        torch.add(left[1][group, :, None], right[1][group, None, :], out=buffer)
        exponent = buffer.amax(0).to(torch.int32)
        # A zero accumulator reports exponent -127, below every product's; an all-zero step may take any unit.
        exponent = torch.clamp(torch.maximum(exponent, exponent_of(accumulator)), min=-100)
        to_unit = power_of_two(FRACTION_BITS - exponent, torch.float32)
        torch.mul(left[0][group, :, None], right[0][group, None, :], out=buffer)
        sums = buffer.mul_(to_unit).trunc_().sum(0)
        sums += (accumulator * to_unit).trunc_()
        accumulator = _cut(sums * power_of_two(exponent - FRACTION_BITS, torch.float32))
        if accumulation == "hopper_split" and ((start + GROUP) % PROMOTION == 0 or start + GROUP >= depth):
            if scales is not None:
                block = start // PROMOTION
                accumulator = accumulator * (scales[0][:, block, None] * scales[1][None, :, block])
            total += accumulator
            accumulator = torch.zeros_like(accumulator)
    return total if accumulation == "hopper_split" else accumulator


def _cut(x: torch.Tensor) -> torch.Tensor:
    """Keep 13 fraction bits of normal float32 numbers, toward zero."""
    return (x.view(torch.int32) & -(1 << (23 - FRACTION_BITS))).view(torch.float32)
