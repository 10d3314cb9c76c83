"""`gemm_error` against the metrics written out in numpy, and known figures."""

import math

import numpy as np
import pytest
import torch

from numerics.accumulate import fp8_matmul
from numerics.errors import MERE_FLOOR, _metrics, gemm_error
from numerics.quantization import quantize


def operands(m=96, n=80, k=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)


def test_metrics_equal_numpy_on_a_tensorwise_kernel():
    a, b = operands()
    scales = [x.abs().max() / 448 for x in (a, b)]
    codes = [(x / s).to(torch.float8_e4m3fn) for x, s in zip((a, b), scales, strict=True)]
    y = fp8_matmul(*codes, accumulation="hopper_fast", scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)
    y, exact = y.double().numpy(), a.double().numpy() @ b.double().numpy().T
    error = gemm_error(a, b, "e4m3/tensorwise", "e4m3/tensorwise", "hopper_fast")
    rms = np.sqrt((exact**2).mean())
    assert error.mere == pytest.approx((np.abs(y - exact) / np.maximum(np.abs(exact), rms / 256)).mean(), rel=1e-9)
    assert error.sqnr_db == pytest.approx(10 * np.log10((exact**2).sum() / ((y - exact) ** 2).sum()), rel=1e-9)
    assert error.relative_frobenius == pytest.approx(np.linalg.norm(y - exact) / np.linalg.norm(exact), rel=1e-9)
    assert error.cosine == pytest.approx((y * exact).sum() / np.linalg.norm(y) / np.linalg.norm(exact), rel=1e-12)
    assert MERE_FLOOR == 1 / 256


def test_bf16_and_exact_products():
    a, b = operands()
    error = gemm_error(a, b, "bf16", "bf16", "fp32")
    expected = (a.bfloat16().float() @ b.bfloat16().float().T).bfloat16().double()
    exact = a.double() @ b.double().T
    assert error.relative_frobenius == pytest.approx(float((expected - exact).norm() / exact.norm()), rel=1e-3)
    integers = [torch.randint(-8, 9, x.shape).float() for x in (a, b)]
    perfect = gemm_error(*integers, "e4m3", "e4m3", "exact", output="fp32")
    assert perfect.sqnr_db == math.inf and perfect.mere == 0 and perfect.cosine == pytest.approx(1)


@pytest.mark.parametrize(
    ("recipe_a", "recipe_b", "accumulation"),
    [
        ("e4m3/rowwise", "e4m3/rowwise", "hopper_split"),
        ("e5m2/tensorwise", "e4m3/tensorwise", "hopper_fast"),
        ("e4m3/block1x128", "e4m3/block128x128", "hopper_split"),
        ("e4m3", "e4m3", "hopper_fast"),
    ],
)
def test_the_tensor_core_adds_little_to_the_quantization(recipe_a, recipe_b, accumulation):
    a, b = operands(128, 128, 256)
    emulated = gemm_error(a, b, recipe_a, recipe_b, accumulation)
    ideal = gemm_error(a, b, recipe_a, recipe_b, "exact")
    assert emulated.sqnr_db == pytest.approx(ideal.sqnr_db, abs=0.1) and emulated.sqnr_db != ideal.sqnr_db


def test_fewer_rows_give_nearly_the_same():
    a, b = operands(512, 512, 64)
    whole = gemm_error(a, b, "e4m3/rowwise", "e4m3/rowwise", "hopper_fast")
    part = gemm_error(a, b, "e4m3/rowwise", "e4m3/rowwise", "hopper_fast", max_rows=100)
    assert part.sqnr_db == pytest.approx(whole.sqnr_db, abs=0.2) and part.underflow_share == whole.underflow_share


def test_shares_count_elements():
    a, b = torch.ones(2, 100), torch.ones(2, 100)
    a[0, :25] = 2.0**-12  # below half the least subnormal, 2^-10
    b[0, :10] = 500.0
    error = gemm_error(a, b, "e4m3", "e4m3", "fp32")
    assert error.underflow_share == 0.125 and error.overflow_share == 0.05


def test_zero_outputs_and_bad_arguments():
    zero = torch.zeros(4, 32)
    error = gemm_error(zero, zero, "e4m3/rowwise", "e4m3/rowwise", "hopper_fast")
    assert (error.mere, error.sqnr_db, error.cosine) == (0.0, math.inf, 1.0)
    a, b = operands()
    with pytest.raises(ValueError, match="same K"):
        gemm_error(a, b[:, :5], "bf16", "bf16", "fp32")
    with pytest.raises(ValueError, match="unknown accumulation 'tf32'"):
        gemm_error(a, b, "bf16", "bf16", "tf32")
    with pytest.raises(ValueError, match="apply no columnwise scales"):
        gemm_error(a, b, "e4m3/columnwise", "e4m3/rowwise", "hopper_fast")
    with pytest.raises(ValueError, match="is defined for e4m3 and e5m2; use accumulation='fp32' for bf16"):
        gemm_error(a, b, "bf16", "bf16", "hopper_fast")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("x", None, "bf16", "bf16", "fp32"), {}, TypeError, "b must be a torch tensor, got NoneType"),
        (("x", [[1.0]], "bf16", "bf16", "fp32"), {}, TypeError, "b must be a torch tensor, got list"),
        (("x", "x", "bf16", "bf16", "fp32"), {"max_rows": 0}, ValueError, "max_rows = 0; give a whole number"),
        (("x", "x", "bf16", "bf16", "fp32"), {"output": "e8m0"}, ValueError, "output = 'e8m0' has no sign"),
        (("x", "x", "bf16", "bf16", "fp32"), {"output": "bf17"}, ValueError, "unknown format 'bf17'"),
        (("x", "x", "e4m3/rowwise;amax=given", "bf16", "fp32"), {}, ValueError, "use amax='current' in e4m3/rowwise;amax=given"),
        (("x", "x", "bf16", "e4m3/rowwise;amax=delayed", "fp32"), {}, ValueError, "use amax='current'"),
    ],
)
def test_refused_arguments(arguments, options, error, message):
    x = torch.ones(4, 32)
    with pytest.raises(error, match=message) as caught:
        gemm_error(*(x if a == "x" else a for a in arguments), **options)
    assert "\n" not in str(caught.value)


def test_metrics_by_hand():
    a, b = torch.tensor([[1.0, 1e-5], [0.3, 500.0]]), torch.eye(2)
    error = gemm_error(a, b, "e4m3", "e4m3", "exact", output="fp32")
    # 1e-5 underflows, 0.3 becomes 0.3125, 500 saturates at 448.
    signal = 1 + 1e-10 + 0.09 + 500**2
    noise = 1e-10 + 0.0125**2 + 52**2
    floor = math.sqrt(signal / 4) / 256
    assert error.mere == pytest.approx((1e-5 / floor + 0.0125 / floor + 52 / 500) / 4, rel=1e-6)
    assert error.sqnr_db == pytest.approx(10 * math.log10(signal / noise), rel=1e-6)
    assert error.relative_frobenius == pytest.approx(math.sqrt(noise / signal), rel=1e-6)
    power = 1 + 0.3125**2 + 448**2
    assert error.cosine == pytest.approx((1 + 0.3 * 0.3125 + 500 * 448) / math.sqrt(power * signal), rel=1e-6)
    assert (error.underflow_share, error.overflow_share) == (0.25, 0.25)


def test_outputs_that_overflow_are_infinitely_wrong():
    a, b = (x * 1e6 for x in operands(8, 8, 32))
    error = gemm_error(a, b, "bf16", "bf16", "exact", output="fp16")
    assert error.mere == error.relative_frobenius == math.inf and error.sqnr_db == -math.inf
    infinite = gemm_error(a[:1], -a[:1], "e5m2;overflow=nonfinite", "e5m2;overflow=nonfinite", "exact", output="fp32")
    assert infinite.sqnr_db == -math.inf
    assert math.isnan(gemm_error(a, b, "e4m3;overflow=nonfinite", "e4m3", "hopper_fast").sqnr_db)


def test_what_is_judged_is_what_is_multiplied():
    """One draw of stochastic rounding, one gradient-free input of any type."""
    a, b = operands(16, 16, 64)
    for accumulation in ("exact", "hopper_fast"):
        torch.manual_seed(3)
        first = gemm_error(a, b, "e4m3/rowwise;rounding=stochastic", "e4m3/rowwise", accumulation)
        torch.manual_seed(3)
        assert gemm_error(a, b, "e4m3/rowwise;rounding=stochastic", "e4m3/rowwise", accumulation) == first
    expected = gemm_error(a, b, "e4m3/rowwise", "e4m3/rowwise", "exact")
    assert gemm_error(a.clone().requires_grad_(), b.double(), "e4m3/rowwise", "e4m3/rowwise", "exact") == expected


def test_autocast_has_no_say():
    a, b = operands(16, 16, 64)
    for accumulation in ("fp32", "exact"):
        expected = gemm_error(a, b, "mxfp4", "mx9", accumulation)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert gemm_error(a, b, "mxfp4", "mx9", accumulation) == expected


def test_blocks_are_scaled_as_the_kernel_for_them_does():
    a, b = operands(16, 128, 512)
    left, right = quantize(a, "e4m3/block1x128"), quantize(b, "e4m3/block128x128")
    y = fp8_matmul(
        left.codes, right.codes, accumulation="hopper_split", scale_a=left.scales, scale_b=right.scales,
        format_a="e4m3", format_b="e4m3",
    )  # fmt: skip
    error = gemm_error(a, b, left.recipe, right.recipe, "hopper_split", output="fp32")
    assert error == _metrics(a.double() @ b.double().T, y.double(), [error.underflow_share, error.overflow_share])
    some = gemm_error(a, b, left.recipe, right.recipe, "hopper_split", max_rows=64)
    assert some.sqnr_db == pytest.approx(error.sqnr_db, abs=0.3)


def test_the_error_of_given_outputs_is_that_of_the_gemm_they_came_from():
    from numerics import fake_quantize, output_error

    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(24, 64, generator=generator), torch.randn(17, 64, generator=generator)
    y = (fake_quantize(a, "e4m3/rowwise").double() @ fake_quantize(b, "e4m3/rowwise").double().T).float()
    found = output_error(a.double() @ b.double().T, y)
    expected = gemm_error(a, b, "e4m3/rowwise", "e4m3/rowwise", "exact", output="fp32")
    assert found.sqnr_db == pytest.approx(expected.sqnr_db, abs=1e-3)
    assert found.mere == pytest.approx(expected.mere, rel=1e-4)
    assert math.isnan(found.underflow_share)
    with pytest.raises(ValueError, match="shape"):
        output_error(y, y[:3])
