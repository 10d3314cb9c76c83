"""Slim trees predict, explain and grow on as xgboost's own do."""

import gzip
import json

import numpy as np
import pytest
import xgboost

from perfmodel.packed import pack
from perfmodel.slim import slim


def trees_of(booster: xgboost.Booster) -> list[dict]:
    return json.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]["model"]["trees"]


@pytest.fixture(scope="module")
def rows() -> xgboost.DMatrix:
    matrix = np.random.default_rng(0).uniform(-3, 3, (4000, 6))
    return xgboost.DMatrix(matrix, np.sin(matrix[:, 0]) + matrix[:, 1] * (matrix[:, 2] > 0) + 0.7)


@pytest.fixture(scope="module")
def booster(rows) -> xgboost.Booster:
    return xgboost.train({"max_depth": 9, "eta": 0.2, "seed": 0}, rows, 60)


@pytest.fixture(scope="module")
def smaller(booster) -> xgboost.Booster:
    result = xgboost.Booster()
    result.load_model(bytearray(slim(booster)))
    return result


def test_predictions_stay(booster, smaller, rows):
    """Leaves are off by 2^-12 of their size at most, each tree's by less than the last one's."""
    whole, half = booster.predict(rows), smaller.predict(rows)
    assert not np.array_equal(whole, half)
    np.testing.assert_allclose(half, whole, atol=2**-12 * 3)


def test_explanations_stay(booster, smaller, rows):
    some = rows.slice(np.arange(0, rows.num_row(), 10))
    whole, half = booster.predict(some, pred_contribs=True), smaller.predict(some, pred_contribs=True)
    np.testing.assert_allclose(half, whole, atol=0.02)
    np.testing.assert_allclose(half.sum(axis=1), smaller.predict(some), atol=1e-4)


def test_more_trees_grow_on_top(booster, smaller, rows):
    both = [xgboost.train({"max_depth": 3, "seed": 0}, rows, 5, xgb_model=start).predict(rows) for start in (booster, smaller)]
    assert np.abs(both[0] - both[1]).max() < 0.01


def test_it_takes_less_room(booster):
    """Packed, which loses nothing more, less still."""
    whole = bytes(booster.save_raw("ubj"))
    sizes = [len(stored) for stored in (gzip.compress(whole, 9), gzip.compress(slim(booster), 9), pack(slim(booster)))]
    assert sizes[1] < 0.75 * sizes[0] and sizes[2] < 0.35 * sizes[0]


def test_every_node_has_its_childrens_rows(booster, smaller):
    """Not its own, rounded: what is kept of the leaves' says it."""
    for one, other in zip(*(trees_of(b) for b in (booster, smaller)), strict=True):
        left, rows = np.array(other["left_children"]), np.array(other["sum_hessian"])
        inner = left >= 0
        np.testing.assert_array_equal(rows[inner], rows[left[inner]] + rows[left[inner] + 1])
        np.testing.assert_allclose(rows, one["sum_hessian"], rtol=2**-6)
