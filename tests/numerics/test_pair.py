"""How two operands meet: what is measured of them, and predictions with it against products of other samples."""

import numpy as np
import pytest
import torch

from numerics import SignalAccumulator, StatisticsAccumulator, gemm_error, predict_gemm_error
from numerics.pair import PairStatistics, measure_pair
from numerics.quantization import fake_quantize

NAMES = ("e4m3/rowwise", "e4m3/tensorwise", "mx9", "bf16")


def activations(seed, rows, features=64):
    """Nearly a line, as in a trained model: one number a row times a pattern, and a little of everything else."""
    rng, pattern = np.random.default_rng(seed), np.random.default_rng(99).standard_normal(features)
    return ((1 + 0.5 * rng.standard_normal((rows, 1))) * pattern + 0.1 * rng.standard_normal((rows, features))).astype("f4")


def collect(x):
    accumulator = StatisticsAccumulator(x.shape[1])
    accumulator.update(x)
    return accumulator.result()


def test_measured_figures_equal_their_definitions():
    a, b = torch.from_numpy(activations(0, 48)), torch.from_numpy(activations(1, 24))
    pair = measure_pair([(a, b)], NAMES)
    y = a.double() @ b.double().T
    independent = float((a.double().square().mean(0) * b.double().square().mean(0)).sum())
    assert pair.shape == (48, 24, 64) and pair.power == pytest.approx(float(y.square().mean()) / independent, rel=1e-5)
    for index, name in enumerate(NAMES):
        left, right = ((fake_quantize(x, name) - x).double() for x in (a, b))
        assert pair.noise_a[index] == pytest.approx(float((left @ b.double().T).square().mean()) / independent, rel=1e-3)
        assert pair.noise_b[index] == pytest.approx(float((a.double() @ right.T).square().mean()) / independent, rel=1e-3)


def test_rows_of_a_sample_add_up_and_samples_do_not():
    # 16 rows of a sample are the same: their errors are, too, and 16 of them weigh as 16^2.
    rng = np.random.default_rng(2)
    g, x = (torch.from_numpy(rng.standard_normal((64, width)).astype("f4")).repeat_interleave(16, 0) for width in (24, 32))
    alike = measure_pair([(g.T, x.T)], ("e4m3/tensorwise",), each=16)
    apart = measure_pair([(g.T, x.T)], ("e4m3/tensorwise",), each=1)
    # All errors of a sample, whether or not samples have errors in common.
    for one, other in zip(alike.noise("e4m3/tensorwise", 16), apart.noise("e4m3/tensorwise", 1), strict=True):
        assert one == pytest.approx(16 * other, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_luck_of_one_weight_is_predicted_on_new_samples(name):
    gaps = []
    for seed in range(8):
        weight = torch.from_numpy(np.random.default_rng(50 + seed).standard_normal((16, 64)).astype("f4"))
        seen, new = activations(seed, 256), torch.from_numpy(activations(1000 + seed, 256))
        pair = measure_pair([(torch.from_numpy(seen), weight)], NAMES)
        statistics = collect(seen), collect(weight.numpy())
        measured = gemm_error(new, weight, name, name, "exact")
        with_pair = predict_gemm_error(*statistics, (256, 16, 64), name, name, "exact", pair=pair)
        alone = predict_gemm_error(*statistics, (256, 16, 64), name, name, "exact")
        gaps.append([with_pair.sqnr_db - measured.sqnr_db, alone.sqnr_db - measured.sqnr_db])
        assert with_pair.mere == pytest.approx(measured.mere, rel=0.35)
    with_pair, alone = np.abs(gaps).T
    assert with_pair.max() < 0.5 and alone.mean() > 2 * with_pair.mean()


def test_alike_rows_in_a_weight_gradient():
    rng = np.random.default_rng(3)

    def batch():
        return [
            (rng.standard_normal((64, 1, width)) + 0.02 * rng.standard_normal((64, 16, width))).astype("f4").reshape(-1, width)
            for width in (48, 32)
        ]

    seen = [batch() for _ in range(4)]
    left, right = (collect(np.concatenate(x)).along_rows() for x in zip(*seen, strict=True))
    pair = measure_pair([(torch.from_numpy(g).T, torch.from_numpy(x).T) for g, x in seen], each=16)
    signals = noises = 0.0
    for g, x in (batch() for _ in range(8)):
        g, x = (torch.from_numpy(np.ascontiguousarray(v.T)) for v in (g, x))
        power = float((g.double() @ x.double().T).square().mean())
        error = gemm_error(g, x, "e4m3/rowwise", "e4m3/rowwise", "exact", output="fp32")
        signals, noises = signals + power, noises + power * error.relative_frobenius**2
    shape, kernel = (48, 32, 1024), ("e4m3/rowwise", "e4m3/rowwise", "exact")
    independent = 1024 * left.mean_square * right.mean_square
    noise = noises / 8 / independent
    without = predict_gemm_error(left, right, shape, *kernel, output="fp32").relative_frobenius ** 2
    predicted = predict_gemm_error(left, right, shape, *kernel, pair=pair, output="fp32").relative_frobenius ** 2
    assert 10 * np.log10(noise / without) > 3.0
    assert 10 * np.log10(predicted / noise) == pytest.approx(0, abs=0.7)


def test_other_widths_and_other_recipes():
    x, w = activations(0, 128), activations(5, 32)
    pair = measure_pair([(torch.from_numpy(x), torch.from_numpy(w))], ("e4m3/rowwise",))
    statistics, kernel = (collect(x), collect(w)), ("e4m3/rowwise", "e4m3/rowwise", "fp32")
    wide = predict_gemm_error(*statistics, (128, 64, 128), *kernel)
    assert predict_gemm_error(*statistics, (128, 64, 128), *kernel, pair=pair) == wide
    other = predict_gemm_error(*statistics, (128, 32, 64), "e5m2/rowwise", "e5m2/rowwise", "fp32", pair=pair)
    assert (
        np.isfinite(other.sqnr_db) and other.sqnr_db < predict_gemm_error(*statistics, (128, 32, 64), *kernel, pair=pair).sqnr_db
    )


def test_store_and_refusals():
    x = torch.from_numpy(activations(0, 32))
    pair = measure_pair([(x, x)], NAMES)
    back = PairStatistics.from_dict(pair.to_dict())
    assert back.recipes == pair.recipes and back.noise_b == pytest.approx(pair.noise_b, rel=1e-3)
    assert measure_pair([(torch.zeros(4, 8), torch.ones(4, 8))]) is None
    with pytest.raises(ValueError, match="at least one batch"):
        measure_pair([])
    with pytest.raises(ValueError, match="the same K"):
        measure_pair([(x, x[:, :3])])
    with pytest.raises(ValueError, match="noise_a has 3 values for 1 recipes"):
        PairStatistics((1, 2, 3), 1.0, 1.0, 1e-5, ("bf16",), (1.0, 2.0, 3.0), (1.0,))
    with pytest.raises(ValueError, match="power is -1.0; it must be finite and not negative"):
        PairStatistics((1, 2, 3), -1.0, 1.0, 1e-5, (), (), ())
    mixed = {**pair.to_dict(), "noise": {"bf16": [1.0, 1.0], "e4m3/rowwise": [1.0, 1.0, 0.0, 0.0]}}
    with pytest.raises(ValueError, match="noise must hold two numbers a recipe, or four a recipe"):
        PairStatistics.from_dict(mixed)
    with pytest.raises(ValueError, match="pair: KeyError 'noise'"):
        PairStatistics.from_dict({})


def lopsided(seed, samples, clicks=0.25):
    """g and x of a classifier: many small gradients of one sign and few large ones of the other, x of one sign."""
    rng = np.random.default_rng(seed)
    click = rng.random((samples, 1)) < clicks
    g = np.where(click, 0.75, -0.25) * np.linspace(0.2, 1, 48) * (1 + 0.1 * rng.standard_normal((samples, 48)))
    return torch.from_numpy(g.astype("f4").T.copy()), torch.from_numpy(np.abs(rng.standard_normal((32, samples))).astype("f4"))


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp8_e4m3", "e4m3/rowwise"])
def test_errors_that_samples_have_in_common_grow_with_the_square_of_the_rows(recipe):
    seen = [lopsided(seed, 128) for seed in range(12)]
    pair = measure_pair(seen, (recipe,), each=1)
    for rows in (32, 128, 512):
        noise = independent = 0.0
        for seed in range(40):
            g, x = lopsided(1000 + seed, rows)
            noise += float(((fake_quantize(g, recipe) - g).double() @ x.double().T).square().mean())
            independent += float(g.double().square().mean(0) @ x.double().square().mean(0))
        measured = noise / independent
        assert 10 * np.log10(pair.noise(recipe, rows)[0] / measured) == pytest.approx(0, abs=0.7)
        if recipe == "mxfp4" and rows == 512:
            # Most of it is common to all samples.
            assert measured > 3 * pair.noise(recipe, 1)[0]


def test_coherent_noise_in_predictions():
    signal, left, right = SignalAccumulator(), StatisticsAccumulator(48), StatisticsAccumulator(32)
    seen = [lopsided(seed, 128, 0.4) for seed in range(40)]
    for g, x in seen:
        signal.update(g.T, x.T)
        left.update(g.T)
        right.update(x.T)
    operands, kernel = (left.result().along_rows(), right.result().along_rows()), ("mxfp4", "mxfp4", "fp32")
    pair = measure_pair(seen, ("mxfp4",), each=1)
    for rows in (128, 1024):
        signals = noises = 0.0
        for seed in range(24):
            g, x = lopsided(3000 + seed, rows, 0.4)
            error, size = gemm_error(g, x, *kernel), float((g.double() @ x.double().T).square().mean())
            signals, noises = signals + size, noises + size * error.relative_frobenius**2
        measured = 10 * np.log10(signals / noises)
        predicted = predict_gemm_error(*operands, (48, 32, rows), *kernel, signal.result(), pair=pair).sqnr_db
        without = predict_gemm_error(*operands, (48, 32, rows), *kernel, signal.result()).sqnr_db
        assert predicted == pytest.approx(measured, abs=1.0) and without > measured + 2
