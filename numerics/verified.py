"""How true the emulation of a kernel is: equal to the last bit, close with a bound, or not known.

Measured on an H200 (torch 2.11, CUDA 13.0, triton 3.6) by `python -m hil.exactness`, which draws shapes, distributions and
scales anew each time; `data/h200/exactness.json` has its rows, `exactness_libraries.json` those of a later run, with our own
and FBGEMM's kernels. Equal there covers fast and split accumulation, e4m3 x e4m3, e4m3 x e5m2 and e5m2 x e4m3, FP32 and bf16
results; NaN, infinities and scales that are zero, negative, subnormal, huge or not finite are compared by
`tests/gpu/test_accumulate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from numerics.sizes import check_shape

LEVELS = ("exact", "close", "unknown")


@dataclass(frozen=True)
class Fidelity:
    """What is known of a kernel's emulation.

    Attributes:
        level: `exact`: every output compared was equal to the last bit, given K's parts where the note says who names them.
            `close`: within `bound`; the note says what is not equal, mostly for want of the parts that cuBLAS splits K into.
            `unknown`: not compared.
        bound: Relative Frobenius distance to what is emulated without knowing the parts, above all that was seen; now and then
            cuBLAS leaves the last of K out (`numerics.tensor_core.split_parts`), which is not in it. None for unknown.
        note: In words.
    """

    level: str
    bound: float | None
    note: str


@dataclass(frozen=True)
class _Kernel:
    """Where a kernel may sum otherwise, as cuBLAS splits K: beyond so much of K, while there are fewer outputs; at what cost."""

    longest_whole: int | None = None
    most_outputs: int = 0
    bound: float = 0.0
    note: str = ""


_PARTS = "exact given K's parts, which cuBLAS sums apart where outputs are few and K is long"
_KERNELS: dict[str, _Kernel] = {
    "torch/fp8_tensorwise_fast": _Kernel(5120, 132 * 64 * 32, 0.1, f"{_PARTS}; estimated_split_k says how many"),
    "torch/fp8_tensorwise_split": _Kernel(5120, 132 * 64 * 32, 2e-6, f"{_PARTS}; estimated_split_k says how many"),
    "torch/fp8_rowwise_fast": _Kernel(),
    "torch/fp8_rowwise_split": _Kernel(),
    "torch/fp8_block128": _Kernel(5120, 132 * 64 * 32, 2e-6, _PARTS),
    "torch/fp8_grouped_rowwise_fast": _Kernel(note="a's scale is applied before b's: emulate b by a"),
    "torch/fp8_grouped_rowwise_split": _Kernel(note="a's scale is applied before b's: emulate b by a"),
    **dict.fromkeys(
        ("loka/fp8_tensorwise_fast", "loka/fp8_tensorwise_split", "loka/fp8_rowwise_fast", "loka/fp8_rowwise_split"),
        _Kernel(note="given K's parts, which follow from the shape alone: perfmodel.gemm_plan"),
    ),
    # Of any shape: no longest K is whole.
    **dict.fromkeys(
        ("fbgemm/fp8_rowwise_fast", "fbgemm/fp8_rowwise_split"),
        _Kernel(0, 2**62, 1e-3, "equal but for the last bit of 1 in 167,648 outputs"),
    ),
    "fbgemm/fp8_block128": _Kernel(),
    "torch/bf16": _Kernel(2560, 2**21, 1e-3, f"{_PARTS}; as bf16_matmul"),
    "torch/bf16_batched": _Kernel(note="as bf16_matmul"),
}


def fidelity(kernel: str, shape: tuple[int, int, int] | None = None) -> Fidelity:
    """How true `numerics` is to a kernel.

    Args:
        kernel: Its name, as in `perfmodel.KERNELS`; any other is unknown.
        shape: (M, N, K), to tell where K may be split; None for any.

    Raises:
        ValueError: the shape is not of three positive whole numbers.
    """
    if shape is not None:
        check_shape(shape)
    if kernel not in _KERNELS:
        return Fidelity("unknown", None, "not compared with the hardware")
    found = _KERNELS[kernel]
    if found.longest_whole is None:
        return Fidelity("exact", 0.0, found.note or "equal on all shapes compared")
    if shape is not None and (shape[2] <= found.longest_whole or shape[0] * shape[1] > found.most_outputs):
        return Fidelity("exact", 0.0, "K is not split")
    return Fidelity("close", found.bound, found.note)
