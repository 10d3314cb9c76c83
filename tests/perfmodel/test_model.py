import gzip
import json

import numpy as np
import pandas as pd
import pytest
import xgboost

import perfmodel
from perfmodel import KERNELS, data_folder
from perfmodel.features import features
from perfmodel.fit import HELD_OUT_SWEEPS, SHAPE, choice_regret, folds_of, interval_factors, read_timings
from perfmodel.model import LAUNCH_FLOOR_US, PerfModel, model_file, size_class
from perfmodel.roofline import roofline_us


@pytest.fixture(scope="module")
def model() -> PerfModel:
    return perfmodel.load("h200")


@pytest.fixture(scope="module")
def timings() -> pd.DataFrame:
    return read_timings("h200")


def rows(*calls: tuple) -> pd.DataFrame:
    return pd.DataFrame(calls, columns=["kernel", "m", "n", "k"])


def test_roofline_by_hand(model):
    hardware = model.hardware
    big = roofline_us("torch/bf16", *(np.array([float(x)]) for x in (8192, 8192, 8192, 1)), hardware)
    assert big[0] == pytest.approx(2 * 8192**3 / (hardware.peak_bf16_tflops * 1e12) * 1e6)
    thin = roofline_us("torch/fp8_rowwise_fast", *(np.array([float(x)]) for x in (65536, 16, 16, 1)), hardware)
    moved = 65536 * 16 + 16 * 16 + 2 * 65536 * 16
    assert thin[0] == pytest.approx(moved / (hardware.copy_bandwidth_tbs * 1e12) * 1e6)
    quantize = roofline_us("torch/quantize_rowwise", *(np.array([float(x)]) for x in (4096, 1, 4096, 1)), hardware)
    assert quantize[0] == pytest.approx(3 * 4096**2 / (hardware.copy_bandwidth_tbs * 1e12) * 1e6)


def test_hardware_ceilings_are_the_fastest_rows(model, timings):
    """The specification's ceilings are what its `sources` say they are."""
    first = timings[timings["sweep"] == "lrm"]
    work = 2e-6 * first["m"] * first["n"] * first["k"] * first["groups"] / first["p50_us"]
    bf16 = work[first["kernel"] == "torch/bf16"].max()
    fp8 = work[first["kernel"].str.startswith("torch/fp8")].max()
    assert model.hardware.peak_bf16_tflops == pytest.approx(bf16, rel=1e-3)
    assert model.hardware.peak_fp8_tflops == pytest.approx(fp8, rel=1e-3)


def test_predict_equals_the_trees_evaluated_by_xgboost(model):
    name, size = "torch/fp8_tensorwise_fast", (4096.0, 1024.0, 512.0, 1.0)
    path = data_folder() / "h200" / "models" / model_file(name)
    booster = xgboost.Booster()
    booster.load_model(bytearray(gzip.decompress(path.read_bytes())))
    arrays = tuple(np.array([x]) for x in size)
    names, matrix = features(name, *arrays, model.hardware)
    log_ratio = booster.predict(xgboost.DMatrix(matrix, feature_names=names))[0]
    expected = (roofline_us(name, *arrays, model.hardware)[0] + LAUNCH_FLOOR_US) * np.exp(log_ratio)
    assert model.predict(rows((name, 4096, 1024, 512)))["time_us"][0] == pytest.approx(expected, rel=1e-5)


def test_predict_keeps_order_and_index(model):
    generator = np.random.default_rng(0)
    names = [name for name in model.manifest["kernels"] if "batched" not in name and "block" not in name]
    frame = pd.DataFrame({
        "kernel": generator.choice(names, 200), "m": 64 * generator.integers(4, 1000, 200),
        "n": 16 * generator.integers(1, 200, 200), "k": 16 * generator.integers(1, 200, 200),
    })  # fmt: skip
    frame.loc[~frame["kernel"].isin(perfmodel.GEMM_KERNELS), "n"] = 1
    whole = model.predict(frame)
    shuffled = frame.sample(frac=1, random_state=1)
    pd.testing.assert_frame_equal(model.predict(shuffled), whole.loc[shuffled.index])
    assert (whole["low_us"] <= whole["time_us"]).all() and (whole["time_us"] <= whole["high_us"]).all()
    assert (whole > 0).all().all()


def test_every_measured_kernel_is_known_and_every_row_legal(model, timings):
    assert set(model.manifest["kernels"]) <= set(KERNELS)
    assert set(perfmodel.GEMM_KERNELS) & set(model.manifest["kernels"]) >= {"torch/bf16", "torch/fp8_rowwise_fast"}
    shapes = timings[["kernel", "m", "n", "k"]].drop_duplicates()
    assert not [row for row in shapes.itertuples(index=False) if KERNELS[row.kernel].illegal(row.m, row.n, row.k)]


def test_bad_frames_are_refused_by_name(model):
    with pytest.raises(ValueError, match="'torch/fp9' is not a kernel"):
        model.predict(rows(("torch/fp9", 1, 1, 1)))
    with pytest.raises(ValueError, match="lacks the columns"):
        model.predict(pd.DataFrame({"kernel": ["torch/bf16"], "m": [1]}))
    with pytest.raises(ValueError, match="at least 1"):
        model.predict(rows(("torch/bf16", 0, 16, 16)))
    with pytest.raises(ValueError, match="mi300 has no data|'mi300' has no data"):
        perfmodel.load("mi300")
    assert model.predict(rows()).empty


def test_in_range(model):
    inside = model.in_range(
        rows(("torch/bf16", 2048, 1024, 512), ("torch/bf16", 2**24, 1024, 512), ("torch/bf16", 2048, 2**17, 512))
    )
    assert inside.tolist() == [True, False, False]


def test_manifest_accuracy_on_held_out_models_recomputed(model, timings):
    """What the README quotes: the shipped trees on the zoo's shapes, computed again through the public API."""
    zoo = timings[timings["sweep"] == "zoo"].reset_index(drop=True)
    error = (model.predict(zoo)["time_us"] / zoo["p50_us"] - 1).abs()
    for kernel, stated in model.manifest["held_out_models"]["kernels"].items():
        chosen = error[zoo["kernel"] == kernel]
        assert len(chosen) == stated["n"]
        assert chosen.mean() == pytest.approx(stated["mape"], rel=1e-4)


def test_intervals_cover_held_out_models(model, timings):
    """Nine in ten of the zoo's rows, which calibrated nothing, lie inside; tolerance for whole models of correlated rows."""
    zoo = timings[timings["sweep"] == "zoo"].reset_index(drop=True)
    predicted = model.predict(zoo)
    inside = (zoo["p50_us"] >= predicted["low_us"]) & (zoo["p50_us"] <= predicted["high_us"])
    assert inside.mean() == pytest.approx(model.manifest["held_out_models"]["coverage"], abs=1e-3)
    assert 0.84 <= inside.mean() <= 0.97


def test_folds_hold_out_whole_shapes(timings):
    fold = folds_of(timings)
    assert timings.assign(fold=fold).groupby(SHAPE)["fold"].nunique().max() == 1
    assert set(fold) == set(range(5))


def test_held_out_models_share_no_fitted_shape(model, timings):
    """As many fitted rows as the manifest says, once every shape of the zoo is taken out."""
    seen = set(map(tuple, timings.loc[timings["sweep"] == "zoo", SHAPE].to_numpy()))
    fitted = [
        row for row in timings.itertuples() if row.sweep not in HELD_OUT_SWEEPS and (row.m, row.n, row.k, row.groups) not in seen
    ]
    assert len(fitted) == model.manifest["rows"]


def test_interval_factors_cover_their_share():
    generator = np.random.default_rng(3)
    predicted = np.exp(generator.uniform(0, 7, 40_000))
    spread = np.where(predicted < 20, 0.2, 0.02)
    measured = predicted * np.exp(spread * generator.standard_normal(40_000))
    factors = np.asarray(interval_factors(measured[:20_000], predicted[:20_000]))
    fresh, chosen = measured[20_000:], predicted[20_000:]
    bounds = factors[size_class(chosen)] * chosen[:, None]
    inside = (fresh >= bounds[:, 0]) & (fresh <= bounds[:, 1])
    for number in range(4):
        assert inside[size_class(chosen) == number].mean() == pytest.approx(0.9, abs=0.02)


def test_choice_regret_by_hand():
    frame = pd.DataFrame({
        "kernel": ["torch/bf16", "torch/fp8_rowwise_fast"] * 2 + ["torch/bf16"],
        "m": [16, 16, 32, 32, 64], "n": 16, "k": 16, "groups": 1, "p50_us": [10.0, 8.0, 10.0, 20.0, 5.0],
    })  # fmt: skip
    regret = choice_regret(frame, np.array([1.0, 2.0, 1.0, 2.0, 1.0]))
    assert regret["shapes"] == 2  # the third shape has one kernel: nothing to choose
    assert regret["geomean"] == pytest.approx(np.sqrt(10 / 8) - 1)
    assert regret["worst"] == pytest.approx(0.25)
    assert regret["right"] == 0.5


def test_sidecars_say_where_the_data_came_from():
    for name in ("gemm", "memory", "collectives"):
        sidecar = json.loads((data_folder() / "h200" / f"{name}.json").read_text())
        table = pd.read_parquet(data_folder() / "h200" / f"{name}.parquet")
        assert sum(run["rows"] for run in sidecar["runs"]) == len(table)
        for run in sidecar["runs"]:
            assert run["gpu"] == "NVIDIA H200" and run["driver"] and run["torch"] and run["command"]
