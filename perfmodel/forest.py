"""Gradient-boosted trees as plain arrays, and their sums by a compiled loop: bit for bit xgboost's, in a third of its time.

The loop is compiled when a prediction is first met that is large enough to pay for it (`perfmodel.compiled`); where it cannot be,
xgboost evaluates all trees.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from perfmodel.compiled import loops

# Of these a prediction is the plain sum of leaves.
_OBJECTIVES = ("reg:squarederror", "reg:absoluteerror")
# What a node's number has room for.
_MOST_FEATURES, _MOST_NODES = 255, 1 << 24
# Arrays of a tree in the order of its document, and UBJSON's letters for what is in them.
_OF_A_TREE = (
    ("left_children", "l"), ("right_children", "l"), ("split_conditions", "d"), ("split_indices", "l"), ("split_type", "U"),
)  # fmt: skip
_NUMBERS: dict[str, np.dtype[Any]] = {"l": np.dtype(">i4"), "d": np.dtype(">f4"), "U": np.dtype("u1")}


@dataclass(frozen=True)
class Forest:
    """Trees one after the other.

    A leaf's left child is itself, and compares a feature that is less than every value: rows stay there.

    Attributes:
        features: That a row has.
        base: What the sum of leaves begins with.
        roots: Node that each tree starts at, int64.
        depths: Steps to each tree's deepest leaf, int64.
        nodes: Left child times 256, and the compared feature, uint32; the right child is the one behind the left.
        values: What it is compared with: a row goes left where it is less. Of a leaf what it adds, float32.
    """

    features: int
    base: np.float32
    roots: npt.NDArray[np.int64]
    depths: npt.NDArray[np.int64]
    nodes: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float32]

    @classmethod
    def of(cls, saved: bytes) -> Forest | None:
        """Trees that `xgboost.Booster.save_raw` saved as UBJSON.

        Returns:
            None where they are no sums of plain leaves, more than a node has room for, or not written as expected: xgboost then
            says what they are.
        """
        try:
            found = _Saved(saved)
            found.skip(_key("gradient_booster") + b"{" + _key("model") + b"{")
            count = found.size(_key("trees") + b"[#")
            trees = [[found.array(name, letter) for name, letter in _OF_A_TREE] for _ in range(count)]
            found.skip(_key("learner_model_param") + b"{")
            base, features = np.float32(found.word("base_score").strip("[]")), int(found.word("num_feature"))
            single = found.word("num_target") == "1"
            found.skip(_key("objective") + b"{")
            plain = single and found.word("name") in _OBJECTIVES
            sizes = np.array([len(tree[0]) for tree in trees])
            left, right, values, compared, kinds = (np.concatenate(part) for part in zip(*trees, strict=True))
        except ValueError:
            return None
        leaf, roots, tree_of = left < 0, np.cumsum(sizes) - sizes, np.repeat(np.arange(count), sizes)
        inner, own = ~leaf, np.arange(len(left))
        child = np.where(leaf, own, left + roots[tree_of])
        if not (
            plain
            and sizes.all()
            and features <= _MOST_FEATURES
            and len(left) <= _MOST_NODES
            and len(left) == len(right) == len(values) == len(compared) == len(kinds)
            and not kinds.any()
            and (right == left + 1)[inner].all()
            and (child > own)[inner].all()
            and (left + 1 < sizes[tree_of])[inner].all()
            and (compared < features)[inner].all()
        ):
            return None
        depths, here, depth = np.zeros(count, dtype=np.int64), roots, 0
        while len(here := here[inner[here]]):
            depth += 1
            depths[tree_of[here]] = depth
            here = np.concatenate([child[here], child[here] + 1])
        nodes = (child << 8 | np.where(leaf, features, compared)).astype(np.uint32)
        return cls(features, base, roots, depths, nodes, values.astype(np.float32))

    def sums(self, matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """The sum of the trees' leaves for each row of features, (rows,); no feature may be missing (NaN)."""
        loop: Any = loops()
        x = np.zeros((-(-len(matrix) // loop.IN_TURN) * loop.IN_TURN, self.features + 1), dtype=np.float32)
        x[: len(matrix), :-1], x[:, -1] = matrix, -np.inf
        total = np.full(len(x), self.base)
        loop.add_leaves(x, self.roots, self.depths, self.nodes, self.values, total)
        return total[: len(matrix)]


class _Saved:
    """A UBJSON document that is read from its beginning to its end, most of it skipped; numbers in it are big-endian."""

    def __init__(self, saved: bytes) -> None:
        """Begin."""
        self.saved, self.at = saved, 0

    def skip(self, marker: bytes) -> None:
        """Go on behind a marker.

        Raises:
            ValueError: it does not come any more.
        """
        self.at = self.saved.index(marker, self.at) + len(marker)

    def size(self, marker: bytes) -> int:
        """The length behind a marker.

        Raises:
            ValueError: there is none.
        """
        self.skip(marker)
        found = int.from_bytes(self.saved[self.at + 1 : self.at + 9], "big")
        if self.saved[self.at : self.at + 1] != b"L" or found > len(self.saved):
            raise ValueError("no length")
        self.at += 9
        return found

    def word(self, name: str) -> str:
        """The text of a key's value.

        Raises:
            ValueError: there is no such key.
        """
        length = self.size(_key(name) + b"S")
        self.at += length
        return self.saved[self.at - length : self.at].decode()

    def array(self, name: str, letter: str) -> npt.NDArray[Any]:
        """A key's array of numbers of a type.

        Raises:
            ValueError: there is no such key, or the document ends before its array does.
        """
        count, kind = self.size(_marker(name, letter)), _NUMBERS[letter]
        self.at += count * kind.itemsize
        return np.frombuffer(self.saved, kind, count, self.at - count * kind.itemsize)


def _key(name: str) -> bytes:
    return b"L" + struct.pack(">q", len(name)) + name.encode()


@cache
def _marker(name: str, letter: str) -> bytes:
    return _key(name) + f"[${letter}#".encode()
