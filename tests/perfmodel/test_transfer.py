"""Learning a GPU from another's model, on made-up GPUs whose every time is known."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import perfmodel
from hil.launches import drawn, takes
from hil.shapes import memory_shapes
from perfmodel import hardware, learn, transfer
from perfmodel import model as model_module
from perfmodel.fit import fit
from perfmodel.judge import SHAPE

GEMM, MEMORY = "torch/fp8_rowwise_fast", "torch/relu_forward"


@pytest.fixture(scope="module")
def base():
    return perfmodel.load("h200")


def here(base, rows, jagged=False):
    """What calls take on a GPU that is slower for large results; jagged, GEMMs of a long K or some alignments, too."""
    us, m, n, k = base.predict(rows)["time_us"].to_numpy(), *(rows[size].to_numpy(float) for size in ("m", "n", "k"))
    if rows["kernel"].iloc[0] == MEMORY:
        return us * (1 + 0.4 * m * k / (m * k + 1e6))
    align = np.minimum(rows["n"] & -rows["n"], 256).to_numpy()
    steps = np.where(np.isin(align, (64, 128)), 1.25, 1.0) * np.where(k > 8192, 1.2, 1.0)
    return us * (1 + 0.4 * m * n / (m * n + 3e6)) * (steps if jagged else 1.0)


def calls(kernel, count, seed):
    shapes = drawn(4 * count, seed, (kernel,)) if kernel == GEMM else memory_shapes(count, seed)
    fitting = [s for s in shapes if kernel != GEMM or takes(kernel, s)][:count]
    return pd.DataFrame([(kernel, s.m, s.n, s.k, s.groups) for s in fitting], columns=["kernel", *SHAPE])


def timed(base, rows, noise, column="p50_us", jagged=False, seed=0):
    return rows.assign(**{column: here(base, rows, jagged) * np.exp(np.random.default_rng(seed).normal(0, noise, len(rows)))})


def error(learned, kernel, base, hardware, test, jagged=False):
    return np.abs(learn.predict(learned, kernel, test, hardware) / here(base, test, jagged) - 1).mean()


def launched(base, rows, noise, seed=0):
    """Quick launches here, which are off from careful timings as on the other GPU."""
    known, early = (learn.predict(one, GEMM, rows, base.hardware) for one in transfer.stored(base, GEMM))
    quick = timed(base, rows, noise, "time_us", jagged=True, seed=seed)
    return quick.assign(time_us=quick["time_us"] * early / known)


@pytest.mark.parametrize(("kernel", "count", "most"), [(GEMM, 250, 0.03), (MEMORY, 60, 0.04)])
def test_few_timings_suffice_where_another_gpu_is_known(base, kernel, count, most):
    rows, test = timed(base, calls(kernel, count, 5), 0.01), calls(kernel, 400, 6)
    begun = transfer.starts(base, None, base.hardware, [kernel])[kernel]
    off = error(learn.train(kernel, rows, base.hardware, transfer.begin(begun)), kernel, base, base.hardware, test)
    alone = error(learn.train(kernel, rows, base.hardware), kernel, base, base.hardware, test)
    as_it_is = error(transfer.begin(begun), kernel, base, base.hardware, test)
    assert off < most and off < 0.7 * alone and off < 0.5 * as_it_is


def test_quick_launches_show_most_of_it(base):
    quick = launched(base, calls(GEMM, 2500, 7), 0.05)
    rows, test = timed(base, calls(GEMM, 40, 8), 0.01, jagged=True), calls(GEMM, 400, 9)
    errors = []
    for launches in (None, quick):
        begun = transfer.begin(transfer.starts(base, None, base.hardware, [GEMM], launches)[GEMM])
        errors.append(error(learn.train(GEMM, rows, base.hardware, begun), GEMM, base, base.hardware, test, True))
    assert errors[1] < 0.8 * errors[0]


def test_launches_are_off_here_as_they_are_there(base):
    """By what the other GPU's careful timings taught, without any here; else the launches would unteach it."""
    quick, test = launched(base, calls(GEMM, 2500, 17), 0.02), calls(GEMM, 400, 18)
    known, early = transfer.stored(base, GEMM)
    offs = [
        error(learn.learn_more(GEMM, quick, base.hardware, known, before), GEMM, base, base.hardware, test, True)
        for before in (early, None)
    ]
    assert offs[0] < 0.04 and offs[0] < 0.8 * offs[1]


def test_hidden_shapes_are_forgotten(base):
    known = perfmodel.fit.fitted_rows(perfmodel.fit.read_timings("h200"))
    known = known[known["kernel"] == MEMORY]
    hidden = known[SHAPE].drop_duplicates().sample(40, random_state=0)
    theirs = pd.MultiIndex.from_frame(known[SHAPE]).isin(pd.MultiIndex.from_frame(hidden))
    told = []
    for factor in (1.0, 5.0):
        timings = known.assign(p50_us=np.where(theirs, factor, 1.0) * known["p50_us"])
        begun = transfer.starts(base, timings, base.hardware, [MEMORY])[MEMORY]
        told.append(learn.predict(transfer.begin(begun, hidden), MEMORY, hidden.assign(kernel=MEMORY), base.hardware))
    # Whatever their times were: it was learned anew without them.
    np.testing.assert_array_equal(told[0], told[1])
    # A few known ones among many are no reason to.
    other = pd.concat([hidden.assign(m=10_007 + hidden["m"]), hidden.head(8)])
    assert transfer.begin(begun, other).booster is begun.known.booster


def test_before_careful_timings_it_knows_what_launches_taught(base):
    known, early = transfer.stored(base, GEMM)
    assert known.booster.num_boosted_rounds() - early.booster.num_boosted_rounds() == learn.NEXT_ROUNDS
    rows = calls(GEMM, 200, 11)
    ratio = learn.predict(early, GEMM, rows, base.hardware) / learn.predict(known, GEMM, rows, base.hardware)
    assert np.abs(ratio - 1).mean() < 0.08 and ratio.std() > 0
    assert transfer.stored(base, MEMORY)[1] is None
    # What is stored predicts as the model does.
    told = base.predict(rows)["time_us"].to_numpy()
    np.testing.assert_allclose(learn.predict(known, GEMM, rows, base.hardware), told, rtol=1e-4)


def test_a_fit_says_where_it_began_and_keeps_the_range(base, tmp_path):
    folder = tmp_path / "timings"
    folder.mkdir()
    timed(base, calls(GEMM, 80, 12), 0.01).assign(sweep="own").to_parquet(folder / "gemm.parquet")
    timed(base, calls(MEMORY, 40, 13), 0.01).assign(sweep="own").to_parquet(folder / "memory.parquet")
    spec = (
        (perfmodel.data_folder() / "h200" / "hardware.json")
        .read_text()
        .replace('"name": "h200"', '"name": "mine", "like": "h200"')
    )
    (tmp_path / "spec.json").write_text(spec)
    manifest = fit(folder=tmp_path / "out", timings_folder=folder, spec=tmp_path / "spec.json", start="h200")
    assert manifest["start"] == {"hardware": "h200", "kernels_fingerprint": base.kernels_fingerprint}
    assert manifest["command"].endswith("--start h200")
    # Fewer rows than a fit from nothing needs, and larger calls than measured here that the H200 ran.
    assert set(manifest["kernels"]) == {GEMM, MEMORY}
    assert manifest["kernels"][MEMORY]["range"] == base.manifest["kernels"][MEMORY]["range"]
    assert manifest["kernels"][MEMORY]["least_us"] == base.least_us(MEMORY) > 0
    model = perfmodel.load("mine", tmp_path / "out")
    test = calls(MEMORY, 200, 14)
    assert np.abs(model.predict(test)["time_us"] / here(base, test) - 1).mean() < 0.06
    with pytest.raises(ValueError, match="'a100' has no data"):
        fit(folder=tmp_path / "out", timings_folder=folder, spec=tmp_path / "spec.json", start="a100")


def test_where_a_fit_began_is_told_by_what_was_learned_not_by_intervals(base, tmp_path):
    folder = Path(shutil.copytree(base.folder, tmp_path / "models"))
    wider = {name: {**entry, "wider_by_digits": [2.0]} for name, entry in base.manifest["kernels"].items()}
    copied = replace(base, folder=folder, manifest={**base.manifest, "kernels": wider})
    assert copied.kernels_fingerprint == base.kernels_fingerprint and copied.fingerprint != base.fingerprint
    for name in copied.kernel_files[:2]:  # trees, and the network beside them
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole + b" ")
        assert copied.kernels_fingerprint != base.kernels_fingerprint
        (folder / name).write_bytes(whole)
    assert copied.kernels_fingerprint == base.kernels_fingerprint


@pytest.mark.parametrize("name", ["attention.json", "fused.json", "in_step.json", "layouts.json"])
def test_a_model_is_another_with_another_fit_of_what_a_step_is_made_of_beside_kernels(base, tmp_path, monkeypatch, name):
    shutil.copytree(perfmodel.data_folder() / "h200" / "models", tmp_path / "h200" / "models")
    shutil.copy(perfmodel.data_folder() / "h200" / "hardware.json", tmp_path / "h200")
    for module in (hardware, model_module):
        monkeypatch.setattr(module, "data_folder", lambda: tmp_path)
    assert replace(base).fingerprint == base.fingerprint
    path = tmp_path / "h200" / "models" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "fitted": "again"}))
    assert replace(base).fingerprint != base.fingerprint
    assert replace(base).kernels_fingerprint == base.kernels_fingerprint


def test_the_h100_that_ships_began_from_the_h200_that_ships(base):
    shipped = perfmodel.load("h100")
    began = shipped.manifest["start"]
    assert began["hardware"] == "h200" and began["kernels_fingerprint"] == base.kernels_fingerprint
    assert shipped.hardware.like == "h200"
    # As fast where the clock is the bound, slower where the memory is.
    rows = pd.DataFrame([(GEMM, 8192, 4096, 4096), (MEMORY, 8192, 1, 32768)], columns=["kernel", "m", "n", "k"])
    ratio = (shipped.predict(rows)["time_us"] / base.predict(rows)["time_us"]).tolist()
    assert 0.85 < ratio[0] < 1.15 and 1.3 < ratio[1] < 1.55
