"""The HTML report, rendered from made-up what-if documents that fit the schema."""

import copy
import itertools
import json
import math
import random
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from loka_sim.report import render, words
from loka_sim.report.plots import SCATTER_HEIGHT, family, family_name, shown_candidate
from loka_sim.report.scale import Scale, linear_around, log_around
from loka_sim.report.view import page as view
from loka_sim.schemas import problem
from perfmodel.kernels import KERNELS

PASSES = ("output", "grad_input", "grad_weight")
FP8 = [name for name in KERNELS if name.startswith("torch/fp8_")]


def pass_of(rng, m, n, k, max_mere, min_speedup, force=None):
    """One pass, decided as the what-if decides it, on made-up times and errors."""
    bf16 = 2.5 + 2 * m * n * k / 6.5e8
    illegal = force == "illegal" or (force is None and (n % 16 or k % 16))
    factor = {"not_worth_it": 0.8, "fast": 1.6, "unsafe": 1.6}.get(force, rng.uniform(0.75, 1.65) * min(1.15, 0.8 + bf16 / 400))
    candidates = [
        {"kernel": "torch/bf16", "illegal": None, "gemm_us": bf16, "total_us": bf16, "total_low_us": bf16 * 0.96,
         "total_high_us": bf16 * 1.04, "speedup": 1.0, "mere": None, "sqnr_db": None}
    ]  # fmt: skip
    for index, kernel in enumerate(FP8):
        reason = f"N = {n} is no multiple of 16" if illegal else None
        if reason is None and "block" in kernel and (n % 128 or k % 128):
            reason = f"N = {n} is no multiple of 128"
        total = bf16 / (factor * (1 - 0.04 * index))
        mere = (0.5 if force == "unsafe" else rng.lognormvariate(-3.2, 0.8)) * (1.0 if "tensorwise" in kernel else 0.6)
        candidates.append(
            {"kernel": kernel, "illegal": reason, "gemm_us": None if reason else total * 0.7,
             "total_us": None if reason else total, "total_low_us": None if reason else total * 0.95,
             "total_high_us": None if reason else total * 1.06, "speedup": None if reason else bf16 / total,
             "mere": None if reason else mere, "sqnr_db": None if reason else 28.0}
        )  # fmt: skip
    legal = [c for c in candidates[1:] if c["illegal"] is None]
    fast = [c for c in legal if c["speedup"] >= min_speedup]
    safe = [c for c in fast if c["mere"] < max_mere]
    status = "illegal" if not legal else "fast" if safe else "unsafe" if fast else "not_worth_it"
    chosen = max(safe, key=lambda c: c["speedup"]) if safe else candidates[0]
    spec = KERNELS[chosen["kernel"]]
    rest = sorted((c for c in candidates if c is not chosen and c["total_us"]), key=lambda c: c["total_us"])
    return {
        "m": m, "n": n, "k": k, "groups": 1, "flops": 2 * m * n * k, "status": status, "kernel": chosen["kernel"],
        "recipe_a": spec.recipe_a, "recipe_b": spec.recipe_b, "accumulation": spec.accumulation,
        "predicted_us": chosen["total_us"], "predicted_low_us": chosen["total_low_us"],
        "predicted_high_us": chosen["total_high_us"], "bf16_us": bf16, "bf16_low_us": bf16 * 0.96,
        "bf16_high_us": bf16 * 1.04, "speedup": bf16 / chosen["total_us"], "mere": chosen["mere"],
        "sqnr_db": chosen["sqnr_db"],
        "reason": {
            "fast": f"{chosen['kernel']} saves {bf16 - chosen['total_us']:.1f} us with its quantization, its error is admitted",
            "unsafe": "the FP8 kernels that would be faster are too inaccurate",
            "not_worth_it": "no FP8 kernel is surely faster once quantization is counted, or the step does not gain",
            "illegal": f"no FP8 kernel can run this: N = {n} is no multiple of 16",
        }[status],
        "runner_up": {"kernel": rest[0]["kernel"], "total_us": rest[0]["total_us"], "mere": rest[0]["mere"]} if rest else None,
        "gemm_us": chosen["gemm_us"], "quantize_us": chosen["total_us"] - chosen["gemm_us"], "quantize": [],
        "in_sweep": rng.random() > 0.03, "candidates": candidates,
    }  # fmt: skip


def make_document(count=8, seed=0, force=None, gpus=1, name="wukong-production", max_mere=0.2, min_speedup=1.05):
    """A what-if document of `count` sites that fits the schema; `force` gives every pass that status."""
    rng = random.Random(seed)
    batch, sites = 2048, []
    for index in range(count):
        site_name = f"blocks.{index // 6}.{rng.choice(['fmb.mlp', 'lcb', 'cross.left', 'cross.right'])}.layers.{index % 6}.linear"
        n, k = rng.choice([1, 64, 256, 512, 1024, 2048, 4096]), rng.choice([26, 128, 512, 768, 1024, 3072])
        shapes = dict(zip(PASSES, ((batch, n, k), (batch, k, n), (n, k, batch)), strict=True))
        passes = {key: pass_of(rng, *shape, max_mere, min_speedup, force) for key, shape in shapes.items()}
        before, after = (sum(p[key] for p in passes.values()) for key in ("bf16_us", "predicted_us"))
        sites.append(
            {"name": site_name, "op": "linear", "weight": f"{site_name}.weight", "bias": True,
             "norm": rng.choice([None, "layernorm"]), "activation": rng.choice([None, "relu"]),
             "statistics": rng.choice(["exact", "role"]), "bf16_us": before, "predicted_us": after,
             "gain_us": before - after, "speedup": before / after, "around_us": 4.0, "stored_transposed": [], "passes": passes}
        )  # fmt: skip
    every = [p for site in sites for p in site["passes"].values()]
    statuses = ("fast", "not_worth_it", "unsafe", "illegal")
    bf16, decided = (sum(s[key] for s in sites) or 1.0 for key in ("bf16_us", "predicted_us"))
    around = 0.5 * bf16 + 1
    steps = []
    for key, label, gemm, fp8, unsafe in (
        ("bf16", "bf16", bf16, 0, 0),
        ("naive_tensorwise", "all FP8, tensorwise", bf16 * 1.21, len(every), 3),
        ("naive_rowwise", "all FP8, rowwise", bf16 * 1.32, len(every), 1),
        ("filter_tensorwise", "torchao filter, tensorwise", bf16 * 0.985, len(every) // 2, 1),
        ("filter_rowwise", "torchao filter, rowwise", bf16 * 1.01, len(every) // 4, 0),
        ("decision", "the decision", decided, sum(p["status"] == "fast" for p in every), 0),
    ):
        step, base = gemm + around, bf16 + around
        steps.append(
            {"name": key, "label": label, "description": f"What {label} converts", "step_us": step, "step_low_us": step * 0.97,
             "step_high_us": step * 1.03, "gemm_us": gemm,
             "quantize_us": 0.2 * gemm * min(fp8, 1), "around_us": around, "per_sample_us": step / batch,
             "speedup": base / step, "speedup_low": base / step * 0.975, "speedup_high": base / step * 1.025,
             "gemm_speedup": bf16 / gemm, "fp8_sites": min(fp8, count), "fp8_passes": fp8, "unsafe_passes": unsafe}
        )  # fmt: skip
    last = steps[-1]
    pays = any(p["status"] == "fast" for p in every)
    return {
        "schema_version": 1, "kind": "loka-sim/whatif", "loka_sim_version": "0.1.0",
        "command": f"loka-sim whatif {name} --batch {batch}",
        "settings": {"model": name, "batch": batch, "gpus": gpus, "hardware": "h200", "statistics": None, "mods": [],
                     "max_mere": max_mere, "min_speedup": min_speedup},
        "model": {"name": name, "source": "zoo", "fingerprint": "0123456789abcdef", "batch": batch, "sites": count,
                  "passes": len(every), "flops": sum(p["flops"] for p in every), "dense_parameters": 123456789, "tables": 26,
                  "table_bytes": 51_200_000_000, "unaccounted": ["towers.attention: fused kernel, not seen"]},
        "hardware": {"name": "NVIDIA H200", "capability": [9, 0], "peak_bf16_tflops": 780.0, "peak_fp8_tflops": 1370.0,
                     "copy_bandwidth_tbs": 4.3, "perfmodel_fingerprint": "feedfacefeedface",
                     "held_out": {"mape_percent": 5.3, "regret_percent": 1.24, "command": "python -m perfmodel.fit --report",
                                  "kernels": {"torch/bf16": 4.1, **{kernel: 4.5 + i for i, kernel in enumerate(FP8)}}}},
        "statistics": {"origin": "shipped", "name": "wukong-small", "model": "wukong-small", "fingerprint": "beefbeefbeefbeef",
                       "provenance": "Criteo sample, 3,000 steps of 512, seed 0.",
                       "sites": {key: sum(s["statistics"] == key for s in sites) for key in ("exact", "role", "assumed")}},
        "verdict": {"pays": pays, "speedup": last["speedup"], "speedup_low": last["speedup_low"],
                    "speedup_high": last["speedup_high"], "gemm_speedup": last["gemm_speedup"],
                    "text": "FP8 pays on some GEMMs of this model" if pays else "FP8 pays nowhere in this model"},
        "counts": {"passes": {s: sum(p["status"] == s for p in every) for s in statuses},
                   "flops": {s: sum(p["flops"] for p in every if p["status"] == s) for s in statuses}},
        "steps": steps,
        "communication": None if gpus == 1 else {
            "gpus": gpus, "all_to_all_bytes": 27262976, "all_reduce_bytes": 246913578, "all_to_all_us": 412.5,
            "all_reduce_us": None, "exposed_us": None, "step_us": None, "speedup": None,
            "text": "no all-reduce was measured for so many GPUs"},
        "sites": sites,
        "times": [],
        "statements": [{"level": "note", "text": "Times are of kernels: launches hide behind CUDA graphs."},
                       {"level": "warning", "text": "3 GEMMs lie outside the measured sweep."}],
        "next": f"loka-sim export runs/{name} --to torchao",
    }  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 8])
def test_the_made_up_documents_fit_the_schema(count):
    assert problem(make_document(count, gpus=8), "whatif") is None


class Page(HTMLParser):
    """The page's text, tags and attributes; refuses tags that are closed in the wrong order."""

    VOID = frozenset({"meta", "input", "br", "wbr"})

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.attributes, self.text, self.ids = [], [], [], [], {}
        self.feed(text)
        self.close()
        assert self.stack == [], self.stack

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)
        identifier = dict(attrs).get("id")
        if identifier:
            assert identifier not in self.ids, f"id {identifier} twice"
            self.ids[identifier] = dict(attrs)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self):
        return " ".join("".join(self.text).split())

    def of_class(self, name):
        return [attrs for _, attrs in self.attributes if name in attrs.get("class", "").split()]


@pytest.fixture(scope="module")
def document():
    return make_document(8)


@pytest.fixture(scope="module")
def page(document):
    return Page(render(document))


def test_one_file_that_needs_nothing_else(document):
    text = render(document)
    assert text.lstrip().lower().startswith("<!doctype html>")
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    for _, attrs in page.attributes:
        assert "src" not in attrs
        assert attrs.get("href", "#").startswith("#")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|@font-face", text)


def test_the_same_document_gives_the_same_text(document):
    before = copy.deepcopy(document)
    assert render(document) == render(json.loads(json.dumps(document)))
    assert document == before, "rendering changed the document"


def test_the_headline_is_the_documents(page, document):
    verdict = document["verdict"]
    low, high = verdict["speedup_low"], verdict["speedup_high"]
    assert f"{verdict['speedup']:.2f}×" in page.words
    assert f"90% interval {low:.2f}× to {high:.2f}×" in page.words
    assert verdict["text"] in page.words
    for step in document["steps"]:
        assert step["label"] in page.words
        assert f"{step['step_us']:.1f}" in page.words
        assert f"{step['speedup']:.2f}×" in page.words
    for fact in ("1 × NVIDIA H200", "2,048 per GPU", "8 sites, 24 passes", "wukong-small", "123 M dense", "51.2 GB"):
        assert fact in page.words
    counts = document["counts"]["passes"]
    assert f"{counts['fast']} FP8 chosen" in page.words and f"{counts['illegal']} illegal" in page.words
    assert document["command"] in page.words and document["next"] in page.words


def test_every_site_is_a_row_with_the_documents_numbers(page, document):
    rows = {attrs["data-name"]: attrs for _, attrs in page.attributes if attrs.get("class") == "site"}
    assert len(rows) == len({site["name"] for site in document["sites"]})
    by_gain = [float(attrs["data-gain"]) for _, attrs in page.attributes if attrs.get("class") == "site"]
    assert by_gain == sorted(by_gain, reverse=True)
    for site in document["sites"]:
        row = rows[site["name"]]
        assert float(row["data-bf16"]) == pytest.approx(site["bf16_us"], rel=1e-5)
        assert float(row["data-predicted"]) == pytest.approx(site["predicted_us"], rel=1e-5)
        for decided in site["passes"].values():
            assert decided["reason"] in page.words
            assert f"{decided['m']:,} × {decided['n']:,} × {decided['k']:,}" in page.words
            if decided["mere"] is not None:
                assert words.percent(decided["mere"]) in page.words


def test_the_plot_stands_marks_where_the_numbers_are(document):
    """Positions of all marks, against logarithms taken here; the better one stands further right, the worse higher up."""
    points = view(document)["scatter"]["points"]
    drawn = []
    for site in document["sites"]:
        for decided in site["passes"].values():
            candidate = shown_candidate(decided, 0.2)
            assert (candidate is None) == (decided["status"] == "illegal")
            if candidate:
                drawn.append((decided["bf16_us"], candidate["speedup"], candidate["mere"]))
    assert len(points) == len(drawn)
    drawn.sort(key=lambda entry: -entry[0])
    for axis, index, sign in (("x", 1, 1), ("y", 2, -1)):
        logs = [math.log(entry[index]) for entry in drawn]
        places = [sign * point[axis] for point in points]
        slope = (places[0] - places[1]) / (logs[0] - logs[1])
        assert slope > 0
        assert places == pytest.approx([places[0] + slope * (log - logs[0]) for log in logs], abs=0.05)
    assert all(0 <= point["x"] <= 100 and 0 <= point["y"] <= SCATTER_HEIGHT for point in points)


def test_the_candidate_that_stands_for_a_pass():
    def decided(status, kernel="torch/bf16"):
        candidates = [
            {"kernel": "torch/bf16", "illegal": None, "speedup": 1.0, "mere": None},
            {"kernel": "fastest", "illegal": None, "speedup": 1.5, "mere": 0.5},
            {"kernel": "accurate", "illegal": None, "speedup": 1.01, "mere": 0.1},
            {"kernel": "barred", "illegal": "N = 3", "speedup": None, "mere": None},
        ]
        return {"status": status, "kernel": kernel, "speedup": 1.2, "mere": 0.1, "candidates": candidates}

    assert shown_candidate(decided("unsafe"), 0.2)["kernel"] == "fastest"
    assert shown_candidate(decided("not_worth_it"), 0.2)["kernel"] == "accurate"
    assert shown_candidate(decided("fast", "accurate"), 0.2)["speedup"] == 1.2
    nothing = decided("illegal")
    nothing["candidates"] = nothing["candidates"][:1]
    assert shown_candidate(nothing, 0.2) is None


def test_repeated_layers_are_one_family():
    assert family("layers.3.fmb.mlp.0") == family("layers.12.fmb.mlp.0") != family("layers.3.fmb.mlp.2")
    assert family("top") == "top"
    assert family_name(["layers.12.out", "layers.10.out", "layers.11.out"]) == "layers.{10-12}.out"
    assert family_name(["a.0.b.1", "a.7.b.1"]) == "a.{0,7}.b.1"
    assert family_name(["top.0"]) == "top.0"
    assert family_name(["top", "top"]) == "top"


def test_bars_add_up(document):
    shown = view(document)
    for row, step in zip(shown["steps"]["rows"], document["steps"], strict=True):
        width = sum(part["width"] for part in row["parts"])
        longest = max(step["step_high_us"] for step in document["steps"])
        assert width / 100 == pytest.approx(step["step_us"] / (1.04 * longest), abs=1e-4)
        assert row["low"] <= width <= row["low"] + row["width"] + 0.01
    rows = shown["waterfall"]["rows"]
    assert rows[0]["start"] == 0
    for before, after in itertools.pairwise(rows):
        assert after["start"] == pytest.approx(before["start"] + before["width"], abs=0.01)
    assert rows[-1]["start"] + rows[-1]["width"] == pytest.approx(100, abs=0.01)
    gained = sum(site["gain_us"] for site in document["sites"] if site["gain_us"] > 0)
    assert float(shown["waterfall"]["total"].replace(",", "")) == pytest.approx(gained, rel=0.01)


@pytest.mark.parametrize("force", ["fast", "not_worth_it", "unsafe", "illegal"])
def test_all_passes_of_one_status(force):
    document = make_document(5, force=force)
    assert document["counts"]["passes"][force] == 15
    page = Page(render(document))
    assert ("No site gains" in page.words) == (force != "fast")
    assert ("No GEMM pass of this model has an FP8 kernel" in page.words) == (force == "illegal")
    assert len(page.of_class("point")) == (0 if force == "illegal" else 15)


def test_a_model_without_gemms():
    page = Page(render(make_document(0)))
    assert "The model has no GEMM." in page.words


def test_names_cannot_inject():
    evil = """</script><script>alert(1)</script><img src=x onerror=alert(2)>"'&.{{ 7*7 }}"""
    document = make_document(2, name=evil)
    document["sites"][0]["name"] = evil
    document["sites"][0]["passes"]["output"]["reason"] = document["verdict"]["text"] = evil
    document["statements"][0]["text"] = document["model"]["unaccounted"][0] = evil
    text = render(document)
    assert text.count("<script") == 1 and "<img" not in text and "{{ 7*7 }}" in text
    page = Page(text)
    assert " ".join(evil.split()) in page.words
    names = [attrs["data-name"] for _, attrs in page.attributes if attrs.get("class") == "site"]
    assert evil in names
    assert not [attrs for _, attrs in page.attributes if any(key.startswith("on") for key in attrs)]


def test_what_is_missing_is_said():
    document = make_document(3, gpus=8)
    del document["sites"][0]["passes"]["grad_input"]
    document["hardware"]["held_out"] = None
    document["statements"], document["model"]["unaccounted"] = [], []
    document["statistics"] |= {"origin": "assumed", "model": None, "fingerprint": None, "provenance": None}
    assert problem(document, "whatif") is None
    page = Page(render(document))
    assert "Its accuracy on held-out shapes is not on record." in page.words
    assert "Communication over 8 GPUs" in page.words and "no all-reduce was measured" in page.words
    assert page.of_class("warnings") == []
    assert "None" not in page.words


def test_fresh_times_stand_where_they_were_measured_and_predicted():
    """A mark a shape, of the kernels that the model could run alone: right ones on the line from corner to corner."""
    document = make_document(3)
    fp8 = next(
        c["kernel"] for p in document["sites"][0]["passes"].values() for c in p["candidates"] if c["kernel"] != "torch/bf16"
    )
    assert "never saw" not in Page(render(document)).words
    fresh = {
        "torch/bf16": {"measured_us": [10.0, 1000.0], "predicted_us": [11.0, 1000.0]},
        fp8: {"measured_us": [50.0], "predicted_us": [25.0]},
        "torch/layernorm_forward": {"measured_us": [5.0], "predicted_us": [5.0]},
    }
    document["hardware"]["held_out"]["fresh"] = fresh
    assert problem(document, "whatif") is None
    page = Page(render(document))
    assert "Times of shapes that the fit never saw, predicted against measured" in page.words
    spots = [attrs for attrs in page.of_class("spot") if "data-tip" in attrs]
    assert [spot["data-tip"] for spot in spots] == [
        "torch/bf16\nmeasured 10.0 µs\npredicted 11.0 µs, +10%",
        "torch/bf16\nmeasured 1,000 µs\npredicted 1,000 µs, equal",
        f"{fp8}\nmeasured 50.0 µs\npredicted 25.0 µs, −50%",
    ]
    (x, y), (right_x, right_y), (low_x, low_y) = ([float(spot[name].rstrip("%")) for name in ("x", "y")] for spot in spots)
    assert right_x + right_y == pytest.approx(100, abs=0.01)
    # On axes that are logarithmic and alike, a factor is the same distance everywhere.
    decades = (right_x - x) / np.log10(100)
    assert 100 - y - x == pytest.approx(decades * np.log10(1.1), abs=0.01)
    assert 100 - low_y - low_x == pytest.approx(decades * np.log10(0.5), abs=0.01)
    assert {attrs["aria-label"] for attrs in (a for _, a in page.attributes) if "GEMM times" in attrs.get("aria-label", "")} == {
        f"Scatter plot, {name}: predicted against measured GEMM times, {count} marks. "
        "Across: measured, µs (log); up: predicted, µs (log)."
        for name, count in (("bf16", 2), ("FP8", 1))
    }


def test_a_steps_streams_over_time():
    document = make_document(3, gpus=64)
    busy = {"compute": {"busy_us": 60.0, "share": 0.6}, "network": {"busy_us": 50.0, "share": 0.5}}
    lanes = [
        {"stream": "compute", "spans": [[0.0, 25.0, "forward"], [50.0, 85.0, "backward"]]},
        {"stream": "network", "spans": [[25.0, 50.0, "all_to_all"], [75.0, 100.0, "all_reduce"]]},
    ]
    document["communication"] |= {"dense": "hsdp", "step_us": 100.0, "exposed_us": 40.0, "streams": busy, "lanes": lanes}
    assert problem(document, "whatif") is None
    page = Page(render(document))
    rows = page.of_class("lane")
    assert len(rows) == 2 and "busy 60%" in page.words and "dense part, hsdp" in page.words
    spans = [attrs for tag, attrs in page.attributes if tag == "i" and "µs from" in attrs.get("data-tip", "")]
    assert [attrs["class"] for attrs in spans] == ["gemm", "gemm later", "quantize", "reduce"]
    # The axis ends a fiftieth behind the step.
    left, width = re.fullmatch(r"left:([\d.]+)%;width:([\d.]+)%", spans[1]["style"]).groups()
    assert (float(left), float(width)) == pytest.approx((50 / 1.02, 35 / 1.02), abs=0.01)
    assert spans[2]["data-tip"] == "all-to-all: 25.0 µs from 25.0"


def test_three_hundred_sites_keep_it_small():
    text = render(make_document(300, seed=1))
    assert len(text) < 3_000_000


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "–"), (0.1234, "0.12"), (9.876, "9.88"), (12.34, "12.3"), (999.96, "1,000.0"), (12345.6, "12,346")],
)
def test_microseconds(value, said):
    assert words.micro(value) == said


@pytest.mark.parametrize(("value", "said"), [(0, "0%"), (0.0004, "0.04%"), (0.0345, "3.5%"), (0.2, "20%"), (None, "–")])
def test_percentages(value, said):
    assert words.percent(value) == said


@pytest.mark.parametrize(
    ("scale", "at_most", "ticks"),
    [
        (Scale(0, 10), 5, [0, 2, 4, 6, 8, 10]),
        (Scale(0.93, 1.12), 5, [0.95, 1.0, 1.05, 1.1]),
        (Scale(0.01, 0.5, logarithmic=True), 6, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]),
        (Scale(0.8, 1.6, logarithmic=True), 6, [0.8, 1.0, 1.2, 1.4, 1.6]),
    ],
)
def test_ticks(scale, at_most, ticks):
    assert scale.ticks(at_most) == pytest.approx(ticks)
    places = [scale.at(tick) for tick in ticks]
    assert places == sorted(places) and places[0] >= 0 and places[-1] <= 100


def test_a_scale_of_one_value():
    for scale in (linear_around([5.0]), log_around([5.0]), log_around([])):
        assert scale.low < scale.high and scale.ticks()
