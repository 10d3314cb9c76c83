"""Kernels of a profile find the predicted ones: `benchmarks/step_kernels.py` on profiles made up."""

import importlib.util
import sys
from pathlib import Path

import pytest

from loka_sim.dispatch.candidates import Row
from loka_sim.modelspec import Dim, Fused


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parents[1] / "benchmarks" / "step_kernels.py"
    spec = importlib.util.spec_from_file_location("step_kernels", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def triton(name, sizes, read, written, us, launches=1.0, operators=("aten.add.Tensor",)):
    return {
        "kernel": f"triton_{name}", "kind": "triton_poi", "sizes": sizes, "read_bytes": read, "written_bytes": written,
        "operators": dict.fromkeys(operators, 1), "median_us": us, "launches": launches,
    }  # fmt: skip


def fused(kind, kept, reduced, read, written, label="add", count=1):
    return Fused("backward", kind, label, Dim(kept), Dim(reduced), Dim(read), Dim(written), Dim(0), count=count)


def test_fused_kernels_are_paired_by_their_elements_and_bytes(benchmark):
    kernels = [
        triton("poi_a", {"x": 4096}, 8192, 8192, 3.0, 2.0),
        triton("poi_b", {"x": 4096}, 40_960, 8192, 5.0),
        triton("poi_slow", {"x": 4096}, 8192, 8192, 9.0, operators=("aten.cos.default",)),
        triton("red_sum", {"x": 64, "r0_": 64}, 8192, 256, 2.0),
        triton("poi_other", {"x": 100_000}, 200_000, 200_000, 7.0),
    ]
    predicted = [
        fused("pointwise", 4096, 1, 8000, 8192, count=2),
        fused("pointwise", 4096, 1, 41_000, 8192),
        fused("pointwise", 4096, 1, 8192, 8192, "cos"),
        fused("row", 64, 64, 8192, 256, "sum"),
    ]
    found = benchmark.paired_fused(benchmark.measured_kernels({"kernels": kernels}), predicted, 1)
    pairs = {(row["us"], row["read_bytes"], row["launches"]) for row in found}
    assert pairs == {(3.0, 8000, 2.0), (5.0, 41_000, 1.0), (9.0, 8192, 1.0), (2.0, 8192, 1.0)}


def test_the_second_stage_of_a_sum_goes_with_the_first(benchmark):
    kernels = [
        triton("red_sum", {"x": 2048, "r0_": 128}, 524_288, 8192, 4.0, operators=("aten.sum.dim_IntList",)),
        triton("per_sum", {"x": 128, "r0_": 16}, 8192, 256, 1.5, operators=("aten.sum.dim_IntList",)),
    ]
    found = benchmark.paired_fused(
        benchmark.measured_kernels({"kernels": kernels}), [fused("column", 128, 2048, 524_288, 256, "sum")], 1
    )
    assert [(row["kind"], row["us"]) for row in found] == [("column", 5.5)]


def test_a_turned_copy_is_found_in_kernels_of_its_own_rows_alone(benchmark):
    cast = ("aten.abs.default", "aten.amax.default", "aten.clamp_min.default", "aten.clamp_max.default")
    kernels = [triton("red_other", {"x": 64, "r0_": 64}, 8192, 4096, 4.0, operators=cast)]
    predicted = [
        Fused(
            "backward", "row", "abs amax cast clamp_max clamp_min", Dim(kept), Dim(4096 // kept), Dim(8192), Dim(4096), Dim(4096)
        )
        for kept in (128, 64)
    ]
    measured = benchmark.measured_kernels({"kernels": kernels})
    assert not benchmark.paired_fused(measured, predicted[:1], 1)
    assert [row["kept"] for row in benchmark.paired_fused(measured, predicted, 1)] == [64]


def test_each_sum_of_a_kernel_has_a_second_stage(benchmark):
    kernels = [
        triton("red_norm", {"x": 2048, "r0_": 128}, 524_288, 16_384, 4.0, operators=("aten.sum.dim_IntList",)),
        triton("per_sum", {"x": 128, "r0_": 16}, 8192, 256, 1.5, 3.0, operators=("aten.sum.dim_IntList",)),
    ]
    found = benchmark.paired_fused(
        benchmark.measured_kernels({"kernels": kernels}), [fused("column", 128, 2048, 524_288, 512, "mul sum")], 1
    )
    assert [(row["kind"], row["us"]) for row in found] == [("column", 7.0)]  # the third is another kernel's


def profile(*launches):
    names = [name for name, _ in launches]
    kinds = ["copy" if name.startswith("Memset") else "gemm" for name in names]
    return {
        "kernels": [{"kernel": name, "kind": kind} for name, kind in zip(names, kinds, strict=True)],
        "launches": [[index, us] for index, (_, us) in enumerate(launches)],
    }


ROWS = [Row("torch/bf16", m, m, m) for m in (256, 512, 1024)]
FORWARD = "nvjet_sm90_tst_64x64_64x8_1x2_h_bz_TNN"


def test_gemms_in_order_are_paired_in_order_with_what_adds_up_their_parts(benchmark):
    ran = profile((FORWARD, 1.1), (FORWARD, 4.2), ("splitKreduce_kernel", 0.8), (FORWARD, 9.0))
    found = benchmark.paired_gemms(ran, ROWS, [1.0, 5.0, 9.5])
    assert [(row["m"], row["us"]) for row in found] == [(256, 1.1), (512, 5.0), (1024, 9.0)]


def test_gemms_that_changed_places_are_told_by_their_times(benchmark):
    rows = [Row("torch/bf16", m, 64, 64) for m in range(64, 576, 64)]
    alone = [3.0, 9.0, 3.0, 27.0, 3.0, 9.0, 3.0, 27.0]
    ran = profile(*((FORWARD, us) for us in (3.1, 9.1, 27.1, 3.2, 3.3, 9.2, 3.4, 27.2)))
    found = {row["m"]: row["us"] for row in benchmark.paired_gemms(ran, rows, alone)}
    assert found == {64: 3.1, 128: 9.1, 192: 3.2, 256: 27.1, 320: 3.3, 384: 9.2, 448: 3.4, 512: 27.2}


def test_gemms_alike_in_time_are_told_by_how_their_operands_lie_and_what_ran_before(benchmark):
    """Each changed places with its neighbour."""
    rows = [
        Row("torch/bf16_column_row", 64, 64, 512), Row("torch/bf16_row_row", 512, 64, 64),
        Row("torch/bf16_batched", 48, 48, 8, 64), Row("torch/bf16_column_row", 4, 28, 8192),
        *[Row("torch/bf16", m, 64, 64) for m in range(1000, 1008)],
    ]  # fmt: skip
    cutlass = "cutlass_80_tensorop_bf16_s16816gemm_bf16_256x64_32x4_nt_align2"
    dgrad, wgrad = "nvjet_sm90_tst_64x8_64x16_1x4_h_bz_NNT", "nvjet_sm90_tst_64x8_64x16_1x4_h_bz_NTT"
    ran = profile((dgrad, 3.0), (wgrad, 3.1), (cutlass, 17.0), ("Memset (Device)", 0.8), (FORWARD, 3.0), *[(FORWARD, 2.0)] * 8)
    found = {
        row["k"]: row["us"] for row in benchmark.paired_gemms(ran, rows, [3.0, 3.0, 3.0, 7.0, *[2.0] * 8]) if row["m"] < 1000
    }
    assert found == {512: 3.1, 8192: 17.0, 64: 3.0, 8: 3.0}


def test_gemms_of_another_number_are_left_out(benchmark):
    assert benchmark.paired_gemms(profile((FORWARD, 1.0), ("nvjet_sm90_qqtst", 2.0)), ROWS, [1.0, 5.0, 9.5]) == []


def test_a_profile_without_kernels_of_torch_compile_has_none(benchmark):
    found = benchmark.measured_kernels({"kernels": [{"kernel": "nvjet_sm90", "kind": "gemm", "launches": 1.0}]})
    assert found.empty and benchmark.paired_fused(found, [fused("pointwise", 64, 1, 128, 128)], 1) == []


def test_no_profiles_are_refused_in_one_line(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["step_kernels.py", "--out", str(tmp_path / "t.parquet")])
    with pytest.raises(SystemExit) as stop:
        benchmark.main()
    assert stop.value.code == 2 and "no profile to take kernels from" in capsys.readouterr().err


def test_what_torch_itself_adds_up_goes_with_the_sums_that_take_as_long(benchmark):
    name = "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float>>"
    profile = {"kernels": [{"kernel": name}, {"kernel": "triton_poi_a"}], "launches": [[0, 9.0], [1, 50.0], [0, 30.0], [0, 8.0]]}
    sums = [fused("partials", 1920, 384, 4 * 1920 * 384, 4 * 1920, "sum", 2), fused("partials", 32, 3840, 491_520, 128, "sum")]
    found = benchmark.paired_called("partials", profile, sums, 1)
    assert sorted((row["kept"], row["us"], row["launches"]) for row in found) == [(32, 30.0, 1.0), (1920, 8.5, 2.0)]
    assert benchmark.paired_called("partials", profile, sums[:1], 1) == []  # another number ran than was predicted
