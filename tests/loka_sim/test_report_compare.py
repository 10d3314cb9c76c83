"""The page of a comparison."""

from html.parser import HTMLParser

import pytest

from loka_sim.report import render_compare
from loka_sim.schemas import problem

BF16, FAST = "torch/bf16", "torch/fp8_tensorwise_fast"
STATUSES = ("fast", "not_worth_it", "unsafe", "illegal")


def make_document(changes=20, name="layers"):
    """A comparison of batch 2,048 with batch 8,192 that fits the schema; `changes` layers changed, and `top.0`."""

    def step(key, label, a, b):
        return {"name": key, "label": label, "step_us_a": a, "step_us_b": b, "per_sample_us_a": a / 2048,
                "per_sample_us_b": b / 8192, "speedup_a": 80_000 / a, "speedup_b": 300_000 / b,
                "per_sample_ratio": (a / 2048) / (b / 8192)}  # fmt: skip

    def change(site, worth):
        return {"site": site, "passes": {"output": {"a": BF16, "b": FAST}, "grad_weight": {"a": FAST, "b": BF16}},
                "gain_a_us": 1.5, "gain_b_us": 10.25, "worth_us": worth, "worth_percent": worth and worth / 2500}  # fmt: skip

    return {
        "schema_version": 1, "kind": "loka-sim/compare", "a": "runs/2048", "b": "runs/8192",
        "differences": {"batch": {"a": 2048, "b": 8192}, "mods": {"a": [], "b": ["no_bias", "blocknorm"]}},
        "steps": [step("bf16", "bf16", 80_000.0, 300_000.0), step("decision", "loka-sim's decision", 70_000.0, 250_000.0)],
        "counts": {"a": dict(zip(STATUSES, (5, 3, 1, 1), strict=True)), "b": dict(zip(STATUSES, (8, 1, 0, 1), strict=True))},
        "changes": [*(change(f"{name}.{i}.out", 8.0) for i in range(changes)), change("top.0", None)] if changes else [],
        "worth_us": 8.0 * changes, "worth_percent": 8.0 * changes / 2500, "only_a": [], "only_b": ["head.extra"],
    }  # fmt: skip


class Text(HTMLParser):
    """A page's words and its tags."""

    def __init__(self, page):
        super().__init__()
        self.parts, self.tags, self.silent = [], [], False
        self.feed(page)
        self.words = " ".join("".join(self.parts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.silent = tag == "style"

    def handle_endtag(self, tag):
        self.silent = False

    def handle_data(self, data):
        if not self.silent:
            self.parts.append(data)


def test_it_says_what_the_document_says():
    document = make_document()
    assert problem(document, "compare") is None
    page = Text(render_compare(document))
    assert render_compare(document) == render_compare(document)
    for said in ("runs/2048", "runs/8192", "no_bias, blocknorm", "39.1 µs; step 80,000 µs", "36.6 µs; step 300,000 µs",
                 "A over B 1.07×", "21 sites changed", "cost 160.0 µs a step more", "Of 1 site B knows no time",
                 "layers.{0-19}.out", "20 sites",
                 "bf16 → tensorwise fast", "tensorwise fast → bf16", "head.extra", "1 site only in B"):  # fmt: skip
        assert said in page.words, said
    assert page.tags.count("tr") == 3 + 5 + 3, "head and rows: differences, counts, and one row for all repeated layers"
    assert not {"script", "link", "img"} & set(page.tags)


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", "{{ 7*7 }}", "\"'&"])
def test_names_cannot_inject(evil):
    page = render_compare(make_document(1, name=evil) | {"a": evil})
    assert "<script" not in page
    assert evil in Text(page).words


def test_nothing_changed():
    document = make_document(0) | {"differences": {}}
    page = Text(render_compare(document))
    assert "Nothing: the same settings" in page.words
    assert "every site that both have is decided alike" in page.words
