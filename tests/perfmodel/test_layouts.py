"""What bf16 GEMMs take in other layouts: learned again from a part of the timings, judged on products timed with more care."""

import dataclasses
import shutil

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import fit_layouts, hardware, kernels, layouts
from perfmodel.data_folder import data_folder
from perfmodel.opened import choice_file
from perfmodel.refine import refine

H200 = hardware.load("h200")
SHIPPED = layouts.load(H200)
FOLDER = data_folder() / "h200"
TABLE = pd.read_parquet(FOLDER / layouts.FILE)
ACROSS = TABLE[TABLE[layouts.column(kernels.ACROSS[0])].notna()]
BIASED = TABLE[TABLE[layouts.column(kernels.BIASED)].notna()]


def laid(kernel, layout):
    if layout == ("row", "column", "bias"):
        return f"{kernel}_bias"
    return kernel if layout == ("row", "column") else f"{kernel}_{layout[0]}_{layout[1]}"


def test_k_fastest_is_no_other_layout_and_a_strided_one_is_not_known():
    lie = [kernels.K_FASTEST, ("column", "row"), ("strided", "row"), ("row", "row")]
    factor, off = SHIPPED.told(lie, [936] * 4, [936] * 4, [6144] * 4, [1] * 4)
    assert factor[0] == factor[2] == 1 and factor[1] != 1 and factor[3] != 1
    assert (off == 0).tolist() == [True, False, True, False]
    assert [part.shape for part in SHIPPED.told([], [], [], [], [])] == [(0,), (0,)]


def test_factors_hang_on_nothing_but_the_product():
    rows = TABLE.sample(300, random_state=1)
    lie = [layouts.OTHERS[number % (4 if single else 3)] for number, single in enumerate(rows["groups"] == 1)]
    sizes = [rows[name].to_numpy() for name in fit_layouts.SIZES]
    together = np.stack(SHIPPED.told(lie, *sizes), axis=1)
    for place in (0, 17, 299):
        alone = SHIPPED.told([lie[place]], *(size[place : place + 1] for size in sizes))
        np.testing.assert_allclose(np.ravel(alone), together[place], rtol=1e-4)


def test_two_threads_tell_the_same(monkeypatch):
    rows = TABLE.sample(700, random_state=3)
    lie = [layouts.OTHERS[number % (4 if single else 3)] for number, single in enumerate(rows["groups"] == 1)]
    sizes = [rows[name].to_numpy() for name in fit_layouts.SIZES]
    by_two = np.stack(SHIPPED.told(lie, *sizes), axis=1)
    monkeypatch.setattr(layouts, "_MANY_PRODUCTS", len(rows) + 1)
    np.testing.assert_allclose(by_two, np.stack(SHIPPED.told(lie, *sizes), axis=1), rtol=1e-5)


def test_the_same_kernels_time_over_itself_is_one_whatever_the_order_of_sums():
    us = np.array([3.0, 200.0])
    found = layouts._log_ratio(us * np.array([1 + 3e-7, 1.1]), us)
    assert found[0] == 0 and found[1] == pytest.approx(np.log(1.1), abs=1e-5)


CAREFUL = ACROSS[ACROSS["careful"]].sample(400, random_state=2).reset_index(drop=True)
CAREFUL_BIASED = BIASED[BIASED["careful"]].sample(400, random_state=2).reset_index(drop=True)


@pytest.mark.parametrize("layout", layouts.OTHERS)
def test_a_product_that_lies_otherwise_or_has_a_bias_is_a_kernel_of_its_own(layout):
    """Its time is that with K fastest by the factor, in wider intervals, which hold most of what was measured."""
    model, rows = perfmodel.load(), CAREFUL_BIASED if layout == kernels.BIASED else CAREFUL
    base = rows[fit_layouts.SIZES].assign(kernel=np.where(rows["groups"] > 1, "torch/bf16_batched", "torch/bf16"))
    across = base.assign(kernel=[laid(name, layout) for name in base["kernel"]])
    alone, told, both = (model.predict(frame).to_numpy() for frame in (base, across, pd.concat([across, base])))
    # Some processors sum a row in another order in another place (`perfmodel.network`).
    np.testing.assert_allclose(both, np.concatenate([told, alone]), rtol=1e-6)
    factor = SHIPPED.told([layout] * len(base), *(base[name] for name in fit_layouts.SIZES))[0]
    np.testing.assert_allclose(told[:, 0], alone[:, 0] * factor, rtol=1e-9)
    wide, narrow = (np.log(times[:, 2] / times[:, 1]) for times in (told, alone))
    assert (wide > narrow).all()
    measured = rows[layouts.column(layout)].to_numpy()
    assert ((told[:, 1] <= measured) & (measured <= told[:, 2])).mean() > 0.85
    assert np.abs(told[:, 0] / measured - 1).mean() < 0.8 * np.abs(alone[:, 0] / measured - 1).mean()
    np.testing.assert_array_equal(model.in_range(across), model.in_range(base))


def test_asked_together_with_fp8_it_moves_as_with_k_fastest():
    model, size = perfmodel.load(), {"m": 1024, "n": 2048, "k": 8192}
    fp8 = "torch/fp8_tensorwise_split"
    alone, across = (
        model.predict_together(pd.DataFrame([{"kernel": name, **size} for name in (kernel, fp8)])).to_numpy()
        for kernel in ("torch/bf16", "torch/bf16_row_row")
    )
    np.testing.assert_array_equal(alone[1], across[1])
    factor = SHIPPED.told([("row", "row")], [1024], [2048], [8192], [1])[0].item()
    assert across[0, 0] == pytest.approx(alone[0, 0] * factor)


def test_why_it_takes_as_long_is_said():
    size = {"m": 367, "n": 513, "k": 16384}
    alone, across = (perfmodel.load().explain({"kernel": name, **size}) for name in ("torch/bf16", "torch/bf16_column_row"))
    assert across.kernel == "torch/bf16_column_row" and across.correction == alone.correction and alone.layout == 1.0
    assert across.layout == pytest.approx(across.time_us / alone.time_us) and across.factors == alone.factors
    assert f"K fastest in both: {across.layout:.2f} x" in across.words() and "K fastest" not in alone.words()


def test_a_bias_is_said():
    size = {"m": 8192, "n": 128, "k": 512}
    found = perfmodel.load().explain({"kernel": "torch/bf16_bias", **size})
    assert found.layout > 1 and f"with its bias, over none: {found.layout:.2f} x" in found.words()


def test_what_a_machine_measured_of_it_corrects_it():
    """Products of a machine that takes 1.3 times as long, one of them measured; a kernel that the model knows through another."""
    model = perfmodel.load()
    shapes = CAREFUL[CAREFUL["groups"] == 1][fit_layouts.SIZES].assign(kernel="torch/bf16_column_row")
    told = model.predict(shapes)["time_us"].to_numpy()
    refined = refine(model, shapes[:-20].assign(p50_us=1.3 * told[:-20])).model
    after = refined.predict(shapes)
    np.testing.assert_allclose(after["time_us"][:-20], 1.3 * told[:-20])
    np.testing.assert_allclose(after["time_us"][-20:], 1.3 * told[-20:], rtol=0.05)
    assert refined.knows("torch/bf16_row_row") and "torch/bf16_column_row" not in refined.manifest["kernels"]


def test_of_a_gpu_without_layouts_it_is_as_with_k_fastest():
    model = dataclasses.replace(perfmodel.load())
    model.__dict__["layouts"] = None
    size = {"m": 367, "n": 513, "k": 16384}
    alone, across = (
        model.predict(pd.DataFrame([{"kernel": name, **size}])).to_numpy() for name in ("torch/bf16", "torch/bf16_column_row")
    )
    np.testing.assert_array_equal(alone, across)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"kernel": "torch/bf16_column_row", "m": 64, "n": 64, "k": 64, "groups": 2}, "makes one product"),
        ({"kernel": "torch/bf16_column", "m": 64, "n": 64, "k": 64}, "is not a kernel"),
        ({"kernel": "torch/bf16_bias", "m": 64, "n": 64, "k": 64, "groups": 2}, "makes one product"),
        ({"kernel": "torch/bf16_batched_bias", "m": 64, "n": 64, "k": 64, "groups": 2}, "is not a kernel"),
        ({"kernel": "torch/bf16_row_row", "m": 64, "n": -1, "k": 64}, "n = -1 is no size"),
    ],
)
def test_bad_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        perfmodel.load().predict(pd.DataFrame([call]))


def test_products_timed_with_care_are_nearer_in_their_layout_than_with_k_fastest():
    """Trees that learn from a tenth of the quick timings, none of whose products was timed with care."""
    careful = ACROSS[ACROSS["careful"]].reset_index(drop=True)
    quick = ACROSS[~ACROSS["careful"]].sample(20000, random_state=0).reset_index(drop=True)
    assert not set(careful[fit_layouts.SIZES].itertuples(index=False)) & set(quick[fit_layouts.SIZES].itertuples(index=False))
    times = perfmodel.load()
    rows = pd.concat([quick, careful], ignore_index=True)
    layout = ("column", "row")
    known = layouts.Known.of(fit_layouts.columns_of(rows), times)
    names, matrix, as_if = known.in_layout(layout, times, SHIPPED.folder)
    of_quick = np.arange(len(rows)) < len(quick)
    trees = fit_layouts.train(quick, matrix[of_quick], as_if[of_quick], names, layout, rounds=250)
    factor = np.exp(as_if[~of_quick] + trees.inplace_predict(matrix[~of_quick]))
    asked = careful[fit_layouts.SIZES].assign(kernel=np.where(careful["groups"] > 1, "torch/bf16_batched", "torch/bf16"))
    found = fit_layouts.judged(careful, times.predict(asked).to_numpy(), factor, layout)
    assert sum(entry["n"] for entry in found) == len(careful)
    for entry in found:
        assert entry["mape"] < entry["as_k_fastest"] * (1.0 if entry["even"] else 0.5), entry
        assert 0.85 < entry["inside"] < 0.95, entry


def test_another_gpu_has_those_of_the_nearest():
    h100 = layouts.load(hardware.load("h100"))
    assert h100 is not None and h100.times.hardware.name == "h200"
    assert layouts.load(dataclasses.replace(H200, name="b200", capability=(10, 0))) is None


def test_trees_that_are_damaged_are_named(tmp_path):
    name = layouts.model_file(("row", "row"))
    for layout in kernels.ACROSS:
        for file in (layouts.model_file(layout), choice_file(kernels.laid("torch/bf16", layout))):
            shutil.copy(FOLDER / "models" / file, tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:1000])
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(SHIPPED, folder=tmp_path).told([("row", "row")], [64], [64], [64], [1])


def test_those_that_ship_are_judged_on_products_that_no_fit_saw(capsys, monkeypatch, tmp_path):
    fresh = pd.read_parquet(FOLDER / "across" / layouts.FILE)
    some = fresh.sample(600, random_state=0)
    known = some.iloc[:50]
    found = fit_layouts.judge(some, known, perfmodel.load())
    assert sum(entry["n"] for entry in found) == sum(
        some[layouts.column(layout)].iloc[50:].notna().sum() for layout in layouts.OTHERS
    )
    for entry in found:
        assert entry["mape"] < entry["as_k_fastest"] and 0.7 < entry["inside"] <= 1.0, entry
    assert fit_layouts.judge(known, known, perfmodel.load()) == []
    # As a command, of an earlier fit's products none.
    monkeypatch.setattr("sys.argv", ["fit_layouts", "--judge", str(FOLDER)])
    assert fit_layouts.main() == 0 and len(capsys.readouterr().out.splitlines()) == 1
    monkeypatch.setattr("sys.argv", ["fit_layouts", "--judge", str(tmp_path)])
    with pytest.raises(SystemExit):
        fit_layouts.main()
    assert f"{tmp_path / layouts.FILE} is not there; measure it with: python -m hil.layouts" in capsys.readouterr().err


def test_a_layouts_kernels_are_those_that_cublas_was_asked_of(tmp_path):
    """Where one is missing, it is said how to ask; and by another's, a product takes another time."""
    assert set(fit_layouts.answers(FOLDER)) == {choice_file(name) for name, spec in kernels.KERNELS.items() if spec.across}
    for file in FOLDER.glob("choices/torch__bf16_*"):
        (tmp_path / "choices").mkdir(exist_ok=True)
        if "column_row" not in file.name:
            shutil.copy(file, tmp_path / "choices")
    with pytest.raises(ValueError, match="column_row.choice.json.gz is not there; ask cuBLAS with: python -m hil.choices --out"):
        fit_layouts.answers(tmp_path)
    shutil.copytree(FOLDER / "models", tmp_path / "models")
    other, own = (
        tmp_path / "models" / choice_file(kernels.laid("torch/bf16", lies)) for lies in (("row", "row"), kernels.BIASED)
    )
    shutil.copy(other, own)
    sizes = [CAREFUL_BIASED[name].to_numpy() for name in fit_layouts.SIZES]
    lies = [kernels.BIASED] * len(CAREFUL_BIASED)
    factor, moved = (found.told(lies, *sizes)[0] for found in (SHIPPED, dataclasses.replace(SHIPPED, folder=tmp_path / "models")))
    assert (np.abs(np.log(moved / factor)) > 0.01).mean() > 0.1


def test_by_another_kernel_it_takes_what_that_takes_with_k_fastest():
    """`as_if` is nothing where the kernel is the same, and hangs on what is asked of it alone."""
    times = perfmodel.load()
    known = layouts.Known.of(fit_layouts.columns_of(CAREFUL[fit_layouts.SIZES]), times)
    np.testing.assert_allclose(known.us, times.predict(alone_of(CAREFUL))["time_us"], rtol=1e-6)
    names, matrix, as_if = known.in_layout(("row", "row"), times, SHIPPED.folder)
    chosen = [name for name in names if name.startswith(("chosen_", "log2_chosen_"))]
    own, there = (matrix[:, [names.index(which + name) for name in chosen]] for which in ("", "laid_"))
    alike = (own == there).all(axis=1)
    assert len(chosen) > 10 and 0.05 < alike.mean() < 0.9
    np.testing.assert_allclose(as_if[alike], 0.0, atol=1e-6)
    assert np.abs(as_if[~alike]).mean() > 0.02
    some = np.array([5, 40, 41])
    np.testing.assert_allclose(
        known.of_products(some).in_layout(("row", "row"), times, SHIPPED.folder)[2], as_if[some], atol=1e-5
    )


def alone_of(rows):
    return rows[fit_layouts.SIZES].assign(kernel=np.where(rows["groups"] > 1, "torch/bf16_batched", "torch/bf16"))


def test_a_machine_that_measured_k_fastest_alone_corrects_what_follows_from_it():
    model = perfmodel.load()
    shapes = CAREFUL[CAREFUL["groups"] == 1][fit_layouts.SIZES].assign(kernel="torch/bf16")
    refined = refine(model, shapes.assign(p50_us=1.3 * model.predict(shapes)["time_us"].to_numpy())).model
    for kernel in ("torch/bf16_row_row", "torch/bf16_bias"):
        asked = shapes.assign(kernel=kernel)
        np.testing.assert_allclose(refined.predict(asked)["time_us"], 1.3 * model.predict(asked)["time_us"], rtol=0.03)
