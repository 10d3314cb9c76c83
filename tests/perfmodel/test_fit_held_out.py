"""Judging by held-out shapes, and learning from quick launches first: small cases with known answers."""

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import data_folder, fit, held_out, learn
from perfmodel.calls import columns_of
from perfmodel.cells import EACH, WELL_KNOWN, Cells
from perfmodel.choice import PARTS, Choice, asked
from perfmodel.judge import SHAPE
from perfmodel.network import Network
from perfmodel.prediction import baseline_us, bounds_of, size_class
from perfmodel.steady import drift

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


def a_model_of(spread_by_run: tuple[float, ...], count: int = 20_000) -> tuple[pd.DataFrame, held_out.Unseen]:
    """Rows of several runs whose times scatter about the prediction, less from 20 us on."""
    generator = np.random.default_rng(3)
    run = generator.integers(0, len(spread_by_run), count)
    rows = pd.DataFrame({"kernel": KERNEL, "m": np.arange(count) + 1, "n": 1, "k": 1, "groups": 1, "run": run})
    predicted = np.exp(generator.uniform(0, 7, count))
    spread = np.array(spread_by_run)[run] * np.where(predicted < 20, 1.0, 0.1)
    rows["p50_us"] = predicted * np.exp(spread * generator.standard_normal(count))
    return rows, held_out.Unseen(predicted, held_out.runs_of(rows))


def test_intervals_of_other_runs_cover_their_share_in_every_class():
    rows, fresh = a_model_of((0.2, 0.2, 0.2))
    bounds, measured = fresh.bounds(rows), rows["p50_us"].to_numpy()
    found = held_out.coverage_by_class(measured, fresh.predicted, bounds)
    assert [c["n"] for c in found] == np.bincount(size_class(fresh.predicted), minlength=4).tolist()
    assert all(c["coverage"] == pytest.approx(0.9, abs=0.02) for c in found)
    assert held_out.accuracy(measured, fresh.predicted, bounds)["coverage"] == pytest.approx(0.9, abs=0.01)


def test_a_runs_own_errors_do_not_reach_its_intervals():
    """A run that scatters twice as much as the others is covered as badly as it would have been unseen."""
    rows, fresh = a_model_of((0.1, 0.1, 0.2))
    bounds, measured = fresh.bounds(rows), rows["p50_us"].to_numpy()
    inside = (measured >= bounds[:, 0]) & (measured <= bounds[:, 1])
    # Two standard deviations of 0.1 each hold 58.9% of a normal variable of 0.2 inside their 90% interval.
    assert inside[rows["run"] == 2].mean() == pytest.approx(0.589, abs=0.02)
    assert inside[rows["run"] < 2].mean() > 0.94


def test_folds_stand_in_for_the_runs_of_a_kernel_measured_once():
    """Its intervals are as much wider as left-out runs of other kernels asked for; its folds are judged by theirs."""
    rows, fresh = a_model_of((0.1,))
    index = np.arange(len(rows))
    wider = held_out.Unseen(fresh.predicted, held_out.folds_of(rows), 1.5)
    narrow, wide = (np.log(np.array(some.factors(rows, KERNEL, index))) for some in (fresh, wider))
    np.testing.assert_allclose(wide, 1.5 * narrow)
    assert np.isnan(fresh.bounds(rows)).all()
    bounds, measured = wider.bounds(rows), rows["p50_us"].to_numpy()
    assert ((measured >= bounds[:, 0]) & (measured <= bounds[:, 1])).mean() == pytest.approx(0.9, abs=0.01)


def in_doubt(count: int = 40_000) -> tuple[pd.DataFrame, held_out.Unseen]:
    """Rows of two runs, half of them of class 0 of doubt and off by 0.1, the others of class 2 and off by twice that."""
    rows, fresh = a_model_of((0.1, 0.1), count)
    doubt = np.random.default_rng(5).permutation(np.repeat([0, 2], count // 2))
    generator = np.random.default_rng(6)
    rows["p50_us"] = fresh.predicted * np.exp(0.1 * np.where(doubt > 0, 2.0, 1.0) * generator.standard_normal(count))
    off = np.abs(np.log(rows["p50_us"].to_numpy() / fresh.predicted))
    wider = held_out.wider_in_doubt(rows["kernel"].to_numpy(), off, doubt)
    return rows, held_out.Unseen(fresh.predicted, fresh.part, fresh.wider, doubt, wider)


def test_what_is_in_doubt_is_wider_by_as_much_as_it_is_further_off():
    rows, fresh = in_doubt()
    assert fresh.wider_in_doubt == pytest.approx((1.0, 1.0, 2.0, 2.0, 2.0), abs=0.05)
    bounds, measured = fresh.bounds(rows), rows["p50_us"].to_numpy()
    inside = (measured >= bounds[:, 0]) & (measured <= bounds[:, 1])
    blind = held_out.Unseen(fresh.predicted, fresh.part).bounds(rows)
    as_one = (measured >= blind[:, 0]) & (measured <= blind[:, 1])
    for number in (0, 2):
        mine = fresh.doubt == number
        assert inside[mine].mean() == pytest.approx(0.9, abs=0.01)
        assert abs(as_one[mine].mean() - 0.9) > 0.05


def test_factors_in_a_manifest_give_the_same_intervals():
    rows, fresh = in_doubt()
    entry = {"interval_factors": fresh.factors(rows, KERNEL, np.arange(len(rows))), "wider_in_doubt": fresh.wider_in_doubt}
    bounds, measured = bounds_of(fresh.predicted, entry, fresh.doubt), rows["p50_us"].to_numpy()
    inside = (measured >= bounds[:, 0]) & (measured <= bounds[:, 1])
    assert [inside[fresh.doubt == number].mean() for number in (0, 2)] == pytest.approx([0.9, 0.9], abs=0.01)
    sure = bounds_of(fresh.predicted, {"interval_factors": entry["interval_factors"]}, fresh.doubt)
    np.testing.assert_array_equal(sure[fresh.doubt == 0], bounds[fresh.doubt == 0])
    assert (sure[fresh.doubt == 2, 1] < bounds[fresh.doubt == 2, 1]).all()


def test_few_rows_in_doubt_widen_nothing():
    off, doubt = np.full(200, 0.1), np.repeat([0, 4], [190, 10])
    off[doubt > 0] = 9.0
    assert held_out.wider_in_doubt(np.full(200, KERNEL), off, doubt) == (1.0,) * 5


def test_where_little_is_known_is_wider_by_as_much_as_it_is_further_off():
    """In a cell of many careful timings and in lone ones, three times as far off; doubt is taken out of it first."""
    rows, fresh = a_model_of((0.1, 0.1), 40_000)
    lone = np.random.default_rng(5).random(len(rows)) < 0.1
    # Each lone one two octaves and more from any other; all sizes multiples of 8, but no K of them one of 32.
    rows = rows.assign(m=1024 + 8 * (np.arange(len(rows)) % 60), n=64, k=64, groups=1)
    number = np.arange(int(lone.sum()))
    sizes = np.stack([8 * 8 ** (number // 25 % 5), 8 * 8 ** (number // 5 % 5), 8 * 8 ** (number % 5)], axis=1)
    rows.loc[lone, ["m", "n", "k"]] = np.where(sizes == 64, 8, sizes) + [0, 0, 8]
    doubt = np.random.default_rng(7).permutation(np.repeat([0, 2], len(rows) // 2))
    spread = 0.1 * np.where(lone, 3.0, 1.0) * np.where(doubt > 0, 2.0, 1.0)
    rows["p50_us"] = fresh.predicted * np.exp(spread * np.random.default_rng(6).standard_normal(len(rows)))
    fresh = held_out.Unseen(fresh.predicted, fresh.part, fresh.wider, doubt, (1.0, 1.0, 2.0, 2.0, 2.0))
    cells = {KERNEL: Cells.of(columns_of(rows))}
    few = cells[KERNEL].few(columns_of(rows))
    assert set(few[~lone]) == {WELL_KNOWN} and set(few[lone]) == {EACH}
    found, powers = held_out.known_around(fresh, rows, fresh.predicted, cells)
    assert list(powers) == ["gemm"] and powers["gemm"][EACH] == pytest.approx(3.0, rel=0.05)
    # Of classes without rows nothing is known but that fewer neighbours are no better.
    assert powers["gemm"][:EACH] == (1.0,) * EACH and powers["gemm"][EACH + 1 :] == (1.0,) * (2 * EACH - 1)
    bounds, measured = found.bounds(rows), rows["p50_us"].to_numpy()
    inside = (measured >= bounds[:, 0]) & (measured <= bounds[:, 1])
    for mine in (lone, ~lone, lone & (doubt > 0), ~lone & (doubt > 0)):
        assert inside[mine].mean() == pytest.approx(0.9, abs=0.015)


def test_few_rows_with_few_neighbours_widen_nothing():
    few = np.repeat([WELL_KNOWN, EACH], [190, 10])
    off = np.where(few == EACH, 9.0, 0.1)
    assert held_out.wider_where_few(np.full(200, KERNEL), off, few) == {"gemm": (1.0,) * (WELL_KNOWN + 1)}
    assert held_out.wider_where_few(np.full(200, KERNEL), np.full(200, np.nan), few) == {}
    # The fewer, the wider: none of the classes between is narrower than those of more.
    few = np.repeat([WELL_KNOWN, 2 * EACH + 1, 2 * EACH], [200, 200, 200])
    off = np.repeat([0.1, 0.4, 0.2], 200)
    assert held_out.wider_where_few(np.full(600, KERNEL), off, few)["gemm"][2 * EACH :] == pytest.approx((4.0, 4.0, 1.0, 1.0))
    # What is bound by memory has no alignment: many of the one class that it has are what others are compared with.
    few, off = np.repeat([EACH - 1, 0], [200, 200]), np.repeat([0.1, 0.15], 200)
    wider = held_out.wider_where_few(np.full(400, "torch/relu_forward"), off, few)
    assert wider["pointwise"] == pytest.approx((1.5,) + (1.0,) * WELL_KNOWN)


def test_left_out_runs_are_predicted_without_them_and_their_shapes(monkeypatch):
    """Whatever is held out, no row of its part or of a shape in it is learned from."""
    seen: list[tuple[pd.DataFrame, pd.DataFrame]] = []
    monkeypatch.setattr(held_out, "train", lambda kernel, rows, hardware, first: rows)

    def predict(learned, kernel, rows, hardware):
        seen.append((learned, rows))
        return np.full(len(rows), 7.0)

    monkeypatch.setattr(held_out, "predict", predict)
    rows = shapes(600, 1).assign(p50_us=10.0)
    rows["run"] = np.arange(len(rows)) % 3
    again = rows[rows["run"] == 0].head(50).assign(run=1)
    rows = pd.concat([rows, again], ignore_index=True)
    assert (held_out.held_out(rows, perfmodel.load("h200").hardware, part=held_out.runs_of(rows)) == 7.0).all()
    assert len(seen) == 3
    for learned, test in seen:
        assert test["run"].nunique() == 1 and not set(learned["run"]) & set(test["run"])
        assert not set(map(tuple, learned[SHAPE].to_numpy())) & set(map(tuple, test[SHAPE].to_numpy()))


def test_a_run_with_most_of_the_rows_is_not_left_out_whole(monkeypatch):
    """Trees without it would say what few rows teach: its shapes are held out fold by fold, and count as those of a run."""
    monkeypatch.setattr(held_out, "train", lambda kernel, rows, hardware, first: rows)
    monkeypatch.setattr(
        held_out, "predict", lambda learned, kernel, rows, hardware: 10.0 * np.exp(np.where(rows["run"] == 1, 0.2, 0.1))
    )
    rows = shapes(3000, 1).assign(p50_us=10.0)
    rows["run"] = np.searchsorted([1700, 2300], np.arange(len(rows)), side="right")
    by_fold = np.full(len(rows), 10.0 * np.exp(0.1))
    found = held_out.leave_out_runs(rows, perfmodel.load("h200").hardware, None, by_fold)
    assert len(rows) > 2600 and (found.part < 0).sum() == 1700 and set(found.part[1700:]) == {1, 2}
    np.testing.assert_array_equal(found.predicted[:1700], by_fold[:1700])
    np.testing.assert_allclose(np.log(found.predicted[1700:] / 10), np.where(found.part[1700:] == 1, 0.2, 0.1))
    # Nine in ten of what is left out whole lie within twice what the same rows by folds do.
    assert (found.wider[1700:] == 1).all()
    np.testing.assert_allclose(found.wider[:1700], 2.0)


def test_small_runs_are_left_out_together():
    run = np.repeat([4, 7, 9, 30], [300, 20, 200, 30])
    rows = pd.DataFrame({"kernel": KERNEL, "m": np.arange(550), "n": 1, "k": 1, "groups": 1, "run": run})
    assert held_out.runs_of(rows).tolist() == np.repeat([1, 0, 2, 0], [300, 20, 200, 30]).tolist()
    one = held_out.runs_of(rows[rows["run"] == 9])
    assert not one.any()


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


def test_a_repeat_of_a_call_that_was_timed_twice():
    """2 us on average, then 1.5 us: 25% less. The call without a repeat does not count."""
    calls = [("lrm", 64, 1.0), ("lrm", 64, 3.0), ("lrm", 128, 5.0), ("repeat", 64, 1.5)]
    rows = pd.DataFrame(
        [("torch/bf16", m, 64, 64, 1, us, sweep) for sweep, m, us in calls], columns=["kernel", *SHAPE, "p50_us", "sweep"]
    )
    found = held_out.repeat_difference(rows)
    assert found["n"] == 1 and found["mape"] == pytest.approx(0.25)
    assert held_out.repeat_difference(rows[rows["sweep"] == "lrm"]) is None


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
    first = learn.learn_first(quick, hardware, [KERNEL])[KERNEL]
    errors = [
        np.abs(learn.predict(learn.train(KERNEL, careful, hardware, start), KERNEL, test, hardware) / true_us(test) - 1).mean()
        for start in (None, first)
    ]
    assert errors[1] < 0.04 and errors[0] > 2 * errors[1], errors


def test_a_known_choice_is_used():
    """Launches that jump where the library changes its kernel: told where that is, trees need not find it by the noise."""
    hardware = perfmodel.load("h200").hardware
    width = asked(KERNEL, *np.ones((4, 1)), hardware).shape[1]
    # Tiles of 128 columns where cos(8 pi log2 M) + cos(8 pi log2 N) is positive, else of 64: two of the last 24 inputs.
    weights = np.zeros((width, 3), dtype=np.float32)
    weights[[-17, -9], 1] = 1.0
    law = Network(np.zeros(width, np.float32), np.ones(width, np.float32), 0.0, 1.0, [(weights, np.zeros(3, np.float32))])
    part = {"tile_n": (64, 128), "tile_m": (64, 64), "cluster": (11, 11)}
    choice = Choice(law, np.stack([part.get(name, (0, 0)) for name in PARTS], axis=1))

    def jumping_us(rows: pd.DataFrame) -> np.ndarray:
        wave = sum(np.cos(8 * np.pi * np.log2(rows[name].to_numpy(float))) for name in ("m", "n"))
        return baseline_us(KERNEL, *columns_of(rows), hardware) * np.where(wave > 0, 2.0, 3.0)

    quick, test = shapes(4000, 9), shapes(600, 11)
    quick["time_us"] = jumping_us(quick) * np.exp(0.1 * np.random.default_rng(5).standard_normal(len(quick)))
    careful = shapes(80, 10)
    careful["p50_us"] = jumping_us(careful)
    errors = []
    for choices in ({}, {KERNEL: choice}):
        learned = learn.train(KERNEL, careful, hardware, learn.learn_first(quick, hardware, [KERNEL], choices)[KERNEL])
        assert learned.choice is choices.get(KERNEL)
        errors.append(np.abs(learn.predict(learned, KERNEL, test, hardware) / jumping_us(test) - 1).mean())
    assert errors[1] < 0.8 * errors[0], errors


def test_too_few_launches_are_left_alone():
    few = shapes(500, 6).assign(time_us=1.0)
    hardware = perfmodel.load("h200").hardware
    assert learn.learn_first(few, hardware, [KERNEL]) == {} and learn.learn_first(None, hardware, [KERNEL]) == {}
    assert learn.learn_first(shapes(9000, 6).assign(time_us=1.0), hardware, ["torch/fp8_block128"]) == {}


def test_the_clocks_drift_is_read_off_the_neighbours():
    """Three kernels launched on each shape while the clock wanders by 10%: what is found is that, but for each kernel's share."""
    generator = np.random.default_rng(8)
    some = shapes(3000, 7)
    wander = 0.1 * np.sin(np.arange(len(some)) / 12.0)
    names, follows = np.array([KERNEL, "torch/fp8_rowwise_fast", "torch/fp8_tensorwise_fast"]), np.array([1.0, 1.0, 0.4])
    rows = pd.concat([some.assign(kernel=name, place=some.index) for name in names]).sort_values("place", kind="stable")
    rows = rows.reset_index(drop=True).assign(time_us=10.0)
    own = np.array([dict(zip(names, follows, strict=True))[name] for name in rows["kernel"]]) * wander[rows["place"]]
    # What a shape takes is its own, in all kernels alike: that must not pass for drift.
    shape = 0.1 * generator.standard_normal(len(some))[rows["place"]]
    found = drift(rows, own + shape + 0.02 * generator.standard_normal(len(rows)))
    assert np.abs(found - own).mean() < 0.03 and np.corrcoef(found, own)[0, 1] > 0.85
    assert np.abs(np.corrcoef(found, shape)[0, 1]) < 0.1
    blind = np.where(np.arange(len(rows)) % 2, own, np.nan)
    assert np.isfinite(drift(rows, blind)).all()


def test_launches_of_measured_shapes_are_not_learned_from():
    timings = fit.read_timings("h200")
    launches = fit.read_launches(timings, data_folder() / "h200")
    assert len(launches) > 100_000
    # Of millions of rows sets of tuples would take half a minute.
    assert launches[SHAPE].drop_duplicates().merge(timings[SHAPE]).empty
    some = launches.head(50)
    assert not launches[SHAPE].merge(some[SHAPE]).empty
    fewer = fit.read_launches(pd.concat([timings, some.assign(sweep="zoo", p50_us=1.0)]), data_folder() / "h200")
    assert fewer is not None and fewer[SHAPE].merge(some[SHAPE]).empty


def test_a_folder_without_launches_has_none(tmp_path):
    assert fit.read_launches(shapes(5, 0), tmp_path) is None
    (tmp_path / "launches.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="fit in a checkout"):
        fit.read_launches(shapes(5, 0), tmp_path)
