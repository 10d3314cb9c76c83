"""The whole step: what stands beside the GEMMs, added up, and held to steps measured on an H200."""

import importlib.util
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from loka_sim.dense_units import dense_tensors
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.operands import Row
from loka_sim.dispatch.steps import ALIKE, EXPORT, RECIPE, RUNTIME, speedup, whole
from loka_sim.modelspec import Dim, Fused, Table, load
from loka_sim.statements import statements
from loka_sim.step_plan import BACKWARD, FORWARD, OPTIMIZER, TABLE_UPDATE
from loka_sim.whatif import whatif
from loka_sim.whole_step import (
    CONFLICT_US,
    as_run_by,
    by_kind,
    conflicts,
    launched,
    of_step,
    optimizer_step,
    others,
    table_gradient,
    table_update,
)
from perfmodel import fused, hardware
from perfmodel.data_folder import data_folder
from perfmodel.kernels import KERNELS

H200 = hardware.load("h200")
TABLES = (Table("large", 40_000_000, 128, lookups=1.0), Table("small", 10, 64, lookups=2.0))


@pytest.fixture(scope="module")
def answer():
    return whatif("wukong-small", batch=4096)


def test_tables_gradients_are_filled_in_fp32_and_cast():
    fill, cast, *_ = table_gradient(TABLES, 10_000)
    assert (fill.phase, fill.kind, fill.written_bytes.at(1)) == (BACKWARD, "fill", 4 * 10_000 * 128)
    assert (cast.read_bytes.at(1), cast.written_bytes.at(1)) == (4 * 10_000 * 128, 2 * 10_000 * 128)


def test_an_update_touches_the_rows_that_were_looked_up():
    large, small = table_update(TABLES, 2048, "sgd")
    assert large.phase == TABLE_UPDATE
    assert large.read_bytes.at(1) == 4 * 2048 * 128  # gradient and row
    assert small.kept.at(1) == 10 * 64  # at most the table


def test_adds_to_the_same_row_wait_for_each_other():
    (meeting,) = conflicts(TABLES, 2048)
    assert meeting.time.us == pytest.approx(CONFLICT_US * 2 * 2048 / 10, rel=1e-3)
    assert conflicts(TABLES[:1], 2048) == []


def test_the_optimizer_reads_and_writes_parameters_and_state():
    (adamw,) = optimizer_step([10**9], "adamw", H200)
    assert (adamw.phase, adamw.moved_bytes) == (OPTIMIZER, 14 * 10**9)
    assert adamw.time.us == pytest.approx(14e9 / 2.8e6, rel=0.02)
    assert optimizer_step([], "adamw", H200) == []
    # A memory that is twice as fast: many parameters take near half the time, few wait for what it does not change.
    twice = replace(H200, copy_bandwidth_tbs=2 * H200.copy_bandwidth_tbs)
    assert optimizer_step([10**9], "adamw", twice)[0].time.us == pytest.approx(adamw.time.us / 2, rel=0.12)
    few = [optimizer_step([50_000], "adamw", gpu)[0].time.us for gpu in (H200, twice)]
    assert few[0] == pytest.approx(few[1], rel=0.02)


def test_the_parameters_are_those_of_the_layers():
    spec = load(data_folder() / "specs" / "dlrm-small.json")
    sizes = dense_tensors(spec)
    assert sum(sizes) == spec.dense_parameters
    assert {13 * 64, 64} < set(sizes)  # the first layer and its bias


def gemms_between_others(answer, assignments):
    """Microseconds of a step's GEMMs as they run in it."""
    return sum(
        answer.runs.between.of[site.shape.row(name, kernel)].us
        for site, kernels in zip(answer.sites, assignments, strict=True)
        for name, kernel in kernels.items()
    )


def test_a_whole_step_is_its_gemms_and_the_rest(answer):
    rest = sum(time.us for time in by_kind(answer.others).values())
    assert rest == pytest.approx(sum(o.time.us for o in answer.others if o.phase in (FORWARD, BACKWARD)))
    for step in answer.steps:
        if not step.fp8_passes:
            gemms = gemms_between_others(answer, [site.shape.bf16() for site in answer.sites])
            assert step.whole.us == pytest.approx(gemms + rest)
        assert step.whole.low_us < step.whole.us < step.whole.high_us
        assert step.whole_speedup.us == pytest.approx(answer.steps[0].whole.us / step.whole.us)
        assert step.whole_speedup.low_us <= step.whole_speedup.us <= step.whole_speedup.high_us


def test_torchao_multiplies_the_scales_of_a_gemm_behind_it():
    def launches(kernel):
        return [Row(f"torch/fp8_{kernel}", 4096, 1024, 2048), Row(f"torch/fp8_{kernel}", 512, 256, 128)]

    rowwise, tensorwise, fast = map(launches, ("rowwise_split", "tensorwise_split", "rowwise_fast"))
    alone = Times(
        {row: Time(us, 0.9 * us, 1.2 * us) for row, us in zip([*rowwise, *tensorwise, *fast], range(20, 80, 10), strict=True)}
    )
    run = as_run_by(EXPORT, alone, H200)
    assert all(run.of[row] == alone.of[row] for row in (*tensorwise, *fast))
    behind = [run.of[row].us - alone.of[other].us for row, other in zip(rowwise, tensorwise, strict=True)]
    # It reads and writes the product once at the least: in bf16, at the bandwidth of a copy.
    assert all(us > 4 * row.m * row.n / (H200.copy_bandwidth_tbs * 1e6) for us, row in zip(behind, rowwise, strict=True))
    assert all(run.of[row].low_us < run.of[row].us < run.of[row].high_us for row in rowwise)
    # Rounding the scales takes longer, and what multiplies them in the GEMM needs none of it.
    assert all(as_run_by(RECIPE, alone, H200).of[row].us > run.of[row].us for row in rowwise)
    assert as_run_by(RUNTIME, alone, H200).of == alone.of
    # Of what has no time nothing is made up.
    assert as_run_by(EXPORT, Times({row: alone.of[row] for row in rowwise}), H200).of == {row: alone.of[row] for row in rowwise}


@pytest.mark.parametrize("libraries", ["torch", "all"])
def test_dense_and_whole_step_agree_on_what_torchao_runs(libraries):
    answer = whatif("dcnv2-production", batch=8192, libraries=libraries)
    rowwise, tensorwise = (next(s for s in answer.steps if s.name == f"naive_{scaling}") for scaling in ("rowwise", "tensorwise"))
    # GEMMs by themselves are as fast; what torchao's rowwise recipe adds is the scales behind them, in both.
    apart, together = (rowwise.total.us - tensorwise.total.us, rowwise.whole.us - tensorwise.whole.us)
    assert apart > 500 and together > 500
    native = answer.times.of
    slower = {row for row, time in answer.run.of.items() if time.us > native[row].us}
    assert {row.kernel for row in slower} == ({"torch/fp8_rowwise_split"} if libraries == "torch" else set())


def test_what_a_rowwise_recipe_adds_to_a_step_is_what_it_was_measured_to_add():
    """Its kernels, and the CUDA graph that the step is, which is the kernels and the gaps between them."""
    steps = json.loads((data_folder() / "h200" / "step_profiles.json").read_text())["steps"]
    measured = {step["variant"]: step for step in steps if (step["model"], step["batch"]) == ("dcnv2-production", 2048)}
    told = {step.name: step for step in whatif("dcnv2-production", batch=2048).steps}
    kernels = {name: (step.whole.us - step.gaps_us) / 1e3 for name, step in told.items()}
    graphs = {name: step.whole.us / 1e3 for name, step in told.items()}
    for found, which in ((kernels, "kernels_ms"), (graphs, "graph_ms")):
        added = measured["naive_rowwise"][which] - measured["bf16"][which]
        assert found["naive_rowwise"] - found["bf16"] == pytest.approx(added, rel=0.05)


def test_fused_quantization_stands_in_the_place_of_quantizers():
    found = whatif("wukong-production", batch=2048)
    decided, fused = found.decision, found.converted
    assert fused.sites == {s.site.name for s in found.sites if any(KERNELS[p.kernel].is_fp8 for p in s.passes.values())}
    rest = sum(time.us for time in fused.by_kind.values())
    gemms = gemms_between_others(found, [{n: entry.kernel for n, entry in site.passes.items()} for site in found.sites])
    assert decided.whole.us == pytest.approx(gemms + rest)
    # An H200's kernels of torch.compile took so much longer all together: a bit more than quantizers of their own would.
    profiles = json.loads((data_folder() / "h200" / "step_profiles.json").read_text())["steps"]
    compiled = {
        step["variant"]: sum(us for kind, us in step["by_kind_us"].items() if kind.startswith("triton"))
        for step in profiles
        if (step["model"], step["batch"]) == ("wukong-production", 2048)
    }
    bf16 = sum(time.us for time in by_kind(found.others).values())
    assert rest - bf16 == pytest.approx(compiled["decision"] - compiled["bf16"], rel=0.1)
    assert found.timelines["decision"].total_us == pytest.approx(gemms + sum(other.time.us for other in fused.others), rel=1e-3)


def test_what_is_the_same_on_both_sides_draws_a_speedup_to_one():
    fast, slow = Row("torch/fp8_rowwise_fast", 1, 1, 1), Row("torch/bf16", 1, 1, 1)
    times = Times({fast: Time(100.0, 100.0, 100.0), slow: Time(150.0, 140.0, 160.0)}, frozenset())
    rows, than = Counter([fast]), Counter([slow])
    assert speedup(times, rows, than) == pytest.approx((1.5, 1.4, 1.6))
    here, there = {"row": Time(100.0, 90.0, 120.0)}, {"row": Time(100.0, 90.0, 120.1)}  # of other kernels
    found = speedup(times, rows, than, here, there)
    assert found.us == pytest.approx((150 + 100) / (100 + 100))
    # 0.05 from the GEMM; 20% of 100 us on both sides at once move the ratio by 0.025, each for itself by 0.1 and 0.125.
    kind = ALIKE * 0.125**2 + (1 - ALIKE) * (0.5**2 + 0.625**2)
    assert found.low_us == pytest.approx(1.25 - (0.05**2 + kind * 0.2**2) ** 0.5)
    assert found.high_us == pytest.approx(1.25 + (0.05**2 + kind * 0.1**2) ** 0.5)


def test_kernels_that_one_side_alone_runs_move_the_speedup_by_their_own_error():
    times = Times({(row := Row("torch/bf16", 1, 1, 1)): Time(100.0, 100.0, 100.0)}, frozenset())
    both = Counter([row])
    found = speedup(times, both, both, {"row": Time(100.0, 80.0, 110.0)}, {"row": Time(60.0, 48.0, 66.0)})
    # Of the kind 60 us stand against 100 us: 20% less of both, and the ratio is 148 to 180.
    assert found.us == pytest.approx(160 / 200)
    kind = ALIKE * ((0.8 * 100 - 60) / 200) ** 2 + (1 - ALIKE) * ((60 / 200) ** 2 + (0.8 * 100 / 200) ** 2)
    assert found.high_us == pytest.approx(0.8 + 0.2 * kind**0.5)
    assert found.low_us == pytest.approx(0.8 - 0.1 * kind**0.5)


def test_a_step_is_surely_as_fast_as_itself():
    times = Times({(row := Row("torch/bf16", 1, 1, 1)): Time(100.0, 90.0, 120.0)}, frozenset())
    both, kinds = Counter([row]), {"row": Time(100.0, 80.0, 110.0)}
    assert speedup(times, both, both, kinds, kinds, {False: 0.1, True: 0.1}) == (1.0, 1.0, 1.0)


def test_gemms_of_a_precision_are_off_together():
    fast, slow = Row("torch/fp8_rowwise_fast", 1, 1, 1), Row("torch/bf16", 1, 1, 1)
    times = Times({fast: Time(100.0, 100.0, 100.0), slow: Time(150.0, 150.0, 150.0)}, frozenset())
    found = speedup(times, Counter([fast]), Counter([slow]), off={False: 0.04, True: 0.06})
    # One precision on either side: neither shares its error with the other.
    assert found.high_us - 1.5 == pytest.approx(1.5 * (0.04**2 + 0.06**2) ** 0.5)


def test_errors_of_a_kind_add_and_those_of_kinds_do_not():
    total = whole(Time(10.0, 10.0, 10.0), {"row": Time(5.0, 2.0, 8.0), "fill": Time(5.0, 1.0, 9.0)})
    assert total == pytest.approx((20.0, 15.0, 25.0))


def test_kernels_scale_with_the_batch(answer):
    half = whatif("wukong-small", batch=2048)
    assert sum(o.count * o.moved_bytes for o in half.others) == pytest.approx(
        0.5 * sum(o.count * o.moved_bytes for o in answer.others), rel=0.1
    )


def test_the_document_and_the_timeline_hold_every_kernel(answer):
    document = answer.to_dict()
    assert len(document["others"]) == len(answer.others)
    assert document["steps"][-1]["whole_us"] == pytest.approx(answer.steps[-1].whole.us, rel=1e-5)
    assert answer.timelines["bf16"].total_us == pytest.approx(
        gemms_between_others(answer, [site.shape.bf16() for site in answer.sites])
        + sum(other.time.us for other in answer.others),
        rel=1e-3,
    )


def test_a_small_model_is_bound_by_its_host_without_a_graph(answer):
    def warned(what):
        return any("CUDA graph the host is the bound" in entry["text"] for entry in what.to_dict()["statements"])

    assert warned(answer)
    assert not warned(whatif("wukong-production", batch=2048))


def test_a_specification_without_kernels_has_a_dense_step_alone(answer):
    bare = replace(answer.spec, fused=(), untraced="RuntimeError: shapes depend on data")
    assert of_step(bare, H200) == ()
    other = whatif(bare)
    assert other.steps[0].whole is None and "whole_us" not in other.to_dict()["steps"][0]
    said = " ".join(text["text"] for text in other.to_dict()["statements"])
    assert "whole step is not predicted" in said and "shapes depend on data" in said


def test_measured_steps_lie_within_a_tenth_of_the_predicted():
    """Steps that ran on an H200, as a CUDA graph where that was timed by itself; every speedup's sign must be right."""
    path = Path(__file__).parents[2] / "benchmarks" / "whole_step.py"
    spec = importlib.util.spec_from_file_location("whole_step_benchmark", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    every = json.loads((data_folder() / "h200" / "step_profiles.json").read_text())["steps"]
    steps = [step for step in every if ":" not in step["model"]]  # the zoo's; others would have to be captured
    errors, answers = {}, {}
    for step in steps:
        both = benchmark.both(step["model"], step["batch"], answers)
        found = {name: predicted.kernels_ms for name, predicted in both.items()}
        alone = step["graph_ms"] and not step["shared"]
        ratio = both[step["variant"]].graph_ms[0] / step["graph_ms"] if alone else found[step["variant"]][0] / step["kernels_ms"]
        errors[step["model"], step["batch"], step["variant"]] = abs(ratio - 1)
        base = next((s for s in steps if (s["model"], s["batch"], s["variant"]) == (step["model"], step["batch"], "bf16")), None)
        if base is not None and base is not step:
            measured, predicted = base["kernels_ms"] / step["kernels_ms"], found["bf16"][0] / found[step["variant"]][0]
            assert (measured > 1) == (predicted > 1), step
    assert sum(errors.values()) / len(errors) < 0.05
    assert max(errors.values()) < 0.10


@pytest.mark.parametrize(("model", "batch"), [("wukong-production", 2048), ("interformer-small", 4096)])
def test_mods_shorten_steps_about_as_measured(model, batch):
    """Measured on an H100; the H200's memory is faster, and the norms that Mods replace are a smaller part of a step."""
    path = Path(__file__).parents[2] / "benchmarks" / "whole_step.py"
    spec = importlib.util.spec_from_file_location("whole_step_benchmark", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    steps = json.loads((data_folder() / "h100" / "step_profiles.json").read_text())["steps"]
    measured = {step["model"]: step["kernels_ms"] for step in steps if step["batch"] == batch and step["variant"] == "bf16"}
    answers = {}
    plain, changed = (benchmark.predicted(name, batch, answers)["bf16"][0] for name in (model, f"{model}+mods"))
    shorter = measured[model] / measured[f"{model}+mods"]
    assert 1 + 0.5 * (shorter - 1) < plain / changed < shorter + 0.05


def test_cut_reductions_and_torchs_own_adds_are_several_kernels():
    kernels = [
        Fused(FORWARD, "pointwise", "add", Dim(0, 64), Dim(1), Dim(0, 128), Dim(0, 128), Dim(0), count=3),
        Fused(BACKWARD, "column", "mul sum", Dim(16), Dim(0, 48), Dim(0, 3072), Dim(64), Dim(0), count=2),
        Fused(BACKWARD, "external", "index_add", Dim(0), Dim(0), Dim(0, 256), Dim(0, 128), Dim(0)),
    ]
    assert launched(kernels, 512) == 3 + 2 * 3 + 2  # two sums of 24,576 values: their parts, and one kernel for each


def test_adding_at_indices_takes_as_long_as_it_was_measured():
    """interformer-production at batch 2,048: 8.8 us of a copy, and 35.6 us of adding 4.1 million values."""
    add = Fused(BACKWARD, "external", "index_add", Dim(0), Dim(0), Dim(25_050_880), Dim(16_777_216), Dim(0))
    found = others([add], 2048, fused.load())[0]
    assert found.time.us == pytest.approx(8.8 + 35.6, rel=0.1) and found.time.low_us < 40 < found.time.high_us


@pytest.mark.parametrize(("low", "high", "warned"), [(0.98, 1.09, 1), (0.9, 0.99, 1), (1.01, 1.09, 0), (1.0, 1.0, 0)])
def test_a_gain_that_may_be_a_loss_of_the_whole_step_is_named(answer, low, high, warned):
    decided = replace(answer.decision, whole_speedup=Time((low + high) / 2, low, high))
    said = statements(replace(answer, steps=(*answer.steps[:-1], decided)))
    assert [level for level, text in said if "the gain is not sure" in text] == warned * ["warning"]


def test_sums_of_parts_stand_behind_kernels_that_sum_both_ways():
    """wukong at drawn sizes, 6,144 x 1,920: two sums of 384 parts, 8.4 to 10.8 us each in its steps on an H200."""
    size = 6144 * 1920
    both = Fused(BACKWARD, "both", "mul sum", Dim(0, 1), Dim(1920), Dim(4 * size), Dim(2 * size + 2 * 2 * 1920), Dim(0), count=3)
    found = others([both], 6144, fused.load())
    assert [(other.kind, other.count, other.moved_bytes) for other in found[1:]] == [("partials", 6, 4 * 1920 * (384 + 1))]
    assert launched([both], 6144) == 3 + 2 * 6  # each sum is cast by a kernel of its own


def test_sums_of_parts_take_what_they_took_in_steps():
    """All that profiled steps show, in total; one by one they are 15% off (8.4 and 11.1 us of the same in two steps)."""
    table = pd.read_parquet(data_folder() / "h200" / "step_kernels.parquet")
    rows = table[table["kind"] == "partials"].astype({"uneven": bool})
    model = fused.load()
    told = model.times(rows)[0][:, 0] * model.in_step.fused(["partials"] * len(rows), rows["read_bytes"] + rows["written_bytes"])
    weight = (rows["us"] * rows["launches"]).to_numpy(dtype=float)
    ratio = told / rows["us"].to_numpy(dtype=float)
    assert len(rows) > 50 and np.average(ratio, weights=weight) == pytest.approx(1, abs=0.1)
    assert np.average(np.abs(ratio - 1), weights=weight) < 0.2
