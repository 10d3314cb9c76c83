"""Products that torch.compile pads: it times both ways on the GPU and takes the faster one (`fx_passes/pad_mm.py`, 2.11, 2.13).

cuBLAS runs a product whose rows in memory are no multiple of 16 bytes by older kernels. torch.compile copies such operands into
multiples of 8 elements, with zeros behind, where the product with these copies is over a tenth faster. Here both times are told:
a floor, and what multiplying and moving take by the alignment, of an H200.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.fx_passes import pad_mm

from loka_sim.modelspec import padded

FASTER = 1.1  # pad_mm.is_padded_faster: padding takes memory operations that its timing does not see

# Fitted to what torch's own timing found of 289 drawn products on an H200 (`benchmarks/padding.py`).
FLOOR_US, MB_A_US = 8.65, 1.67
MFLOP_A_US = {1: 109.0, 2: 224.0, 4: 363.0}
PADDED_FLOOR_US, PADDED_MFLOP_A_US, PADDED_MB_A_US = 6.3, 951.0, 3.3
COPY_US, COPIED_MB_A_US, TURNED_MB_A_US = 5.07, 2.21, 1.11
FILL_US, FILLED_MB_A_US, BIAS_US = 1.71, 11.1, 3.61


@dataclass(frozen=True)
class Operand:
    """One side of a product.

    Attributes:
        rows: Of each matrix, in elements.
        columns: Of each matrix.
        groups: Matrices.
        turned: Its columns lie one behind the other in memory.
        written_padded: What makes it is compiled too, and is taken to write it with the zeros at once.
    """

    rows: int
    columns: int
    groups: int = 1
    turned: bool = False
    written_padded: bool = False

    @property
    def lies_by(self) -> int:
        """Elements of a row in memory."""
        return self.rows if self.turned else self.columns

    @property
    def is_padded(self) -> bool:
        """Padding changes its size."""
        return (self.rows, self.columns) != (padded(self.rows), padded(self.columns))

    def copy_us(self) -> float:
        """Microseconds until it is there with its zeros."""
        rows, columns = padded(self.rows), padded(self.columns)
        if not self.is_padded:
            return 0.0
        if self.written_padded:
            behind = (rows - self.rows or rows) * (columns - self.columns or columns)
            return FILL_US + _mb(self.groups * behind) / FILLED_MB_A_US
        moved = _mb(self.groups * (self.rows * self.columns + 2 * rows * columns))
        return COPY_US + moved / (TURNED_MB_A_US if self.turned else COPIED_MB_A_US)


def pays(left: Operand, right: Operand, bias: bool = False) -> bool:
    """Whether torch.compile pads a product of (rows, k) by (k, columns)."""
    (m, k), n, groups = (left.rows, left.columns), right.columns, left.groups
    if not (left.is_padded or right.is_padded):
        return False
    lies = min(size & -size for size in (left.lies_by, right.lies_by, n))
    mflop = 2e-6 * groups * m * n * k
    as_it_is = FLOOR_US + mflop / MFLOP_A_US.get(lies, PADDED_MFLOP_A_US) + _mb(groups * (m * n + n * k + m * k)) / MB_A_US
    m, n, k = padded(m), padded(n), padded(k)
    product = 2e-6 * groups * m * n * k / PADDED_MFLOP_A_US + _mb(groups * (m * n + n * k + m * k)) / PADDED_MB_A_US
    return as_it_is > FASTER * (PADDED_FLOOR_US + product + BIAS_US * bias + left.copy_us() + right.copy_us())


def _mb(elements: float) -> float:
    return 2e-6 * elements


@dataclass
class Padding:
    """What is padded of one model, decided where it is first traced: at another batch the step is to be made of the same kernels.

    Attributes:
        decided: By what the graph calls a product.
    """

    decided: dict[str, bool] = field(default_factory=dict)

    @contextlib.contextmanager
    def as_compiled(self) -> Iterator[None]:
        """Let torch's own pass over a graph pad what `pays` says."""

        def should_pad(match: Any, left: Tensor, right: Tensor, op: Any, input: Tensor | None = None) -> bool:
            if left.dtype not in (torch.bfloat16, torch.float16):
                return False
            one, other = (
                _operand(tensor, pad_mm.should_exclude_padding_time(match, name))
                for tensor, name in ((left, "mat1"), (right, "mat2"))
            )
            return self.decided.setdefault(match.output_node().name, pays(one, other, input is not None))

        with patch.object(pad_mm, "should_pad", should_pad):
            yield


def _operand(tensor: Tensor, written_padded: bool) -> Operand:
    groups = tensor.shape[0] if tensor.dim() == 3 else 1
    rows, columns = tensor.shape[-2:]
    return Operand(rows, columns, groups, tensor.stride(-1) != 1 and tensor.stride(-2) == 1, written_padded)
