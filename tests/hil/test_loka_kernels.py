"""The `loka/` kernels in Triton's interpreter, against `numerics`.

The interpreter must be chosen before triton is imported, so this file runs itself once more with TRITON_INTERPRET=1.
"""

import importlib.util
import itertools
import os

import pytest
import torch

from hil.kernels.base import Shape
from hil.kernels.loka_gemm import LOKA_GEMM_RUNNERS, Plan, fp8_gemm, parts_of, plan_of
from hil.kernels.loka_quantize import LOKA_QUANTIZE_RUNNERS, SCALINGS
from hil.timing import BufferPool
from numerics import fp8_matmul
from numerics.quantization import quantize

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter, with TRITON_INTERPRET=1")
BY_NAME = {runner.name: runner for runner in LOKA_QUANTIZE_RUNNERS}


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's run")
def test_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


@pytest.fixture(scope="module")
def pool():
    return BufferPool("cpu", 2**20)


def assert_is(got, source, scaling):
    wanted = quantize(source.contiguous(), f"e4m3/{scaling}")
    codes, scales = got
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous() and scales.dtype == torch.float32
    assert torch.equal(codes.view(torch.uint8), wanted.codes) and torch.equal(scales, wanted.scales)


@interpreted
@pytest.mark.parametrize("scaling", SCALINGS)
def test_quantizers_are_numerics(scaling, pool):
    for shape in [Shape(256, 1, 384)] if "block" in scaling else [Shape(100, 1, 48), Shape(37, 1, 130)]:
        x = pool.view((shape.m, shape.k), 0, 0)
        results = {
            suffix: BY_NAME[f"loka/quantize_{scaling}{suffix}"].bind(shape, pool)(0) for suffix in ("", "_transposed", "_dual")
        }
        assert_is(results[""], x, scaling)
        assert_is(results["_transposed"], x.t(), scaling)
        assert_is(results["_dual"][0], x, scaling)
        assert_is(results["_dual"][1], x.t(), scaling)
        for suffix, result in results.items():
            runner = BY_NAME[f"loka/quantize_{scaling}{suffix}"]
            assert 0.005 < runner.error(shape, pool, result) <= runner.limit


@interpreted
def test_delayed_takes_a_given_amax_and_returns_the_new_one(pool):
    from hil.kernels.loka_quantize import quantize_delayed

    x = pool.view((100, 50), 3, 0)
    codes, scale, amax = quantize_delayed(x, torch.tensor(1.5), torch.zeros(()))
    assert scale == torch.tensor(1.5) / 448 and amax == x.abs().max() > 1.5
    assert torch.equal(codes.float(), (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float())
    runner, shape = BY_NAME["loka/quantize_tensorwise_delayed"], Shape(100, 1, 50)
    launch = runner.bind(shape, pool)
    result = launch(0)
    assert runner.error(shape, pool, result) <= runner.limit
    assert runner.error(shape, pool, (*result[:2], 0.5 * result[2])) == float("inf")


@interpreted
def test_error_sees_a_wrong_layout_and_wrong_scales(pool):
    shape = Shape(256, 1, 128)
    runner = BY_NAME["loka/quantize_rowwise_transposed"]
    codes, scales = runner.bind(shape, pool)(0)
    assert runner.error(shape, pool, (codes.t(), scales)) > runner.limit
    assert runner.error(shape, pool, (codes, scales.roll(1, 0))) > runner.limit
    dual = BY_NAME["loka/quantize_rowwise_dual"]
    rows, turned = dual.bind(shape, pool)(0)
    assert dual.error(shape, pool, (rows, (turned[0], 1.1 * turned[1]))) > dual.limit


@interpreted
def test_what_does_not_fit_is_refused():
    from hil.kernels.loka_quantize import quantize as quantizer
    from hil.kernels.loka_quantize import quantize_transposed

    with pytest.raises(ValueError, match="columns = 64: block1x128 needs a multiple of 128"):
        quantizer(torch.ones(128, 64, dtype=torch.bfloat16), "block1x128")
    with pytest.raises(ValueError, match="columns = 64"):
        quantize_transposed(torch.ones(64, 128, dtype=torch.bfloat16), "block1x128")
    with pytest.raises(ValueError, match="scaling = 'mx32'"):
        quantizer(torch.ones(128, 64, dtype=torch.bfloat16), "mx32")


def test_a_runner_for_every_form():
    assert set(BY_NAME) == {f"loka/quantize_{scaling}{form}" for scaling in SCALINGS for form in ("", "_transposed", "_dual")} | {
        "loka/quantize_tensorwise_delayed"
    }
    shape = Shape(10, 1, 20)
    assert all(r.moved_bytes(shape) == (800 if name.endswith("dual") else 600) for name, r in BY_NAME.items())


def operands(m, n, k, rowwise, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn((rows, k), generator=generator).to(torch.float8_e4m3fn) for rows in (m, n))
    scales = [torch.rand(rows if rowwise else 1, generator=generator) + 0.5 for rows in (m, n)]
    return a, b, *scales


@interpreted
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(64, 64, 256), (100, 48, 1040), (7, 100, 2064), (130, 17, 4096), (1, 1, 16), (3, 5, 48), (1, 300, 640)]
)
def test_gemm_is_the_product_in_fp32(m, n, k, rowwise):
    """The interpreter adds in FP32, at most K / 2^24 of the terms' sizes off, and cuts to bf16: 2^-7. On GPUs: the bits."""
    a, b, scale_a, scale_b = operands(m, n, k, rowwise)
    wanted = fp8_matmul(a, b, accumulation="exact", scale_a=scale_a, scale_b=scale_b).double()
    sizes = a.double().abs() @ b.double().abs().t() * scale_a.double().view(-1, 1) * scale_b.double()
    for fast in (True, False):
        got = fp8_gemm(a, b, scale_a, scale_b, fast=fast)
        assert got.dtype == torch.bfloat16 and got.shape == (m, n) and got.is_contiguous()
        assert ((got.double() - wanted).abs() <= 2.0**-7 * wanted.abs() + (k + 4) * 2.0**-24 * sizes).all()


@interpreted
@pytest.mark.parametrize("plan", [
    Plan(False, 64, 16, 1, 4, 4), Plan(False, 64, 32, 3, 4, 4), Plan(True, 64, 64, 5, 4, 4), Plan(True, 128, 32, 40, 4, 4)
])  # fmt: skip
def test_any_plan_gives_the_product(plan):
    """Of whole numbers below 2^24, which every order of addition gives alike; the interpreter cuts them to bf16."""
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randint(-4, 5, (rows, 2192), generator=generator).float().to(torch.float8_e4m3fn) for rows in (90, 70))
    one = torch.ones(1)
    wanted = ((a.float() @ b.float().t()).view(torch.int32) & -65536).view(torch.float32).bfloat16()
    assert torch.equal(fp8_gemm(a, b, one, one, fast=True, plan=plan), wanted)
    rows, columns = torch.arange(1, 91).exp2().clamp(max=2.0**60), torch.full((70,), 0.5)
    columns[3] = 8
    assert torch.equal(
        fp8_gemm(a, b, rows, columns, fast=False, plan=plan), wanted * rows[:, None].bfloat16() * columns.bfloat16()
    )


@pytest.mark.parametrize("k", [16, 128, 1040, 4096, 65536 + 16])
@pytest.mark.parametrize("parts", [1, 2, 7, 66, 500])
def test_parts_are_all_of_k_in_whole_steps(k, parts):
    pieces = parts_of(k, parts)
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(k))
    assert len(pieces) <= parts and all(piece.start % 128 == 0 for piece in pieces)
    lengths = [piece.stop - piece.start for piece in pieces]
    assert all(length == lengths[0] for length in lengths[:-1])


def test_plans_spread_a_long_k_over_the_gpu():
    """Over half of its 132 multiprocessors, give or take whole steps."""
    shapes = [(64, 64, 65536), (128, 256, 16384), (16, 512, 8192), (512, 16, 32768)]
    for fast, (m, n, k) in itertools.product((True, False), shapes):
        plan = plan_of(m, n, k, fast)
        high, wide = (n, m) if plan.swapped else (m, n)
        programs = -(-high // plan.rows) * -(-wide // plan.columns) * len(parts_of(k, plan.parts))
        assert programs >= 64, (m, n, k, plan)
    assert plan_of(4096, 512, 512).parts == 1


def test_gemm_refuses_what_it_would_compute_wrongly():
    a, b, one, _ = operands(32, 48, 64, False)
    with pytest.raises(ValueError, match="K = 40"):
        fp8_gemm(a[:, :40].contiguous(), b[:, :40].contiguous(), one, one, fast=True)
    with pytest.raises(ValueError, match="row-major"):
        fp8_gemm(a, b.t().contiguous().t(), one, one, fast=True)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        fp8_gemm(a.float(), b, one, one, fast=True)
    with pytest.raises(ValueError, match="32 and 1 scales"):
        fp8_gemm(a, b, torch.ones(32), one, fast=True)
    with pytest.raises(ValueError, match="float32"):
        fp8_gemm(a, b, one.double(), one, fast=True)


@interpreted
def test_gemm_runners(pool):
    assert [r.name for r in LOKA_GEMM_RUNNERS] == [
        f"loka/fp8_{s}_{h}" for s in ("tensorwise", "rowwise") for h in ("fast", "split")
    ]
    shape = Shape(48, 80, 1024)
    for runner in LOKA_GEMM_RUNNERS:
        result = runner.bind(shape, pool)(0)
        assert runner.error(shape, pool, result) < 0.01 < runner.limit
        assert runner.error(shape, pool, result.roll(1, 0)) > runner.limit
        assert runner.moved_bytes(shape) == 48 * 1024 + 80 * 1024 + 2 * 48 * 80
