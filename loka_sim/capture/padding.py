"""Products that torch.compile pads: it times both ways on the GPU and takes the faster one (`fx_passes/pad_mm.py`, 2.11, 2.13).

cuBLAS runs a product whose rows in memory are no multiple of 16 bytes by older kernels. torch.compile copies such operands into
multiples of 8 elements, with zeros behind, where the product with these copies is over a tenth faster. Here both times are told.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from loka_sim.modelspec import padded

FASTER = 1.1  # pad_mm.is_padded_faster: padding takes memory operations that its timing does not see


class Costs(NamedTuple):
    """What torch's timing is told by, in us, MFLOP a us and MB a us: where a number stands behind, of rows that lie by so many.

    While torch compiles, the CPU takes long for a call: a product's own time counts where it is longer.
    """

    call: float
    padded_call: float
    copy_call: float
    fill_call: float
    bias_calls: float
    multiplied_1: float
    multiplied_2: float
    multiplied_4: float
    moved: float
    multiplied_padded: float
    copied: float
    turned: float


FLOOR_US = 6.0
TILE = 64  # what a kernel multiplies at a time, at the least
# Of an H200 and the CPU of its host: `python benchmarks/padding.py fit`.
H200 = Costs(28.5, 46.7, 47.5, 33.1, 48.5, 91.7, 162, 175, 6.69, 638, 1.46, 0.928)


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

    def copied_us(self, costs: Costs) -> float:
        """Microseconds of the GPU until it is there with its zeros."""
        if self.written_padded or not self.is_padded:
            return 0.0
        moved = 2e-6 * self.groups * (self.rows * self.columns + 2 * padded(self.rows) * padded(self.columns))
        return moved / (costs.turned if self.turned else costs.copied)

    def calls_us(self, costs: Costs) -> float:
        """Microseconds of the CPU for that."""
        return (costs.fill_call if self.written_padded else costs.copy_call) * self.is_padded


def timed(left: Operand, right: Operand, bias: bool = False, costs: Costs = H200) -> tuple[float, float]:
    """Microseconds that torch finds of a product of (rows, k) by (k, columns) as it is, and padded."""
    m, n, k, groups = left.rows, right.columns, left.columns, left.groups
    lie = min(size & -size for size in (left.lies_by, right.lies_by, n, 8))
    multiplied = costs.multiplied_padded if lie == 8 else getattr(costs, f"multiplied_{lie}")
    in_tiles = [-(-size // TILE) * TILE for size in (m, n, k)]
    as_it_is = _gpu_us(groups, in_tiles, multiplied, costs.moved)
    product = _gpu_us(groups, [padded(m), padded(n), padded(k)], costs.multiplied_padded, math.inf)
    calls = costs.padded_call + left.calls_us(costs) + right.calls_us(costs) + costs.bias_calls * (bias and n != padded(n))
    return max(costs.call, as_it_is), max(calls, product + left.copied_us(costs) + right.copied_us(costs))


def pays(left: Operand, right: Operand, bias: bool = False) -> bool:
    """Whether torch.compile pads a product."""
    as_it_is, with_zeros = timed(left, right, bias)
    return (left.is_padded or right.is_padded) and as_it_is > FASTER * with_zeros


def _gpu_us(groups: int, sizes: Sequence[int], multiplied: float, moved: float) -> float:
    m, n, k = sizes
    return FLOOR_US + 2e-6 * groups * math.hypot(m * n * k / multiplied, (m * n + n * k + m * k) / moved)


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
        from torch._inductor.fx_passes import pad_mm

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
