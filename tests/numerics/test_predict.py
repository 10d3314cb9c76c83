"""Predictions against GEMMs that were drawn, quantized, multiplied as the tensor core does, and measured."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from numerics import GradientSignal, StatisticsAccumulator, gaussian, gemm_error, predict_gemm_error, predict_gemm_errors
from numerics.distributions import SCOPES
from numerics.drift import Accumulation, drifts
from numerics.noise import operand_noise, round_magnitudes
from numerics.normal import normal_cdf, normal_quantile
from numerics.outputs import Meeting, outputs_of
from numerics.quantization import fake_quantize
from numerics.recipe import Recipe
from numerics.rounding import cast

RNG = np.random.default_rng


def normal(rng, rows, features):
    return rng.standard_normal((rows, features), dtype=np.float32)


def relu(rng, rows, features):
    return np.maximum(normal(rng, rows, features) + np.float32(0.2), 0)


def lognormal(rng, rows, features):
    return np.exp(normal(rng, rows, features))


def shifted(rng, rows, features):
    return normal(rng, rows, features) + 1 + RNG(3).standard_normal(features).astype("f4")


def correlated(rng, rows, features):
    mixing = RNG(1).standard_normal((4, features)).astype("f4")
    return normal(rng, rows, 4) @ mixing / 2 + np.float32(0.3) * normal(rng, rows, features)


def positive(rng, rows, features):
    return np.abs(normal(rng, rows, features))


def row_scaled(rng, rows, features):
    return normal(rng, rows, features) * np.exp(normal(rng, rows, 1))


def feature_scaled(rng, rows, features):
    return normal(rng, rows, features) * np.exp(2 * RNG(5).standard_normal(features)).astype("f4")


def collect(x, parts=4):
    accumulator = StatisticsAccumulator(x.shape[1])
    for part in np.array_split(x, parts):
        accumulator.update(part)
    return accumulator.result()


FP8 = [
    ("e4m3/tensorwise", "e4m3/tensorwise", "hopper_fast"),
    ("e4m3/rowwise", "e4m3/rowwise", "hopper_split"),
    ("e4m3/block1x128", "e4m3/block128x128", "hopper_split"),
    ("e5m2/rowwise", "e4m3/rowwise", "hopper_split"),
]
# Tolerances hold the spread of drawing few rows, a quarter of a decibel, beside the model's own error.
PAIRS = [
    (normal, normal),
    (relu, normal),
    (lognormal, normal),
    (correlated, normal),
    (row_scaled, normal),
    (feature_scaled, normal),
]


@pytest.mark.parametrize("kernel", [("bf16", "bf16", "fp32"), *FP8, ("mxfp8_e4m3", "mxfp8_e4m3", "fp32")], ids=lambda k: k[0])
@pytest.mark.parametrize("left", [pair[0] for pair in PAIRS], ids=lambda make: make.__name__)
def test_noise_limited_products_are_within_a_decibel(left, kernel):
    rng = RNG(0)
    a, b = left(rng, 1024, 256), normal(rng, 512, 256)
    measured = gemm_error(torch.from_numpy(a), torch.from_numpy(b), *kernel, max_rows=512)
    predicted = predict_gemm_error(collect(a), collect(b), (1024, 512, 256), *kernel)
    assert predicted.sqnr_db == pytest.approx(measured.sqnr_db, abs=0.8 if left in (row_scaled, feature_scaled) else 0.5)
    assert predicted.mere == pytest.approx(measured.mere, rel=0.3 if left is feature_scaled else 0.2)
    assert predicted.relative_frobenius == pytest.approx(measured.relative_frobenius, rel=0.1)
    assert 1 - predicted.cosine == pytest.approx(1 - measured.cosine, rel=0.25)
    assert predicted.underflow_share == pytest.approx(measured.underflow_share, rel=0.3, abs=4e-5)


@pytest.mark.parametrize("make", [positive, relu, shifted, lognormal, correlated], ids=lambda make: make.__name__)
def test_coherent_sums_are_within_two_and_a_half_decibels(make):
    # Products that add up: errors average out far below the signal, and the accumulator's loss decides.
    rng = RNG(1)
    a, b = make(rng, 256, 2048), make(rng, 128, 2048)
    statistics = collect(a), collect(b)
    for kernel in FP8[:3]:
        measured = gemm_error(torch.from_numpy(a), torch.from_numpy(b), *kernel, max_rows=128)
        predicted = predict_gemm_error(*statistics, (256, 128, 2048), *kernel)
        assert measured.sqnr_db > 25 and predicted.sqnr_db == pytest.approx(measured.sqnr_db, abs=2.5)
        assert predicted.mere == pytest.approx(measured.mere, rel=0.35)


@pytest.mark.parametrize("make", [relu, lognormal, row_scaled, feature_scaled], ids=lambda make: make.__name__)
def test_grad_weight_contracts_over_the_batch(make):
    rng = RNG(2)
    g, x = make(rng, 4096, 256), normal(rng, 4096, 128)
    left, right = collect(g).along_rows(), collect(x).along_rows()
    for kernel in FP8[:3]:
        operands = torch.from_numpy(np.ascontiguousarray(g.T)), torch.from_numpy(np.ascontiguousarray(x.T))
        measured = gemm_error(*operands, *kernel)
        predicted = predict_gemm_error(left, right, (256, 128, 4096), *kernel)
        assert predicted.sqnr_db == pytest.approx(measured.sqnr_db, abs=1.5 if make in (row_scaled, feature_scaled) else 0.8)
        assert predicted.mere == pytest.approx(measured.mere, rel=0.25)


def test_batch_and_width_may_differ_from_what_was_seen():
    # Learned on 1,024 x 64, asked about 8,192 x 512.
    rng = RNG(3)
    small = collect(relu(rng, 1024, 64)), collect(normal(rng, 256, 64))
    a, b = relu(rng, 8192, 512), normal(rng, 256, 512)
    for kernel in FP8:
        measured = gemm_error(torch.from_numpy(a), torch.from_numpy(b), *kernel, max_rows=400)
        predicted = predict_gemm_error(*small, (8192, 256, 512), *kernel)
        assert predicted.sqnr_db == pytest.approx(measured.sqnr_db, abs=0.6)


def test_predictions_without_data():
    rng = RNG(4)
    a, b = normal(rng, 2048, 512) * 3, normal(rng, 256, 512) / 50
    for kernel in FP8:
        measured = gemm_error(torch.from_numpy(a), torch.from_numpy(b), *kernel, max_rows=400)
        predicted = predict_gemm_error(gaussian(512, std=3.0), gaussian(512, std=0.02), (2048, 256, 512), *kernel)
        assert predicted.sqnr_db == pytest.approx(measured.sqnr_db, abs=0.3)
        assert predicted.mere == pytest.approx(measured.mere, rel=0.15)


# Plain integers of values below one are all rounding to zero.
@pytest.mark.parametrize(
    "recipe",
    [
        *(x for x in Recipe.names() if "fnuz" not in x and x not in ("tf32", "int8", "int4")),
        *(f"{x};rounding={mode}" for x in ("e4m3/rowwise", "mx6", "msfp12") for mode in ("toward_zero", "stochastic")),
    ],
)
def test_operand_noise_of_every_recipe(recipe):
    rng = RNG(6)
    x = relu(rng, 2048, 256) if "int" in recipe else normal(rng, 2048, 256)
    statistics = collect(x)
    values = torch.from_numpy(x)
    error = (fake_quantize(values, recipe) - values).double()
    noise = operand_noise(statistics, Recipe.parse(recipe), 2048, 256)
    measured = float(error.square().mean() / values.double().square().mean())
    tolerance = 0.6 if Recipe.parse(recipe).shared else 0.3
    assert 10 * np.log10(noise.power / measured) == pytest.approx(0, abs=tolerance)


@pytest.mark.parametrize(
    ("k", "accumulation", "loss"),
    [(4096, "hopper_fast", 0.070), (8192, "hopper_fast", 0.13), (4096, "hopper_split", 0.0006), (8192, "hopper_split", 0.0006)],
)
def test_losses_of_non_negative_products_measured_on_an_h200(k, accumulation, loss):
    statistics = collect(positive(RNG(7), 512, k))
    (outputs,) = outputs_of([Meeting(statistics, statistics, (k, k), k)])
    assert drifts([Accumulation(statistics, statistics, outputs, accumulation, 6)])[0].shrinkage == pytest.approx(loss, rel=0.2)


def test_noise_of_zero_mean_products_measured_on_an_h200():
    statistics = collect(normal(RNG(8), 512, 4096))
    (outputs,) = outputs_of([Meeting(statistics, statistics, (4096, 4096), 4096)])
    fast, split, exact = drifts(
        [Accumulation(statistics, statistics, outputs, how, 6) for how in ("hopper_fast", "hopper_split", "exact")]
    )
    for lost, noise in ((fast, 1.3e-3), (split, 1.3e-4)):
        assert np.sqrt(lost.power + lost.shrinkage**2) == pytest.approx(noise, rel=0.15)
    assert exact.power == 0


def test_numpy_twins():
    x = np.abs(normal(RNG(9), 100, 100)).astype("f8") * 30
    for name in ("e4m3", "e5m2", "e2m1", "int8"):
        rounded, _ = round_magnitudes(x, Recipe.parse(name).element)
        np.testing.assert_array_equal(rounded, cast(torch.from_numpy(x), name).numpy())
    levels = np.array([1e-7, 1e-3, 0.02, 0.3, 0.5, 0.77, 0.999])
    np.testing.assert_allclose(normal_cdf(normal_quantile(levels)), levels, rtol=1e-7)


def test_zero_operands_have_no_error():
    zero = collect(np.zeros((64, 32), "f4"))
    error = predict_gemm_error(zero, gaussian(32), (64, 16, 32), "e4m3/rowwise", "e4m3/rowwise", "hopper_fast")
    assert (error.mere, error.cosine) == (0.0, 1.0) and error.sqnr_db == np.inf


def test_errors_name_what_is_wrong():
    a = gaussian(64)
    kernel = ("e4m3/rowwise", "e4m3/rowwise", "hopper_fast")
    with pytest.raises(ValueError, match="orient both alike"):
        predict_gemm_error(a, a.along_rows(), (8, 8, 64), *kernel)
    with pytest.raises(ValueError, match="three positive whole numbers"):
        predict_gemm_error(a, a, (8, 0, 64), *kernel)
    with pytest.raises(ValueError, match="unknown accumulation 'fast'"):
        predict_gemm_error(a, a, (8, 8, 64), *kernel[:2], "fast")
    with pytest.raises(ValueError, match="unknown recipe 'e4m3/rows'"):
        predict_gemm_error(a, a, (8, 8, 64), "e4m3/rows", *kernel[1:])
    with pytest.raises(ValueError, match="unknown format 'fp33'"):
        predict_gemm_error(a, a, (8, 8, 64), *kernel, output="fp33")
    assert len(SCOPES) == len(a.profile_counts)


def test_very_long_sums_need_no_long_records(monkeypatch):
    rng = RNG(12)
    a, b = collect(correlated(rng, 512, 96)), collect(shifted(rng, 512, 96))
    kernel, shape = ("e4m3/rowwise", "e4m3/rowwise", "hopper_split"), (512, 512, 2**17)
    short = predict_gemm_error(a, b, shape, *kernel)
    assert not any(isinstance(x, int) for x in a._views)
    monkeypatch.setattr("numerics.products._WIDEST", 2**20)
    whole = predict_gemm_error(a, b, (513, 512, 2**17), *kernel)
    assert short.sqnr_db == pytest.approx(whole.sqnr_db, abs=0.1) and short.mere == pytest.approx(whole.mere, rel=0.03)


def test_many_predictions_at_once_are_those_of_one():
    a, b = collect(relu(RNG(10), 512, 256)), collect(normal(RNG(11), 512, 256))
    kernels = FP8
    requests = [(a, b, (512 + 16 * i, 512, 256), *kernel) for i in range(100) for kernel in kernels]
    answers = predict_gemm_errors(requests)
    assert answers[0] == predict_gemm_error(*requests[0])


def test_an_answer_does_not_depend_on_those_asked_with_it():
    rng = RNG(14)
    x, w, far = collect(relu(rng, 512, 256)), collect(normal(rng, 512, 256)), collect(shifted(rng, 512, 256) + 30)
    zero = collect(np.zeros((512, 256), np.float32))
    signal = GradientSignal(1.2, 0.8, 0.01)
    requests = [
        (*operands, (m, 512, k), recipe, recipe, accumulation, sums, None, output, split_k)
        for operands, sums in (((x, w), None), ((far, far), None), ((zero, w), None), ((w.along_rows(), x.along_rows()), signal))
        for m, k in ((512, 256), (768, 4096))
        for recipe in ("e4m3/tensorwise", "e4m3/rowwise", "mxfp8_e4m3", "mx9")
        for accumulation, split_k in (("hopper_fast", 1), ("hopper_fast", 3), ("hopper_split", 1), ("fp32", 1))
        for output in ("bf16", "fp32")
    ]
    together = predict_gemm_errors(requests)
    alone = [predict_gemm_error(*request[:7], output=request[8], split_k=request[9]) for request in requests]
    assert together == alone
    shuffled = rng.permutation(len(requests))
    assert predict_gemm_errors([requests[place] for place in shuffled]) == [together[place] for place in shuffled]
    assert predict_gemm_errors([]) == []


def test_no_torch_is_imported():
    code = (
        "import sys; from numerics.predict import predict_gemm_error; from numerics import gaussian\n"
        "predict_gemm_error(gaussian(64), gaussian(64), (64, 64, 64), 'e4m3/rowwise', 'e4m3/rowwise', 'hopper_fast')\n"
        "print([name for name in ('torch', 'scipy', 'sklearn') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("recipe", ["e4m3/tensorwise;amax=given", "e4m3/tensorwise;scale_format=e8m0;amax=given"])
@pytest.mark.parametrize("headroom", [2.0**-3, 0.4, 0.9, 1.0, 1.7, 64.0, 2.0**12])
def test_an_amax_that_is_not_the_own(recipe, headroom):
    x = normal(RNG(13), 2048, 256)
    values = torch.from_numpy(x)
    error = (fake_quantize(values, recipe, amax=values.abs().max() * headroom) - values).double()
    noise = operand_noise(collect(x), Recipe.parse(recipe), 2048, 256, headroom)
    measured = float(error.square().mean() / values.double().square().mean())
    # Far below amax all depends on where exactly it lies, of one tensor a matter of chance.
    assert 10 * np.log10(noise.power / measured) == pytest.approx(0, abs=1.2 if headroom < 0.5 else 0.4)
    beyond = float((values.abs() > values.abs().max() * headroom).double().mean())
    if "e8m0" not in recipe and headroom < 0.5:
        assert noise.overflow == pytest.approx(beyond, rel=0.5)


def test_an_amax_that_is_not_the_own_must_be_told():
    a, kernel = gaussian(64), ("e4m3/rowwise;amax=delayed", "e4m3/rowwise", "exact")
    own = predict_gemm_error(a, a, (8, 8, 64), "e4m3/rowwise", *kernel[1:])
    told = predict_gemm_error(a, a, (8, 8, 64), *kernel, headroom=(1.0, None))
    assert told.sqnr_db == pytest.approx(own.sqnr_db, abs=0.1)
    assert predict_gemm_error(a, a, (8, 8, 64), *kernel, headroom=(0.25, None)).overflow_share > 0.01
    with pytest.raises(ValueError, match="amax=delayed is not known from statistics; give headroom"):
        predict_gemm_error(a, a, (8, 8, 64), *kernel)
    with pytest.raises(ValueError, match="takes its own amax; leave out headroom = 2.0"):
        predict_gemm_error(a, a, (8, 8, 64), *kernel, headroom=(1.0, 2.0))
    with pytest.raises(ValueError, match="headroom = nan; give amax over the operand's own"):
        predict_gemm_error(a, a, (8, 8, 64), *kernel, headroom=(float("nan"), None))
