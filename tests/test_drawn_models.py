"""Recommenders drawn at random: the same for the same seed, whatever parts they have, and captured whole."""

import pytest
import torch
from torch import nn

from benchmarks import drawn_models
from loka_sim.capture import capture

SEEDS = range(40)


def test_a_seed_draws_the_same_model():
    (one, inputs), (again, others) = drawn_models.drawn_5(), drawn_models.drawn_5()
    assert str(one) == str(again) and [x.shape for x in inputs] == [x.shape for x in others]
    assert str(one) != str(drawn_models.drawn_6()[0])
    with pytest.raises(AttributeError):
        drawn_models.drawn_x  # noqa: B018


def test_every_part_is_drawn_and_looks_up_about_as_much():
    seen = set()
    for seed in SEEDS:
        model, (ids, *_) = drawn_models.drawn(seed)
        seen |= {type(part) for part in model.parts}
        assert drawn_models.LEAST <= ids.numel() * model.embedding.table.embedding_dim <= drawn_models.MOST
    assert seen == set(drawn_models.PARTS)


@pytest.mark.parametrize("seed", [1, 5, 8, 27])
def test_it_is_captured_whole(seed):
    """Every linear layer is a site, and nothing of the step is left out."""
    model, inputs = drawn_models.drawn(seed)
    spec = capture(model, inputs)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert not spec.untraced and not spec.unaccounted and spec.batch == len(inputs[0])
    assert set(layers) <= {site.name for site in spec.sites}
    assert sum(parameter.numel() for parameter in model.parameters()) > 0 and all(isinstance(x, torch.Tensor) for x in inputs)
