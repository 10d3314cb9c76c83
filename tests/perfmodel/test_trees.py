"""Trees evaluated through xgboost's library are xgboost's predictions, and its package is not imported for them."""

import subprocess
import sys

import numpy as np
import pytest
import xgboost

from perfmodel.trees import Trees


@pytest.fixture(scope="module")
def booster() -> xgboost.Booster:
    generator = np.random.default_rng(0)
    matrix = generator.uniform(-3, 3, (800, 6))
    target = np.sin(matrix[:, 0]) + matrix[:, 1] * (matrix[:, 2] > 0) + 0.7
    return xgboost.train({"max_depth": 5, "eta": 0.2, "seed": 0}, xgboost.DMatrix(matrix, target), 60)


@pytest.mark.parametrize("form", ["ubj", "json"])
def test_predictions_are_xgboosts(booster, form):
    matrix = np.random.default_rng(1).uniform(-4, 4, (3000, 6))
    matrix[5, 2] = np.nan
    trees = Trees(bytes(booster.save_raw(form)))
    assert trees.features == 6
    np.testing.assert_array_equal(trees.predict(matrix), booster.predict(xgboost.DMatrix(matrix)))
    # Rows of another order in memory, of another type, one row, none.
    np.testing.assert_array_equal(trees.predict(np.asfortranarray(matrix)), trees.predict(matrix))
    np.testing.assert_array_equal(trees.predict(matrix.astype(np.float32)[7:8]), trees.predict(matrix)[7:8])
    assert trees.predict(matrix[:0]).shape == (0,)


def test_an_earlier_result_stays_when_more_is_predicted(booster):
    trees = Trees(bytes(booster.save_raw("ubj")))
    first = trees.predict(np.ones((4, 6)))
    kept = first.copy()
    trees.predict(-np.ones((4, 6)))
    np.testing.assert_array_equal(first, kept)


def test_contributions_are_xgboosts_and_add_up(booster):
    matrix = np.random.default_rng(2).uniform(-3, 3, (50, 6))
    trees = Trees(bytes(booster.save_raw("ubj")))
    contributions = trees.contributions(matrix)
    np.testing.assert_array_equal(contributions, booster.predict(xgboost.DMatrix(matrix), pred_contribs=True))
    np.testing.assert_allclose(contributions.sum(axis=1), trees.predict(matrix), atol=1e-5)


def test_damaged_trees_and_wrong_widths_are_refused(booster):
    saved = bytes(booster.save_raw("ubj"))
    with pytest.raises(ValueError, match="xgboost refuses the trees"):
        Trees(saved[: len(saved) // 2])
    with pytest.raises(ValueError, match="fitted on 6 features"):
        Trees(saved).predict(np.ones((2, 5)))


def test_predicting_imports_neither_xgboost_nor_scipy():
    code = (
        "import sys, pandas as pd, perfmodel\n"
        "frame = pd.DataFrame({'kernel': ['torch/bf16'], 'm': [64], 'n': [64], 'k': [64]})\n"
        "assert perfmodel.load('h200').predict(frame)['time_us'][0] > 1\n"
        "print([name for name in ('xgboost', 'scipy', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
