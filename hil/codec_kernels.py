"""The Triton kernels of `hil.codec`: quantize and pack, unpack and dequantize, each in one pass over its operands.

A program handles ROWS rows of one payload; `places` says where payloads begin. Every offset that a load or store adds
is a multiple of 16 bytes, which is said here since the compiler cannot see it in what it loads from `places`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from numerics.gpu_kernels import emit, magnitude_bits, scale_of

_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _payload(places, DIM: tl.constexpr):
    """Of this program's payload: rows, first value in the whole tensor, first byte, and index of its first scale."""
    payload = places + 2 * tl.program_id(1)
    start = tl.load(payload)
    byte = tl.load(payload + 1)
    rows = tl.load(payload + 2) - start
    return rows, tl.multiple_of(start * DIM, 16), tl.multiple_of(byte, 16), tl.multiple_of((byte + rows * DIM) // 4, 4)


@triton.jit
def pack_kernel(
    x, message, scales, places, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Rows of x as e4m3 codes into message, and their scales into the same memory, seen as float32."""
    rows, value, byte, scale_index = _payload(places, DIM)
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = row < rows - first
    mask = inside[:, None]
    if WIDTH != DIM:
        mask = mask & (column < DIM)
    offsets = row[:, None] * DIM + column
    loaded = tl.load(x + value + first * DIM + offsets, mask=mask, other=0.0).to(tl.float32)
    bits = tl.max(magnitude_bits(loaded), 1)
    scale, inverse = scale_of(bits, C)
    # What is not finite must arrive as such: its scale says so for the whole row.
    broken = bits >= _INFINITE
    tl.store(scales + scale_index + first + row, tl.where(broken, float("nan"), scale), mask=inside)
    emit(message + byte + first * DIM, None, offsets, mask, loaded, scale[:, None], inverse[:, None], C)


@triton.jit
def unpack_kernel(out, codes, scales, places, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Rows of out = codes times scales, of a message seen as e4m3 and as float32."""
    rows, value, byte, scale_index = _payload(places, DIM)
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = row < rows - first
    mask = inside[:, None]
    if WIDTH != DIM:
        mask = mask & (column < DIM)
    offsets = row[:, None] * DIM + column
    code = tl.load(codes + byte + first * DIM + offsets, mask=mask)
    scale = tl.load(scales + scale_index + first + row, mask=inside)
    restored = code.to(tl.float32) * scale[:, None]
    tl.store(out + value + first * DIM + offsets, restored.to(out.dtype.element_ty), mask=mask)
