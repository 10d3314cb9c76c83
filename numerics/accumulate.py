"""What a tensor core makes of quantized operands: matrix products with Hopper's accumulation, bit for bit.

The arithmetic is that of `numerics.tensor_core`; what of it has been compared with which kernel is in `numerics.verified`.
Scales are applied in FP32 as the kernels do: one for each operand as their product; rows' scales one after the other, b's
first; block scales where a block of 128 ends, with a fused multiply-add into the FP32 sum.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import torch

from numerics.formats import FORMATS, Format
from numerics.rounding import check_dense, decode, exponent_of, power_of_two
from numerics.tensor_core import ACCUMULATIONS, LEAST_EXPONENT, TENSOR_CORES, TensorCore, split_parts

FLOAT8 = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}
_BLOCK = 128  # elements of K under one block scale
# Outputs worked on at once: small enough for a core's cache, large enough for a GPU.
_TILE = {"cpu": 64, "cuda": 1024}
_RESULTS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The exponent of a product that is zero: below every other, so that it never sets the unit.
_NO_EXPONENT = -2000


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
    split_k: SupportsIndex | Sequence[slice] = 1,
) -> torch.Tensor:
    """Multiply a (M, K) by b (N, K) transposed, as the hardware does.

    Args:
        a: float8 tensor, or uint8 codes with `format_a`.
        b: float8 tensor, or uint8 codes with `format_b`; on the device of `a`.
        accumulation: `hopper_fast`, `hopper_split` or `hopper_mma` (`numerics.tensor_core`); `fp32` is torch's own float32
            product (in no defined order, as precise as `torch.set_float32_matmul_precision` says); `exact` is float64,
            rounded once to float32.
        scale_a: None, one value, M values, (M, K / 128) for blocks 1 x 128, or (M / 128, K / 128), which stands for its rows
            repeated. Multiplied in FP32.
        scale_b: None, one value, N values, (N, K / 128), or (N / 128, K / 128) for blocks 128 x 128, whose kernels multiply
            both scales first. Block scales need them on both sides. Of a single tile, N = K = 128, (1, 1) beside M values
            is a block's; give one value of another shape for a scale of the whole tensor.
        out_dtype: float32, float64, bfloat16 or float16. The FP32 result is rounded to nearest even into this type; beyond its
            range it is infinite.
        format_a: Name in `FORMATS`, when `a` holds codes.
        format_b: The same for `b`.
        split_k: How many parts the kernel splits K into (`numerics.tensor_core.split_parts`), or the parts themselves; they
            are summed in FP32 from the first to the last. `numerics.estimated_split_k` says how many cuBLAS takes tensorwise.
            `fp32` and `exact` have no parts and do not look at it.

    Returns:
        (M, N) of `out_dtype`. NaN and infinities give what IEEE arithmetic gives, as on the hardware. No gradient flows.

    Raises:
        TypeError: an operand is neither float8 nor codes with a format, or a scale, `out_dtype` or `split_k` of another type.
        ValueError: shapes, scales or parts do not fit, or the accumulation is unknown or not defined for the formats.
    """
    core = _core(accumulation)
    _check_result(out_dtype)
    values_a, fmt_a = _operand(a, format_a, "a")
    values_b, fmt_b = _operand(b, format_b, "b")
    _same_depth(values_a, values_b)
    m, n, k = values_a.shape[0], values_b.shape[0], values_a.shape[1]
    left, _ = _scale(scale_a, m, k, "scale_a", values_a.device)
    right, spread = _scale(scale_b, n, k, "scale_b", values_a.device)
    if k == n == _BLOCK and left.ndim == 1 and _is_tile(scale_b):
        # One tile of 128 x 128 is all of b: its scale is a block's, as it is where b has two.
        right, spread = right.expand(n).reshape(-1, 1), True
    if k == _BLOCK and left.ndim + right.ndim == 3:
        # Beside block scales, a scale a row of a single block is one.
        left, right = left.reshape(-1, 1), right.reshape(-1, 1)
    blocked = left.ndim == 2 or right.ndim == 2
    if blocked and (left.ndim != 2 or right.ndim != 2):
        raise ValueError("block scales are needed on both operands or on none")
    if core is None:
        if blocked:
            values_a, values_b = values_a * left.repeat_interleave(_BLOCK, 1), values_b * right.repeat_interleave(_BLOCK, 1)
        product = plain_product(values_a, values_b, accumulation)
    else:
        for fmt in (fmt_a, fmt_b):
            if fmt.name not in core.formats:
                raise ValueError(f"{accumulation} is defined for {' and '.join(core.formats)}, not for {fmt.name}")
        if blocked and core.promotion != _BLOCK:
            raise ValueError("block scales are applied where the chain ends; use accumulation='hopper_split'")
        scales = (left, right, spread) if blocked else None
        product = _product(values_a, values_b, fmt_a, fmt_b, core, split_k, scales)
    if not blocked:
        if left.numel() == 1 and right.numel() == 1:
            product = product * (left * right)
        else:
            product = product * right * left.reshape(-1, 1)
    return product.to(out_dtype)


def bf16_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    accumulation: str = "hopper_bf16",
    out_dtype: torch.dtype = torch.float32,
    split_k: SupportsIndex | Sequence[slice] = 1,
) -> torch.Tensor:
    """Multiply bfloat16 a (M, K) by b (N, K) transposed, as the hardware does; arguments as of `fp8_matmul`.

    cuBLAS splits K in whole blocks of 64 here. Slower than `fp8_matmul`: its sums need float64.

    Raises:
        TypeError: an operand is not bfloat16, or `out_dtype` or `split_k` of another type.
        ValueError: shapes or parts do not fit, or the accumulation is not one of `hopper_bf16`, `fp32`, `exact`.
    """
    core = _core(accumulation)
    _check_result(out_dtype)
    for name, x in (("a", a), ("b", b)):
        _matrix(x, name)
        if x.dtype != torch.bfloat16:
            raise TypeError(f"{name} must be bfloat16, got {x.dtype}; convert with .bfloat16()")
    _same_depth(a, b)
    a, b = a.detach(), b.detach()
    if core is None:
        return plain_product(a, b, accumulation).to(out_dtype)
    fmt = FORMATS["bf16"]
    if fmt.name not in core.formats:
        raise ValueError(f"{accumulation} is defined for {' and '.join(core.formats)}, not for bf16")
    return _product(a.to(torch.float32), b.to(torch.float32), fmt, fmt, core, split_k, None).to(out_dtype)


def plain_product(a: torch.Tensor, b: torch.Tensor, accumulation: str) -> torch.Tensor:
    """The product of (M, K) and (N, K) under `fp32` or `exact`, as float32; autocast has no say in it."""
    wide = torch.float64 if accumulation == "exact" else torch.float32
    with torch.autocast(a.device.type, enabled=False):
        return (a.to(wide) @ b.to(wide).T).to(torch.float32)


def _core(accumulation: str) -> TensorCore | None:
    if accumulation not in ACCUMULATIONS:
        raise ValueError(f"unknown accumulation {accumulation!r}; choose one of {', '.join(ACCUMULATIONS)}")
    return TENSOR_CORES.get(accumulation)


def _check_result(dtype: torch.dtype) -> None:
    if dtype not in _RESULTS:
        raise TypeError(f"out_dtype = {dtype!r}; choose one of {', '.join(map(str, _RESULTS))}")


def _same_depth(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a is {tuple(a.shape)} and b is {tuple(b.shape)}; both are contracted over their last axis")
    if a.device != b.device:
        raise ValueError(f"a is on {a.device} and b on {b.device}; put both on one device")


def _matrix(x: torch.Tensor, name: str) -> None:
    check_dense(x, name)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name} must be a matrix (rows, K) with at least one element, got shape {tuple(x.shape)}")


def _operand(x: torch.Tensor, fmt: str | None, name: str) -> tuple[torch.Tensor, Format]:
    """float32 values and their format."""
    _matrix(x, name)
    if x.dtype in FLOAT8:
        if fmt not in (None, FLOAT8[x.dtype]):
            raise ValueError(f"format_{name} = {fmt!r}, and {name} is {x.dtype}; leave it away, or pass {name}.view(torch.uint8)")
        return x.to(torch.float32), FORMATS[FLOAT8[x.dtype]]
    if x.dtype != torch.uint8 or not isinstance(fmt, str) or fmt not in FORMATS or FORMATS[fmt].bits > 8:
        raise TypeError(f"{name} must be float8, or uint8 codes with format_{name} naming their format; got {x.dtype}, {fmt!r}")
    if FORMATS[fmt].bits < 8 and bool((x > 2 ** FORMATS[fmt].bits - 1).any()):
        raise ValueError(f"{name} holds codes over {2 ** FORMATS[fmt].bits - 1}, the greatest of {fmt}; give one code a byte")
    return decode(x, FORMATS[fmt]), FORMATS[fmt]


def _scale(scale: torch.Tensor | float | None, rows: int, k: int, name: str, device: torch.device) -> tuple[torch.Tensor, bool]:
    """A scale as () for one, (rows,) for rowwise, (rows, K / 128) for blocks, float32; and whether 128 rows share one."""
    if isinstance(scale, torch.Tensor):
        check_dense(scale, name)
        if scale.is_complex():
            raise TypeError(f"{name} must hold real numbers, got {scale.dtype}")
        scale = scale.detach()
    try:
        value = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name} must be a number or a tensor of them, got {type(scale).__name__}") from error
    if value.numel() == 1:
        return value.reshape(()), False
    if value.shape in ((rows,), (rows, 1)):
        return value.reshape(rows), False
    blocks = k // _BLOCK
    if k % _BLOCK == 0 and value.shape == (rows, blocks):
        return value, False
    if k % _BLOCK == 0 and rows % _BLOCK == 0 and value.shape == (rows // _BLOCK, blocks):
        return value.repeat_interleave(_BLOCK, 0), True
    raise ValueError(f"{name} has shape {tuple(value.shape)}; it must hold 1 value, {rows}, or blocks of 128 along K = {k}")


def _is_tile(scale: torch.Tensor | float | None) -> bool:
    """Whether a scale is one value in the shape of blocks, (1, 1)."""
    return isinstance(scale, torch.Tensor) and scale.shape == (1, 1)


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    fmt_a: Format,
    fmt_b: Format,
    core: TensorCore,
    split_k: SupportsIndex | Sequence[slice],
    scales: tuple[torch.Tensor, torch.Tensor, bool] | None,
) -> torch.Tensor:
    """Parts of K one after the other, in FP32."""
    if isinstance(split_k, SupportsIndex):
        # With 128 x 128 blocks the kernel takes scales four at a time.
        align = 4 if scales is not None and scales[2] else 1
        parts = split_k if isinstance(split_k, bool) else operator.index(split_k)
        split_k = split_parts(a.shape[1], parts, core.split_block, align)
    else:
        _check_parts(split_k, a.shape[1], 1 if scales is None else _BLOCK)
    if not (bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())):
        clean = [torch.where(torch.isfinite(x), x, torch.zeros_like(x)) for x in (a, b)]
        emulated = _product(clean[0], clean[1], fmt_a, fmt_b, core, split_k, scales)
        return _with_nonfinite(emulated, a, b, split_k, scales)
    total = torch.zeros((), dtype=torch.float32, device=a.device)
    for index, part in enumerate(split_k):
        blocks = slice(part.start // _BLOCK, -(-part.stop // _BLOCK))
        some = None if scales is None else (scales[0][:, blocks], scales[1][:, blocks], scales[2])
        summed = _part(a[:, part], b[:, part], fmt_a, fmt_b, core, some)
        total = summed if index == 0 else total + summed  # a sum with zero would lose the sign of -0
    return total


def _with_nonfinite(
    emulated: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    parts: Sequence[slice],
    scales: tuple[torch.Tensor, torch.Tensor, bool] | None,
) -> torch.Tensor:
    """What was emulated, and what IEEE arithmetic gives where a chain meets NaN or infinity, whatever its order."""
    k = a.shape[1]
    plain = torch.zeros(emulated.shape, dtype=torch.float32, device=a.device)
    reached = torch.zeros(emulated.shape, dtype=torch.bool, device=a.device)
    for part in parts:
        for start in range(part.start, part.stop, k if scales is None else _BLOCK):
            some = slice(start, part.stop if scales is None else min(start + _BLOCK, part.stop))
            wide = a[:, some].to(torch.float64) @ b[:, some].to(torch.float64).T
            reached |= ~torch.isfinite(wide)
            chain = wide.to(torch.float32)
            if scales is not None:
                chain = chain * scales[0][:, start // _BLOCK, None] * scales[1][None, :, start // _BLOCK]
            plain = plain + chain
    return torch.where(reached, plain, emulated)


def _check_parts(parts: Sequence[slice], k: int, multiple: int) -> None:
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(part, slice) for part in parts):
        raise TypeError(f"split_k = {parts!r}; give a number of parts, or a list of slices of K")
    for part in parts:
        ends = (part.start, part.stop)
        if not all(isinstance(end, int) for end in ends) or part.step not in (None, 1) or not 0 <= ends[0] < ends[1] <= k:
            raise ValueError(f"split_k: {part} is no part of K = {k}; give slice(start, stop) inside it")
        if ends[0] % multiple or (ends[1] % multiple and ends[1] != k):
            raise ValueError(f"split_k: {part} cuts a block that has one scale; use multiples of {multiple}")


def _part(
    a: torch.Tensor,
    b: torch.Tensor,
    fmt_a: Format,
    fmt_b: Format,
    core: TensorCore,
    scales: tuple[torch.Tensor, torch.Tensor, bool] | None,
) -> torch.Tensor:
    pad = -a.shape[1] % len(core.order or range(core.group))
    a, b = (torch.nn.functional.pad(x, (0, pad)) for x in (a, b))
    if core.order is not None:
        order = torch.tensor(core.order, device=a.device)
        a, b = (x.reshape(len(x), -1, len(core.order))[:, :, order].reshape(x.shape) for x in (a, b))
    left, right = _planes(a, fmt_a, core), _planes(b, fmt_b, core)
    tile = _TILE["cuda" if a.is_cuda else "cpu"]
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for row in range(0, a.shape[0], tile):
        rows = slice(row, min(row + tile, a.shape[0]))
        for column in range(0, b.shape[0], tile):
            columns = slice(column, min(column + tile, b.shape[0]))
            some = None if scales is None else (scales[0][rows], scales[1][columns], scales[2])
            out[rows, columns] = _tile([p[:, rows] for p in left], [p[:, columns] for p in right], core, some)
    return out


def _planes(values: torch.Tensor, fmt: Format, core: TensorCore) -> tuple[torch.Tensor, torch.Tensor]:
    """(K, rows) values and their exponents in the type that sums are taken in: K outermost, so that a group is a stack."""
    dtype = torch.float32 if core.fits_float32 else torch.float64
    values = values.to(dtype)
    exponent = torch.clamp(exponent_of(values), min=fmt.min_exponent)
    exponent = torch.where(values == 0, torch.full_like(exponent, _NO_EXPONENT), exponent)
    return values.T.contiguous(), exponent.to(dtype).T.contiguous()


def _tile(
    left: list[torch.Tensor], right: list[torch.Tensor], core: TensorCore, scales: tuple[torch.Tensor, torch.Tensor, bool] | None
) -> torch.Tensor:
    """One tile of outputs. Numbers are whole multiples of the unit, few enough that the type's sums are exact."""
    depth = left[0].shape[0]
    shape = (left[0].shape[1], right[0].shape[1])
    dtype = left[0].dtype
    # An all-zero step may take any unit; FP8 products never come near FP32's subnormals.
    least = -100 if dtype == torch.float32 else LEAST_EXPONENT
    accumulator = torch.zeros(shape, dtype=dtype, device=left[0].device)
    total = torch.zeros(shape, dtype=torch.float32, device=left[0].device)
    buffer = torch.empty((core.group, *shape), dtype=dtype, device=left[0].device)
    for start in range(0, depth, core.group):
        group = slice(start, start + core.group)
        torch.add(left[1][group, :, None], right[1][group, None, :], out=buffer)
        exponent = buffer.amax(0).to(torch.int32)
        # A zero accumulator reports an exponent below every product's, a subnormal one the least normal exponent.
        own = exponent_of(accumulator).to(torch.int32)
        if dtype == torch.float64:
            own = torch.where(accumulator == 0, own, torch.clamp(own, min=-126))
        exponent = torch.clamp(torch.maximum(exponent, own), min=least)
        to_unit = power_of_two(core.fraction_bits - exponent, dtype)
        torch.mul(left[0][group, :, None], right[0][group, None, :], out=buffer)
        sums = buffer.mul_(to_unit).trunc_().sum(0)
        sums += (accumulator * to_unit).trunc_()
        accumulator = _kept(sums * power_of_two(exponent - core.fraction_bits, dtype), core.kept_bits)
        if core.promotion and ((start + core.group) % core.promotion == 0 or start + core.group >= depth):
            total = _promoted(total, accumulator, start // _BLOCK, scales)
            accumulator = torch.zeros_like(accumulator)
    return total if core.promotion else accumulator.to(torch.float32)


def _promoted(
    total: torch.Tensor, chain: torch.Tensor, block: int, scales: tuple[torch.Tensor, torch.Tensor, bool] | None
) -> torch.Tensor:
    """The FP32 sum with a finished chain. With 128 x 128 blocks in b the two scales are multiplied first; else a's goes first."""
    if scales is None:
        return total + chain
    left, right = scales[0][:, block, None], scales[1][None, :, block]
    return _fused_multiply_add(chain, left * right, total) if scales[2] else _fused_multiply_add(chain * left, right, total)


def _fused_multiply_add(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Float32 x y + z, rounded once: first to odd in float64, from which a second rounding is right."""
    product, z = x.to(torch.float64) * y.to(torch.float64), z.to(torch.float64)
    total = product + z
    # Two-sum: what the sum in float64 leaves over, exactly.
    shadow = total - product
    error = (product - (total - shadow)) + (z - shadow)
    bits = total.view(torch.int64)
    toward = torch.where(error > 0, torch.inf, -torch.inf)
    odd = torch.where((error != 0) & (bits & 1 == 0), torch.nextafter(total, toward), total)
    return odd.to(torch.float32)


def _kept(x: torch.Tensor, fraction_bits: int) -> torch.Tensor:
    """Keep so many fraction bits, toward zero; below the least normal float32, no more than its subnormals have."""
    if x.dtype == torch.float32:
        return (x.view(torch.int32) & -(1 << (23 - fraction_bits))).view(torch.float32)
    step = torch.clamp(exponent_of(x), min=-126).to(torch.int64) - fraction_bits
    kept = torch.trunc(x * power_of_two(-step, x.dtype)) * power_of_two(step, x.dtype)
    return torch.where(kept.abs() < 2.0**128, kept, torch.copysign(torch.full_like(kept, torch.inf), kept))
