"""A user fits the time model to a sweep of his own."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import fit, learn_pairs, measured
from perfmodel.calls import columns_of


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """120 shapes of two kernels on a GPU 1.5 times slower, 20 rows of a third, some of a whole layer; and its specification."""
    folder = tmp_path_factory.mktemp("sweep")
    rows = fit.read_timings("h200").query("sweep == 'lrm' and settled")
    wanted = {"torch/bf16": 120, "torch/fp8_tensorwise_fast": 120, "torch/fp8_block128": 20}
    shapes = rows[rows["kernel"] == "torch/fp8_tensorwise_fast"][fit.SHAPE].sample(300, random_state=0)
    rows = rows.merge(shapes, on=fit.SHAPE)
    parts = [rows[rows["kernel"] == kernel].head(number) for kernel, number in wanted.items()]
    linear = parts[0].head(30).assign(kernel="torchao/linear_rowwise", p50_us=9999.0)
    stranger = parts[0].head(3).assign(kernel="their/own")
    frame = pd.concat([*parts, linear, stranger]).assign(temperature_c=60.0)
    frame[["p10_us", "p50_us", "p90_us"]] *= 1.5
    frame.drop(columns="sweep").to_parquet(folder / "gemm.parquet")
    spec = json.loads((perfmodel.data_folder() / "h200" / "hardware.json").read_text())
    spec |= {"name": "mine", "gpu": "My GPU", "peak_bf16_tflops": spec["peak_bf16_tflops"] / 1.5}
    (folder / "mine.json").write_text(json.dumps(spec))
    return folder, frame


@pytest.fixture(scope="module")
def fitted(sweep, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibration")
    arguments = ["--timings", str(sweep[0]), "--hardware-spec", str(sweep[0] / "mine.json"), "--out", str(out)]
    assert fit.main(arguments) == 0
    return out


def test_own_sweep_becomes_a_calibration(sweep, fitted):
    model = perfmodel.load("mine", calibration=fitted)
    frame = sweep[1]
    assert set(model.manifest["kernels"]) == {"torch/bf16", "torch/fp8_tensorwise_fast"}
    assert model.hardware.gpu == "My GPU"
    rows = frame[frame["kernel"].isin(list(model.manifest["kernels"]))]
    assert (model.predict(rows)["time_us"] / rows["p50_us"] - 1).abs().mean() < 0.03  # it saw these
    stated = model.manifest["kernels"]["torch/bf16"]["held_out"]
    assert stated["n"] == (rows["kernel"] == "torch/bf16").sum() and 0.02 < stated["mape"] < 0.4
    assert model.manifest["not_measured"] == ["held_out_models", "repeat_on_another_machine"]
    assert model.manifest["choice_regret"]["shapes"] > 50
    table = fit.table(model.manifest)
    assert "Not measured in these timings: held_out_models" in table
    # What choosing between both costs stands beside the one that is FP8.
    whole, entries = model.manifest["choice_regret"], model.manifest["kernels"]
    assert entries["torch/fp8_tensorwise_fast"]["regret"] == whole["geomean"] and "regret" not in entries["torch/bf16"]
    line = next(line for line in table.splitlines() if line.startswith("torch/fp8_tensorwise_fast"))
    assert (
        line.endswith(f"{whole['geomean']:7.2%}")
        and f"{entries['torch/fp8_tensorwise_fast']['held_out']['coverage']:.0%}" in line
    )


def test_what_two_kernels_differ_by_comes_with_the_fit_where_enough_was_timed(sweep, fitted, tmp_path, monkeypatch):
    assert "pairs" not in perfmodel.load("mine", calibration=fitted).manifest
    monkeypatch.setattr(learn_pairs, "LEAST_BOTH", 60)
    arguments = ["--timings", str(sweep[0]), "--hardware-spec", str(sweep[0] / "mine.json"), "--out", str(tmp_path)]
    assert fit.main(arguments) == 0
    model = perfmodel.load("mine", calibration=tmp_path)
    ((of, beside, off),) = model.manifest["pairs"]
    assert (of, beside) == ("torch/bf16", "torch/fp8_tensorwise_fast") and 0.01 < off < 0.5
    rows = sweep[1][sweep[1]["kernel"].isin([of, beside])].drop_duplicates(["kernel", *fit.SHAPE])
    pd.testing.assert_frame_equal(model.predict(rows), perfmodel.load("mine", calibration=fitted).predict(rows))
    rows = rows.assign(time_us=model.predict_together(rows)["time_us"])
    assert (rows["time_us"] != model.predict(rows)["time_us"]).mean() > 0.5
    # It saw these: their ratios, without launches by both kernels' rooflines, are told.
    each = (rows[rows["kernel"] == name].set_index(fit.SHAPE)[["p50_us", "time_us"]] for name in (of, beside))
    ratio = np.log(next(each) / next(each)).dropna()
    assert len(ratio) > 60 and (ratio["time_us"] - ratio["p50_us"]).abs().mean() < 0.02


def test_intervals_follow_a_fresh_sweep_and_trees_stay(sweep, fitted, tmp_path, monkeypatch, capsys):
    """One that is far further off than what was fitted: intervals widen until most of it is inside."""
    shutil.copytree(fitted, tmp_path / "mine")
    model = perfmodel.load("mine", calibration=tmp_path / "mine")
    rows = fit.read_timings("mine", sweep[0])
    new = fit.read_timings("h200").query("sweep == 'lrm' and settled and kernel == 'torch/bf16'")
    new = new[~pd.MultiIndex.from_frame(new[fit.SHAPE]).isin(pd.MultiIndex.from_frame(rows[fit.SHAPE]))].head(4000)
    new = new.assign(sweep="blind7", run=rows["run"].max() + 1, shared=False)
    odd = np.random.default_rng(0).normal(0, 0.4, len(new))
    new["p50_us"] = model.predict(new)["time_us"].to_numpy() * np.exp(odd)
    monkeypatch.setattr(fit, "load", lambda name: perfmodel.load(name, calibration=tmp_path / "mine"))
    monkeypatch.setattr(fit, "read_timings", lambda name: pd.concat([rows, new], ignore_index=True))
    before, files = model.manifest, {path.name: path.read_bytes() for path in model.folder.glob("*.gz")}
    assert fit.main(["--hardware", "mine", "--intervals"]) == 0 and "torch/bf16" in capsys.readouterr().out
    after = perfmodel.load("mine", calibration=tmp_path / "mine")
    assert files == {path.name: path.read_bytes() for path in after.folder.glob("*.gz")}
    entries = [manifest["kernels"]["torch/bf16"] for manifest in (before, after.manifest)]
    assert all(entries[0][part] == entries[1][part] for part in ("held_out", "classes", "cells", "range"))
    assert after.manifest["held_out_blind7"]["kernels"]["torch/bf16"]["n"] == 4000 and "held_out_blind7" not in before
    told = (one.predict(new).assign(us=new["p50_us"].to_numpy()) for one in (model, after))
    then, now = (each.eval("low_us <= us <= high_us").mean() for each in told)
    assert then < 0.6 and 0.8 < now < 0.95


def test_memory_bound_kernels_are_fitted_alone_as_with_all(sweep, tmp_path, monkeypatch, capsys):
    """Trees are those of a fit of everything, GEMMs stay, and what is said of both is of all timings."""
    monkeypatch.setattr("perfmodel.learn.ROUNDS", 100)
    folder, out = tmp_path / "data" / "mine", {name: tmp_path / name for name in ("before", "alone", "whole")}
    folder.mkdir(parents=True)
    shutil.copy(sweep[0] / "gemm.parquet", folder)
    shutil.copy(sweep[0] / "mine.json", folder / "hardware.json")
    rows = fit.read_timings("h200").query("sweep == 'lrm' and settled")
    rows = pd.concat([rows[rows["kernel"] == name].head(150) for name in ("torch/relu_forward", "torch/quantize_rowwise")])
    columns = [*fit.SHAPE, "kernel", "p10_us", "p50_us", "p90_us", "sm_mhz"]

    def fitted_to(number, name):
        rows.groupby("kernel").head(number)[columns].to_parquet(folder / "memory.parquet")
        arguments = ["--timings", str(folder), "--hardware-spec", str(folder / "hardware.json"), "--out", str(out[name])]
        assert fit.main(arguments) == 0

    fitted_to(100, "before")
    shutil.copytree(out["before"], out["alone"])
    fitted_to(150, "whole")
    for module in (fit, measured):
        monkeypatch.setattr(module, "data_folder", lambda: tmp_path / "data")
    monkeypatch.setattr(fit, "load", lambda name: perfmodel.load(name, calibration=out["alone"]))
    assert fit.main(["--hardware", "mine", "--memory"]) == 0 and "torch/relu_forward" in capsys.readouterr().out
    before, alone, whole = (perfmodel.load("mine", calibration=path) for path in out.values())
    files = {path.name: path.read_bytes() for path in alone.folder.glob("*.gz")}
    gemms = {name for name in files if "bf16" in name or "fp8_" in name}
    assert files == {path.name: path.read_bytes() for path in whole.folder.glob("*.gz")} and 0 < len(gemms) < len(files)
    then = {path.name: path.read_bytes() for path in before.folder.glob("*.gz")}
    assert {name for name in files if files[name] == then[name]} == gemms
    assert all(alone.manifest[part] == whole.manifest[part] for part in ("rows", "shapes", "unsettled"))
    assert alone.manifest["choice_regret"] == before.manifest["choice_regret"]
    assert list(alone.manifest["kernels"]) == list(whole.manifest["kernels"])
    assert alone.manifest["command"].endswith("--memory")
    entries = {
        name: model.manifest["kernels"]["torch/relu_forward"] for name, model in zip(out, (before, alone, whole), strict=True)
    }
    assert [entry["held_out"]["n"] for entry in entries.values()] == [100, 150, 150]
    (folder / "memory.parquet").unlink()
    assert fit.main(["--hardware", "mine", "--memory"]) == 3 and f"no memory.parquet under {folder};" in capsys.readouterr().err
    assert entries["alone"]["cells"] == entries["whole"]["cells"] and entries["alone"]["range"] == entries["whole"]["range"]


def test_parts_of_a_fit_are_of_a_shipped_one(capsys):
    for part in ("--memory", "--intervals"):
        with pytest.raises(SystemExit) as stopped:
            fit.main([part, "--start", "h200"])
        assert stopped.value.code == 2 and f"{part} is of a shipped fit as it is" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        fit.main(["--intervals", "--pairs"])
    assert stopped.value.code == 2


def test_a_fit_that_is_interrupted_leaves_what_was_there(sweep, tmp_path, monkeypatch):
    """Trees of one fit and the manifest of another would predict nonsense."""
    before = tmp_path / "perfmodel" / "torch__bf16.ubj.gz"
    before.parent.mkdir()
    before.write_bytes(b"before")

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "repeat_difference", stopped)
    arguments = ["--timings", str(sweep[0]), "--hardware-spec", str(sweep[0] / "mine.json"), "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        fit.main(arguments)
    assert [path.read_bytes() for path in before.parent.iterdir()] == [b"before"]


def test_its_accuracy_is_of_trees_that_did_not_see_the_shape(sweep, fitted):
    """The manifest's figure, computed again from folds of whole shapes."""
    hardware = perfmodel.load("mine", calibration=fitted).hardware
    rows = fit.read_timings("mine", sweep[0])
    rows = rows[rows["kernel"].isin(["torch/bf16", "torch/fp8_tensorwise_fast"])].reset_index(drop=True)
    fold = fit.folds_of(rows)
    bf16 = (rows["kernel"] == "torch/bf16").to_numpy()
    errors = []
    for number in range(fit.FOLDS):
        train, test = rows[bf16 & (fold != number)], rows[bf16 & (fold == number)]
        predicted = fit.predict(fit.train("torch/bf16", train, hardware), "torch/bf16", test, hardware)
        errors.append(np.abs(predicted / test["p50_us"].to_numpy() - 1))
    stated = perfmodel.load("mine", calibration=fitted).manifest["kernels"]["torch/bf16"]["held_out"]
    assert np.concatenate(errors).mean() == pytest.approx(stated["mape"], rel=1e-4)


def test_left_out_kernels_are_named(sweep, tmp_path, capsys):
    rows = fit.read_timings("mine", sweep[0])
    assert "linear" not in " ".join(rows["kernel"]) and (rows["sweep"] == "own").all()
    assert all(values.min() >= 1 for values in columns_of(rows))
    assert "unknown kernels are left out: their/own" in capsys.readouterr().err
    fit.fitted_rows(rows)
    assert "left out torch/fp8_block128: " in capsys.readouterr().err


def test_an_operand_is_no_gemms_shape_though_both_are_written_alike():
    """A GEMM of one column that judges leaves no operand of its rows and columns out, nor the other way round."""
    judged = next(iter(fit.NEVER_SEEN))
    alike, apart = (512, 1, 1024, 1), (512, 1, 2048, 1)
    rows = pd.DataFrame(
        [
            ("torch/bf16", *alike, judged), ("torch/relu_forward", *alike, "lrm"), ("torch/bf16", *alike, "lrm"),
            ("torch/relu_forward", *apart, judged), ("torch/bf16", *apart, "lrm"), ("torch/relu_backward", *apart, "lrm"),
        ],
        columns=["kernel", "m", "n", "k", "groups", "sweep"],
    ).assign(settled=True)  # fmt: skip
    found = fit.fitted_rows(rows, least=1)
    assert found[["kernel", "k"]].to_numpy().tolist() == [["torch/relu_forward", 1024], ["torch/bf16", 2048]]


def test_unusable_sweeps_are_refused(sweep, tmp_path, capsys):
    spec = str(sweep[0] / "mine.json")

    def refused(code, match, *arguments):
        assert fit.main(list(arguments)) == code
        assert match in capsys.readouterr().err

    refused(3, "no gemm.parquet", "--timings", str(tmp_path), "--hardware-spec", spec, "--out", str(tmp_path / "o"))
    refused(2, "--timings needs --out", "--timings", str(sweep[0]), "--hardware-spec", spec)
    refused(2, "give both", "--hardware-spec", spec, "--out", str(tmp_path / "o"))
    few = sweep[1].groupby("kernel").head(30)
    few.to_parquet(tmp_path / "gemm.parquet")
    refused(2, "no kernel has 60 rows", "--timings", str(tmp_path), "--hardware-spec", spec, "--out", str(tmp_path / "o"))
    few.drop(columns="p50_us").to_parquet(tmp_path / "gemm.parquet")
    refused(2, "lacks the columns ['p50_us']", "--timings", str(tmp_path), "--hardware-spec", spec, "--out", str(tmp_path / "o"))
    (tmp_path / "bad.json").write_text("{}")
    bad = str(tmp_path / "bad.json")
    refused(2, "lacks 'name'", "--timings", str(sweep[0]), "--hardware-spec", bad, "--out", str(tmp_path / "o"))
