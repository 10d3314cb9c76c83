"""Gradient-boosted trees as plain arrays, and their sums by a compiled loop: bit for bit xgboost's, in a third of its time.

The loop is compiled when a prediction is first met that is large enough to pay for it (`perfmodel.compiled`); where it cannot be,
xgboost evaluates all trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perfmodel.compiled import at_hand, loops
from perfmodel.packed import Packed, Saved, inflate

# Of these a prediction is the plain sum of leaves.
_OBJECTIVES = ("reg:squarederror", "reg:absoluteerror")
# Of so few rows numpy makes a sum sooner than xgboost has read the trees: 256 of 660 trees in 16 ms, not 125. The loop, if it is
# compiled already, takes 2.
FEW_ROWS = 256
# What a node's number has room for.
_MOST_FEATURES, _MOST_NODES = 255, 1 << 24


@dataclass(frozen=True)
class Forest:
    """Trees one after the other.

    A leaf's left child is itself, and compares a feature that is less than every value: rows stay there.

    Attributes:
        features: That a row has.
        base: What the sum of leaves begins with.
        roots: Node that each tree starts at, int64.
        depths: Steps to each tree's deepest leaf, int64.
        nodes: (nodes, 2), uint32. Left child times 256, and the compared feature; the right child is the one behind the left.
            And the bits of the float32 that this is compared with: a row goes left where it is less. Of a leaf what it adds.
    """

    features: int
    base: np.float32
    roots: npt.NDArray[np.int64]
    depths: npt.NDArray[np.int64]
    nodes: npt.NDArray[np.uint32]

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
            and sizes.all()
            and features <= _MOST_FEATURES
            and len(inner) <= _MOST_NODES
            and (left + 1 < np.repeat(roots + sizes, sizes)[inner]).all()
            and (packed.features < features).all()
        ):
            return None
        child, compared = np.arange(len(inner)), np.full(len(inner), features)
        values = np.empty(len(inner), dtype=np.float32)
        child[inner], compared[inner], values[inner], values[~inner] = left, packed.features, packed.thresholds, packed.leaves
        depths, here, tree_of, depth = np.zeros(len(sizes), dtype=np.int64), roots, np.arange(len(sizes)), 0
        while len(here := here[kept := inner[here]]):
            depth, tree_of = depth + 1, tree_of[kept]
            depths[tree_of] = depth
            here, tree_of = np.concatenate([child[here], child[here] + 1]), np.concatenate([tree_of, tree_of])
        nodes = np.stack([(child << 8 | compared).astype(np.uint32), values.view(np.uint32)], axis=1)
        return cls(features, base, roots, depths, nodes)

    def sums(self, matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """The sum of the trees' leaves for each row of features, (rows,); no feature may be missing (NaN)."""
        loop: Any = at_hand()
        if loop is None and len(matrix) <= FEW_ROWS:
            return self._sums_of_few(matrix)
        loop = loop or loops()
        x = np.zeros((-(-len(matrix) // loop.IN_TURN) * loop.IN_TURN, self.features + 1), dtype=np.float32)
        x[: len(matrix), :-1], x[:, -1] = matrix, -np.inf
        total = np.full(len(x), self.base)
        loop.add_leaves(x, self.roots, self.depths, self.nodes, total)
        return total[: len(matrix)]

    def _sums_of_few(self, matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """The same by numpy, for so few rows that neither compiling nor handing the trees to xgboost pays."""
        x = np.full((len(matrix), self.features + 1), -np.inf, dtype=np.float32)
        x[:, :-1] = matrix
        rows, here = np.arange(len(x))[:, None], np.tile(self.roots, (len(x), 1))
        nodes, values = self.nodes[:, 0], self.nodes.view(np.float32)[:, 1]
        for _ in range(int(self.depths.max(initial=0))):
            node = nodes[here]
            here = (node >> 8) + (x[rows, node & 255] >= values[here])
        # One after the other, as xgboost adds them.
        leaves = np.column_stack([np.full(len(x), self.base), values[here]])
        return np.add.accumulate(leaves, axis=1, dtype=np.float32)[:, -1]
