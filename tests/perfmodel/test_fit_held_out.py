"""Judging by held-out shapes, and learning from quick launches first: small cases with known answers."""

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import data_folder, fit, held_out, learn
from perfmodel.judge import SHAPE
from perfmodel.model import baseline_us, columns_of, size_class

KERNEL = "torch/bf16"


def shapes(count: int, seed: int) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    sizes = {name: 2 ** generator.integers(4, 13, count) + 16 * generator.integers(0, 9, count) for name in ("m", "n", "k")}
    return pd.DataFrame({"kernel": KERNEL, **sizes, "groups": 1}).drop_duplicates(SHAPE).reset_index(drop=True)


def true_us(rows: pd.DataFrame) -> np.ndarray:
    """A law with jumps, as a library's choices of kernels make them."""
    jump = np.where((rows["n"] % 32 == 0) & (rows["m"] > 300), 1.0, 1.8) * np.where(rows["k"] % 64 == 0, 1.0, 1.3)
    jump *= np.where(rows["m"] * rows["n"] > 2**19, 1.0, 1.4)
    return baseline_us(KERNEL, *columns_of(rows), perfmodel.load("h200").hardware) * 2 * jump


def test_intervals_of_other_folds_cover_their_share_in_every_class():
    generator = np.random.default_rng(3)
    count = 20_000
    rows = pd.DataFrame({"kernel": KERNEL, "m": np.arange(count) + 1, "n": 1, "k": 1, "groups": 1})
    predicted = np.exp(generator.uniform(0, 7, count))
    spread = np.where(predicted < 20, 0.2, 0.02)
    rows["p50_us"] = predicted * np.exp(spread * generator.standard_normal(count))
    bounds = held_out.cross_intervals(rows, predicted)
    found = held_out.coverage_by_class(rows["p50_us"].to_numpy(), predicted, bounds)
    assert [c["n"] for c in found] == np.bincount(size_class(predicted), minlength=4).tolist()
    assert all(c["coverage"] == pytest.approx(0.9, abs=0.02) for c in found)
    assert held_out.accuracy(rows["p50_us"].to_numpy(), predicted, bounds)["coverage"] == pytest.approx(0.9, abs=0.01)


def test_a_rows_own_error_does_not_reach_its_interval():
    generator = np.random.default_rng(4)
    rows = shapes(400, 1).assign(p50_us=10.0)
    predicted = 10 * np.exp(0.05 * generator.standard_normal(len(rows)))
    before = held_out.cross_intervals(rows, predicted)
    changed = rows.assign(p50_us=np.where(rows.index == 7, 1000.0, 10.0))
    np.testing.assert_array_equal(held_out.cross_intervals(changed, predicted)[7], before[7])
    assert not np.array_equal(held_out.cross_intervals(changed, predicted), before)


def test_coverage_by_hand():
    measured, predicted = np.array([1.0, 2.0, 30.0, 31.0]), np.array([1.0, 1.0, 25.0, 25.0])
    bounds = np.array([[0.5, 1.5], [0.5, 1.5], [20.0, 32.0], [20.0, 32.0]])
    assert held_out.coverage_by_class(measured, predicted, bounds) == [
        {"n": 2, "coverage": 0.5}, {"n": 0}, {"n": 2, "coverage": 1.0}, {"n": 0},
    ]  # fmt: skip


def test_regret_among_some_kernels_alone():
    frame = pd.DataFrame({
        "kernel": ["torch/bf16", "torch/fp8_rowwise_fast", "torch/fp8_tensorwise_fast"],
        "m": 16, "n": 16, "k": 16, "groups": 1, "p50_us": [10.0, 8.0, 5.0],
    })  # fmt: skip
    wrong = np.array([1.0, 2.0, 3.0])
    assert held_out.choice_regret(frame, wrong)["geomean"] == pytest.approx(1.0)
    pair = held_out.choice_regret(frame, wrong, ("torch/bf16", "torch/fp8_rowwise_fast"))
    assert pair["shapes"] == 1 and pair["geomean"] == pytest.approx(0.25)
    assert held_out.choice_regret(frame, wrong, ("torch/bf16",)) is None


def test_quick_launches_show_what_few_careful_timings_miss(monkeypatch):
    """4,000 launches that are 6% off and 10% long, and 80 timings: better together than the timings alone."""
    monkeypatch.setattr(learn, "FIRST_ROUNDS", 120)
    monkeypatch.setattr(learn, "ROUNDS", 80)
    monkeypatch.setattr(learn, "NEXT_ROUNDS", 80)
    for parameters in (learn.PARAMETERS, learn.FIRST_PARAMETERS, learn.NEXT_PARAMETERS):
        monkeypatch.setitem(parameters, "eta", 0.1)
        monkeypatch.setitem(parameters, "nthread", 1)
    hardware = perfmodel.load("h200").hardware
    quick = shapes(5000, 2)
    quick["time_us"] = true_us(quick) * 1.1 * np.exp(0.06 * np.random.default_rng(5).standard_normal(len(quick)))
    careful, test = shapes(80, 3), shapes(600, 4)
    careful["p50_us"] = true_us(careful)
    first = learn.learn_first(KERNEL, quick, hardware)
    errors = [
        np.abs(learn.predict(learn.train(KERNEL, careful, hardware, start), KERNEL, test, hardware) / true_us(test) - 1).mean()
        for start in (None, first)
    ]
    assert errors[1] < 0.04 and errors[0] > 2 * errors[1], errors


def test_too_few_launches_are_left_alone():
    few = shapes(500, 6).assign(time_us=1.0)
    hardware = perfmodel.load("h200").hardware
    assert learn.learn_first(KERNEL, few, hardware) is None and learn.learn_first(KERNEL, None, hardware) is None
    assert learn.learn_first("torch/fp8_block128", shapes(9000, 6).assign(time_us=1.0), hardware) is None


def test_launches_of_measured_shapes_are_not_learned_from():
    timings = fit.read_timings("h200")
    launches = fit.read_launches(timings, data_folder() / "h200")
    assert len(launches) > 100_000
    known = set(map(tuple, timings[SHAPE].to_numpy()))
    assert not known & set(map(tuple, launches[SHAPE].to_numpy()))
    some = launches.head(50)
    fewer = fit.read_launches(pd.concat([timings, some.assign(sweep="zoo", p50_us=1.0)]), data_folder() / "h200")
    assert not set(map(tuple, some[SHAPE].to_numpy())) & set(map(tuple, fewer[SHAPE].to_numpy()))


def test_a_folder_without_launches_has_none(tmp_path):
    assert fit.read_launches(shapes(5, 0), tmp_path) is None
