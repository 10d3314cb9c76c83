"""What an assignment launches, against launches written down by hand."""

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from loka_sim.dispatch.candidates import Row, SiteShape, illegal, launches, legal_fp8, possible_rows, shared_tensors
from loka_sim.dispatch.decide import flat
from loka_sim.dispatch.operands import Toolbox
from loka_sim.modelspec import Dim, Gemm, Site, linear_passes
from loka_sim.resolve import resolve_model
from loka_sim.zoo import NAMES
from perfmodel.kernels import KERNELS

M, N, K = 2048, 512, 1024
TENSOR_FAST, TENSOR_SPLIT = "torch/fp8_tensorwise_fast", "torch/fp8_tensorwise_split"
ROW_FAST, BLOCK, BF16 = "torch/fp8_rowwise_fast", "torch/fp8_block128", "torch/bf16"
IN_BF16 = {"output": BF16, "grad_input": "torch/bf16_row_row", "grad_weight": "torch/bf16_column_row"}


def linear(m=M, n=N, k=K, **site):
    return Site("layer", "linear", linear_passes(Dim(0, m), Dim(n), Dim(k)), weight="layer.weight", **site)


SHAPE = SiteShape.of(linear(m=1), M)

X, W, G = (M, 1, K), (N, 1, K), (M, 1, N)
GEMMS = {"output": (M, N, K), "grad_input": (M, K, N), "grad_weight": (N, K, M)}


def launched(assignment):
    rows = Counter((row.kernel.partition("/")[2], row.m, row.n, row.k) for row in flat(launches(SHAPE, assignment)))
    gemms = {name: IN_BF16[name] if kernel == BF16 else kernel for name, kernel in assignment.items()}
    return rows - Counter((kernel.partition("/")[2], *GEMMS[name]) for name, kernel in gemms.items())


@pytest.mark.parametrize("model", NAMES)
def test_in_bf16_a_pass_reads_its_operands_as_they_were_captured(model):
    """Against the strides that the captured call itself had."""
    spec = resolve_model(model)
    seen = Counter()
    for site in spec.sites:
        shape = SiteShape.of(site, spec.batch)
        for name, gemm in site.passes.items():
            if gemm.shape(spec.batch)[0] > 1:
                layout = gemm.layout_a, gemm.layout_b
                m, n, k = gemm.shape(spec.batch)
                if site.bias and name == "output" and n > 1 and k > 1:
                    layout = (*layout, "bias")
                assert shape.layout(name) == layout
                assert shape.row(name, BF16) == shape.row(name, "torch/bf16_batched")
                assert KERNELS[shape.row(name, BF16).kernel].layout == layout
                seen[layout] += 1
    assert len(seen) >= 4


def test_shapes_of_the_three_passes():
    assert {name: SHAPE.gemm(name)[:3] for name in SHAPE.names} == GEMMS
    assert [SHAPE.tensor(tensor) for tensor in "xwg"] == [(M, K), (N, K), (M, N)]


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ({"output": BF16, "grad_input": BF16, "grad_weight": BF16}, {}),
        (
            {"output": TENSOR_FAST, "grad_input": BF16, "grad_weight": BF16},
            {("quantize_tensorwise", *X): 1, ("quantize_tensorwise", *W): 1},
        ),
        # x, w and g are each quantized once and read a second time through a transposition.
        (
            {"output": TENSOR_FAST, "grad_input": TENSOR_SPLIT, "grad_weight": TENSOR_FAST},
            {(kernel, *tensor): 1 for tensor in (X, W, G) for kernel in ("quantize_tensorwise", "transpose_e4m3")},
        ),
        # grad_weight alone: both operands are needed transposed only.
        (
            {"output": BF16, "grad_input": BF16, "grad_weight": TENSOR_SPLIT},
            {("quantize_tensorwise_transposed", *G): 1, ("quantize_tensorwise_transposed", *X): 1},
        ),
        (
            {"output": TENSOR_SPLIT, "grad_input": BF16, "grad_weight": TENSOR_FAST},
            {("quantize_tensorwise", *X): 1, ("transpose_e4m3", *X): 1, ("quantize_tensorwise", *W): 1,
             ("quantize_tensorwise_transposed", *G): 1},
        ),
        # Row scales belong to one direction: nothing is shared.
        (
            {"output": ROW_FAST, "grad_input": ROW_FAST, "grad_weight": ROW_FAST},
            {(kernel, *tensor): 1 for tensor in (X, W, G) for kernel in ("quantize_rowwise", "quantize_rowwise_transposed")},
        ),
        # Block: x is left (1x128) in output and right (128x128) in grad_weight; only w keeps its side.
        (
            {"output": BLOCK, "grad_input": BLOCK, "grad_weight": BLOCK},
            {("quantize_block1x128", *X): 1, ("quantize_block128x128", *W): 1, ("transpose_e4m3", *W): 1,
             ("quantize_block1x128", *G): 1, ("quantize_block1x128_transposed", *G): 1,
             ("quantize_block128x128_transposed", *X): 1},
        ),
        # Different scalings share nothing.
        (
            {"output": TENSOR_FAST, "grad_input": BF16, "grad_weight": ROW_FAST},
            {("quantize_tensorwise", *X): 1, ("quantize_tensorwise", *W): 1, ("quantize_rowwise_transposed", *G): 1,
             ("quantize_rowwise_transposed", *X): 1},
        ),
    ],
)  # fmt: skip
def test_quantization_by_hand(assignment, expected):
    assert launched(assignment) == Counter(expected)


def test_each_launch_stands_under_the_pass_that_reads_its_result():
    rows = launches(SHAPE, {"output": TENSOR_FAST, "grad_input": TENSOR_FAST, "grad_weight": TENSOR_FAST})
    assert rows["output"][1:] == (Row("torch/quantize_tensorwise", *X), Row("torch/quantize_tensorwise", *W))
    assert set(rows["grad_input"][1:]) == {Row("torch/quantize_tensorwise", *G), Row("torch/transpose_e4m3", *W)}
    assert set(rows["grad_weight"][1:]) == {Row("torch/transpose_e4m3", *G), Row("torch/transpose_e4m3", *X)}


def test_a_weight_stored_transposed_needs_the_other_quantizer():
    output = Gemm(Dim(M), Dim(N), Dim(K), layout_b="row")
    shape = SiteShape.of(Site("m", "mm", {"output": output}), 1)
    rows = flat(launches(shape, {"output": ROW_FAST}))
    assert Row("torch/quantize_rowwise_transposed", K, 1, N) in rows
    assert Row("torch/quantize_rowwise", M, 1, K) in rows


def test_shared_tensors_are_named():
    both = {"output": TENSOR_FAST, "grad_input": BF16, "grad_weight": TENSOR_SPLIT}
    assert shared_tensors(SHAPE, both, "output") == ("x",)
    assert shared_tensors(SHAPE, {**both, "grad_weight": ROW_FAST}, "output") == ()


@pytest.mark.parametrize(
    ("shape", "name", "kernel", "words"),
    [
        ((2048, 1, 512), "output", TENSOR_FAST, "N = 1 is no multiple of 16"),
        ((2047, 512, 512), "grad_weight", TENSOR_FAST, "K = 2047 is no multiple of 16"),
        ((2048, 512, 96), "output", BLOCK, "K = 96 is no multiple of 128"),
        ((2064, 512, 512), "grad_weight", BLOCK, "K = 2064 is no multiple of 128"),
    ],
)
def test_illegal_says_why(shape, name, kernel, words):
    found = illegal(SiteShape.of(linear(*shape), 1), name, kernel)
    assert found is not None and words in found


def test_hardware_without_fp8_has_no_legal_kernel():
    assert legal_fp8(SHAPE, "output", Toolbox.of(("torch", "loka"), capability=(8, 0))) == ()


def batched(groups=128, **layouts):
    return SiteShape.of(Site("attention", "bmm", {"output": Gemm(Dim(64), Dim(48), Dim(32), Dim(0, 1), **layouts)}), groups)


def test_batched_products_are_quantized_as_the_rows_of_all_groups():
    assert legal_fp8(batched(), "output") == ("torch/fp8_grouped_rowwise_fast", "torch/fp8_grouped_rowwise_split")
    assert "no batched form" in (illegal(batched(), "output", TENSOR_FAST) or "")
    assert flat(launches(batched(), {"output": "torch/fp8_grouped_rowwise_fast"})) == (
        Row("torch/fp8_grouped_rowwise_fast", 64, 48, 32, 128),
        Row("torch/quantize_rowwise", 128 * 64, 1, 32),
        Row("torch/quantize_rowwise", 128 * 48, 1, 32),
    )
    assert {row.groups for row in possible_rows(batched())} == {1, 128}


def test_batched_products_that_no_quantizer_serves_stay_in_bf16():
    assert "1024 groups are more than 1023" in (illegal(batched(1024), "output", "torch/fp8_grouped_rowwise_fast") or "")
    turned = batched(layout_b="row")
    assert "w is read transposed in each of 128 groups" in (illegal(turned, "output", "torch/fp8_grouped_rowwise_fast") or "")
    assert possible_rows(turned) == {Row("torch/bf16_batched_row_row", 64, 48, 32, 128)}


def test_possible_rows_come_in_one_order_in_every_process():
    """Strings' hashes, and so sets', are each process' own."""
    code = (
        "from loka_sim.dispatch.candidates import SiteShape, possible_rows\n"
        "from loka_sim.modelspec import Dim, Site, linear_passes\n"
        "site = Site('a', 'linear', linear_passes(Dim(0, 1), Dim(512), Dim(256)), weight='a.weight')\n"
        "print(*possible_rows(SiteShape.of(site, 2048)), sep='|')"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(told) == 1 and "fp8" in told.pop()


def test_possible_rows_covers_every_legal_assignment():
    from itertools import product

    known = possible_rows(SHAPE)
    for kernels in product(*((BF16, *legal_fp8(SHAPE, name)) for name in SHAPE.names)):
        assert set(flat(launches(SHAPE, dict(zip(SHAPE.names, kernels, strict=True))))) <= known


def test_sizes_of_equal_remainders_are_legal_alike():
    """What is worked out for the least size of a kind holds for every size of it, whatever the kernels and the layout."""
    rng = np.random.default_rng(5)
    several = Toolbox.of(("torch", "loka", "fbgemm", "deepgemm"))
    checked = Counter()
    for number in range(120):
        step = (1, 4, 16, 128)[number % 4]
        m, n, k = (step * int(size) for size in rng.integers(1, 40, 3))
        groups = 1 if number % 5 else int(rng.integers(2, 2000))
        passes = (("output", m, n, k, groups), ("grad_input", m, k, n, groups), ("grad_weight", n, k, m, groups))
        stored = frozenset(tensor for tensor in "xwg" if rng.random() < 0.3)
        shape = SiteShape(passes, stored)
        rows = set()
        for name in shape.names:
            legal = tuple(kernel for kernel in several.gemms if illegal(shape, name, kernel, several) is None)
            assert legal_fp8(shape, name, several) == legal
            checked[len(legal) > 0] += 1
            for kernel in legal:
                rows.update(flat(launches(shape, {name: kernel}, several)))
        assert rows <= possible_rows(shape, several)
    assert min(checked[True], checked[False]) > 50
