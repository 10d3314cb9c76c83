"""A validation without a GPU: kernels "measured" by a made-up machine, everything else as it is."""

import json
import math
import multiprocessing
import threading
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import loka_sim
from loka_sim import calibration, modelspec, validation
from loka_sim.cli import main
from loka_sim.dispatch.candidates import launches
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.decide import flat
from loka_sim.dispatch.operands import Toolbox
from loka_sim.errors import DataError, UserError
from loka_sim.schemas import problem
from loka_sim.validation import judge, measuring, plan, regret, tensors
from loka_sim.validation.budget import PARTS, Budget, Part
from perfmodel.kernels import KERNELS

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
MACHINE = {"gpu": "Made Up 1", "driver": "1.0", "torch": "2.11.0", "capability": "9.0", "sm_mhz": 1980.0}
HOST_US = 4321.0
SLOWER = {"gemm": 1.2, "batched_gemm": 1.2, "quantize": 1.35, "layout": 1.3, "pointwise": 1.25}


@pytest.fixture(scope="module")
def answer():
    return loka_sim.whatif("wukong", batch=512)


class MadeUp:
    """A machine whose kernels take the shipped model's times, slower by kind, with noise of 1%; counts what it is asked."""

    def __init__(self, stop_at=None, shapes=25):
        self.asked, self.families, self.stop_at, self.shapes = [], [], stop_at, shapes

    def __call__(self, folder, kernels=None):
        self.folder = folder
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, name, wanted, seconds):
        self.measure(name, wanted, seconds)
        return lambda: None

    def measure(self, name, wanted, seconds):
        import perfmodel
        from hil.collect import FAMILIES, legal_runners

        self.asked.append(name)
        self.families.append(set(wanted))
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        assert seconds > 0
        model = perfmodel.load("h200")
        self.folder.mkdir(parents=True, exist_ok=True)
        for family, shapes in wanted.items():
            path = self.folder / f"{family}.parquet"
            known = pd.read_parquet(path) if path.is_file() else None
            there = (
                set()
                if known is None
                else set(zip(known["sweep"], known["kernel"], known["m"], known["n"], known["k"], strict=True))
            )
            new = [
                (s, runner.name)
                for s, some in shapes
                for runner in legal_runners(s, FAMILIES[family], some)
                if (name, runner.name, s.m, s.n, s.k) not in there
            ]
            some = list(dict.fromkeys(s for s, _ in new))[: self.shapes]
            rows = [(kernel, s.m, s.n, s.k, s.groups) for s, kernel in new if s in some]
            frame = pd.DataFrame(rows, columns=["kernel", "m", "n", "k", "groups"])
            slower = frame["kernel"].map(lambda kernel: SLOWER[KERNELS[kernel].kind])
            noise = np.random.default_rng(len(self.asked)).normal(1, 0.01, len(frame))
            frame["p50_us"] = model.predict(frame)["time_us"] * slower * noise
            frame = frame.assign(p10_us=0.99 * frame["p50_us"], p90_us=1.01 * frame["p50_us"], sweep=name, eager_us=np.nan)
            pd.concat([frame] if known is None else [known, frame], ignore_index=True).to_parquet(path)

    def run(self, module, arguments, accept=(0,), launcher=()):
        assert module == "hil.exactness"
        self.asked.append("sampled")
        folder = arguments[arguments.index("--out") + 1]
        rows = [{"kernel": "torch/fp8_rowwise_fast", "shapes": 9, "outputs": 9000, "unequal": 0}]
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "exactness.json").write_text(json.dumps({"rows": rows}))
        return 0


def on(machine, monkeypatch):
    import hil.fingerprint

    monkeypatch.setattr(hil.fingerprint, "fingerprint", lambda: dict(MACHINE))
    monkeypatch.setattr(measuring, "host_step_us", lambda folder: HOST_US)
    monkeypatch.setattr(validation, "require_gpu", lambda: None)
    monkeypatch.setattr(validation, "shipped", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(measuring, "Sweeps", machine)
    monkeypatch.setattr(measuring, "run", machine.run)
    return machine


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory):
    """A model of which there is only a specification: no tensors, no step to run."""
    path = tmp_path_factory.mktemp("spec") / "wukong.json"
    modelspec.save(loka_sim.resolve_model("wukong"), path)
    return str(path)


@pytest.fixture(scope="module")
def validated(spec_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("validated") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        machine = on(MadeUp(), monkeypatch)
        document = loka_sim.validate(spec_file, out=folder, batch=512, minutes=2, command=["loka-sim", "validate"])
    return folder, document, machine


def test_the_document_is_whole_and_fits_its_schema(validated):
    folder, document, machine = validated
    assert problem(document, "validation") is None
    assert json.loads((folder / "validation.json").read_text()) == json.loads(json.dumps(document))
    assert document["step"] is None and document["numerics"]["tensors"] == []
    # GEMMs alone, the other kernels beside the numerics, then what is left.
    assert machine.asked == ["model", "model", "sampled", "model", "fresh"]
    assert machine.families == [{"gemm"}, {"memory"}, {"gemm", "memory"}, {"gemm", "memory"}]
    assert (folder / "report.html").read_text().startswith("<!")
    assert loka_sim.load_table(folder)["model"]["batch"] == 512


def test_refinement_halves_the_error_on_fresh_shapes_of_another_machine(validated):
    summary = {(row["set"], row["family"]): row for row in validated[1]["time"]["summary"]}
    for family in ("gemm", "quantize"):
        row = summary["fresh", family]
        assert row["before"]["mape"] > 0.15
        assert row["after"]["mape"] < row["before"]["mape"] / 2, family
        assert row["after"]["coverage"] > 0.75 > row["before"]["coverage"]


def test_errors_are_those_of_the_rows(validated):
    time = validated[1]["time"]
    some = [row for row in time["rows"] if row["set"] == "fresh" and KERNELS[row["kernel"]].kind == "gemm"]
    expected = np.mean([abs(row["after_us"] / row["measured_us"] - 1) for row in some])
    found = next(row for row in time["summary"] if (row["set"], row["family"]) == ("fresh", "gemm"))
    assert found["after"]["mape"] == pytest.approx(expected, rel=1e-3)
    assert found["n"] == len(some)
    worst = max(time["rows"], key=lambda row: abs(row["after_us"] / row["measured_us"] - 1))
    assert time["offenders"][0]["kernel"] == worst["kernel"]


def test_the_calibration_serves_a_whatif(validated, spec_file):
    folder, document, _ = validated
    plain, calibrated = (loka_sim.whatif(spec_file, batch=512, calibration=where) for where in (None, folder))
    assert plain.hardware["perfmodel_fingerprint"] != calibrated.hardware["perfmodel_fingerprint"]
    ratio = calibrated.steps[0].total.us / plain.steps[0].total.us
    assert ratio == pytest.approx(1.2, abs=0.05)
    assert document["whatif"]["after"]["step_us"] == pytest.approx(calibrated.decision.total.us)
    assert calibrated.to_dict()["settings"]["calibration"] == str(folder)
    assert str(folder) in calibrated.to_dict()["command"]
    assert problem(calibrated.to_dict(), "whatif") is None


def test_policies_cost_what_their_launches_cost(validated):
    dispatch = validated[1]["dispatch"]
    by_name = {row["name"]: row for row in dispatch["policies"]}
    assert dispatch["sites"] == dispatch["of_sites"] > 0
    best = by_name["best"]["measured_us"]
    assert all(row["measured_us"] >= best for name, row in by_name.items() if name in ("before", "after", "bf16"))
    # A decision by the measured times themselves may only lose what it left because the gain was not sure.
    assert by_name["after"]["against_best"] < 0.02
    assert by_name["bf16"]["against_bf16"] == 1.0


def test_transpositions_and_the_decided_step_have_tolerances_of_their_own(validated):
    document = validated[1]
    found = {entry["name"]: entry for entry in document["tolerances"]}
    some = [row for row in document["time"]["rows"] if KERNELS[row["kernel"]].kind == "layout"]
    expected = np.mean([abs(row["after_us"] / row["measured_us"] - 1) for row in some])
    assert found["layout_mape"]["value"] == pytest.approx(expected, rel=1e-3) and found["layout_mape"]["limit"] == 0.10
    worst = max(some, key=lambda row: abs(row["after_us"] / row["measured_us"] - 1))
    size = f"{worst['m']} x {worst['n']} x {worst['k']}"
    assert found["layout_mape"]["offenders"][0].startswith(f"{worst['kernel']} {size}: ")
    unseen = document["dispatch"]["unseen"]
    assert found["decided_gap"]["value"] == pytest.approx(abs(unseen["predicted_us"] / unseen["measured_us"] - 1))
    by_name = {row["name"]: row for row in document["dispatch"]["policies"]}
    assert unseen["sites"] >= document["dispatch"]["sites"] > 0
    assert unseen["measured_us"] >= 0.999 * by_name["cross_validated"]["measured_us"]
    # A few sites are not the model.
    some = {**document["dispatch"], "sites": document["dispatch"]["of_sites"] // 2 - 1}
    assert found["regret"]["ok"] is not None
    assert {entry["name"]: entry for entry in judge.tolerances(None, None, some, None)}["regret"]["ok"] is None
    # A few rows say nothing of a 90% interval.
    few = {**document["time"], "summary": [{**row, "n": 9} for row in document["time"]["summary"] if row["set"] == "model"]}
    judged = {entry["name"]: entry for entry in judge.tolerances(None, few, None, None)}
    assert judged["layout_coverage"]["ok"] is None and judged["layout_mape"]["ok"] is None
    assert judged["bit_equal"]["ok"] is None and judged["gemm_mape"]["limit"] == 0.10


def test_the_exported_step_is_predicted_as_torchao_runs_it():
    from loka_sim.validation.document import given_up, step_part

    answer = loka_sim.whatif("wukong", batch=2048)
    found = {name: {"p50_ms": ms} for name, ms in (("bf16", 100.0), ("decision", 80.0), ("filter_tensorwise", 90.0))}
    part = step_part({"medians": found, "note": None}, answer, answer)
    lost, passes = given_up(answer)
    by_name = {variant["name"]: variant for variant in part["variants"]}
    assert by_name["decision"]["speedup"] == 1.25
    bf16, decided = answer.steps[0].whole.us, answer.decision.whole.us
    # As it was run, 10,000 rows a table: FP32 of each is filled, and read and cast to bf16, at most as fast as a copy.
    elements = sum(min(table.rows, 10_000) * table.dim for table in answer.spec.tables)
    tables = 1e3 * part["predicted_bf16_ms"] - bf16
    # The kernels of a loss come with them.
    launches = 2 * len(answer.spec.tables) + 20
    assert (4 + 4 + 2) * elements / 4.9e6 < tables < 3 * (4 + 4 + 2) * elements / 4.3e6 + 5.0 * launches
    bf16, decided = bf16 + tables, decided + tables
    off = {entry["name"]: entry for entry in judge.tolerances(None, None, None, part)}["step_gap"]
    assert off["value"] == pytest.approx(abs(bf16 / 1e5 - 1)) and off["ok"] == (off["value"] <= 0.1)
    assert by_name["decision"]["predicted_after"]["speedup"] == pytest.approx(bf16 / (decided + lost), rel=1e-3)
    assert by_name["decision"]["predicted_before"]["speedup"] == pytest.approx(bf16 / decided, rel=1e-3)
    assert bool(passes) == bool(part["note"]) and not part["host_bound"]
    # Where both decisions were run, each is held against its own model's prediction; the first alone stands in for the other.
    found = {name: {"p50_ms": ms} for name, ms in (("bf16", 100.0), ("decision_before", 80.0), ("decision", 70.0))}
    both = step_part({"medians": found, "note": None}, answer, answer)
    by_name = {variant["name"]: variant for variant in both["variants"]}
    assert by_name["decision"]["predicted_before"] is None and by_name["decision_before"]["predicted_after"] is None
    said = bf16 / (decided + lost)
    assert by_name["decision_before"]["predicted_before"]["speedup"] == pytest.approx(said, rel=1e-3)
    gaps = []
    for names in (("bf16", "decision_before", "decision"), ("bf16", "decision_before")):
        part = step_part({"medians": {name: found[name] for name in names}, "note": None}, answer, answer)
        gaps.append({entry["name"]: entry for entry in judge.tolerances(None, None, None, part)}["speedup_gap"]["value"])
    assert gaps == pytest.approx([abs(100 / 70 / said - 1), abs(100 / 80 / said - 1)], rel=1e-3)
    # A small model's step is its host's: no time of a kernel can be judged by it.
    small = loka_sim.whatif("dlrm-small")
    bound = step_part({"medians": {"bf16": {"p50_ms": 5.0}}, "note": None}, small, small)
    assert bound["host_bound"] and "the host is the bound" in bound["note"]
    judged = {entry["name"]: entry for entry in judge.tolerances(None, None, None, bound)}
    assert judged["step_gap"]["ok"] is None and judged["speedup_gap"]["ok"] is None
    # As one CUDA graph it is the GPU's.
    ms = bound["predicted_bf16_ms"]
    medians = {"bf16": {"p50_ms": 5.0}, "naive_tensorwise": {"p50_ms": 8.0}, "filter_tensorwise": {"p50_ms": 5.0}}
    graphs = {"bf16": {"p50_ms": 1.05 * ms}, "naive_tensorwise": {"p50_ms": 2.1 * ms}}
    part = step_part({"medians": medians, "graphs": graphs, "note": None}, small, small)
    assert part["host_bound"] and part["graphs"] and "as CUDA graphs" in part["note"]
    assert [variant["speedup"] for variant in part["variants"]] == [1.0, pytest.approx(0.5), None]
    assert [variant["measured_ms"] for variant in part["variants"]] == [5.0, 8.0, 5.0]
    judged = {entry["name"]: entry for entry in judge.tolerances(None, None, None, part)}
    assert judged["step_gap"]["value"] == pytest.approx(1 - 1 / 1.05) and judged["step_gap"]["ok"]
    # Of a step that the GPU bounds they are shown, and compared is what a training does.
    part = step_part({"medians": {"bf16": {"p50_ms": 100.0}}, "graphs": {"bf16": {"p50_ms": 95.0}}, "note": None}, answer, answer)
    assert not part["graphs"] and part["variants"][0]["graph_ms"] == 95.0
    assert step_part({"medians": {}, "note": None}, answer, answer) is None


class MadeUpSteps:
    """The step's process: bf16 takes 100 ms, whatever else there is 80."""

    started = []

    def __init__(self, model, batch, mods, folder, deadline, lock, first):
        assert first is None  # of a small model: bf16 everywhere
        self.asked, self.child = [model, batch, deadline], SimpleNamespace(stop=lambda: self.asked.append("stopped"))
        MadeUpSteps.started.append(self)

    def decide(self, table, as_before):
        assert as_before == (table is None)
        self.asked.append("no decision" if table is None else len(table["sites"]))

    def result(self, seconds):
        assert seconds > 0
        return {
            "medians": {"bf16": {"p50_ms": 100.0}, "naive_tensorwise": {"p50_ms": 80.0}},
            "graphs": {"bf16": {"p50_ms": 0.2}},
            "left_out": ["decision: no torchao"],
        }


def test_a_model_that_can_be_run_gives_tensors_and_a_step(tmp_path, monkeypatch):
    import hil.tensor_errors
    from loka_sim.validation import runnable, stepper

    made = runnable.Runnable(None, None, None, "dlrm-small")
    monkeypatch.setattr(runnable, "runnable", lambda model, batch, mods: made)
    monkeypatch.setattr(stepper, "Stepper", MadeUpSteps)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)

    def measure(kernel, a, b):
        shape = (a.shape[0], b.shape[0], a.shape[1])
        return hil.tensor_errors.TensorError(kernel, shape, 100, 100, 30.0, 0.05, 30.0, 0.05)

    monkeypatch.setattr(hil.tensor_errors, "measure", measure)
    machine = on(MadeUp(), monkeypatch)
    document = loka_sim.validate("dlrm-small", out=tmp_path / "run", minutes=2)
    assert problem(document, "validation") is None
    assert machine.asked == ["model", "model", "sampled", "fresh"]
    steps = MadeUpSteps.started.pop()
    assert steps.asked == ["dlrm-small", 512, pytest.approx(120, abs=20), "no decision", "stopped"]
    assert {row["site"] for row in document["numerics"]["tensors"]} >= {"bottom.1", "top.1"}
    assert [variant["name"] for variant in document["step"]["variants"]] == ["bf16", "naive_tensorwise"]
    by_name = {stage["name"]: stage for stage in document["stages"]}
    assert not by_name["the whole model's step"]["complete"]
    assert by_name["the whole model's step"]["note"] == "decision: no torchao"
    assert by_name["numerics, the model's tensors"]["note"].endswith(" sites")
    again = loka_sim.validate("dlrm-small", out=tmp_path / "run", minutes=2)
    assert again["step"] == document["step"] and not MadeUpSteps.started


def test_tensors_that_are_not_there_in_time_are_not_waited_for(tmp_path, monkeypatch):
    from loka_sim.validation import runnable, stepper

    made, told = runnable.Runnable(None, None, None, "dlrm-small"), []

    def endless(name, mods, seed, stop):
        told.append(stop.wait(60))
        raise InterruptedError

    monkeypatch.setattr(runnable, "runnable", lambda model, batch, mods: made)
    monkeypatch.setattr(stepper, "Stepper", MadeUpSteps)
    monkeypatch.setattr(tensors, "observe_zoo_apart", endless)
    monkeypatch.setitem(PARTS, "tensors", Part(0.01, 0.5, 4))
    on(MadeUp(), monkeypatch)
    document = loka_sim.validate("dlrm-small", out=tmp_path / "run", minutes=1.2)
    MadeUpSteps.started.clear()
    # Nothing that computes is left behind, and the stage is to be done again.
    assert told == [True] and not (tmp_path / "run" / "stages" / "tensors.json").exists()
    stage = next(stage for stage in document["stages"] if stage["name"] == "numerics, the model's tensors")
    assert (
        not stage["complete"] and stage["note"] == "what it needs was not there in time" and document["numerics"]["tensors"] == []
    )


def test_a_training_apart_is_the_same_and_can_be_stopped():
    observed, stop = tensors.observe_zoo_apart("dlrm-small", (), 0, threading.Event()), threading.Event()
    assert len(observed.tensors) == 6 and all(x.shape[0] == tensors.BATCH for x, _, _ in observed.tensors.values())
    here = tensors.observe_zoo("dlrm-small", (), 0)
    assert observed.origin == here.origin and set(observed.statistics) == set(here.statistics)
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-4) for name in here.tensors for a, b in zip(
        observed.tensors[name], here.tensors[name], strict=True))  # fmt: skip
    stop.set()
    with pytest.raises(InterruptedError):
        tensors.observe_zoo_apart("dlrm-small", (), 0, stop)
    assert not multiprocessing.active_children()


def test_a_training_that_fails_says_so():
    with pytest.raises(RuntimeError, match="training no-such-model on the CPU failed"):
        tensors.observe_zoo_apart("no-such-model", (), 0, threading.Event())


def test_errors_of_fp8_kernels_need_no_other_recipes(monkeypatch):
    """Statistics of the kernels' recipes alone predict what those of all nineteen do."""
    from loka_sim.dispatch.accuracy import Errors
    from loka_sim.dispatch.candidates import SiteShape
    from numerics.pair import RECIPES

    few = tensors.observe_zoo("dlrm-small", (), 0).statistics
    monkeypatch.setattr(tensors, "recipes", lambda: RECIPES)
    every = tensors.observe_zoo("dlrm-small", (), 0).statistics
    toolbox = Toolbox.of(("torch", "loka", "fbgemm"))
    linear = {name: found for name, found in every.items() if found.pairs}
    assert set(few) == set(every) and len(linear) == 6
    for name, all_of_it in linear.items():
        m, n, k = 512, *all_of_it.pairs["output"].shape[1:]
        shape = SiteShape((("output", m, n, k, 1), ("grad_input", m, k, n, 1), ("grad_weight", n, k, m, 1)))
        assert len(few[name].pairs["output"].recipes) == 4
        assert Errors(toolbox).of_site(shape, few[name]) == Errors(toolbox).of_site(shape, all_of_it)


def test_a_validation_without_time_says_what_it_cut(spec_file, tmp_path, monkeypatch):
    machine = on(MadeUp(), monkeypatch)
    with monkeypatch.context() as hurried:
        # Numerics take nearly all of it; then there is the first half's least, and too little to be kept for the writing.
        late = {10.0: 17.0, 4.0: 5.0}
        hurried.setattr(Budget, "left", lambda self: 90.0 if len(machine.asked) < 3 else late[self.reserve_s])
        document = loka_sim.validate(spec_file, out=tmp_path / "run", batch=512, minutes=1.5)
    assert machine.asked == ["model", "model", "sampled"]
    cut = [stage["name"] for stage in document["stages"] if not stage["complete"]]
    assert cut == ["times of the model's shapes, second half", "times of fresh shapes"]
    assert {row["set"] for row in document["time"]["summary"]} == {"model"}
    # What was cut is measured when the same command is run again.
    machine = on(MadeUp(), monkeypatch)
    document = loka_sim.validate(spec_file, out=tmp_path / "run", batch=512, minutes=1.5)
    assert machine.asked == ["model", "fresh"] and all(stage["complete"] for stage in document["stages"])


def test_numerics_that_failed_are_said_to_have(spec_file, tmp_path, monkeypatch):
    machine = on(MadeUp(), monkeypatch)
    (tmp_path / "run" / "stages").mkdir(parents=True)
    monkeypatch.setattr(validation.Validation, "_claim", lambda *_: None)
    # Of an earlier run; this one leaves none.
    (tmp_path / "run" / "stages" / "exactness.json").write_text('{"rows": [{"kernel": "torch/bf16"}]}')
    monkeypatch.setattr(measuring, "run", lambda *_, **__: 1)
    document = loka_sim.validate(spec_file, out=tmp_path / "run", batch=512, minutes=2)
    stage = next(stage for stage in document["stages"] if stage["name"] == "numerics, sampled")
    assert not stage["complete"] and stage["note"].startswith("python -m hil.exactness failed")
    assert document["numerics"]["sampled"] == [] and machine.asked == ["model", "model", "model", "fresh"]
    assert {entry["name"]: entry["ok"] for entry in document["tolerances"]}["bit_equal"] is None


def test_killed_in_the_middle_it_goes_on_where_it_was(validated, spec_file, tmp_path, monkeypatch):
    folder = tmp_path / "killed"
    first = on(MadeUp(stop_at=4), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        loka_sim.validate(spec_file, out=folder, batch=512, minutes=2)
    assert not (folder / "validation.json").exists()
    second = on(MadeUp(), monkeypatch)
    loka_sim.validate(spec_file, out=folder, batch=512, minutes=2)
    assert first.asked == ["model", "model", "sampled", "model"] and second.asked == ["model", "fresh"]
    third = on(MadeUp(), monkeypatch)
    document = loka_sim.validate(spec_file, out=folder, batch=512, minutes=2)
    assert third.asked == []
    assert document["time"]["summary"] == json.loads((folder / "validation.json").read_text())["time"]["summary"]


def test_a_folder_of_something_else_is_left_alone(spec_file, tmp_path, monkeypatch, validated):
    on(MadeUp(), monkeypatch)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        loka_sim.validate(spec_file, out=tmp_path, minutes=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match="batch 512, not 1024"):
        loka_sim.validate(spec_file, out=validated[0], batch=1024, minutes=2)
    with pytest.raises(UserError, match="--minutes 0.5 is too short"):
        loka_sim.validate(spec_file, out=tmp_path / "new", minutes=0.5)


def test_everything_that_a_decision_may_launch_is_measured(answer):
    work = plan.model_work(answer, list(KERNELS))
    rows = {(plan.family_of(row), plan.shape_of(row)) for row in answer.times.of}
    assert {(family, shape) for family, some in work.wanted.items() for shape, _ in some} == rows
    # An operand under what may be launched on it; a GEMM under all there is.
    assert all("torch/bf16" in kernels for _, kernels in work.wanted["gemm"])
    memory = {(name, shape) for shape, kernels in work.wanted["memory"] for name in kernels}
    wanted = {(row.kernel, plan.shape_of(row)) for row in answer.times.of if plan.family_of(row) == "memory"}
    assert memory == wanted
    # What enters no decision comes last.
    kinds = [{KERNELS[name].kind == "pointwise" for name in kernels} for _, kernels in work.wanted["memory"]]
    assert kinds == sorted(kinds, key=lambda some: True in some) and {True} in kinds and {False} in kinds


def test_regret_against_a_search_of_its_own(answer):
    rng = np.random.default_rng(3)
    measured = Times({row: Time(t := time.us * rng.uniform(0.5, 2), t, t) for row, time in answer.times.of.items()})
    policies = regret.policies_of({"before": answer})
    found = regret.regrets(answer, measured, policies)
    best = mine = 0.0
    for site in answer.sites:
        options = {
            name: [c.kernel for c in decided.candidates if c.illegal is None and (c.accuracy is None or c.accuracy.mere < 0.2)]
            for name, decided in site.passes.items()
        }
        if all(len([c for c in decided.candidates if c.illegal is None]) == 1 for decided in site.passes.values()):
            continue
        costs = []
        for kernels in product(*options.values()):
            rows = flat(launches(site.shape, dict(zip(options, kernels, strict=True))))
            costs.append(sum(measured.of[row].us for row in rows))
        best += min(costs)
        mine += sum(measured.of[row].us for decided in site.passes.values() for row in decided.rows)
    assert found.sites == found.of_sites
    assert found.best_us == pytest.approx(best)
    assert found.policies_us["before"] == pytest.approx(mine)
    holes = Times({row: time for row, time in measured.of.items() if row.kernel != "torch/quantize_rowwise"})
    assert regret.regrets(answer, holes, policies).sites < found.sites


def tensor_row(predicted, measured, kernel="torch/fp8_rowwise_fast", which="output", equal=1.0):
    return {
        "site": "a", "pass": which, "kernel": kernel, "m": 64, "n": 64, "k": 64, "bit_equal": equal, "outputs": 100,
        "measured_sqnr_db": 30.0, "emulated_sqnr_db": 30.0, "predicted_sqnr_db": 30.4, "measured_mere": measured,
        "predicted_mere": predicted,
    }  # fmt: skip


def test_corrections_are_drawn_towards_one():
    rows = [tensor_row(0.1, 0.2)] * 24
    found = tensors.corrections(rows)["torch/fp8_rowwise_fast"]["output"]
    assert found == pytest.approx(2 ** (24 / 32))
    assert tensors.corrections([tensor_row(0.1, 0.1)] * 5)["torch/fp8_rowwise_fast"]["output"] == pytest.approx(1.0)
    summary = tensors.summary([*rows, tensor_row(0.1, 0.2, equal=0.5)])[0]
    assert summary["n"] == 25 and summary["bit_equal"] == pytest.approx(0.98)
    assert summary["sqnr_gap_median_db"] == pytest.approx(0.4) and summary["within_half_db"] == 1.0


def test_a_factor_of_a_calibration_moves_the_predicted_error(tmp_path):
    from loka_sim.dispatch.accuracy import Errors
    from loka_sim.dispatch.candidates import SiteShape

    shape = SiteShape((("output", 256, 256, 256, 1),))
    plain = Errors().of_site(shape, None)
    moved = Errors(mere_factors={"torch/fp8_rowwise_fast": {"output": 1.5}}).of_site(shape, None)
    key = ("output", "torch/fp8_rowwise_fast")
    assert moved[key].mere == pytest.approx(1.5 * plain[key].mere)
    assert moved[key].sqnr_db == pytest.approx(plain[key].sqnr_db - 20 * math.log10(1.5))
    assert moved["output", "torch/fp8_tensorwise_fast"] == plain["output", "torch/fp8_tensorwise_fast"]


def test_the_verdict_names_what_is_outside():
    numerics = {
        "sampled": [{"kernel": "torch/fp8_rowwise_fast", "gemms": 1, "outputs": 100, "unequal": 1, "bit_equal": 0.99}],
        "tensors": [tensor_row(0.1, 0.1)],
    }  # fmt: skip
    found = {entry["name"]: entry for entry in judge.tolerances(numerics, None, None, None)}
    assert found["bit_equal"]["ok"] is False and found["bit_equal"]["offenders"] == ["torch/fp8_rowwise_fast"]
    assert found["gemm_mape"]["ok"] is None
    assert judge.verdict(list(found.values())) is False
    fine = [{"name": "gemm_mape", "ok": True}, {"name": "step", "ok": None}]
    assert judge.verdict(fine) is True
    assert judge.verdict([{"name": "gemm_mape", "ok": None}]) is False


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({}, UserError, "holds no manifest.json"),
        ({"manifest.json": "{"}, DataError, "is damaged"),
        ({"manifest.json": '{"kind": "loka-sim/run"}'}, UserError, "is a loka-sim/run"),
        ({"manifest.json": '{"kind": "loka-sim/calibration", "schema_version": 9}'}, DataError, "schema_version 9"),
        (
            {"manifest.json": '{"kind": "loka-sim/calibration", "schema_version": 1, "hardware": "h200", "machine": "mine"}'},
            DataError,
            "machine is no table",
        ),
        (
            {
                "manifest.json": '{"kind": "loka-sim/calibration", "schema_version": 1, "hardware": "h200"}',
                "numerics.json": '{"mere_factors": {"torch/bf16": {"output": -1}}}',
            },
            DataError,
            "mere_factors",
        ),
    ],
)
def test_what_is_no_calibration_is_refused(files, error, said, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=said):
        calibration.load(tmp_path)


def test_the_command_line_says_what_is_missing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["validate", "wukong-small"]) == 2
    assert "say --gpu" in capsys.readouterr().err
    assert main(["collect", "--out", "x"]) == 2
    assert "say --gpu" in capsys.readouterr().err
    assert main(["whatif", "wukong-small", "--calibration", "nowhere"]) == 2
    assert "--calibration nowhere is no folder" in capsys.readouterr().err


@no_gpu
@pytest.mark.parametrize("words", [["validate", "--gpu", "wukong-small"], ["collect", "--gpu", "--out", "x"]])
def test_without_a_gpu_it_says_what_to_do_instead(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no CUDA GPU" in said and "--calibration" in said
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_validations_fit_their_schema():
    from perfmodel import data_folder

    found = sorted(data_folder().glob("*/validations/*.json"))
    assert {path.parent.parent.name for path in found} == {"h100", "h200"}
    for path in found:
        assert problem(json.loads(path.read_text()), "validation") is None
