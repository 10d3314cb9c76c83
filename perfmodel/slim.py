"""Trees without what neither a prediction nor its explanation needs; `perfmodel.packed` writes them in few bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from perfmodel.packed import Shape

# Bits of a leaf's value after the first: the trees' sum is then off by a few millionths.
LEAF_BITS = 11
# Of a leaf's number of rows, by which an explanation weighs its branches.
SHARE_BITS = 6


def slim(booster: Any) -> bytes:
    """A booster as UBJSON, its leaves rounded, without what only its training looked at.

    A node has as many rows as its leaves together. The growth of more trees on top of these, a prediction and an explanation
    work as before; importances by gain do not.

    Args:
        booster: A trained `xgboost.Booster`.
    """
    document = json.loads(bytes(booster.save_raw("json")))
    for tree in document["learner"]["gradient_booster"]["model"]["trees"]:
        left = np.asarray(tree["left_children"])
        leaf = left < 0
        value = _rounded(tree["split_conditions"], LEAF_BITS)
        tree["split_conditions"] = np.where(leaf, value, np.asarray(tree["split_conditions"], dtype=np.float32)).tolist()
        tree["base_weights"] = [0.0] * len(leaf)
        of_leaves = _rounded(np.asarray(tree["sum_hessian"])[leaf].tolist(), SHARE_BITS)
        tree["sum_hessian"] = Shape(~leaf, np.zeros(1, dtype=np.int64), left[~leaf]).summed(of_leaves).tolist()
        tree["loss_changes"] = [0.0] * len(leaf)
    smaller = type(booster)()
    smaller.load_model(bytearray(json.dumps(document).encode()))
    return bytes(smaller.save_raw("ubj"))


def _rounded(values: list[float], bits: int) -> npt.NDArray[np.float32]:
    """To so many bits after the first one, halves away from zero."""
    dropped = np.uint32(23 - bits)
    whole = np.asarray(values, dtype=np.float32).view(np.uint32)
    return ((whole + (np.uint32(1) << (dropped - np.uint32(1)))) >> dropped << dropped).view(np.float32)
