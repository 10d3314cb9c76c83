"""What bf16 GEMMs take in other layouts: learned again from a part of the timings, judged on products timed with more care."""

import dataclasses
import shutil

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import fit_layouts, hardware, layouts
from perfmodel.data_folder import data_folder

H200 = hardware.load("h200")
SHIPPED = layouts.load(H200)
FOLDER = data_folder() / "h200"
TABLE = pd.read_parquet(FOLDER / layouts.FILE)


def test_k_fastest_is_no_other_layout_and_a_strided_one_is_not_known():
    lie = [layouts.K_FASTEST, ("column", "row"), ("strided", "row"), ("row", "row")]
    found = SHIPPED.factors(lie, [936] * 4, [936] * 4, [6144] * 4, [1] * 4)
    assert found[0] == found[2] == 1 and found[1] != 1 and found[3] != 1
    assert SHIPPED.factors([], [], [], [], []).shape == (0,)


def test_factors_hang_on_nothing_but_the_product():
    rows = TABLE.sample(300, random_state=1)
    lie = [layouts.OTHERS[number % 3] for number in range(len(rows))]
    sizes = [rows[name].to_numpy() for name in fit_layouts.SIZES]
    together = SHIPPED.factors(lie, *sizes)
    for place in (0, 17, 299):
        alone = SHIPPED.factors([lie[place]], *(size[place : place + 1] for size in sizes))
        assert alone[0] == pytest.approx(together[place], rel=1e-4)


def test_products_timed_with_care_are_nearer_in_their_layout_than_with_k_fastest():
    """Trees that learn from a tenth of the quick timings, none of whose products was timed with care."""
    careful = TABLE[TABLE["careful"]].reset_index(drop=True)
    quick = TABLE[~TABLE["careful"]].sample(20000, random_state=0).reset_index(drop=True)
    assert not set(careful[fit_layouts.SIZES].itertuples(index=False)) & set(quick[fit_layouts.SIZES].itertuples(index=False))
    times = perfmodel.load()
    rows = pd.concat([quick, careful], ignore_index=True)
    alone, turned = layouts.both_ways(times, fit_layouts.columns_of(rows))
    names, matrix = layouts.features(fit_layouts.columns_of(rows), alone, turned, H200)
    of_quick = np.arange(len(rows)) < len(quick)
    layout = ("column", "row")
    factor = np.exp(fit_layouts.train(quick, matrix[of_quick], names, layout, rounds=100).inplace_predict(matrix[~of_quick]))
    found = fit_layouts.judged(careful, alone[~of_quick], factor, layout)
    assert sum(entry["n"] for entry in found) == len(careful)
    for entry in found:
        assert entry["mape"] < entry["as_k_fastest"] * (1.0 if entry["even"] else 0.5), entry


def test_another_gpu_has_those_of_the_nearest():
    h100 = layouts.load(hardware.load("h100"))
    assert h100 is not None and h100.fitted.name == "h200"
    assert layouts.load(dataclasses.replace(H200, name="b200", capability=(10, 0))) is None


def test_trees_that_are_damaged_are_named(tmp_path):
    name = layouts.model_file(("row", "row"))
    for layout in layouts.OTHERS:
        shutil.copy(FOLDER / "models" / layouts.model_file(layout), tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:1000])
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(SHIPPED, folder=tmp_path).factors([("row", "row")], [64], [64], [64], [1])
