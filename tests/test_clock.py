"""What `benchmarks/clock.py` makes of readings."""

import importlib.util
import json
from pathlib import Path

import pytest

from perfmodel import data_folder

PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "clock.py"


@pytest.fixture(scope="module")
def clock():
    spec = importlib.util.spec_from_file_location("clock", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_of_readings_made_up(clock):
    """2,000 MHz is full, and a small GEMM takes 10 us: after a load 1,500 MHz for 0.2 s, and half as long again for 0.05."""
    seen = {"cold": [[0.0, 2000, 100, 10.0], [0.1, 1990, 100, 10.0]]}
    for name, _, what in clock.CASES:
        for turn in range(clock.TURNS):
            times = [(t, 1500 if t < 0.2 else 1960, 15.0 if t < 0.05 else 10.0) for t in (0.0, 0.06, 0.2, 0.3)]
            seen[f"{name} {turn}"] = [[t, mhz, 300, None if what == "rest" else us] for t, mhz, us in times]
    lines = clock.table(seen).splitlines()[1:]
    assert len(lines) == len(clock.CASES)
    for line, (name, _, what) in zip(lines, clock.CASES, strict=True):
        rest = line.removeprefix(name).split()
        assert rest[:6] == ["1500,", "1500,", "1500", "0.20,", "0.20,", "0.20"]
        assert rest[6:] == ([] if what == "rest" else ["1.25x,", "1.25x,", "1.25x"])


def test_the_clock_that_ships_is_back_before_a_sweep_times_again(clock):
    from hil.measure import REST_S

    document = json.loads((data_folder() / "h200" / "clock.json").read_text())
    full = clock.FULL_CLOCK * max(row[1] for row in document["seen"]["cold"])
    for turn in range(clock.TURNS):
        rows = document["seen"][f"at rest {turn}"]
        low = [row[0] for row in rows if row[1] < full]
        assert rows[0][1] < 0.8 * full and max(low) < REST_S
