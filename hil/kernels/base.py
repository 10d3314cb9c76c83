"""What a real kernel offers to timing and validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hil.timing import BufferPool


@dataclass(frozen=True)
class Shape:
    """A kernel's size: a GEMM's (m, n, k) times groups; rows m and columns k for a memory-bound kernel (n is 1)."""

    m: int
    n: int
    k: int
    groups: int = 1


@dataclass(frozen=True)
class Runner:
    """A real kernel.

    Attributes:
        name: As in `perfmodel.kernels.KERNELS`.
        moved_bytes: Bytes read and written by one launch of a shape.
        bind: Makes the launcher of a shape: `launch(index)` runs on rotated operands and returns the result.
        error: Relative Frobenius error of a result of `launch(0)` against an FP64 reference, on sampled entries.
        limit: Largest error a correct kernel shows.
    """

    name: str
    moved_bytes: Callable[[Shape], int]
    bind: Callable[[Shape, BufferPool], Callable[[int], object]]
    error: Callable[[Shape, BufferPool, object], float]
    limit: float
