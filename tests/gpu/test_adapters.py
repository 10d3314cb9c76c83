"""Other libraries' kernels on a Hopper GPU: right on fresh shapes and fresh scales; the absent ones are skipped, named."""

import random

import pytest
import torch

from hil.collect import COLUMNS
from hil.kernels import fbgemm, torch_grouped
from hil.kernels.availability import availability
from hil.kernels.base import E4M3, Shape, product_error
from hil.kernels.deepgemm import DEEPGEMM_RUNNERS
from hil.kernels.fbgemm import FBGEMM_RUNNERS
from hil.kernels.torch_grouped import GROUPED_RUNNERS
from hil.kernels.torchao_linear import TORCHAO_RUNNERS
from hil.kernels.transformer_engine import TE_RUNNERS
from hil.measure import measure_shape
from hil.timing import BufferPool
from perfmodel.kernels import KERNELS

ADAPTERS = {
    runner.name: runner for runner in (*FBGEMM_RUNNERS, *DEEPGEMM_RUNNERS, *GROUPED_RUNNERS, *TORCHAO_RUNNERS, *TE_RUNNERS)
}


@pytest.fixture(scope="module")
def pool() -> BufferPool:
    return BufferPool(elements=2**27)


def need(name: str) -> None:
    verdict = availability(KERNELS[name])
    if not verdict.available:
        pytest.skip(f"{name}: {verdict.reason}")


def fresh_shapes(name: str) -> list[Shape]:
    """One at the edge of what is legal and small, one larger."""
    draw, spec = random.SystemRandom(), KERNELS[name]
    m, n, k = spec.multiple_m, spec.multiple_n, spec.multiple_k
    # FBGEMM reads four columns at once.
    if spec.kind == "quantize":
        return [Shape(draw.randint(1, 300), 1, 4 * draw.randint(1, 120)), Shape(draw.randint(1000, 5000), 1, 1024)]
    groups = [draw.randint(2, 40), draw.randint(100, 300)] if spec.kind == "batched_gemm" else [1, 1]
    if spec.kind == "linear":
        m = n = k = 16
    return [
        Shape(m * draw.randint(1, 20), n * draw.randint(1, 5), k * draw.randint(1, 5), groups[0]),
        Shape(128 * draw.randint(1, 2), 128 * draw.randint(1, 3), 128 * draw.randint(1, 4), groups[1])
        if groups[1] > 1
        else Shape(128 * draw.randint(4, 24), 128 * draw.randint(4, 12), 128 * draw.randint(4, 12)),
    ]


@pytest.mark.parametrize("name", ADAPTERS)
def test_results_against_fp64_on_fresh_shapes(name, pool):
    need(name)
    runner = ADAPTERS[name]
    for shape in fresh_shapes(name):
        torch._dynamo.reset()
        launch = runner.bind(shape, pool)
        error = runner.error(shape, pool, launch(0))
        assert error <= runner.limit, f"{name} on {shape}: {error}"
        if KERNELS[name].kind != "quantize":
            other = runner.error(shape, pool, launch(1))
            assert other > runner.limit, f"{name} on {shape}: other operands' result passes with {other}"


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(E4M3)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda").add(0.1).pow(3)


FBGEMM_MULTIPLY = {
    "fbgemm/fp8_rowwise_fast": (fbgemm.rowwise, False),
    "fbgemm/fp8_rowwise_split": (lambda *operands: fbgemm.rowwise(*operands, fast=False), False),
    "fbgemm/fp8_block128": (fbgemm.block128, True),
}


@pytest.mark.parametrize("name", FBGEMM_MULTIPLY)
def test_fbgemm_scales_apply_where_they_should(name, pool):
    need(name)
    multiply, block = FBGEMM_MULTIPLY[name]
    shape = Shape(384, 256, 640)
    ADAPTERS[name].bind(shape, pool)
    a, b = drawn(shape.m, shape.k), drawn(shape.n, shape.k)
    scale_a, scale_b = (scales(*size) for size in fbgemm.scale_shapes(shape, block))
    got = multiply(a, b, scale_a, scale_b)
    meant = []
    for codes, scale in ((a, scale_a), (b, scale_b)):
        full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if block else scale[:, None]
        meant.append(codes.double() * full.double())
    assert got.dtype is torch.bfloat16
    assert product_error(got, *meant) < 0.01


@pytest.mark.parametrize("fast", [True, False])
def test_grouped_scales_apply_where_they_should(fast):
    a, b = drawn(5, 48, 96), drawn(5, 80, 96)
    scale_a, scale_b = scales(5, 48), scales(5, 80)
    got = torch_grouped.multiply(a, b, scale_a, scale_b, fast)
    for group in range(5):
        left, right = a[group].double() * scale_a[group, :, None], b[group].double() * scale_b[group, :, None]
        assert product_error(got[group], left, right) < 0.01


def test_converted_layers_run_in_fp8(pool):
    """A layer that silently stayed in bf16 would pass every check of its error, being too good."""
    shape, errors = Shape(1024, 512, 768), {}
    for runner in TORCHAO_RUNNERS:
        need(runner.name)
        torch._dynamo.reset()
        errors[runner.name] = runner.error(shape, pool, runner.bind(shape, pool)(0))
    assert errors.pop("torch/linear_bf16") < 0.005
    assert all(0.02 < error < 0.1 for error in errors.values()), errors


def test_a_measured_row_has_every_column(pool):
    names = [name for name in ADAPTERS if KERNELS[name].kind == "gemm" and availability(KERNELS[name]).available]
    if not names:
        pytest.skip("no other library's GEMM is here")
    for row in measure_shape(Shape(256, 256, 256), [ADAPTERS[name] for name in names], pool):
        assert set(row) == set(COLUMNS) - {"sweep"}
        assert 0 < row["least_us"] <= row["p10_us"] <= row["p50_us"] <= row["p90_us"] <= row["most_us"]
        # So small a kernel takes less time than it takes to call it.
        assert row["p50_us"] < row["eager_us"] < 1000
        assert 10 < row["temperature_c"] < 100
