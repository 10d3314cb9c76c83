"""Mods on a specification do what Mods on the module do."""

from __future__ import annotations

import pytest

from loka_sim import zoo
from loka_sim.capture import capture
from loka_sim.errors import UserError
from loka_sim.mods import MODS, apply_to_spec, parse_mods, prediction_site

pytestmark = pytest.mark.usefixtures("gemms_alone")

CASES = [(model, mods) for model in zoo.MODELS for mods in (("no_bias",), ("blocknorm",), ("hardswish",), MODS)]


@pytest.fixture(scope="module")
def specs():
    made = {}

    def spec(name, mods=()):
        if (name, mods) not in made:
            made[name, mods] = capture(zoo.build(name, mods=mods), zoo.example_inputs(name, 64), name=name)
        return made[name, mods]

    return spec


@pytest.mark.parametrize(("model", "mods"), CASES)
def test_a_specification_under_mods_is_that_of_the_module_under_mods(specs, model, mods):
    name = f"{model}-small"
    changed, captured = apply_to_spec(specs(name), mods), specs(name, mods)
    assert changed.sites == captured.sites
    assert changed.tables == captured.tables
    if mods == ("no_bias",):
        assert changed.dense_parameters == captured.dense_parameters
    assert captured.dense_parameters <= changed.dense_parameters <= 1.01 * captured.dense_parameters


def test_the_prediction_layer_keeps_its_bias(specs):
    spec = specs("wukong-small")
    assert prediction_site(spec) == "predict"
    assert [site.name for site in apply_to_spec(spec, "no_bias").sites if site.bias] == ["predict"]


def test_no_mods_change_nothing(specs):
    assert apply_to_spec(specs("dlrm-small"), ()) is specs("dlrm-small")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all", MODS), ("none", ()), ("", ()), (None, ()), ("hardswish, no_bias", ("no_bias", "hardswish")),
        (("blocknorm", "blocknorm"), ("blocknorm",)), ("all,blocknorm", MODS),
    ],
)  # fmt: skip
def test_names_are_read_in_canonical_order(text, names):
    assert parse_mods(text) == names


def test_an_unknown_name_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"^unknown mod 'batchnorm'; choose from no_bias, blocknorm, hardswish, all, none$"):
        parse_mods("no_bias,batchnorm")
