"""Mods on a specification do what Mods on the module do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loka_sim import zoo
from loka_sim.capture import capture
from loka_sim.errors import UserError
from loka_sim.mods import MODS, apply_to_spec, parse_mods, prediction_site
from loka_sim.statements import statements
from loka_sim.whatif import whatif

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


class Last(nn.Module):
    """A recurrent layer's last state."""

    def forward(self, outputs):
        return outputs[0][:, -1]


class Loop(nn.Module):
    """One layer called three times, a frozen one, and a prediction layer called twice."""

    def __init__(self, bias=True):
        super().__init__()
        self.again, self.norm, self.head = nn.Linear(32, 32, bias=bias), nn.LayerNorm(32), nn.Linear(32, 16)
        self.frozen = nn.Linear(32, 32, bias=bias).requires_grad_(False)

    def forward(self, x):
        x = self.frozen(x)
        for _ in range(3):
            x = F.silu(self.norm(self.again(x)))
        return self.head(x) + self.head(2 * x)


def test_a_module_of_two_weights_has_two_biases():
    layer = nn.GRU(24, 24, batch_first=True)
    spec = capture(nn.Sequential(layer, Last(), nn.Linear(24, 1)), torch.randn(8, 5, 24))
    lost = spec.dense_parameters - apply_to_spec(spec, "no_bias").dense_parameters
    assert lost == layer.bias_ih_l0.numel() + layer.bias_hh_l0.numel()


def test_a_layer_that_is_called_more_than_once_has_one_bias():
    plain, without = (capture(Loop(bias), torch.randn(8, 32)) for bias in (True, False))
    changed = apply_to_spec(plain, "no_bias")
    assert changed.sites == without.sites
    assert changed.dense_parameters == without.dense_parameters == plain.dense_parameters - 32


def test_the_whole_step_is_of_the_model_that_was_asked_for():
    """As captured with all Mods; not predicted with some of them, of which no capture tells what the step holds."""
    plain, some, every = (whatif("dcnv2-small", mods=mods) for mods in ("", "no_bias", "all"))
    assert plain.decision.whole.us != every.decision.whole.us
    assert every.steps[0].whole.us < plain.steps[0].whole.us  # without its biases the step has fewer kernels
    assert some.decision.whole is None
    assert "(they were captured without the Mods no_bias)" in " ".join(text for _, text in statements(some))
    assert whatif("dcnv2-small", mods="blocknorm").decision.whole is not None  # which has no norm


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
