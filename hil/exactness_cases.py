"""Every kind of GEMM that is compared to the last bit: how to run it on a GPU, and how `numerics` emulates it.

The kinds of `hil.exactness`: those of the registry by their names, and what stands behind them by names of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from numerics import bf16_matmul, fp8_matmul
from perfmodel.gemm_plan import parts_of, plan_of

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A kind of GEMM: how to draw its shape, run it, emulate it.

    Attributes:
        run: The draw's operands to an (M, N) result on the GPU.
        emulate: The operands, rows, columns and parts of K to what those outputs should be.
        dtypes: Of the operands.
        multiples: M, N and K are multiples of these.
        split_block: Elements of K in a block that is not split; None where the kernel never splits K.
        scales: Shapes of the scales, by name: `one`, `rows`, `block`, `tile`, `tiles`, or none.
        parts: The parts of K of an (M, N, K) GEMM, where they are no secret; None to find them out where K may be split.
    """

    run: Callable[[Draw], Tensor]
    emulate: Callable[[Draw, Tensor, Tensor, list[slice]], Tensor]
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)
    multiples: tuple[int, int, int] = (16, 16, 16)
    split_block: int | None = None
    scales: str = ""
    parts: Callable[[int, int, int], list[slice]] | None = None


@dataclass
class Draw:
    """Operands a (M, K) and b (N, K) on the GPU, and their scales."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    names: list[str] = field(default_factory=list)


def scale_shapes(case: Case, m: int, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of both operands' scales."""
    return {
        "": ((), ()), "one": ((), ()), "rows": ((m, 1), (n, 1)), "block": ((m, k // 128), (n, k // 128)),
        "tile": ((m, k // 128), (n // 128, k // 128)), "tiles": ((-(-m // 128), k // 128), (n // 128, k // 128)),
    }[case.scales]  # fmt: skip


def pick(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows of an operand."""
    # Indexing has no FP8 kernel: gather the bytes.
    return x[rows] if x.dtype == BF16 else x.view(torch.uint8)[rows].view(x.dtype)


def _run_scaled(draw: Draw, fast: bool, out_dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(draw.a, draw.b.t(), draw.scale_a, draw.scale_b.t(), out_dtype=out_dtype, use_fast_accum=fast)


def _run_block(draw: Draw, tile: bool) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    right = draw.scale_b
    kind = ScalingType.BlockWise128x128 if tile else ScalingType.BlockWise1x128
    if tile:
        # K-major, K's extent padded to a multiple of 4.
        padded = torch.zeros((right.shape[0], -(-right.shape[1] // 4) * 4), device="cuda")
        padded[:, : right.shape[1]] = right
        right = padded.t()
    else:
        right = right.t().contiguous().t()
    left = draw.scale_a.t().contiguous().t()
    return scaled_mm(draw.a, draw.b.t(), left, ScalingType.BlockWise1x128, right, kind, output_dtype=torch.float32)


def _run_grouped(draw: Draw, fast: bool) -> Tensor:
    """Four groups of rows, each by a weight of its own: (M, N / 4)."""
    groups = 4
    m, n, k = draw.a.shape[0], draw.b.shape[0] // groups, draw.a.shape[1]
    ends = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * (m // groups)
    return torch._scaled_grouped_mm(
        draw.a, draw.b.view(groups, n, k).transpose(1, 2), draw.scale_a.reshape(-1), draw.scale_b.reshape(groups, n),
        offs=ends, out_dtype=BF16, use_fast_accum=fast,
    )  # fmt: skip


def _emulate(draw: Draw, rows: Tensor, columns: Tensor, parts: list[slice], accumulation: str, out_dtype: torch.dtype) -> Tensor:
    left, right = draw.scale_a, draw.scale_b
    if left.ndim and left.shape[0] != draw.a.shape[0]:
        left = left.repeat_interleave(128, 0)
    if left.ndim:
        left = left[rows]
    if right.ndim and right.shape[0] == draw.b.shape[0]:
        right = right[columns]
    elif right.ndim:
        # Sampled columns of 128 x 128 blocks: 128 rows of b share a scale, so whole blocks are emulated and picked from.
        whole = pick(draw.b, torch.arange(draw.b.shape[0], device="cuda"))
        y = fp8_matmul(
            pick(draw.a, rows),
            whole,
            accumulation=accumulation,
            scale_a=left,
            scale_b=right,
            split_k=parts,
            out_dtype=out_dtype,
        )
        return y[:, columns]
    return fp8_matmul(
        pick(draw.a, rows), pick(draw.b, columns), accumulation=accumulation, scale_a=left, scale_b=right,
        split_k=parts, out_dtype=out_dtype,
    )  # fmt: skip


def _emulate_grouped(draw: Draw, rows: Tensor, columns: Tensor, parts: list[slice], accumulation: str) -> Tensor:
    """Here a's scale is applied before b's: the product of b and a, transposed."""
    each, n = draw.a.shape[0] // 4, draw.b.shape[0] // 4
    swapped = Draw(draw.b, draw.a, draw.scale_b, draw.scale_a)
    groups = []
    for group in range(4):
        mine = rows[(rows // each) == group]
        groups.append(_emulate(swapped, columns + group * n, mine, parts, accumulation, BF16).T)
    return torch.cat(groups)


def _emulate_bf16(draw: Draw, rows: Tensor, columns: Tensor, parts: list[slice], out_dtype: torch.dtype) -> Tensor:
    return bf16_matmul(draw.a[rows], draw.b[columns], out_dtype=out_dtype, split_k=parts)


def _run_triton(draw: Draw, block_m: int, imprecise: int | None) -> Tensor:
    from hil.triton_dot import triton_dot

    return triton_dot(draw.a, draw.b, block_m, imprecise)


def _run_loka(draw: Draw, fast: bool) -> Tensor:
    from hil.kernels.loka_gemm import fp8_gemm

    return fp8_gemm(draw.a, draw.b, draw.scale_a, draw.scale_b, fast=fast)


def _loka(fast: bool, scales: str) -> Case:
    return Case(
        partial(_run_loka, fast=fast), partial(_emulate, accumulation="hopper_fast" if fast else "hopper_split", out_dtype=BF16),
        multiples=(1, 1, 16), scales=scales, parts=lambda m, n, k: parts_of(k, plan_of(m, n, k, fast).parts),
    )  # fmt: skip


def _run_fbgemm(draw: Draw, fast: bool | None) -> Tensor:
    """By rows, or by tiles of 128 x 128 where `fast` is None."""
    from hil.kernels import fbgemm

    fbgemm.load()
    if fast is None:
        return fbgemm.block128(draw.a, draw.b, draw.scale_a, draw.scale_b)
    return fbgemm.rowwise(draw.a, draw.b, draw.scale_a.reshape(-1), draw.scale_b.reshape(-1), fast)


def _fbgemm(fast: bool) -> Case:
    return Case(
        partial(_run_fbgemm, fast=fast),
        partial(_emulate, accumulation="hopper_fast" if fast else "hopper_split", out_dtype=BF16),
        multiples=(1, 16, 16), scales="rows",
    )  # fmt: skip


def _scaled(fast: bool, scales: str, dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype) -> Case:
    accumulation = "hopper_fast" if fast else "hopper_split"
    return Case(
        partial(_run_scaled, fast=fast, out_dtype=out_dtype), partial(_emulate, accumulation=accumulation, out_dtype=out_dtype),
        dtypes, split_block=128 if scales == "one" else None, scales=scales,
    )  # fmt: skip


def _triton(block_m: int, imprecise: int | None, accumulation: str) -> Case:
    return Case(
        partial(_run_triton, block_m=block_m, imprecise=imprecise),
        partial(_emulate, accumulation=accumulation, out_dtype=torch.float32), multiples=(64, 64, 128),
    )  # fmt: skip


CASES: dict[str, Case] = {
    "torch/fp8_tensorwise_fast": _scaled(True, "one", (E4M3, E4M3), BF16),
    "torch/fp8_tensorwise_fast fp32 out": _scaled(True, "one", (E4M3, E4M3), torch.float32),
    "torch/fp8_tensorwise_fast e5m2 x e4m3": _scaled(True, "one", (E5M2, E4M3), torch.float32),
    "torch/fp8_tensorwise_fast e4m3 x e5m2": _scaled(True, "one", (E4M3, E5M2), torch.float32),
    "torch/fp8_tensorwise_split": _scaled(False, "one", (E4M3, E4M3), BF16),
    "torch/fp8_tensorwise_split fp32 out": _scaled(False, "one", (E4M3, E4M3), torch.float32),
    "torch/fp8_tensorwise_split e5m2 x e4m3": _scaled(False, "one", (E5M2, E4M3), torch.float32),
    "torch/fp8_tensorwise_split e4m3 x e5m2": _scaled(False, "one", (E4M3, E5M2), torch.float32),
    "torch/fp8_rowwise_fast": _scaled(True, "rows", (E4M3, E4M3), BF16),
    "torch/fp8_rowwise_split": _scaled(False, "rows", (E4M3, E4M3), BF16),
    "torch/fp8_block128": Case(
        partial(_run_block, tile=True), partial(_emulate, accumulation="hopper_split", out_dtype=torch.float32),
        multiples=(4, 128, 128), split_block=128, scales="tile",
    ),
    "torch/fp8_block1x128 x block1x128": Case(
        partial(_run_block, tile=False), partial(_emulate, accumulation="hopper_split", out_dtype=torch.float32),
        multiples=(128, 128, 128), split_block=128, scales="block",
    ),
    "torch/fp8_grouped_rowwise_fast": Case(
        partial(_run_grouped, fast=True), partial(_emulate_grouped, accumulation="hopper_fast"),
        multiples=(64, 64, 16), scales="rows",
    ),
    "torch/fp8_grouped_rowwise_split": Case(
        partial(_run_grouped, fast=False), partial(_emulate_grouped, accumulation="hopper_split"),
        multiples=(64, 64, 16), scales="rows",
    ),
    **{
        f"loka/fp8_{scaling}_{'fast' if fast else 'split'}": _loka(fast, scales)
        for scaling, scales in (("tensorwise", "one"), ("rowwise", "rows"))
        for fast in (True, False)
    },
    "fbgemm/fp8_rowwise_fast": _fbgemm(True),
    "fbgemm/fp8_rowwise_split": _fbgemm(False),
    "fbgemm/fp8_block128": Case(
        partial(_run_fbgemm, fast=None), partial(_emulate, accumulation="hopper_split", out_dtype=BF16),
        multiples=(128, 128, 128), scales="tiles",
    ),
    "torch/bf16": Case(
        lambda draw: torch.mm(draw.a, draw.b.t(), out_dtype=torch.float32), partial(_emulate_bf16, out_dtype=torch.float32),
        (BF16, BF16), (8, 8, 8), split_block=64,
    ),
    "torch/bf16_batched": Case(
        lambda draw: torch.bmm(draw.a[None].repeat(3, 1, 1), draw.b[None].repeat(3, 1, 1).mT, out_dtype=torch.float32)[1],
        partial(_emulate_bf16, out_dtype=torch.float32), (BF16, BF16), (8, 8, 8), split_block=64,
    ),
    "triton tl.dot, wgmma, promoted every 128": _triton(64, 128, "hopper_split"),
    "triton tl.dot, wgmma, never promoted": _triton(64, None, "hopper_fast"),
    "triton tl.dot, tiles of 16 rows (FP16 mma)": _triton(16, None, "hopper_mma"),
}  # fmt: skip
