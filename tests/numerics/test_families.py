"""Distributions made from parameters against their own draws; predictions from them against sampled GEMMs."""

import numpy as np
import pytest

from numerics import gaussian, predict_gemm_error
from numerics.distributions import sample
from numerics.families import copula, log_normal, matrix_normal, mixture, relu, student_t, uniform
from numerics.monte_carlo import sample_gemm_error

RNG = np.random.default_rng
K = 192


def correlation(features=K):
    mixing = RNG(3).standard_normal((features, features))
    covariance = mixing @ mixing.T / features + 0.2 * np.eye(features)
    deviation = np.sqrt(np.diag(covariance))
    return covariance / np.outer(deviation, deviation)


DRAWS = {
    "uniform": (lambda: uniform(K, -1.0, 3.0), lambda rng, shape: rng.uniform(-1.0, 3.0, shape)),
    "student_t": (lambda: student_t(K, 5.0, 0.1), lambda rng, shape: 0.1 * rng.standard_t(5.0, shape)),
    "log_normal": (lambda: log_normal(K, 1.0), lambda rng, shape: np.exp(rng.standard_normal(shape))),
    "signed": (
        lambda: log_normal(K, 1.0, signed=True),
        lambda rng, shape: np.exp(rng.standard_normal(shape)) * rng.choice([-1, 1], shape),
    ),
    "relu": (lambda: relu(K, -0.5, 2.0), lambda rng, shape: np.maximum(2 * rng.standard_normal(shape) - 0.5, 0)),
    "mixture": (
        lambda: mixture([(0.9, gaussian(K)), (0.1, gaussian(K, 0.0, 10.0))], zero_share=0.25),
        lambda rng, shape: rng.standard_normal(shape) * rng.choice([0, 1, 10], shape, p=[0.25, 0.675, 0.075]),
    ),
}


@pytest.mark.parametrize("family", DRAWS)
def test_moments_and_samples_are_those_of_direct_draws(family):
    make, draw = DRAWS[family]
    statistics, direct = make(), draw(RNG(0), (8000, K))
    assert statistics.features == K and statistics.mean.max() == pytest.approx(direct.mean(), abs=0.01 * direct.std())
    assert statistics.mean_square == pytest.approx(np.square(direct).mean(), rel=0.03)
    assert statistics.zero_share.mean() == pytest.approx((direct == 0).mean(), abs=0.005)
    drawn = sample(statistics, 4000, RNG(1))
    levels = [0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999]
    spread = np.abs(np.quantile(direct, 0.99)) + direct.std()
    np.testing.assert_allclose(np.quantile(drawn, levels), np.quantile(direct, levels), rtol=0.05, atol=0.02 * spread)
    assert np.square(drawn).mean() == pytest.approx(statistics.mean_square, rel=0.05)


KERNELS = [
    ("e4m3/tensorwise", "e4m3/tensorwise", "hopper_fast"),
    ("e4m3/rowwise", "e4m3/rowwise", "hopper_split"),
    ("e4m3", "e4m3", "fp32"),
    ("int8/rowwise", "int8/rowwise", "fp32"),
    *((name, name, "fp32") for name in ("mxfp8_e4m3", "mxfp4", "mx9", "msfp12", "bf16")),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("family", [*DRAWS, "copula"])
def test_estimates_agree_with_sampling(family, kernel):
    a = copula(relu(K), correlation()) if family == "copula" else DRAWS[family][0]()
    b, shape = gaussian(K, 0.0, 0.02), (128, 128, K)
    sampled = sample_gemm_error(a, b, shape, *kernel, pairs=12, least_pairs=3, standard_error_db=0.1)
    predicted = predict_gemm_error(a, b, shape, *kernel)
    # Half a decibel, and what sampling is not sure of.
    assert abs(predicted.sqnr_db - sampled.error.sqnr_db) < 0.5 + 2 * sampled.standard_error.sqnr_db
    assert predicted.mere == pytest.approx(sampled.error.mere, rel=0.2)


def test_uniform_values_have_the_textbook_noise():
    # A step of 2 amax / 254 in int8: noise step^2 / 12 on each side, of values with mean square 1/3 (amax is nearly 1).
    a = uniform(4096)
    error = predict_gemm_error(a, a, (4096, 4096, 4096), "int8/tensorwise", "int8/tensorwise", "exact", output="fp32")
    expected = 2 * (1 / 127) ** 2 / 12 * 3
    assert error.relative_frobenius**2 == pytest.approx(expected, rel=0.02)


def test_matrix_normal_weights():
    rng = RNG(4)
    mean = 0.1 * rng.standard_normal((96, 64))
    u = 0.5 * np.eye(96) + 0.5
    mixing = rng.standard_normal((64, 64))
    v = 0.01 * (mixing @ mixing.T / 64 + 0.1 * np.eye(64))
    statistics = matrix_normal(mean, u, v)
    left, right = np.linalg.cholesky(u), np.linalg.cholesky(v)
    drawn = [mean + left @ rng.standard_normal((96, 64)) @ right.T for _ in range(400)]
    second = sum(w.T @ w for w in drawn) / 96 / len(drawn)
    ours = statistics.covariance + np.outer(statistics.mean, statistics.mean)
    np.testing.assert_allclose(ours, second, atol=0.1 * np.diag(second).mean())
    x, kernel = gaussian(64), ("e4m3/rowwise", "e4m3/rowwise", "fp32")
    sampled = sample_gemm_error(x, statistics, (128, 96, 64), *kernel, pairs=6, least_pairs=2)
    assert predict_gemm_error(x, statistics, (128, 96, 64), *kernel).sqnr_db == pytest.approx(sampled.error.sqnr_db, abs=0.4)


def test_copula_gives_its_correlation():
    drawn = sample(copula(gaussian(K, 1.0, 3.0), correlation()), 20000, RNG(6))
    assert np.abs(np.corrcoef(drawn.T) - correlation()).max() < 0.05
    assert drawn.mean() == pytest.approx(1.0, abs=0.1) and drawn.std() == pytest.approx(3.0, rel=0.02)


def test_sampling_states_its_error_and_repeats():
    a, shape, kernel = gaussian(64), (32, 32, 64), ("e4m3/rowwise", "e4m3/rowwise", "fp32")
    runs = [sample_gemm_error(a, a, shape, *kernel, pairs=8, seed=seed) for seed in range(12)]
    assert runs[0].pairs == 8 and runs[0] == sample_gemm_error(a, a, shape, *kernel, pairs=8, least_pairs=2, seed=0)
    for name in ("sqnr_db", "mere"):
        spread = np.std([getattr(run.error, name) for run in runs], ddof=1)
        stated = np.mean([getattr(run.standard_error, name) for run in runs])
        assert 0.5 < spread / stated < 2.0
    early = sample_gemm_error(a, a, shape, *kernel, least_pairs=4, standard_error_db=1.0)
    assert early.pairs == 4 and early.standard_error.sqnr_db <= 1.0
    rows = sample_gemm_error(a.along_rows(), a.along_rows(), (64, 64, 96), *kernel, pairs=2, least_pairs=2)
    assert rows.error.sqnr_db == pytest.approx(runs[0].error.sqnr_db, abs=0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: student_t(8, 2.0), "df = 2.0"),
        (lambda: student_t(8, np.nan), "df = nan; give a finite number"),
        (lambda: student_t(0, 3.0), "features = 0; give a whole number, 1 or more"),
        (lambda: log_normal(8, 9.0), "sigma = 9.0"),
        (lambda: uniform(8, 1.0, 0.0), "give bounds that rise"),
        (lambda: relu(8, -9.0), "a mean of at least -3 std"),
        (lambda: mixture([]), "at least one"),
        (lambda: mixture([(1, gaussian(8)), (1, gaussian(16))]), "all of the same features"),
        (lambda: mixture([(-1, gaussian(8))]), "must be positive"),
        (lambda: copula(gaussian(8), np.eye(7)), r"shape \(7, 7\)"),
        (lambda: copula(gaussian(2), np.array([[1, 2], [2, 1.0]])), "negative eigenvalue"),
        (lambda: matrix_normal(np.zeros((4, 3)), np.eye(3), np.eye(3)), r"row_covariance has shape \(3, 3\)"),
        (lambda: matrix_normal(np.zeros((2, 2)), np.eye(2), -np.eye(2)), "column_covariance has a negative"),
        (lambda: matrix_normal(np.full((2, 2), np.inf), np.eye(2), np.eye(2)), "mean holds values that are not finite"),
        (lambda: sample_gemm_error(gaussian(8), gaussian(8).along_rows(), (2, 2, 8), "bf16", "bf16", "fp32"), "orient both"),
        (lambda: sample_gemm_error(gaussian(8), gaussian(8), (2, 2, 8), "bf16", "bf16", "fp32", pairs=1), "least_pairs"),
    ],
)
def test_bad_parameters_name_field_and_mend(make, message):
    with pytest.raises(ValueError, match=message):
        make()
