"""Narrower networks of choices: several, each of some sizes, are taught what a wide one says."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from hil import narrow, teaching
from perfmodel import hardware
from perfmodel.choice import PARTS, Choice, asked
from perfmodel.data_folder import data_folder
from perfmodel.measured import read_choices
from perfmodel.model import choice_file
from perfmodel.network import Experts, Network

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


def test_narrow_ones_together_say_more_of_what_the_wide_one_says_than_one_of_them_alone(teacher):
    shapes, careful = narrow.drawn(KERNEL, 20_000, 8), narrow.drawn(KERNEL, 1500, 9)
    gpu, alike = hardware.load("h200"), {}
    for experts in (1, 4):
        choice, found = narrow.narrowed(KERNEL, teacher, shapes, careful, gpu, experts, 16, 12)
        networks = teaching.networks_of(choice.network)
        assert [biases.size for one in networks for _, biases in one.layers] == [16, 16, 16, 7] * experts
        assert (found["experts"], found["width"], found["taught"]) == (experts, 16, len(shapes) - len(shapes) // 10)
        for judged, number in (("drawn", len(shapes) // 10), ("careful", len(careful))):
            assert found[judged]["shapes"] == number
        alike[experts] = found["careful"]["alike"]
        # By hand: what both tell of the shapes that are judged.
        matrix = asked(KERNEL, *(careful[name].to_numpy(float) for name in ("m", "n", "k", "groups")), gpu)
        same = (choice.told(matrix)[0] == teacher.told(matrix)[0]).all(axis=1).mean()
        assert found["careful"]["alike"] == pytest.approx(same, abs=1e-4)
    assert alike[4] > alike[1] and alike[4] > 0.6, alike


def test_weights_are_what_half_the_room_holds(teacher):
    choice, _ = narrow.narrowed(KERNEL, teacher, narrow.drawn(KERNEL, 2000, 12), None, hardware.load("h200"), 2, 16, 1)
    for network in teaching.networks_of(choice.network):
        for layer in network.layers:
            for array in layer:
                np.testing.assert_array_equal(array, array.astype(np.float16).astype(np.float32))
    again = Choice.load(choice.save())
    for one, other in zip(teaching.networks_of(again.network), teaching.networks_of(choice.network), strict=True):
        np.testing.assert_array_equal(one.mean, other.mean)
        for layer, same in zip(one.layers, other.layers, strict=True):
            np.testing.assert_array_equal(layer[0], same[0])
            np.testing.assert_array_equal(layer[1], same[1])


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
    form = ["--experts", "2", "--width", "16"]
    wanted = ["--out", str(tmp_path), *form, "--draws", "2000", "--epochs", "1", "--workers", "1"]
    assert narrow.main(wanted) == 0
    found = read_choices(tmp_path)[KERNEL]
    assert isinstance(found.network, Experts)
    assert [biases.size for one in found.network.networks for _, biases in one.layers[:-1]] == [16] * 6
    np.testing.assert_array_equal(found.kernels, teacher.kernels)
    said = json.loads((tmp_path / "choices.json").read_text())["kernels"][KERNEL]
    assert (said["experts"], said["width"]) == (2, 16) and said["wide"] == {"rows": 5}
    assert said["command"].startswith("python -m hil.narrow --out")
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
