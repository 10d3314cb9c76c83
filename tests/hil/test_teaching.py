"""Several networks taught at once: as each would be alone, and one without rows stays as it was."""

import json

import numpy as np
import pytest
import torch

from hil import teaching
from perfmodel.network import Experts, Network


@pytest.fixture
def rows():
    generator = np.random.default_rng(0)
    return generator.standard_normal((4000, 5)).astype(np.float32)


def by_hand(network, matrix):
    """What torch's own layers make of it."""
    x = torch.from_numpy(((matrix - network.mean) / network.deviation).clip(-4, 4))
    for number, (weights, biases) in enumerate(network.layers):
        x = torch.nn.functional.linear(x, torch.from_numpy(weights.T.copy()), torch.from_numpy(biases))
        if number < len(network.layers) - 1:
            x = torch.nn.functional.hardswish(x)
    return x.numpy()


def test_rows_are_shared_out_evenly_by_one_input(rows):
    experts = teaching.untaught(rows, 2, 4, [8, 8], 3)
    assert isinstance(experts, Experts) and experts.column == 2 and (experts.inputs, experts.values) == (5, 3)
    shared = teaching.shared_out(experts, rows)
    assert [len(mine) for mine in shared] == [1000] * 4
    assert np.array_equal(np.sort(np.concatenate(shared)), np.arange(4000))
    ends = [(rows[mine, 2].min(), rows[mine, 2].max()) for mine in shared]
    assert all(one[1] < other[0] for one, other in zip(ends, ends[1:], strict=False))
    for network, mine in zip(experts.networks, shared, strict=True):
        np.testing.assert_allclose(network.mean, rows[mine].mean(axis=0), atol=1e-5)
    assert isinstance(teaching.untaught(rows, 2, 1, [8], 3), Network)
    # What takes few values is cut no finer than it can be.
    assert len(teaching.untaught(np.round(rows > 0).astype(np.float32), 2, 4, [8], 3).networks) == 2


def test_values_are_those_of_torchs_layers_whoever_is_asked(rows):
    experts = teaching.untaught(rows, 0, 3, [16, 16], 4)
    given = np.full((len(rows), 4), np.nan, np.float32)
    for numbers, values in experts.blocks(rows):
        given[numbers] = values
    for network, mine in zip(experts.networks, experts.asked(rows), strict=True):
        np.testing.assert_allclose(given[mine], by_hand(network, rows[mine]), atol=1e-5)


def test_copies_of_a_network_say_what_it_says_and_learn_each_its_own(rows):
    one = teaching.untaught(rows, 2, 1, [16, 16], 3)
    copies = teaching.copied(one, rows, 2, 4)
    assert isinstance(copies, Experts) and [len(mine) for mine in teaching.shared_out(copies, rows)] == [1000] * 4
    given = np.full((len(rows), 3), np.nan, np.float32)
    for numbers, values in copies.blocks(rows):
        given[numbers] = values
    np.testing.assert_allclose(given, by_hand(one, rows), atol=1e-5)
    assert teaching.copied(one, rows, 2, 1) is one
    # Several become more, each of them as often, and say the same; the edges that there were stay.
    more = teaching.copied(copies, rows, 2, 8)
    assert isinstance(more, Experts) and [len(mine) for mine in teaching.shared_out(more, rows)] == [500] * 8
    assert (more.edges[1::2] == copies.edges).all()
    again = np.full((len(rows), 3), np.nan, np.float32)
    for numbers, values in more.blocks(rows):
        again[numbers] = values
    np.testing.assert_allclose(again, given, atol=1e-5)
    # Each its own: the first quarter's rows alone are taught, and the others say what they said.
    kept = teaching.shared_out(copies, rows)
    kept[1:] = [mine[:0] for mine in kept[1:]]
    apart = teaching.taught(copies, torch.from_numpy(rows), kept, squares(rows[:, 0]), 8, 256, 1e-2)
    after = np.stack([by_hand(network, rows[:100]) for network in apart.networks])
    before = np.stack([by_hand(one, rows[:100])] * 4)
    assert (after[1:] == before[1:]).all() and not np.allclose(after[0], before[0], atol=1e-2)


def test_between_two_networks_lies_each_weight(rows):
    one, other = (teaching.untaught(rows, 2, 3, [16, 16], 3, seed) for seed in (0, 1))
    for share, weights in ((1.0, one), (0.0, other)):
        for mine, theirs in zip(teaching.between(one, other, share).networks, weights.networks, strict=True):
            for layer, same in zip(mine.layers, theirs.layers, strict=True):
                assert (layer[0] == same[0]).all() and (layer[1] == same[1]).all()
    found = teaching.between(one, other, 0.25)
    assert (found.edges == one.edges).all()
    np.testing.assert_allclose(
        found.networks[1].layers[0][0], 0.25 * one.networks[1].layers[0][0] + 0.75 * other.networks[1].layers[0][0], atol=1e-7
    )


def squares(target):
    def loss(out, index):
        return ((out[..., 0] - torch.from_numpy(target)[index]) ** 2).mean()

    return loss


def test_each_learns_its_own_part_and_one_without_rows_stays(rows):
    begun = teaching.untaught(rows, 0, 2, [16], 1)
    # Another line on each side of the edge.
    target = np.where(rows[:, 0] >= begun.edges[0], 2 * rows[:, 1], -rows[:, 2] + 1).astype(np.float32)
    kept, matrix = teaching.shared_out(begun, rows), torch.from_numpy(rows)
    found = teaching.taught(begun, matrix, kept, squares(target), 30, 256, 1e-2)
    for network, mine in zip(found.networks, kept, strict=True):
        assert np.sqrt(np.mean((by_hand(network, rows[mine])[:, 0] - target[mine]) ** 2)) < 0.2
    half = teaching.taught(begun, matrix, [kept[0], kept[1][:0]], squares(target), 2, 256, 1e-2)
    for (weights, biases), (same, level) in zip(half.networks[1].layers, begun.networks[1].layers, strict=True):
        np.testing.assert_array_equal(weights, same)
        np.testing.assert_array_equal(biases, level)
    assert not np.array_equal(half.networks[0].layers[0][0], begun.networks[0].layers[0][0])
    with pytest.raises(ValueError, match="do not fit together"):
        Experts.of({"column": 0, "edges": [], "networks": [json.loads(n.save()) for n in found.networks]})


def test_what_is_taught_beside_networks_is_found(rows):
    """A line whose slope is of all networks alike, and a level that each network has for itself."""
    begun = teaching.untaught(rows, 0, 2, [16], 1)
    target = (3 * rows[:, 3] + np.where(rows[:, 0] >= begun.edges[0], 1, -1)).astype(np.float32)
    slope, x = torch.nn.Parameter(torch.zeros(1)), torch.from_numpy(rows)
    without = x.clone()
    without[:, 3] = 0

    def loss(out, index):
        return ((out[..., 0] + slope * x[index, 3] - torch.from_numpy(target)[index]) ** 2).mean()

    teaching.taught(begun, without, teaching.shared_out(begun, rows), loss, 60, 256, 3e-2, beside=[slope])
    assert slope.item() == pytest.approx(3, abs=0.1)
