import gzip
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel.calls import columns_of
from perfmodel.correction import fit_local, fit_machine
from perfmodel.fit import SHAPE, read_timings
from perfmodel.model import PerfModel
from perfmodel.opened import choice_file, model_file, network_file
from perfmodel.refine import LEAST_ROWS_NEW, interval_bounds, least_needed, main, refine
from perfmodel.refinement import Refinement
from perfmodel.roofline import roofline_us
from perfmodel.saved import CALIBRATION


@pytest.fixture(scope="module")
def base() -> PerfModel:
    return perfmodel.load("h200")


def on_another_gpu(rows: pd.DataFrame, base: PerfModel) -> pd.DataFrame:
    """Rows as a GPU with 0.8 of the FP8 peak, 0.7 of the bandwidth and launches 1 us longer would have given them."""
    slow = replace(
        base.hardware,
        peak_fp8_tflops=0.8 * base.hardware.peak_fp8_tflops,
        copy_bandwidth_tbs=0.7 * base.hardware.copy_bandwidth_tbs,
    )
    rows = rows.copy()
    for kernel, index in rows.groupby("kernel").indices.items():
        sizes = columns_of(rows.iloc[index])
        ratio = roofline_us(kernel, *sizes, slow) / roofline_us(kernel, *sizes, base.hardware)
        for column in ("p10_us", "p50_us", "p90_us"):
            before = rows[column].to_numpy()[index]
            launch = np.minimum(0.8 * before, 1.5)
            rows.iloc[index, rows.columns.get_loc(column)] = (before - launch) * ratio + launch + 1.0
    return rows


@pytest.fixture(scope="module")
def splits(base) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """GEMM rows of the zoo, which the base never saw, on another GPU: about 300 to refine on, and other shapes to judge.

    Several draws: whether local parts are worth taking hangs on which 65 shapes were measured.
    """
    zoo = read_timings("h200").query("sweep == 'zoo' and settled")
    zoo = zoo[zoo["kernel"].isin(perfmodel.GEMM_KERNELS) & zoo["kernel"].str.startswith("torch/")].reset_index(drop=True)
    shape = zoo.groupby(SHAPE).ngroup().to_numpy()
    rows = on_another_gpu(zoo, base)
    orders = [np.random.default_rng(seed).permutation(shape.max() + 1)[shape] for seed in range(4)]
    return [(rows[order < 65].reset_index(drop=True), rows[order >= 250].reset_index(drop=True)) for order in orders]


@pytest.fixture(scope="module")
def refinements(base, splits) -> list[Refinement]:
    return [refine(base, measured) for measured, _ in splits]


@pytest.fixture(scope="module")
def halves(splits) -> tuple[pd.DataFrame, pd.DataFrame]:
    return splits[1]


@pytest.fixture(scope="module")
def refinement(refinements) -> Refinement:
    return refinements[1]


def mape(model: PerfModel, rows: pd.DataFrame) -> float:
    return float((model.predict(rows)["time_us"] / rows["p50_us"] - 1).abs().mean())


def coverage(model: PerfModel, rows: pd.DataFrame) -> float:
    predicted = model.predict(rows)
    return float(((rows["p50_us"] >= predicted["low_us"]) & (rows["p50_us"] <= predicted["high_us"])).mean())


def test_another_gpu_is_learned_from_few_rows(base, splits, refinements):
    covered, stated = [], []
    for (measured, fresh), refinement in zip(splits, refinements, strict=True):
        assert 200 <= len(measured) <= 400
        assert not set(map(tuple, measured[SHAPE].to_numpy())) & set(map(tuple, fresh[SHAPE].to_numpy()))
        assert mape(base, fresh) > 0.25
        assert mape(refinement.model, fresh) < 0.04
        assert coverage(base, fresh) < 0.2
        covered.append(coverage(refinement.model, fresh))
        # What it says of itself is what fresh shapes find.
        after = refinement.accuracy_after["all"]
        assert after["mape"] == pytest.approx(mape(refinement.model, fresh), abs=0.02)
        stated.append(after["coverage"])
    assert 0.87 <= np.mean(covered) <= 0.93 and min(covered) > 0.8
    assert np.mean(stated) == pytest.approx(np.mean(covered), abs=0.03)


def test_local_parts_beat_the_machine_part_alone(splits, refinements):
    """Taking the local parts out of the refinements makes each worse on fresh shapes, by over 5% together."""
    with_them, without = [], []
    for (_, fresh), refinement in zip(splits, refinements, strict=True):
        plain = {key: replace(value, method="machine", local=None) for key, value in refinement.corrections.items()}
        with_them.append(mape(refinement.model, fresh))
        without.append(mape(replace(refinement, corrections=plain).model, fresh))
    assert (np.array(without) > with_them).all()
    assert np.mean(without) > 1.05 * np.mean(with_them)


@pytest.mark.parametrize("seed", [0, 1])
def test_own_gpu_is_not_made_worse(base, seed):
    """On the machine that the base comes from there is little to learn; half of the zoo's GEMMs judge the other half."""
    zoo = read_timings("h200").query("sweep == 'zoo' and settled")
    zoo = zoo[zoo["kernel"].isin(perfmodel.GEMM_KERNELS) & zoo["kernel"].str.startswith("torch/")].reset_index(drop=True)
    shape = zoo.groupby(SHAPE).ngroup().to_numpy()
    half = np.random.default_rng(seed).permutation(shape.max() + 1)[shape] % 2 == 0
    result = refine(base, zoo[half])
    assert mape(result.model, zoo[~half]) < 1.01 * mape(base, zoo[~half])
    assert coverage(result.model, zoo[~half]) >= 0.88
    told, before = (model.predict(zoo[~half]) for model in (result.model, base))
    wider = ((told["high_us"] - told["low_us"]) / told["time_us"]) / ((before["high_us"] - before["low_us"]) / before["time_us"])
    assert 0.9 <= wider.median() <= 1.02


def test_accuracy_before_is_the_bases_own(base, halves, refinement):
    measured = halves[0]
    error = (base.predict(measured)["time_us"] / measured["p50_us"] - 1).abs()
    before = refinement.accuracy_before
    assert before["all"]["n"] == len(measured)
    assert before["all"]["mape"] == pytest.approx(error.mean())
    assert before["all"]["coverage"] == pytest.approx(coverage(base, measured))
    for kernel, stated in before["kernels"].items():
        chosen = error[measured["kernel"] == kernel]
        assert (stated["n"], stated["mape"], stated["worst"]) == pytest.approx((len(chosen), chosen.mean(), chosen.max()))
    assert before["kinds"]["gemm"]["n"] == len(measured)
    worst = before["worst"][0]
    row = measured.loc[error.idxmax()]
    assert (worst["kernel"], worst["m"], worst["n"], worst["k"]) == (row["kernel"], row["m"], row["n"], row["k"])
    assert worst["measured_us"] == row["p50_us"]


def test_no_shape_is_judged_by_a_model_that_saw_it(base):
    """Rows whose error is noise, independent from shape to shape, cannot be predicted: `after` must not say they were."""
    generator = np.random.default_rng(5)
    sizes = pd.DataFrame({"kernel": "torch/bf16", "m": 256 * generator.permutation(400)[:200], "n": 512, "k": 1024, "groups": 1})
    sizes["m"] += 256
    noise = 0.2 * generator.standard_normal(len(sizes))
    rows = sizes.assign(p50_us=base.predict(sizes)["time_us"] * np.exp(noise))
    result = refine(base, rows)
    assert result.accuracy_after["all"]["mape"] > 0.95 * np.abs(np.exp(-noise) - 1).mean()
    assert result.accuracy_after["all"]["coverage"] == pytest.approx(0.9, abs=0.05)


def test_measured_shapes_have_their_measured_time(base, halves, refinement):
    measured = halves[0]
    predicted = refinement.model.predict(measured)
    np.testing.assert_allclose(predicted["time_us"], measured["p50_us"])
    assert (predicted["low_us"] <= measured["p10_us"]).all() and (predicted["high_us"] >= measured["p90_us"]).all()
    repeat = base.manifest["repeat_on_another_machine"]["p90"]
    assert (predicted["high_us"] / predicted["time_us"] >= 1 + repeat - 1e-9).all()


def test_a_second_measurement_lies_in_the_interval_of_the_first(base):
    """Shapes that validations measured, measured again by a sweep on other H200s: what torch.compile makes repeats worse."""
    zoo = read_timings("h200").query("sweep == 'zoo'")[["kernel", *SHAPE, "p50_us"]]
    quantized, inside = [], []
    for path in sorted((base.folder.parent / "validations").glob("*.json")):
        rows = pd.DataFrame([row for row in json.loads(path.read_text())["time"]["rows"] if row["set"] == "model"])
        rows = rows.rename(columns={"measured_us": "p50_us"})[["kernel", *SHAPE, "p50_us"]]
        again = zoo.merge(rows[["kernel", *SHAPE]], on=["kernel", *SHAPE]).reset_index(drop=True)
        found = refine(base, rows).model.predict(again)
        quantized.append(again["kernel"].str.contains("quantize"))
        inside.append((again["p50_us"] >= found["low_us"]) & (again["p50_us"] <= found["high_us"]))
    quantized, inside = np.concatenate(quantized), np.concatenate(inside)
    assert quantized.sum() > 500 and (~quantized).sum() > 1000
    # Of large models' GEMMs fewer, of small ones' more.
    assert inside[~quantized].mean() >= 0.88 and inside[quantized].mean() >= 0.88


def test_far_from_measured_shapes_the_machine_part_remains(refinement):
    local = next(value for value in refinement.corrections.values() if value.local is not None)
    far = local.local.at + 200.0
    features = np.array([[1.0, 0.5, 0.1, 0.5]] * len(far))
    value, scale = local.predict(features, far, np.full(len(far), 0.05))
    np.testing.assert_allclose(value, features @ local.coefficients, atol=1e-9)
    assert scale.min() >= np.hypot(local.local.amplitude, local.local.noise) * 0.999


def test_kernels_told_together_move_as_the_bases_but_where_measured(base, halves, refinement):
    measured, others = halves
    for model, rows in ((refinement.model, others), (refinement.model, measured)):
        moved = (model.predict_together(rows)["time_us"] / model.predict(rows)["time_us"]).to_numpy()
        wanted = (base.predict_together(rows)["time_us"] / base.predict(rows)["time_us"]).to_numpy()
        seen = rows.merge(measured[["kernel", *SHAPE]].drop_duplicates(), on=["kernel", *SHAPE], how="left", indicator=True)
        known = (seen["_merge"] == "both").to_numpy()
        assert (moved[known] == 1).all()
        np.testing.assert_allclose(moved[~known], wanted[~known], rtol=1e-12)
    assert known.all() and (wanted != 1).mean() > 0.5
    columns = {name: others[name].to_numpy() for name in ("kernel", *SHAPE)}
    told = refinement.model.predict_together(columns)
    assert isinstance(told["low_us"], np.ndarray)
    np.testing.assert_array_equal(told["low_us"], refinement.model.predict_together(others)["low_us"])
    # Both at once, the corrected times as the base's.
    for both, each in zip(refinement.model.alone_and_together(columns), (refinement.model.predict(others), told), strict=True):
        np.testing.assert_array_equal(both, np.column_stack([each[name] for name in ("time_us", "low_us", "high_us")]))


def test_unmeasured_kinds_keep_the_bases_word(base, refinement):
    rows = pd.DataFrame({"kernel": ["torch/quantize_rowwise", "torch/silu_forward"], "m": 4096, "n": 1, "k": 1024})
    pd.testing.assert_frame_equal(refinement.model.predict(rows), base.predict(rows))


def test_columns_by_name_get_arrays(halves, refinement):
    """As the shipped model gives them: a Series would be matched by its index where parts of it are compared."""
    rows, model = halves[1], refinement.model
    found = model.predict({name: rows[name].tolist() for name in ("kernel", "m", "n", "k")})
    expected = model.predict(rows.assign(groups=1))
    assert {name: type(column) for name, column in found.items()} == dict.fromkeys(expected.columns, np.ndarray)
    assert all((found[name] == expected[name].to_numpy()).all() for name in found)


def test_save_and_load_are_exact(base, halves, refinement, tmp_path):
    refinement.save(tmp_path)
    loaded = perfmodel.load("h200", calibration=tmp_path)
    everything = pd.concat(halves)
    pd.testing.assert_frame_equal(loaded.predict(everything), refinement.model.predict(everything), check_exact=True)
    pd.testing.assert_series_equal(loaded.in_range(everything), refinement.model.in_range(everything))
    assert loaded.fingerprint == refinement.model.fingerprint != base.fingerprint
    assert loaded.manifest["refinement"]["accuracy_after"] == refinement.accuracy_after
    Refinement.load(tmp_path, base).save(tmp_path)
    assert perfmodel.load("h200", calibration=tmp_path).fingerprint == loaded.fingerprint
    assert len(list((tmp_path / "perfmodel").iterdir())) == 2


def test_saving_again_replaces(base, halves, refinement, tmp_path):
    refinement.save(tmp_path)
    other = refine(base, halves[0].iloc[:120])
    other.save(tmp_path)
    assert len(list((tmp_path / "perfmodel").glob("*"))) == 2
    assert perfmodel.load("h200", calibration=tmp_path).fingerprint == other.model.fingerprint != refinement.model.fingerprint


def test_a_calibration_outlives_the_time_model_that_it_was_made_of(base, halves, tmp_path, capsys):
    """Made of a model that is no more, it is refused with the command that makes it anew of the same rows."""
    older = replace(base, manifest={**base.manifest, "command": "an older fit"})
    rows = halves[0].iloc[:120]
    refine(older, rows).save(tmp_path)
    with pytest.raises(ValueError, match="without a GPU: python -m perfmodel.refine") as raised:
        perfmodel.load("h200", calibration=tmp_path)
    assert "\n" not in str(raised.value)
    assert main([str(tmp_path)]) == 0
    assert "gemm: 120 rows" in capsys.readouterr().out
    pd.testing.assert_frame_equal(
        perfmodel.load("h200", calibration=tmp_path).predict(halves[1]), refine(base, rows).model.predict(halves[1])
    )
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_bad_calibrations_are_refused_in_one_line(refinement, tmp_path):
    def refused(match):
        with pytest.raises(ValueError, match=match) as raised:
            perfmodel.load("h200", calibration=tmp_path)
        assert "\n" not in str(raised.value)

    refused("is no calibration")
    refinement.save(tmp_path)
    manifest = tmp_path / "perfmodel" / "manifest.json"
    good = manifest.read_text()
    edit(manifest, schema_version=99)
    refused("schema version 99, and this loka-sim reads 3; make the calibration again")
    manifest.write_text(good)
    edit(manifest, hardware="h100")
    refused("made for h100, not h200")
    manifest.write_text(good)
    edit(manifest, base_fingerprint="0")
    refused("corrects the time model 0")
    manifest.write_text(good)
    edit(manifest, repeat=0.0)
    refused("manifest.json is truncated or changed")
    manifest.write_text(good[: len(good) // 2])
    refused("truncated or no JSON")
    manifest.write_text(good)
    arrays = next((tmp_path / "perfmodel").glob("*.npz"))
    data = arrays.read_bytes()
    arrays.write_bytes(data[:-100])
    refused("npz is truncated or changed")
    arrays.unlink()
    refused("npz is missing")
    arrays.write_bytes(data)
    (tmp_path / "manifest.json").write_text(json.dumps({"kind": "something else"}))
    refused("no calibration's manifest")
    (tmp_path / "manifest.json").write_text(json.dumps({"kind": CALIBRATION}))
    assert perfmodel.load("h200", calibration=tmp_path).fingerprint == refinement.model.fingerprint


def files_of(base, kernel):
    """Names of a kernel's files in the models folder."""
    told = [choice_file(kernel)] if base.manifest["kernels"][kernel].get("choice") else []
    return [network_file(kernel), *told, model_file(kernel)]


def full_fit(base, folder):
    """A calibration folder with a full fit of one kernel, for hardware `mine`."""
    models = folder / "perfmodel"
    models.mkdir()
    kernel = "torch/bf16"
    for name in files_of(base, kernel):
        (models / name).write_bytes((base.folder / name).read_bytes())
    manifest = {**base.manifest, "hardware": "mine", "kernels": {kernel: base.manifest["kernels"][kernel]}}
    (models / "manifest.json").write_text(json.dumps(manifest))
    spec = json.loads((base.folder.parent / "hardware.json").read_text())
    (folder / "hardware.json").write_text(json.dumps({**spec, "name": "mine"}))


def test_a_full_fit_is_a_calibration_too(base, tmp_path):
    full_fit(base, tmp_path)
    model = perfmodel.load("mine", calibration=tmp_path)
    rows = pd.DataFrame({"kernel": "torch/bf16", "m": [4096, 77], "n": 512, "k": 256})
    assert model.hardware.name == "mine"
    pd.testing.assert_frame_equal(model.predict(rows), base.predict(rows))
    with pytest.raises(ValueError, match="was made for mine, not h200"):
        perfmodel.load("h200", calibration=tmp_path)
    trees = tmp_path / "perfmodel" / model_file("torch/bf16")
    for path in (trees.with_name(name) for name in files_of(base, "torch/bf16")):
        data = path.read_bytes()
        for broken in (data[: len(data) // 2], gzip.compress(gzip.decompress(data)[:5000])):
            path.write_bytes(broken)
            with pytest.raises(ValueError, match="missing or truncated"):
                perfmodel.load("mine", calibration=tmp_path).predict(rows)
        path.write_bytes(data)
    trees.unlink()
    with pytest.raises(ValueError, match="ubj.gz is missing"):
        perfmodel.load("mine", calibration=tmp_path)
    (tmp_path / "hardware.json").unlink()
    with pytest.raises(ValueError, match="hardware.json is missing"):
        perfmodel.load("mine", calibration=tmp_path)


def as_new_kernel(rows: pd.DataFrame) -> pd.DataFrame:
    """bf16's rows under the name of a kernel that the base does not know."""
    return rows[rows["kernel"] == "torch/fp8_rowwise_fast"].assign(kernel="fbgemm/fp8_rowwise_fast")


def test_a_new_kernel_is_learned_from_the_roofline(base):
    known = {name: entry for name, entry in base.manifest["kernels"].items() if not name.startswith("fbgemm/")}
    base = replace(base, manifest={**base.manifest, "kernels": known})
    zoo = as_new_kernel(read_timings("h200").query("sweep == 'zoo'")).sample(frac=1, random_state=0)
    measured, fresh = zoo.iloc[:200], zoo.iloc[200:]
    model = refine(base, measured).model
    assert mape(model, fresh) < 0.09  # the roofline alone is 64% off
    assert coverage(model, fresh) >= 0.85
    predicted = model.predict(fresh)
    assert np.median(predicted["high_us"] / predicted["low_us"]) < 1.5
    assert "fbgemm/fp8_rowwise_fast" not in model.manifest["refinement"]["accuracy_before"]["kernels"]
    assert model.manifest["kernels"]["fbgemm/fp8_rowwise_fast"]["held_out"]["n"] == 200
    assert model.in_range(fresh).any()
    few = measured.iloc[: LEAST_ROWS_NEW - 1]
    with pytest.raises(ValueError, match=f"fbgemm/fp8_rowwise_fast is new .* has {LEAST_ROWS_NEW - 1} measured shapes"):
        refine(base, few)


def test_bad_rows_are_refused_and_linear_ones_ignored(base, halves):
    rows = halves[0].iloc[:60]
    with pytest.raises(ValueError, match=r"lack the columns \['p50_us'\]"):
        refine(base, rows.drop(columns="p50_us"))
    with pytest.raises(ValueError, match="p50_us must be positive"):
        refine(base, rows.assign(p50_us=0.0))
    with pytest.raises(ValueError, match="'torch/fp9' is not a kernel"):
        refine(base, rows.assign(kernel="torch/fp9"))
    with pytest.raises(ValueError, match="at least 1"):
        refine(base, rows.assign(m=0))
    linear = rows.iloc[:5].assign(kernel="torchao/linear_rowwise", p50_us=1e6, eager_us=3.0)
    assert refine(base, pd.concat([rows, linear])).fingerprint == refine(base, rows).fingerprint


def test_a_handful_of_rows_does_not_narrow_the_intervals(base, halves):
    """Five rows that the base happens to predict exactly are no ground for a narrower interval elsewhere."""
    rows = halves[0].query("kernel == 'torch/bf16'").iloc[:5]
    rows = rows.assign(p50_us=base.predict(rows)["time_us"])
    fresh = halves[1].query("kernel == 'torch/bf16'")
    before, after = base.predict(fresh), refine(base, rows[["kernel", *SHAPE, "p50_us"]]).model.predict(fresh)
    assert np.median(after["high_us"] / after["low_us"]) > 0.95 * np.median(before["high_us"] / before["low_us"])


def test_a_skewed_interval_stays_skewed(base, halves):
    """What the base says of either side holds until measurements say otherwise, and those of another kind do not."""
    quantized = read_timings("h200").query("sweep == 'zoo' and kernel == 'torch/quantize_rowwise'")
    entry = base.manifest["kernels"]["torch/quantize_rowwise"]
    factors = [[0.9, 1.4]] * len(entry["interval_factors"])
    kernels = {**base.manifest["kernels"], "torch/quantize_rowwise": {**entry, "interval_factors": factors}}
    base = replace(base, manifest={**base.manifest, "kernels": kernels})
    rows = pd.concat([halves[0], quantized.head(3)], ignore_index=True)
    # GEMMs that are just as predicted, and a handful of quantizers.
    model = refine(base, rows.assign(p50_us=base.predict(rows)["time_us"])).model

    def sides(model, rows):
        predicted = model.predict(rows)
        return np.log(predicted["high_us"] / predicted["time_us"]), np.log(predicted["time_us"] / predicted["low_us"])

    before, after = (sides(some, quantized.tail(-3).reset_index(drop=True)) for some in (base, model))
    for side in (0, 1):
        assert after[side].to_numpy() == pytest.approx(before[side].to_numpy(), rel=0.15)
    # Nor are those of what was seen to be exact narrower on other shapes.
    assert (sides(model, halves[1])[0] > 0.99 * sides(base, halves[1])[0]).all()


QUANTIZERS = [f"torch/quantize_{name}" for name in ("rowwise", "rowwise_transposed", "tensorwise", "tensorwise_transposed")]
GEMMS = ["torch/bf16", "torch/fp8_rowwise_fast", "torch/fp8_tensorwise_fast", "torch/fp8_tensorwise_split"]


def drawn(base: PerfModel, kernels: list[str], own: int, generator: np.random.Generator) -> tuple[pd.DataFrame, pd.DataFrame]:
    """So many random shapes and 150 others under all of the kernels, the base's word on them, and each row's `shape`."""
    count = own + 150
    sizes = pd.DataFrame({
        "m": 32 * (8 + generator.permutation(256)[:count]), "n": 128 * generator.integers(1, 33, count),
        "k": 128 * generator.integers(1, 33, count), "groups": 1, "shape": np.arange(count),
    })  # fmt: skip
    if kernels == QUANTIZERS:
        sizes["n"] = 1
    rows = sizes.merge(pd.DataFrame({"kernel": kernels}), how="cross")
    rows = rows.join(base.predict(rows))
    return rows[rows["shape"] < own].reset_index(drop=True), rows[rows["shape"] >= own].reset_index(drop=True)


def made(rows: pd.DataFrame, error: np.ndarray) -> pd.DataFrame:
    """Times as a machine that is 4% slower measures them, off by so many of the standard deviations that the base states."""
    end = np.where(error > 0, rows["high_us"], rows["low_us"])
    return rows.assign(p50_us=1.04 * rows["time_us"] * (end / rows["time_us"]) ** (np.abs(error) / 1.6449))


@pytest.mark.parametrize("kernels", [GEMMS, QUANTIZERS])
def test_shapes_that_are_easy_do_not_narrow_those_of_others(base, kernels):
    """A model's shapes err half as much as the base said, fresh ones as much as it said: nine of ten of these are inside."""
    inside, gain = [], []
    for seed in range(4):
        generator = np.random.default_rng(seed)
        own, fresh = drawn(base, kernels, 60, generator)
        own = made(own, 0.5 * generator.standard_normal(len(own)))
        fresh = made(fresh, generator.standard_normal(len(fresh)))
        model = refine(base, own).model
        inside.append(coverage(model, fresh))
        gain.append(mape(base, fresh) - mape(model, fresh))
    assert 0.88 <= np.mean(inside) <= 0.94
    assert np.mean(gain) > 0.0  # the 4% are found


def test_what_few_shapes_have_in_common_is_not_the_machine(base):
    """All kernels are off alike on a shape, and the machine is as the base knows it: fresh shapes must not pay for it."""
    worse, inside = [], []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        own, fresh = drawn(base, QUANTIZERS, 14, generator)
        of_shape = 0.12 * generator.standard_normal(164)
        own, fresh = (rows.assign(p50_us=rows["time_us"] * np.exp(of_shape[rows["shape"]])) for rows in (own, fresh))
        model = refine(base, own).model
        worse.append(mape(model, fresh) / mape(base, fresh) - 1)
        inside.append(coverage(model, fresh) - coverage(base, fresh))
    assert np.mean(worse) < 0.01
    assert np.mean(inside) > -0.01


def test_parts_are_taken_where_shapes_make_them_sure():
    """Where nothing is gained a part is taken once in a hundred draws, however many rows each shape has; a gain is found."""
    generator = np.random.default_rng(0)
    shape = np.repeat(np.arange(10), 8)

    def taken(gain: float) -> float:
        without = np.repeat(1 + gain + 0.3 * generator.standard_normal((3000, 10)), 8, axis=1)
        found = [least_needed(np.stack([rows, np.ones(80)], axis=1), shape) for rows in without]
        return float(np.mean(found))

    assert 0.003 < taken(0.0) < 0.018
    assert taken(0.5) > 0.95
    assert least_needed(np.full((80, 2), np.nan), shape) == 0
    # However alike the gains of four shapes are, they are four.
    gains = np.array([[1.0 + 0.01 * number, 0.1] for number in range(5)])
    assert least_needed(gains[:4], np.arange(4)) == 0 and least_needed(gains, np.arange(5)) == 1


def test_columns_are_predicted_as_a_frame_is(halves, refinement):
    frame = pd.concat([halves[0][:20], halves[1][:20]], ignore_index=True)[["kernel", *SHAPE]]
    columns = {name: frame[name].tolist() for name in frame}
    by_name, by_frame = refinement.model.predict(columns), refinement.model.predict(frame)
    for name in ("time_us", "low_us", "high_us"):
        assert by_name[name].tolist() == by_frame[name].tolist()
    assert refinement.model.in_range(columns).tolist() == refinement.model.in_range(frame).tolist()


def test_errors_of_predict_stay(refinement):
    model = refinement.model
    with pytest.raises(ValueError, match="'torch/fp9' is not a kernel"):
        model.predict(pd.DataFrame({"kernel": ["torch/fp9"], "m": 1, "n": 1, "k": 1}))
    with pytest.raises(ValueError, match="lacks the columns"):
        model.predict(pd.DataFrame({"kernel": ["torch/bf16"], "m": [1]}))
    with pytest.raises(ValueError, match="at least 1"):
        model.predict(pd.DataFrame({"kernel": ["torch/bf16"], "m": [0], "n": 16, "k": 16}))
    empty = pd.DataFrame({"kernel": pd.Series(dtype=str), "m": [], "n": [], "k": []})
    assert model.predict(empty).empty


def test_predict_keeps_order(base, refinement):
    generator = np.random.default_rng(0)
    names = [name for name in base.manifest["kernels"] if name in perfmodel.GEMM_KERNELS]
    frame = pd.DataFrame({
        "kernel": generator.choice(names, 36_000), "m": 128 * generator.integers(2, 500, 36_000),
        "n": 128 * generator.integers(1, 25, 36_000), "k": 128 * generator.integers(1, 25, 36_000),
    })  # fmt: skip
    whole = refinement.model.predict(frame)
    some = frame.sample(500, random_state=1)
    np.testing.assert_allclose(refinement.model.predict(some), whole.loc[some.index], rtol=1e-6)  # float32 sums


def test_machine_part_recovers_known_coefficients():
    generator = np.random.default_rng(1)
    features = np.stack([np.ones(400), *generator.uniform(0, 1, (3, 400))], axis=1)
    truth = {"a": np.array([0.3, 0.0, 0.2, -0.1]), "b": np.array([0.25, 0.0, 0.2, -0.1])}
    kernels = np.array(["a", "b"] * 200, dtype=object)
    target = np.array([row @ truth[name] for row, name in zip(features, kernels, strict=True)])
    target += 0.01 * generator.standard_normal(400)
    target[:8] += 3.0  # outliers
    found = fit_machine(kernels, features, target)
    for name, value in truth.items():
        np.testing.assert_allclose(features @ found[name][0], features @ value, atol=0.02)


def test_rows_that_say_the_same_count_as_one():
    """Every row eight times over, each eight one witness: the coefficients and covariance of the rows alone."""
    generator = np.random.default_rng(3)
    features = np.stack([np.ones(30), *generator.uniform(0, 1, (3, 30))], axis=1)
    kernels = np.array(["a", "b"] * 15, dtype=object)
    target = 0.2 * features[:, 1] + 0.05 * generator.standard_normal(30)
    alone = fit_machine(kernels, features, target)
    eight = fit_machine(np.repeat(kernels, 8), np.repeat(features, 8, axis=0), np.repeat(target, 8), 8.0)
    for name, (value, covariance) in alone.items():
        np.testing.assert_allclose(eight[name][0], value, rtol=1e-9)
        np.testing.assert_allclose(eight[name][1], covariance, rtol=1e-9)


def test_machine_part_knows_how_unsure_it_is():
    """Over many draws of a machine, its predictions of larger calls are off as far as it says."""
    generator = np.random.default_rng(2)
    near, far = np.array([1.0, 0.0, 0.3, 0.5]), np.array([1.0, 3.0, 0.0, 1.0])
    scores = {"near": [], "far": []}
    for _ in range(150):
        truth = np.array([0.3, 0.1, 0.3, 0.2]) * generator.standard_normal(4)
        features = np.stack([np.ones(40), *generator.uniform(0, 1, (3, 40))], axis=1)
        target = features @ truth + 0.05 * generator.standard_normal(40)
        coefficients, covariance = fit_machine(np.array(["a"] * 40, dtype=object), features, target)["a"]
        for name, call in (("near", near), ("far", far)):
            scores[name].append(call @ (coefficients - truth) / np.sqrt(call @ covariance @ call))
    for score in scores.values():
        assert 0.7 < np.sqrt(np.mean(np.square(score))) < 1.4


def test_local_part_interpolates_and_knows_how_far_it_is():
    at = np.zeros((30, 7))
    at[:, 0] = np.linspace(0, 15, 30)
    local = fit_local(at, 0.2 * np.sin(at[:, 0]), (2.0, 0.2, 0.01))
    between = at[:-1] + (at[1:] - at[:-1]) / 2
    mean, deviation, unknown = local.predict(between)
    np.testing.assert_allclose(mean, 0.2 * np.sin(between[:, 0]), atol=0.02)
    _, far, all_unknown = local.predict(at[-1:] + 100)
    assert deviation.max() < 0.05 < far[0]
    assert unknown.max() < 0.25 and all_unknown[0] == pytest.approx(1.0)


def test_interval_bounds_go_from_what_was_expected_to_what_was_seen():
    assert interval_bounds(np.array([]), 0) == pytest.approx((-1.6449, 1.6449), rel=0.01)
    assert interval_bounds(np.array([]), 0, (-1.0, 3.0), least=0.0) == pytest.approx((-1.0, 3.0), rel=0.01)
    score = np.random.default_rng(0).standard_normal(100_000) * 4 + 1
    assert interval_bounds(score, 100_000) == pytest.approx(tuple(np.quantile(score, [0.05, 0.95])), rel=0.01)
    # The same rows of few shapes move them less.
    few, more = interval_bounds(score, 10), interval_bounds(score, 100)
    assert 1.7 < few[1] < more[1] < 7.6
    # What nobody exceeded from below still has 0 inside, and what the base said of it.
    assert interval_bounds(np.full(500, 2.0), 500, least=0.0) == pytest.approx((0.0, 2.0))
    assert interval_bounds(np.full(500, 2.0), 500) == pytest.approx((-1.6449, 2.0), rel=0.01)
