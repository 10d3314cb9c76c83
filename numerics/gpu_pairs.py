"""Triton kernels that cast bfloat16 two values at a time, as words of 32 bits, into a matrix's transpose or into both layouts.

Equal to the last bit to `numerics.quantization`, with half the instructions of `numerics.gpu_dual`'s kernel for any type:
maxima are of words, and an inverse of a scale is a sum of two float32, so that a quotient is a product and a fused
multiply-add. That quotient is not correctly rounded, but a code made of it is the one of the correctly rounded quotient,
for every amax and value of bfloat16 (tests/gpu/test_quantize.py tries all): amax / 448 and amax / 57344 have 128
significands, and a value of 8 bits either divides to a tie exactly or stays 2^-13 of its size away from it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from numerics.gpu_constants import Constants
from numerics.gpu_kernels import PACK_E4M3, PACK_E5M2, report, round_to_grid
from numerics.recipe import Recipe
from numerics.sizes import cdiv, next_power_of_2, unit_of

_HIGH = tl.constexpr(-0x10000)
# Both magnitudes of a word, and that of its second value alone, which is where float32 has it.
MAGNITUDES = tl.constexpr(0x7FFF7FFF)
HIGH_MAGNITUDE = tl.constexpr(0x7FFF0000)
_RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
_TWO_E4M3 = tl.constexpr("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;")
_TWO_E5M2 = tl.constexpr("cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;")


class Outputs(NamedTuple):
    """What a quantization into both layouts, or into the transpose alone, writes.

    Attributes:
        codes: (rows, columns) uint8, as they lie; None where the turned ones are wanted alone.
        turned: (columns, rows) uint8.
        scales: Of the codes as they lie, float32, of the shape that `numerics.QuantizedTensor` says; None without `codes`.
        turned_scales: Of the turned ones, likewise.
        flag: One int32, raised where a value is not finite; None where nobody looks.
    """

    codes: torch.Tensor | None
    turned: torch.Tensor
    scales: torch.Tensor | None
    turned_scales: torch.Tensor
    flag: torch.Tensor | None

    def by_words(self) -> tuple[torch.Tensor | None, ...]:
        """The same, in this order, codes as kernels write them: two along a row, four along a turned one."""
        codes = None if self.codes is None else self.codes.view(torch.int16)
        return codes, self.turned.view(torch.int32), self.scales, self.turned_scales, self.flag


@triton.jit
def low(word):
    """The first value of a word as float32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(word):
    """The second one."""
    return (word & _HIGH).to(tl.float32, bitcast=True)


@triton.jit
def raised(largest, word):
    """Bits of float32 whose upper half is the larger of theirs and of the two values' magnitudes."""
    magnitudes = word & MAGNITUDES
    return tl.maximum(largest, tl.maximum(magnitudes, magnitudes << 16))


@triton.jit
def inverse_of(scale, C: tl.constexpr):
    """The inverse as a sum of two, the first a little less than it and the second positive, which keeps a zero's sign."""
    if C.e4m3 or C.e5m2:
        inverse = tl.inline_asm_elementwise(_RECIPROCAL, "=r,r", [scale], dtype=tl.float32, is_pure=True, pack=1)
    else:
        inverse = 1.0 / scale
    inverse = (inverse.to(tl.int32, bitcast=True) - 2).to(tl.float32, bitcast=True)
    return inverse, tl.fma(scale * -1.0, inverse, 1.0) * inverse


@triton.jit
def scale_and_inverse(bits, C: tl.constexpr):
    """Scale, and its inverse as a sum of two, of scopes whose amax, a bfloat16, has these bits of float32."""
    amax = bits.to(tl.float32, bitcast=True)
    quotient = amax * (1.0 / C.max)
    quotient = tl.fma(tl.fma(quotient, C.max, amax * -1.0), -1.0 / C.max, quotient)
    scale = tl.where(bits == 0, 1.0, tl.maximum(quotient, 1.1754943508222875e-38))
    first, second = inverse_of(scale, C)
    return scale, first, second


@triton.jit
def over(x, first, second):
    """Over a scale: a quotient whose code is right, if not its last bit."""
    return tl.fma(x, first, x * second)


@triton.jit
def two_codes(left, right, C: tl.constexpr):
    """int16: codes of two quotients."""
    if C.e4m3:
        codes = tl.inline_asm_elementwise(_TWO_E4M3, "=h,r,r", [left, right], dtype=tl.int16, is_pure=True, pack=1)
    elif C.e5m2:
        codes = tl.inline_asm_elementwise(_TWO_E5M2, "=h,r,r", [left, right], dtype=tl.int16, is_pure=True, pack=1)
    else:
        codes = (round_to_grid(left, C)[0] | (round_to_grid(right, C)[0] << 8)).to(tl.int16)
    return codes


@triton.jit
def four_codes(q0, q1, q2, q3, C: tl.constexpr):
    """int32: codes of four quotients."""
    if C.e4m3:
        codes = tl.inline_asm_elementwise(PACK_E4M3, "=r,r,r,r,r", [q0, q1, q2, q3], dtype=tl.int32, is_pure=True, pack=1)
    elif C.e5m2:
        codes = tl.inline_asm_elementwise(PACK_E5M2, "=r,r,r,r,r", [q0, q1, q2, q3], dtype=tl.int32, is_pure=True, pack=1)
    else:
        codes = round_to_grid(q0, C)[0] | (round_to_grid(q1, C)[0] << 8)
        codes = codes | (round_to_grid(q2, C)[0] << 16) | (round_to_grid(q3, C)[0] << 24)
    return codes


@triton.jit
def store_row(codes, mask, word, first, second, C: tl.constexpr):
    """Quantize words and store their codes as they lie."""
    tl.store(codes, two_codes(over(low(word), first, second), over(high(word), first, second), C), mask=mask)


@triton.jit
def rows_of(source, x_stride, mask, POLICY: tl.constexpr):
    """Words of rows four apart, and of the three that follow each: threads then exchange words of codes, not bytes."""
    w0 = tl.load(source, mask=mask, other=0, eviction_policy=POLICY)
    w1 = tl.load(source + x_stride, mask=mask, other=0, eviction_policy=POLICY)
    w2 = tl.load(source + 2 * x_stride, mask=mask, other=0, eviction_policy=POLICY)
    w3 = tl.load(source + 3 * x_stride, mask=mask, other=0, eviction_policy=POLICY)
    return w0, w1, w2, w3


@triton.jit
def store_turned(turned, quarter, mask, w0, w1, w2, w3, first, second, next_first, next_second, C: tl.constexpr):
    """Codes of four rows, turned: even columns under the first scales, the odd ones beside them under the next."""
    even = four_codes(
        over(low(w0), first, second), over(low(w1), first, second), over(low(w2), first, second), over(low(w3), first, second), C
    )  # fmt: skip
    tl.store(turned, tl.trans(even), mask=mask)
    odd = four_codes(
        over(high(w0), next_first, next_second), over(high(w1), next_first, next_second), over(high(w2), next_first, next_second),
        over(high(w3), next_first, next_second), C,
    )  # fmt: skip
    tl.store(turned + quarter, tl.trans(odd), mask=mask)


@triton.jit
def pair_kernel(
    x, amax, codes, turned, scales, turned_scales, flag, quarter, words, x_stride, partials, wide, tiles,
    MODE: tl.constexpr, PARTIALS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    UNIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS x 2 WIDTH values, `wide` of them side by side; the next STAGES - 1 are loaded while one is cast.

    `words` and `x_stride` count pairs of columns, in UNITs, `quarter` rows by four. Without `codes`, only the turned ones are
    written. MODE says whose the scales are: the 'tensor's (`partials` bits of maxima in `amax`), those of 'lines', rows and
    columns (there already), or the 'tile's.
    """
    words, x_stride = words * UNIT, x_stride * UNIT
    tall = tiles // wide
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        down = tall - 1 - tile // wide
        across = wide - 1 - tile % wide
        group = down * (ROWS // 4) + tl.arange(0, ROWS // 4)
        column = across * WIDTH + tl.arange(0, WIDTH)
        in_row, in_column = group < quarter, column < words
        mask = in_row[:, None] & in_column[None, :]
        row = 4 * group.to(tl.int64)
        w0, w1, w2, w3 = rows_of(x + row[:, None] * x_stride + column[None, :], x_stride, mask, "")
        if MODE == "tensor" or MODE == "tile":
            if MODE == "tensor":
                index = tl.arange(0, PARTIALS)
                bits = tl.max(tl.load(amax + index, mask=index < partials, other=0), 0)
            else:
                largest = raised(raised(raised(raised(tl.zeros((ROWS // 4, WIDTH), tl.int32), w0), w1), w2), w3)
                bits = tl.max(tl.max(largest, 1), 0) & HIGH_MAGNITUDE
            report(flag, bits)
            scale, first, second = scale_and_inverse(bits, C)
            if MODE == "tile" or (across == 0) & (down == 0):
                if codes is not None:
                    tl.store(scales + down * wide + across, scale)
                tl.store(turned_scales + across * tall + down, scale)
            next_first, next_second = first, second
            f0, f1, f2, f3, s0, s1, s2, s3 = first, first, first, first, second, second, second, second
        else:
            if codes is not None:
                f0, s0 = inverse_of(tl.load(scales + row, mask=in_row, other=1.0)[:, None], C)
                f1, s1 = inverse_of(tl.load(scales + row + 1, mask=in_row, other=1.0)[:, None], C)
                f2, s2 = inverse_of(tl.load(scales + row + 2, mask=in_row, other=1.0)[:, None], C)
                f3, s3 = inverse_of(tl.load(scales + row + 3, mask=in_row, other=1.0)[:, None], C)
            first, second = inverse_of(tl.load(turned_scales + 2 * column, mask=in_column, other=1.0)[None, :], C)
            next_first, next_second = inverse_of(tl.load(turned_scales + 2 * column + 1, mask=in_column, other=1.0)[None, :], C)
        if codes is not None:
            target = codes + row[:, None] * words + column[None, :]
            store_row(target, mask, w0, f0, s0, C)
            store_row(target + words, mask, w1, f1, s1, C)
            store_row(target + 2 * words, mask, w2, f2, s2, C)
            store_row(target + 3 * words, mask, w3, f3, s3, C)
        goal = turned + 2 * column.to(tl.int64)[:, None] * quarter + group[None, :]
        mask = in_column[:, None] & in_row[None, :]
        store_turned(goal, quarter, mask, w0, w1, w2, w3, first, second, next_first, next_second, C)


def takes(x: torch.Tensor, recipe: Recipe) -> bool:
    """Whether the arithmetic of these kernels is this recipe's, and x can be read by words."""
    own = recipe.format in ("e4m3", "e5m2") and recipe.rounding == "nearest_even" and recipe.amax == "current"
    return (
        own and not recipe.is_power_of_two and x.dtype == torch.bfloat16 and x.storage_offset() % 2 == 0 and x.shape[-1] % 2 == 0
    )


def supports(x: torch.Tensor, recipe: Recipe) -> bool:
    """Whether `launch` takes what `numerics.gpu.supports` accepts, values side by side in rows."""
    return takes(x, recipe) and x.shape[0] % 4 == 0 and x.stride(0) % 2 == 0


def launch(
    x: torch.Tensor,
    mode: str,
    amax: torch.Tensor | None,
    out: Outputs,
    constants: Constants,
) -> None:
    """Run `pair_kernel` on a matrix that `supports` accepts; `amax` are the partial maxima of mode 'tensor'."""
    rows, columns = x.shape
    height, width, warps, registers, stages, each = _shape(mode, out.codes is not None)
    wide = cdiv(columns, 2 * width)
    tiles = wide * cdiv(rows, height)
    programs = tiles
    if each and x.is_cuda:
        programs = min(tiles, each * torch.cuda.get_device_properties(x.device).multi_processor_count)
    partials = 0 if amax is None else amax.numel()
    options: dict[str, Any] = {"maxnreg": registers} if registers and x.is_cuda else {}
    words, stride = columns // 2, x.stride(0) // 2
    unit = unit_of(words, stride)
    pair_kernel[(programs,)](
        x.view(torch.int32), amax, *out.by_words(), rows // 4, words // unit, stride // unit, partials, wide, tiles, MODE=mode,
        PARTIALS=next_power_of_2(partials) if partials else 0, ROWS=height, WIDTH=width, STAGES=stages, UNIT=unit, C=constants,
        num_warps=warps, enable_fp_fusion=False, **options,
    )  # fmt: skip


def _shape(mode: str, both: bool) -> tuple[int, int, int, int, int, int]:
    """Rows and words of a tile; warps, registers a thread and stages of a program; programs on a multiprocessor.

    No registers: as many as it takes; no programs: as many as tiles. The fastest on an H200.
    """
    if mode == "lines" and both:
        return 128, 64, 16, 64, 2, 2
    return 128, 64, 8, 80 if mode == "tile" else 0, 1, 0
