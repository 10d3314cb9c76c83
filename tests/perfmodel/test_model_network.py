"""The network: its gradients against finite differences, what it learns, and what it saves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from perfmodel import compiled, network
from perfmodel.network import Network


@pytest.fixture(scope="module")
def learned() -> tuple[Network, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    matrix = generator.uniform(-2, 2, (15000, 5))
    return network.train(matrix, law(matrix)), matrix, generator.uniform(-2, 2, (1000, 5))


def law(matrix: np.ndarray) -> np.ndarray:
    return np.sin(2 * matrix[:, 0]) * matrix[:, 1] + 0.5 * matrix[:, 2] ** 2 + 3


def test_it_learns_a_smooth_law_on_fresh_rows(learned):
    net, _, fresh = learned
    error = net.predict(fresh) - law(fresh)
    assert np.sqrt(np.mean(error**2)) < 0.1 * law(fresh).std()


def test_gradients_equal_finite_differences():
    generator = np.random.default_rng(1)
    layers = [
        (generator.standard_normal((4, 6)), generator.standard_normal(6)),
        (generator.standard_normal((6, 5)), generator.standard_normal(5)),
        (generator.standard_normal((5, 1)), generator.standard_normal(1)),
    ]  # float64, so that differences of 1e-6 mean something
    net = Network(np.zeros(4), np.ones(4), 0.0, 1.0, layers)
    x, y = generator.standard_normal((7, 4)), generator.standard_normal(7)

    def loss() -> float:
        off = np.abs(net._through(x, [np.empty((7, biases.size)) for _, biases in layers])[:, 0] - y)
        huber = np.where(off < network.BEND, off**2 / (2 * network.BEND), off - network.BEND / 2)
        return float(huber.mean())

    gradients = network._gradients(net, x, y)
    for array, gradient in zip((a for layer in layers for a in layer), gradients, strict=True):
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + 1e-6
            above = loss()
            array[index] = kept - 1e-6
            below = loss()
            array[index] = kept
            assert (above - below) / 2e-6 == pytest.approx(gradient[index], abs=2e-5)


def test_saved_and_loaded_it_predicts_the_same(learned):
    net, matrix, _ = learned
    again = Network.load(net.save())
    np.testing.assert_array_equal(again.predict(matrix), net.predict(matrix))


def test_a_rows_value_does_not_depend_on_its_company(learned):
    """But for the rounding of a sum of 128 float32 in another order, where the matrix library has one for some rows."""
    net, matrix, _ = learned
    whole = net.predict(matrix[:6000])
    np.testing.assert_allclose(net.predict(matrix[5999::-1])[::-1], whole, rtol=0, atol=5e-6)
    alone = np.concatenate([net.predict(matrix[i : i + 1]) for i in range(0, 6000, 200)])
    np.testing.assert_allclose(alone, whole[::200], rtol=0, atol=5e-6)
    # In the same place of a turn it is the same to the bit, whatever is around it.
    first = np.concatenate([net.predict(matrix[i : i + 1]) for i in range(0, 6000, 10 * network.TURN)])
    np.testing.assert_array_equal(first, whole[:: 10 * network.TURN])
    assert net.predict(matrix[:0]).shape == (0,)


@pytest.mark.parametrize("rows", [1, 48, 49, 100, 300, 500, 513, 700])
def test_a_block_that_is_not_full_changes_no_bit(rows):
    """Nor do a few rows among them that are asked for by their numbers."""
    generator = np.random.default_rng(5)
    sizes = [140, 256, 256, 100]
    layers = [
        (generator.standard_normal(pair).astype(np.float32) / 16, np.zeros(pair[1], np.float32))
        for pair in zip(sizes, sizes[1:], strict=False)
    ]
    net = Network(np.zeros(140, np.float32), np.ones(140, np.float32), 0.0, 1.0, layers)
    matrix = generator.standard_normal((1024, 140)).astype(np.float32)
    whole = net.outputs(matrix)
    np.testing.assert_array_equal(net.outputs(matrix[:rows]), whole[:rows])
    shuffled = generator.permutation(matrix)
    shuffled[(place := generator.permutation(1024)[:rows])] = matrix[:rows]
    with network.single_threaded():
        for numbers, values in net.blocks(shuffled, place):
            np.testing.assert_array_equal(values, whole[[place.tolist().index(number) for number in numbers]])


def test_the_same_seed_learns_the_same(learned):
    generator = np.random.default_rng(2)
    matrix = generator.uniform(-1, 1, (700, 3))
    one, two, other = (network.train(matrix, matrix[:, 0], seed).predict(matrix) for seed in (4, 4, 5))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, other)


def test_far_outside_it_stays_as_at_its_reach(learned):
    net, matrix, _ = learned
    edge = net.mean + network.REACH * net.deviation
    far = np.stack([edge, edge + 1, edge + 1e6])
    np.testing.assert_allclose(net.predict(far), net.predict(far[:1]).repeat(3), rtol=1e-5)


@pytest.mark.parametrize(
    "saved", [b"", b"{}", b'{"level": 0, "spread": 1, "arrays": [{"shape": [2], "float32": "AAAA"}]}', b"[1]"]
)
def test_a_damaged_one_is_refused(saved):
    with pytest.raises(ValueError, match="the network is damaged"):
        Network.load(saved)


@pytest.mark.parametrize("width", [16, 64, 100])
def test_compiled_loops_change_no_bit(monkeypatch, width):
    """Of layers as wide as loops take them and not, with units below, within and above where they bend."""
    assert compiled.loops() is not None
    generator = np.random.default_rng(3)
    sizes = [5, width, width, 3]
    layers = [
        (generator.standard_normal(pair).astype(np.float32), generator.standard_normal(pair[1]).astype(np.float32))
        for pair in zip(sizes, sizes[1:], strict=False)
    ]
    net = Network(np.zeros(5, np.float32), np.ones(5, np.float32), 0.0, 1.0, layers)
    matrix = generator.standard_normal((1300, 5))
    by_loop = net.outputs(matrix)
    monkeypatch.setattr(compiled, "worth_compiling", lambda rows: False)
    np.testing.assert_array_equal(net.outputs(matrix), by_loop)


def test_units_are_hard_swish():
    x = np.linspace(-4, 4, 32, dtype=np.float32).reshape(2, 16)
    found = x.copy()
    compiled.loops().rectify(found, np.full(16, 0.25, np.float32))
    np.testing.assert_allclose(found, torch.nn.functional.hardswish(torch.from_numpy(x) + 0.25).numpy(), rtol=1e-6, atol=1e-7)


def test_layers_that_half_precision_holds_take_half_the_room(learned):
    net, matrix, _ = learned
    halved = replace(net, layers=[(network.in_half(weights), network.in_half(biases)) for weights, biases in net.layers])
    for one in (net, halved):
        again = Network.load(one.save())
        np.testing.assert_array_equal(again.predict(matrix[:600]), one.predict(matrix[:600]))
        np.testing.assert_array_equal(again.mean, one.mean)
    assert len(halved.save()) < 0.53 * len(net.save())
    np.testing.assert_allclose(halved.predict(matrix), net.predict(matrix), atol=0.02)
    large = Network.load(replace(net, mean=np.full_like(net.mean, 1e5)).save())
    assert (large.mean == 1e5).all()
