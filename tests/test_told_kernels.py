"""Times with cuBLAS's kernel told from outside: told what the network tells, they are those that the model predicts."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import data_folder
from perfmodel.calls import columns_of
from perfmodel.choice import PARTS, asked

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
told_kernels = importlib.import_module("told_kernels")


@pytest.mark.parametrize("hardware", ["h100", "h200"])
@pytest.mark.parametrize("kernel", ["torch/bf16_batched", "torch/fp8_tensorwise_fast"])
def test_told_what_the_network_tells_times_are_those_of_the_model(kernel, hardware):
    path = data_folder() / hardware / "choices" / "asked.parquet"
    if not path.is_file():
        pytest.skip("the package came without what cuBLAS answered")
    model, answers = perfmodel.load(hardware), pd.read_parquet(path)
    rows = answers[answers["kernel"] == kernel].sample(400, random_state=0).reset_index(drop=True)
    right = told_kernels.is_right(model, kernel, rows)
    told, doubt = model.choice(kernel).told(asked(kernel, *columns_of(rows), model.hardware))
    np.testing.assert_array_equal(right, (told == rows[list(PARTS)].to_numpy()).all(axis=1))
    assert 0.85 < right.mean() < 1.0
    predicted = model.predict(rows)["time_us"].to_numpy()
    as_told = told_kernels.rightly_told(model, kernel, rows.assign(**dict(zip(PARTS, told.T, strict=True))))
    # Nothing is in doubt there, and trees of batched products see doubt.
    np.testing.assert_allclose(as_told[doubt == 0], predicted[doubt == 0], rtol=1e-5)
    answered = told_kernels.rightly_told(model, kernel, rows)
    assert (np.abs(answered[~right] / predicted[~right] - 1) > 1e-3).mean() > 0.5
