"""Which timings of several workers are those of one process: told by what was measured with them."""

import json

import numpy as np
import pandas as pd
import pytest

from perfmodel import data_folder, fit_alone, learn
from perfmodel import hardware as hardware_module
from perfmodel.fit_alone import expected, find, others_say, read_rows
from perfmodel.learn import OWN_CLOCK_WEIGHT, predict, train
from perfmodel.measured import ALONE_FILE, SHARED_LAUNCH_US, checksum
from perfmodel.memory_plan import launches

KERNELS = ("torch/relu_forward", "torch/silu_forward", "torch/rmsnorm_forward", "torch/quantize_rowwise")


@pytest.fixture(scope="module")
def h200():
    return hardware_module.load("h200")


def goes(number: int = 100, off: float = 0.02, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """Goes of four kernels each, every tenth timed as if alone; what is expected of them, and which those are."""
    generator = np.random.default_rng(seed)
    rows = pd.DataFrame({
        "kernel": np.tile(KERNELS, number), "m": np.repeat(64 + 8 * np.arange(number), 4), "n": 1, "k": 512, "groups": 1,
        "run": 0, "power_w": np.repeat(np.arange(number), 4) * 1.0, "temperature_c": np.nan,
    })  # fmt: skip
    usual = 2 + rows["m"].to_numpy() / 1000
    alone = np.repeat(np.arange(number) % 10 == 3, 4)
    short = SHARED_LAUNCH_US * launches(rows["kernel"], rows["m"], rows["k"])
    time = usual * np.exp(off * generator.standard_normal(len(rows))) + np.where(alone, short, 0.0)
    return rows.assign(p50_us=time), usual, alone


def test_others_tell_a_row():
    rows, usual, alone = goes()
    np.testing.assert_array_equal(others_say(rows, usual), alone)


def test_a_row_has_no_say_in_itself():
    """Whatever its time; and one that is far off, or of which nothing is expected, says little of others."""
    rows, usual, alone = goes()
    for time in (0.5, 1.2, 30.0):
        changed = rows.assign(p50_us=np.where(np.arange(len(rows)) % 4 == 0, time * rows["p50_us"], rows["p50_us"]))
        np.testing.assert_array_equal(others_say(changed, usual)[::4], alone[::4])
    np.testing.assert_array_equal(others_say(rows, np.where(np.arange(len(rows)) % 4 == 0, np.nan, usual)), alone)
    one = rows.iloc[12:13]
    assert alone[12] and not others_say(one, usual[12:13]).any()


def test_long_calls_and_other_goes_say_nothing():
    rows, usual, alone = goes()
    longer = rows.assign(p50_us=rows["p50_us"] + 300)
    assert not others_say(longer, usual + 300).any()
    # Each row in a go of its own.
    assert alone.any() and not others_say(rows.assign(power_w=np.arange(len(rows))), usual).any()


def test_what_is_expected_knows_nothing_of_the_shape(h200):
    rows = read_rows(data_folder() / "h200" / "memory.parquet")
    rows = rows[rows["kernel"].isin(KERNELS[:2])]
    found = expected(rows, h200)
    error = np.abs(found / rows["p50_us"] - 1)
    assert np.isfinite(found).all() and 0.01 < error.median() < 0.03
    unseen = (rows["sweep"] == "blind_memory5").to_numpy()
    # Twice as long where nothing is fitted changes nothing that is expected.
    changed = rows.assign(p50_us=np.where(unseen, 2.0, 1.0) * rows["p50_us"])
    np.testing.assert_array_equal(expected(changed, h200)[unseen], found[unseen])


def test_the_command_writes_what_is_read(h200, tmp_path, monkeypatch, capsys):
    rows = pd.read_parquet(data_folder() / "h200" / "memory.parquet")
    kept = rows["kernel"].isin(KERNELS) & (rows["sweep"] == "lrm")
    (tmp_path / "h200").mkdir()
    rows[kept].reset_index(drop=True).to_parquet(tmp_path / "h200" / "memory.parquet")
    (tmp_path / "h200" / "memory.json").write_text(json.dumps({"runs": [{"rows": int(kept.sum()), "command": "x --workers 9"}]}))
    monkeypatch.setattr(fit_alone, "data_folder", lambda: tmp_path)
    monkeypatch.setattr(learn, "ROUNDS", 200)
    assert fit_alone.main([]) == 0
    document = json.loads((tmp_path / "h200" / ALONE_FILE).read_text())
    assert document["timings"] == document["shared"] == kept.sum()
    # Few: of what was measured in one go most kernels are not among these.
    assert 0 < len(document["rows"]) < 0.12 * kept.sum() and document["rows"] == sorted(set(document["rows"]))
    assert f"{len(document['rows'])} of {kept.sum()} rows" in capsys.readouterr().out
    # Timings that were added since are told alone: what a fit went by stays.
    half, path = int(kept.sum()) // 2, tmp_path / "h200" / ALONE_FILE
    times = rows[kept].reset_index(drop=True)
    path.write_text(json.dumps({**document, "timings": half, "checksum": checksum(times[:half]), "rows": [1, 2]}))
    assert fit_alone.main(["--rest"]) == 0
    rest = json.loads(path.read_text())
    assert rest["rows"] == [1, 2, *(row for row in document["rows"] if row >= half)] and rest["timings"] == kept.sum()
    path.write_text(json.dumps({**document, "checksum": 1}))
    with pytest.raises(SystemExit):
        fit_alone.main(["--rest"])
    assert "is of other timings" in capsys.readouterr().err


@pytest.mark.parametrize("shared", [False, True])
def test_times_are_expected_from_such_as_are_on_one_level(h200, monkeypatch, shared):
    """Those of several workers, once it is known which were not short."""
    rows, usual, alone = goes()
    short = SHARED_LAUNCH_US * launches(rows["kernel"], rows["m"], rows["k"])
    seen = []

    def told(rows: pd.DataFrame, hardware: object) -> np.ndarray:
        seen.append(rows["p50_us"].to_numpy())
        return usual

    monkeypatch.setattr(fit_alone, "expected", told)
    np.testing.assert_array_equal(find(rows.assign(shared=shared), h200), alone)
    np.testing.assert_array_equal(seen[0], rows["p50_us"])
    np.testing.assert_allclose(seen[1], rows["p50_us"] - np.where(alone & shared, short, 0.0))


def test_what_torchs_own_clock_chose_counts_less(h200):
    """Half of the rows a fifth longer, of either kind: the trees follow those that count more."""
    rows = read_rows(data_folder() / "h200" / "memory.parquet")
    rows = rows[(rows["kernel"] == KERNELS[0]) & (rows["sweep"] == "lrm")].head(400)
    both = pd.concat([rows, rows.assign(p50_us=1.2 * rows["p50_us"])], ignore_index=True)
    first = np.arange(len(both)) < len(rows)
    found = {
        name: np.median(predict(train(KERNELS[0], both.assign(own_clock=own), h200), KERNELS[0], rows, h200) / rows["p50_us"])
        for name, own in {"longer": ~first, "as they are": first}.items()
    }
    assert OWN_CLOCK_WEIGHT < 0.5 and found["longer"] < 1.05 < 1.15 < found["as they are"]
