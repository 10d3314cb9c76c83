"""One FP8 GEMM in Triton, for outputs so small that K must be split to fill the GPU; `hil.kernels.loka_gemm` says how to cut it.

An output is the sum over K's parts, from the first to the last, of what `numerics` calls hopper_fast or hopper_split; 128
elements of K are one step, so that the FP32 sum of the latter is where cuBLAS has it. Parts go through an FP32 workspace and a
second kernel, whose blocks are launched ahead of the first one's end: no atomics, the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

STEP = 128


@triton.jit
def gemm_kernel(
    a, b, out, scale_a, scale_b, m, n, k, chunk, a_rows_apart, b_columns_apart,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, IMPRECISE: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, ROWWISE: tl.constexpr, SWAPPED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[i, j] of a (m, k) and b (n, k), of part `program 1` of K: scaled bf16, or FP32 as it is where K is split.

    `out` has i `a_rows_apart` and j `b_columns_apart`, parts m * n apart. With SWAPPED, a is the caller's right operand, whose
    scale is applied first either way.
    """
    if OVERLAP:
        gdc_launch_dependents()
    across = tl.cdiv(m, BLOCK_M)
    i = (tl.program_id(0) % across) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = (tl.program_id(0) // across) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = tl.arange(0, BLOCK_K)
    in_rows, in_columns = (i < m)[:, None], (j < n)[None, :]
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, k)
    left = a + i.to(tl.int64)[:, None] * k + within[None, :]
    right = b + j.to(tl.int64)[None, :] * k + within[:, None]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        if EVEN:
            rows = tl.load(left + start, mask=in_rows, other=0.0)
            columns = tl.load(right + start, mask=in_columns, other=0.0)
        else:
            valid = start + within < k
            rows = tl.load(left + start, mask=in_rows & valid[None, :], other=0.0)
            columns = tl.load(right + start, mask=in_columns & valid[:, None], other=0.0)
        accumulator = tl.dot(rows, columns, accumulator, max_num_imprecise_acc=IMPRECISE)
    target = i.to(tl.int64)[:, None] * a_rows_apart + j.to(tl.int64)[None, :] * b_columns_apart
    if SPLIT:
        out += tl.program_id(1).to(tl.int64) * m * n
        tl.store(out + target, accumulator, mask=in_rows & in_columns)
    else:
        if ROWWISE:
            by_row = tl.load(scale_a + i, mask=i < m)[:, None]
            by_column = tl.load(scale_b + j, mask=j < n)[None, :]
            if SWAPPED:
                accumulator = accumulator * by_row * by_column
            else:
                accumulator = accumulator * by_column * by_row
        else:
            accumulator *= tl.load(scale_a) * tl.load(scale_b)
        tl.store(out + target, accumulator.to(tl.bfloat16), mask=in_rows & in_columns)


@triton.jit
def sum_kernel(
    parts, out, scale_a, scale_b, count, size, n,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, ROWWISE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum `count` parts, in order, into out (size / n, n) bf16, times b's scale, times a's."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    if ROWWISE:
        by_column = tl.load(scale_b + place % n, mask=mask)
        by_row = tl.load(scale_a + place // n, mask=mask)
    else:
        by_column = tl.load(scale_a) * tl.load(scale_b)
    if OVERLAP:
        gdc_wait()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    source = parts + place
    for start in range(0, count, AHEAD):
        # As many loads in flight as are unrolled.
        for ahead in tl.static_range(AHEAD):
            part = tl.full((BLOCK,), start + ahead, tl.int64)
            total += tl.load(source + part * size, mask=mask & (part < count), other=0.0)
    total *= by_column
    if ROWWISE:
        total *= by_row
    tl.store(out + place, total.to(tl.bfloat16), mask=mask)
