"""Two operands of a GEMM as they meet, before anything is rounded but the outputs: what all its recipes have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from numerics.distributions import TensorStatistics
from numerics.errors import MERE_FLOOR
from numerics.gradient import GradientSignal
from numerics.outputs import Meeting, Outputs, densities, outputs_of, rounding
from numerics.pair import PairStatistics

Array = npt.NDArray[np.float64]

# Records that are stretched are so up to here; beyond it a feature stands for several of its kind.
_WIDEST = 2**14
# Pairs whose sizes of outputs are worked on at once: few enough for a core's cache.
_AT_ONCE = 128


class Pair(NamedTuple):
    """The operands of a GEMM, whatever they are rounded to."""

    a: TensorStatistics
    b: TensorStatistics
    shape: tuple[int, ...]
    signal: GradientSignal | None
    pair: PairStatistics | None
    output: str

    @property
    def known(self) -> PairStatistics | None:
        """What was seen of the two together, as far as it belongs to this GEMM."""
        belongs = self.pair is None or self.a.contraction == "rows" or self.pair.shape[1:] == self.shape[1:]
        return self.pair if belongs else None

    def meeting(self) -> Meeting:
        """As `numerics.outputs` takes it.

        Raises:
            ValueError: as `predict_gemm_error`.
        """
        if self.a.contraction != self.b.contraction:
            raise ValueError(f"a is contracted along {self.a.contraction} and b along {self.b.contraction}; orient both alike")
        m, n, k = self.shape
        over_features = self.a.contraction == "features"
        if over_features and self.signal is not None:
            raise ValueError("a gradient's signal belongs to operands contracted along rows; orient both by along_rows()")
        widths = _width(k if over_features else m, self.a, self.b), _width(k if over_features else n, self.a, self.b)
        seen = self.known.power if self.known is not None and over_features else None
        return Meeting(self.a, self.b, widths, k, self.signal, seen)


@dataclass(frozen=True, eq=False)
class Products:
    """Pairs of operands as they meet in GEMMs, before anything is rounded but their outputs, at equally many sizes of outputs.

    Attributes:
        outputs: What each pair sums to.
        pairs: What was seen of each pair together.
        sums: Power of y over that of independent products, (pairs,).
        coupling: How far the error's power follows y^2, (pairs,).
        sizes: Sizes |y|, in the outputs' root mean square, (pairs, sizes).
        weights: What an error counts at each size in the mean relative error: the size's share over the size, or over the
            floor of the outputs' rows where it is below that.
        rounded: Mean square error of rounding an output of each size, over the mean square of all.
        rounding: Of all of them, (pairs,).
        nearness: Mean relative error of noise whose power is 1 in that of the outputs, (pairs,).
    """

    outputs: Sequence[Outputs]
    pairs: Sequence[PairStatistics | None]
    sums: Array
    coupling: Array
    sizes: Array
    weights: Array
    rounded: Array
    rounding: Array
    nearness: Array

    @classmethod
    def of(cls, asked: Sequence[tuple[Outputs, PairStatistics | None]], output: str) -> Products:
        """Outputs, all far from zero or none, rounded to a format; and what was seen of their operands together."""
        outputs, known = zip(*asked, strict=True)
        sizes, share = densities(outputs)
        rounded = rounding(outputs, sizes, output)
        whole = (rounded * share).sum(1)
        if output == "bf16":
            seen = np.array([math.nan if pair is None else pair.rounding for pair in known])
            replaced = ~np.isnan(seen) & (whole > 0)
            rounded[replaced] *= (seen[replaced] / whole[replaced])[:, None]
            whole[replaced] = seen[replaced]
        floors = MERE_FLOOR / np.stack([each.spread for each in outputs])
        weights = np.empty(share.shape)
        for start in range(0, len(asked), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            weights[some] = share[some] * (1.0 / np.maximum(sizes[some, None, :], floors[some, :, None])).mean(1)
        sums = np.array([each.power / max(each.independent, 1e-300) for each in outputs])
        coupling = np.array([each.coupling for each in outputs])
        deviation = np.sqrt((1 - coupling)[:, None] + coupling[:, None] * sizes**2)
        nearness = math.sqrt(2.0 / math.pi) * (deviation * weights).sum(1)
        return cls(outputs, known, sums, coupling, sizes, weights, rounded, whole, nearness)


Placed = tuple[dict[tuple[bool, str], Products], list[tuple[tuple[bool, str], int] | None]]
"""Pairs that are worked on together, and of each pair which group and place; None where its outputs are all zero, and stay so."""


def products_of(asked: Sequence[Pair]) -> Placed:
    """Distinct pairs as they meet."""
    alike: dict[tuple[bool, str], dict[tuple[Outputs, PairStatistics | None], int]] = {}
    places: list[tuple[tuple[bool, str], int] | None] = []
    for pair, outputs in zip(asked, outputs_of([pair.meeting() for pair in asked]), strict=True):
        if outputs.power > 0:
            group = outputs.far, pair.output
            some = alike.setdefault(group, {})
            places.append((group, some.setdefault((outputs, pair.known), len(some))))
        else:
            places.append(None)
    return {group: Products.of(list(some), group[1]) for group, some in alike.items()}, places


def _width(features: int, a: TensorStatistics, b: TensorStatistics) -> int:
    """How wide records are made for an axis of so many features: no wider than was measured, or than serves."""
    return min(features, max(_WIDEST, a.origin.features, b.origin.features))
