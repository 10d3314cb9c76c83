"""The real kernels on a Hopper GPU: right results on fresh shapes, and legality that says what the hardware says."""

import random

import pytest
import torch

from hil.kernels import RUNNERS
from hil.kernels.base import Shape
from hil.timing import BufferPool, capture, time_interleaved
from perfmodel import GEMM_KERNELS, KERNELS
from perfmodel.kernels import library_of

# Our own and other libraries' kernels, grouped ones and whole layers have tests of their own.
OF_TORCH = [name for name in RUNNERS if library_of(name) == "torch" and "grouped" not in name and KERNELS[name].kind != "linear"]


@pytest.fixture(scope="module")
def pool() -> BufferPool:
    return BufferPool(elements=2**27)


@pytest.mark.parametrize("name", OF_TORCH)
def test_result_against_fp64_on_fresh_shapes(name, pool):
    draw = random.SystemRandom()
    spec, runner = KERNELS[name], RUNNERS[name]
    for _ in range(2):
        m, n, k = (128 * draw.randint(1, 24) for _ in range(3))
        shape = Shape(m, n, k) if "gemm" in spec.kind else Shape(m, 1, 256 * draw.randint(1, 8))
        if spec.kind == "batched_gemm":
            shape = Shape(draw.randint(1, 100), draw.randint(1, 100), draw.randint(1, 100), draw.randint(2, 3000))
        torch._dynamo.reset()
        error = runner.error(shape, pool, runner.bind(shape, pool)(0))
        assert error <= runner.limit, f"{name} on {shape}: {error}"


@pytest.mark.parametrize("name", [name for name in GEMM_KERNELS if name in OF_TORCH and KERNELS[name].is_fp8])
def test_legality_is_the_hardwares(name, pool):
    """Every size just inside the stated multiples runs; one just outside is refused by torch or cuBLAS."""
    spec, runner = KERNELS[name], RUNNERS[name]
    for m in (spec.multiple_m, 3 * spec.multiple_m, 33 * spec.multiple_m):
        for n in (spec.multiple_n, 5 * spec.multiple_n):
            for k in (spec.multiple_k, 7 * spec.multiple_k):
                shape = Shape(m, n, k)
                assert runner.error(shape, pool, runner.bind(shape, pool)(0)) <= runner.limit, shape
    m, n, k = 16 * spec.multiple_m, 2 * spec.multiple_n, 2 * spec.multiple_k
    outside = [Shape(m, n + 8, k), Shape(m, n, k + 8)] + ([Shape(m + 1, n, k)] if spec.multiple_m > 1 else [])
    for shape in outside:
        assert spec.illegal(shape.m, shape.n, shape.k)
        with pytest.raises((RuntimeError, ValueError)):
            runner.bind(shape, pool)(0)
            torch.cuda.synchronize()


def test_timing_grows_with_work(pool):
    """Sixteen times the work takes longer, and every replay is kept."""
    graphs, kept = [], []
    for size in (1024, 4096):
        launch = RUNNERS["torch/bf16"].bind(Shape(size, size, size), pool)
        graph, results = capture(launch, 4)
        graphs.append((graph, 4))
        kept.append(results)
    small, large = time_interleaved(graphs)
    assert small.quantile(0.5) < large.quantile(0.5)
    assert 7 <= len(small.samples_us) <= 25
