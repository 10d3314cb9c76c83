"""Trees summed by the compiled loop: xgboost's predictions to the last bit, and nothing where they would not be."""

import gzip
import json
import subprocess
import sys
from dataclasses import astuple

import numpy as np
import pytest
import xgboost

from perfmodel import compiled as compiling
from perfmodel import loop_texts
from perfmodel.forest import Forest
from perfmodel.packed import Packed, pack
from perfmodel.trees import Trees


def trained(rows: int = 3000, rounds: int = 40, **parameters) -> xgboost.Booster:
    generator = np.random.default_rng(0)
    matrix = generator.uniform(-3, 3, (rows, 6)).astype(np.float32)
    target = np.sin(3 * matrix[:, 0]) + matrix[:, 1] * (matrix[:, 2] > 0) + 0.7
    return xgboost.train({"max_depth": 5, "eta": 0.2, "seed": 0, **parameters}, xgboost.DMatrix(matrix, target), rounds)


@pytest.mark.parametrize("rows", [1, 17, 256, 257, 5003])
@pytest.mark.parametrize(
    "parameters",
    [{}, {"max_depth": 12, "objective": "reg:absoluteerror"}, {"objective": "reg:pseudohubererror"}, {"max_depth": 1}],
)
def test_sums_are_xgboosts(parameters, rows):
    booster = trained(**parameters)
    saved = bytes(booster.save_raw("ubj"))
    found, packed = Forest.of(saved), Forest.of(pack(saved))
    assert found is not None and found.features == 6 and len(found.roots) == 40
    assert packed is not None and all(np.array_equal(*both) for both in zip(astuple(found), astuple(packed), strict=True))
    matrix = np.random.default_rng(1).uniform(-4, 4, (rows, 6)).astype(np.float32)
    # On the very edges of splits, where left and right are a bit apart.
    edges = np.random.default_rng(2).choice(Packed.of(saved).thresholds, matrix.shape)
    for some in (matrix, edges):
        np.testing.assert_array_equal(found.sums(some), booster.predict(xgboost.DMatrix(some)))
        np.testing.assert_array_equal(found._sums_of_few(some), found.sums(some))


@pytest.mark.parametrize("by_vectors", [False, True])
def test_rows_go_down_by_themselves_as_by_vectors(by_vectors, monkeypatch):
    """Whichever is faster on the processor at hand; more rows than are served at once, values that are 0, -0 or the largest."""
    loops = compiling.loops()
    assert loops is not None
    add_leaves, *_, kept = loops._compiled(by_vectors)
    monkeypatch.setattr(loops, "_add_leaves", add_leaves)
    booster = trained(max_depth=12)
    found = Forest.of(bytes(booster.save_raw("ubj")))
    matrix = np.random.default_rng(1).uniform(-4, 4, (2 * loop_texts._SERVED + 9, 6)).astype(np.float32)
    for row, value in enumerate((0.0, -0.0, 3e38, -3e38, 1e-45)):
        matrix[row::50, row] = value
    np.testing.assert_array_equal(found.sums(matrix), booster.predict(xgboost.DMatrix(matrix)))
    assert kept is not None


def test_depths_are_those_of_xgboosts_trees():
    booster = trained(max_depth=9, gamma=0.5)
    found = Forest.of(bytes(booster.save_raw("ubj")))

    def depth(node: dict) -> int:
        return 1 + max(map(depth, node["children"])) if "children" in node else 0

    trees = [depth(json.loads(tree)) for tree in booster.get_dump(dump_format="json")]
    assert found.depths.tolist() == trees and len(set(trees)) > 2


def test_a_leaf_that_adds_nothing_keeps_its_rows():
    booster = trained(rounds=2, base_score=0.0)
    document = json.loads(bytes(booster.save_raw("json")))
    for tree in document["learner"]["gradient_booster"]["model"]["trees"]:
        leaf = tree["left_children"].index(-1)
        tree["split_conditions"][leaf] = 0.0
    booster.load_model(bytearray(json.dumps(document).encode()))
    found = Forest.of(bytes(booster.save_raw("ubj")))
    matrix = np.random.default_rng(1).uniform(-4, 4, (3000, 6)).astype(np.float32)
    np.testing.assert_array_equal(found.sums(matrix), booster.predict(xgboost.DMatrix(matrix)))
    np.testing.assert_array_equal(found._sums_of_few(matrix[:100]), found.sums(matrix[:100]))


def test_a_tree_that_is_one_leaf_adds_it():
    booster = trained(rounds=3, min_child_weight=1e9)
    found = Forest.of(bytes(booster.save_raw("ubj")))
    assert found is not None and found.depths.tolist() == [0, 0, 0]
    matrix = np.ones((5, 6), dtype=np.float32)
    np.testing.assert_array_equal(found.sums(matrix), booster.predict(xgboost.DMatrix(matrix)))


def test_what_is_no_plain_sum_of_leaves_is_left_to_xgboost():
    assert Forest.of(bytes(trained().save_raw("json"))) is None
    assert Forest.of(bytes(trained(booster="dart", rate_drop=0.5).save_raw("ubj"))) is None
    # Children that are not numbered in the order of their nodes.
    assert Forest.of(bytes(trained(grow_policy="lossguide", max_leaves=50).save_raw("ubj"))) is None
    generator = np.random.default_rng(0)
    matrix = np.concatenate([generator.uniform(-3, 3, (500, 2)), generator.integers(0, 5, (500, 1))], axis=1)
    data = xgboost.DMatrix(matrix, np.stack([matrix[:, 0], matrix[:, 1]], axis=1))
    assert Forest.of(bytes(xgboost.train({}, data, 5).save_raw("ubj"))) is None
    data = xgboost.DMatrix(matrix, matrix[:, 2] % 2)
    assert Forest.of(bytes(xgboost.train({"objective": "binary:logistic"}, data, 5).save_raw("ubj"))) is None
    kinds = ["float", "float", "c"]
    data = xgboost.DMatrix(matrix, matrix[:, 2] % 2, feature_types=kinds, enable_categorical=True)
    assert Forest.of(bytes(xgboost.train({"max_cat_to_onehot": 9}, data, 5).save_raw("ubj"))) is None


def test_no_trees_are_left_to_xgboost():
    booster = trained(rounds=0)
    saved = bytes(booster.save_raw("ubj"))
    assert Forest.of(saved) is None
    matrix = np.ones((300, 6), dtype=np.float32)
    np.testing.assert_array_equal(Trees(saved).predict(matrix), booster.predict(xgboost.DMatrix(matrix)))


def test_damaged_trees_are_left_to_xgboost_which_refuses_them():
    booster = trained(rounds=5)
    saved = bytes(booster.save_raw("ubj"))
    for end in range(0, len(saved) - 1, 997):
        assert Forest.of(saved[:end]) is None
    document = json.loads(bytes(booster.save_raw("json")))
    tree = document["learner"]["gradient_booster"]["model"]["trees"][0]
    # Links beyond the tree or back to where they came from would be followed outside of it, or for ever.
    place = saved.index(b"left_children[$l#L") + len(b"left_children[$l#L") + 8
    for child in (len(tree["left_children"]) - 1, 0, 2**30):
        wrong = saved[:place] + child.to_bytes(4, "big") + saved[place + 4 :]
        assert Forest.of(wrong) is None


@pytest.fixture
def compiled(monkeypatch):
    assert compiling.loops() is not None
    monkeypatch.setattr(compiling, "ROWS_WORTH_COMPILING", 0)


def test_trees_give_the_same_by_either_way(compiled, monkeypatch):
    booster = trained()
    saved = bytes(booster.save_raw("ubj"))
    matrix = np.random.default_rng(1).uniform(-4, 4, (700, 6))
    by_loop = Trees(saved)
    assert "_booster" not in vars(by_loop)
    expected = booster.predict(xgboost.DMatrix(matrix))
    np.testing.assert_array_equal(by_loop.predict(matrix), expected)
    assert "_booster" not in vars(by_loop) and by_loop.predict(matrix[:0]).shape == (0,)
    # A missing feature goes where xgboost sends it; contributions are its own.
    gap = matrix.copy()
    gap[3, 1] = np.nan
    np.testing.assert_array_equal(by_loop.predict(gap), booster.predict(xgboost.DMatrix(gap)))
    np.testing.assert_array_equal(by_loop.contributions(gap), booster.predict(xgboost.DMatrix(gap), pred_contribs=True))
    with pytest.raises(ValueError, match="fitted on 6 features"):
        by_loop.predict(matrix[:, :5])
    with pytest.raises(ValueError, match="xgboost refuses the trees"):
        Trees(saved[: len(saved) // 2])
    packed = gzip.compress(saved)
    np.testing.assert_array_equal(Trees(packed).predict(matrix), expected)
    for damaged in (packed[: len(packed) // 2], packed[:-4] + b"\xff\xff\xff\xff", packed[:1] + packed[2:]):
        with pytest.raises((EOFError, ValueError)):
            Trees(damaged)
    # Read by xgboost first, and by the loop when there are many rows.
    monkeypatch.setattr(compiling, "loops", lambda: None)
    later = Trees(saved)
    np.testing.assert_array_equal(later.predict(matrix), expected)
    monkeypatch.undo()
    monkeypatch.setattr(compiling, "ROWS_WORTH_COMPILING", 0)
    np.testing.assert_array_equal(later.predict(matrix), expected)
    assert "_forest" in vars(later)


def test_few_rows_compile_nothing_many_do_and_none_must():
    code = (
        "import sys, numpy as np, perfmodel\n"
        "BEFORE\n"
        "model, rows = perfmodel.load('h200'), np.arange(1, 20_001)\n"
        "def ask(n):\n"
        "    part = rows[:n]\n"
        "    asked = {'kernel': ['torch/bf16'] * n, 'm': 1 + part % 5000, 'n': 64 + part % 900, 'k': 8 * (1 + part % 300)}\n"
        "    return model.predict(asked)['time_us']\n"
        "few = ask(6000)\n"
        "assert sys.modules.get('llvmlite') is None\n"
        "many = ask(20_000)\n"
        "assert (many[:6000] == few).all()\n"
        "print('perfmodel.loops' in sys.modules, 'numba' in sys.modules)"
    )
    for before, expected in (("pass", "True False"), ("sys.modules['llvmlite'] = None", "False False")):
        run = subprocess.run([sys.executable, "-c", code.replace("BEFORE", before)], capture_output=True, text=True)
        assert run.stdout.strip() == expected, run.stderr
