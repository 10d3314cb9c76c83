"""Times of memory-bound kernels from what they move."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from perfmodel import fused
from perfmodel.data_folder import data_folder

MODEL = fused.load()
BANDWIDTH = MODEL.hardware.copy_bandwidth_tbs * 1e6  # bytes per microsecond


def kernel(kind="pointwise", kept=2**26, reduced=1, read=2**27, written=2**27, unordered=0, uneven=False, instructions=1):
    return dict(zip(fused.COLUMNS, (kind, kept, reduced, read, written, unordered, uneven, instructions), strict=True))


def times(*rows) -> pd.DataFrame:
    return MODEL.predict(pd.DataFrame(list(rows)))


def test_a_large_copy_runs_at_the_measured_bandwidth():
    (time,) = times(kernel())["time_us"]
    assert time == pytest.approx(64.0, rel=0.05)  # a relu of 2**26 elements, family sum1 of fused.parquet


def test_twice_the_bytes_take_twice_the_time_beyond_the_cache():
    sizes = [2**27, 2**28, 2**29]
    found = times(*(kernel(kept=size // 2, read=size, written=size) for size in sizes))["time_us"].to_numpy()
    assert np.allclose(found[1:] / found[:-1], 2, rtol=0.08)


def test_a_launch_takes_about_a_microsecond():
    (time,) = times(kernel(kept=64, read=128, written=128))["time_us"]
    assert 0.5 < time < 2.5


def test_reductions_that_read_across_memory_are_slower_and_pointwise_kernels_hardly():
    norm = {"kind": "row", "kept": 2**19, "reduced": 128, "read": 2**28, "written": 2**28, "instructions": 6}
    straight, across = times(kernel(**norm), kernel(**norm, unordered=2**27, uneven=True))["time_us"]
    assert across > 1.5 * straight
    straight, across = times(kernel(), kernel(unordered=2**27))["time_us"]
    assert across < 1.2 * straight


def test_rows_in_tiles_take_as_long_on_a_gpu_of_less_bandwidth():
    """Sums of a norm's gradient over 128 of 67 million elements, partly across memory: 198 us on an H200 (fused.parquet)."""
    row = kernel("row", kept=2**19, reduced=128, read=3 * 2**27, written=2**27, unordered=2**27, uneven=True, instructions=13)
    (time,) = times(row)["time_us"]
    assert time == pytest.approx(198, rel=0.1)
    slower = replace(MODEL, hardware=replace(MODEL.hardware, copy_bandwidth_tbs=3.06))
    assert slower.predict(pd.DataFrame([row]))["time_us"][0] == pytest.approx(time, rel=0.1)


def test_which_rows_are_read_in_tiles():
    """torch.compile (2.11) holds uneven rows of up to 64 elements at once."""
    sizes = [("row", 64, True), ("row", 65, True), ("row", 4096, False), ("column", 4096, True)]
    rows = pd.DataFrame([kernel(kind, reduced=reduced, uneven=uneven) for kind, reduced, uneven in sizes])
    assert fused.in_tiles(rows).tolist() == [False, True, False, False]


def test_many_instructions_bound_a_kernel_whatever_it_moves():
    """Scales of 101 million products, 126 instructions each, took 480 us in a step of wukong (step_kernels.parquet)."""
    instructions = fused.instructions_of(["mul", "rescale_rounded"])
    (time,) = times(kernel(kept=3 * 2**25, read=3 * 2**26, written=3 * 2**26, instructions=instructions))["time_us"]
    assert time == pytest.approx(480, rel=0.2)
    (twice,) = times(kernel(kept=3 * 2**25, read=3 * 2**26, written=3 * 2**26, instructions=2 * instructions))["time_us"]
    assert twice == pytest.approx(2 * time, rel=0.1)
    assert fused.instructions_of(["sin", "cos", "mul", "sin"]) == 28 + 30 + 1


def test_a_kind_that_nobody_measured_is_timed_by_its_bytes_and_says_so():
    found = times(kernel("external"), kernel())
    assert found["measured"].tolist() == [False, True]
    assert found["time_us"][0] == pytest.approx(2**28 / BANDWIDTH + fused.LAUNCH_US)
    assert found["high_us"][0] == pytest.approx(3 * found["time_us"][0])


def test_intervals_hold_the_time_and_the_order_of_the_rows():
    rows = [kernel(kept=2**n // 2, read=2**n, written=2**n) for n in (27, 12, 20)]
    found = times(*rows)
    assert (found["low_us"] <= found["time_us"]).all() and (found["time_us"] <= found["high_us"]).all()
    assert found["time_us"].rank().tolist() == [3, 1, 2]


def test_held_out_accuracy_is_written_beside_the_trees():
    kinds = json.loads((data_folder() / "h200" / "models" / fused.MANIFEST).read_text())["kinds"]
    assert kinds["pointwise"]["mape"] < 0.06 and abs(kinds["pointwise"]["sum"]) < 0.02
    assert kinds["row"]["mape"] < 0.15 and kinds["column"]["mape"] < 0.12


def test_measured_intervals_cover_what_is_fitted():
    rows = pd.read_parquet(data_folder() / "h200" / "fused.parquet")
    found = MODEL.predict(rows)
    inside = (rows["p50_us"] >= found["low_us"]) & (rows["p50_us"] <= found["high_us"])
    assert inside.mean() > 0.85


def test_wrong_frames_and_hardware_are_named():
    with pytest.raises(ValueError, match="lacks the columns.*kept"):
        MODEL.predict(pd.DataFrame({"kind": ["row"]}))
    with pytest.raises(ValueError, match="no data"):
        fused.load("tpu")


def test_sums_of_parts_take_a_step_for_each_value_that_a_thread_adds():
    """As measured on an H200 (`python -m hil.fused called`): 1.5 to 36 us where the bytes alone take 1 to 5."""
    table = pd.read_parquet(data_folder() / "h200" / "fused.parquet")
    table = table[table["family"] == "partials"]
    off = np.abs(np.log(fused.baseline_us(table, MODEL.hardware) / table["p50_us"].to_numpy()))
    by_bytes = 1 + (table["read_bytes"] + table["written_bytes"]).to_numpy() / BANDWIDTH
    assert len(table) > 70 and np.median(off) < 0.15 and np.quantile(off, 0.9) < 0.7
    assert np.median(np.log(table["p50_us"].to_numpy() / by_bytes)) > 2  # what it would be by the bytes alone
