import gzip
import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import xgboost

import perfmodel
from perfmodel import KERNELS, data_folder
from perfmodel.choice import with_choice
from perfmodel.features import DOUBTED, features
from perfmodel.fit import HELD_OUT_SWEEPS, NEVER_SEEN, read_timings
from perfmodel.held_out import choice_regret, class_profile, folds_of, interval_factors
from perfmodel.judge import SHAPE
from perfmodel.measured import launch_files
from perfmodel.model import PerfModel
from perfmodel.network import Network
from perfmodel.opened import model_file, network_file
from perfmodel.packed import unpack
from perfmodel.prediction import ROOFLINE_SHARE, baseline_us, size_class
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


def test_kernels_whose_files_two_threads_read_have_the_times_that_each_has_alone():
    """Few calls of many kernels wait for the reading; whoever asks for one kernel reads it by himself."""
    calls = [(name, 512, 1 if spec.kind not in ("gemm", "batched_gemm") else 768, 1024) for name, spec in KERNELS.items()]
    names = perfmodel.load("h200").manifest["kernels"]
    several = rows(*(call for call in calls if call[0] in names))
    together = perfmodel.load("h200").predict(several)
    alone = [perfmodel.load("h200").predict(several.iloc[[number]]) for number in range(len(several))]
    assert len(several) > 20
    pd.testing.assert_frame_equal(together, pd.concat(alone), check_exact=True)


def test_hardware_ceilings_are_the_fastest_rows(model, timings):
    """The specification's ceilings are what its `sources` say they are."""
    first = timings[(timings["sweep"] == "lrm") & (timings["run"] == 0)]
    work = 2e-6 * first["m"] * first["n"] * first["k"] * first["groups"] / first["p50_us"]
    bf16 = work[first["kernel"] == "torch/bf16"].max()
    fp8 = work[first["kernel"].str.startswith("torch/fp8")].max()
    assert model.hardware.peak_bf16_tflops == pytest.approx(bf16, rel=1e-3)
    assert model.hardware.peak_fp8_tflops == pytest.approx(fp8, rel=1e-3)


@pytest.mark.parametrize("name", ["torch/fp8_tensorwise_fast", "torch/bf16_batched", "torch/rmsnorm_forward"])
def test_predict_equals_the_files_evaluated_by_xgboost(model, name):
    """Kernels with a network below their trees, of which one knows the doubt about cuBLAS's choice, and one of trees alone."""
    path = data_folder() / "h200" / "models" / model_file(name)
    booster = xgboost.Booster()
    booster.load_model(bytearray(unpack(path.read_bytes())))
    arrays = tuple(np.array(x) for x in ([4096.0, 64.0], [1024.0, 1.0], [512.0, 2048.0], [1.0, 1.0]))
    batched = KERNELS[name].kind == "batched_gemm"
    if "gemm" in KERNELS[name].kind:
        arrays[1][1], arrays[3][0] = 48.0, 1 + batched
    seen = features(name, *arrays, model.hardware, model.planned(name))
    assert model.planned(name) >= DOUBTED
    names, matrix, _ = with_choice(*seen, model.choice(name), name, arrays, model.hardware, doubted=batched)
    assert ("chosen_doubt" in names) == batched
    smooth = np.zeros(2)
    if model.manifest["kernels"][name]["network"]:
        smooth = Network.load(gzip.decompress(path.with_name(network_file(name)).read_bytes())).predict(matrix)
        names, matrix = [*names, "network"], np.column_stack([matrix, smooth])
    log_ratio = smooth + booster.predict(xgboost.DMatrix(matrix, feature_names=names))
    expected = baseline_us(name, *arrays, model.hardware, model.planned(name)) * np.exp(log_ratio)
    frame = pd.DataFrame({"kernel": name, **dict(zip(("m", "n", "k", "groups"), arrays, strict=True))})
    np.testing.assert_allclose(model.predict(frame)["time_us"], expected, rtol=1e-5)
    assert ("network" in names) == ("gemm" in KERNELS[name].kind)


def test_predict_keeps_order_and_index(model):
    generator = np.random.default_rng(0)
    names = [name for name in model.manifest["kernels"] if KERNELS[name].kind != "batched_gemm" and "block" not in name]
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


def test_columns_are_predicted_as_a_frame_is(model):
    frame = rows(("torch/bf16", 512, 512, 512), ("torch/quantize_rowwise", 4096, 1, 1024), ("torch/bf16", 2**24, 64, 32))
    columns = {name: frame[name].tolist() for name in frame}
    by_name, by_frame = model.predict(columns), model.predict(frame)
    for name in ("time_us", "low_us", "high_us"):
        np.testing.assert_array_equal(by_name[name], by_frame[name])
    assert model.in_range(columns).tolist() == model.in_range(frame).tolist() == [True, True, False]
    with pytest.raises(ValueError, match="lacks the columns \\['k'\\]"):
        model.predict({name: columns[name] for name in ("kernel", "m", "n")})


def test_a_what_if_loads_neither_pandas_nor_xgboost():
    code = (
        "import sys, loka_sim; loka_sim.whatif('dlrm-small'); print({'pandas', 'xgboost', 'torch', 'sklearn'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


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
    with pytest.raises(ValueError, match="fbgemm/quantize_rowwise cannot run K = 32768: it is more than 24512"):
        model.predict(rows(("fbgemm/quantize_rowwise", 2048, 1, 32768)))
    for wrong in (-64, 0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="k = .* is no size"):
            model.predict(rows(("torch/bf16", 64, 64, wrong)))
    with pytest.raises(ValueError, match="torch/fp8_rowwise_fast cannot run N = 72: it is no multiple of 16"):
        model.predict(rows(("torch/fp8_rowwise_fast", 64, 64, 64), ("torch/fp8_rowwise_fast", 64, 72, 64)))
    with pytest.raises(ValueError, match="torch/bf16 makes one product, not groups = 3"):
        model.predict(rows(("torch/bf16", 64, 64, 64)).assign(groups=3))
    for wrong in (True, "64", "wide", 64j, None):
        for frame in (rows(("torch/bf16", wrong, 64, 64)), {"kernel": ["torch/bf16"], "m": [wrong], "n": [64], "k": [64]}):
            with pytest.raises(ValueError, match=f"m = ({re.escape(repr(wrong))}|nan) is no size"):
                model.predict(frame)
    with pytest.raises(ValueError, match="m = True is no size"):
        model.predict(rows(("torch/bf16", True, 64, 64), ("torch/bf16", 64, 64, 64)))
    with pytest.raises(ValueError, match="groups = False is no size"):
        model.predict(rows(("torch/bf16", 64, 64, 64)).assign(groups=False))
    with pytest.raises(ValueError, match=r"n has the shape \(2,\) for 1 kernels"):
        model.predict({"kernel": ["torch/bf16"], "m": [64], "n": [64, 64], "k": [64]})
    with pytest.raises(ValueError, match="m = 2.5 is no size"):
        model.explain({"kernel": "torch/bf16", "m": 2.5, "n": 64, "k": 64})
    with pytest.raises(ValueError, match="'torch/fp9' is not a kernel"):
        model.in_range(rows(("torch/fp9", 64, 64, 64)))
    with pytest.raises(ValueError, match="names no kernel"):
        model.predict(rows((None, 64, 64, 64)))
    frame = rows(("torch/bf16", 64, 64, 64))
    for ask in (model.predict, model.in_range):
        with pytest.raises(ValueError, match="has the column 'kernel' more than once"):
            ask(pd.concat([frame, frame], axis=1))
        with pytest.raises(ValueError, match=r"lacks the columns \['k'\]"):
            ask(frame.drop(columns="k"))
    with pytest.raises(ValueError, match="mi300 has no data|'mi300' has no data"):
        perfmodel.load("mi300")
    assert model.predict(rows()).empty


@pytest.mark.parametrize("call", [
    ("torch/bf16", 2048, 1024, 512), ("torch/fp8_tensorwise_fast", 48, 4096, 65536), ("torch/quantize_rowwise", 4096, 1, 768),
])  # fmt: skip
def test_an_explanation_multiplies_up_to_the_prediction(model, call):
    row = dict(zip(("kernel", "m", "n", "k"), call, strict=True))
    told = model.explain(row)
    predicted = model.predict(pd.DataFrame([row])).iloc[0]
    product = (told.roofline_us + told.launch_us) * told.typical * np.prod(list(told.factors.values()))
    assert product == pytest.approx(predicted["time_us"], rel=1e-4)
    assert (told.time_us, told.low_us, told.high_us) == tuple(predicted)
    limits = roofline_us(call[0], *(np.array([float(x)]) for x in (*call[1:], 1)), model.hardware)
    assert told.roofline_us == limits[0] and told.correction == 1.0 and told.outside == ()
    strengths = np.abs(np.log(list(told.factors.values())))
    known = set(model.seen(call[0], tuple(np.ones((4, 1)))).names)
    assert (np.diff(strengths) <= 0).all() and set(told.factors) == known
    words = told.words(3)
    assert f"{told.time_us:.2f} us" in words and next(iter(told.factors)) in words and f"bound by {told.bound}" in words


def test_an_explanation_says_where_the_choice_of_a_kernel_is_in_doubt(model):
    """The interval is the manifest's factors to the power that it names."""
    calls = [{"kernel": "torch/bf16", "m": 512 * step, "n": 96 * step, "k": 128} for step in range(1, 60, 3)]
    told = [model.explain(call) for call in calls]
    powers = model.manifest["kernels"]["torch/bf16"]["wider_in_doubt"]
    assert powers[0] == 1.0 and powers == sorted(powers) and {found.wider for found in told} <= set(powers)
    unsure, sure = (next(found for found in told if (found.wider > 1) == doubted) for doubted in (True, False))
    for found in (unsure, sure):
        low, high = model.manifest["kernels"]["torch/bf16"]["interval_factors"][size_class(np.array([found.time_us]))[0]]
        power = found.wider * max(found.wider_beyond, found.wider_where_few) * found.wider_where_largest * found.wider_by_digits
        assert found.low_us == pytest.approx(found.time_us * low**power)
        assert found.high_us == pytest.approx(found.time_us * high**power)
    assert "is in doubt" in unsure.words() and "is in doubt" not in sure.words()


def test_an_explanation_says_where_little_is_known_around_a_call(model):
    """Few were timed around a shape of few towers, whose N 8 does not divide; many around one as layers have it."""
    few = model.explain({"kernel": "torch/bf16_batched", "m": 203, "n": 367, "k": 20000, "groups": 5})
    powers = model.manifest["kernels"]["torch/bf16_batched"]["wider_where_few"]
    assert few.wider_where_few in powers and few.wider_where_few > 1.2 and few.outside == () and few.gap_octaves == 0
    assert f"calls like it are less well known: an interval {few.wider_where_few:.1f} times as wide" in few.words()
    entry = model.manifest["kernels"]["torch/bf16_batched"]
    assert few.wider_in_few_groups == entry["wider_in_few_groups"] != 1
    wider, narrower = (replace(few, wider_in_few_groups=power).words() for power in (1.3, 0.9))
    assert "products in few groups are less well known: an interval 1.3 times as wide" in wider and "few groups" not in narrower
    low, high = entry["interval_factors"][size_class(np.array([few.time_us]))[0]]
    power = few.wider * max(few.wider_beyond, few.wider_where_few) * few.wider_in_few_groups * few.wider_by_digits
    assert (few.low_us, few.high_us) == pytest.approx((few.time_us * low**power, few.time_us * high**power))
    one_a_sample = model.explain({"kernel": "torch/bf16_batched", "m": 27, "n": 27, "k": 64, "groups": 8192})
    assert one_a_sample.wider_in_few_groups == 1 and "few groups" not in one_a_sample.words()
    many = model.explain({"kernel": "torch/bf16", "m": 8192, "n": 512, "k": 512})
    assert many.wider_where_few == 1 and "less well known" not in many.words()


def test_an_explanation_says_whether_sizes_are_round(model):
    powers = model.manifest["kernels"]["torch/bf16"]["wider_by_digits"]
    round_, any_ = (model.explain({"kernel": "torch/bf16", "m": m, "n": 512, "k": k}) for m, k in ((8192, 512), (8189, 509)))
    assert (round_.wider_by_digits, any_.wider_by_digits) == (powers[0], powers[-1]) and powers[0] < 1 < powers[-1]
    assert "its sizes are round" in replace(round_, wider_by_digits=0.8).words()
    assert "not round: an interval 1.2 times as wide" in replace(any_, wider_by_digits=1.2).words()
    assert "round" not in replace(any_, wider_by_digits=1.02).words()
    powers = model.manifest["kernels"]["torch/relu_forward"]["wider_by_digits"]
    assert model.explain({"kernel": "torch/relu_forward", "m": 8189, "n": 1, "k": 509}).wider_by_digits == powers[-1] > 1


def test_an_explanation_says_that_few_calls_as_large_were_timed(model):
    large = model.explain({"kernel": "torch/bf16", "m": 65536, "n": 8192, "k": 8192})
    entry = model.manifest["kernels"]["torch/bf16"]
    assert large.wider_where_largest == entry["wider_where_largest"] > 1.2 and large.outside == ()
    power = large.wider * max(large.wider_beyond, large.wider_where_few) * large.wider_where_largest
    assert large.wider_by_digits == 1
    assert large.high_us == pytest.approx(large.time_us * entry["interval_factors"][-1][1] ** power)
    assert f"few calls as large were timed: an interval {large.wider_where_largest:.1f} times as wide" in large.words()
    usual = model.explain({"kernel": "torch/bf16", "m": 8192, "n": 8192, "k": 8192})
    assert usual.wider_where_largest == 1 and "few calls as large" not in usual.words()


def test_an_explanation_says_what_bounds_and_what_was_never_measured(model):
    assert model.explain({"kernel": "torch/bf16", "m": 8192, "n": 8192, "k": 8192}).bound == "compute"
    assert model.explain({"kernel": "torch/bf16", "m": 262144, "n": 64, "k": 64}).bound == "memory"
    assert model.explain({"kernel": "torch/bf16", "m": 64, "n": 64, "k": 64}).bound == "launch"
    far = model.explain({"kernel": "torch/bf16", "m": 2**24, "n": 64, "k": 64})
    assert far.outside == ("m",) and "m outside the measured sizes" in far.words()
    with pytest.raises(ValueError, match="cannot run"):
        model.explain({"kernel": "torch/fp8_rowwise_fast", "m": 64, "n": 7, "k": 64})


def test_no_call_takes_less_than_the_shortest_of_its_kernel_that_was_measured(model, timings):
    """Trees know nothing of a single element: of one they made 0.0002 us."""
    shortest, clipped = timings.groupby("kernel")["p50_us"].min(), []
    for kernel in model.manifest["kernels"]:
        spec, few = KERNELS[kernel], (1, 2, 4, 16, 64, 128, 256)
        products = {"gemm": (1,), "batched_gemm": (2, 64)}.get(spec.kind, (1,))
        sizes = [(m, n, k, g) for m in few for n in (few if "gemm" in spec.kind else (1,)) for k in few for g in products]
        frame = pd.DataFrame(
            [(kernel, *size) for size in sizes if not spec.illegal(*size[:3], groups=size[3])],
            columns=["kernel", "m", "n", "k", "groups"],
        )
        told = model.predict(frame)
        assert (told["time_us"] >= shortest[kernel]).all() and (told["low_us"] > 0.5 * shortest[kernel]).all()
        clipped += frame[told["time_us"] == model.least_us(kernel)].to_dict("records")
    assert {"torch/blocknorm_forward", "loka/quantize_tensorwise"} <= {row["kernel"] for row in clipped}
    told = model.explain(clipped[0])
    assert told.clipped and told.correction == 1.0 and "its shortest measured call, which it takes instead" in told.words()
    assert not model.explain({"kernel": "torch/bf16", "m": 8192, "n": 8192, "k": 8192}).clipped


@pytest.mark.parametrize(("name", "least"), [("h200", 190_000), ("h100", 50_000)])
def test_no_timing_beats_what_no_prediction_may(name, least):
    rows, hardware = read_timings(name), perfmodel.hardware.load(name)
    share = [
        mine["p50_us"].to_numpy() / roofline_us(kernel, *(mine[size].to_numpy(float) for size in SHAPE), hardware)
        for kernel, mine in rows.groupby("kernel")
    ]
    assert len(rows) > least and 1.0 > min(map(np.min, share)) > ROOFLINE_SHARE


@pytest.mark.parametrize("name", ["h200", "h100"])
def test_no_call_beats_the_roofline_however_far_it_lies_outside(name):
    model, generator = perfmodel.load(name), np.random.default_rng(0)
    for kernel in (kernel for kernel in model.manifest["kernels"] if "gemm" in KERNELS[kernel].kind):
        spec = KERNELS[kernel]
        m, n, k = 128 * np.exp2(generator.integers(0, 13, (3, 400)))
        groups = np.exp2(generator.integers(1, 7, 400)) if spec.kind == "batched_gemm" else np.ones(400)
        told = model.predict({"kernel": [kernel] * 400, "m": m, "n": n, "k": k, "groups": groups})
        # Nor does the interval reach below it, however wide it is there.
        possible = ROOFLINE_SHARE * roofline_us(kernel, m, n, k, groups, model.hardware)
        assert (told["low_us"] >= possible).all() and (told["time_us"] >= told["low_us"]).all()
        assert (told["high_us"] >= told["time_us"]).all()


def test_in_range(model):
    """Which calls are outside what was measured is asked for; how many, each answer says."""
    asked = rows(("torch/bf16", 2048, 1024, 512), ("torch/bf16", 2**24, 1024, 512), ("torch/bf16", 2048, 2**17, 512))
    assert model.in_range(asked).tolist() == [True, False, False]
    assert model.predict(asked).attrs == {"extrapolated": 2} and model.predict(asked[:1]).attrs == {"extrapolated": 0}


def test_manifest_accuracy_on_held_out_models_recomputed(model, timings):
    """What the README quotes: the shipped trees on the zoo's shapes, computed again through the public API."""
    zoo = timings[(timings["sweep"] == "zoo") & timings["settled"]]
    zoo = zoo[zoo["kernel"].isin(list(model.manifest["kernels"]))].reset_index(drop=True)
    error = (model.predict(zoo)["time_us"] / zoo["p50_us"] - 1).abs()
    for kernel, stated in model.manifest["held_out_models"]["kernels"].items():
        chosen = error[zoo["kernel"] == kernel]
        assert len(chosen) == stated["n"]
        assert chosen.mean() == pytest.approx(stated["mape"], rel=1e-4)


def test_intervals_cover_held_out_models(model, timings):
    """Nine in ten of the zoo's rows, which calibrated nothing, lie inside; tolerance for whole models of correlated rows."""
    zoo = timings[(timings["sweep"] == "zoo") & timings["settled"]]
    zoo = zoo[zoo["kernel"].isin(list(model.manifest["kernels"]))].reset_index(drop=True)
    predicted = model.predict(zoo)
    inside = (zoo["p50_us"] >= predicted["low_us"]) & (zoo["p50_us"] <= predicted["high_us"])
    assert inside.mean() == pytest.approx(model.manifest["held_out_models"]["coverage"], abs=1e-3)
    assert 0.84 <= inside.mean() <= 0.97


def test_folds_hold_out_whole_shapes(timings):
    fold = folds_of(timings)
    assert timings.assign(fold=fold).groupby(SHAPE)["fold"].nunique().max() == 1
    assert set(fold) == set(range(5))


def test_held_out_models_share_no_fitted_shape(model, timings):
    """As many fitted rows as the manifest says, with no shape of the zoo: of GEMMs no GEMM's, of others no operand."""
    known = timings[timings["settled"] & timings["kernel"].isin(list(model.manifest["kernels"]))]
    fitted = 0
    gemms = [name for name in timings["kernel"].unique() if "gemm" in KERNELS[name].kind]
    for of_gemms in (True, False):
        judged = timings["sweep"].isin(list(NEVER_SEEN)) & (timings["kernel"].isin(gemms) == of_gemms)
        seen = set(map(tuple, timings.loc[judged, SHAPE].to_numpy()))
        mine = known[(known["kernel"].isin(gemms) == of_gemms) & ~known["sweep"].isin(list(HELD_OUT_SWEEPS))]
        fitted += sum(shape not in seen for shape in map(tuple, mine[SHAPE].to_numpy()))
    assert fitted == model.manifest["rows"]


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


def test_other_kernels_steady_the_interval_of_a_class_with_few_rows():
    """Fifty rows a class, of kernels whose small calls err twice as much: coverage is nearer to 90% with a profile."""
    generator = np.random.default_rng(4)

    def drawn(rows: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
        predicted = np.repeat([3.0, 10.0, 50.0, 500.0], rows)
        spread = scale * np.where(predicted < 20, 0.1, 0.05)
        return predicted * np.exp(spread * generator.standard_normal(len(predicted))), predicted

    profile = class_profile(drawn(400, scale) for scale in (0.5, 0.8, 1.0, 2.0))
    assert profile.shape == (4, 2) and (profile[:2] > 1.4 * profile[2:]).all()
    off: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(40):
        known, (measured, predicted) = drawn(50, 1.5), drawn(2000, 1.5)
        for steadied, found in off.items():
            low, high = np.array(interval_factors(*known, profile if steadied else None))[size_class(predicted)].T * predicted
            inside = ((measured >= low) & (measured <= high)).reshape(4, -1).mean(axis=1)
            found.extend(inside - 0.9)
    assert np.mean(np.square(off[True])) < 0.7 * np.mean(np.square(off[False]))
    assert abs(np.mean(off[True])) < 0.02


def test_a_size_class_that_no_kernel_has_is_as_wide_as_all_sizes():
    predicted = np.full(100, 10.0)
    measured = predicted * np.exp(np.random.default_rng(5).standard_normal(100) / 10)
    profile = class_profile([(measured, predicted)])
    np.testing.assert_allclose(profile, 1.0)
    factors = interval_factors(measured, predicted, profile)
    np.testing.assert_allclose(factors, [factors[0]] * 4)


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
    folder = data_folder() / "h200"
    for name in ("gemm", "memory", "collectives", "launches"):
        sidecar = json.loads((folder / f"{name}.json").read_text())
        files = launch_files(folder) if name == "launches" else [folder / f"{name}.parquet"]
        assert sum(run["rows"] for run in sidecar["runs"]) == sum(pq.read_metadata(path).num_rows for path in files)
        for run in sidecar["runs"]:
            assert run["gpu"] == "NVIDIA H200" and run["driver"] and run["torch"] and run["command"]
