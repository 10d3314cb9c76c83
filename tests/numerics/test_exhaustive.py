"""What is finite is tested whole: every rounding boundary, every bf16 under scales; the rest against whole numbers.

`scalar_quantize` is the readable reference: exact fractions, one element at a time, from the formats' definitions (OCP MX 1.0
section 6.3; Rouhani et al. 2023, section 3) and not from the code under test. Oracles: ml_dtypes 0.6, torch 2.13, torchao 0.18.
"""

import os
import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from numerics import cpu
from numerics.formats import FORMATS
from numerics.quantization import fake_quantize, quantize
from numerics.recipe import Recipe
from numerics.rounding import cast

EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
LISTED = [name for name, fmt in FORMATS.items() if fmt.bits <= 16 and name != "e8m0"]
MICROEXPONENTS = {"mx9": (7, True), "mx6": (4, True), "mx4": (2, True), "msfp16": (7, False), "msfp12": (3, False)}


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    assert cpu._jit() is not None
    monkeypatch.setattr(cpu, "_WORTH_IMPORTING", 0)


def floor_log2(value):
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def to_integer(value, rounding):
    """A non-negative fraction."""
    whole = int(value)
    rest = value - whole
    up = rounding == "nearest_even" and (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1))
    return whole + up


def on_grid(value, fmt, rounding):
    if value == 0:
        return Fraction(0)
    exponent = max(floor_log2(abs(value)), fmt.min_exponent)
    step = Fraction(2) ** (exponent - fmt.fraction_bits)
    size = min(to_integer(abs(value) / step, rounding) * step, Fraction(fmt.max))
    return size if value > 0 else -size


def scalar_scale(amax, recipe):
    fmt = recipe.element
    if amax == 0:
        return Fraction(1)
    if recipe.scale_format == "fp32":
        return Fraction(float(max(np.float32(amax) / np.float32(fmt.max), np.float32(2.0**-126))))
    if recipe.scale_rounding == "ceil":
        exponent = floor_log2(amax / Fraction(fmt.max))
        exponent += Fraction(2) ** exponent * Fraction(fmt.max) < amax
    else:
        if recipe.scale_rounding == "nearest_even":
            step = Fraction(2) ** (floor_log2(amax) - fmt.fraction_bits)
            amax = to_integer(amax / step, "nearest_even") * step
        exponent = floor_log2(amax) - fmt.max_exponent
    return Fraction(2) ** min(max(exponent, -127), 127)


def scalar_shared(block, magnitude_bits, pairs, rounding):
    """16 fractions under one exponent."""
    amax = max(abs(value) for value in block)
    if amax == 0:
        return list(block)
    exponent = max(floor_log2(amax), -127)
    result = []
    for index, value in enumerate(block):
        pair = block[index - index % 2 : index - index % 2 + 2]
        below = pairs and all(abs(other) < Fraction(2) ** exponent for other in pair)
        step = Fraction(2) ** (exponent - below - (magnitude_bits - 1))
        size = min(to_integer(abs(value) / step, rounding), 2**magnitude_bits - 1) * step
        result.append(size if value >= 0 else -size)
    return result


def scalar_quantize(x, recipe):
    """float32 values of a float32 matrix."""
    exact = [[Fraction(float(value)) for value in row] for row in x]
    rows, columns = len(exact), len(exact[0])
    result = np.zeros((rows, columns), np.float32)
    if recipe.format in MICROEXPONENTS:
        for r in range(rows):
            for c in range(0, columns, 16):
                result[r, c : c + 16] = scalar_shared(exact[r][c : c + 16], *MICROEXPONENTS[recipe.format], recipe.rounding)
        return result
    height, width = recipe.block or (0, 0)
    height, width = height or rows, width or columns
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            amax = max(abs(exact[r][c]) for r in range(top, top + height) for c in range(left, left + width))
            scale = Fraction(1) if recipe.block is None else scalar_scale(amax, recipe)
            for r in range(top, top + height):
                for c in range(left, left + width):
                    quotient = Fraction(float(np.float32(float(exact[r][c])) / np.float32(float(scale))))
                    rounded = on_grid(quotient, recipe.element, recipe.rounding)
                    result[r, c] = np.float32(float(rounded)) * np.float32(float(scale))
    return result


def varied(rows, columns, seed):
    """Sizes over many octaves inside a block, ties, subnormals, and zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * np.exp2(3 * rng.standard_normal((rows, columns)))
    x[1] = rng.integers(-64, 64, columns) / 4
    x[2] *= 2.0**-135
    x[3, :16] = 0
    return torch.from_numpy(x.astype(np.float32))


NARROW = [name for name in Recipe.names() if name not in ("bf16", "tf32")]
CHANGED = [f"{name};rounding=toward_zero" for name in (*MICROEXPONENTS, "mxfp4", "e4m3/rowwise", "e5m2")]
CHANGED += [f"{name};scale_rounding={how}" for name in ("mxfp8_e4m3", "mxfp4", "mxint8") for how in ("ceil", "nearest_even")]
CHANGED += ["e4m3/rowwise;scale_format=e8m0;scale_rounding=ceil", "mxfp6_e3m2;scale_format=fp32"]


@pytest.mark.parametrize("name", NARROW + CHANGED)
def test_every_recipe_equals_the_scalar_reference(name):
    x = varied(128 if "128x128" in name else 5, 128, 0)
    np.testing.assert_array_equal(fake_quantize(x, name).numpy(), scalar_quantize(x.numpy(), Recipe.parse(name)))


def of_amaxes(columns, seed):
    """Rows whose amax is where a scale is chosen: powers of two, formats' greatest values, subnormals, float32's greatest."""
    rng = np.random.default_rng(seed)
    edges = {2.0**-149, 3 * 2.0**-149, 2.0**-127, 2.0**-126, 1.0, 2.0**127, float(np.finfo(np.float32).max)}
    edges |= {fmt.max * 2.0**power for name, fmt in FORMATS.items() if name in LISTED for power in (-130, 0, 5) if fmt.bits < 9}
    edges = np.array(sorted(edges), np.float32)
    with np.errstate(over="ignore"):
        edges = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])
    edges = edges[np.isfinite(edges) & (edges > 0)]
    shape = (len(edges), columns)
    x = edges[:, None] * (rng.uniform(-1, 1, shape) * np.exp2(-rng.integers(0, 12, shape))).astype(np.float32)
    x[np.arange(len(edges)), rng.integers(0, columns, len(edges))] = edges * rng.choice(np.float32([-1, 1]), len(edges))
    return torch.from_numpy(x)


# By row, or by a part of one: a tensor has one amax.
EDGED = [name for name in NARROW if "/" not in name or name.endswith("/rowwise")] + CHANGED


@pytest.mark.parametrize("name", EDGED)
def test_every_edge_of_amax_equals_the_scalar_reference(name):
    x = of_amaxes(32, 0)
    with np.errstate(over="ignore"):  # see `QuantizedTensor.dequantize`
        expected = scalar_quantize(x.numpy(), Recipe.parse(name))
    np.testing.assert_array_equal(fake_quantize(x, name).numpy(), expected)
    np.testing.assert_array_equal(quantize(x, name).dequantize().numpy(), expected)


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
def test_every_boundary(name, rounding):
    """Between neighbours lies one tie: it goes to the even code, what is an ulp off to the nearer; all of both signs."""
    values = FORMATS[name].values()
    grid = np.unique(np.abs(values[np.isfinite(values)]))
    grid = grid[grid <= FORMATS[name].max]
    low, high = grid[:-1].astype(np.float32), grid[1:].astype(np.float32)
    tie = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)
    assert (tie.astype(np.float64) * 2 == grid[:-1] + grid[1:]).all()
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)  # the codes of neighbours are neighbours
    up, down = np.nextafter(tie, np.float32(np.inf)), np.nextafter(tie, np.float32(0))
    nearest = rounding == "nearest_even"
    below_high = np.nextafter(high, np.float32(0))
    sources = np.concatenate([grid.astype(np.float32), tie, up, down, below_high])
    expected = np.concatenate([grid.astype(np.float32), *((even, high, low, high) if nearest else (low, low, low, low))])
    expected[-len(low) :] = np.where((below_high > tie) & nearest, high, low)
    for sign in (1, -1):
        x = torch.from_numpy(sources * np.float32(sign))
        wanted = torch.from_numpy(expected * np.float32(sign))
        assert torch.equal(cast(x, name, rounding=rounding), wanted)
        recipe = Recipe("test", name, rounding=rounding)
        assert torch.equal(fake_quantize(x[None], recipe)[0], wanted)
        assert torch.equal(quantize(x[None], recipe).dequantize()[0], wanted)


@pytest.mark.parametrize("name", NARROW)
def test_every_bf16_value_as_a_source(name):
    """Compiled and torch alike: every finite bf16 value in blocks of its neighbours, of strangers, and with both signs."""
    finite = EVERY_BF16[torch.isfinite(EVERY_BF16)]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))]
    for values in (finite, shuffled):
        x = values[: len(values) // 128 * 128].reshape(-1, 128)
        x = x[: len(x) // 128 * 128] if "128x128" in name else x
        recipe = Recipe.parse(name)
        assert cpu.supports(x, recipe)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "supports", lambda x, recipe: False)
            expected = fake_quantize(x, recipe)
        assert torch.equal(fake_quantize(x.bfloat16(), recipe).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_float32_values_through_the_whole_range(name):
    """Every 127th non-negative pattern; FLOAT32_STRIDE=1 in the environment takes all of them (minutes).

    Beyond the range ml_dtypes gives NaN (e4m3) and infinities (e5m2) where we saturate.
    """
    stride = int(os.environ.get("FLOAT32_STRIDE", "127"))
    fmt = FORMATS[name]
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[name]
    max_code = int(np.array(fmt.max).astype(dtype).view(np.uint8))
    nonfinite = Recipe("test", name, overflow="nonfinite")
    for start in range(0, 0x7F800000, stride << 22):
        x = np.arange(start, min(start + (stride << 22), 0x7F800000), stride).astype(np.int32).view(np.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            reference = x.astype(dtype)
        rows, wanted = torch.from_numpy(x)[None], reference.astype(np.float32)
        np.testing.assert_array_equal(fake_quantize(rows, nonfinite)[0].numpy(), wanted)
        np.testing.assert_array_equal(fake_quantize(rows, name)[0].numpy(), np.where(x > fmt.max, np.float32(fmt.max), wanted))
        codes = np.where(x > fmt.max, max_code, reference.view(np.uint8))
        np.testing.assert_array_equal(quantize(rows, name).codes[0].numpy(), codes)


@pytest.mark.parametrize("rounding", ["floor", "ceil", "nearest_even"])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"])
def test_mx_scales_equal_torchao(name, rounding):
    """torchao's RCEIL is our ceil, but for one binade just above 448 x 2^k, and it halves blocks with amax <= 2^-119."""
    from torchao.prototype.mx_formats import mx_tensor

    mode = {"floor": "FLOOR", "ceil": "RCEIL", "nearest_even": "EVEN"}[rounding]
    element = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2}[name]
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(512, 512, generator=generator) * torch.exp2(12 * torch.randn(512, 1, generator=generator))
    x = x[x.abs().amax(1) > 2.0**-100]
    scale, _ = mx_tensor.to_mx(x, element, 32, scaling_mode=mx_tensor.ScaleCalculationMode[mode])
    made = quantize(x, f"{name};scale_rounding={rounding}").scales
    assert torch.equal(torch.log2(made) + 127, scale.view(torch.uint8).float().reshape(made.shape))
