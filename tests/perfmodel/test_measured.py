"""Reading timings: their runs, and the level of runs that several workers measured."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from perfmodel.data_folder import data_folder
from perfmodel.fit import fitted_rows
from perfmodel.measured import (
    ALONE_FILE,
    ALONE_SHARE,
    SHARED_GROUPED_US,
    SHARED_LAUNCH_US,
    SHARED_US,
    checksum,
    read_choices,
    read_timings,
)
from perfmodel.opened import choice_file


def write(folder, commands: list[str], rows: list[int], name: str = "gemm") -> pd.DataFrame:
    number = sum(rows)
    frame = pd.DataFrame({
        "kernel": "torch/bf16" if name == "gemm" else "torch/relu_forward", "m": np.arange(number) + 1, "n": 1, "k": 64,
        "groups": 1, "p50_us": np.linspace(2.0, 20.0, number), "sweep": ["a"] * (number // 2) + ["b"] * (number - number // 2),
    })  # fmt: skip
    frame.to_parquet(folder / f"{name}.parquet")
    runs = [{"command": command, "rows": count} for command, count in zip(commands, rows, strict=True)]
    (folder / f"{name}.json").write_text(json.dumps({"runs": runs}))
    return frame


def test_runs_are_the_sidecars(tmp_path):
    write(tmp_path, ["hil.collect gemm", "hil.collect gemm --workers 14", "hil.collect gemm --workers 1"], [4, 3, 5])
    write(tmp_path, ["hil.collect memory", "hil.collect memory --workers 14"], [6, 6], "memory")
    found = read_timings("mine", tmp_path)
    assert found["run"].tolist() == np.repeat(range(5), [4, 3, 5, 6, 6]).tolist()


def test_gemms_of_several_workers_are_brought_to_the_level_of_one(tmp_path):
    frame = write(tmp_path, ["x --workers 14", "x", "x --workers 1"], [20, 10, 10])
    memory = write(tmp_path, ["x"], [12], "memory")
    found = read_timings("mine", tmp_path)
    added = found["p50_us"].to_numpy() - pd.concat([frame, memory])["p50_us"].to_numpy()
    before = frame["p50_us"].to_numpy()[:20]
    assert (added[20:] == 0).all()
    np.testing.assert_allclose(added[:20][before <= 5], SHARED_US)
    assert (added[:20][before >= 10] == 0).all() and (before >= 10).any()
    middle = (before > 5) & (before < 10)
    np.testing.assert_allclose(added[:20][middle], SHARED_US * (10 - before[middle]) / 5)
    assert (np.diff(found["p50_us"].to_numpy()[:20]) > 0).all()


def test_a_grouped_gemm_of_several_workers_is_as_much_short_at_any_time(tmp_path):
    frame = write(tmp_path, ["x --workers 7", "x"], [20, 20])
    frame["kernel"] = ["torch/fp8_grouped_rowwise_fast", "torch/bf16"] * 20
    frame.to_parquet(tmp_path / "gemm.parquet")
    added = read_timings("mine", tmp_path)["p50_us"].to_numpy() - frame["p50_us"].to_numpy()
    np.testing.assert_allclose(added[:20:2], SHARED_GROUPED_US)
    assert (added[1:20:2] < SHARED_US + 1e-9).all() and (added[20:] == 0).all()


def test_memory_kernels_of_several_workers_are_short_by_launches(tmp_path):
    write(tmp_path, ["x"], [4])
    frame = write(tmp_path, ["x --workers 15", "x --ahead 15"], [12, 12], "memory")
    frame["kernel"] = ["torch/relu_forward", "torch/quantize_tensorwise", "loka/quantize_rowwise_dual"] * 8
    # Three launches, as 64 x 4,096 values are reduced in parts, or two, of so few lines; and one row that is no launch at all.
    frame["m"], frame["p50_us"] = 4096, np.where(np.arange(24) == 0, 0.01, frame["p50_us"])
    frame.to_parquet(tmp_path / "memory.parquet")
    found = read_timings("mine", tmp_path).iloc[4:]
    added = found["p50_us"].to_numpy() - frame["p50_us"].to_numpy()[1:]
    np.testing.assert_allclose(added[:11], SHARED_LAUNCH_US * np.array([3, 2, 1] * 4)[:11])
    assert len(found) == 23 and (added[11:] == 0).all()


def test_what_was_timed_as_if_alone_is_not_short(tmp_path, capsys):
    frame = write(tmp_path, ["x --workers 15", "x"], [8, 4], "memory")

    def added(measured: pd.DataFrame, **document) -> list[float]:
        measured.to_parquet(tmp_path / "memory.parquet")
        known = {"timings": 12, "checksum": checksum(frame), "rows": [2, 3, 9], **document}
        (tmp_path / ALONE_FILE).write_text(json.dumps(known))
        return (read_timings("mine", tmp_path)["p50_us"].to_numpy() - measured["p50_us"].to_numpy()).round(6).tolist()

    short = SHARED_LAUNCH_US
    expected = [short] * 2 + [0.0] * 2 + [short] * 4 + [0.0] * 4
    assert added(frame) == expected
    # Rows that were added since are short as all were; with other times nothing is known of any.
    runs = [{"command": "x --workers 15", "rows": 8}, {"command": "x", "rows": 4}, {"command": "x --workers 15", "rows": 12}]
    (tmp_path / "memory.json").write_text(json.dumps({"runs": runs}))
    twice = pd.concat([frame, frame], ignore_index=True)
    assert added(twice) == expected + [short] * 12 and not capsys.readouterr().err
    assert added(twice, checksum=1)[:8] == [short] * 8 and "of other timings" in capsys.readouterr().err
    assert added(twice, timings=25)[:8] == [short] * 8 and "of other timings" in capsys.readouterr().err


def test_what_is_known_of_the_shipped_timings_is_of_these(capsys):
    for gpu in ("h200", "h100"):
        read_timings(gpu)
    assert "of other timings" not in capsys.readouterr().err


def test_torchs_own_clock_is_told_by_the_sidecar(tmp_path):
    frame = write(tmp_path, ["x"], [12], "memory")
    frame["kernel"] = ["torch/relu_forward", "loka/quantize_rowwise"] * 6
    frame.to_parquet(tmp_path / "memory.parquet")
    runs = [{"command": "x", "rows": 6, "candidates": "own clock"}, {"command": "x", "rows": 6}]
    (tmp_path / "memory.json").write_text(json.dumps({"runs": runs}))
    assert read_timings("mine", tmp_path)["own_clock"].tolist() == [True, False] * 3 + [False] * 6
    (tmp_path / "memory.json").unlink()
    assert not read_timings("mine", tmp_path)["own_clock"].any()


def test_cool_gemms_by_themselves_are_brought_to_the_level_of_a_step(tmp_path):
    frame = write(tmp_path, ["alone", "with grouped ones", "with our own", "among torch's blocks", "among torch's"], [8] * 5)
    # Of four: at its best rate and long, at its best rate and short, long and at a tenth of that rate, and long but grouped.
    frame["m"], frame["n"], frame["k"] = np.tile([4096, 1024, 4096, 4096], 10), 4096, np.tile([4096, 1024, 410, 4096], 10)
    frame["p50_us"] = np.tile([120.0, 8.0, 120.0, 120.0], 10)
    frame["kernel"] = ["fbgemm/fp8_block128"] * 40
    frame.loc[[11, 15], "kernel"] = "torch/fp8_grouped_rowwise_fast"
    frame.loc[[19, 23], "kernel"] = "loka/fp8_tensorwise_fast"
    frame.loc[24:27, "kernel"] = frame.loc[32:35, "kernel"] = "torch/fp8_block128"
    frame.loc[[36, 39], "kernel"] = "torch/bf16"
    frame.to_parquet(tmp_path / "gemm.parquet")
    ratio = (read_timings("mine", tmp_path)["p50_us"] / frame["p50_us"]).to_numpy().reshape(-1, 4)
    share, torchs, ours = (
        ALONE_SHARE[name] for name in ("fbgemm/fp8_block128", "torch/fp8_block128", "loka/fp8_tensorwise_fast")
    )
    np.testing.assert_allclose(ratio[:2], [[share, 1, 1, share]] * 2)
    np.testing.assert_allclose(ratio[2:6], [[share, 1, 1, 1]] * 2 + [[share, 1, 1, ours]] * 2)
    np.testing.assert_allclose(ratio[6:8], [[torchs, 1, 1, torchs], [share, 1, 1, share]])
    assert (ratio[8:] == 1).all()


@pytest.mark.parametrize("sidecar", [None, "{", "[]", '{"runs": [{"rows": 3, "command": "x --workers 9"}]}', '{"runs": [{}]}'])
def test_without_a_fitting_sidecar_each_sweep_is_a_run(tmp_path, sidecar):
    frame = write(tmp_path, ["x"], [8])
    if sidecar is None:
        (tmp_path / "gemm.json").unlink()
    else:
        (tmp_path / "gemm.json").write_text(sidecar)
    found = read_timings("mine", tmp_path)
    assert found["run"].tolist() == [0] * 4 + [1] * 4
    np.testing.assert_array_equal(found["p50_us"], frame["p50_us"])


@pytest.mark.parametrize(
    "break_it", [lambda data: data[: len(data) // 2], lambda data: b"choice", lambda data: gzip.compress(b"{}")]
)
def test_a_damaged_choice_is_named(tmp_path, break_it):
    name = choice_file("torch/bf16")
    whole = (data_folder() / "h200" / "choices" / name).read_bytes()
    (tmp_path / "choices").mkdir()
    (tmp_path / "choices" / name).write_bytes(whole)
    assert list(read_choices(tmp_path)) == ["torch/bf16"]
    (tmp_path / "choices" / name).write_bytes(break_it(whole))
    with pytest.raises(ValueError, match=f"{name} is truncated or damaged; make it again"):
        read_choices(tmp_path)


def with_clocks(folder, clocks: dict[int, float], rows: int = 40) -> pd.DataFrame:
    """Shapes of 64 x 64 x 64 and one process, all at 1,980 MHz but for those named; the last two of half a TFLOP."""
    frame = write(folder, ["x"], [rows])
    frame = frame.assign(m=64, n=64, k=64, sm_mhz=1980.0)
    frame.loc[rows - 2 :, ["m", "n", "k"]] = 8192, 8192, 4096
    frame.loc[list(clocks), "sm_mhz"] = list(clocks.values())
    frame.to_parquet(folder / "gemm.parquet")
    return frame


def test_a_low_clock_is_a_neighbours_but_for_a_large_gemm(tmp_path):
    with_clocks(tmp_path, {3: 1425.0, 7: 1935.0, 38: 1425.0, 39: 1980.0})
    assert np.flatnonzero(~read_timings("mine", tmp_path)["settled"]).tolist() == [3]


def test_a_run_at_a_lower_clock_throughout_is_settled(tmp_path):
    frame = with_clocks(tmp_path, {3: 1425.0})
    frame["sm_mhz"] = np.r_[np.full(20, 1410.0), np.full(20, 1980.0)]
    frame.to_parquet(tmp_path / "gemm.parquet")
    assert read_timings("mine", tmp_path)["settled"].tolist() == [False] * 20 + [True] * 20
    (tmp_path / "gemm.json").write_text(json.dumps({"runs": [{"command": "x", "rows": 20}, {"command": "y", "rows": 20}]}))
    assert read_timings("mine", tmp_path)["settled"].all()


def test_where_no_clock_was_read_all_are_settled(tmp_path):
    write(tmp_path, ["x"], [40])
    assert read_timings("mine", tmp_path)["settled"].all()


def test_what_is_fitted_is_settled(tmp_path):
    with_clocks(tmp_path, {number: 1425.0 for number in range(4)})
    rows = fitted_rows(read_timings("mine", tmp_path), least=1)
    assert len(rows) == 36 and rows["settled"].all()


def test_timings_of_two_orders_agree_better_where_both_are_settled():
    """Measured, not modelled: what the reverse order changes lies in what is called unsettled."""
    rows, key = read_timings("h200"), ["kernel", "m", "n", "k", "groups"]
    run = rows[rows["sweep"] == "again"]["run"].unique()[0]
    again, first = rows[rows["run"] == run], rows[rows["sweep"] == "dense"]
    both = again.merge(first, on=key)
    apart = np.abs(np.log(both["p50_us_x"] / both["p50_us_y"]))
    settled = both["settled_x"] & both["settled_y"]
    assert len(both) > 5000 and 0.5 < settled.mean() < 0.9
    assert apart[settled].mean() < 0.65 * apart[~settled].mean()
