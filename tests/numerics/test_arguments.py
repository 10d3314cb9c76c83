"""Recipes' fields, amax, out=, and whatever else a caller may pass, on the compiled path and in torch."""

import copy
import dataclasses
import itertools
import pickle
import warnings

import numpy as np
import pytest
import torch

import numerics
from numerics import AmaxHistory, Recipe, cast, cpu, fake_quantize, quantize
from numerics.recipe import _CHOICES


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request, monkeypatch):
    monkeypatch.setattr(cpu, "_WORTH_IMPORTING", 0)
    if request.param == "torch":
        monkeypatch.setattr(cpu, "supports", lambda x, recipe: False)


def draw(rows=128, columns=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(3 * torch.randn(rows, 1, generator=generator))


# Recipes


@pytest.mark.parametrize("name", Recipe.names())
def test_a_printed_recipe_can_be_read_and_rebuilt(name):
    recipe = Recipe.parse(name)
    assert eval(repr(recipe), {"Recipe": Recipe}) == recipe
    assert Recipe.parse(recipe.name) is recipe


def test_fields_follow_the_name():
    recipe = Recipe.parse("e4m3/rowwise;rounding=toward_zero; scale_format=e8m0;scale_rounding=ceil;amax=given")
    assert recipe.name == "e4m3/rowwise;scale_format=e8m0;scale_rounding=ceil;rounding=toward_zero;amax=given"
    assert Recipe.parse(recipe.name) == recipe
    assert dataclasses.replace(recipe, name="e4m3/rowwise", amax="current", rounding="nearest_even", scale_format="fp32",
                               scale_rounding="floor") == Recipe.parse("e4m3/rowwise")  # fmt: skip


def test_every_combination_of_fields_works_or_is_refused_in_one_line():
    x = draw(128, 128)
    generator = torch.Generator().manual_seed(0)
    works = refused = 0
    formats = ("e4m3", "e2m1", "bf16", "msfp12")
    for values in itertools.product(formats, *list(_CHOICES.values())[1:]):
        fields = dict(zip(_CHOICES, values, strict=True))
        try:
            recipe = Recipe("test", **fields)
        except ValueError as error:
            refused += 1
            assert str(error).startswith("recipe: ") and "\n" not in str(error) and ("use" in str(error) or "leave" in str(error))
            continue
        works += 1
        amax = {"current": None, "given": 2.0, "delayed": AmaxHistory()}[recipe.amax]
        quantized = quantize(x, recipe, amax=amax, generator=generator)
        values = quantized.dequantize()
        assert values.shape == x.shape
        if recipe.overflow == "saturate":
            assert torch.isfinite(values).all()
    assert works > 250 and refused > works


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("e4m3/rowwise;rounding", "'rounding' is no field=value of scale_format, scale_rounding, rounding, overflow, amax"),
        ("e4m3/rowwise;format=e5m2", "no field=value"),
        ("e4m3/rowwise;rounding=up", "rounding = 'up'; choose one of nearest_even"),
        ("e4m3;amax=given", "scaling none has no scale; leave amax away"),
        ("e4m3;scale_format=e8m0", "leave scale_format away"),
        ("e4m3/rowwise;scale_rounding=ceil", "use scale_format='e8m0'"),
        ("mx9;amax=delayed", "use amax='current'"),
        ("msfp12;overflow=nonfinite", "use overflow='saturate'"),
        ("mxfp4;overflow=nonfinite", "e2m1 has no infinity and no NaN"),
        ("e4m3/rowwise;rounding=toward_zero;rounding=stochastic", "rounding is there twice; keep one"),
        (["e4m3"], "unknown recipe"),
        ("", "unknown recipe ''"),
    ],
)
def test_refused_recipes(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        Recipe.parse(text)
    assert "\n" not in str(caught.value)


def test_fields_of_other_types_are_refused():
    for fields, message in (((["x"], "e4m3"), r"name = \['x'\]; give a string"), (("x", np.array(["e4m3"])), "format = array")):
        with pytest.raises(ValueError, match=f"recipe: {message}"):
            Recipe(*fields)


@pytest.mark.parametrize("name", ["e4m3", "e4m3/rowwise", "mxfp4", "mxint8", "mx9", "mx4", "msfp12", "msfp16", "bf16"])
def test_stochastic_rounding_is_seeded_unbiased_and_next_to_the_value(name):
    x = draw(64, 128)
    name += ";rounding=stochastic"
    first, second = (fake_quantize(x, name, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    generator = torch.Generator().manual_seed(6)
    draws = torch.stack([fake_quantize(x, name, generator=generator).double() for _ in range(400)])
    # Beyond the greatest value a draw saturates; where both neighbours were drawn, x is between them and hit on average.
    low, high = draws.amin(0), draws.amax(0)
    assert ((draws == low) | (draws == high)).all()
    share = (x - low) / (high - low)
    settled = (share > 0.05) & (share < 0.95)
    assert settled.double().mean() > 0.3
    off = ((draws == high).double().mean(0) - share) / (share * (1 - share) / 400).sqrt()
    assert off[settled].abs().max() < 5.5
    codes = quantize(x, name, generator=torch.Generator().manual_seed(5))
    assert torch.equal(codes.dequantize(), first)
    with pytest.raises(TypeError, match="generator must be a torch.Generator, got int") as caught:
        fake_quantize(x, name, generator=5)
    assert "\n" not in str(caught.value)


def test_block_floating_point_by_hand():
    # msfp12: sign and three bits under the exponent of amax; no pair has a step of its own.
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([7.9, -1.5, 0.4, 0.5, 0.51])
    x[0, 16] = -0.3
    made = quantize(x, "msfp12")
    assert made.codes.dtype == torch.int16 and made.scales.tolist() == [[1.0, 2.0**-4]]
    assert made.codes[0, :5].tolist() == [7, -2, 0, 0, 1]
    assert made.dequantize()[0, [0, 1, 16]].tolist() == [7.0, -2.0, -0.3125]
    assert quantize(x, "msfp12;rounding=toward_zero").codes[0, :5].tolist() == [7, -1, 0, 0, 0]


# Amax


def test_given_amax_sets_the_scale_and_what_is_beyond_overflows():
    x = torch.tensor([[1.0, -2.0, 448.0, -1000.0]])
    assert quantize(x, "e4m3/tensorwise;amax=given", amax=448.0).scales == 1
    assert fake_quantize(x, "e4m3/tensorwise;amax=given", amax=448.0).tolist() == [[1.0, -2.0, 448.0, -448.0]]
    nonfinite = fake_quantize(x, "e4m3/tensorwise;amax=given;overflow=nonfinite", amax=torch.tensor(448.0))
    assert torch.isnan(nonfinite).tolist() == [[False, False, False, True]]
    infinite = fake_quantize(x * 1000, "e5m2/rowwise;amax=given;overflow=nonfinite", amax=torch.tensor([[57344.0]]))
    assert infinite.tolist() == [[1024.0, -2048.0, torch.inf, -torch.inf]]
    assert quantize(x, "e4m3/tensorwise;amax=given", amax=0).scales == 1  # as of a tensor of zeros


@pytest.mark.parametrize("name", ["e4m3/tensorwise", "e5m2/columnwise", "e4m3/block128x128", "mxfp8_e4m3"])
def test_a_given_amax_that_is_the_tensors_own_changes_nothing(name):
    x = draw()
    recipe = Recipe.parse(f"{name};amax=given")
    own = numerics.scaling.block_amax(x, recipe)
    assert torch.equal(fake_quantize(x, recipe, amax=own), fake_quantize(x, name))


def test_delayed_amax_follows_the_history():
    recipe = "e4m3/tensorwise;amax=delayed"
    tensors = [torch.full((2, 4), size) for size in (448.0, 896.0, 224.0, 112.0, 56.0)]
    for algorithm, scales in (("max", [1.0, 1.0, 2.0, 2.0, 0.5]), ("most_recent", [1.0, 1.0, 2.0, 0.5, 0.25])):
        history = AmaxHistory(length=2, algorithm=algorithm)
        assert history.amax() is None
        assert [float(quantize(x, recipe, amax=history).scales) for x in tensors] == scales
        assert len(history) == 2 and float(history.amax()) == {"max": 112.0, "most_recent": 56.0}[algorithm]
    assert repr(history) == "AmaxHistory(length=2, algorithm='most_recent')"


def test_a_history_is_told_nothing_of_what_failed():
    history = AmaxHistory()
    fake_quantize(torch.ones(2, 4), "e4m3/rowwise;amax=delayed", amax=history)
    with pytest.raises(ValueError, match="not finite"):
        fake_quantize(torch.full((2, 4), torch.nan), "e4m3/rowwise;amax=delayed", amax=history)
    with pytest.raises(ValueError, match=r"shape \(2, 1\), this tensor has \(3, 1\); keep one history per tensor"):
        fake_quantize(torch.ones(3, 4), "e4m3/rowwise;amax=delayed", amax=history)
    assert len(history) == 1


def test_a_history_knows_an_input_that_was_overwritten():
    history, x = AmaxHistory(), torch.full((2, 4), 1.03)
    fake_quantize(x, "e4m3/tensorwise;amax=delayed", amax=history, out=x)
    assert float(history.amax()) == np.float32(1.03)


@pytest.mark.parametrize(
    ("recipe", "amax", "error", "message"),
    [
        ("e4m3/rowwise", 1.0, ValueError, "takes its amax from x; leave amax= away"),
        ("e4m3/rowwise;amax=given", None, TypeError, r"needs amax=, a number or a tensor of shape \(128, 1\); got NoneType"),
        ("e4m3/rowwise;amax=given", True, TypeError, "got bool"),
        ("e4m3/rowwise;amax=given", 1j, TypeError, "got complex"),
        ("e4m3/rowwise;amax=given", torch.ones(128, 1, dtype=torch.complex64), TypeError, "real numbers, got torch.complex64"),
        ("e4m3/rowwise;amax=given", torch.ones(128, 1, device="meta"), ValueError, "amax is a meta tensor without values"),
        ("e4m3/rowwise;amax=given", torch.ones(128, 1).to_sparse(), ValueError, "amax is of layout torch.sparse_coo"),
        ("e4m3/rowwise;amax=given", 10**400, ValueError, "negative or not finite"),
        ("e4m3/rowwise;amax=given", torch.ones(5), ValueError, r"amax has shape \(5,\)"),
        ("e4m3/rowwise;amax=given", -1.0, ValueError, "negative or not finite"),
        ("e4m3/tensorwise;amax=given", torch.tensor(torch.inf), ValueError, "negative or not finite"),
        ("e4m3/tensorwise;amax=delayed", 1.0, TypeError, r"needs amax=AmaxHistory\(\), one per tensor; got float"),
    ],
)
def test_refused_amax(recipe, amax, error, message):
    with pytest.raises(error, match=message) as caught:
        quantize(draw(), recipe, amax=amax)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("amax", [2, np.float32(2), np.int64(2), torch.tensor([[2]]), torch.full((128, 1), 2.0).double()])
def test_numbers_of_every_kind_are_an_amax(amax):
    recipe = "e4m3/rowwise;amax=given"
    assert torch.equal(fake_quantize(draw(), recipe, amax=amax), fake_quantize(draw(), recipe, amax=2.0))


@pytest.mark.parametrize(
    ("amax", "error", "message"),
    [
        (1.0, TypeError, "amax must be a torch tensor, got float"),
        (torch.tensor(1), TypeError, "floating-point tensor, got torch.int64"),
        (torch.tensor(torch.nan), ValueError, "negative or not finite"),
        (torch.tensor(-1.0), ValueError, "negative or not finite"),
        (torch.tensor(1.0, device="meta"), ValueError, "meta tensor without values"),
    ],
)
def test_a_history_takes_magnitudes_only(amax, error, message):
    history = AmaxHistory()
    with pytest.raises(error, match=message):
        history.record(amax)
    assert len(history) == 0


def test_a_history_keeps_what_it_was_told():
    history, amax = AmaxHistory(), torch.tensor(448.0, dtype=torch.float64)
    history.record(amax)
    amax.fill_(1.0)
    made = quantize(draw(), "e4m3/tensorwise;amax=delayed", amax=history)
    assert made.scales == 1 and made.scales.dtype == torch.float32


def test_refused_histories():
    for length in (None, 2.5, True):
        with pytest.raises(TypeError, match=f"length = {length}; it must be a whole number"):
            AmaxHistory(length)
    with pytest.raises(ValueError, match="length = 0; it must be at least 1"):
        AmaxHistory(0)
    with pytest.raises(ValueError, match="algorithm = 'mean'; choose one of max, most_recent"):
        AmaxHistory(algorithm="mean")


# out=

NAMES = ["e4m3", "e4m3/tensorwise", "e5m2/rowwise", "e4m3/columnwise", "e4m3/block128x128", "mxfp4", "mx9", "msfp16", "bf16"]


@pytest.mark.parametrize("name", [*NAMES, "e4m3/rowwise;rounding=toward_zero"])
def test_out_is_filled_and_may_be_x(name):
    x, other = draw(), draw(seed=1)
    expected = fake_quantize(x, name)
    out = torch.full_like(x, 7.0)
    assert fake_quantize(x, name, out=out) is out and torch.equal(out, expected)
    made = quantize(other, name)
    assert quantize(x, name, out=made) is made and torch.equal(made.dequantize(), expected)
    assert torch.equal(made.scales, quantize(x, name).scales)
    transposed = torch.empty(x.shape[::-1]).T
    assert torch.equal(fake_quantize(x, name, out=transposed), expected)
    strided = x.T.contiguous().T
    assert torch.equal(fake_quantize(strided, name, out=strided), expected) and torch.equal(strided, expected)
    assert fake_quantize(x, name, out=x) is x and torch.equal(x, expected)


def test_cast_takes_out_and_may_overwrite_its_input():
    x = draw()
    expected, out = cast(x, "e4m3"), torch.empty_like(x)
    assert cast(x, "e4m3", out=out) is out and torch.equal(out, expected)
    assert cast(x, "e4m3", out=x) is x and torch.equal(x, expected)
    with pytest.raises(TypeError, match="out must be a torch.float64 tensor, got torch.float32"):
        cast(x.double(), "e4m3", out=out)


def made_in_inference_mode():
    with torch.inference_mode():
        return torch.empty(4, 256)


BUFFER = torch.zeros(8, 512)


@pytest.mark.parametrize(
    ("x", "out", "error", "message"),
    [
        (torch.ones(4, 256), torch.empty(4, 255), ValueError, r"out has shape \(4, 255\) on cpu; it must have \(4, 256\)"),
        (torch.ones(4, 256), torch.empty(4, 256, device="meta"), ValueError, "on meta"),
        (torch.ones(4, 256), torch.empty(4, 256).bfloat16(), TypeError, "torch.float32 tensor, got torch.bfloat16"),
        (torch.ones(4, 256), np.ones((4, 256)), TypeError, "must be a torch.float32 tensor, got float64"),
        (torch.ones(4, 256), torch.empty(4, 1).expand(4, 256), ValueError, r"expanded: .*pass out.clone\(\)"),
        (torch.ones(4, 256), torch.empty(1024).as_strided((4, 256), (1, 1)), ValueError, r"expanded: .*pass out.clone\(\)"),
        (torch.ones(4, 256), torch.empty(4, 256).to_sparse(), ValueError, "sparse, nested or a negated view"),
        (torch.ones(4, 256), torch.ones(4, 256, dtype=torch.complex64).conj().imag, ValueError, "a negated view"),
        (torch.ones(4, 256), made_in_inference_mode(), ValueError, r"in inference mode .*pass out.clone\(\)"),
        (torch.ones(4, 256), torch.empty(4, 256).requires_grad_(), ValueError, r"pass out.detach\(\)"),
        (BUFFER[:4, :256], BUFFER[1:5, :256], ValueError, "overlaps x in part"),
        (BUFFER[:4, :4], BUFFER[:4, :4].T, ValueError, "overlaps x in part"),
    ],
)
def test_refused_out(x, out, error, message):
    with pytest.raises(error, match=message) as caught:
        fake_quantize(x, "e4m3/rowwise", out=out)
    assert "\n" not in str(caught.value)


def test_refused_quantized_out():
    x = draw()
    made = quantize(x, "e4m3/rowwise")
    with pytest.raises(ValueError, match="out was made with recipe e4m3/rowwise, this call has e5m2/rowwise"):
        quantize(x, "e5m2/rowwise", out=made)
    with pytest.raises(ValueError, match=r"out.codes has shape \(128, 256\)"):
        quantize(x[:64], "e4m3/rowwise", out=made)
    with pytest.raises(ValueError, match="out.scales has shape"):
        quantize(x, "e4m3/rowwise", out=dataclasses.replace(made, scales=torch.ones(128)))
    with pytest.raises(TypeError, match="out must be a QuantizedTensor, got Tensor"):
        quantize(x, "e4m3/rowwise", out=made.codes)


# Input


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.ones((2, 2), np.float32), TypeError, "got ndarray; numpy arrays go through torch.from_numpy"),
        ([[1.0]], TypeError, "got list"),
        (torch.ones(2, 2, dtype=torch.int64), TypeError, r"got torch.int64; convert with .float\(\)"),
        (torch.ones(2, 2, dtype=torch.bool), TypeError, "got torch.bool"),
        (torch.ones(2, 2, dtype=torch.complex64), TypeError, "got torch.complex64"),
        (torch.ones(2, 2).to(torch.float8_e4m3fn), TypeError, "got torch.float8_e4m3fn"),
        (torch.tensor(1.0), ValueError, r"matrix \(rows, K\) with at least one element, got shape \(\); reshape it"),
        (torch.ones(2, 2, 2), ValueError, r"got shape \(2, 2, 2\)"),
        (torch.ones(2, 0), ValueError, r"got shape \(2, 0\)"),
        (torch.ones(2, 2, device="meta"), ValueError, "a meta tensor without values"),
        (torch.ones(2, 2).to_sparse(), ValueError, "torch.sparse_coo"),
        (torch.tensor([[1.0, -torch.inf]], dtype=torch.bfloat16), ValueError, "1 of 2 values are not finite"),
        (torch.tensor([[1.0, 1e300]], dtype=torch.float64), ValueError, r"not finite \(in float32\)"),
    ],
)
def test_refused_input(x, error, message):
    for function in (quantize, fake_quantize):
        with pytest.raises(error, match=message) as caught:
            function(x, "e4m3/rowwise")
        assert "\n" not in str(caught.value)


def test_nested_tensors_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        x = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])
    for function in (quantize, fake_quantize, cast):
        with pytest.raises(ValueError, match="x is nested; give a dense tensor"):
            function(x, "e4m3")


def test_cast_refuses_what_has_no_values_and_knows_no_gradient():
    with pytest.raises(ValueError, match="x is of layout torch.sparse_coo; give a dense tensor"):
        cast(torch.eye(4).to_sparse(), "e4m3")
    with pytest.raises(TypeError, match=r"got torch.float4_e2m1fn_x2; convert with .float\(\)"):
        cast(torch.zeros(2, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "e4m3")
    with pytest.raises(ValueError, match=r"unknown format \['e4m3'\]"):
        cast(torch.ones(4), ["e4m3"])
    x, out = torch.ones(4, requires_grad=True), torch.empty(4)
    assert not cast(x, "e4m3").requires_grad and not cast(x, "e4m3", out=out).requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_what_torch_makes_by_default_does_not_matter(name):
    x = draw()
    expected = fake_quantize(x, name)
    for set_default, value, usual in (
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.set_default_device, "meta", None),
    ):
        set_default(value)
        try:
            values, made = fake_quantize(x, name), quantize(x, name)
        finally:
            set_default(usual)
        assert torch.equal(values, expected) and torch.equal(made.dequantize(), expected)
        assert made.scales.dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(fake_quantize(x, name), expected)


@pytest.mark.parametrize("name", ["e4m3", "e4m3/tensorwise", "e4m3/rowwise", "e4m3/columnwise", "mxfp4", "mx9", "msfp12"])
@pytest.mark.parametrize("shape", [(1, 32), (1, 1 << 20), (70_000, 32)])
def test_extreme_shapes(name, shape):
    x = torch.ones(shape)
    x[-1, -1] = -4
    assert torch.equal(fake_quantize(x, name), x)


def test_values_beside_float32s_greatest_may_come_back_infinite():
    x = torch.full((1, 32), torch.finfo(torch.float32).max)
    for name in ("mxfp8_e4m3", "mx9", "e4m3/rowwise", "bf16"):
        assert torch.isfinite(fake_quantize(x, name)).all()
    # The next power of two takes 256 x 2^120, which is 2^128.
    made = quantize(x, "mxfp8_e4m3;scale_rounding=ceil")
    assert made.scales == 2.0**120 and torch.isinf(made.dequantize()).all()


def test_results_are_copied_pickled_and_compared_by_identity():
    made = quantize(draw(), "mxfp4")
    history = AmaxHistory(3)
    history.record(torch.tensor(2.0))
    for again in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert torch.equal(again(made).dequantize(), made.dequantize()) and again(made).recipe == made.recipe
        assert repr(again(history)) == repr(history) and again(history).amax() == 2
    assert made == made and made != copy.copy(made) and len({made, made}) == 1


@pytest.mark.parametrize("name", Recipe.names())
def test_zeros_stay_zero_and_scales_stay_one(name):
    x = draw(128, 128)
    x[:, :64] = 0
    x[5] = 0
    made = quantize(torch.zeros(128, 128), name)
    assert (made.scales == 1).all() and (made.dequantize() == 0).all() and not made.codes.any()
    assert (fake_quantize(x, name)[x == 0] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_flows_and_the_input_is_left_alone(name):
    x = draw().requires_grad_()
    before = x.detach().clone()
    made = fake_quantize(x, name)
    assert not made.requires_grad and torch.equal(made, fake_quantize(before, name))
    assert not quantize(x, name).codes.requires_grad
    assert torch.equal(x.detach(), before)


def test_negated_views_are_read_as_they_print():
    x = torch.complex(draw(), draw(seed=1)).conj().imag
    assert x.is_neg()
    assert torch.equal(fake_quantize(x, "e4m3/rowwise"), fake_quantize(x.resolve_neg().clone(), "e4m3/rowwise"))


def test_blocks_that_do_not_fit_are_refused_by_name():
    for name, what in (("mxfp4", "40 columns .* block's 32"), ("mx9", "40 columns .* 16"), ("msfp12", "40 columns .* 16"),
                       ("e4m3/block1x128", "40 columns .* 128"), ("e4m3/block128x128", "3 rows .* 128")):  # fmt: skip
        with pytest.raises(ValueError, match=f"{what}; pad the tensor"):
            quantize(torch.ones(3, 40), name)
