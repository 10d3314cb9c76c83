"""Random models, square wherever they can be so that shapes tell nothing: FLOPs and passes against independent references."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from loka_sim.capture import capture
from loka_sim.modelspec import PASSES

pytestmark = pytest.mark.usefixtures("gemms_alone")

BATCH, WIDTH = 8, 8
STEPS = (
    "linear",
    "shared",
    "frozen",
    "square",
    "left weight",
    "einsum",
    "attention",
    "interaction",
    "no grad",
    "checkpoint",
    "reentrant",
    "in place",
    "convolution",
    "detach",
    "residual",
    "view and change",
)


class Program(nn.Module):
    """Steps from (batch, 8, 8) to (batch, 8, 8), with their own layers or with one that they share."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList()
        for step in steps:
            layer = nn.Conv1d(WIDTH, WIDTH, 1) if step == "convolution" else nn.Linear(WIDTH, WIDTH, bias=step != "square")
            self.layers.append(layer.requires_grad_(step != "frozen"))

    def forward(self, x):
        for step, layer in zip(self.steps, self.layers, strict=True):
            x = self.step(step, layer, x)
        return self.shared(x)

    def step(self, step, layer, x):
        match step:
            case "shared":
                return self.shared(x).tanh()
            case "square":
                return layer(x[:, 0])[:, None] + x
            case "left weight":
                return layer.weight @ x
            case "einsum":
                return torch.einsum("bfk,nk->bfn", x, layer.weight)
            case "attention":
                return F.scaled_dot_product_attention(layer(x), x, x)
            case "interaction":
                return torch.bmm(x, x.transpose(1, 2))
            case "no grad":
                with torch.no_grad():
                    return layer(x)
            case "checkpoint" | "reentrant":
                block = nn.Sequential(layer, nn.Tanh(), self.shared) if step == "checkpoint" else layer
                return checkpoint(lambda y: block(y).sin(), x, use_reentrant=step == "reentrant")
            case "in place":
                return layer(x).add_(x).mul_(2).relu_()
            case "detach":
                return layer(x) + x.detach()
            case "residual":
                return layer(layer(x).relu()) + x
            case "view and change":
                y = layer(x)
                half = y[:, :4]
                y.mul_(2)
                return torch.cat([self.shared(half), half], 1)
            case _:
                return layer(x)


def watched(model, inputs):
    """FLOPs by FlopCounterMode, and per linear layer the passes that its calls need, in order of the calls."""
    needed = {}
    names = {module: name for name, module in model.named_modules()}

    def note(module, args, _result):
        if torch._C._current_autograd_node() is None:
            passes = {"output"}
            if torch.is_grad_enabled():
                passes |= {"grad_input"} if args[0].requires_grad else set()
                passes |= {"grad_weight"} if module.weight.requires_grad else set()
            needed.setdefault(names[module], []).append(passes)

    for module in names:
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    with FlopCounterMode(display=False) as counter, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a reentrant checkpoint of an input that needs no gradient warns
        model(inputs).sum().backward()
    return counter.get_total_flops(), needed


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=6), needs=st.booleans())
def test_flops_and_passes_of_random_models(steps, needs):
    with torch.device("meta"):
        model, x = Program(steps), torch.empty(BATCH, WIDTH, WIDTH, requires_grad=needs)
    spec = capture(model, x)
    for batch in (BATCH, 12):
        flops, needed = watched(model, torch.empty(batch, WIDTH, WIDTH, device="meta", requires_grad=needs))
        convolutions = [text for text in spec.unaccounted if "convolution" in text]
        listed = sum(int(text.rpartition("(")[2].split(" FLOPs")[0]) for text in convolutions) * batch // BATCH
        assert len(convolutions) == len(spec.unaccounted)
        assert spec.flops(batch) + listed == flops
        for module in model.modules():
            module._forward_hooks.clear()
    if "reentrant" in steps:
        return  # whose first forward runs without gradients: the hooks cannot know its passes
    found = {}
    for site in spec.sites:
        if not site.name.endswith("#recompute"):
            found.setdefault(site.name.partition("#")[0], []).append(set(site.passes))
        assert set(site.passes) <= set(PASSES)
    # After a step without gradients the layers before it have none: then what the hooks expect is an upper bound.
    for name, calls in needed.items():
        assert len(found[name]) == len(calls)
        for passes, expected in zip(found[name], calls, strict=True):
            assert passes == expected or ("no grad" in steps and passes <= expected)
