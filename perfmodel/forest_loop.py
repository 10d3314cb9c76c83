"""The loop of `perfmodel.forest`, compiled by numba when first called and kept on disk for the next process.

Importing this module imports numba. A row goes from node to node by numbers alone, without a branch, several rows in turn, so
that the processor need not wait for one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

# Rows that go down a tree in turn, and rows that it serves before the next one comes into the cache.
IN_TURN = 16
_SERVED = 128


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        compiled: Any = njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no place on disk can be written to
        return njit(nogil=True)(function)
    keep = compiled._cache.save_overload

    def keep_if_there_is_room(*arguments: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk, a quota
            keep(*arguments)

    compiled._cache.save_overload = keep_if_there_is_room
    return compiled


@_compiled
def add_leaves(x, roots, depths, nodes, values, total):  # type: ignore[no-untyped-def]
    """Add the leaf that each row of x ends in, of one tree after the other, to its total.

    Args:
        x: Features, float32 (rows, features + 1), the last -inf; rows are a multiple of `IN_TURN`.
        roots: uint32 (trees,), nodes that trees start at.
        depths: int64 (trees,), steps to the deepest leaf.
        nodes: uint32 (nodes,), the left child's number times 256, and the feature that is compared; see `forest.Forest`.
        values: float32 (nodes,), what it is compared with, or the leaf's value.
        total: float32 (rows,).
    """
    # Unsigned, so that no index is looked at for being counted from the end.
    at = np.empty(IN_TURN, np.uint32)
    rows = np.uint64(x.shape[0])
    for first in range(np.uint64(0), rows, np.uint64(_SERVED)):
        last = min(first + np.uint64(_SERVED), rows)
        for tree in range(roots.size):
            for start in range(first, last, np.uint64(IN_TURN)):
                at[:] = roots[tree]
                for _ in range(depths[tree]):
                    for turn in range(np.uint64(IN_TURN)):
                        node = nodes[at[turn]]
                        right = not x[start + turn, node & np.uint32(255)] < values[at[turn]]
                        at[turn] = (node >> np.uint32(8)) + np.uint32(right)
                for turn in range(np.uint64(IN_TURN)):
                    total[start + turn] += values[at[turn]]
