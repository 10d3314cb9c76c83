"""Gradient-boosted trees as plain arrays, and their sums by a compiled loop: bit for bit xgboost's, in a third of its time.

The loop is compiled when a prediction is first met that is large enough to pay for it (`perfmodel.compiled`); where it cannot be,
xgboost evaluates all trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perfmodel.compiled import AT_ONCE, at_hand, loops
from perfmodel.loop_texts import ABOVE_FEATURE, IN_TURN
from perfmodel.packed import Packed, Saved, inflate

# Of these a prediction is the plain sum of leaves.
_OBJECTIVES = ("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror")
# Of so few rows numpy makes a sum sooner than xgboost has read the trees: 256 of 660 trees in 16 ms, not 125. The loop, if it is
# compiled already, takes 2.
FEW_ROWS = 256
# What a node's number has room for: features, and nodes of a tree.
_MOST_FEATURES, _MOST_NODES = 255, 1 << 16
# The bit of a node's number at which its value begins.
_VALUE = 32
# Bytes of a feature in a group of rows.
_FEATURE_BYTES = 4 * AT_ONCE


@dataclass(frozen=True)
class Forest:
    """Trees one after the other.

    Values are compared as whole numbers in their order (`_in_order`). A leaf's left child is itself, and compares what is 0 in
    every row: rows stay there.

    Attributes:
        features: That a row has.
        base: What the sum of leaves begins with.
        roots: Node that each tree starts at, int64.
        depths: Steps to each tree's deepest leaf, int64.
        nodes: (nodes,), uint64. Where the compared feature lies in a group, 16 bits; the left child, counted from the root, 16
            bits, the right child is the one behind it; and what is compared with, 32 bits: a row goes left where it has less. Of
            a leaf the bits of what it adds, as float32.
    """

    features: int
    base: np.float32
    roots: npt.NDArray[np.int64]
    depths: npt.NDArray[np.int64]
    nodes: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, stored: bytes) -> Forest | None:
        """Trees as a file holds them (`perfmodel.packed`), or as `xgboost.Booster.save_raw` saved them as UBJSON.

        Returns:
            None where they are no sums of plain leaves, more than a node has room for, or not written as expected: xgboost then
            says what they are.

        Raises:
            EOFError: they are truncated.
        """
        inflated = inflate(stored)
        try:
            packed = Packed.of(inflated)
            found = Saved(packed.rest)
            found.skip_key("learner_model_param")
            base, features = np.float32(found.word("base_score").strip("[]")), int(found.word("num_feature"))
            single = found.word("num_target") == "1"
            found.skip_key("objective")
            plain = single and found.word("name") in _OBJECTIVES
        except (IndexError, ValueError):
            return None
        (inner, roots, left), sizes = packed.shape, packed.sizes
        if not (
            plain
            and len(sizes)
            and sizes.all()
            and features <= _MOST_FEATURES
            and sizes.max() <= _MOST_NODES
            and (left + 1 < np.repeat(roots + sizes, sizes)[inner]).all()
            and (packed.features < features).all()
        ):
            return None
        first, parts = np.repeat(roots.astype(np.uint32), sizes), np.empty((len(inner), 2), dtype=np.uint32)
        lower, values = parts.T
        lower[:] = (np.arange(len(inner), dtype=np.uint32) - first) << ABOVE_FEATURE | np.uint32(features * _FEATURE_BYTES)
        at = np.flatnonzero(inner)
        lower[at] = (left.astype(np.uint32) - first[at]) << ABOVE_FEATURE | packed.features.astype(np.uint32) * _FEATURE_BYTES
        values[at] = _in_order(packed.thresholds)
        # A leaf that adds 0 adds -0: 0 would not be less than its bits.
        values[~inner] = np.where(packed.leaves == 0, np.float32(-0.0), packed.leaves).view(np.uint32)
        # As numbers, the upper half of which is behind the lower one.
        nodes = parts.astype("<u4", copy=False).view("<u8")[:, 0].astype(np.uint64, copy=False)
        return cls(features, base, roots, packed.shape.depths(sizes), nodes)

    def sums(self, matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """The sum of the trees' leaves for each row of features, (rows,); no feature may be missing (NaN)."""
        loop: Any = at_hand()
        if loop is None and len(matrix) <= FEW_ROWS:
            return self._sums_of_few(matrix)
        loop = loop or loops()
        x = np.zeros((-(-len(matrix) // IN_TURN) * IN_TURN, self.features + 1), dtype=np.uint32)
        x[: len(matrix), :-1] = _in_order(matrix)
        groups = np.ascontiguousarray(x.reshape(-1, AT_ONCE, x.shape[1]).transpose(0, 2, 1))
        total = np.full(len(x), self.base)
        loop.add_leaves(groups, self.roots, self.depths, self.nodes, total)
        return total[: len(matrix)]

    def _sums_of_few(self, matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """The same by numpy, for so few rows that neither compiling nor handing the trees to xgboost pays."""
        x = np.zeros((len(matrix), self.features + 1), dtype=np.uint32)
        x[:, :-1] = _in_order(matrix)
        row, here = np.arange(len(x))[:, None] * x.shape[1], np.tile(self.roots, (len(x), 1))
        lower, values = self.nodes.astype("<u8", copy=False).view("<u4").reshape(-1, 2).T
        below, shift = (1 << ABOVE_FEATURE) - 1, _FEATURE_BYTES.bit_length() - 1
        for _ in range(int(self.depths.max(initial=0))):
            node = lower[here]
            here = self.roots + (node >> ABOVE_FEATURE) + (x.take(row + ((node & below) >> shift)) >= values[here])
        # One after the other, as xgboost adds them.
        leaves = np.column_stack([np.full(len(x), self.base), values[here].view(np.float32)])
        return np.add.accumulate(leaves, axis=1, dtype=np.float32)[:, -1]


def _in_order(values: npt.NDArray[np.floating]) -> npt.NDArray[np.uint32]:
    """Numbers from 1 on that stand to each other as float32 values do, none of which is NaN; 0 and -0 are the same."""
    bits = (values.astype(np.float32, copy=False) + np.float32(0)).view(np.int32)
    return (bits ^ (bits >> 31 | np.int32(-(2**31)))).view(np.uint32)
