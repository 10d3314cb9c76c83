"""The `loka/` kernels in Triton's interpreter, against `numerics`.

The interpreter must be chosen before triton is imported, so this file runs itself once more with TRITON_INTERPRET=1.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from hil.kernels.base import Shape
from hil.kernels.loka_quantize import LOKA_QUANTIZE_RUNNERS, SCALINGS
from hil.timing import BufferPool
from numerics.quantization import quantize

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter, with TRITON_INTERPRET=1")
BY_NAME = {runner.name: runner for runner in LOKA_QUANTIZE_RUNNERS}


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's run")
def test_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "default", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


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
