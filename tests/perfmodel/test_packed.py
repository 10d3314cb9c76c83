"""Packed trees: xgboost's document again to the byte, or the document itself; a UBJSON that another library reads."""

import gzip
import json
import random

import numpy as np
import pytest
import xgboost

from perfmodel.packed import Packed, inflate, is_packed, pack, unpack
from perfmodel.slim import slim
from perfmodel.trees import Trees


def trained(rounds: int = 30, *, rows: int = 3000, weights: bool = False, **parameters) -> xgboost.Booster:
    generator = np.random.default_rng(0)
    matrix = generator.uniform(-3, 3, (rows, 6)).astype(np.float32)
    matrix[:, 3] = generator.integers(0, 5, rows)
    target = np.sin(3 * matrix[:, 0]) + matrix[:, 1] * (matrix[:, 2] > 0) + 0.3 * matrix[:, 3] + 0.7
    weight = generator.uniform(0.3, 1, rows) if weights else None
    data = xgboost.DMatrix(matrix, target, weight=weight, feature_names=[f"f{i}" for i in range(6)])
    return xgboost.train({"max_depth": 7, "eta": 0.2, "seed": 0, **parameters}, data, rounds)


@pytest.mark.parametrize(
    "parameters",
    [
        {}, {"max_depth": 12, "objective": "reg:absoluteerror", "subsample": 0.7}, {"max_depth": 1}, {"weights": True},
        {"rounds": 1}, {"rounds": 3, "min_child_weight": 1e9},
    ],
)  # fmt: skip
def test_slim_trees_come_back_to_the_byte(parameters):
    document = slim(trained(**parameters))
    stored = pack(document)
    assert inflate(stored) != document and unpack(stored) == document
    assert is_packed(stored) and is_packed(inflate(stored)) and not is_packed(document) and not is_packed(gzip.compress(document))
    # No time of making, no name: the same trees are the same file.
    assert pack(document) == stored


@pytest.mark.parametrize("parameters", [{}, {"grow_policy": "lossguide", "max_leaves": 40}, {"gamma": 2.0}, {"booster": "dart"}])
def test_what_would_lose_something_is_kept_as_it_is(parameters):
    """Not slim, their gains and their nodes' means are there; or nodes have their children elsewhere."""
    document = bytes(trained(**parameters).save_raw("ubj"))
    stored = pack(document)
    assert inflate(stored) == unpack(stored) == document


def test_documents_are_read_as_they_are():
    """Of calibrations that an earlier version wrote."""
    booster = trained()
    document = slim(booster)
    for stored in (document, gzip.compress(document), bytes(booster.save_raw("json"))):
        assert unpack(stored) == (gzip.decompress(stored) if stored[:2] == b"\x1f\x8b" else stored)
    matrix = np.random.default_rng(1).uniform(-3, 3, (50, 6))
    by_either = [Trees(stored) for stored in (document, pack(document))]
    np.testing.assert_array_equal(*(trees.predict(matrix) for trees in by_either))
    np.testing.assert_array_equal(*(trees.contributions(matrix) for trees in by_either))
    assert not is_packed(b"\x1f\x8b no gzip")


def test_growth_goes_on_from_what_was_packed():
    document = slim(trained())
    matrix = np.random.default_rng(1).uniform(-3, 3, (500, 6)).astype(np.float32)
    data = xgboost.DMatrix(matrix, matrix[:, 0], feature_names=[f"f{i}" for i in range(6)])
    grown = []
    for stored in (document, unpack(pack(document))):
        start = xgboost.Booster()
        start.load_model(bytearray(stored))
        grown.append(bytes(xgboost.train({"seed": 0}, data, 5, xgb_model=start).save_raw("ubj")))
    assert grown[0] == grown[1]


def test_the_parts_are_the_trees():
    """Against xgboost's own JSON, read by the standard library."""
    booster = trained()
    trees = json.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]["model"]["trees"]
    found = Packed.of(inflate(pack(slim(booster))))
    left = [np.array(tree["left_children"]) for tree in trees]
    assert found.sizes.tolist() == [len(nodes) for nodes in left]
    assert found.shape.inner.tolist() == [child >= 0 for nodes in left for child in nodes]
    compared = [
        (feature, np.float32(value))
        for tree, nodes in zip(trees, left, strict=True)
        for feature, value, child in zip(tree["split_indices"], tree["split_conditions"], nodes, strict=True)
        if child >= 0
    ]
    assert list(zip(found.features.tolist(), found.thresholds, strict=True)) == compared


def test_any_damage_is_told():
    """Of the compressed file by gzip's sum; of what is in it, the parts that do not fit together."""
    stored = pack(slim(trained(10)))
    inflated = inflate(stored)
    chance = random.Random(0)
    for end in (3, len(stored) // 2, len(stored) - 1):
        with pytest.raises(EOFError):
            unpack(stored[:end])
    for end in chance.sample(range(40, len(inflated) - 1), 40):
        with pytest.raises(EOFError):
            unpack(inflated[:end])
        with pytest.raises((EOFError, ValueError)):
            Trees(inflated[:end])
    place = inflated.index(b"sizes[$l#L") + len(b"sizes[$l#L") + 8
    wrong = inflated[:place] + (1).to_bytes(4, "big") + inflated[place + 4 :]
    with pytest.raises(EOFError):
        unpack(wrong)
