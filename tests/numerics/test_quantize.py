"""Recipes and quantizers against scalings written out in numpy, and against torchao's MX."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from numerics.formats import FORMATS
from numerics.quantization import fake_quantize, quantize
from numerics.recipe import Recipe


def draw(rows=256, columns=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(3 * torch.randn(rows, 1, generator=generator))


SPREAD = {
    "tensorwise": lambda a: np.full_like(a, a.max()),
    "rowwise": lambda a: np.broadcast_to(a.max(1, keepdims=True), a.shape),
    "columnwise": lambda a: np.broadcast_to(a.max(0, keepdims=True), a.shape),
    "block1x128": lambda a: np.repeat(a.reshape(256, 2, 128).max(2), 128, 1),
    "block128x128": lambda a: np.kron(a.reshape(2, 128, 2, 128).max((1, 3)), np.ones((128, 128), "f4")),
}


@pytest.mark.parametrize("scaling", SPREAD)
def test_scales_are_amax_over_max_in_fp32(scaling):
    x = draw()
    scales = SPREAD[scaling](x.abs().numpy()) / np.float32(448)
    expected = torch.from_numpy(x.numpy() / scales).to(torch.float8_e4m3fn).float().numpy() * scales
    np.testing.assert_array_equal(fake_quantize(x, f"e4m3/{scaling}").numpy(), expected)
    made = quantize(x, f"e4m3/{scaling}")
    np.testing.assert_array_equal(made.dequantize().numpy(), expected)
    assert made.codes.dtype == torch.uint8 and made.scales.dtype == torch.float32
    assert made.scales.numel() == np.unique(scales).size


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4"])
def test_mx_equals_torchao(name):
    from torchao.prototype.mx_formats import mx_tensor

    x = draw(columns=512, seed=3)
    element = {
        "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
        "e3m2": "fp6_e3m2", "e2m3": "fp6_e2m3", "e2m1": torch.float4_e2m1fn_x2,
    }[Recipe.parse(name).format]  # fmt: skip
    scale, _ = mx_tensor.to_mx(x, element, 32, scaling_mode=mx_tensor.ScaleCalculationMode.FLOOR)
    made = quantize(x, name)
    assert torch.equal(scale.view(torch.uint8).float().reshape(made.scales.shape), torch.log2(made.scales) + 127)
    spread = made.scales.repeat_interleave(32, 1)
    import ml_dtypes

    dtype = {
        "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e3m2": ml_dtypes.float6_e3m2fn,
        "e2m3": ml_dtypes.float6_e2m3fn, "e2m1": ml_dtypes.float4_e2m1fn,
    }[Recipe.parse(name).format]  # fmt: skip
    limit = FORMATS[Recipe.parse(name).format].max
    expected = np.clip((x / spread).numpy(), -limit, limit).astype(dtype).astype("f4") * spread.numpy()
    np.testing.assert_array_equal(made.dequantize().numpy(), expected)


def test_power_of_two_scales_round_as_they_are_told():
    # amax 1.9: floor keeps 2^0; as e4m3 it is 1.875, so nearest_even too; 1.95 rounds up to 2.0.
    x = torch.zeros(3, 32)
    x[:, 0] = torch.tensor([1.9, 1.95, 1.5])

    def exponents(rounding):
        recipe = Recipe("test", "e4m3", "mx32", "e8m0", rounding)
        return torch.log2(quantize(x, recipe).scales).flatten().tolist()

    assert exponents("floor") == [-8.0, -8.0, -8.0]
    assert exponents("nearest_even") == [-8.0, -7.0, -8.0]
    assert exponents("ceil") == [-7.0, -7.0, -8.0]  # 448 * 2^-8 = 1.75


def test_shared_microexponents_by_hand():
    # mx4: sign and two bits under a shared exponent; a pair below the block's binade has half the step.
    x = torch.zeros(1, 16)
    x[0, :6] = torch.tensor([3.0, -1.0, 0.9, 0.4, 1.5, 3.9])
    made = quantize(x, "mx4")
    assert made.scales[0, :3].tolist() == [1.0, 0.5, 1.0]
    assert made.codes[0, :6].tolist() == [3, -1, 2, 1, 2, 3]
    assert made.dequantize()[0, :6].tolist() == [3.0, -1.0, 1.0, 0.5, 2.0, 3.0]


@pytest.mark.parametrize("name", Recipe.names())
def test_every_recipe_is_finite_close_and_round_trips(name):
    x = draw(128, 256, seed=5) / 64
    x[3] = 0
    quantized = fake_quantize(x, name)
    assert torch.isfinite(quantized).all() and (quantized[3] == 0).all()
    assert torch.equal(quantize(x, name).dequantize(), quantized)
    assert Recipe.parse(name) is Recipe.parse(Recipe.parse(name)) and "format=" in str(Recipe.parse(name))
    again = fake_quantize(quantized, name)
    if Recipe.parse(name).scaling in ("none", "mx32", "bdr16"):
        assert torch.equal(again, quantized)  # on the grid already


@given(hnp.arrays(np.float32, (2, 32), elements=st.floats(-(2.0**120), 2.0**120, width=32)))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_rowwise_error_is_within_half_a_step(x):
    # Subnormal amax included: the scale stops at 2^-126, so that the quotient stays exact enough.
    scale = np.maximum(np.abs(x).max(1, keepdims=True) / np.float32(448), 2.0**-126)
    error = np.abs(fake_quantize(torch.from_numpy(x), "e4m3/rowwise").numpy().astype("f8") - x)
    assert (error <= np.maximum(np.abs(x) / 16 * 1.0001, scale * 2.0**-10 * 1.0001)).all()


def test_zero_rows_have_scale_one():
    x = draw()
    x[5] = 0
    assert quantize(x, "e4m3/rowwise").scales[5] == 1
    assert quantize(torch.zeros(4, 32), "mxfp8_e4m3").scales.eq(1).all()
    assert quantize(torch.zeros(4, 32), "e4m3/tensorwise").scales == 1


@pytest.mark.parametrize(
    ("x", "recipe", "error", "message"),
    [
        (torch.ones(2, 100), "e4m3/block1x128", ValueError, r"100 columns \(K\) are no multiple of the block's 128"),
        (torch.ones(100, 128), "e4m3/block128x128", ValueError, "100 rows are no multiple"),
        (torch.ones(2, 24), "mx9", ValueError, "24 columns"),
        (torch.ones(4), "e4m3/rowwise", ValueError, r"matrix \(rows, K\).*\(4,\)"),
        (torch.ones(0, 4), "e4m3/rowwise", ValueError, "at least one element"),
        (torch.tensor([[1.0, torch.inf, torch.nan]]), "bf16", ValueError, "2 of 3 values are not finite"),
        (torch.ones(2, 2, dtype=torch.int32), "bf16", TypeError, "floating-point"),
        (torch.ones(2, 2), "e4m3/diagonal", ValueError, "unknown recipe 'e4m3/diagonal'; choose a format"),
    ],
)
def test_errors_are_one_line(x, recipe, error, message):
    with pytest.raises(error, match=message) as caught:
        quantize(x, recipe)
    assert "\n" not in str(caught.value)


def test_recipes_refuse_fields_that_name_nothing():
    with pytest.raises(ValueError, match="scaling = 'rows'; choose one of none, tensorwise"):
        Recipe("x", "e4m3", "rows")
    with pytest.raises(ValueError, match="does not go with"):
        Recipe("x", "mx9", "rowwise")
    with pytest.raises(AttributeError):
        Recipe.parse("bf16").format = "fp16"
    with pytest.raises(ValueError, match="no element format"):
        _ = Recipe.parse("mx9").element
