"""The what-if on a made-up model with made-up times: what its figures must add up to, and what it must say."""

import dataclasses
import json

import pytest

import loka_sim
from loka_sim.cli.output import Style
from loka_sim.cli.screen import first_screen
from loka_sim.dispatch import table
from loka_sim.dispatch.torchao_plan import plan
from loka_sim.errors import DataError, LokaSimError, UserError
from loka_sim.modelspec import Dim, ModelSpec, Site, linear_passes
from loka_sim.schemas import problem


@pytest.fixture
def answer(made_up, made_up_model):
    return loka_sim.whatif(made_up_model)


@pytest.fixture
def document(answer):
    return answer.to_dict()


def texts(document, level=None):
    return " ".join(s["text"] for s in document["statements"] if level in (None, s["level"]))


def test_document_and_table_fit_their_schemas(document):
    assert problem(document, "whatif") is None
    assert problem(table.from_whatif(document), "dispatch_table") is None
    assert json.loads(json.dumps(document)) == document


def test_schema_refuses_what_is_not_in_it(document):
    assert "extra" in (problem({**document, "extra": 1}, "whatif") or "")
    wrong = json.loads(json.dumps(document))
    wrong["sites"][0]["passes"]["output"]["status"] = "great"
    assert "sites[0].passes.output.status" in (problem(wrong, "whatif") or "")


def test_all_times_are_asked_for_at_once(answer, made_up):
    assert made_up.calls == 1


def test_counts_cover_every_pass_and_every_flop(document, made_up_model):
    assert sum(document["counts"]["passes"].values()) == document["model"]["passes"] == 18
    assert sum(document["counts"]["flops"].values()) == made_up_model.flops() == document["model"]["flops"]


def test_step_times_add_up(document, made_up):
    steps = {step["name"]: step for step in document["steps"]}
    sites = document["sites"]
    around = sum(site["around_us"] for site in sites)
    assert steps["bf16"]["step_us"] == pytest.approx(sum(s["bf16_us"] for s in sites) + around, rel=1e-4)
    assert steps["decision"]["step_us"] == pytest.approx(sum(s["predicted_us"] for s in sites) + around, rel=1e-4)
    for step in steps.values():
        assert step["step_us"] == pytest.approx(step["gemm_us"] + step["around_us"], rel=1e-4)
        assert step["speedup"] == pytest.approx(steps["bf16"]["step_us"] / step["step_us"], rel=1e-4)
        assert step["step_low_us"] < step["step_us"] < step["step_high_us"]
        assert step["per_sample_us"] == pytest.approx(step["step_us"] / 2048, rel=1e-4)
    for site in sites:
        for decided in site["passes"].values():
            quantize = sum(entry["time_us"] for entry in decided["quantize"])
            assert decided["predicted_us"] == pytest.approx(decided["gemm_us"] + quantize, rel=1e-4)


def test_step_of_bf16_by_hand(document, made_up, made_up_model):
    total = 0.0
    for site in made_up_model.sites:
        for gemm in site.passes.values():
            kernel = "torch/bf16_batched" if site.op == "bmm" else "torch/bf16"
            total += made_up.time(kernel, *gemm.shape(2048), gemm.groups.at(2048))
        n = site.passes["output"].n.const
        kernels = 2 * bool(site.norm or site.activation) + site.bias
        total += kernels * made_up.time("torch/relu_forward", 2048, 1, n)
    assert document["steps"][0]["step_us"] == pytest.approx(total, rel=1e-4)


def test_statuses(document):
    status = {site["name"]: [d["status"] for d in site["passes"].values()] for site in document["sites"]}
    assert status["interaction"] == ["illegal"] * 3
    assert status["head"][:2] == ["illegal"] * 2
    assert status["top.1"] == ["fast"] * 3
    assert set(status["top.2"]) == {"not_worth_it"}


def test_decision_is_at_least_as_fast_as_bf16_and_as_any_safe_baseline(document):
    steps = {step["name"]: step for step in document["steps"]}
    for step in steps.values():
        if step["unsafe_passes"] == 0:
            assert steps["decision"]["step_us"] <= step["step_us"] * (1 + 1e-6)
    assert steps["decision"]["unsafe_passes"] == 0


def test_says_what_it_rests_on(document):
    warnings, all_texts = texts(document, "warning"), texts(document)
    assert "standard normal" in warnings
    assert "fft: not a GEMM" in warnings
    assert "gelu timed as silu" in all_texts
    assert document["statistics"]["origin"] == "assumed"
    assert document["statistics"]["sites"] == {"exact": 0, "role": 0, "assumed": 6}


def test_fp8_that_nothing_here_can_run_is_said(made_up, made_up_model):
    """Of a product with a bare parameter: the export has no module to convert, and says so of the same microseconds."""
    sites = [dataclasses.replace(s, op="matmul", weight="w") if s.name == "top.1" else s for s in made_up_model.sites]
    bare = loka_sim.whatif(dataclasses.replace(made_up_model, sites=tuple(sites)))
    plain = loka_sim.whatif(made_up_model)
    assert "No torch.nn.Linear makes" not in texts(plain.to_dict())
    (entry,) = (entry for entry in bare.sites if entry.site.name == "top.1")
    (said,) = (s["text"] for s in bare.to_dict()["statements"] if s["text"].startswith("No torch.nn.Linear makes top.1: "))
    assert f"is {entry.gain_us:,.0f} us of what the decision gains" in said and entry.gain_us > 10
    assert plan(table.from_whatif(bare.to_dict())).slower_us == pytest.approx(entry.gain_us, rel=1e-3)


@pytest.mark.parametrize(("mods", "warns"), [((), False), ("all", False), ("no_bias", True)])
def test_statistics_with_other_mods_are_said(made_up, mods, warns):
    document = loka_sim.whatif("dlrm-small", mods=mods).to_dict()
    assert document["statistics"]["name"] == ("dlrm-small+mods" if mods else "dlrm-small")
    assert document["statistics"]["sites"] == {"exact": 7, "role": 0, "assumed": 0}
    assert ("collected with other mods" in texts(document, "warning")) == warns


def test_production_sites_take_the_small_model_by_role(made_up):
    document = loka_sim.whatif("dlrm").to_dict()
    how = document["statistics"]["sites"]
    assert how["exact"] + how["role"] == document["model"]["sites"] and how["role"] > 0
    assert f"{how['role']} by role" in texts(document, "note")


def test_says_what_lies_outside_the_sweep(made_up, made_up_model):
    document = loka_sim.whatif(made_up_model, batch=131_072).to_dict()
    assert "outside the measured sweep" in texts(document, "warning")
    assert not document["sites"][2]["passes"]["output"]["in_sweep"]
    inside = loka_sim.whatif(made_up_model).to_dict()
    assert "outside the measured sweep" not in texts(inside)
    assert inside["sites"][2]["passes"]["output"]["in_sweep"]


def test_batch_changes_shapes_without_a_new_capture(made_up, made_up_model):
    document = loka_sim.whatif(made_up_model, batch=8192).to_dict()
    assert document["settings"]["batch"] == 8192
    assert document["sites"][2]["passes"]["output"]["m"] == 8192
    assert document["sites"][2]["passes"]["grad_weight"]["k"] == 8192
    assert document["model"]["fingerprint"] == made_up_model.fingerprint


def test_limits_are_kept(made_up, made_up_model):
    strict = loka_sim.whatif(made_up_model, max_mere=1e-6).to_dict()
    assert strict["counts"]["passes"]["fast"] == 0 and strict["counts"]["passes"]["unsafe"] > 0
    assert not strict["verdict"]["pays"] and "too inaccurate" in strict["verdict"]["text"]
    slow = loka_sim.whatif(made_up_model, min_speedup=10).to_dict()
    assert slow["counts"]["passes"]["fast"] == slow["counts"]["passes"]["unsafe"] == 0
    assert "below the least speedup 10" in slow["sites"][3]["passes"]["output"]["reason"]
    assert "--batch 8192" in slow["next"]


def test_mods_change_what_stands_around(made_up, made_up_model):
    plain, modded = loka_sim.whatif(made_up_model), loka_sim.whatif(made_up_model, mods="all")
    kernels = {row.kernel for site in modded.sites for row in site.around.rows}
    assert "torch/blocknorm_forward" in kernels and "torch/layernorm_forward" not in kernels
    assert modded.settings.mods == ("no_bias", "blocknorm", "hardswish")
    assert modded.steps[0].around_us < plain.steps[0].around_us
    assert modded.steps[0].gemm_us == plain.steps[0].gemm_us


def test_next_command_names_a_folder_of_its_own(made_up, made_up_model):
    answer = loka_sim.whatif(dataclasses.replace(made_up_model, name="their/model v2"), batch=4096, gpus=3, mods="no_bias")
    assert answer.to_dict()["next"].endswith("--gpus 3 --mods no_bias --out runs/their-model-v2-4096-no_bias-3gpus")


def test_same_question_same_answer(made_up, made_up_model):
    assert loka_sim.whatif(made_up_model).to_dict() == loka_sim.whatif(made_up_model).to_dict()


def test_answer_is_frozen(answer):
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer.settings.batch = 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch": 0}, "--batch 0 is no positive whole number"),
        ({"batch": -4}, "--batch -4 is no positive whole number"),
        ({"batch": 2.5}, "--batch 2.5 is no positive whole number"),
        ({"batch": 256.0}, "--batch 256.0 is no positive whole number"),
        ({"batch": True}, "--batch True is no positive whole number"),
        ({"batch": 2**40}, "give a smaller batch"),
        ({"gpus": 1.5}, "--gpus 1.5 is no positive whole number"),
        ({"gpus": True}, "--gpus True is no positive whole number"),
        ({"max_mere": True}, "--max-mere True is not a positive number"),
        ({"min_speedup": "1.05"}, "--min-speedup 1.05 is not a positive number"),
        ({"gpus": 0}, "--gpus 0 is no positive whole number"),
        ({"max_mere": float("nan")}, "--max-mere nan"),
        ({"max_mere": 0.0}, "--max-mere 0.0"),
        ({"min_speedup": -1.0}, "--min-speedup -1.0"),
        ({"mods": "no_biass"}, "unknown mod 'no_biass'"),
        ({"statistics": "nothing-like-it"}, "nothing-like-it"),
    ],
)
def test_wrong_arguments_are_named(made_up, made_up_model, settings, words):
    with pytest.raises(LokaSimError) as raised:
        loka_sim.whatif(made_up_model, **settings)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_unknown_hardware_lists_the_known(made_up_model):
    with pytest.raises(UserError, match="h200"):
        loka_sim.whatif(made_up_model, hardware="b300")


def test_a_model_without_gemms_is_refused(made_up):
    with pytest.raises(UserError, match="no GEMM"):
        loka_sim.whatif(ModelSpec("empty", 8, ()))


def test_one_name_of_a_zoo_model_does_not_borrow_its_statistics(made_up):
    site = Site("something.else", "linear", linear_passes(Dim(0, 1), Dim(64), Dim(64)), weight="something.else.weight")
    answer = loka_sim.whatif(ModelSpec("wukong", 64, (site,)))
    assert answer.distributions.origin == "assumed"


def test_screen_is_calm(document):
    plain = first_screen(document, Style(False))
    assert max(map(len, plain.splitlines())) <= 100
    assert "\x1b" not in plain
    assert plain.count("FP8 pays: dense step") == 1
    for step in document["steps"]:
        assert step["label"] in plain
    for status in ("fast", "not worth it", "unsafe", "illegal"):
        assert status in plain
    assert "top.1" in plain and document["next"] in plain
    painted = first_screen(document, Style(True))
    assert "\x1b[" in painted


def test_screen_of_a_negative_verdict_says_where_it_comes_closest(made_up, made_up_model):
    document = loka_sim.whatif(made_up_model, min_speedup=10).to_dict()
    screen = first_screen(document, Style(False)).splitlines()
    assert max(map(len, screen)) <= 100
    start = next(i for i, line in enumerate(screen) if "closest to paying" in line)
    passes = [(site["name"], name, decided) for site in document["sites"] for name, decided in site["passes"].items()]
    fp8 = {(a, b): [c["speedup"] for c in decided["candidates"] if c["mere"] is not None] for a, b, decided in passes}
    best = max(fp8, key=lambda key: max(fp8[key], default=0.0))
    assert screen[start + 1].split()[:2] == list(best)


@pytest.mark.parametrize(
    ("n", "k", "batch", "said"),
    [
        (2**32, 64, 64, "a dimension of 4294967296; write a smaller size"),
        (2**31 - 1, 2**31 - 1, 64, "elements; write a smaller size"),
        (2**20, 64, 2**20, "an operand or result of 1099511627776 elements; give a smaller batch"),
    ],
)
def test_a_gemm_that_no_gpu_holds_is_refused(n, k, batch, said):
    site = Site("a", "linear", linear_passes(Dim(0, 1), Dim(n), Dim(k)), weight="a.weight")
    with pytest.raises(UserError, match=said):
        loka_sim.whatif(ModelSpec("huge", batch, (site,)))


def test_screen_groups_sites_that_are_alike(made_up):
    sites = tuple(
        Site(f"layers.{i}.mlp.0", "linear", linear_passes(Dim(0, 1), Dim(4096), Dim(4096)), weight=f"layers.{i}.mlp.0.weight")
        for i in range(12)
    )
    document = loka_sim.whatif(ModelSpec("deep", 4096, sites)).to_dict()
    (line,) = (line for line in first_screen(document, Style(False)).splitlines() if "layers." in line)
    assert line.split()[:2] == ["layers.*.mlp.0", "12"]


def test_table_is_read_back(document, tmp_path):
    path = tmp_path / "dispatch_table.json"
    path.write_text(json.dumps(table.from_whatif(document)))
    assert table.load(path) == table.load(tmp_path) == table.from_whatif(document)


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "truncated"), ('{"kind": "loka-sim/disp', "truncated"), ("[]", "no loka-sim dispatch table"),
     ('{"kind": "loka-sim/dispatch_table", "schema_version": 9}', "schema version 9"),
     ('{"kind": "loka-sim/dispatch_table", "schema_version": 1}', "required")],
)  # fmt: skip
def test_a_broken_table_is_refused(tmp_path, content, words):
    path = tmp_path / "dispatch_table.json"
    path.write_text(content)
    with pytest.raises(DataError) as raised:
        table.load(path)
    assert words in str(raised.value) and str(path) in str(raised.value)


def test_the_flat_api_keeps_functions_whatever_was_imported_before():
    import importlib

    for name in ("whatif", "compare", "capture"):
        importlib.import_module(f"loka_sim.{name}")
        assert callable(getattr(loka_sim, name)), name
    assert set(loka_sim.__all__) <= set(dir(loka_sim))
    with pytest.raises(AttributeError):
        loka_sim.no_such_name  # noqa: B018
