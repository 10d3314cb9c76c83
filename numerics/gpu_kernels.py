"""Triton kernels that quantize on a GPU, equal to the last bit to `numerics.quantization`.

Everything is worked out in FP32 and on FP32's bits. A scope's amax is the largest magnitude taken as an integer, which
also shows NaN and infinities. A quotient x / scale is x times the correctly rounded reciprocal, corrected twice by the
remainder in fused multiply-adds: the second correction starts within one unit of the last place, so that its result is
the correctly rounded quotient (Markstein 1990). A magnitude is rounded by adding a power of two whose last place is the
grid's step; that sum's low bits are the code.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INFINITE = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SIGN = tl.constexpr(-0x80000000)
# 1.5 * 2**23 and its bits: added to a magnitude below 2**22, it leaves the rounded integer in the low bits.
_ROUNDER = tl.constexpr(12582912.0)
_ROUNDER_BITS = tl.constexpr(0x4B400000)
PACK_E4M3 = tl.constexpr(
    "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h};}"
)
PACK_E5M2 = tl.constexpr(
    "{.reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, $2, $1; cvt.rn.satfinite.e5m2x2.f32 h, $4, $3; mov.b32 $0, {l, h};}"
)


@triton.jit
def magnitude_bits(x):
    """Bits of |x| of float32, which order as magnitudes do."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def power_of_two(exponent):
    """2**exponent for -127 to 127; the least is a subnormal float32."""
    return tl.maximum((exponent + 127) << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def report(flag, bits):
    """Raise the flag when a magnitude is infinite or NaN."""
    if flag is not None:
        tl.store(flag, 1, mask=bits >= _INFINITE)


@triton.jit
def lift_of(scale):
    """What a small scale is multiplied by, so that remainders stay normal numbers."""
    return tl.where(scale < 8.673617379884035e-19, 18446744073709551616.0, 1.0)


@triton.jit
def scale_of(bits, C: tl.constexpr):
    """Scale, and the inverse that `divide` wants, of scopes whose amax has these bits."""
    if C.power:
        exponent = tl.minimum(tl.maximum(((bits + C.scale_add) >> 23) - C.scale_less, -127), 127)
        exponent = tl.where(bits == 0, 0, exponent)
        scale = power_of_two(exponent)
        inverse = power_of_two(-exponent)
    else:
        scale = tl.maximum(tl.div_rn(bits.to(tl.float32, bitcast=True), C.max), 1.1754943508222875e-38)
        scale = tl.where(bits == 0, 1.0, scale)
        inverse = scale
        if not C.exact:
            inverse = tl.div_rn(1.0, scale * lift_of(scale))
    return scale, inverse


@triton.jit
def divide(x, scale, inverse, C: tl.constexpr):
    """Correctly rounded x / scale; of a quotient that is out of range anyway, only that it is."""
    if not C.scaled:
        quotient = x
    elif C.power:
        quotient = x * inverse
    elif C.exact:
        quotient = tl.div_rn(x, scale)
    else:
        if not C.bounded:
            bound = scale * C.twice_max
            x = tl.minimum(tl.maximum(x, -bound), bound)
        lift = lift_of(scale)
        divisor = scale * lift
        quotient = x * (inverse * lift)
        # The remainder's sign is turned: so a zero keeps its own.
        turned = x * (-lift)
        quotient = tl.fma(tl.fma(quotient, divisor, turned), -inverse, quotient)
        quotient = tl.fma(tl.fma(quotient, divisor, turned), -inverse, quotient)
    return quotient


@triton.jit
def round_to_grid(quotient, C: tl.constexpr):
    """Codes (int32, or uint8 from the hardware) and float32 values on the grid; what is not used costs nothing."""
    bits = quotient.to(tl.int32, bitcast=True)
    sign = bits & _SIGN
    rest = bits & _MAGNITUDE
    over = rest >= _INFINITE
    if C.wide:
        if not C.truncate:
            rest = rest + C.half_less + ((rest >> C.shift) & 1)
        code = rest >> C.shift
        if not C.nonfinite:
            code = tl.minimum(code, C.max_code)
        value = (code << C.shift).to(tl.float32, bitcast=True)
    else:
        magnitude = rest.to(tl.float32, bitcast=True)
        if not C.bounded:
            over = magnitude > C.limit
            magnitude = tl.minimum(magnitude, C.max)
        if C.integer:
            total = magnitude + _ROUNDER
            value = total - _ROUNDER
            code = total.to(tl.int32, bitcast=True) - _ROUNDER_BITS
            if C.truncate:
                beyond = value > magnitude
                value = tl.where(beyond, value - 1.0, value)
                code = tl.where(beyond, code - 1, code)
        else:
            held = bits if C.bounded else magnitude.to(tl.int32, bitcast=True)
            exponent = tl.maximum(held & _INFINITE, C.min_bits)
            power = exponent.to(tl.float32, bitcast=True)
            # The products are exact, so that these are a sum and a difference.
            total = tl.fma(power, C.magic, magnitude)
            value = tl.fma(power, -C.magic, total)
            code = total.to(tl.int32, bitcast=True) + (exponent >> C.shift)
            if C.truncate:
                beyond = value > magnitude
                value = tl.where(beyond, value - (exponent - C.step).to(tl.float32, bitcast=True), value)
                code = tl.where(beyond, code - 1, code)
            code = code & C.code_mask
    if C.nonfinite and not C.bounded and not C.wide:
        value = tl.where(over, C.special_bits, value.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        if C.infinite:
            code = tl.where(over, C.top_code, code)
    if C.negative_zero:
        code = code | ((bits >> C.sign_shift) & C.sign_mask)
        value = (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        if C.integer:
            code = tl.where(bits < 0, -code, code) & C.full_mask
        else:
            # Zero's negative has no sign bit to keep.
            code = code | (((bits & -code) >> C.sign_shift) & C.sign_mask)
        value = tl.where(bits < 0, 0.0 - value, value)
    if C.e4m3:
        code = tl.inline_asm_elementwise(PACK_E4M3, "=r,r,r,r,r", [quotient], dtype=tl.uint8, is_pure=True, pack=4)
    if C.e5m2:
        code = tl.inline_asm_elementwise(PACK_E5M2, "=r,r,r,r,r", [quotient], dtype=tl.uint8, is_pure=True, pack=4)
        if C.nonfinite and not C.bounded:
            code = tl.where(over, ((bits >> 24) & 0x80) | (C.top_code), code.to(tl.int32))
    if C.nonfinite and not C.bounded and not C.wide and not C.infinite:
        code = tl.where(over, C.nan_code, code.to(tl.int32))
    return code, value


@triton.jit
def emit(codes, values, offsets, mask, x, scale, inverse, C: tl.constexpr):
    """Quantize a tile and store what is asked for."""
    code, value = round_to_grid(divide(x, scale, inverse, C), C)
    if codes is not None:
        tl.store(codes + offsets, code.to(codes.dtype.element_ty), mask=mask)
    if values is not None:
        if C.scaled:
            value = value * scale
        tl.store(values + offsets, value, mask=mask)


@triton.jit
def amax_kernel(x, partials, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """partials[program] = largest magnitude, as bits, of every n-th block of a flat tensor."""
    blocks = tl.cdiv(size, BLOCK)
    within = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        start = tl.full((), BLOCK, tl.int64) * block
        if EVEN:
            loaded = tl.load(x + start + within).to(tl.float32)
        else:
            loaded = tl.load(x + start + within, mask=within < size - start, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude_bits(loaded))
    tl.store(partials + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def flat_kernel(
    x, amax, scales, codes, values, flag, amax_out, size, partials,
    PARTIALS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One scale, or none, for a flat tensor; amax is a float32, or `partials` bits to be reduced when PARTIALS > 0.

    Blocks are visited from the end: what `amax_kernel` read last is what the L2 still holds. `amax_out`, where wanted, is
    raised to the bits of the tensor's largest magnitude.
    """
    if not C.scaled:
        amax_bits = tl.full((), 0, tl.int32)
    elif PARTIALS > 0:
        index = tl.arange(0, PARTIALS)
        amax_bits = tl.max(tl.load(amax + index, mask=index < partials, other=0), 0)
        report(flag, amax_bits)
    else:
        amax_bits = tl.load(amax).to(tl.int32, bitcast=True)
    scale, inverse = scale_of(amax_bits, C)
    if scales is not None:
        if tl.program_id(0) == 0:
            tl.store(scales, scale)
    blocks = tl.cdiv(size, BLOCK)
    within = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.int32)
    for turn in range(tl.program_id(0), blocks, tl.num_programs(0)):
        start = tl.full((), BLOCK, tl.int64) * (blocks - 1 - turn)
        if EVEN:
            mask = None
            loaded = tl.load(x + start + within).to(tl.float32)
        else:
            mask = within < size - start
            loaded = tl.load(x + start + within, mask=mask, other=0.0).to(tl.float32)
        if PARTIALS == 0 and flag is not None:
            report(flag, tl.max(magnitude_bits(loaded), 0))
        if amax_out is not None:
            largest = tl.maximum(largest, magnitude_bits(loaded))
        if codes is not None:
            emit(codes + start, None, within, mask, loaded, scale, inverse, C)
        if values is not None:
            emit(None, values + start, within, mask, loaded, scale, inverse, C)
    if amax_out is not None:
        tl.atomic_max(amax_out, tl.max(largest, 0), sem="relaxed")


@triton.jit
def group_kernel(
    x, amax, scales, codes, values, flag, groups, size, x_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One scale for each of `groups` runs of `size` <= WIDTH consecutive values, `x_stride` apart: rows, blocks, MX."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    if EVEN:
        inside = None
        mask = None
        offsets = row[:, None] * WIDTH + column
        loaded = tl.load(x + first * x_stride + row[:, None] * x_stride + column).to(tl.float32)
    else:
        inside = row < groups - first
        mask = inside[:, None] & (column < size)
        offsets = row[:, None] * size + column
        loaded = tl.load(x + first * x_stride + row[:, None] * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if amax is None:
        amax_bits = tl.max(magnitude_bits(loaded), 1)
        if flag is not None:
            report(flag, tl.max(amax_bits, 0))
    else:
        amax_bits = tl.load(amax + first + row, mask=inside).to(tl.int32, bitcast=True)
        if flag is not None:
            report(flag, tl.max(tl.max(magnitude_bits(loaded), 1), 0))
    scale, inverse = scale_of(amax_bits, C)
    if scales is not None:
        tl.store(scales + first + row, scale, mask=inside)
    scale, inverse = scale[:, None], inverse[:, None]
    if codes is not None:
        emit(codes + first * size, None, offsets, mask, loaded, scale, inverse, C)
    if values is not None:
        emit(None, values + first * size, offsets, mask, loaded, scale, inverse, C)


@triton.jit
def long_row_kernel(
    x, amax, scales, codes, values, flag, size, x_stride, WIDTH: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """One scale a row, of rows too long to be held: read once for amax and again, from the L2, to be cast."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    column = tl.arange(0, WIDTH)
    largest = tl.zeros((WIDTH,), tl.int32)
    if amax is None or flag is not None:
        for start in range(0, size, WIDTH):
            loaded = tl.load(x + start + column, mask=column < size - start, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, magnitude_bits(loaded))
        report(flag, tl.max(largest, 0))
    if amax is None:
        amax_bits = tl.max(largest, 0)
    else:
        amax_bits = tl.load(amax + row).to(tl.int32, bitcast=True)
    scale, inverse = scale_of(amax_bits, C)
    if scales is not None:
        tl.store(scales + row, scale)
    for start in range(0, size, WIDTH):
        mask = column < size - start
        loaded = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
        if codes is not None:
            emit(codes + row * size, None, start + column, mask, loaded, scale, inverse, C)
        if values is not None:
            emit(None, values + row * size, start + column, mask, loaded, scale, inverse, C)


@triton.jit
def tile_kernel(x, amax, scales, codes, values, flag, wide, columns, x_stride, TILE: tl.constexpr, C: tl.constexpr):
    """One scale for each TILE x TILE block of a matrix that they divide, `wide` of them side by side."""
    # On one axis, since the second of a grid ends at 65,535.
    index = tl.program_id(0)
    down = index // wide
    row = tl.arange(0, TILE).to(tl.int64)[:, None]
    column = tl.arange(0, TILE)[None, :] + (index - down * wide) * TILE
    first = down.to(tl.int64) * TILE
    loaded = tl.load(x + first * x_stride + row * x_stride + column).to(tl.float32)
    if amax is None or flag is not None:
        amax_bits = tl.max(tl.max(magnitude_bits(loaded), 1), 0)
        report(flag, amax_bits)
    if amax is not None:
        amax_bits = tl.load(amax + index).to(tl.int32, bitcast=True)
    scale, inverse = scale_of(amax_bits, C)
    if scales is not None:
        tl.store(scales + index, scale)
    offsets = row * columns + column
    if codes is not None:
        emit(codes + first * columns, None, offsets, None, loaded, scale, inverse, C)
    if values is not None:
        emit(None, values + first * columns, offsets, None, loaded, scale, inverse, C)


@triton.jit
def shared_kernel(
    x, scales, codes, values, flag, groups,
    MAGNITUDE_BITS: tl.constexpr, PAIRS: tl.constexpr, TRUNCATE: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Runs of 16 values under one exponent; with PAIRS, a pair that does not reach it halves its step."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    offsets = row[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = None if EVEN else (row < groups - first)[:, None]
    loaded = tl.load(x + first * 16 + offsets, mask=inside).to(tl.float32)
    magnitudes = magnitude_bits(loaded)
    block = tl.max(magnitudes, 1)
    if flag is not None:
        report(flag, tl.max(block, 0))
    exponent = tl.minimum(tl.maximum((block >> 23) - 127, -127), 127)
    unit = power_of_two(exponent)
    # In two exact factors: the inverse of a step may exceed FP32's range.
    lifted = loaded * power_of_two(-exponent)[:, None]
    coarse: tl.constexpr = 2.0 ** (MAGNITUDE_BITS - 1)
    if PAIRS:
        left, right = tl.split(tl.reshape(magnitudes, (ROWS, 8, 2)))
        lower = tl.maximum(left, right) < unit.to(tl.int32, bitcast=True)[:, None]
        factor = tl.where(lower, 2.0 * coarse, coarse)
        step = tl.where((block == 0)[:, None], 1.0, unit[:, None] * tl.where(lower, 0.5 / coarse, 1.0 / coarse))
        if scales is not None:
            tl.store(scales + first * 8 + row[:, None] * 8 + tl.arange(0, 8)[None, :], step, mask=inside)
        factor = tl.reshape(tl.join(factor, factor), (ROWS, 16))
        step = tl.reshape(tl.join(step, step), (ROWS, 16))
    else:
        factor = tl.full((ROWS, 16), coarse, tl.float32)
        single = tl.where(block == 0, 1.0, unit * (1.0 / coarse))
        if scales is not None:
            tl.store(scales + first + row, single, mask=None if EVEN else row < groups - first)
        step = single[:, None]
    scaled = (lifted * factor).to(tl.int32, bitcast=True)
    magnitude = tl.minimum((scaled & _MAGNITUDE).to(tl.float32, bitcast=True), 2.0 * coarse - 1.0)
    total = magnitude + _ROUNDER
    value = total - _ROUNDER
    code = total.to(tl.int32, bitcast=True) - _ROUNDER_BITS
    if TRUNCATE:
        beyond = value > magnitude
        value = tl.where(beyond, value - 1.0, value)
        code = tl.where(beyond, code - 1, code)
    if codes is not None:
        tl.store(codes + first * 16 + offsets, tl.where(scaled < 0, -code, code).to(tl.int16), mask=inside)
    if values is not None:
        # Codes have one zero, so values have one as well.
        tl.store(values + first * 16 + offsets, tl.where(scaled < 0, 0.0 - value, value) * step, mask=inside)
