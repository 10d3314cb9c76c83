"""The Triton kernels, run by Triton's interpreter on the CPU, against numerics in torch: equal to the last bit.

The interpreter must be chosen before triton is imported, so this file runs itself once more with TRITON_INTERPRET=1.
"""

import importlib.util
import itertools
import os
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from numerics.quantization import fake_quantize, quantize
from numerics.recipe import Recipe

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Bounds that overflow to infinity are meant to, and what is not finite is said to be.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter, with TRITON_INTERPRET=1")

FLOAT8 = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
SHAPES = {
    "none": ((1, 1), (3, 7), (5, 130)),
    "tensorwise": ((1, 1), (3, 7), (67, 130)),
    "rowwise": ((1, 32), (3, 1), (37, 130), (9, 257)),
    "columnwise": ((1, 32), (37, 130), (200, 3)),
    "block1x128": ((1, 128), (7, 256)),
    "block128x128": ((128, 256),),
    "mx32": ((1, 32), (37, 96)),
    "bdr16": ((1, 16), (37, 48)),
}
EXTREMES = (0.0, -0.0, 1e-45, -1.5e-40, 3e-39, -1.2e-38, 1e-30, 2.0**-126, -(2.0**-127), 1.0, -448.0, 464.0)


def named(recipe, **changes):
    return replace(recipe, name="; ".join((recipe.name, *changes.values())), **changes)


def recipes():
    plain = [Recipe.parse(name) for name in Recipe.names()]
    yield from plain
    for fmt, scaling in itertools.product(("e4m3", "e2m1", "int8"), ("tensorwise", "rowwise", "columnwise", "block128x128")):
        for rounding in ("floor", "ceil", "nearest_even"):
            yield named(Recipe.parse(f"{fmt}/{scaling}"), scale_format="e8m0", scale_rounding=rounding)
    for recipe in plain:
        if recipe.scaling in ("none", "mx32", "bdr16"):
            yield named(recipe, rounding="toward_zero")
        if recipe.scaling in ("none", "tensorwise", "mx32") and recipe.format in (*FLOAT8, "bf16", "fp16", "tf32"):
            yield named(recipe, overflow="nonfinite")
            yield named(recipe, overflow="nonfinite", rounding="toward_zero")


def draw(shape, dtype, seed, spread=6.0):
    """Rows far apart in size, a zero row, and the float32 values where arithmetic is most easily wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(spread * torch.randn((shape[0], 1), generator=generator))
    if shape[0] > 2:
        x[1] = 0
        extremes = torch.tensor(EXTREMES)[: shape[1]]
        x[-1, : len(extremes)] = extremes
        x[2] *= 1e-41  # subnormal as a whole
    x = x.to(dtype)
    # The interpreter reads subnormal bfloat16 wrongly; GPUs do not (tests/gpu).
    return torch.where(x.abs() < 2.0**-126, 0, x) if dtype == torch.bfloat16 else x


def assert_same(got, wanted, what):
    """Equal bits; a NaN is a NaN."""
    if got.dtype == torch.float32:
        nan = torch.isnan(wanted)
        assert torch.equal(torch.isnan(got), nan), what
        got, wanted = (torch.where(nan, 0.0, tensor).view(torch.int32) for tensor in (got, wanted))
    assert torch.equal(got, wanted), f"{what}: {int((got != wanted).sum())} of {got.numel()} differ"


def run(x, recipe, amax, scales, codes, values):
    """The kernels' (scales, codes, values), written over other numbers; codes and values without each other."""
    from numerics import gpu

    assert gpu.supports(x, recipe)
    made = [torch.full_like(tensor, 77) for tensor in (scales, codes, values)]
    again = torch.full_like(scales, 77)
    assert gpu.quantize_into(x, recipe, amax, made[0], made[1], None)
    assert gpu.quantize_into(x, recipe, amax, again, None, made[2])
    assert torch.equal(made[0], again)
    return made


def in_torch(function, *arguments, **options):
    """Without the CPU's kernels: what both kinds are held equal to."""
    with mock.patch("numerics.cpu.supports", return_value=False):
        return function(*arguments, **options)


def compare(x, recipe):
    if recipe.block and any(size and extent % size for extent, size in zip(x.shape, recipe.block, strict=True)):
        return
    wanted, values = in_torch(quantize, x, recipe), in_torch(fake_quantize, x, recipe)
    what = f"{recipe.name} {tuple(x.shape)} {x.dtype}"
    for got, expected, part in zip(
        run(x, recipe, None, wanted.scales, wanted.codes, values),
        (wanted.scales, wanted.codes, values), ("scales", "codes", "values"), strict=True,
    ):  # fmt: skip
        assert_same(got, expected, f"{what} {part}")


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's run")
def test_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("recipe", list(recipes()), ids=lambda recipe: recipe.name)
def test_equal_to_torch(recipe):
    for seed, shape in enumerate(SHAPES[recipe.scaling]):
        compare(draw(shape, torch.float32, seed), recipe)
    compare(draw(SHAPES[recipe.scaling][-1], torch.bfloat16, 10, 2.0), recipe)


@interpreted
@pytest.mark.parametrize("scaling", SHAPES)
def test_strides_and_fp16(scaling):
    recipe = Recipe.parse({"none": "e4m3", "mx32": "mxfp8_e4m3", "bdr16": "mx9"}.get(scaling, f"e4m3/{scaling}"))
    x = draw((256, 512), torch.float32, 5, 2.0)
    height = 128 if scaling == "block128x128" else 36
    compare(x[:height, 128:256], recipe)  # strided rows
    compare(x[::2, ::2][:height, :128], recipe)  # strided values
    compare(x[:128, :height].t(), recipe)
    compare(draw((height, 256), torch.float16, 6, 1.0).nan_to_num(posinf=1, neginf=1), recipe)
    compare(torch.zeros(128, 128), recipe)


@interpreted
def test_a_row_too_long_to_hold():
    compare(draw((3, 16448), torch.float32, 7), Recipe.parse("e4m3/rowwise"))


@interpreted
def test_columns_too_long_for_one_look_at_their_maxima():
    from numerics.gpu_dual import quantize_dual

    x = draw((1100, 3), torch.float32, 14)
    compare(x, Recipe.parse("e4m3/columnwise"))
    turned = quantize_dual(x, "e4m3/rowwise")[1]
    wanted = in_torch(quantize, x.t().contiguous(), "e4m3/rowwise")
    assert torch.equal(turned.codes, wanted.codes) and torch.equal(turned.scales, wanted.scales)


@interpreted
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e5m2fnuz", "e2m3", "e2m1", "int8", "int4", "fp16", "bf16", "tf32"])
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
def test_every_tie_and_its_neighbours(fmt, rounding):
    recipe = replace(Recipe.parse(fmt), rounding=rounding)
    values = recipe.element.values() if recipe.element.bits <= 16 else np.arange(0, 4, 2.0**-8)
    grid = np.unique(values[np.isfinite(values)])[-3000:]
    ties = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    points = np.concatenate([grid, ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    compare(torch.from_numpy(points.astype(np.float32))[None], recipe)


@interpreted
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "columnwise", "block1x128", "block128x128"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("scale", [("fp32", "floor"), ("e8m0", "floor"), ("e8m0", "ceil"), ("e8m0", "nearest_even")])
def test_a_given_amax(scaling, fmt, scale):
    x = draw((128, 256) if scaling == "block128x128" else (20, 128), torch.float32, 8)
    x[3] *= 1e30
    own = Recipe.parse(f"{fmt}/{scaling}")
    shape = quantize(x, own).scales.shape
    generator = torch.Generator().manual_seed(9)
    amax = torch.exp2(40 * torch.randn(shape, generator=generator)).clamp(1e-44, 3e38)
    if amax.numel() > 4:
        amax.view(-1)[:4] = torch.tensor([0.0, 1e-45, 3.4e38, 1e-37])
    policies = [("nearest_even", "saturate"), ("toward_zero", "saturate")]
    if fmt in FLOAT8:
        policies += [("nearest_even", "nonfinite"), ("toward_zero", "nonfinite")]
    for rounding, overflow in policies:
        recipe = replace(own, scale_format=scale[0], scale_rounding=scale[1], rounding=rounding, overflow=overflow, amax="given")
        wanted, values = (in_torch(function, x, recipe, amax=amax) for function in (quantize, fake_quantize))
        for got, expected, part in zip(
            run(x, recipe, amax, wanted.scales, wanted.codes, values),
            (wanted.scales, wanted.codes, values), ("scales", "codes", "values"), strict=True,
        ):  # fmt: skip
            assert_same(got, expected, f"{recipe!r} {part}")


@interpreted
@pytest.mark.parametrize("shape", [(1, 1), (67, 130), (128, 128)])
def test_the_next_amax_from_the_same_pass(shape):
    from numerics import gpu

    x, recipe = draw(shape, torch.float32, 15), replace(Recipe.parse("e4m3/tensorwise"), amax="given")
    amax = torch.tensor(3.0)
    wanted = in_torch(quantize, x, recipe, amax=amax)
    scales, codes, largest = torch.zeros(()), torch.zeros(shape, dtype=torch.uint8), torch.zeros(())
    assert gpu.quantize_into(x, recipe, amax, scales, codes, amax_out=largest)
    assert torch.equal(codes, wanted.codes) and torch.equal(scales, wanted.scales) and largest == x.abs().max()
    raised = torch.tensor(2 * float(largest) + 1)
    before = raised.clone()
    assert gpu.quantize_into(x, recipe, amax, scales, codes, amax_out=raised) and raised == before
    own = torch.zeros(())
    assert gpu.quantize_into(x, Recipe.parse("e4m3/tensorwise"), None, scales, codes, amax_out=own) and own == largest
    with pytest.raises(ValueError, match="tensorwise"):
        gpu.quantize_into(x, Recipe.parse("e4m3/rowwise"), None, scales, codes, amax_out=largest)


@interpreted
@pytest.mark.parametrize("scaling", [name for name in SHAPES if name != "none"])
def test_what_is_not_finite_is_reported(scaling):
    from numerics import gpu

    recipe = Recipe.parse({"mx32": "mxfp4", "bdr16": "mx6"}.get(scaling, f"e4m3/{scaling}"))
    x = torch.ones(128, 128)
    made = quantize(x, recipe)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[127, 100] = bad
        arguments = made.scales.clone(), made.codes.clone()
        assert not gpu.quantize_into(x, recipe, None, *arguments)
        assert gpu.quantize_into(x, recipe, None, *arguments, check=False)
        if scaling not in ("mx32", "bdr16"):
            assert not gpu.quantize_into(x, recipe, torch.ones_like(made.scales), *arguments)


@interpreted
def test_outputs_of_any_strides():
    from numerics import gpu

    x, recipe = draw((64, 96), torch.float32, 11), Recipe.parse("e4m3/rowwise")
    wanted = in_torch(quantize, x, recipe)
    codes, values, scales = torch.zeros(96, 64, dtype=torch.uint8).t(), torch.zeros(64, 192)[:, ::2], torch.zeros(64, 2)[:, :1]
    assert gpu.quantize_into(x, recipe, None, scales, codes, values)
    assert torch.equal(codes, wanted.codes) and torch.equal(scales, wanted.scales) and torch.equal(values, wanted.dequantize())


@interpreted
@pytest.mark.parametrize("name", ["e4m3", "e4m3/tensorwise", "int8/columnwise", "mxfp4", "mx9", "e2m3/block128x128"])
def test_values_in_place(name):
    from numerics import gpu

    recipe, x = Recipe.parse(name), draw((128, 256), torch.float32, 13)
    wanted = in_torch(fake_quantize, x, recipe)
    assert gpu.quantize_into(x, recipe, None, None, None, x)
    assert torch.equal(x, wanted)


@interpreted
def test_what_is_left_to_torch():
    from numerics import gpu

    x = torch.ones(128, 128)
    assert not gpu.supports(x.double(), Recipe.parse("e4m3"))
    assert not gpu.supports(x[0], Recipe.parse("e4m3"))
    assert not gpu.supports(x[:0], Recipe.parse("e4m3"))
    assert not gpu.supports(x[:100], Recipe.parse("e4m3/block128x128"))
    assert not gpu.supports(x[:, :24], Recipe.parse("mxfp4"))
    assert not gpu.supports(x[:, :24], Recipe.parse("mx9"))
    assert not gpu.supports(x, replace(Recipe.parse("e4m3"), rounding="stochastic"))


@interpreted
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "block1x128", "block128x128"])
def test_both_layouts_at_once(fmt, scaling):
    from numerics.gpu_dual import quantize_dual, quantize_turned

    x = draw((384, 512), torch.float32, 12, 3.0)
    parts = [x[:256, 128:384]] if "block" in scaling else [x[:1, :1], x[:37, :70], x[:132, 100:241], x[:40, :76].t()]
    for part in parts:
        made = quantize_dual(part, f"{fmt}/{scaling}")
        for got, source in zip(made, (part, part.t()), strict=True):
            wanted = in_torch(quantize, source.contiguous(), f"{fmt}/{scaling}")
            assert torch.equal(got.codes, wanted.codes) and torch.equal(got.scales, wanted.scales)
            assert got.codes.is_contiguous() and got.scales.shape == wanted.scales.shape
        alone = quantize_turned(part, f"{fmt}/{scaling}")
        assert torch.equal(alone.codes, made[1].codes) and torch.equal(alone.scales, made[1].scales)
        assert alone.codes.is_contiguous() and alone.scales.shape == made[1].scales.shape


@interpreted
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "block1x128", "block128x128"])
def test_both_layouts_of_bfloat16_two_at_a_time(fmt, scaling):
    from numerics import gpu_pairs
    from numerics.gpu_dual import quantize_dual, quantize_turned

    x = draw((384, 512), torch.bfloat16, 16, 3.0)
    x[:, 5] = 0
    parts = [x[:256, 128:384], x[:128]] if "block" in scaling else [x[:4, :2], x[:36, :70], x[:132, 100:242], x]
    # Where values lie is no matter of their format.
    if fmt == "e4m3" and scaling not in ("block1x128", "block128x128"):
        # Rows and distances that 2, 4, 8 and 16 words divide, and rows apart by fewer than their own words' unit.
        parts += [x[:132, :wide] for wide in (20, 24, 16, 144)] + [x.view(-1)[: 384 * 500].view(384, 500)[:68, 4:100]]
    for part in parts:
        recipe = Recipe.parse(f"{fmt}/{scaling}")
        assert gpu_pairs.supports(part, recipe)
        made = (*quantize_dual(part, recipe), quantize_turned(part, recipe))
        for got, source in zip(made, (part, part.t(), part.t()), strict=True):
            wanted = in_torch(quantize, source.contiguous(), recipe)
            assert torch.equal(got.codes, wanted.codes) and torch.equal(got.scales, wanted.scales)
    with pytest.raises(ValueError, match="not finite"):
        quantize_turned(torch.full((128, 128), torch.inf, dtype=torch.bfloat16), f"{fmt}/{scaling}")


@interpreted
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("shape", [(2180, 34), (36, 2200)])
def test_both_layouts_under_scales_of_lines_of_many_tiles(shape, tiled, monkeypatch):
    """The maxima of 18 tiles, more than a program reduces at once; of yet more, a launch of its own reduces them."""
    from numerics import gpu_tiles
    from numerics.gpu_dual import quantize_dual

    monkeypatch.setattr(gpu_tiles, "_MOST_TILES", 18 if tiled else 17)
    x = draw(shape, torch.bfloat16, 17, 3.0)
    with mock.patch.object(gpu_tiles, "quantize", wraps=gpu_tiles.quantize) as used:
        made = quantize_dual(x, "e4m3/rowwise")
    assert used.called is tiled
    for got, source in zip(made, (x, x.t()), strict=True):
        wanted = in_torch(quantize, source.contiguous(), "e4m3/rowwise")
        assert torch.equal(got.codes, wanted.codes) and torch.equal(got.scales, wanted.scales)
    x[-1, -1] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        quantize_dual(x, "e4m3/rowwise")


@interpreted
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", ["rowwise", "block1x128", "block128x128"])
def test_bfloat16_as_it_lies_two_at_a_time(fmt, scaling):
    """Codes that begin at an odd place cannot be written by twos: another kernel writes the same."""
    from numerics import gpu, gpu_words

    x, recipe = draw((384, 512), torch.bfloat16, 18, 3.0), Recipe.parse(f"{fmt}/{scaling}")
    x[5] = 0
    parts = [x[:256, 128:384], x[:128]] if "block" in scaling else [x[:1, :2], x[:37, :70], x[:100, 6:300], x[::3]]
    if scaling == "rowwise" and fmt == "e4m3":
        parts += [x[:100, :20], x[:131, :24], x[:300, :16], x.view(-1)[: 384 * 500].view(384, 500)[:68, 4:100]]
    for part, offset in itertools.product(parts, (0, 1)):
        wanted = in_torch(quantize, part.contiguous(), recipe)
        codes = torch.full((part.numel() + offset,), 77, dtype=torch.uint8)[offset:].view(part.shape)
        scales = torch.full_like(wanted.scales, 77)
        with mock.patch.object(gpu_words, "quantize", wraps=gpu_words.quantize) as used:
            assert gpu.quantize_into(part, recipe, None, scales, codes)
        assert used.call_count == 1 - offset
        assert torch.equal(codes, wanted.codes) and torch.equal(scales, wanted.scales)
    x[127, 127] = torch.nan
    assert not gpu.quantize_into(x[:128, :128], recipe, None, None, torch.empty((128, 128), dtype=torch.uint8))


@interpreted
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("exponent", [-117, 0, 119])
def test_quotients_of_bfloat16_of_every_significand(fmt, exponent):
    """Under each of the 128 amaxes of a binade, every value of the binades below it that does not vanish."""
    from numerics.gpu_dual import quantize_turned

    recipe = Recipe.parse(f"{fmt}/block1x128")
    significands = torch.arange(128, 256).double()
    binades = torch.arange(exponent, exponent - min(36, (exponent + 133) // 4 * 4), -1).double()
    values = (significands * torch.exp2(binades - 7)[:, None]).bfloat16()  # (binades, 128)
    for turn in range(0, 128, 32):
        limit = values[0, turn : turn + 32].repeat_interleave(len(binades))
        x = torch.minimum(values.t().repeat(1, 32), limit)  # A column of 128 rows is a block.
        columns = torch.arange(x.shape[1])
        x[columns % 128, columns] = limit
        made, wanted = quantize_turned(x, recipe), in_torch(quantize, x.t().contiguous(), recipe)
        assert torch.equal(made.scales, wanted.scales)
        assert torch.equal(made.codes, wanted.codes)


@interpreted
def test_both_layouts_refusals():
    from numerics.gpu_dual import quantize_dual, quantize_turned

    for function in (quantize_dual, quantize_turned):
        with pytest.raises(ValueError, match="not finite"):
            function(torch.full((4, 4), torch.nan), "e4m3/rowwise")
    with pytest.raises(ValueError, match="not supported"):
        quantize_dual(torch.ones(4, 4), "e4m3/columnwise")


@interpreted
@pytest.mark.parametrize("shape", [(1, 2), (7, 10), (100, 130), (130, 128), (3, 8000)])
def test_a_tensor_quantized_in_one_launch(shape):
    """The interpreter's one program holds two blocks of 8,192 values, and reads a third one again."""
    from numerics import gpu, gpu_meeting

    x, recipe = draw(shape, torch.bfloat16, 17, 3.0), Recipe.parse("e4m3/tensorwise")
    wanted = in_torch(quantize, x, recipe)
    scales, codes = torch.full_like(wanted.scales, 77), torch.full_like(wanted.codes, 77)
    with mock.patch.object(gpu_meeting, "quantize", wraps=gpu_meeting.quantize) as used:
        assert gpu.quantize_into(x, recipe, None, scales, codes)
    assert used.call_count == 1
    assert torch.equal(codes, wanted.codes) and torch.equal(scales, wanted.scales)
    odd = torch.full((codes.numel() + 1,), 77, dtype=torch.uint8)[1:].view(codes.shape)
    assert gpu.quantize_into(x, recipe, None, scales, odd)
    assert torch.equal(odd, wanted.codes)
