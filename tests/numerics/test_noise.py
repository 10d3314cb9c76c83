"""The edges of what statistics say of a rounding error: few values to a scale, sizes far from one, formats that overflow."""

import numpy as np
import pytest
import torch

from numerics import StatisticsAccumulator, fake_quantize, gaussian, gemm_error, predict_gemm_error
from numerics.noise import operand_noise
from numerics.recipe import Recipe


def normal(rows, features, size=1.0, seed=0):
    return (size * np.random.default_rng(seed).standard_normal((rows, features))).astype(np.float32)


def collect(x):
    accumulator = StatisticsAccumulator(x.shape[1])
    accumulator.update(x)
    return accumulator.result()


def in_decibel(power):
    return -10 * np.log10(max(power, 1e-30))


def measured(x, recipe):
    """What quantizing adds to values, over them, in decibel."""
    values = torch.from_numpy(x).double()
    error = fake_quantize(torch.from_numpy(x), recipe).double() - values
    return in_decibel(float(error.square().mean() / values.square().mean()))


def predicted(statistics, recipe, rows, k):
    return in_decibel(operand_noise(statistics, Recipe.parse(recipe), rows, k).power)


@pytest.mark.parametrize("recipe", ["e4m3/rowwise", "e5m2/rowwise", "int8/rowwise"])
@pytest.mark.parametrize("k", [4, 8, 16, 32, 64, 128, 300])
def test_scales_of_fewer_values_than_were_seen(recipe, k):
    tolerance = 0.5 if k >= 16 else 1.2
    assert predicted(gaussian(128), recipe, 4096, k) == pytest.approx(measured(normal(4096, k), recipe), abs=tolerance)


@pytest.mark.parametrize("recipe", ["e4m3/rowwise", "e4m3/tensorwise", "int8/rowwise"])
def test_a_value_alone_under_its_scale_is_exact(recipe):
    assert measured(normal(1, 1), recipe) > 120
    assert predicted(gaussian(128), recipe, 1, 1) > 120


@pytest.mark.parametrize("k", [1, 2, 5, 33, 100, 300])
@pytest.mark.parametrize("recipe", ["e4m3", "e4m3/tensorwise", "e4m3/rowwise", "e4m3/columnwise"])
def test_widths_that_fill_no_block(recipe, k):
    x = normal(512, k)
    assert min(predicted(collect(x), recipe, 512, k), 60) == pytest.approx(min(measured(x, recipe), 60), abs=0.7)


@pytest.mark.parametrize("size", [1e-15, 1e-11, 1.0, 1e11, 1e15])
@pytest.mark.parametrize("recipe", ["bf16", "tf32"])
def test_wide_formats_round_alike_at_every_size(recipe, size):
    x = normal(256, 256, size)
    assert predicted(collect(x), recipe, 256, 256) == pytest.approx(measured(x, recipe), abs=0.2)


def test_rounding_toward_zero_takes_a_step_off_an_amax_whose_scale_was_rounded_up():
    recipe = "e4m3/rowwise;rounding=toward_zero"
    # All values are amaxes: of what the rounded scale leaves below the format's max a whole step is lost.
    x = np.repeat(1 + np.random.default_rng(0).random((4096, 1), dtype=np.float32), 64, axis=1)
    assert 20 < measured(x, recipe) < 40
    assert predicted(collect(x), recipe, 4096, 64) == pytest.approx(measured(x, recipe), abs=1)


def test_values_beyond_a_format_that_does_not_saturate_leave_no_figures():
    recipe, x = "e4m3;overflow=nonfinite", normal(64, 64, 1000.0)
    values, statistics = torch.from_numpy(x), collect(x)
    for other in (recipe, "bf16"):
        found = predict_gemm_error(statistics, statistics, (64, 64, 64), recipe, other, "fp32")
        assert np.isnan(gemm_error(values, values, recipe, other, "fp32").mere)
        assert np.isnan([found.mere, found.sqnr_db, found.relative_frobenius, found.cosine]).all()
        assert found.overflow_share == pytest.approx(float((values.abs() > 464).double().mean()), abs=0.02)
    small = collect(x / 1000)
    assert np.isfinite(predict_gemm_error(small, small, (64, 64, 64), recipe, recipe, "fp32").sqnr_db)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 30.0])
@pytest.mark.parametrize("output", ["e4m3", "e5m2", "fp16", "bf16"])
def test_outputs_below_a_format_are_lost_and_those_beyond_it_saturate(output, size):
    x, w = normal(256, 256), normal(256, 256, size, seed=1)
    recipes = "e4m3/rowwise", "e4m3/rowwise", "fp32"
    seen = gemm_error(torch.from_numpy(x), torch.from_numpy(w), *recipes, output=output)
    found = predict_gemm_error(collect(x), collect(w), (256, 256, 256), *recipes, output=output)
    assert found.sqnr_db == pytest.approx(seen.sqnr_db, abs=0.8)


def test_outputs_have_a_sign():
    with pytest.raises(ValueError, match="output = 'e8m0' has no sign"):
        predict_gemm_error(gaussian(64), gaussian(64), (64, 64, 64), "bf16", "bf16", "fp32", output="e8m0")
