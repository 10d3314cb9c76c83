"""What a real kernel offers to timing and validation, and the reference that GEMMs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hil.timing import BufferPool

E4M3 = torch.float8_e4m3fn

# A bf16 result is off by 2^-9 / sqrt(3) of its size, rms; an e5m2 operand by 5%; fast accumulation over K = 524,288 by
# some hundredths. A wrong operand or scale is off by its whole size.
GEMM_LIMIT = 0.1


@dataclass(frozen=True)
class Shape:
    """A kernel's size: a GEMM's (m, n, k) times groups; rows m and columns k for a memory-bound kernel (n is 1)."""

    m: int
    n: int
    k: int
    groups: int = 1

    @property
    def largest_operand(self) -> int:
        """Elements of the largest of what is read: (groups, m, k), (groups, n, k), and (m, n) where a layer runs backward."""
        return self.groups * max(self.m * self.k, self.n * self.k, self.m * self.n)


@dataclass(frozen=True)
class Runner:
    """A real kernel.

    Attributes:
        name: As in `perfmodel.kernels.KERNELS`.
        moved_bytes: Bytes read and written by one launch of a shape.
        bind: Makes the launcher of a shape: `launch(index)` runs on rotated operands and returns the result. Where the
            kernel's library is absent, it raises ImportError.
        error: Relative Frobenius error of a result of `launch(0)` against an FP64 reference, on sampled entries; the
            largest one where a kernel has several results.
        limit: Largest error a correct kernel shows.
    """

    name: str
    moved_bytes: Callable[[Shape], int]
    bind: Callable[[Shape, BufferPool], Callable[[int], object]]
    error: Callable[[Shape, BufferPool, object], float]
    limit: float


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative Frobenius error of `got` against `reference`, in FP64."""
    reference = reference.double()
    return float((got.double() - reference).norm() / reference.norm().clamp(min=1e-300))


def product_error(got: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    """Error of `got` (M, N) against `left` (M, K) times `right` (N, K) transposed in FP64, on up to 24 x 48 entries."""
    rows = torch.linspace(0, left.shape[0] - 1, min(left.shape[0], 24), device=left.device).long()
    columns = torch.linspace(0, right.shape[0] - 1, min(right.shape[0], 48), device=left.device).long()
    # Indexing has no FP8 kernel: gather the bytes.
    pick = [x.view(torch.uint8)[i].view(E4M3) if x.dtype is E4M3 else x[i] for x, i in ((left, rows), (right, columns))]
    return relative_error(got[rows][:, columns], pick[0].double() @ pick[1].double().t())
