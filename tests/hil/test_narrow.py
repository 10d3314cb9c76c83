"""Narrower networks of choices: what may go without being missed goes first, and teaching brings back the rest."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from hil import narrow
from perfmodel import hardware
from perfmodel.choice import PARTS, Choice, asked
from perfmodel.data_folder import data_folder
from perfmodel.measured import read_choices
from perfmodel.model import choice_file
from perfmodel.network import Network, rectified

KERNEL = "torch/fp8_tensorwise_fast"


def drawn_layers(sizes: list[int], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(seed)
    pairs = zip(sizes, sizes[1:], strict=False)
    return [
        (
            (generator.standard_normal((a, b)) / np.sqrt(a)).astype(np.float32),
            (0.3 * generator.standard_normal(b)).astype(np.float32),
        )
        for a, b in pairs
    ]


def with_twins(layers: list[tuple[np.ndarray, np.ndarray]], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same function, each hidden unit there twice, what it gives cut in two uneven parts, in another order."""
    generator = np.random.default_rng(seed)
    wide = list(layers)
    for number in range(len(layers) - 1):
        weights, biases = wide[number]
        following, level = wide[number + 1]
        order, share = generator.permutation(2 * len(biases)), generator.uniform(0.2, 0.8, (len(biases), 1)).astype(np.float32)
        wide[number] = np.hstack([weights, weights])[:, order], np.concatenate([biases, biases])[order]
        wide[number + 1] = np.vstack([share * following, (1 - share) * following])[order], level
    return wide


def network(layers: list[tuple[np.ndarray, np.ndarray]]) -> Network:
    inputs = len(layers[0][0])
    return Network(np.zeros(inputs, np.float32), np.ones(inputs, np.float32), 0.5, 2.0, layers)


def test_twins_are_not_missed():
    layers = drawn_layers([6, 24, 24, 24, 5], 0)
    wide, rows = network(with_twins(layers, 1)), np.random.default_rng(2).standard_normal((4000, 6))
    found = narrow.pruned(wide, rows[:3000], 24)
    assert [biases.size for _, biases in found.layers] == [24, 24, 24, 5]
    expected = network(layers).outputs(rows[3000:])
    # The twins were the same function to begin with; the least squares keep what they gave.
    np.testing.assert_allclose(wide.outputs(rows[3000:]), expected, atol=1e-4)
    np.testing.assert_allclose(found.outputs(rows[3000:]), expected, atol=0.01)
    assert (found.level, found.spread) == (wide.level, wide.spread)


def test_a_layer_that_is_narrow_enough_stays():
    whole = network(drawn_layers([4, 8, 8, 8, 3], 3))
    found = narrow.pruned(whole, np.random.default_rng(4).standard_normal((500, 4)), 8)
    for (weights, biases), (kept, level) in zip(whole.layers, found.layers, strict=True):
        np.testing.assert_array_equal(weights, kept)
        np.testing.assert_array_equal(biases, level)


def test_each_unit_that_goes_is_the_one_missed_least():
    """Against all of them tried by numpy's least squares."""
    generator = np.random.default_rng(5)
    values = rectified(generator.standard_normal((400, 9)).astype(np.float32)).astype(float)
    weights = generator.standard_normal((10, 4))
    target = np.column_stack([values, np.ones(400)]) @ weights
    kept, found = narrow._least_missed(values, weights, 8)
    losses, fits = [], []
    for gone in range(9):
        some = np.column_stack([np.delete(values, gone, axis=1), np.ones(400)])
        fit = np.linalg.lstsq(some, target, rcond=None)[0]
        losses.append(((some @ fit - target) ** 2).sum())
        fits.append(fit)
    assert kept.tolist() == np.delete(np.arange(9), np.argmin(losses)).tolist()
    np.testing.assert_allclose(found, fits[int(np.argmin(losses))], atol=1e-3)


@pytest.fixture(scope="module")
def teacher() -> Choice:
    """Chooses by a drawn network of the inputs that a kernel has."""
    gpu = hardware.load("h200")
    shapes = narrow.drawn(KERNEL, 3000, 6)
    matrix = asked(KERNEL, *(shapes[name].to_numpy(float) for name in ("m", "n", "k", "groups")), gpu)
    tiles, rests = 4, 3
    kernels = np.zeros((tiles * rests, len(PARTS)), dtype=np.int64)
    kernels[:, 0], kernels[:, 2] = np.repeat(64 * np.arange(1, tiles + 1), rests), np.tile(np.arange(11, 11 + rests), tiles)
    layers = drawn_layers([matrix.shape[1], 48, 48, 48, tiles + rests], 7)
    layers[-1] = 6 * layers[-1][0], layers[-1][1]
    return Choice(Network(matrix.mean(axis=0), matrix.std(axis=0) + np.float32(1e-6), 0.0, 1.0, layers), kernels)


def test_teaching_brings_back_what_pruning_took(teacher):
    shapes, careful = narrow.drawn(KERNEL, 20_000, 8), narrow.drawn(KERNEL, 1500, 9)
    choice, found = narrow.narrowed(KERNEL, teacher, shapes, careful, hardware.load("h200"), 24, 4)
    assert [biases.size for _, biases in choice.network.layers] == [24, 24, 24, 7]
    assert found["width"] == 24 and found["taught"] == len(shapes) - len(shapes) // 10
    for judged, number in (("drawn", len(shapes) // 10), ("careful", len(careful))):
        assert found[judged]["shapes"] == number
        assert found[judged]["alike"] > found[judged]["alike_before_teaching"] + 0.03, found


def test_shapes_are_distinct_repeat_and_follow_the_seed():
    one, two, other = narrow.drawn(KERNEL, 900, 1), narrow.drawn(KERNEL, 900, 1), narrow.drawn(KERNEL, 900, 2)
    pd.testing.assert_frame_equal(one, two)
    assert 300 < len(one) <= 900 and not one.duplicated().any() and not one.equals(other)
    assert (one["groups"] == 1).all() and not (one[["n", "k"]] % 16).to_numpy().any()


def folder(tmp_path, teacher: Choice) -> None:
    (tmp_path / "choices").mkdir()
    (tmp_path / "choices" / choice_file(KERNEL)).write_bytes(gzip.compress(teacher.save()))
    (tmp_path / "choices.json").write_text(json.dumps({"schema_version": 2, "method": "x", "kernels": {KERNEL: {"rows": 5}}}))
    spec = data_folder() / "h200" / "hardware.json"
    (tmp_path / "hardware.json").write_text(spec.read_text())


def test_the_command_replaces_a_network_and_says_what_it_was(tmp_path, teacher, capsys):
    folder(tmp_path, teacher)
    wanted = ["--out", str(tmp_path), "--width", "16", "--draws", "2000", "--epochs", "1", "--workers", "1"]
    assert narrow.main(wanted) == 0
    found = read_choices(tmp_path)[KERNEL]
    assert [biases.size for _, biases in found.network.layers[:-1]] == [16] * 3
    np.testing.assert_array_equal(found.kernels, teacher.kernels)
    said = json.loads((tmp_path / "choices.json").read_text())["kernels"][KERNEL]
    assert said["width"] == 16 and said["wide"] == {"rows": 5} and said["command"].startswith("python -m hil.narrow --out")
    assert "careful" not in said
    capsys.readouterr()
    # As narrow as asked already: nothing to do.
    assert narrow.main(wanted) == 0 and "16 units wide already" in capsys.readouterr().err
    assert read_choices(tmp_path)[KERNEL].save() == found.save()


def test_what_it_refuses(tmp_path, teacher, capsys):
    assert narrow.main(["--out", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    folder(tmp_path, teacher)
    for wrong, words in (
        (["--kernels", "torch/bf16"], "fits none of torch/fp8_tensorwise_fast"),
        (["--width", "0"], "at least 1"),
    ):
        with pytest.raises(SystemExit) as end:
            narrow.main(["--out", str(tmp_path), *wrong])
        said = capsys.readouterr().err
        assert end.value.code == 2 and words in said and len(said.splitlines()) == 1
