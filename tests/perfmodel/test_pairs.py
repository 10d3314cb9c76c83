"""What pairs of kernels differ by: least squares against a library's, who is told what, and what it is worth on whole models."""

import os
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import fit, learn_pairs, saved
from perfmodel.held_out import choice_regret
from perfmodel.judge import SHAPE
from perfmodel.kernels import GEMM_KERNELS
from perfmodel.network import single_threaded
from perfmodel.pairs import PAIRS, Agreement, pair_file

FAST, SPLIT, BF16 = "torch/fp8_tensorwise_fast", "torch/fp8_tensorwise_split", "torch/bf16"
OURS = "loka/fp8_tensorwise_fast"


@pytest.fixture(scope="module")
def model():
    return perfmodel.load("h200")


@pytest.fixture(scope="module")
def zoo(model):
    rows = fit.read_timings("h200")
    wanted = (rows["sweep"] == "zoo") & rows["settled"] & rows["kernel"].isin(list(GEMM_KERNELS))
    return rows[wanted].reset_index(drop=True)


def calls(*kernels, count=50, seed=0, m=None):
    generator = np.random.default_rng(seed)
    sizes = {name: 16 * generator.integers(1, 300, count) for name in "mnk"} | ({} if m is None else {"m": m})
    return pd.concat([pd.DataFrame({"kernel": kernel, **sizes, "groups": 1}) for kernel in kernels], ignore_index=True)


def test_a_ratio_moves_both_times_by_what_each_is_off():
    agreement = Agreement.of({"a": 0.02, "b": 0.01}, {("a", "b"): 0.005})
    moved = agreement.moved(np.log([[10.0, 10.0]]), np.array([[0.03]]))
    total = 0.02**2 + 0.01**2 + 0.005**2
    np.testing.assert_allclose(moved, [[0.03 * 0.02**2 / total, -0.03 * 0.01**2 / total]])


def test_agreement_is_weighted_least_squares():
    """Beside numpy's solution of the stacked equations, call by call, with some kernels not asked."""
    generator = np.random.default_rng(0)
    off = dict(zip("abcd", generator.uniform(0.01, 0.04, 4), strict=True))
    pairs = {("a", "b"): 0.01, ("b", "c"): 0.02, ("a", "c"): 0.03, ("c", "d"): 0.005}
    agreement = Agreement.of(off, pairs)
    times, ratios = generator.normal(3, 1, (60, 4)), np.full((60, 4), np.nan)
    times[generator.random(times.shape) < 0.3] = np.nan
    for column, (one, other) in enumerate(pairs):
        ratios[:, column] = times[:, "abcd".index(one)] - times[:, "abcd".index(other)] + generator.normal(0, 0.05, 60)
    moved = agreement.moved(times, ratios)
    for call in range(60):
        asked = np.flatnonzero(np.isfinite(times[call]))
        rows, values = (
            [np.eye(4)[place] / off["abcd"[place]] for place in asked],
            [times[call, p] / off["abcd"[p]] for p in asked],
        )
        for column, ((one, other), spread) in enumerate(pairs.items()):
            if np.isfinite(ratios[call, column]):
                rows.append((np.eye(4)["abcd".index(one)] - np.eye(4)["abcd".index(other)]) / spread)
                values.append(ratios[call, column] / spread)
        if len(asked):
            solution = np.linalg.lstsq(np.array(rows)[:, asked], np.array(values), rcond=None)[0]
            np.testing.assert_allclose(times[call, asked] + moved[call, asked], solution, atol=1e-9)


def in_one_order():
    """Whether the matrix library sums each row of a product in one order, wherever it stands (`perfmodel.network`)."""
    rng = np.random.default_rng(0)
    x, weights = (rng.normal(size=(96, 96)).astype(np.float32) for _ in range(2))
    with single_threaded():
        return np.array_equal(np.roll(x, 7, axis=0) @ weights, np.roll(x @ weights, 7, axis=0))


def test_a_kernel_asked_alone_or_beside_none_of_its_pairs_is_told_as_ever(model):
    for kernels in ((FAST,), (FAST, OURS), ("torch/fp8_block128", BF16)):
        asked = calls(*kernels).assign(n=256, k=512)
        pd.testing.assert_frame_equal(model.predict_together(asked), model.predict(asked))
        np.testing.assert_array_equal(*model.alone_and_together(asked))


def test_what_a_call_is_told_hangs_on_its_own_kernels_alone(model):
    asked = calls(BF16, FAST, SPLIT, OURS)
    told = model.predict_together(asked)
    alone = model.predict(asked)
    moved = told["time_us"] / alone["time_us"]
    # No kernel of ours is asked beside ours.
    assert (moved[asked["kernel"] != OURS] != 1).mean() > 0.9 and (moved[asked["kernel"] == OURS] == 1).all()
    assert (moved - 1).abs().max() < 0.15
    for end in ("low_us", "high_us"):
        np.testing.assert_allclose(told[end] / told["time_us"], alone[end] / alone["time_us"], rtol=1e-9)
    some = asked.sample(frac=1, random_state=0)
    some = some[some["m"].isin(asked["m"].unique()[::3])]
    apart = 0.0 if in_one_order() else 1e-6
    np.testing.assert_allclose(model.predict_together(some), told.loc[some.index], rtol=apart)
    # Twice the same call is the same call; columns by name are told as a frame is.
    twice = pd.concat([asked, asked], ignore_index=True)
    np.testing.assert_allclose(model.predict_together(twice)["time_us"], np.tile(told["time_us"], 2), rtol=apart)
    columns = {name: asked[name].to_numpy() for name in asked}
    np.testing.assert_array_equal(model.predict_together(columns)["time_us"], told["time_us"])
    # Asked once for both, they are what they are apart.
    for both, each in zip(model.alone_and_together(columns), (alone, told), strict=True):
        np.testing.assert_array_equal(both, each)


def test_many_rows_are_told_as_few_are(model):
    """Two threads, and the compiled loops."""
    many = calls(BF16, FAST, SPLIT, count=6000, seed=1)
    few = pd.concat([many[start : start + 3] for start in (0, 6000, 12000)])
    np.testing.assert_allclose(model.predict_together(few)["time_us"], model.predict_together(many)["time_us"].loc[few.index])


def test_calls_larger_than_measured_do_not_move(model):
    beyond = calls(FAST, SPLIT, m=2**25)
    pd.testing.assert_frame_equal(model.predict_together(beyond), model.predict(beyond))
    with pytest.raises(ValueError, match="cannot run N = 72"):
        model.predict_together(calls(FAST, SPLIT).assign(n=72))


def test_pairs_are_closer_on_whole_models(model, zoo):
    """Ratios of pairs, and what choosing costs, on shapes that nothing was fitted to; the manifest says the latter."""
    frame = zoo.assign(
        alone=np.log(model.predict(zoo)["time_us"] / zoo["p50_us"]),
        together=np.log(model.predict_together(zoo)["time_us"] / zoo["p50_us"]),
    )
    off = {"alone": [], "together": []}
    for pair in model.agreement.pairs:
        of, beside = (frame[frame["kernel"] == name].groupby(SHAPE)[["alone", "together"]].mean() for name in pair)
        for name, values in off.items():
            values.append((of[name] - beside[name]).abs().mean())
    assert len(off["alone"]) == len(PAIRS)
    assert (np.array(off["together"]) < np.array(off["alone"])).mean() >= 0.8
    assert np.mean(off["together"]) < 0.95 * np.mean(off["alone"])
    told = model.predict_together(zoo)["time_us"].to_numpy()
    for key, kernels in (("gemm_choice", fit.TORCH_GEMMS), ("gemm_choice_all_libraries", GEMM_KERNELS)):
        stated, found = model.manifest["held_out_models"][key], choice_regret(zoo, told, kernels)
        assert found["geomean"] == pytest.approx(stated["geomean"], rel=1e-3, abs=1e-5) and found["shapes"] == stated["shapes"]


def both_timed(model, count, seed):
    """Timings of both kernels of a pair whose errors, of a tenth, are the same; one of them takes 3% longer than it should."""
    generator = np.random.default_rng(seed)
    rows = calls(FAST, SPLIT, count=count, seed=seed).assign(run=0)
    common = np.exp(0.1 * generator.standard_normal(count))
    time = model.predict(rows)["time_us"].to_numpy() * np.tile(common, 2)
    return rows.assign(p50_us=time * np.where(rows["kernel"] == FAST, 1.03, 1.0))


def test_what_is_common_to_both_is_no_noise_of_the_ratio(model):
    timings = both_timed(model, 1500, 2)
    careful = learn_pairs.of_both(timings, (FAST, SPLIT), [*SHAPE, "run"], "p50_us")
    _, off, smooth = learn_pairs.learn_pair(replace(model), careful, careful[:0], (FAST, SPLIT))
    # Each kernel alone would be a tenth off; what is left is what the trees of 1,200 shapes do not know of its jumps.
    assert off < 0.025 and off < smooth


def test_pairs_are_written_with_the_fit_and_left_out_where_too_little_was_timed(model, tmp_path):
    for path in model.folder.iterdir():
        if "__beside__" not in path.name and path.name != "manifest.json":
            os.symlink(path, tmp_path / path.name)
    bare = {name: value for name, value in model.manifest.items() if name not in ("pairs", "start")}
    own = replace(model, folder=tmp_path, manifest=bare)
    asked = calls(FAST, SPLIT)
    pd.testing.assert_frame_equal(own.predict_together(asked), own.predict(asked))
    manifest = learn_pairs.add_pairs(own, both_timed(model, learn_pairs.LEAST_BOTH, 3), None)
    assert [entry[:2] for entry in manifest["pairs"]] == [[FAST, SPLIT]] and 0 < manifest["pairs"][0][2] < 0.05
    opened = saved._open(model.hardware, tmp_path)
    assert opened.manifest == manifest and opened.fingerprint != own.fingerprint
    ratio = opened.predict_together(asked)["time_us"] / own.predict(asked)["time_us"]
    moved = ratio[asked["kernel"] == FAST].to_numpy() / ratio[asked["kernel"] == SPLIT].to_numpy()
    assert 1.0 < np.median(moved) < 1.03
    (tmp_path / pair_file((FAST, SPLIT))).write_bytes(b"no trees")
    with pytest.raises(ValueError, match=r"__beside__.* is missing or truncated; copy the folder again"):
        saved._open(model.hardware, tmp_path).predict_together(asked)
    (tmp_path / pair_file((FAST, SPLIT))).unlink()
    with pytest.raises(ValueError, match="__beside__.* is missing; copy the folder whole"):
        saved._open(model.hardware, tmp_path)
    fewer = both_timed(model, learn_pairs.LEAST_BOTH - 1, 3)
    assert "pairs" not in learn_pairs.add_pairs(replace(own, manifest=manifest), fewer, None)
    assert not list(tmp_path.glob("*__beside__*"))


def test_an_h100_goes_on_from_what_launches_taught_of_an_h200(model):
    found = learn_pairs.launches_of(model, (FAST, SPLIT))
    assert found.num_boosted_rounds() == learn_pairs.learn.TOLD_ROUNDS
    assert learn_pairs.launches_of(model, (FAST, OURS)) is None


def test_pairs_alone_are_of_a_shipped_fit(capsys):
    with pytest.raises(SystemExit) as stopped:
        fit.main(["--pairs", "--start", "h200"])
    assert stopped.value.code == 2 and "--pairs is of a shipped fit as it is" in capsys.readouterr().err
