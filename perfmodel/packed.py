"""Trees in three tenths of the bytes that xgboost's document of them takes compressed, and back to it to the byte.

Its arrays say most things more than once: whose child a node is, that the right child is the one behind the left, how many rows
a node has beside its children's. Here each is said once, and like stands by like: which nodes are leaves, the feature that each
other one compares and with which of that feature's few hundred thresholds, the leaves' values and numbers of rows, byte by byte.
Whatever else is in the document is kept as it stands. The result is UBJSON, too, compressed by gzip.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Nodes = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]

_GZIP = b"\x1f\x8b"
# A tree's arrays in the order of its document, and UBJSON's letters for what is in them.
_OF_A_TREE = {
    "base_weights": "d", "default_left": "U", "left_children": "l", "loss_changes": "d", "parents": "l", "right_children": "l",
    "split_conditions": "d", "split_indices": "l", "split_type": "U", "sum_hessian": "d",
}  # fmt: skip
_NUMBERS: dict[str, np.dtype[Any]] = {"l": np.dtype(">i4"), "d": np.dtype(">f4"), "U": np.dtype("u1")}
# What xgboost says of the root's parent, and of a leaf's children.
_NO_PARENT, _NO_CHILD = 2**31 - 1, -1
# Likewise of the packed document. `sizes` is how many nodes each tree has, `known` how many thresholds each feature.
_PACKED = {
    "rest": "U", "sizes": "l", "inner": "U", "features": "U", "known": "l", "thresholds": "d", "which": "U", "leaves": "U",
    "rows": "U",
}  # fmt: skip


class Shape(NamedTuple):
    """Which node of all trees, one behind the other, is whose child.

    Attributes:
        inner: Whether a node compares, (nodes,); the others are leaves.
        roots: Each tree's first node, (trees,).
        left: Of each inner node the left child, counted from the first of all nodes, (inner nodes,); the right one is behind it.
    """

    inner: npt.NDArray[np.bool_]
    roots: Nodes
    left: Nodes

    @classmethod
    def of(cls, inner: npt.NDArray[np.bool_], sizes: Nodes) -> Shape:
        """Of trees of so many nodes whose inner ones have their children in the order of the nodes, as xgboost numbers them."""
        roots = np.cumsum(sizes) - sizes
        before: Nodes = np.cumsum(inner) - inner
        left = np.repeat(roots + 1 - 2 * before[roots], sizes)[inner] + 2 * before[inner]
        return cls(inner, roots, left)

    def depths(self, sizes: Nodes) -> Nodes:
        """Steps from the root of each tree of so many nodes to its deepest leaf, (trees,)."""
        inner_before = np.concatenate([[0], np.cumsum(self.inner)])
        depths, begin, end = np.zeros(len(sizes), dtype=np.int64), self.roots, self.roots + 1
        # The nodes of a level lie one behind the other, and behind them those of the next.
        while (below := inner_before[end] - inner_before[begin]).any():
            depths += below > 0
            begin, end = end, end + 2 * below
        return depths

    def summed(self, of_leaves: Values) -> Values:
        """Of every node the sum of the leaves below it, (nodes,), each the sum of its two children's."""
        total = np.zeros(len(self.inner), dtype=np.float32)
        total[~self.inner] = of_leaves
        left = np.zeros(len(self.inner), dtype=np.int64)
        left[self.inner] = self.left
        levels, here = [], self.roots
        while len(here := here[self.inner[here]]):
            levels.append(here)
            here = np.concatenate([left[here], left[here] + 1])
        for here in reversed(levels):
            total[here] = total[left[here]] + total[left[here] + 1]
        return total


class Packed(NamedTuple):
    """What is kept of trees.

    Attributes:
        rest: Their document without what the trees' arrays hold.
        sizes: Nodes of each tree, (trees,).
        shape: Whose child each node is.
        features: What each inner node compares, (inner nodes,).
        thresholds: With what: a row goes left where it is less, (inner nodes,).
        leaves: What each leaf adds, (leaves,).
        rows: What each leaf has of the rows that taught it, (leaves,).
    """

    rest: bytes
    sizes: Nodes
    shape: Shape
    features: Nodes
    thresholds: Values
    leaves: Values
    rows: Values

    @classmethod
    def of(cls, inflated: bytes) -> Packed:
        """Of trees without gzip's compression, as `pack` made them or as xgboost's document.

        Raises:
            ValueError, IndexError: it is neither, is damaged, or its trees' nodes do more than compare, or have other children.
        """
        return cls._read(inflated) if inflated.startswith(_BEGINNING) else cls._kept(inflated)

    @classmethod
    def _read(cls, packed: bytes) -> Packed:
        saved = Saved(packed)
        part = {name: saved.array(name, letter) for name, letter in _PACKED.items()}
        sizes, features = part["sizes"].astype(np.int64), part["features"].astype(np.int64)
        shape = Shape.of(np.unpackbits(part["inner"], count=int(sizes.sum())).astype(bool), sizes)
        first = np.cumsum(part["known"]) - part["known"]
        thresholds = part["thresholds"].astype(np.float32)[first[features] + _whole(part["which"], np.uint16)]
        leaves, rows = (_whole(part[name], np.uint32).view(np.float32) for name in ("leaves", "rows"))
        return cls(part["rest"].tobytes(), sizes, shape, features, thresholds, leaves, rows)

    @classmethod
    def _kept(cls, document: bytes) -> Packed:
        saved, trees, parts, at = Saved(document), [], [], 0
        for _ in range(saved.trees()):
            tree = {}
            for name, letter in _OF_A_TREE.items():
                tree[name] = saved.array(name, letter)
                parts.append(document[at : saved.at - tree[name].nbytes])
                at = saved.at
            trees.append(tree)
        whole = {name: np.concatenate([tree[name] for tree in trees]) for name in _OF_A_TREE}
        if len({len(nodes) for nodes in whole.values()}) > 1 or whole["split_type"].any():
            raise ValueError("no trees of nodes that compare")
        sizes, inner = np.array([len(tree["parents"]) for tree in trees]), whole["left_children"] >= 0
        shape = Shape.of(inner, sizes)
        left = shape.left - np.repeat(shape.roots, sizes)[inner]
        if (left != whole["left_children"][inner]).any() or (left + 1 != whole["right_children"][inner]).any():
            raise ValueError("nodes have other children")
        features, values = whole["split_indices"][inner].astype(np.int64), whole["split_conditions"].astype(np.float32)
        rows = whole["sum_hessian"][~inner].astype(np.float32)
        return cls(b"".join([*parts, document[at:]]), sizes, shape, features, values[inner], values[~inner], rows)

    def written(self) -> bytes:
        """As UBJSON, for `_read`; raises ValueError of more features than a byte tells apart."""
        features = self.features
        if features.max(initial=0) > 255:
            raise ValueError("too many features")
        known = [np.unique(self.thresholds[features == feature]) for feature in range(features.max(initial=0) + 1)]
        which = np.empty(len(features), dtype=np.uint16)
        for feature, thresholds in enumerate(known):
            mine = features == feature
            which[mine] = np.searchsorted(thresholds, self.thresholds[mine])
        content = {
            "rest": self.rest,
            "sizes": self.sizes.astype(_NUMBERS["l"]).tobytes(),
            "inner": np.packbits(self.shape.inner).tobytes(),
            "features": features.astype(np.uint8).tobytes(),
            "known": np.array([len(thresholds) for thresholds in known], dtype=_NUMBERS["l"]).tobytes(),
            "thresholds": np.concatenate(known).astype(_NUMBERS["d"]).tobytes(),
            "which": _planes(which),
            "leaves": _planes(self.leaves.view(np.uint32)),
            "rows": _planes(self.rows.view(np.uint32)),
        }
        parts = [b"{"]
        for name, letter in _PACKED.items():
            number = len(content[name]) // _NUMBERS[letter].itemsize
            parts += [_marker(name, letter), b"L", struct.pack(">q", number), content[name]]
        return b"".join([*parts, b"}"])

    def document(self) -> bytes:
        """As xgboost reads and writes it; raises ValueError where the parts do not fit together."""
        (inner, roots, left), sizes = self.shape, self.sizes
        number, root = len(inner), np.repeat(roots, sizes)

        def nodes(of_inner: Any, of_leaves: Any) -> npt.NDArray[Any]:
            both = np.empty(number, dtype=np.result_type(of_inner, of_leaves))
            both[inner], both[~inner] = of_inner, of_leaves
            return both

        parents = np.full(number, _NO_PARENT)
        parents[left] = parents[left + 1] = (np.arange(number) - root)[inner]
        own = left - root[inner]
        filled = {
            "left_children": nodes(own, _NO_CHILD),
            "right_children": nodes(own + 1, _NO_CHILD),
            "parents": parents,
            "split_conditions": nodes(self.thresholds, self.leaves),
            "split_indices": nodes(self.features, 0),
            "sum_hessian": self.shape.summed(self.rows),
        }
        content = []
        for name, letter in _OF_A_TREE.items():
            kind = _NUMBERS[letter]
            content.append((_marker(name, letter), filled.get(name, np.zeros(number)).astype(kind).tobytes(), kind.itemsize))
        saved, parts, at = Saved(self.rest), [], 0
        saved.trees()
        for begin, size in zip(roots.tolist(), sizes.tolist(), strict=True):
            for marker, data, each in content:
                if saved.size(marker) != size:
                    raise ValueError("another number of nodes")
                parts += [self.rest[at : saved.at], data[begin * each : (begin + size) * each]]
                at = saved.at
        return b"".join([*parts, self.rest[at:]])


def pack(document: bytes) -> bytes:
    """Trees as a file holds them.

    Args:
        document: What `xgboost.Booster.save_raw("ubj")` gives.

    Returns:
        Compressed bytes, of which `unpack` makes the document again: packed, or as it is where that would lose anything.
    """
    try:
        packed = gzip.compress(Packed.of(document).written(), 9, mtime=0)
        if unpack(packed) == document:
            return packed
    except ValueError:
        pass
    return gzip.compress(document, 9, mtime=0)


def inflate(stored: bytes) -> bytes:
    """Stored trees without gzip's compression, if they have it.

    Raises:
        EOFError: they are truncated, or damaged so that they cannot be inflated.
    """
    if not stored.startswith(_GZIP):
        return stored
    try:
        # The last four bytes are the length. Memory of so many megabytes takes longer to get than to fill.
        return zlib.decompress(stored, wbits=31, bufsize=int.from_bytes(stored[-4:], "little") or 1)
    except (MemoryError, OverflowError, zlib.error) as error:
        raise EOFError("the trees are truncated") from error


def is_packed(stored: bytes) -> bool:
    """Whether `pack` made that of trees, and packed them; of what is damaged, whether it begins so."""
    if not stored.startswith(_GZIP):
        return stored.startswith(_BEGINNING)
    try:
        return zlib.decompressobj(wbits=31).decompress(stored, len(_BEGINNING)) == _BEGINNING
    except zlib.error:
        return False


def unpack(stored: bytes) -> bytes:
    """The document of stored trees, as xgboost reads it.

    Args:
        stored: What `pack` made, or a document itself, as UBJSON or JSON, compressed by gzip or not.

    Raises:
        EOFError: it is truncated, or damaged so that it cannot be unpacked.
    """
    inflated = inflate(stored)
    if not inflated.startswith(_BEGINNING):
        return inflated
    try:
        return Packed.of(inflated).document()
    except (IndexError, ValueError) as error:
        raise EOFError("the trees are damaged") from error


def _planes(numbers: npt.NDArray[np.unsignedinteger]) -> bytes:
    """All first bytes of numbers, then all second ones, and so on."""
    return numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize).T.tobytes()


def _whole(planes: npt.NDArray[np.uint8], kind: type[np.unsignedinteger]) -> npt.NDArray[Any]:
    """The numbers of their bytes' planes."""
    return np.ascontiguousarray(planes.reshape(np.dtype(kind).itemsize, -1).T).view(kind).ravel()


class Saved:
    """A UBJSON document that is read from its beginning to its end, most of it skipped; numbers in it are big-endian."""

    def __init__(self, saved: bytes) -> None:
        """Begin."""
        self.saved, self.at = saved, 0

    def trees(self) -> int:
        """The number of xgboost's trees, which come next."""
        self.skip(_key("gradient_booster") + b"{" + _key("model") + b"{")
        return self.size(_key("trees") + b"[#")

    def skip(self, marker: bytes) -> None:
        """Go on behind a marker.

        Raises:
            ValueError: it does not come any more.
        """
        self.at = self.saved.index(marker, self.at) + len(marker)

    def skip_key(self, name: str) -> None:
        """Go on inside a key's object; raises as `skip`."""
        self.skip(_key(name) + b"{")

    def size(self, marker: bytes) -> int:
        """The length behind a marker.

        Raises:
            ValueError: there is none.
        """
        self.skip(marker)
        found = int.from_bytes(self.saved[self.at + 1 : self.at + 9], "big")
        if self.saved[self.at : self.at + 1] != b"L":
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
        if not 0 <= count <= len(self.saved):
            raise ValueError("longer than the document")
        self.at += count * kind.itemsize
        return np.frombuffer(self.saved, kind, count, self.at - count * kind.itemsize)


def _key(name: str) -> bytes:
    return b"L" + struct.pack(">q", len(name)) + name.encode()


@cache
def _marker(name: str, letter: str) -> bytes:
    return _key(name) + f"[${letter}#".encode()


# How `pack`'s begins.
_BEGINNING = b"{" + _marker("rest", "U")
