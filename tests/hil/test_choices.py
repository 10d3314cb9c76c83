"""Asking what a library chooses, with a library that answers by a rule of ours, and learning that rule."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import hil.fingerprint
import hil.kernels
import perfmodel
from hil import asked as careful
from hil import asking, choices, teaching
from hil.begun import gone_on
from hil.kernels.base import Shape
from perfmodel import choice, hardware
from perfmodel.calls import columns_of
from perfmodel.choice import PARTS, TILE, Choice, are_largest, asked, grid_of, parts_of, vocabulary
from perfmodel.data_folder import data_folder
from perfmodel.fits import CONTEXT, NEVER
from perfmodel.network import Experts
from perfmodel.opened import choice_file
from perfmodel.saved import read_spec

KERNEL = "torch/fp8_tensorwise_fast"
NONE = np.empty(0, dtype=np.uint64)


def test_known_keys_are_found_as_numpy_finds_them():
    generator = np.random.default_rng()
    known, keys = (np.unique(generator.integers(0, 300, 100).astype(np.uint64)) for _ in range(2))
    for few in (known, known[:1], NONE):
        np.testing.assert_array_equal(asking._are_among(keys, few), np.isin(keys, few))


def rule(kernel: str, shape: Shape) -> list[str]:
    """Names that a call launches: tiles by its size, memory cleared where it is large."""
    tile = "128x256_64x4_2x1_v_bz_coopA_TNN" if shape.m * shape.n > 2**20 else "64x64_64x9_1x2_h_bz_TNT"
    return [*(["memset"] if shape.k > 512 else []), f"nvjet_sm90_tst_{tile}"]


@pytest.fixture
def library(monkeypatch):
    """A GPU that captures by the rule, and refuses single columns."""
    import torch

    class Recorder:
        stream = None

        def names_of_each(self, launches):
            return [self.names(launch) for launch in launches]

        def names(self, launch):
            try:
                return launch()
            except RuntimeError:
                return None

    def runner(name):
        def bind(shape, pool):
            def launch(index):
                if shape.n == 16:
                    raise RuntimeError("refused")
                return rule(name, shape)

            return launch

        return type("Runner", (), {"bind": staticmethod(bind)})

    monkeypatch.setattr(asking, "Recorder", Recorder)
    monkeypatch.setattr(asking, "BufferPool", lambda elements=0: None)
    monkeypatch.setattr(hil.kernels, "RUNNERS", {name: runner(name) for name in asking.KERNELS_ASKED})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)


def test_answers_are_what_each_call_launches(library):
    rows = asking.answers(asking.KERNELS_ASKED, 0, 7, NONE, 60.0, 3000)
    assert 3000 <= len(rows) < 3010 and set(rows["kernel"]) == set(asking.KERNELS_ASKED)
    assert (rows["n"] != 16).all()
    assert set(rows.loc[rows["groups"] == 1, "n"]) & {3, 5, 6, 7, 12, 20}
    for row in rows.sample(200, random_state=0).itertuples():
        expected = parts_of(rule(row.kernel, Shape(row.m, row.n, row.k, row.groups)))
        assert tuple(getattr(row, part) for part in PARTS) == expected
    single = rows["groups"] == 1
    assert (rows.loc[~single, "kernel"] == "torch/bf16_batched").all() and (~single).mean() > 0.1
    # Few large products, as of experts, and many small ones, as of explicit interactions.
    few = rows.loc[~single, "groups"] <= 128
    assert 0.1 < few.mean() < 0.7 and rows.loc[~single, ["m", "n", "k"]].to_numpy()[few].max() > 2048
    assert not rows.duplicated(["kernel", "m", "n", "k", "groups"]).any()


def test_known_shapes_are_not_asked_and_processes_ask_of_different_ones(library):
    columns = ["m", "n", "k", "groups"]
    first = asking.answers(asking.KERNELS_ASKED, 0, 7, NONE, 60.0, 1500)
    known = set(map(tuple, first[columns].to_numpy()[:700].tolist()))
    keys = asking.keys_of(first[:700])
    again = set(map(tuple, asking.answers(asking.KERNELS_ASKED, 0, 7, keys, 60.0, 1500)[columns].to_numpy().tolist()))
    assert not again & known
    other = set(map(tuple, asking.answers(asking.KERNELS_ASKED, 1, 7, NONE, 60.0, 1500)[columns].to_numpy().tolist()))
    assert len(other & set(map(tuple, first[columns].to_numpy().tolist()))) < 0.1 * len(other)


def test_runs_of_neighbouring_seeds_ask_of_different_shapes(library):
    first, second = (asking.answers((KERNEL,), number, seed, NONE, 60.0, 400) for number, seed in ((1, 7), (0, 1_000_007)))
    both = pd.concat([frame[["m", "n", "k"]].drop_duplicates() for frame in (first, second)])
    assert both.duplicated().mean() < 0.1


def test_it_stops_in_time(library):
    assert len(asking.answers(asking.KERNELS_ASKED, 0, 7, NONE, 0.0, 1500)) == 0


def test_a_rule_is_learned_and_judged_on_answers_held_out(library, monkeypatch):
    monkeypatch.setattr(choices, "WIDTH", 48)
    monkeypatch.setattr(choices, "BATCH", 256)
    rows = asking.answers((KERNEL,), 0, 7, NONE, 60.0, 3600)
    assert set(rows["kernel"]) == {KERNEL}
    choice, judged = choices.learn(KERNEL, rows, hardware.load("h200"), epochs=12)
    assert judged["rows"] + judged["held_out"] == len(rows) and judged["tile_right"] > 0.95 and judged["all_right"] > 0.93
    fresh = asking.answers((KERNEL,), 3, 7, NONE, 60.0, 900)
    told, _ = choice.told(asked(KERNEL, *(fresh[x].to_numpy(float) for x in ("m", "n", "k", "groups")), hardware.load("h200")))
    right = (told == fresh[list(PARTS)].to_numpy()).all(axis=1).mean()
    assert right == pytest.approx(judged["all_right"], abs=0.04)


def test_a_choice_by_waves_is_learned_from_few_answers(monkeypatch):
    """Whichever of four tiles computes least in whole waves: next to nothing of it is in what the network sees."""
    monkeypatch.setattr(choices, "BATCH", 256)
    generator, spec = np.random.default_rng(0), hardware.load("h200")
    m, n, k = (np.floor(2 ** generator.uniform(7, 13, 9000)) for _ in range(3))
    tiles = np.array([[176, 128], [112, 192], [304, 64], [80, 256]])
    waves = np.stack([np.ceil(np.ceil(n / wide) * np.ceil(m / high) / 132) * wide * high for wide, high in tiles], axis=1)
    parts = np.zeros((len(m), len(PARTS)), dtype=np.int64)
    parts[:, :2], parts[:, 2] = tiles[waves.argmin(axis=1)], 11
    rows = pd.DataFrame({"kernel": KERNEL, "m": m, "n": n, "k": k, "groups": 1.0}).assign(
        **dict(zip(PARTS, parts.T, strict=True))
    )
    _, with_fits = choices.learn(KERNEL, rows, spec, epochs=12, width=32)
    monkeypatch.setattr(teaching, "worth_of_tiles", lambda xp, sizes, grid, fits, context: 0 * context[:, :1])
    monkeypatch.setattr(choice, "add_worth_of_tiles", lambda *_: None)
    _, without = choices.learn(KERNEL, rows, spec, epochs=12, width=32)
    print(with_fits, without)
    assert with_fits["all_right"] > without["all_right"] + 0.1


def test_learning_goes_on_from_another_gpus_network(library, monkeypatch):
    monkeypatch.setattr(choices, "WIDTH", 48)
    monkeypatch.setattr(choices, "BATCH", 256)
    spec = hardware.load("h200")
    rows = asking.answers((KERNEL,), 0, 7, NONE, 60.0, 3600)
    start, _ = choices.learn(KERNEL, rows, spec, epochs=12)
    few = asking.answers((KERNEL,), 3, 7, NONE, 60.0, 900)
    (_, anew), (more, on) = (choices.learn(KERNEL, few, spec, epochs=1, start=begun) for begun in (None, start))
    assert on["all_right"] > 0.85 and on["all_right"] > anew["all_right"] + 0.2
    assert [weights.shape[1] for weights, _ in more.network.layers[:-1]] == [48, 48, 48]
    # At a low rate it stays what it was.
    kept, _ = choices.learn(KERNEL, few, spec, epochs=1, start=start, rate=1e-9)
    matrix = asked(KERNEL, *(few[x].to_numpy(float) for x in ("m", "n", "k", "groups")), spec)
    again = [choice.told(matrix)[0] for choice in (start, kept, more)]
    assert (again[0] == again[1]).all(axis=1).mean() > 0.995 > (again[0] == again[2]).all(axis=1).mean()
    # Nor where it keeps nearly all that it was, however much it learns; by half it is neither the one nor the other.
    stays, _ = choices.learn(KERNEL, few, spec, epochs=4, start=start, keep=0.999)
    assert (stays.told(matrix)[0] == again[0]).all(axis=1).mean() > 0.99
    half, _ = choices.learn(KERNEL, few, spec, epochs=4, start=start, keep=0.5)
    learned, _ = choices.learn(KERNEL, few, spec, epochs=4, start=start)
    begun, fits = gone_on(start, half.kernels, spec.multiprocessors)
    for was, became, between in zip(fits.arrays, learned.fits.arrays, half.fits.arrays, strict=True):
        there = became > NEVER
        np.testing.assert_allclose(between[there], (was + became)[there] / 2, atol=2e-3)
        assert (between[~there] == NEVER).all()
    ends = [network.layers[1][0] for network in (begun, learned.network)]
    np.testing.assert_allclose(half.network.layers[1][0], sum(ends) / 2, atol=2e-3)
    # What this GPU's library never chooses is forgotten; what it alone chooses is learned.
    other = few.assign(tile_n=np.where(few["tile_n"] == 128, 96, few["tile_n"]))
    assert 96 in choices.learn(KERNEL, other, spec, epochs=1, start=start)[0].kernels[:, 0]


def test_where_the_network_is_sure_a_share_is_asked(library, monkeypatch):
    monkeypatch.setattr(choices, "WIDTH", 48)
    monkeypatch.setattr(choices, "BATCH", 256)
    spec = hardware.load("h200")
    start, _ = choices.learn(KERNEL, asking.answers((KERNEL,), 0, 7, NONE, 60.0, 3600), spec, epochs=12)

    def ask(share: float, most: int = 600) -> tuple[np.ndarray, np.ndarray]:
        rows = asking.answers((KERNEL, "torch/bf16"), 3, 7, NONE, 60.0, most, {KERNEL: start}, spec, share)
        # A kernel without a network is asked as ever.
        assert (rows["kernel"] == "torch/bf16").any()
        rows = rows[rows["kernel"] == KERNEL]
        told, doubt = start.told(asked(KERNEL, *(rows[x].to_numpy(float) for x in ("m", "n", "k", "groups")), spec))
        return doubt > 0, (told == rows[list(PARTS)].to_numpy()).all(axis=1)

    everything, right = ask(1.0)
    doubted, seldom_right = ask(0.0)
    half, _ = ask(0.5)
    assert doubted.all() and 0.02 < everything.mean() < 0.9 and everything.mean() < half.mean() < 1.0
    # There is more to learn where it is in doubt.
    assert 1 - seldom_right.mean() > 1.5 * (1 - right.mean())


def test_what_it_begins_with_says_what_the_networks_say():
    start = Choice.load(gzip.decompress((data_folder() / "h200" / "choices" / choice_file(KERNEL)).read_bytes()))
    assert isinstance(start.network, Experts) and len(start.network.networks) > 1
    # One tile is new, one rest, and some are no longer there.
    kernels = start.kernels[7:].copy()
    kernels[0, 0], kernels[1, TILE] = 5000, 99
    sizes, numbers = [len(halves) for halves, _ in vocabulary(kernels)], [number for _, number in vocabulary(kernels)]
    shapes = asking.shapes_to_ask([KERNEL], 3)
    m, n, k, groups = (np.array([getattr(s, name) for s in shapes], dtype=float) for name in ("m", "n", "k", "groups"))
    matrix = asked(KERNEL, m, n, k, groups, hardware.load("h200"))

    def given(network):
        result = np.full((len(matrix), network.values), np.nan, np.float32)
        for rows, values in network.blocks(matrix):
            result[rows] = values
        return result

    begun, fits = gone_on(start, kernels, 132)
    assert isinstance(begun, Experts) and all(map(len, begun.asked(matrix)))
    said, out, theirs = given(start.network), given(begun), [number for _, number in vocabulary(start.kernels)]
    first = len(vocabulary(start.kernels)[0][0])
    for row, kernel in enumerate(kernels[2:], 2):
        known = int(np.flatnonzero((start.kernels == kernel).all(axis=1))[0])
        for mine, its in ((numbers[0][row], theirs[0][known]), (sizes[0] + numbers[1][row], first + theirs[1][known])):
            np.testing.assert_allclose(out[:, mine], said[:, its], rtol=1e-3, atol=1e-3)
    # What the network says of fits, and what these are worth beside: of the new tile and of the new rest nothing.
    np.testing.assert_allclose(out[:, -CONTEXT:], said[:, -CONTEXT:], rtol=1e-3, atol=1e-3)
    (_, tile), (_, rest) = vocabulary(kernels)
    before, (_, its_tile), (_, its_rest) = start.fits, *vocabulary(start.kernels)
    assert not fits.tiles[tile[0]].any() and set(np.unique(fits.pairs[tile[0]])) == {0, np.float32(NEVER)}
    assert set(np.unique(fits.pairs[:, rest[1]])) == {0, np.float32(NEVER)}
    grid, old = grid_of(kernels), start.grid
    for row, kernel in enumerate(kernels[2:], 2):
        known = int(np.flatnonzero((start.kernels == kernel).all(axis=1))[0])
        mine, its = (tile[row], rest[row]), (its_tile[known], its_rest[known])
        assert fits.pairs[mine] == before.pairs[its] > NEVER
        np.testing.assert_array_equal(fits.tiles[mine[0]], before.tiles[its[0]])
        np.testing.assert_array_equal(fits.across[grid.tile_wide[mine[0]]], before.across[old.tile_wide[its[0]]])
        np.testing.assert_array_equal(fits.down[grid.tile_high[mine[0]]], before.down[old.tile_high[its[0]]])
        np.testing.assert_array_equal(fits.clusters[grid.rest_cluster[mine[1]]], before.clusters[old.rest_cluster[its[1]]])
    for network, before, rows in zip(begun.networks, start.network.networks, begun.asked(matrix), strict=True):
        biases = before.layers[-1][1]
        assert (network.layers[-1][1][numbers[0][0]] == biases[:first].min()).all()
        assert (out[rows, numbers[0][0]] == biases[:first].min()).all()
        assert (out[rows, sizes[0] + numbers[1][1]] == biases[first:-CONTEXT].min()).all()


def test_experts_learn_from_answers_each_its_own(library):
    rows = asking.answers((KERNEL,), 0, 11, NONE, 60.0, 6000)
    choice, scores = choices.learn(KERNEL, rows, hardware.load("h200"), 12, 48, experts=3)
    assert isinstance(choice.network, Experts) and len(choice.network.networks) == 3
    assert [biases.size for one in choice.network.networks for _, biases in one.layers[:-1]] == [48] * 9
    assert scores["all_right"] > 0.6
    again, _ = choices.learn(KERNEL, rows, hardware.load("h200"), 1, start=choice, rate=1e-6)
    sizes = [rows[name].to_numpy(float) for name in ("m", "n", "k", "groups")]
    matrix = asked(KERNEL, *sizes, hardware.load("h200"))
    assert (again.told(matrix)[0] == choice.told(matrix)[0]).all(axis=1).mean() > 0.98


def test_one_network_goes_on_as_several_in_coarse_steps(library):
    rows, gpu = asking.answers((KERNEL,), 0, 11, NONE, 60.0, 6000), hardware.load("h200")
    one, before = choices.learn(KERNEL, rows, gpu, 12, 48)
    matrix = asked(KERNEL, *(rows[name].to_numpy(float) for name in ("m", "n", "k", "groups")), gpu)
    # By next to no steps what it knew; by many more than it knew.
    several, _ = choices.learn(KERNEL, rows, gpu, 1, start=one, rate=1e-6, experts=3, coarse=True)
    assert isinstance(several.network, Experts) and len(several.network.networks) == 3
    assert (several.told(matrix)[0] == one.told(matrix)[0]).all(axis=1).mean() > 0.98
    several, after = choices.learn(KERNEL, rows, gpu, 24, start=one, experts=3, coarse=True)
    assert after["all_right"] > before["all_right"] + 0.05


def test_from_answers_in_a_file_networks_are_written(library, tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "WIDTH", 16)
    asking.answers(asking.KERNELS_ASKED, 0, 7, NONE, 60.0, 4000).to_parquet(tmp_path / "answers.parquet")
    arguments = ["--out", str(tmp_path), "--answers", str(tmp_path / "answers.parquet"), "--epochs", "1"]
    assert choices.main(arguments) == 0
    sidecar = json.loads((tmp_path / "choices.json").read_text())
    assert set(sidecar["kernels"]) == set(asking.KERNELS_ASKED)
    assert choices.main([*arguments, "--kernels", KERNEL, "--seed", "8"]) == 0
    again = json.loads((tmp_path / "choices.json").read_text())["kernels"]
    assert "--epochs 1" in again[KERNEL].pop("command") and set(again) == set(asking.KERNELS_ASKED)
    assert all(judged == sidecar["kernels"][name] for name, judged in again.items() if name != KERNEL)
    choice = Choice.load(gzip.decompress((tmp_path / "choices" / choice_file(KERNEL)).read_bytes()))
    assert set(choice.kernels[:, 0]) == {64, 128} and np.isfinite(choice.network.layers[0][0]).all()


def test_products_in_other_layouts_are_asked_where_they_are_named_and_go_on_from_k_fastest(library, tmp_path, monkeypatch):
    """They leave out what was timed with care, and know nothing of the largest calls."""
    bias, begun = "torch/bf16_bias", []
    monkeypatch.setattr(hil.kernels, "RUNNERS", {bias: hil.kernels.RUNNERS[KERNEL]})
    first = asking.answers((bias,), 0, 7, NONE, 60.0, 1200)
    assert set(first["kernel"]) == {bias}
    timed = first[["m", "n", "k", "groups"]].assign(careful=np.arange(len(first)) % 2 == 0)
    timed.to_parquet(tmp_path / "layouts.parquet")
    (known,) = choices.timed_with_care(tmp_path)
    again = asking.answers((bias,), 0, 7, asking.keys_of(known), 60.0, 1200)
    shapes = [set(map(tuple, rows[["m", "n", "k", "groups"]].to_numpy().tolist())) for rows in (timed, known, again)]
    assert len(shapes[1]) == 600 and not shapes[1] & shapes[2] and shapes[0] & shapes[2]

    made, _ = choices.learn(bias, first, hardware.load("h200"), 1, 16)

    def learn(kernel, rows, start, **options):
        begun.append(start)
        return made, {}

    monkeypatch.setattr(choices, "learn", learn)
    first.to_parquet(tmp_path / "answers.parquet")
    arguments = ["--out", str(tmp_path), "--answers", str(tmp_path / "answers.parquet"), "--start", "h200"]
    assert choices.main([*arguments, "--kernels", "torch/bf16_b*s"]) == 0
    shipped = perfmodel.load("h200").choice("torch/bf16")
    assert begun[0].largest is None and shipped.largest is not None and begun[0].network is shipped.network
    assert list(json.loads((tmp_path / "choices.json").read_text())["kernels"]) == [bias]
    # Others are not learned unless they are named.
    assert choices.main(arguments) == 0 and len(begun) == 1


@pytest.mark.parametrize(
    ("name", "transposed"),
    [
        ("nvjet_sm90_tst_128x192_64x5_4x2_h_bz_coopB_NNN", 1), ("nvjet_sm90_tst_64x8_64x16_1x4_h_bz_NNT", 0),
        ("nvjet_sm90_tst_320x64_64x4_2x4_h_bz_NTN", 1), ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT", 0),
        ("nvjet_sm90_tst_128x192_64x5_1x4_h_bz_coopB_bias_TNN", 1),
    ],
)  # fmt: skip
def test_whether_a_result_is_stored_transposed_is_the_last_letter_of_its_layout(name, transposed):
    tile, *_ = name.removeprefix("nvjet_sm90_tst_").split("_")
    parts = dict(zip(PARTS, parts_of([name]), strict=True))
    assert parts["layout"] == transposed and f"{parts['tile_n']}x{parts['tile_m']}" == tile


def test_the_largest_calls_have_networks_that_those_in_the_folder_hand_them_on_to(library, tmp_path):
    few = asking.answers((KERNEL,), 0, 7, NONE, 60.0, 3000)
    many = asking.answers((KERNEL,), 0, 7, NONE, 60.0, 400, large=True)
    for name, rows in (("few", few), ("many", many)):
        rows.to_parquet(tmp_path / f"{name}.parquet")

    def matrix_of(rows):
        return asked(KERNEL, *columns_of(rows), hardware.load("h200"))

    usual = few[~are_largest(columns_of(few))]
    assert are_largest(columns_of(many)).all() and len(usual) > 0.95 * len(few)
    arguments = ["--out", str(tmp_path), "--kernels", KERNEL, "--width", "16", "--epochs", "1"]

    def learned(name, *more):
        assert choices.main([*arguments, "--answers", str(tmp_path / f"{name}.parquet"), *more]) == 0
        entry = json.loads((tmp_path / "choices.json").read_text())["kernels"][KERNEL]
        return Choice.load(gzip.decompress((tmp_path / "choices" / choice_file(KERNEL)).read_bytes())), entry

    alone, said = learned("few")
    assert alone.largest is None and "largest" not in said
    both, said_of_both = learned("many", "--large")
    assert said_of_both["largest"]["rows"] < said["rows"] == said_of_both["rows"]
    for rows, whose in ((usual, alone), (many, both.largest)):
        for mine, its in zip(both.told(matrix_of(rows)), whose.told(matrix_of(rows)), strict=True):
            np.testing.assert_array_equal(mine, its)
    # Others anew: what is known of the largest stays.
    again, said_again = learned("few", "--width", "24")
    assert again.largest.save() == both.largest.save() and said_again["largest"] == said_of_both["largest"]
    assert said_again["command"] != said["command"]
    on, _ = choices.learn(KERNEL, few, hardware.load("h200"), 1, start=both, rate=1e-6)
    assert on.largest is both.largest and on.network is not both.network


def test_answers_of_earlier_runs_are_learned_from_and_not_asked_again(library, tmp_path, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files = {name: tmp_path / f"{name}.parquet" for name in ("earlier", "now")}
    earlier = asking.answers((KERNEL,), 0, 7, NONE, 60.0, 900)
    earlier.to_parquet(files["earlier"])
    now = asking.answers((KERNEL,), 0, 7, asking.keys_of(earlier), 60.0, 700)
    now.to_parquet(files["now"])
    columns = ["m", "n", "k", "groups"]
    assert not pd.concat([earlier, now]).duplicated(columns).any()
    arguments = ["--out", str(tmp_path), "--answers", str(files["now"]), "--earlier", str(files["earlier"]), "--kernels", KERNEL]
    assert choices.main([*arguments, "--epochs", "0"]) == 0
    assert not (tmp_path / "choices").exists()
    assert choices.main([*arguments, "--epochs", "1", "--width", "24"]) == 0
    judged = json.loads((tmp_path / "choices.json").read_text())["kernels"][KERNEL]
    assert judged["rows"] + judged["held_out"] == 1600
    choice = Choice.load(gzip.decompress((tmp_path / "choices" / choice_file(KERNEL)).read_bytes()))
    outputs = sum(len(halves) for halves, _ in vocabulary(choice.kernels)) + CONTEXT
    assert [weights.shape[1] for weights, _ in choice.network.layers] == [24, 24, 24, outputs]
    for wrong in (
        ["--sure", "2"],
        ["--sure", "0.2"],
        ["--keep", "1"],
        ["--keep", "0.5"],
        ["--epochs", "0"],
        ["--start", "h200", "--experts", "12", "--kernels", KERNEL],
        ["--earlier", str(tmp_path / "none.parquet")],
    ):
        with pytest.raises(SystemExit):
            choices.main(["--out", str(tmp_path), *wrong])
    printed = capsys.readouterr().err
    for why in (
        "none.parquet is not there", "--sure 2 is no share", "--sure is of what the networks of --start know",
        "--keep 1 is no share", "--keep is of the networks of --start",
        f"--experts 12 is no multiple of the 8 networks of {KERNEL} in --start",
    ):  # fmt: skip
        assert why in printed


def test_answers_go_into_a_folder_that_is_not_there_yet(library, tmp_path, monkeypatch):
    """They are kept, after minutes of asking; the processes are this one."""

    class Pool:
        def __init__(self, processes):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def starmap(self, call, jobs, chunksize):
            return [call(*job) for job in jobs]

    monkeypatch.setattr(choices.multiprocessing, "get_context", lambda method: SimpleNamespace(Pool=Pool))
    monkeypatch.setattr(hil.fingerprint, "has_gpu", lambda: True)
    path = tmp_path / "of" / "today" / "answers.parquet"
    arguments = ["--out", str(tmp_path), "--answers", str(path), "--epochs", "0", "--kernels", KERNEL, "--workers", "2"]
    assert choices.main([*arguments, "--most", "300"]) == 0
    assert 500 < len(pd.read_parquet(path)) <= 600


def test_networks_learn_by_the_specification_given_and_side_by_side_as_one_by_one(library, tmp_path, monkeypatch):
    kernels = (KERNEL, "torch/fp8_block128")
    asking.answers(kernels, 0, 7, NONE, 60.0, 1200).to_parquet(tmp_path / "answers.parquet")
    shipped = json.loads((data_folder() / "h200" / "hardware.json").read_text())
    smaller = tmp_path / "smaller.json"
    smaller.write_text(json.dumps({**shipped, "name": "smaller", "multiprocessors": 78, "copy_bandwidth_tbs": 2.0}))

    def made(name, *arguments):
        assert set(choices.unanswered(tmp_path / name)) == set(asking.KERNELS_ASKED)
        more = ["--answers", str(tmp_path / "answers.parquet"), "--epochs", "1", "--kernels", *kernels]
        assert choices.main(["--out", str(tmp_path / name), *arguments, *more]) == 0
        assert set(choices.unanswered(tmp_path / name)) == set(asking.KERNELS_ASKED) - set(kernels)
        return [gzip.decompress((tmp_path / name / "choices" / choice_file(kernel)).read_bytes()) for kernel in kernels]

    monkeypatch.setattr(choices, "shipped", lambda: None)  # as without a GPU
    one = made("default")
    monkeypatch.setattr(choices, "shipped", lambda: "h200")
    assert made("this", "--learners", "1") == one
    assert made("h200", "--hardware-spec", str(data_folder() / "h200" / "hardware.json")) == one
    assert made("beside", "--learners", "2") == one
    other = Choice.load(made("other", "--hardware-spec", str(smaller))[0])
    rows = pd.read_parquet(tmp_path / "answers.parquet").query("kernel == @KERNEL")
    sizes = [rows[name].to_numpy(float) for name in ("m", "n", "k", "groups")]
    assert np.allclose(other.network.mean, asked(KERNEL, *sizes, read_spec(smaller)).mean(axis=0), rtol=1e-4, atol=1e-4)
    assert not np.allclose(other.network.mean, Choice.load(one[0]).network.mean, rtol=1e-2, atol=1e-2)


def test_a_network_whose_record_is_damaged_is_missing_and_a_specification_that_is_missing_is_named(tmp_path, capsys):
    (tmp_path / "choices").mkdir()
    (tmp_path / "choices" / choice_file(KERNEL)).write_bytes(b"")
    assert KERNEL in choices.unanswered(tmp_path)
    (tmp_path / "choices.json").write_text(json.dumps({"kernels": {KERNEL: {}, "torch/bf16": {}}}))
    assert KERNEL not in choices.unanswered(tmp_path) and "torch/bf16" in choices.unanswered(tmp_path)
    (tmp_path / "choices.json").write_text('{"kernels": {"torch')
    assert choices.unanswered(tmp_path) == asking.KERNELS_ASKED
    assert choices.main(["--out", str(tmp_path), "--hardware-spec", str(tmp_path / "none.json")]) == 2
    assert f"{tmp_path / 'none.json'} is missing" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert choices.main(["--out", str(tmp_path)]) == 3
    assert "no CUDA GPU here" in capsys.readouterr().err


def test_careful_calls_are_asked_each_once_and_written_with_what_asked(library, tmp_path, monkeypatch):
    monkeypatch.setattr(careful, "has_gpu", lambda: True)
    monkeypatch.setattr(careful, "fingerprint", lambda: {"gpu": "of ours"})
    known = [(KERNEL, 4096, 512, 1024, 1), (KERNEL, 64, 64, 64, 1), ("torch/bf16_batched", 64, 32, 32, 9)]
    left_out = [
        ("torch/fp8_rowwise_fast", 4096, 512, 1024, 1),  # cuBLAS does not choose
        (KERNEL, 2**20, 1024, 64, 1),  # a result of more values than others have
        (KERNEL, 4096, 16, 1024, 1),  # refused by this library
    ]
    frame = pd.DataFrame([*known, *known, *left_out], columns=["kernel", "m", "n", "k", "groups"])
    frame.to_parquet(tmp_path / "gemm.parquet")
    assert careful.main(["--out", str(tmp_path)]) == 0
    written = pd.read_parquet(tmp_path / "choices" / "asked.parquet")
    assert sorted(written[["kernel", "m", "n", "k", "groups"]].itertuples(index=False, name=None)) == sorted(known)
    for row in written.itertuples():
        assert tuple(row[6:]) == parts_of(rule(row.kernel, Shape(row.m, row.n, row.k, row.groups)))
    sidecar = json.loads((tmp_path / "choices" / "asked.json").read_text())
    assert sidecar["rows"] == 3 and sidecar["run"] == {"command": f"python -m hil.asked --out {tmp_path}", "gpu": "of ours"}


def test_careful_calls_without_timings_are_refused_in_a_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        careful.main(["--out", str(tmp_path)])
    assert "no gemm.parquet" in capsys.readouterr().err
