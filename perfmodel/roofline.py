"""The roofline: the least time a kernel can take on a GPU, from its FLOPs and its bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import KERNELS, KernelSpec

Array = npt.NDArray[np.float64]

# Bytes read and written per element of the (rows, columns) operand of a memory-bound kernel.
_BYTES_PER_ELEMENT = {"quantize": 3.0, "layout": 2.0}


def flops(spec: KernelSpec, m: Array, n: Array, k: Array, groups: Array) -> Array:
    """2 M N K times groups for a GEMM; 0 for a memory-bound kernel."""
    return 2.0 * m * n * k * groups if "gemm" in spec.kind else np.zeros_like(m)


def moved_bytes(spec: KernelSpec, m: Array, n: Array, k: Array, groups: Array) -> Array:
    """Bytes that must move: each operand read once, the result written once (bf16 results)."""
    if "gemm" in spec.kind:
        element = 1.0 if spec.is_fp8 else 2.0
        return groups * (element * (m * k + n * k) + 2.0 * m * n)
    if spec.kind == "pointwise":
        if spec.name == "torch/bias_backward":
            return 2.0 * m * k
        return (6.0 if spec.name.endswith("_backward") else 4.0) * m * k
    return _BYTES_PER_ELEMENT[spec.kind] * m * k


def limits_us(kernel: str, m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec) -> tuple[Array, Array]:
    """Times in microseconds of the FLOPs at the peak and of the bytes at the copy bandwidth; arguments as `roofline_us`."""
    spec = KERNELS[kernel]
    peak = hardware.peak_fp8_tflops if spec.is_fp8 else hardware.peak_bf16_tflops
    compute = flops(spec, m, n, k, groups) / (peak * 1e6)
    memory = moved_bytes(spec, m, n, k, groups) / (hardware.copy_bandwidth_tbs * 1e6)
    return compute, memory


def roofline_us(kernel: str, m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec) -> Array:
    """Least time in microseconds: the larger of compute and memory time.

    Args:
        kernel: A name of `perfmodel.kernels.KERNELS`.
        m: Rows, a 1-D array.
        n: Columns of the result (1 for a memory-bound kernel).
        k: Contracted dimension (columns of a memory-bound kernel's input).
        groups: Products in one call.
        hardware: The GPU.
    """
    return np.maximum(*limits_us(kernel, m, n, k, groups, hardware))
