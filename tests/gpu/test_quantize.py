"""Quantization on a GPU against the CPU and against torch on the same GPU: equal to the last bit, on fresh data."""

import itertools
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from numerics.quantization import fake_quantize, quantize
from numerics.recipe import Recipe

pytest.importorskip("triton", reason="needs triton")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
SCALED = ("tensorwise", "rowwise", "columnwise", "block1x128", "block128x128")


def shapes(scaling, draw):
    """An awkward shape, and a large one that no tile divides where blocks allow that."""
    if scaling == "block128x128":
        return [(128, 128), (128 * draw.randint(2, 9), 128 * draw.randint(2, 9))]
    unit = {"block1x128": 128, "mx32": 32, "bdr16": 16}.get(scaling, 1)
    return [(1, unit), (draw.randint(2, 40), unit * draw.randint(1, 9)), (draw.randint(300, 900), unit * (2500 // unit + 1))]


def operand(draw, shape, dtype):
    """Rows far apart in size; a zero row, a subnormal row, extremes, and values on ties."""
    generator = torch.Generator().manual_seed(draw.getrandbits(63))
    spread = 2.0 if dtype == torch.float16 else draw.choice((0.5, 6.0, 20.0))
    x = torch.randn(shape, generator=generator) * torch.exp2(spread * torch.randn((shape[0], 1), generator=generator))
    x = x.clamp(-3e38, 3e38)
    if shape[0] > 3:
        x[0] = torch.round(x[0] * 8 / x[0].abs().max().clamp(min=1e-30)) / 8  # ties of small formats
        x[1] = 0
        x[2] = x[2].sign() * torch.rand(shape[1], generator=generator) * 1e-38
        x[3, :4] = torch.tensor([1e-45, -0.0, 2.0**-126, -(2.0**-127)])[: shape[1]]
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def assert_same(got, wanted, what):
    """Equal bits; a NaN is a NaN."""
    got = got.cpu()
    if got.dtype == torch.float32:
        nan = torch.isnan(wanted)
        assert torch.equal(torch.isnan(got), nan), what
        got, wanted = (torch.where(nan, 0.0, tensor).view(torch.int32) for tensor in (got, wanted))
    assert torch.equal(got, wanted), f"{what}: {int((got != wanted).sum())} of {got.numel()} differ"


def in_torch(function, *arguments, **options):
    """Without the kernels of either device."""
    with mock.patch("numerics.gpu.supports", return_value=False), mock.patch("numerics.cpu.supports", return_value=False):
        return function(*arguments, **options)


def compare(x, recipe, seed, amax=None):
    """The GPU's kernels against torch on the CPU and on the GPU; x lies on the CPU."""
    from numerics import gpu

    what = f"seed {seed}: {recipe!r} {tuple(x.shape)} {x.dtype}"
    on_gpu = x.cuda()
    options = {} if amax is None else {"amax": amax}
    there = {} if amax is None else {"amax": amax.cuda()}
    assert gpu.supports(on_gpu, recipe), what
    made, values = quantize(on_gpu, recipe, **there), fake_quantize(on_gpu, recipe, **there)
    for device, source, given in (("CPU", x, options), ("GPU", on_gpu, there)):
        wanted = in_torch(quantize, source, recipe, **given)
        assert_same(made.scales, wanted.scales.cpu(), f"{what}: scales, {device}")
        assert_same(made.codes, wanted.codes.cpu(), f"{what}: codes, {device}")
        assert_same(values, in_torch(fake_quantize, source, recipe, **given).cpu(), f"{what}: values, {device}")


def some_variants(draw, recipe):
    """A few of the recipe's roundings, overflows and kinds of scale; every run draws others, since each is compiled."""
    every = list(variants(recipe))
    return draw.sample(every, min(4, len(every)))


def variants(recipe):
    """The recipe under every rounding, overflow and kind of scale that it can have."""
    yield recipe
    if recipe.shared is not None:
        yield replace(recipe, rounding="toward_zero")
        return
    scales: list[dict[str, str]] = [{}]
    if recipe.block is not None:
        scales = [{"scale_format": "e8m0", "scale_rounding": how} for how in ("floor", "ceil", "nearest_even")]
        scales += [{}] if recipe.scale_format == "fp32" else []
    overflows = ("saturate", "nonfinite") if recipe.format in (*FLOAT8, "bf16", "fp16", "tf32") else ("saturate",)
    for scale, overflow, rounding in itertools.product(scales, overflows, ("nearest_even", "toward_zero")):
        yield replace(recipe, **scale, overflow=overflow, rounding=rounding)


@pytest.mark.parametrize("name", Recipe.names())
def test_every_recipe(name):
    seed = random.SystemRandom().getrandbits(48)
    draw = random.Random(seed)
    recipe = Recipe.parse(name)
    for shape in shapes(recipe.scaling, draw):
        compare(operand(draw, shape, draw.choice(DTYPES)), recipe, seed)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m3", "e2m1", "int8", "bf16", "fp16", "tf32",
                                  *(f"{fmt}/{scaling}" for fmt in ("e4m3", "e5m2", "int4") for scaling in SCALED),
                                  "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "mxint8", "mx9", "mx4", "msfp12"])  # fmt: skip
def test_roundings_overflows_and_scales(name):
    seed = random.SystemRandom().getrandbits(48)
    draw = random.Random(seed)
    for recipe in some_variants(draw, Recipe.parse(name)):
        compare(operand(draw, shapes(recipe.scaling, draw)[1], draw.choice(DTYPES)), recipe, seed)


@pytest.mark.parametrize("scaling", SCALED)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m3", "int8"])
def test_a_given_amax(fmt, scaling):
    """Amaxes from subnormal to FP32's greatest: quotients overflow, vanish, and lie among FP32's subnormals."""
    seed = random.SystemRandom().getrandbits(48)
    draw = random.Random(seed)
    for recipe in some_variants(draw, Recipe.parse(f"{fmt}/{scaling}")):
        x = operand(draw, shapes(scaling, draw)[-1], draw.choice(DTYPES))
        own = quantize(x, replace(recipe, overflow="saturate")).scales
        generator = torch.Generator().manual_seed(draw.getrandbits(63))
        amax = torch.exp2(draw.choice((2.0, 50.0)) * torch.randn(own.shape, generator=generator)) * own * recipe.element.max
        amax = amax.nan_to_num(posinf=3e38).clamp(1e-45, 3.4e38)
        if amax.numel() > 4:
            amax.view(-1)[:4] = torch.tensor([0.0, 1e-45, 3.4e38, 1e-37])
        compare(x, replace(recipe, amax="given"), seed, amax)


@pytest.mark.parametrize("magnitude", [1e-44, 1e-40, 1e-38, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("name", ["e4m3/rowwise", "e5m2/tensorwise", "e2m1/columnwise", "mxfp8_e5m2", "mx9", "mx4", "msfp12"])
def test_subnormal_and_huge_tensors(name, magnitude):
    seed = random.SystemRandom().getrandbits(48)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1) * magnitude
    compare(x, Recipe.parse(name), seed)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
def test_the_hardware_conversion_on_every_bfloat16_and_its_neighbours(fmt, overflow):
    """Every bfloat16 and the float32 values beside it hold every tie of an 8-bit format and what lies next to it."""
    bits = torch.arange(2**16, dtype=torch.int64) << 16
    bits = torch.cat([bits - 1, bits, bits + 1]).clamp(0, 2**32 - 1)
    x = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    compare(x[torch.isfinite(x)][None], replace(Recipe.parse(fmt), overflow=overflow), 0)


def test_division_is_correctly_rounded():
    """Random quotients of FP32 mantissas: int8 codes and e4m3 codes, whose ties the division must hit."""
    seed = random.SystemRandom().getrandbits(48)
    generator = torch.Generator().manual_seed(seed)
    for fmt in ("e4m3", "e5m2", "int8", "e2m3"):
        recipe = replace(Recipe.parse(f"{fmt}/rowwise"), amax="given")
        amax = torch.exp2(4 * torch.rand(256, 1, generator=generator))
        scale = amax / torch.full_like(amax, recipe.element.max)
        # Products of a scale with ties of the grid, moved by up to two units in the last place.
        ties = (2 * torch.randint(0, 8, (256, 4096), generator=generator) + 17) * torch.exp2(
            torch.randint(-5, 3, (256, 4096), generator=generator).float()
        )
        bits = (ties * scale).view(torch.int32) + torch.randint(-2, 3, ties.shape, generator=generator, dtype=torch.int32)
        compare(bits.view(torch.float32), recipe, seed, amax)


@pytest.mark.parametrize("scaling", SCALED)
def test_strides_long_rows_and_in_place(scaling):
    seed = random.SystemRandom().getrandbits(48)
    draw = random.Random(seed)
    recipe = Recipe.parse(f"e4m3/{scaling}")
    x = operand(draw, (512, 20480), torch.float32)
    compare(x[:128], recipe, seed)
    big = x.cuda()
    for view in (big[:256, 128:640], big[:128, :256].t(), big[::2, ::2][:, :1280]):
        made, wanted = quantize(view, recipe), in_torch(quantize, view.contiguous(), recipe)
        assert_same(made.codes, wanted.codes.cpu(), f"seed {seed}")
        assert_same(made.scales, wanted.scales.cpu(), f"seed {seed}")
    wanted = in_torch(fake_quantize, big, recipe).cpu()
    fake_quantize(big, recipe, out=big)
    assert_same(big, wanted, f"seed {seed}: in place")


@pytest.mark.parametrize("scaling", ["rowwise", "columnwise"])
def test_rows_further_apart_than_32_bits_count(scaling):
    """A few columns of a very wide matrix: of rows that one program takes, the last lies 2^31 elements behind the first."""
    memory = torch.zeros(2**32, dtype=torch.bfloat16, device="cuda")
    for shape, stride in (((2048, 1), 2**21), ((1024, 2), 2**22)):
        view = memory.as_strided(shape, (stride, 1))
        view.copy_(torch.randn(shape))
        made, wanted = (quantize(x, f"e4m3/{scaling}") for x in (view, view.contiguous()))
        assert torch.equal(made.codes, wanted.codes) and torch.equal(made.scales, wanted.scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_more_tiles_of_rows_than_a_grid_s_second_axis_has(dtype):
    """65,536 blocks of 128 rows, and one more."""
    from numerics.gpu_dual import quantize_dual

    rows = 128 * 65537
    x = torch.zeros(rows, 128, dtype=dtype, device="cuda")
    last = torch.randn(256, 128, device="cuda").to(dtype)
    x[-256:] = last
    made, wanted = quantize(x, "e4m3/block128x128"), quantize(last, "e4m3/block128x128")
    assert torch.equal(made.codes[-256:], wanted.codes) and torch.equal(made.scales[-2:], wanted.scales)
    for scaling in ("block128x128", "block1x128"):
        (codes, turned), (some, some_turned) = (quantize_dual(y, f"e4m3/{scaling}") for y in (x, last))
        assert torch.equal(codes.codes[-256:], some.codes) and torch.equal(turned.codes[:, -256:], some_turned.codes)
        assert torch.equal(turned.scales[:, -2:], some_turned.scales)


def test_what_is_not_finite_is_refused():
    for name, bad in itertools.product(("e4m3", "e4m3/tensorwise", "int8/rowwise", "mxfp4", "mx9"), (torch.nan, torch.inf)):
        x = torch.ones(256, 512, device="cuda")
        x[255, 500] = bad
        with pytest.raises(ValueError, match="finite"):
            quantize(x, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "block1x128", "block128x128"])
def test_both_layouts_at_once(scaling, fmt, dtype):
    from numerics.gpu_dual import quantize_dual

    seed = random.SystemRandom().getrandbits(48)
    draw = random.Random(seed)
    unit = 128 if "block" in scaling else 1
    for top, fold in ((1, 1), (9, 4), (900 // unit, 1), (900 // unit, 4)):
        x = operand(draw, (fold * unit * draw.randint(1, top), unit * draw.randint(1, top)), dtype).cuda()
        made = quantize_dual(x, f"{fmt}/{scaling}")
        for got, source in zip(made, (x, x.t().contiguous()), strict=True):
            wanted = in_torch(quantize, source, f"{fmt}/{scaling}")
            assert_same(got.codes, wanted.codes.cpu(), f"seed {seed}")
            assert_same(got.scales, wanted.scales.cpu(), f"seed {seed}")
            assert got.codes.is_contiguous()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_quotients_of_every_bfloat16(fmt):
    """Every amax of bfloat16 over every value below it that does not vanish: the quotient of two float32 factors."""
    from numerics.gpu_dual import quantize_turned

    every = torch.arange(1, 0x7F80, dtype=torch.int32, device="cuda")
    span = 40 * 128  # Bit patterns below an amax: 40 binades.
    recipe = Recipe.parse(f"{fmt}/block1x128")
    for some in every.split(128 * 16):
        some = torch.nn.functional.pad(some, (0, -len(some) % 128), value=1)
        # A block is a column of 128 rows: its amax, and 127 of the patterns below it.
        below = torch.arange(span + 127 - span % 127, device="cuda", dtype=torch.int32).view(-1, 1, 127)
        bits = torch.cat([some.view(1, -1, 1).expand(len(below), -1, -1), (some.view(1, -1, 1) - below).clamp(min=0)], 2)
        x = bits.reshape(-1, 128).t().contiguous().to(torch.int16).view(torch.bfloat16)
        lying = x.t().contiguous()
        wanted = in_torch(quantize, lying, recipe)
        for made in (quantize_turned(x, recipe), quantize(lying, recipe)):
            assert torch.equal(made.scales, wanted.scales) and torch.equal(made.codes, wanted.codes)
