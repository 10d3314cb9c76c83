"""The error that a real kernel makes on given tensors, beside what the emulator says it returns.

The operands are quantized by `numerics` (whose kernels equal torch's recipes), multiplied by the GPU, and sampled outputs are
compared twice: with the emulator's, to the last bit, and with the float64 product of the operands before quantization.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hil.exactness import measured_parts
from hil.exactness_cases import CASES, E4M3, Draw
from hil.kernels.availability import available_kernels
from numerics import output_error, quantize
from perfmodel.kernels import KERNELS

# FP8 kernels whose emulation and call `hil.exactness` knows.
MEASURABLE = available_kernels(n for n in CASES if n in KERNELS and KERNELS[n].kind == "gemm" and KERNELS[n].is_fp8)
# Rows and columns of a result that are looked at.
SAMPLED = 128


@dataclass(frozen=True)
class TensorError:
    """One GEMM of given tensors on the GPU.

    Attributes:
        kernel: Its name.
        shape: (M, N, K).
        outputs: Outputs looked at.
        equal: Of them, those that equal the emulator's to the last bit.
        sqnr_db: Of the GPU's outputs, in bf16, against float64.
        mere: Likewise.
        emulated_sqnr_db: Of the emulator's outputs.
        emulated_mere: Likewise.
    """

    kernel: str
    shape: tuple[int, int, int]
    outputs: int
    equal: int
    sqnr_db: float
    mere: float
    emulated_sqnr_db: float
    emulated_mere: float


def measure(kernel: str, a: Tensor, b: Tensor) -> TensorError:
    """Quantize a (M, K) and b (N, K), multiply on the GPU, compare sampled outputs.

    Args:
        kernel: One of `MEASURABLE`.
        a: Left operand, bf16 on the GPU.
        b: Right operand, likewise.

    Raises:
        ValueError: the kernel is none of them, or may not run this shape.
    """
    if kernel not in MEASURABLE:
        raise ValueError(f"kernel {kernel!r} cannot be compared; choose one of {', '.join(MEASURABLE)}")
    spec, case = KERNELS[kernel], CASES[kernel]
    (m, k), n = a.shape, b.shape[0]
    if reason := spec.illegal(m, n, k):
        raise ValueError(f"{kernel} cannot run ({m}, {n}, {k}): {reason}")
    assert spec.recipe_a is not None and spec.recipe_b is not None
    left, right = quantize(a.contiguous(), spec.recipe_a), quantize(b.contiguous(), spec.recipe_b)
    draw = Draw(left.codes.view(E4M3), right.codes.view(E4M3), left.scales, right.scales)
    real = case.run(draw).to(torch.bfloat16)
    rows, columns = (torch.linspace(0, size - 1, min(size, SAMPLED), device=a.device).long() for size in (m, n))
    emulated = case.emulate(draw, rows, columns, measured_parts(case, m, n, k)).to(torch.bfloat16)
    picked = real[rows][:, columns]
    exact = a[rows].double() @ b[columns].double().T
    of_gpu, of_emulator = output_error(exact, picked), output_error(exact, emulated)
    same = (picked == emulated) | (picked.isnan() & emulated.isnan())
    return TensorError(
        kernel, (m, n, k), picked.numel(), int(same.sum()), of_gpu.sqnr_db, of_gpu.mere, of_emulator.sqnr_db, of_emulator.mere
    )
