"""What a library chooses: kernels' names taken apart, what follows from them, and a network's word for it."""

import json
import math

import numpy as np
import pytest
from scipy.special import softmax

from perfmodel import compiled, hardware, opened
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
    sizes_in,
    vocabulary,
    with_choice,
)
from perfmodel.data_folder import data_folder
from perfmodel.features import features
from perfmodel.fits import (
    CONTEXT,
    NEVER,
    OF_TILE,
    Fits,
    Grid,
    add_worth_of_tiles,
    unlearned,
    worth_of_rests,
    worth_of_tiles,
)
from perfmodel.network import Experts, Network, in_half

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


def test_only_kernels_that_exist_are_told_the_likeliest_rest_of_the_likeliest_tile():
    """Of 40 kernels drawn from 9 tiles and 12 rests, against a search one by one."""
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
        of_tiles, of_rests = np.split(row.astype(float), [len(used[0])])
        tile = used[0][of_tiles.argmax()].tolist()
        there = [values[1][tuple(kernel[2:])] for kernel in kernels.tolist() if kernel[:2] == tile]
        rest = there[int(of_rests[there].argmax())]
        assert parts.tolist() == [*tile, *used[1][rest]]
        apart += rest != of_rests.argmax()
        chance = softmax(of_tiles).max() * softmax(of_rests[there]).max()
        assert unsure == sum(chance < edge for edge in DOUBT)
    assert apart > 100 and len(set(doubt.tolist())) == len(DOUBT) + 1


@pytest.fixture(scope="module")
def fitting() -> Choice:
    """Chooses by a drawn network, and by drawn worths of how tiles and clusters fit, among half of all pairs of them."""
    generator = np.random.default_rng(11)
    tiles = [(wide + kind, high) for wide in (64, 96, 176) for high in (8, 64, 192) for kind in (0, 1000)]
    rests = [(cluster, shared, 0, 1, 0, 0) for cluster in (11, 12, 41) for shared in (0, 2)]
    kernels = np.array([[*tile, *rest] for tile in tiles for rest in rests])
    kernels = kernels[np.sort(generator.permutation(len(kernels))[: len(kernels) // 2])]
    (tiles_used, tile), (rests_used, rest) = vocabulary(kernels)
    grid, exists = Grid.of(tiles_used, rests_used), np.zeros((len(tiles_used), len(rests_used)), dtype=bool)
    exists[tile, rest] = True
    fits = unlearned(grid, exists, H200.multiprocessors)
    for array in fits.arrays[:-1]:
        array[:] = in_half(2 * generator.standard_normal(array.shape))
    fits.pairs[exists] = in_half(generator.standard_normal(exists.sum()))
    inputs, values = asked(KERNEL, *columns(64, 64, 64, 1), H200).shape[1], exists.shape[0] + exists.shape[1] + CONTEXT
    weights = (generator.standard_normal((inputs, values)) / np.sqrt(inputs)).astype(np.float32)
    nothing, one = np.zeros(inputs, np.float32), np.ones(inputs, np.float32)
    return Choice(Network(nothing, one, 0.0, 1.0, [(weights, np.zeros(values, np.float32))]), kernels, fits)


def sizes_drawn(count: int) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(2)
    m, n, k = (np.floor(2 ** generator.uniform(3, 15, count)) for _ in range(3))
    return m, n, k, np.where(generator.random(count) < 0.3, np.floor(2 ** generator.uniform(0, 7, count)), 1.0)


def test_what_fits_are_worth_is_added_to_what_the_network_says(fitting):
    """Against the same by hand, in float64, one kernel after the other."""
    sizes = sizes_drawn(400)
    matrix = asked(KERNEL, *sizes, H200)
    told, doubt = fitting.told(matrix)
    (tiles, _), (rests, _) = vocabulary(fitting.kernels)
    fits, grid, existing = fitting.fits, fitting.grid, {tuple(kernel) for kernel in fitting.kernels.tolist()}
    wide, high, clusters = grid.wide.tolist(), grid.high.tolist(), [(1, 1), (1, 2), (4, 1)]
    assert grid.clusters.tolist() == [list(cluster) for cluster in clusters]
    chances, close = [], 0
    for row, parts, m, n, groups in zip(fitting.network.outputs(matrix).astype(float), told, *sizes[:2], sizes[3], strict=True):
        of_tiles, of_rests, own = np.split(row, [len(tiles), len(tiles) + len(rests)])
        for number, (tile_n, tile_m) in enumerate(tiles.tolist()):
            a, b = tile_n % 1000, tile_m
            across, down = math.ceil(n / a), math.ceil(m / b)
            waves = across * down * groups / H200.multiprocessors
            facts = [waves / math.ceil(waves), 1 / math.ceil(waves), n / (across * a), math.log2(across)]
            facts += [m / (down * b), math.log2(down)]
            worth = [*fits.tiles[number], *fits.across[wide.index(a)], *fits.down[high.index(b)]]
            of_tiles[number] += sum((w + c) * fact for w, c, fact in zip(worth, own, facts, strict=False))
        best = int(of_tiles.argmax())
        a, b = tiles[best, 0] % 1000, tiles[best, 1]
        for number, (cluster, *_) in enumerate(rests.tolist()):
            along_n, along_m = divmod(cluster, 10)
            across, down = math.ceil(n / a), math.ceil(m / b)
            whole_n, whole_m = (math.ceil(count / by) * by for count, by in ((across, along_n), (down, along_m)))
            waves = whole_n * whole_m * groups / H200.multiprocessors
            facts = [across / whole_n, down / whole_m, math.log2(math.ceil(waves)), waves / math.ceil(waves)]
            worth = fits.clusters[clusters.index((along_n, along_m))]
            of_rests[number] += sum((w + c) * fact for w, c, fact in zip(worth, own[OF_TILE:], facts, strict=True))
            of_rests[number] += fits.pairs[best, number]
            assert (fits.pairs[best, number] == NEVER) == ((*tiles[best], *rests[number]) not in existing)
        if min(np.diff(np.sort(half)[-2:])[0] for half in (of_tiles, of_rests)) < 1e-3:
            close += 1
        else:
            assert parts.tolist() == [*tiles[best], *rests[of_rests.argmax()]]
        chances.append(softmax(of_tiles).max() * softmax(of_rests).max())
    assert close < 10 and len(np.unique(told, axis=0)) > 8
    np.testing.assert_array_equal(doubt, (np.array(chances)[:, None] < DOUBT).sum(axis=1))


def test_fits_are_worth_the_same_by_compiled_loops_tensors_and_once_saved(fitting, monkeypatch):
    matrix = asked(KERNEL, *sizes_drawn(3000), H200)
    assert compiled.loops() is not None
    by_loops = fitting.told(matrix)
    sizes, generator = sizes_in(matrix[:, :4]), np.random.default_rng(0)
    context = generator.standard_normal((len(matrix), CONTEXT)).astype(np.float32)
    values = generator.standard_normal((len(matrix), len(fitting.grid.tile_wide) + 7)).astype(np.float32)
    added = values.copy()
    add_worth_of_tiles(added, sizes, fitting.grid, fitting.fits, context)
    worth = worth_of_tiles(np, sizes, fitting.grid, fitting.fits, context)
    np.testing.assert_array_equal(added[:, :-7], values[:, :-7] + worth)
    np.testing.assert_array_equal(added[:, -7:], values[:, -7:])
    tile = generator.integers(0, worth.shape[1], len(matrix))
    rest = worth_of_rests(np, sizes, fitting.grid, fitting.fits, context, tile)
    monkeypatch.setattr(compiled, "worth_compiling", lambda rows: False)
    add_worth_of_tiles(values, sizes, fitting.grid, fitting.fits, context)
    np.testing.assert_array_equal(values, added)
    for again in (fitting, Choice.load(fitting.save())):
        for one, other in zip(again.told(matrix), by_loops, strict=True):
            np.testing.assert_array_equal(one, other)
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(part) for part in (*sizes, context, tile)]
    grid = fitting.grid.of_arrays(torch.from_numpy)
    fits = Fits.of_arrays(H200.multiprocessors, [torch.from_numpy(array) for array in fitting.fits.arrays])
    found = worth_of_tiles(torch, tuple(tensors[:3]), grid, fits, tensors[3])
    np.testing.assert_allclose(found.numpy(), worth, rtol=1e-5, atol=1e-4)
    found = worth_of_rests(torch, tuple(tensors[:3]), grid, fits, *tensors[3:])
    np.testing.assert_allclose(found.numpy(), rest, rtol=1e-5, atol=1e-4)


def test_fits_of_other_kernels_are_refused(fitting):
    document = json.loads(fitting.save())
    for kernels in (document["kernels"][len(document["kernels"]) // 2 :], [[*fitting.kernels[0]]]):
        with pytest.raises(ValueError, match="damaged"):
            Choice.load(json.dumps({**document, "kernels": np.array(kernels).tolist()}).encode())
    del document["fits"]
    with pytest.raises(ValueError, match="damaged"):
        Choice.load(json.dumps(document).encode())


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
    assert [len(part) for part in loops.best(values[:0], first, last)] == [0, 0]


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
    both = Choice(choice.network, choice.kernels, largest=swapped)
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


def test_older_kernels_of_another_layout_are_told_as_those_of_k_fastest():
    """They differ in how operands lie alone; Hopper's own, whose results are stored transposed or not, stay as they are."""
    choice = opened.choice(data_folder() / "h200" / "models", "torch/bf16_column_row")
    said, own = choice.as_k_fastest.said, choice.kernels
    layout, kinds = PARTS.index("layout"), own[:, 0] // 1000
    assert (said[np.isin(kinds, (1, 2, 3)), layout] == 1).all() and (own[np.isin(kinds, (1, 2, 3)), layout] == 0).any()
    assert np.array_equal(np.delete(said, layout, axis=1), np.delete(own, layout, axis=1))
    assert np.array_equal(said[kinds == 0], own[kinds == 0])
    sizes = tuple(np.array(values, dtype=float) for values in ([7, 2048], [15, 1024], [3200, 4096], [1, 1]))
    matrix = asked("torch/bf16", *sizes, H200)
    (parts, doubt), (plain, same) = choice.as_k_fastest.told(matrix), choice.told(matrix)
    assert np.array_equal(doubt, same) and parts[0, layout] == 1 and plain[0, layout] == 0 and np.array_equal(parts[1], plain[1])
