"""Every code of every format, and every bf16 value cast to it, against ml_dtypes, torch and gfloat."""

import warnings

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gf
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.formats import FORMATS, get_format
from numerics.rounding import cast, decode, encode

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "int8": np.int8,
    "int4": ml_dtypes.int4,
}
TORCH = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
GFLOAT = {
    "e4m3": gf.format_info_ocp_e4m3,
    "e5m2": gf.format_info_ocp_e5m2,
    "e3m2": gf.format_info_ocp_e3m2,
    "e2m3": gf.format_info_ocp_e2m3,
    "e2m1": gf.format_info_ocp_e2m1,
    "bf16": gf.format_info_bfloat16,
    "fp16": gf.format_info_binary16,
}
EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def same(left, right, signs=True):
    left, right = np.asarray(left), np.asarray(right)
    equal = (left == right) | (np.isnan(left) & np.isnan(right))
    if signs:
        equal &= (np.signbit(left) == np.signbit(right)) | np.isnan(left)
    return equal


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_code_has_the_value_of_ml_dtypes(name):
    fmt = FORMATS[name]
    values = fmt.values()
    codes = np.arange(2**fmt.bits, dtype=np.uint8 if fmt.bits <= 8 else np.uint16)
    reference = codes.astype(np.int8).astype(ml_dtypes.int4) if name == "int4" else codes.view(ML_DTYPES[name])
    with np.errstate(invalid="ignore"):  # ml_dtypes warns on signalling NaNs
        reference = reference.astype(np.float64)
    assert same(values, reference).all()
    assert np.nanmax(np.where(np.isinf(values), np.nan, values)) == fmt.max
    positive = values[values > 0]
    assert positive.min() == fmt.min_subnormal


@pytest.mark.parametrize("name", ML_DTYPES)
def test_codes_survive_the_round_trip(name):
    fmt = FORMATS[name]
    codes = torch.arange(2**fmt.bits)
    values = decode(codes, fmt)
    kept = ~torch.isnan(values)
    assert torch.equal(encode(values[kept], fmt).long(), codes[kept])
    if fmt.nan_code is not None:
        assert torch.isnan(decode(encode(torch.tensor([torch.nan]), fmt), fmt)).all()


@pytest.mark.parametrize("name", sorted(set(ML_DTYPES) - {"int8", "int4"}))
def test_every_bf16_value_is_cast_as_ml_dtypes_does(name):
    fmt = FORMATS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        reference = EVERY_BF16.numpy().astype(ML_DTYPES[name]).astype(np.float32)
    finite_range = (EVERY_BF16.abs() <= fmt.max).numpy()
    saturated = cast(EVERY_BF16, fmt).numpy()
    if name == "e8m0":
        # ml_dtypes 0.6 turns zero into NaN and rounds subnormals up; e8m0 has no zero, the nearest value is 2^-127.
        finite_range &= (EVERY_BF16 >= 2.0**-126).numpy()
        assert (saturated[(EVERY_BF16 >= 0).numpy() & (EVERY_BF16 < 2.0**-127 * 1.5).numpy()] == 2.0**-127).all()
        assert np.isnan(saturated[(EVERY_BF16 < 0).numpy()]).all()
    assert same(saturated, reference)[finite_range].all()
    beyond = (EVERY_BF16.abs() > fmt.max).numpy() & (fmt.signed | (EVERY_BF16 > 0).numpy())
    assert (np.abs(saturated[beyond]) == fmt.max).all()
    if fmt.infinity or (fmt.nan_code is not None and name != "e8m0"):
        assert same(cast(EVERY_BF16, fmt, overflow="nonfinite").numpy(), reference, signs=False).all()


@pytest.mark.parametrize("name", TORCH)
def test_random_float32_patterns_are_cast_as_torch_does(name):
    fmt = FORMATS[name]
    patterns = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0))
    x = patterns.to(torch.int32).view(torch.float32)
    # Ties and their neighbours, which random patterns do not meet.
    grid = torch.from_numpy(fmt.values()).float()
    grid = grid[torch.isfinite(grid)].unique()
    ties = (grid[:-1].double() + grid[1:].double()).div(2).float()
    around = torch.cat(
        [ties, torch.nextafter(ties, ties.new_tensor(torch.inf)), torch.nextafter(ties, -ties.new_tensor(torch.inf))]
    )
    x = torch.cat([x, around])
    x = x[(x.abs() <= fmt.max) & torch.isfinite(x)]
    assert same(cast(x, fmt), x.to(TORCH[name]).float()).all()


@pytest.mark.parametrize("name", GFLOAT)
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
def test_every_rounding_mode_agrees_with_gfloat(name, rounding):
    mode = {"nearest_even": gfloat.RoundMode.TiesToEven, "toward_zero": gfloat.RoundMode.TowardZero}[rounding]
    x = EVERY_BF16[torch.isfinite(EVERY_BF16)][::37]
    x = x[x.abs() <= FORMATS[name].max]
    reference = [gfloat.round_float(GFLOAT[name], float(value), mode, sat=True) for value in x]
    assert same(cast(x, name, rounding=rounding), np.array(reference, np.float32)).all()


@given(st.floats(allow_nan=False, allow_infinity=False, width=64), st.sampled_from(sorted(GFLOAT)))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_float64_sources_are_rounded_once(value, name):
    reference = gfloat.round_float(GFLOAT[name], value, sat=True)
    assert float(cast(torch.tensor([value], dtype=torch.float64), name)) == reference


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_round_half_to_even_and_are_symmetric(name):
    x = torch.linspace(-300, 300, 4801)
    limit = FORMATS[name].max
    assert torch.equal(cast(x, name), torch.round(x).clamp(-limit, limit) + 0.0)


def test_tf32_keeps_ten_fraction_bits():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    bits = x.view(torch.int32)
    # Nearest even on the 13 bits that go: add half less one, plus the bit that stays.
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13 << 13).view(torch.float32)
    assert torch.equal(cast(x, "tf32"), rounded)


def test_stochastic_rounding_is_seeded_and_unbiased():
    x = torch.full((200_000,), 1.03)
    draws = [cast(x, "e4m3", rounding="stochastic", generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*draws)
    assert set(draws[0].unique().tolist()) == {1.0, 1.125}
    assert float(draws[0].double().mean()) == pytest.approx(1.03, abs=5e-4)


def test_strides_and_half_precision_are_taken():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    assert torch.equal(cast(x.T, "e4m3"), cast(x, "e4m3").T)
    assert torch.equal(cast(x.bfloat16(), "e4m3"), cast(x.bfloat16().float(), "e4m3"))
    assert cast(x[:0], "e4m3").shape == (0, 32)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="unknown format 'e9m9'; choose one of e4m3"):
        get_format("e9m9")
    with pytest.raises(ValueError, match="unknown rounding 'up'"):
        cast(torch.ones(1), "e4m3", rounding="up")
    with pytest.raises(ValueError, match="unknown overflow"):
        cast(torch.ones(1), "e4m3", overflow="wrap")
    with pytest.raises(TypeError, match="floating-point"):
        cast(torch.ones(1, dtype=torch.int32), "e4m3")
    with pytest.raises(ValueError, match="no infinity and no NaN"):
        cast(torch.ones(1), "e2m1", overflow="nonfinite")
    with pytest.raises(ValueError, match="e2m1 has no code for NaN"):
        encode(torch.tensor([torch.nan]), "e2m1")
    with pytest.raises(ValueError, match="19 bits"):
        FORMATS["tf32"].values()
