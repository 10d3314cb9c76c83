"""Two runs side by side."""

import json

import pytest

import loka_sim
from loka_sim.cli import main
from loka_sim.cli.output import Style
from loka_sim.cli.screen_compare import compare_screen
from loka_sim.dispatch.candidates import SiteShape, launches
from loka_sim.dispatch.decide import flat
from loka_sim.errors import DataError, LokaSimError
from loka_sim.modelspec import ModelSpec
from loka_sim.schemas import problem


def folder(answer, path):
    """A run folder with no more in it than `compare` reads."""
    path.mkdir()
    (path / "whatif.json").write_text(json.dumps(answer.to_dict()))
    return path


@pytest.fixture
def answers(made_up, made_up_model):
    """Batch 256, where little pays, and batch 8,192."""
    return loka_sim.whatif(made_up_model, batch=256), loka_sim.whatif(made_up_model, batch=8192, mods="no_bias")


@pytest.fixture
def comparison(answers, tmp_path):
    a, b = answers
    return loka_sim.compare(folder(a, tmp_path / "a"), folder(b, tmp_path / "b"))


def test_document_fits_its_schema(comparison):
    assert problem(json.loads(json.dumps(comparison.to_dict())), "compare") is None


def test_says_what_was_asked_differently(comparison):
    assert comparison.differences == {"batch": (256, 8192), "mods": ([], ["no_bias"])}


def test_step_times_stand_side_by_side(comparison, answers):
    rows = {row["name"]: row for row in comparison.to_dict()["steps"]}
    for first, second in zip(answers[0].steps, answers[1].steps, strict=True):
        row = rows[first.name]
        assert (row["step_us_a"], row["step_us_b"]) == pytest.approx((first.total.us, second.total.us), rel=1e-4)
        assert row["per_sample_ratio"] == pytest.approx(first.total.us / 256 / (second.total.us / 8192), rel=1e-4)


def test_changes_are_exactly_the_passes_decided_otherwise(comparison, answers):
    expected = {}
    for first, second in zip(answers[0].sites, answers[1].sites, strict=True):
        for name, decided in first.passes.items():
            if decided.kernel != second.passes[name].kernel:
                expected.setdefault(first.site.name, {})[name] = (decided.kernel, second.passes[name].kernel)
    assert expected
    assert {change.site: dict(change.passes) for change in comparison.changes} == expected


def test_worth_is_the_other_decision_at_these_settings(comparison, answers, made_up):
    total = 0.0
    for first, second in zip(answers[0].sites, answers[1].sites, strict=True):
        shape = SiteShape.of(second.site, 8192)
        rows = flat(launches(shape, {name: decided.kernel for name, decided in first.passes.items()}))
        total += sum(made_up.time(*row) for row in rows) - second.predicted_us
    assert total > 0
    assert comparison.worth_us == pytest.approx(total, rel=1e-3)
    document = comparison.to_dict()
    assert document["worth_percent"] == pytest.approx(100 * total / answers[1].decision.total.us, rel=1e-3)
    assert sum(change["worth_us"] for change in document["changes"]) == pytest.approx(document["worth_us"])


def test_the_same_run_twice_has_no_changes(answers, tmp_path):
    path = folder(answers[0], tmp_path / "a")
    found = loka_sim.compare(path, path / "whatif.json")
    assert found.changes == () and found.differences == {} and found.worth_us == 0
    assert "every shared site is decided alike" in compare_screen(found.to_dict(), Style(False))


def test_sites_of_one_side_alone_are_listed(answers, made_up, made_up_model, tmp_path):
    smaller = ModelSpec("smaller", 8192, made_up_model.sites[:-1])
    found = loka_sim.compare(folder(answers[1], tmp_path / "a"), folder(loka_sim.whatif(smaller), tmp_path / "b"))
    assert found.only_a == ("head",) and found.only_b == ()
    assert "only in A: head" in compare_screen(found.to_dict(), Style(False))


def test_screen(comparison):
    screen = compare_screen(comparison.to_dict(), Style(False))
    assert max(map(len, screen.splitlines())) <= 100
    assert "batch" in screen and "256" in screen and "8,192" in screen and "B us/sample" in screen


def test_command_line(comparison, capsys):
    assert main(["compare", *comparison.names, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(comparison.to_dict()))
    assert main(["compare", *comparison.names]) == 0
    assert "decided differently" in capsys.readouterr().out


def test_page(comparison, capsys, tmp_path):
    target = tmp_path / "pages" / "compare.html"
    assert main(["compare", *comparison.names, "--out", str(target)]) == 0
    assert f"wrote {target}" in capsys.readouterr().out
    assert target.read_text().lstrip().lower().startswith("<!doctype html>")
    (tmp_path / "file").write_text("")
    assert main(["compare", *comparison.names, "--out", str(tmp_path / "file" / "x.html")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1


@pytest.mark.parametrize("content", ["", '{"schema_version": 1, "kind": "loka', '{"kind": "other"}', "[1, 2]"])
def test_a_broken_run_is_refused(answers, tmp_path, content):
    good, bad = folder(answers[0], tmp_path / "good"), tmp_path / "bad"
    bad.mkdir()
    (bad / "whatif.json").write_text(content)
    with pytest.raises(LokaSimError) as raised:
        loka_sim.compare(good, bad)
    assert str(bad) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["torch/fp7_tensorwise_fast", ""])
def test_a_run_of_a_loka_sim_that_knows_other_kernels_is_refused(answers, tmp_path, name):
    good, other = (folder(answer, tmp_path / name) for answer, name in zip(answers, "ab", strict=True))
    text = (other / "whatif.json").read_text()
    assert text.count("torch/fp8_tensorwise_fast")
    (other / "whatif.json").write_text(text.replace("torch/fp8_tensorwise_fast", name))
    for pair in ((good, other), (other, good)):
        with pytest.raises(DataError, match=f"b decided for {name}, a kernel that this loka-sim does not know"):
            loka_sim.compare(*pair)


def test_models_without_a_site_in_common_are_refused(answers, made_up, made_up_model, tmp_path):
    from dataclasses import replace

    other = ModelSpec("other", 64, tuple(replace(site, name=f"other.{site.name}") for site in made_up_model.sites))
    with pytest.raises(LokaSimError, match="no site in common"):
        loka_sim.compare(folder(answers[0], tmp_path / "a"), folder(loka_sim.whatif(other), tmp_path / "b"))


def test_on_several_gpus_what_is_exchanged_counts(made_up, made_up_model, tmp_path):
    """One GPU against 64 with compressed embeddings, and against 64 without: the dense steps are equal, the others are not."""
    runs = {"one": {}, "plain": {"gpus": 64}, "fp8": {"gpus": 64, "exchange": "fp8_rowwise"}}
    answers = {name: loka_sim.whatif(made_up_model, **options) for name, options in runs.items()}
    for name, answer in answers.items():
        loka_sim.save_run(answer, tmp_path / name)
    rows = {row["name"]: row for row in loka_sim.compare(tmp_path / "plain", tmp_path / "fp8").to_dict()["steps"]}
    assert rows["decision"]["step_us_a"] == rows["decision"]["step_us_b"]
    for name in ("bf16", "decision"):
        row = rows[f"{name}_on_gpus"]
        for side, run in (("a", "plain"), ("b", "fp8")):
            assert row[f"step_us_{side}"] == pytest.approx(answers[run].timelines[name].total_us, rel=1e-4)
        assert row["per_sample_ratio"] == pytest.approx(row["step_us_a"] / row["step_us_b"]) and row["per_sample_ratio"] > 1
    comparison = loka_sim.compare(tmp_path / "one", tmp_path / "plain")
    rows = {row["name"]: row for row in comparison.to_dict()["steps"]}
    assert rows["decision_on_gpus"]["step_us_a"] == rows["decision"]["step_us_a"] < rows["decision_on_gpus"]["step_us_b"]
    assert rows["bf16_on_gpus"]["speedup_a"] == 1 and rows["decision_on_gpus"]["speedup_a"] == rows["decision"]["speedup_a"]
    assert problem(comparison.to_dict(), "compare") is None
    assert "decision, on its GPUs" in compare_screen(comparison.to_dict(), Style(False))
