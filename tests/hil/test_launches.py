"""What makes times of profiled launches, on made-up profiles; the launches themselves need a GPU."""

import json

import pandas as pd
import pytest

from hil import launches
from hil.kernels.base import Shape
from hil.shapes import broad_shapes, gemm_shapes, large_shapes, short_shapes, tower_shapes, wide_shapes
from perfmodel.measured import launch_files, read_launches


def profile(*calls: list[float]) -> list[tuple[float, float, str]]:
    """Events of calls with the given kernel durations in ns, in order, a marker before, between and behind."""
    events, now = [(0.0, 500.0, "at::cuda::spin_kernel(long)")], 1000.0
    for durations in calls:
        for duration in durations:
            events.append((now, duration, "nvjet_sm90"))
            now += duration + 10
        events.append((now, 500.0, "at::cuda::spin_kernel(long)"))
        now += 1000
    return events


def test_the_median_launch_of_a_call_counts_with_all_its_kernels():
    one_kernel, two_kernels = [9000.0, 4000.0, 5000.0], [900.0, 100.0, 700.0, 300.0, 10000.0, 2000.0]
    assert launches.kernel_times(profile(one_kernel, two_kernels)) == [5.0, 1.0]


def test_a_call_whose_kernels_do_not_divide_has_no_time():
    assert launches.kernel_times(profile([1000.0, 2000.0], [], [3000.0] * 3)) == [None, None, 3.0]
    assert launches.kernel_times([]) == []


def test_what_ran_before_the_first_marker_is_no_call():
    assert launches.kernel_times([(-5.0, 70.0, "fill"), *profile([1000.0] * 3)]) == [1.0]


def test_drawn_shapes_are_distinct_and_of_every_kind():
    shapes = launches.drawn(3000, 5)
    assert len(set(shapes)) == len(shapes) > 2900
    assert launches.drawn(3000, 5) == shapes != launches.drawn(3000, 6)
    assert 0.3 < sum(s.groups > 1 for s in shapes) / len(shapes) < 0.4
    assert sum(1 < s.groups <= 512 and (s.n % 8 > 0 or s.k % 8 > 0) for s in shapes) > 0.1 * len(shapes)
    assert max(s.m for s in shapes) > 524288 and max(s.n for s in shapes) > 8192
    assert sum(s.groups == 1 and s.n % 128 == 0 and s.k % 128 == 0 for s in shapes) > 0.08 * len(shapes)


def test_odd_shapes_have_any_divisors_and_are_those_that_a_kernel_takes():
    both = launches.drawn(3000, 5, which="odd")
    shapes, many = both[::2], both[1::2]
    assert len(set(both)) == len(both) == 6000
    assert {s.groups for s in shapes} == {1} and min(s.groups for s in many) == 2 and max(s.groups for s in many) > 32768
    for some, largest in ((shapes, 16384), (many, 4096)):
        for size in ("m", "n", "k"):
            of = [getattr(s, size) for s in some]
            for divisor in (1, 2, 4, 8, 16, 32):
                assert sum(x % divisor == 0 and x % (2 * divisor) != 0 for x in of) > 0.04 * len(of)
            assert sum(x < 16 for x in of) > 0.1 * len(of) and max(of) >= largest
    assert sum(s.groups > 512 and max(s.m, s.n) > 512 for s in many) > 100
    assert launches.drawn(3000, 5, ("torch/bf16_batched",), which="odd") == many
    assert launches.drawn(3000, 5, ("torch/bf16",), which="odd") == shapes
    fp8 = launches.drawn(3000, 5, ("torch/fp8_rowwise_fast",), which="odd")
    assert 300 < len(fp8) < 1500 and set(fp8) < set(shapes) and all(s.n % 16 == 0 and s.k % 16 == 0 for s in fp8)


def test_the_largest_are_those_that_a_kernel_takes():
    shapes = launches.drawn(200, 5, which="large")
    assert shapes == large_shapes(200, 5) and max(s.k for s in shapes) > 2**21
    assert set(launches.drawn(200, 5, ("torch/bf16_batched",), which="large")) == {s for s in shapes if s.groups > 1} != set()


def test_broad_shapes_lie_between_the_round_sizes():
    """Where the usual draws have hardly any: over 10 GFLOP, FP8 takes them, and 64 divides none of their sizes."""
    shapes = launches.drawn(3000, 5, which="broad")
    assert shapes == broad_shapes(3000, 5) != broad_shapes(3000, 6) and len(set(shapes)) == 3000

    def between(some):
        single = [s for s in some if s.groups == 1 and s.n % 16 == s.k % 16 == 0 and 2 * s.m * s.n * s.k > 1e10]
        return sum(s.m % 64 > 0 and s.n % 64 > 0 and s.k % 64 > 0 for s in single) / len(some)

    usual = [*gemm_shapes(3000, 5), *wide_shapes(1000, 5), *launches.drawn(3000, 5, which="odd")]
    assert between(shapes) > 0.05 > 20 * between(usual)
    # Some are among what is launched and asked about by default.
    assert 0.003 < between(launches.drawn(3000, 5)) and any(s in launches.drawn(3000, 5) for s in broad_shapes(450, 13))
    assert 0.6 < sum(s.n % 16 == s.k % 16 == 0 for s in shapes) / 3000 < 0.75
    many = [s for s in shapes if s.groups > 1]
    assert 0.2 < len(many) / 3000 < 0.3 and min(s.groups for s in many) == 2 and max(s.groups for s in many) > 3000
    assert max(s.m for s in shapes) > 400_000 and max(s.k for s in shapes) > 400_000 and max(s.n for s in shapes) > 16_000
    assert all(s.largest_operand <= 2**29 and 2.0 * s.groups * s.m * s.n * s.k <= 2.2e12 for s in shapes)
    fp8 = launches.drawn(3000, 5, ("torch/fp8_grouped_rowwise_fast",), which="broad")
    assert fp8 == [s for s in many if s.n % 16 == s.k % 16 == 0 and s.groups < 1024]


def test_few_are_products_in_few_groups():
    shapes = launches.drawn(200, 5, ("torch/bf16_batched",), which="few")
    assert shapes == tower_shapes(200, 5) and all(1 < s.groups <= 512 for s in shapes)
    assert any(s.n % 8 or s.k % 8 for s in shapes)
    fp8 = launches.drawn(2000, 5, ("torch/fp8_grouped_rowwise_fast",), which="few")
    assert fp8 and all(s.n % 16 == s.k % 16 == 0 for s in fp8)


def test_short_are_large_results_of_a_short_k():
    shapes = launches.drawn(500, 5, ("torch/bf16",), which="short")
    assert shapes == short_shapes(500, 5)
    fp8 = launches.drawn(500, 5, ("torch/fp8_tensorwise_fast",), which="short")
    assert 200 < len(fp8) < 500 and set(fp8) < set(shapes) and all(s.n % 16 == s.k % 16 == 0 for s in fp8)


def test_saved_rows_and_their_origin(tmp_path, monkeypatch):
    """A run goes on in the last file, or in the next where that is full; readers have them in the order of measurement."""
    rows = [
        {"kernel": name, "m": 64, "n": 32, "k": 16, "groups": 1, "time_us": us} for name, us in (("torch/bf16", 2.5), ("a", 3.5))
    ]
    launches.add(pd.DataFrame(rows[:1]), {"command": "made up", "rows": 1}, tmp_path)
    read = pd.read_parquet(tmp_path / "launches.parquet")
    assert read.iloc[0].to_dict() == rows[0] and Shape(*read[["m", "n", "k", "groups"]].iloc[0]) == Shape(64, 32, 16)
    launches.add(pd.DataFrame(rows[1:]), {"command": "again", "rows": 1}, tmp_path)
    assert pd.read_parquet(tmp_path / "launches.parquet").to_dict("records") == rows
    monkeypatch.setattr(launches, "MOST_ROWS", 2)
    before = (tmp_path / "launches.parquet").read_bytes()
    for number in range(2, 13):
        launches.add(pd.DataFrame(2 * rows[:1]).assign(time_us=float(number)), {"command": str(number), "rows": 2}, tmp_path)
    assert (tmp_path / "launches.parquet").read_bytes() == before
    names = ["launches.parquet", *(f"launches{number}.parquet" for number in range(2, 13))]
    assert [path.name for path in launch_files(tmp_path)] == names
    runs = json.loads((tmp_path / "launches.json").read_text())["runs"]
    assert [run["command"] for run in runs] == ["made up", "again", *map(str, range(2, 13))]
    found = read_launches(pd.DataFrame({name: [1] for name in ("m", "n", "k", "groups")}), tmp_path)
    assert found["time_us"].tolist() == [2.5, 3.5, *(float(number) for number in range(2, 13) for _ in range(2))]
    assert sum(run["rows"] for run in runs) == len(found)
    (tmp_path / "launches3.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="launches3.parquet is missing"):
        read_launches(found, tmp_path)


def test_a_kernel_that_waits_for_the_one_before_it_counts_once():
    """Launched ahead, the second kernel's 3 us hold 2 us of the first one's 4."""
    marker = "at::cuda::spin_kernel(long)"
    events = [(0.0, 500.0, marker)]
    for launch in range(3):
        begun = 1000.0 + 10000 * launch
        events += [(begun, 4000.0, "gemm_kernel"), (begun + 2000, 3000.0, "sum_kernel")]
    assert launches.kernel_times([*events, (90000.0, 500.0, marker)]) == [5.0]


def test_shapes_are_drawn_for_the_kernels_asked_for():
    assert all(s.groups > 1 for s in launches.drawn(500, 5, ["torch/bf16_batched"]))
    grouped = launches.drawn(500, 5, ["torch/fp8_grouped_rowwise_fast"])
    assert {s.groups for s in grouped} & {26, 512} and all(s.n % 16 == s.k % 16 == 0 and s.groups <= 1023 for s in grouped)
    own = launches.drawn(500, 5, ["loka/fp8_rowwise_fast", "fbgemm/fp8_rowwise_fast"])
    assert own and all(s.groups == 1 and s.k % 16 == 0 for s in own)
    square = launches.drawn(500, 5, ["fbgemm/fp8_block128"])
    assert len(square) > 40 and all(s.m % 128 == s.n % 128 == s.k % 128 == 0 for s in square)
    assert len({s.m for s in square}) > 20


def test_a_form_of_our_own_gemm_is_compiled_once():
    name = "loka/fp8_rowwise_fast"
    assert launches._form(name, Shape(4096, 512, 1024)) == launches._form(name, Shape(8192, 512, 1024))
    assert launches._form(name, Shape(4096, 512, 1024)) != launches._form(name, Shape(4097, 512, 1024))
    assert launches._form(name, Shape(4096, 512, 1024)) != launches._form("loka/fp8_rowwise_split", Shape(4096, 512, 1024))


def test_kernels_that_are_no_gemm_are_refused(capsys):
    with pytest.raises(SystemExit):
        launches.main(["--out", "nowhere", "--kernels", "loka/quantize_*"])
    assert "fits no GEMM" in capsys.readouterr().err


def test_kernels_whose_library_is_absent_are_named_and_left_out(tmp_path, monkeypatch, capsys):
    """Of all that are asked for, without any shape, so that nothing is launched."""
    asked = []
    monkeypatch.setattr(launches, "has_gpu", lambda: True)
    monkeypatch.setattr(launches, "available_kernels", lambda names: tuple(name for name in names if name.startswith("torch/")))
    monkeypatch.setattr(launches, "absences", lambda names: ["not available: a library"])
    monkeypatch.setattr(launches, "drawn", lambda count, seed, kernels, which: asked.append((kernels, which)) or [])
    monkeypatch.setattr(launches, "BufferPool", lambda elements: None)
    assert launches.main(["--out", str(tmp_path), "--kernels", "*", "--large"]) == 1
    (kernels, which), printed = asked[0], capsys.readouterr().err
    assert which == "large" and len(kernels) > 5 and all(name.startswith("torch/") for name in kernels)
    assert "not available: a library" in printed and "nothing new was measured" in printed
    assert launches.main(["--out", str(tmp_path), "--kernels", "deepgemm/*"]) == 3 and len(asked) == 1
