"""Costs of memory-bound launches: fitted, known, growing; and models from before they were known."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import hardware as hardware_module
from perfmodel.data_folder import data_folder
from perfmodel.features import features
from perfmodel.fit_memory_costs import fitted
from perfmodel.kernels import KERNELS
from perfmodel.memory_costs import FILE, estimated_us, known, terms
from perfmodel.prediction import LAUNCH_FLOOR_US, baseline_us
from perfmodel.roofline import roofline_us

KERNEL = "loka/quantize_rowwise"


@pytest.fixture(scope="module")
def h200():
    return hardware_module.load("h200")


def sizes(count=200, seed=0):
    generator = np.random.default_rng(seed)
    return np.floor(2 ** generator.uniform(0, 18, count)), np.floor(2 ** generator.uniform(1, 13, count))


def test_costs_are_found_again(h200):
    """Timings made of three costs, one of twenty off by half."""
    m, k = sizes(400)
    found = terms(KERNEL, m, k, h200)
    time = 0.9 + 1.3 * found["bytes"] + 0.4 * found["programs"]
    off = np.where(np.arange(len(m)) % 20 == 0, 1.5, 1.0)
    costs = fitted(KERNEL, pd.DataFrame({"m": m, "k": k, "p50_us": time * off}), h200, {})
    again = np.sum([cost * found[name] for name, cost in costs.items()], axis=0)
    assert np.abs(again / time - 1).max() < 0.02
    assert min(costs.values()) >= 0


@pytest.mark.parametrize(("kernel", "last"), [("loka/quantize_tensorwise", 3.0), ("loka/quantize_tensorwise_delayed", 0.0)])
def test_an_odd_size_costs_by_the_programs_of_a_multiprocessor(h200, kernel, last):
    """Programs take 8,192 elements: 1 of 81, then 4, then 271 twice, the last of a multiple of 16; on 132 multiprocessors."""
    m, k = np.array([3.0, 5.0, 367.0, 368.0]), np.array([27.0, 6045.0, 6045.0, 6029.0])
    found = terms(kernel, m, k, h200)
    np.testing.assert_allclose(found["odd_programs"], [81 / 8192, 1.0, 3.0, 0.0])
    np.testing.assert_allclose(found["by_word_programs"], [81 / 8192, 1.0, 3.0, last])


def test_rows_that_four_does_not_divide_cost_a_copy_and_what_quantizes_it(h200):
    """Turned: the copy's rows and columns change places; both layouts: the tensor as it lies, too. Nothing else then."""
    m, k = np.array([478.0, 480.0]), np.array([7616.0, 7616.0])
    plain = {"bytes": 1.5, "rows": 2.0}
    costs = {"loka/quantize_rowwise": plain}
    lying, turned = (1.5 * 3 * m * k / (h200.copy_bandwidth_tbs * 1e6) + 2.0 * rows / 1e4 for rows in (m, k))
    for form, expected in (("transposed", turned), ("dual", lying + turned)):
        found = terms(f"loka/quantize_rowwise_{form}", m, k, h200, costs)
        np.testing.assert_allclose(found["copied_calls"], [expected[0], 0.0], rtol=0.01)
        np.testing.assert_allclose(found["copied_bytes"], [4 * 478 * 7616 / (h200.copy_bandwidth_tbs * 1e6), 0.0])
        assert found["bytes"][0] == found["call"][0] == 0.0 < found["bytes"][1]
        # Whole sectors of rows, which the L2 keeps.
        assert found["copied_wide"][0] == found["copied_bytes"][0] > found["copied_anew"][0] == 0.0
        own = {"copied", "copied_bytes", "copied_beyond_l2", "copied_wide", "copied_calls"}
        assert {name for name in found if found[name][0]} <= own
        assert "copied_calls" not in terms(f"loka/quantize_rowwise_{form}", m, k, h200, {})


def test_a_copy_of_turned_columns_fetches_sectors_anew_where_rows_are_too_many(h200):
    """64 bytes of each row are fetched at once, and are gone from the L2 before the next column where a column's are more."""
    kept = h200.l2_bytes / 64
    m = np.round(np.array([0.2, 0.65, 1.0, 3.0]) * kept / 4) * 4 + 1
    found = terms("loka/quantize_tensorwise_transposed", m, np.full(4, 512.0), h200, {})
    np.testing.assert_allclose(found["copied_anew"] / found["copied_bytes"], [0.0, 0.5, 1.0, 1.0], atol=1e-4)
    # Rows of 24 bytes: the L2 keeps more of them.
    found = terms("loka/quantize_tensorwise_transposed", m, np.full(4, 12.0), h200, {})
    np.testing.assert_allclose(found["copied_anew"] / found["copied_bytes"], [0.0, 0.0, (0.375 - 0.3) / 0.7, 1.0], atol=1e-4)
    assert not found["copied_wide"].any()


def test_an_odd_number_of_words_goes_apart_unless_sixteen_divides_the_rows(h200):
    m, k = np.array([4954.0, 4960.0, 4960.0, 4954.0, 4953.0]), np.array([22.0, 22.0, 14.0, 24.0, 21.0])
    found = terms("loka/quantize_rowwise", m, k, h200)
    assert (found["apart_height"] > 0).tolist() == [True, False, True, False, False]


def test_what_is_known_names_terms_of_each_kernel_and_never_falls(h200):
    document = json.loads((data_folder() / "h200" / FILE).read_text())
    assert document["kernels"] == known("h200") and set(known("h200")) <= set(KERNELS)
    m, k = sizes()
    for kernel, costs in known("h200").items():
        assert set(costs) <= set(terms(kernel, m, k, h200)) and min(costs.values()) > 0
        time = estimated_us(kernel, m, k, h200)
        assert time is not None and (time > 0.2).all()
        # Twice the rows and columns at the same alignment: four times the bytes.
        assert (estimated_us(kernel, 1024 * m, 1024 * k, h200) > time).all()


def test_the_baseline_is_the_cost_where_it_is_known(h200):
    m, k = sizes(20)
    one = np.ones_like(m)
    np.testing.assert_array_equal(baseline_us(KERNEL, m, one, k, one, h200), estimated_us(KERNEL, m, k, h200))
    roofline = roofline_us(KERNEL, m, one, k, one, h200) + LAUNCH_FLOOR_US
    np.testing.assert_array_equal(baseline_us(KERNEL, m, one, k, one, h200, planned=False), roofline)
    other = dataclasses.replace(h200, name="another")
    assert known("another") == {} and estimated_us(KERNEL, m, k, other) is None
    np.testing.assert_array_equal(baseline_us(KERNEL, m, one, k, one, other), roofline)
    names, matrix = features(KERNEL, m, one, k, one, other)
    assert matrix.shape == (20, len(names)) and "programs" in names and np.isfinite(matrix).all()


def test_a_model_says_whether_its_trees_know_of_launches(h200):
    model = perfmodel.load("h200")
    m, k = sizes(20)
    one = np.ones_like(m)
    for kernel in (KERNEL, "torch/quantize_tensorwise", "fbgemm/quantize_rowwise"):
        columns = model.learned(kernel)[1].features
        assert columns == features(kernel, m, one, k, one, h200, model.planned(kernel))[1].shape[1]
        entries = {
            **model.manifest["kernels"],
            kernel: {**model.manifest["kernels"][kernel], "planned": not model.planned(kernel)},
        }
        other = dataclasses.replace(model, manifest={**model.manifest, "kernels": entries})
        with pytest.raises(ValueError, match="columns|features"):
            other.predict({"kernel": [kernel], "m": [512], "n": [1], "k": [512]})
