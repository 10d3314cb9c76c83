"""The README's figures are those that the shipped data give."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def readme():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def numbers(text):
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def test_first_screen(readme):
    """Same words, same figures to a percent: another processor may round the last digit otherwise."""
    stated, printed = readme.block("whatif"), readme.first_screen().strip("\n")
    assert NUMBER.sub("0", re.sub("[ █]+", " ", stated)) == NUMBER.sub("0", re.sub("[ █]+", " ", printed))
    assert numbers(stated) == pytest.approx(numbers(printed), rel=0.01, abs=0.011)


def test_accuracy_of_the_time_model(readme):
    assert readme.block("fit") == readme.accuracy().strip("\n")


@pytest.mark.parametrize(("hardware", "names"), [("h200", ("sweeps", "fresh")), ("h100", ("fresh_h100",))])
def test_the_time_model_on_fresh_shapes(readme, hardware, names):
    """Same words, same figures but for a row at an edge: another processor's matrix products end in other bits."""
    printed = readme.fresh(hardware, *(name.removesuffix("_h100") for name in names)).strip("\n")
    stated = "\n\n".join(map(readme.block, names))
    assert NUMBER.sub("0", re.sub(" +", " ", stated)) == NUMBER.sub("0", re.sub(" +", " ", printed))
    assert numbers(stated) == pytest.approx(numbers(printed), rel=0.02, abs=0.11)


def test_what_is_emulated_exactly(readme):
    assert readme.block("exactness") == readme.exactness().strip("\n")


def test_every_verb_in_the_readme_exists():
    from loka_sim.cli import main

    verbs = set(re.findall(r"^loka-sim ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"whatif", "compare", "export", "capture"} <= verbs
    for verb in verbs:
        assert main([verb, "--help"]) == 0
