"""What a library chooses: kernels' names taken apart, what follows from them, and a network's word for it."""

import json

import numpy as np
import pytest
from scipy.special import softmax

from perfmodel import compiled, hardware
from perfmodel.choice import (
    DOUBT,
    LARGE_FLOP,
    LARGE_VALUES,
    PARTS,
    Choice,
    are_largest,
    asked,
    chosen_features,
    parts_of,
    with_choice,
)
from perfmodel.features import features
from perfmodel.network import Experts, Network

H200 = hardware.load("h200")
KERNEL = "torch/fp8_tensorwise_fast"
# Of calls captured on an H200 (torch 2.11, CUDA 13.0): m, n, name, blocks of the launched grid. None of them splits K, each block
# makes one tile.
LAUNCHED = (
    (976, 320, "nvjet_sm90_qqtst_64x56_128x14_2x4_h_bz_TNT", 8 * 15),
    (1024, 240, "nvjet_sm90_tst_40x64_64x16_2x4_h_bz_TNN", 8 * 12),
    (144, 1024, "nvjet_sm90_tst_64x24_64x16_4x2_h_bz_TNT", 8 * 12),
    (1472, 384, "nvjet_sm90_tst_96x64_64x10_2x4_h_bz_TNN", 8 * 12),
    (320, 1536, "nvjet_sm90_tst_64x64_64x13_4x1_v_bz_TNT", 4 * 30),
    (1728, 64, "_ZN7cutlass7Kernel2I50cutlass_75_tensorop_s1688gemm_bf16_64x64_tn_align1EEvNT_6ParamsE", 27),
)


def columns(*sizes: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([float(size)]) for size in sizes)


@pytest.mark.parametrize(("m", "n", "name", "blocks"), LAUNCHED)
def test_the_tiles_that_a_name_tells_are_those_launched(m, n, name, blocks):
    names, matrix = chosen_features(np.array([parts_of([name])]), *columns(m, n, 512, 1), H200)
    told = dict(zip(names, matrix[0], strict=True))
    assert 2 ** told["log2_chosen_tiles"] == pytest.approx(blocks)
    assert 2 ** told["log2_chosen_waves"] == 1 and told["chosen_wave_fill"] == pytest.approx(blocks / 132)
    assert told["chosen_tile_fill"] == pytest.approx(m * n / (blocks * told["chosen_tile_m"] * told["chosen_tile_n"]))


def test_a_name_is_taken_apart():
    main = "nvjet_sm90_qqtst_160x128_128x5_1x2_v_bz_coopA_algo2_splitK_TNN"
    found = dict(zip(PARTS, parts_of(["memset", main, "splitKreduce_kernel"]), strict=True))
    assert found == {
        "tile_n": 160, "tile_m": 128, "cluster": 12, "shared_operand": 1, "split_k": 1, "along_rows": 0, "layout": 1,
        "cleared": 1,
    }  # fmt: skip
    older = ["_ZN7cutlass7Kernel2I67cutlass_75_wmma_tensorop_bf16_s161616gemm_bf16_32x16_32x1_tn_align1EE"]
    assert parts_of(older)[:2] == (1032, 16) and parts_of(older)[7] == 0
    assert parts_of(["gemv2T_kernel_val"])[0] == 4016
    kinds = {parts_of([name])[0] // 1000 for name in ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", *older, "gemv2T", "unheard_of")}
    assert len(kinds) == 4
    # As captured: a step along K of 128 and two under way; a form of a vector's product; 8 columns by 9 rows; 64 x 64.
    captured = {
        "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align2": (2032, 32, 1282),
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize256x64x64_cgasize1x1x1_warpgroupsize1x1x1": (3256, 64, 640),
        "_ZN8internal5gemvx6kernelIii13__nv_bfloat16S2_S2_fLb1ELb1ELb1ELb0ELi7ELb0E18cublasGemvParamsExIi30": (4016, 16, 7),
        "_Z16gemmSN_TN_kernelIfLi128ELi16ELi2ELi4ELi8ELi9ELb0E30cublasGemvTensorStridedBatchedIK13": (10008, 9, 0),
        "_Z20magma_sgemmEx_kernelIf13__nv_bfloat16S0_Lb1ELb0ELi6ELi4ELi6ELi3ELi4EEviii13BatchedTensoriS1": (11064, 64, 0),
    }
    for name, expected in captured.items():
        told = dict(zip(PARTS, parts_of([name]), strict=True))
        assert (told["tile_n"], told["tile_m"], told["shared_operand"]) == expected


@pytest.fixture(scope="module")
def choice() -> Choice:
    """One that chooses by the first input, M, alone."""
    width = asked(KERNEL, *columns(64, 64, 64, 1), H200).shape[1]
    kernels = np.array([[tile_n, 64, 11, 0, 0, 0, 0, 0] for tile_n in (64, 128)])
    weights = np.zeros((width, 3), dtype=np.float32)
    weights[0, 1] = 1.0
    deviation = np.ones(width, dtype=np.float32)
    mean = np.zeros(width, dtype=np.float32)
    mean[0] = 10
    return Choice(Network(mean, deviation, 0.0, 1.0, [(weights, np.zeros(3, dtype=np.float32))]), kernels)


def test_the_likeliest_is_taken_and_stands_behind_the_features(choice):
    sizes = tuple(np.array(x, dtype=float) for x in ([512, 2048, 512], [256, 256, 64], [64, 64, 64], [1, 1, 1]))
    parts, doubt = choice.told(asked(KERNEL, *sizes, H200))
    assert parts[:, 0].tolist() == [64, 128, 64] and (parts[:, 1] == 64).all() and parts.shape == (3, len(PARTS))
    # One apart in the logarithm: 73%, less than 90 and more than 70.
    assert doubt.tolist() == [2, 2, 2]
    known = features(KERNEL, *sizes, H200)
    names, matrix, doubted = with_choice(*known, choice, KERNEL, sizes, H200)
    more, expected = chosen_features(parts, *sizes, H200)
    assert names == [*known[0], *more, "chosen_doubt"] and len(set(names)) == len(names)
    np.testing.assert_array_equal(matrix, np.column_stack([known[1], expected, doubt]))
    np.testing.assert_array_equal(doubted, doubt)
    # As trees of before know it.
    names, matrix, doubted = with_choice(*known, choice, KERNEL, sizes, H200, doubted=False)
    assert names == [*known[0], *more]
    np.testing.assert_array_equal(matrix, np.column_stack([known[1], expected]))
    np.testing.assert_array_equal(doubted, doubt)
    _, same, no_doubt = with_choice(*known, None, KERNEL, sizes, H200)
    assert same is known[1] and not no_doubt.any()


def test_only_kernels_that_exist_are_told_the_likeliest_by_its_tile_and_rest_together():
    """Of 40 kernels drawn from 9 tiles and 12 rests, against the sums of all, one by one."""
    generator = np.random.default_rng(3)
    tiles, rests = (np.unique(generator.integers(0, 9, (size, parts)), axis=0) for size, parts in ((9, 2), (12, 6)))
    pairs = generator.permutation([(a, b) for a in range(len(tiles)) for b in range(len(rests))])[:40]
    kernels = np.array([[*tiles[a], *rests[b]] for a, b in pairs])
    used = [np.unique(half, axis=0) for half in (kernels[:, :2], kernels[:, 2:])]
    size = sum(map(len, used))
    nothing, one = np.zeros(size, np.float32), np.ones(size, np.float32)
    network = Network(nothing, one, 0.0, 1.0, [(np.eye(size, dtype=np.float32), nothing)])
    matrix = generator.uniform(-4, 4, (900, size)).astype(np.float32)
    values = [{tuple(half): place for place, half in enumerate(halves.tolist())} for halves in used]
    # Of some rows one kernel stands out, by more and more.
    for place, row in enumerate(matrix[600:]):
        row -= (place / 300) * (row + 4)
        kernel = kernels[place % len(kernels)].tolist()
        row[[values[0][tuple(kernel[:2])], len(used[0]) + values[1][tuple(kernel[2:])]]] = 4.0
    (found, doubt), apart = Choice(network, kernels).told(matrix), 0
    for row, parts, unsure in zip(matrix, found, doubt, strict=True):
        sums = [row[values[0][tuple(k[:2])]] + row[len(used[0]) + values[1][tuple(k[2:])]] for k in kernels.tolist()]
        assert (parts == kernels[int(np.argmax(sums))]).all()
        best = [*used[0][row[: len(used[0])].argmax()], *used[1][row[len(used[0]) :].argmax()]]
        apart += best not in kernels.tolist()
        halves = np.split(row.astype(float), [len(used[0])])
        chance = np.prod([softmax(half).max() for half in halves]) if best in kernels.tolist() else 0.0
        assert unsure == sum(chance < edge for edge in DOUBT)
    assert apart > 100 and len(set(doubt.tolist())) == len(DOUBT) + 1


@pytest.mark.parametrize(("width", "first", "last"), [(436, 0, 283), (436, 283, 436), (25, 0, 1), (40, 3, 19), (40, 8, 40)])
@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
def test_compiled_loops_find_the_best_of_a_row_and_its_softmax(width, first, last, spread):
    """Against SciPy's, of numbers of values that are a multiple of what is looked at at once and not; of equal ones the first."""
    loops = compiled.loops()
    generator = np.random.default_rng(0)
    values = (spread * generator.standard_normal((257, width))).astype(np.float32)
    some = values[:, first:last]
    some[::7, -1], some[3::7, 0] = some[::7].max(axis=1), some[3::7].max(axis=1)
    place, chance = loops.best(values, first, last)
    np.testing.assert_array_equal(place, some.argmax(axis=1))
    np.testing.assert_allclose(chance, softmax(some.astype(float), axis=1).max(axis=1), rtol=1e-6)
    pairs, asked = generator.integers(0, width, (500, 2)).astype(np.int32), np.arange(3, 257, 5)
    pairs[400:] = pairs[:100]
    sums = values[asked][:, pairs[:, 0]] + values[asked][:, pairs[:, 1]]
    np.testing.assert_array_equal(loops.best_pair(values, asked, pairs), sums.argmax(axis=1))
    assert [len(part) for part in loops.best(values[:0], first, last)] == [0, 0]
    assert not len(loops.best_pair(values, asked[:0], pairs))


def test_compiled_loops_change_neither_kernel_nor_doubt(monkeypatch):
    """Of chances about the edges of doubt, where rounding decides on which side they are, and of any others."""
    kernels = np.array([[tile, 64, cluster, 0, 0, 0, 0, 0] for tile, cluster in ((64, 11), (64, 21), (128, 11))])
    nothing, one = np.zeros(4, np.float32), np.ones(4, np.float32)
    choice = Choice(Network(nothing, one, 0.0, 1.0, [(15 * np.eye(4, dtype=np.float32), nothing)]), kernels)
    generator = np.random.default_rng(7)
    matrix = generator.uniform(-0.4, 0.4, (5000, 4))
    # Of two tiles the first has a chance of 1 / (1 + exp(-15 x)); the rest is sure.
    edges = np.log([edge / (1 - edge) for edge in DOUBT]) / 15
    matrix[:4000] = [0.0, 0.0, 4.0, -4.0]
    matrix[:4000, 0] = generator.choice(edges, 4000) * (1 + generator.normal(0, 1e-7, 4000))
    found = choice.told(matrix)
    assert set(found[1][:4000].tolist()) == {0, 1, 2, 3} and len(np.unique(found[0], axis=0)) == 3
    monkeypatch.setattr(compiled, "worth_compiling", lambda rows: False)
    for by_loop, by_numpy in zip(found, choice.told(matrix), strict=True):
        np.testing.assert_array_equal(by_loop, by_numpy)


def test_saved_and_loaded_it_chooses_the_same(choice):
    generator = np.random.default_rng(0)
    matrix = generator.uniform(0, 20, (700, choice.network.mean.size))
    again = Choice.load(choice.save())
    for one, other in zip(again.told(matrix), choice.told(matrix), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (choice.told(matrix)[0][:, 0] == np.where(matrix[:, 0] > 10, 128, 64)).all()


@pytest.fixture
def experts(choice):
    """Below 1 in the second input nothing but the first kernel, above as `choice`."""
    one = choice.network
    weights, biases = np.zeros_like(one.layers[0][0]), np.array([5, 0, 0], dtype=np.float32)
    always = Network(one.mean, one.deviation, 0.0, 1.0, [(weights, biases)])
    return Choice(Experts(1, np.array([1.0], dtype=np.float32), [always, one]), choice.kernels)


def test_of_several_networks_each_row_asks_its_own(choice, experts):
    generator = np.random.default_rng(1)
    matrix = generator.uniform(0, 20, (1300, choice.network.inputs))
    matrix[:, 1] = generator.choice([0.0, 0.5, 1.0, 2.0], len(matrix))
    told, doubt = experts.told(matrix)
    below = matrix[:, 1] < 1
    theirs, doubts = choice.told(matrix[~below])
    np.testing.assert_array_equal(told[~below], theirs)
    np.testing.assert_array_equal(doubt[~below], doubts)
    assert (told[below, 0] == 64).all() and len(set(doubt[below].tolist())) == 1
    again = Choice.load(experts.save())
    for one, other in zip(again.told(matrix), (told, doubt), strict=True):
        np.testing.assert_array_equal(one, other)
    assert experts.told(matrix[below][:0])[0].shape == (0, len(PARTS))


def test_the_largest_calls_are_told_by_their_own(choice):
    powers = np.array([[13, 13, 13, 0], [14, 13, 13, 0], [15, 13, 13, 0], [20, 9, 6, 0], [10, 9, 10, 0], [10, 9, 19, 1]])
    m, n, k, groups = sizes = tuple(2.0**powers.T)
    matrix, work = asked(KERNEL, *sizes, H200), 2 * m * n * k * groups
    values = groups * np.maximum(m * k, np.maximum(n * k, m * n))
    apart = (work > LARGE_FLOP) | (values > LARGE_VALUES)
    # At an edge is not beyond it.
    assert apart.tolist() == [False, False, True, False, False, True] == are_largest(sizes).tolist()
    assert values[3] == LARGE_VALUES and 0.99 * LARGE_FLOP < work[1] < LARGE_FLOP > work[5]
    swapped = Choice(choice.network, choice.kernels[::-1])
    both = Choice(choice.network, choice.kernels, swapped)
    for of in (both, Choice.load(both.save())):
        told, doubt = of.told(matrix)
        for mine, whose in ((apart, swapped), (~apart, choice)):
            for one, other in zip((told, doubt), whose.told(matrix), strict=True):
                np.testing.assert_array_equal(one[mine], other[mine])
    assert Choice.load(choice.save()).largest is None


def test_experts_that_do_not_fit_together_are_refused(experts):
    document = json.loads(experts.save())
    network = document["network"]
    for wrong in (
        {"edges": []},
        {"edges": [1.0, 2.0]},
        {"column": -1},
        {"column": 10_000},
        {"networks": []},
        {"networks": [network["networks"][0], {**network["networks"][1], "arrays": network["networks"][1]["arrays"][:3]}]},
    ):
        with pytest.raises(ValueError, match="the choice is damaged"):
            Choice.load(json.dumps({**document, "network": {**network, **wrong}}).encode())


def test_a_damaged_one_is_refused(choice):
    document = json.loads(choice.save())
    for wrong in (
        {},
        [],
        {**document, "kernels": document["kernels"][:1]},
        {**document, "kernels": []},
        {**document, "kernels": [kernel[:5] for kernel in document["kernels"]]},
        {**document, "network": {}},
        {**document, "largest": {}},
        {**document, "largest": {**document, "kernels": []}},
    ):
        with pytest.raises(ValueError, match="the choice is damaged"):
            Choice.load(json.dumps(wrong).encode())


@pytest.mark.parametrize("kernel", ["torch/bf16", "torch/bf16_batched", KERNEL])
def test_what_is_asked_is_finite_and_knows_an_odd_size(kernel):
    sizes = tuple(np.array(x, dtype=float) for x in ([1, 255, 256, 257], [16] * 4, [64] * 4, [2] * 4))
    seen = asked(kernel, *sizes, H200)
    assert seen.dtype == np.float32 and np.isfinite(seen).all()
    assert len(np.unique(seen, axis=0)) == 4
