"""Decisions among several libraries: what they say, what they cost, what the export makes of them."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

import loka_sim
from loka_sim.cli.output import Style
from loka_sim.cli.screen import first_screen
from loka_sim.cli.screen_compare import compare_screen
from loka_sim.compare import compare
from loka_sim.dispatch import table
from loka_sim.dispatch.accuracy import Errors, parts_of_k
from loka_sim.dispatch.candidates import (
    Row,
    SiteShape,
    illegal,
    launches,
    launches_said,
    operand_makers,
    possible_rows,
    shared_tensors,
)
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.decide import flat
from loka_sim.dispatch.export import export_with_notes
from loka_sim.dispatch.operands import LIBRARIES, Toolbox, parse_libraries
from loka_sim.dispatch.site_costs import price
from loka_sim.errors import DataError, UserError
from loka_sim.run_folder import save_run
from loka_sim.schemas import problem
from perfmodel.kernels import BY_COLUMNS, KERNELS, library_of

ALL = ("torch", "loka", "fbgemm")


def fast_loka(made_up_times):
    """Times under which our own kernels win: quantizers twice as fast, GEMMs of small outputs too."""

    class Times(made_up_times):
        def time(self, kernel, m, n, k, groups=1):
            us = super().time(kernel, m, n, k, groups)
            if kernel.startswith("loka/quantize"):
                return us * (0.7 if kernel.endswith("_dual") else 0.5)
            if kernel.startswith("loka/fp8"):
                return us * (0.6 if n <= 2048 else 1.5)
            return us * (1.02 if kernel.startswith("fbgemm/") else 1.0)

    return Times()


@pytest.fixture
def answer(monkeypatch, made_up_times, made_up_model):
    import perfmodel

    times = fast_loka(made_up_times)
    monkeypatch.setattr(perfmodel, "load", lambda hardware="h200", calibration=None: times)
    return loka_sim.whatif(made_up_model, libraries="torch,loka,fbgemm")


def texts(document, level=None):
    return " ".join(s["text"] for s in document["statements"] if level in (None, s["level"]))


def test_names_of_libraries():
    assert parse_libraries("loka, torch") == ("torch", "loka")
    assert parse_libraries("all") == LIBRARIES == ("torch", "loka", "fbgemm", "deepgemm")
    for wrong in ("torch,cutlass", "torchao"):
        with pytest.raises(
            UserError, match=f"unknown library '{wrong.split(',')[-1]}': choose among torch, loka, fbgemm, deepgemm"
        ):
            parse_libraries(wrong)
    with pytest.raises(UserError, match="names none"):
        parse_libraries(" ,")


def test_by_default_every_kernel_is_torchs(answer, made_up_model):
    plain = loka_sim.whatif(made_up_model).to_dict()
    kernels = {p["kernel"] for s in plain["sites"] for p in s["passes"].values()} | {entry[0] for entry in plain["times"]}
    assert {kernel.partition("/")[0] for kernel in kernels} == {"torch"}
    assert "--libraries" not in plain["command"] and "--libraries torch,loka,fbgemm" in answer.to_dict()["command"]


def test_document_names_libraries_and_quantizers(answer):
    document = answer.to_dict()
    assert problem(document, "whatif") is None and json.loads(json.dumps(document)) == document
    assert document["settings"]["libraries"] == list(ALL)
    written = table.from_whatif(document)
    assert problem(written, "dispatch_table") is None and written["policy"]["libraries"] == list(ALL)
    used = Counter()
    for site in written["sites"]:
        for decided in site["passes"].values():
            spec = KERNELS[decided["kernel"]]
            assert len(decided["quantizers"]) == (2 if spec.is_fp8 else 0)
            used[library_of(decided["kernel"])] += 1
            used.update(library_of(kernel) for kernel in decided["quantizers"].values())
    assert used["loka"] > 3 and used["torch"] > 3
    assert table.check(written) == written


def test_passes_add_up_to_the_step(answer):
    document = answer.to_dict()
    sites = document["sites"]
    for site in sites:
        for decided in site["passes"].values():
            quantize = sum(entry["time_us"] for entry in decided["quantize"])
            assert decided["predicted_us"] == pytest.approx(decided["gemm_us"] + quantize, rel=1e-4)
    step = document["steps"][-1]
    around = sum(site["around_us"] for site in sites)
    assert step["step_us"] == pytest.approx(sum(s["predicted_us"] for s in sites) + around, rel=1e-4)
    # More to choose from is never slower.
    narrow = loka_sim.whatif(answer.spec, libraries="torch").to_dict()["steps"][-1]
    assert step["step_us"] < narrow["step_us"]


def test_a_row_too_long_for_a_quantizer_is_none_of_its():
    """FBGEMM's takes 24,512 values: a site of 32,768 has other quantizers only, and none is asked for the time of what fails."""
    toolbox = Toolbox.of(ALL)
    for width, taken in ((16384, True), (24512, True), (24528, False), (32768, False)):
        shape = SiteShape((("output", 2048, 512, width, 1),))
        rows = [row for row in possible_rows(shape, toolbox) if row.kernel == "fbgemm/quantize_rowwise"]
        assert bool(rows) == taken, width
        assert all(KERNELS[row.kernel].illegal(row.m, row.n, row.k) is None for row in possible_rows(shape, toolbox))


def test_each_quantizer_that_is_read_is_launched_once(answer):
    for site in answer.sites:
        made = Counter(row.kernel for entry in site.passes.values() for row in entry.rows[1:])
        named = {(tensor, kernel) for entry in site.passes.values() for tensor, kernel in entry.makers.items()}
        assert sum(made.values()) == len(named)
        assert Counter(kernel for _, kernel in named) == made


def test_the_screen_says_whose_kernels(answer):
    text = first_screen(answer.to_dict(), Style(False))
    assert max(map(len, text.splitlines())) <= 100
    assert "loka tensor fast" in text and "decision for torchao" in text
    assert "The export to torchao cannot run kernels of loka and decides anew without them" in " ".join(text.split())


def test_a_library_that_the_time_model_does_not_know_is_named(monkeypatch, made_up_times, made_up_model):
    import perfmodel

    times = made_up_times()
    gone = ("fbgemm/", "loka/fp8_rowwise_fast", "loka/quantize")
    known = {k: v for k, v in times.manifest["kernels"].items() if not k.startswith(gone)}
    times.manifest = {**times.manifest, "kernels": known}
    monkeypatch.setattr(perfmodel, "load", lambda hardware="h200", calibration=None: times)
    document = loka_sim.whatif(made_up_model, libraries="torch,loka,fbgemm").to_dict()
    assert "knows no kernel of fbgemm: none was considered" in texts(document, "warning")
    assert "the time model does not know them: loka/fp8_rowwise_fast, every quantizer of loka." in texts(document, "note")
    assert not any("fbgemm" in entry[0] or entry[0] == "loka/fp8_rowwise_fast" for entry in document["times"])


def test_libraries_without_torch_leave_the_baselines_as_they_are(answer):
    alone = loka_sim.whatif(answer.spec, libraries="loka").to_dict()
    assert {p["kernel"].partition("/")[0] for s in alone["sites"] for p in s["passes"].values() if p["mere"]} == {"loka"}
    both = answer.to_dict()
    for mine, theirs in zip(alone["steps"], both["steps"], strict=True):
        if mine["name"] not in ("decision", "torchao"):
            assert mine == theirs


def test_the_export_is_what_was_decided_for_torchao(answer):
    document = answer.to_dict()
    exported = export_with_notes(table.from_whatif(document))
    assert "loka/" not in exported.text.partition("SITES")[2] and "fbgemm" not in exported.text.partition("SITES")[2]
    step = next(s for s in document["steps"] if s["name"] == "torchao")
    us = sum(site["around_us"] for site in document["sites"])
    for site in document["sites"]:
        linear = site["op"] == "linear"
        us += sum(
            (p["torchao"]["predicted_us"] if "torchao" in p else p["predicted_us"]) if linear else p["bf16_us"]
            for p in site["passes"].values()
        )
    assert step["step_us"] == pytest.approx(us, rel=1e-4)
    slower = step["step_us"] - document["steps"][-1]["step_us"]
    said = 0.0
    for note in exported.notes:
        before, word, _ = note.partition(" us a step ")
        if word:
            said += float(before.rpartition(", ")[2]) * (1 if "us a step slower" in note else -1)
    assert slower > 0 and said == pytest.approx(slower, abs=0.5) and exported.slower_us == pytest.approx(slower, abs=0.01)


def test_a_table_with_a_quantizer_that_is_none_is_refused(answer):
    written = table.from_whatif(answer.to_dict())
    chosen = next(p for s in written["sites"] for p in s["passes"].values() if p["quantizers"])
    tensor = next(iter(chosen["quantizers"]))
    chosen["quantizers"][tensor] = "torch/bf16"
    with pytest.raises(DataError, match=f"quantizers.{tensor} 'torch/bf16' is no quantizer"):
        table.check(written)


def test_compare_works_across_libraries(answer, tmp_path):
    save_run(loka_sim.whatif(answer.spec), tmp_path / "torch")
    save_run(answer, tmp_path / "all")
    assert json.loads((tmp_path / "all" / "manifest.json").read_text())["inputs"]["libraries"] == list(ALL)
    assert "torch, loka, fbgemm" in (tmp_path / "all" / "report.html").read_text()
    forward = compare(tmp_path / "torch", tmp_path / "all")
    assert forward.differences["libraries"] == (["torch"], list(ALL))
    # With all libraries' times, what torch's GEMMs would cost is known; the quantizers are the fastest all the same.
    assert forward.changes and all(change.worth_us is not None and change.worth_us >= -1e-3 for change in forward.changes)
    screen = compare_screen(forward.to_dict(), Style(False))
    assert max(map(len, screen.splitlines())) <= 100 and "loka" in screen
    # torch alone knows no time of the others.
    back = compare(tmp_path / "all", tmp_path / "torch")
    assert any(change.worth_us is None for change in back.changes)
    # A run of an older version, which did not say.
    document = json.loads((tmp_path / "torch" / "whatif.json").read_text())
    del document["settings"]["libraries"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert "libraries" not in compare(tmp_path / "old.json", tmp_path / "torch").differences


SHAPE = SiteShape((("output", 2048, 1024, 1024, 1), ("grad_input", 2048, 1024, 1024, 1), ("grad_weight", 1024, 1024, 2048, 1)))
SEVERAL = Toolbox.of(ALL)


def priced(seed):
    rng = np.random.default_rng(seed)
    table = {}
    for row in sorted(possible_rows(SHAPE, SEVERAL)):
        us = rng.uniform(2, 20)
        table[row] = Time(us, us * rng.uniform(0.8, 1), us * rng.uniform(1, 1.3))
    times = Times(table)
    return times, dataclasses.replace(SEVERAL, us=lambda row: times.of[row].us)


@pytest.mark.parametrize("seed", range(4))
def test_all_assignments_at_once_are_each_one_alone(seed):
    """Of a square layer, whose passes and tensors are of one size: equal launches are off together."""
    times, toolbox = priced(seed)
    costs = price([SHAPE], times, toolbox, 1.05)[SHAPE]
    options = costs.structure.options
    rng = np.random.default_rng(seed)
    places = np.stack([rng.integers(0, size, 200) for size in costs.totals.shape], axis=1)
    others = np.stack([rng.integers(0, size + 1, 200) for size in costs.totals.shape], axis=1)
    us, low, high = costs.difference(places, others)
    for number, (place, other) in enumerate(zip(places, others, strict=True)):
        kernels = costs.kernels(tuple(place))
        without = {n: options[i][other[i]] for i, n in enumerate(SHAPE.names) if other[i] < len(options[i])}
        rows = flat(launches(SHAPE, kernels, toolbox))
        expected = times.difference(rows, flat(launches(SHAPE, without, toolbox)))
        assert (us[number], low[number], high[number]) == pytest.approx(expected, abs=1e-9)
        assert costs.totals[tuple(place)] == pytest.approx(times.sum(rows))


def test_a_kernel_of_both_readings_stands_under_the_pass_that_runs_first():
    row = "loka/quantize_rowwise_dual"
    costs = {"loka/quantize_rowwise_dual": 3.0}
    toolbox = dataclasses.replace(SEVERAL, us=lambda r: costs.get(r.kernel, 2.0))
    shape = SiteShape((("output", 256, 128, 512, 1), ("grad_input", 256, 512, 128, 1), ("grad_weight", 128, 512, 256, 1)))
    assignment = {"output": "torch/fp8_rowwise_fast", "grad_input": "torch/bf16", "grad_weight": "loka/fp8_rowwise_split"}
    rows = launches(shape, assignment, toolbox)
    assert rows["output"][1:] == (Row(row, 256, 1, 512), Row("fbgemm/quantize_rowwise", 128, 1, 512))
    assert rows["grad_weight"][1:] == (Row("loka/quantize_rowwise_transposed", 256, 1, 128),)
    makers = operand_makers(shape, assignment, toolbox)
    assert makers == {
        "output": {"x": row, "w": "fbgemm/quantize_rowwise"}, "grad_input": {},
        "grad_weight": {"g": "loka/quantize_rowwise_transposed", "x": row},
    }  # fmt: skip
    # A table that names them launches the same.
    assert launches_said(shape, assignment, makers) == rows
    assert shared_tensors(shape, assignment, "output", toolbox) == ("x",)
    assert shared_tensors(shape, assignment, "grad_weight", toolbox) == ("x",)


def test_scales_that_lie_otherwise_do_not_fit():
    found = SEVERAL.ways(BY_COLUMNS, frozenset({False}), 256, 256)
    assert {launch.row.kernel for way in found for launch in way} == {"torch/quantize_block1x128"}
    shape = SiteShape((("output", 256, 256, 256, 1),))
    reason = illegal(shape, "output", "deepgemm/fp8_block128", Toolbox.of(("loka", "deepgemm")))
    assert reason == "no quantizer of loka makes block1x128, rows fastest"


def test_a_delayed_scale_is_taken_by_nobody():
    assert "loka/quantize_tensorwise_delayed" not in Toolbox.of(LIBRARIES).quantizers


def test_parts_of_k_enter_the_error():
    """Chains of fast accumulation end with their part: the same recipe loses less where K is cut."""
    shape = (64, 64, 65536)
    assert parts_of_k("loka/fp8_rowwise_fast", [shape])[0] > 8 and parts_of_k("torch/fp8_rowwise_fast", [shape]) == [1]
    assert parts_of_k("loka/fp8_rowwise_split", [shape]) == parts_of_k("fbgemm/fp8_rowwise_fast", [shape]) == [1]
    found = Errors(SEVERAL).of_site(SiteShape((("output", *shape, 1),)), None)
    assert found["output", "loka/fp8_rowwise_fast"].mere < found["output", "torch/fp8_rowwise_fast"].mere
    assert found["output", "loka/fp8_rowwise_split"] == found["output", "torch/fp8_rowwise_split"]
