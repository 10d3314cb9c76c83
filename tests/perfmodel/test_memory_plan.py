"""Plans of memory-bound launches against torch's own rule and the launches that our kernels make."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from perfmodel.memory_plan import launches, partial_sums, plan, run_height, stages

H200 = SimpleNamespace(multi_processor_count=132, warp_size_or_default=32, max_threads_per_multi_processor=2048, major=9)


@pytest.fixture
def rule(monkeypatch):
    """torch's own rule, told that the device is an H200."""
    from torch._inductor import choices

    monkeypatch.setattr(choices.DeviceProperties, "create", lambda device: H200)
    return choices.InductorChoices.reduction_split_factor


def planned(kernel, m, k):
    return {name: float(values[0]) for name, values in plan(kernel, np.array([float(m)]), np.array([float(k)])).items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_reductions_are_cut_as_torch_cuts_them(rule):
    generator = np.random.default_rng(0)
    cut = 0
    for _ in range(300):
        m = int(2 ** generator.uniform(0, 19)) * int(generator.choice((1, 3, 16)))
        k = int(generator.choice((1, 13, 64, 100, 480, 512, 3072, 8192, 12288, 20000)))
        total = planned("torch/quantize_tensorwise", m, k)
        assert total["all_parts"] == rule("cuda", m * k, 1, True), (m, k)
        assert total["all_even"] == (m * k % int(total["all_parts"]) == 0)
        down = planned("torch/bias_backward", m, k)["down_parts"]
        # ir.Reduction.num_splits leaves these whole before it asks for the rule.
        assert down == (1 if m <= 32 or k >= 132 * 64 else rule("cuda", m, k, False)), (m, k)
        along = planned("torch/rmsnorm_forward", m, k)["along_parts"]
        assert along == (1 if k <= 32 else rule("cuda", k, m, True)), (m, k)
        cut += down > 1
    assert cut > 50


class Recorded:
    """Stands in for a Triton kernel: keeps the grid of its launch."""

    grid = None

    def __getitem__(self, grid):
        self.grid = grid
        return self.launched

    def launched(self, *arguments, **options):
        self.arguments, self.options = arguments, options


def moved_apart(kernel):
    """How far a recorded launch moves words by themselves: those that are known to lie together, four at most, of two columns."""
    return 1 - math.log2(min(kernel.options["UNIT"], 4)) / 2


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(384, 16), (464, 16), (432, 32), (1000, 96), (3, 2), (64, 8192), (17, 16384), (99, 12), (99, 18), (99, 24)],
)
def test_runs_are_launched_as_planned(monkeypatch, rows, columns):
    from numerics import gpu_words
    from numerics.gpu_constants import constants_of
    from numerics.recipe import Recipe

    kernel = Recorded()
    monkeypatch.setattr(gpu_words, "runs_kernel", kernel)
    recipe, x = Recipe.parse("e4m3/rowwise"), torch.zeros(rows, columns, dtype=torch.bfloat16)
    codes = torch.zeros(rows, columns, dtype=torch.uint8)
    gpu_words.quantize(x, recipe, codes, torch.zeros(rows, 1), None, constants_of(recipe, False, False))
    known = planned("loka/quantize_rowwise", rows, columns)
    assert (known["programs"],) == kernel.grid and bool(known["even"]) == kernel.options["EVEN"]
    assert known["unmasked"] == (1 if kernel.options["EVEN"] else 1 - moved_apart(kernel))
    assert kernel.arguments[5] * kernel.options["UNIT"] == columns // 2


@pytest.mark.parametrize("size", [1, 2, 48, 96, 1000, 5 * 6045, 8192, 479 * 7616 + 16, 10556000, 17210232])
@pytest.mark.parametrize("delayed", [False, True])
def test_flat_tensors_are_read_by_vectors_as_planned(monkeypatch, size, delayed):
    """Triton takes a kernel's whole number for one that vectors divide where 16 divides it: of words, of values."""
    from numerics import gpu, gpu_meeting
    from numerics.recipe import Recipe

    flat, words = Recorded(), Recorded()
    monkeypatch.setattr(gpu.kernels, "flat_kernel", flat)
    monkeypatch.setattr(gpu.kernels, "amax_kernel", Recorded())
    monkeypatch.setattr(gpu_meeting, "flat_kernel", words)
    monkeypatch.setattr(gpu_meeting, "place_of", lambda device: x)
    monkeypatch.setattr(gpu, "converts", lambda device: True)
    x, amax = torch.zeros(1, size, dtype=torch.bfloat16), torch.zeros((), dtype=torch.float32)
    given, raised = (amax, amax.clone()) if delayed else (None, None)
    codes = torch.zeros(1, size, dtype=torch.uint8)
    gpu._launch(x, Recipe.parse("e4m3/tensorwise"), given, torch.zeros(()), codes, None, None, raised)
    known = planned("loka/quantize_tensorwise" + "_delayed" * delayed, 1, size)
    assert (words.grid is None) == (delayed or bool(known["odd"]))
    number = next(a for a in (flat if words.grid is None else words).arguments if isinstance(a, int))
    assert number == (size if words.grid is None else size // 2)
    assert bool(known["by_word"]) == bool(number % 16)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_rows_that_four_does_not_divide_are_copied_as_planned(monkeypatch, scaling):
    from numerics import gpu, gpu_dual
    from numerics.recipe import Recipe

    quantized = []
    monkeypatch.setattr(gpu, "supports", lambda x, recipe: True)
    monkeypatch.setattr(gpu, "quantize_into", lambda x, *given, **options: quantized.append(x) or True)
    monkeypatch.setattr(gpu_dual, "_launch", lambda x, *given: quantized.append(None) or True)
    recipe = Recipe.parse(f"e4m3/{scaling}")
    for rows in (478, 480):
        x = torch.zeros(rows, 64, dtype=torch.bfloat16)
        known = planned(f"loka/quantize_{scaling}_transposed", rows, 64)
        gpu_dual.quantize_turned(x, recipe, check=False)
        gpu_dual.quantize_dual(x, recipe, check=False)
        alone, *both = [None if y is None else (tuple(y.shape), y.is_contiguous()) for y in quantized]
        turned = ((64, rows), False)
        assert (alone, both) == ((turned, [((rows, 64), True), turned]) if known["copied"] else (None, [None]))
        quantized.clear()


@pytest.mark.parametrize(("rows", "columns"), [(16, 6144), (3584, 12288), (156096, 4), (2432, 80), (8192, 16384), (524288, 256)])
def test_strips_are_shared_as_planned(monkeypatch, rows, columns):
    from numerics import gpu_meeting, gpu_strips

    kernel = Recorded()
    monkeypatch.setattr(gpu_strips, "columns_kernel", kernel)
    monkeypatch.setattr(gpu_meeting, "resident", lambda device, each: each * 132)
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(gpu_meeting, "place_of", lambda device: x)
    turned = torch.empty(columns, rows, dtype=torch.uint8, device="meta")
    assert gpu_strips.quantize_columns(x, turned, None, None, None)
    known = planned("loka/quantize_rowwise_transposed", rows, columns)
    assert known["members"] == kernel.options["MEMBERS"]
    assert min(known["programs"], 4 * 132) == kernel.grid[0] and known["by_word"] == moved_apart(kernel)


def test_launches_of_a_call():
    names = ["torch/relu_forward", "torch/quantize_tensorwise", "torch/quantize_tensorwise", "x/y"]
    assert launches(names, [4096, 8, 4096, 1], [1024, 64, 4096, 1]).tolist() == [1, 1, 3, 1]


@pytest.mark.parametrize(
    ("kernel", "rows", "columns", "expected"),
    [
        ("rowwise_dual", 2048, 4096, 2), ("rowwise_dual", 2052, 4096, 3), ("rowwise_dual", 8192, 130, 2),
        ("rowwise_dual", 8196, 130, 3), ("rowwise_dual", 100, 8194, 3),
        ("block1x128_dual", 256, 384, 1), ("block1x128_transposed", 256, 384, 1),
    ],
)  # fmt: skip
def test_tiles_are_launched_as_planned(monkeypatch, kernel, rows, columns, expected):
    from numerics import gpu, gpu_dual, gpu_pairs, gpu_tiles
    from numerics.recipe import Recipe

    recorded = [Recorded() for _ in range(4)]
    for module, name, kernel_of in zip(
        (gpu_tiles, gpu_tiles, gpu_pairs, gpu),
        ("search_kernel", "cast_kernel", "pair_kernel", "line_amax_kernel"),
        recorded,
        strict=True,
    ):
        monkeypatch.setattr(module, name, kernel_of)
    monkeypatch.setattr(gpu, "line_scale_kernel", Recorded())
    monkeypatch.setattr(gpu, "converts", lambda device: True)
    x = torch.zeros(rows, columns, dtype=torch.bfloat16)
    turned, scaling = torch.zeros(columns, rows, dtype=torch.uint8), kernel.partition("_")[0]
    codes, every = (
        (torch.zeros(rows, columns, dtype=torch.uint8) if kernel.endswith("dual") else None),
        torch.zeros(rows + columns),
    )
    recipe = Recipe.parse(f"e4m3/{scaling}")
    gpu_dual._launch(x, recipe, gpu_pairs.Outputs(codes, turned, every[:rows], every[rows:], None), every)
    known = planned(f"loka/quantize_{kernel}", rows, columns)
    search, cast, pairs, amax = ([] if used.grid is None else [used.grid] for used in recorded)
    assert launches([f"loka/quantize_{kernel}"], [rows], [columns]).tolist() == [expected]
    assert (cast or pairs) == [(known["programs"],)]
    assert bool(search) == (expected == 2) and bool(pairs) == bool(amax) == (expected == 3)
    assert known["by_word"] == moved_apart(recorded[1 if cast else 2])


@pytest.mark.parametrize(("rows", "columns"), [(64, 13), (192, 13), (3, 27), (4096, 127), (5, 6045), (262144, 1), (1, 2275)])
def test_odd_rows_are_taken_together_as_planned(monkeypatch, rows, columns):
    from numerics import gpu
    from numerics.recipe import Recipe

    kernel = Recorded()
    monkeypatch.setattr(gpu.kernels, "group_kernel", kernel)
    monkeypatch.setattr(gpu, "converts", lambda device: True)
    x, recipe = torch.zeros(rows, columns, dtype=torch.bfloat16), Recipe.parse("e4m3/rowwise")
    gpu._launch(x, recipe, None, torch.zeros(rows, 1), torch.zeros(rows, columns, dtype=torch.uint8), None, None, None)
    assert run_height(np.array([rows]), np.array([columns])).tolist() == [kernel.options["ROWS"]]
    assert (planned("loka/quantize_rowwise", rows, columns)["programs"],) == kernel.grid


def test_only_rows_that_no_vector_reads_whole_cost_by_their_height():
    from perfmodel import hardware
    from perfmodel.memory_costs import terms

    columns = np.array([13.0, 15.0, 26.0, 100.0, 64.0, 512.0, 4096.0])
    found = terms("loka/quantize_rowwise", np.full(7, 1000.0), columns, hardware.load("h200"))
    by_kind = {kind: sum(found[name] for name in found if name.startswith(f"{kind}_height")) > 0 for kind in ("odd", "words")}
    assert by_kind["odd"].tolist() == [True, True, False, False, False, False, False]
    assert by_kind["words"].tolist() == [False, False, True, True, False, False, False]


def test_kernels_of_reductions():
    """A sum over the batch of 16 columns of 24,576 is cut, and one kernel adds up the parts of each of its results."""
    kinds = ["pointwise", "row", "column", "column", "column"]
    found = stages(kinds, [4096, 4096, 16, 16, 40000], [1, 64, 24576, 24576, 24576], [8192, 8192, 32, 64, 80000])
    assert found.tolist() == [1, 1, 2, 3, 1]


@pytest.mark.parametrize(
    ("rows", "columns", "written", "parts", "sums"),
    [  # of torch.compile's code for steps of Wukong and InterFormer (torch 2.11): `workspace.view(parts, columns).sum(dim=0)`
        (6144, 1920, 2 * 6144 * 1920 + 2 * 2 * 1920, 384, 2),
        (6144, 1920, 3 * 6144 * 1920 + 2 * 2 * 1920, 384, 2),
        (491520, 32, 4 * 491520 * 32 + 2 * 2 * 32, 3840, 2),
        (139264, 96, 2 * 139264 * 96 + 2 * 3 * 96, 1088, 3),
    ],
)
def test_sums_of_both_ways_leave_as_many_parts_as_torch_compile_says(rows, columns, written, parts, sums):
    assert [found.tolist() for found in partial_sums([rows], [columns], [written])] == [[parts], [sums]]


def test_rows_of_a_part_are_torch_compiles():
    inductor = pytest.importorskip("torch._inductor.runtime.runtime_utils")
    rows = [4096, 10_000, 33_791, 33_792, 67_583, 67_584, 131_072, 135_168, 1_000_000]
    each = [min(max(inductor.last_power_of_2(count // (132 * 8)), 16), 128) for count in rows]
    assert partial_sums(rows, [64] * 9, [128] * 9)[0].tolist() == [-(-count // of) for count, of in zip(rows, each, strict=True)]
