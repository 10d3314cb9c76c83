"""Statistics against numpy on the same values, and back through a store."""

import subprocess
import sys
from dataclasses import astuple

import numpy as np
import pytest

from numerics.collect import StatisticsAccumulator
from numerics.distributions import LEVELS, SCOPES, TensorStatistics, gaussian, sample


def collect(x, parts=4, **options):
    accumulator = StatisticsAccumulator(x.shape[1])
    for part in np.array_split(x, parts):
        accumulator.update(part)
    return accumulator.result(**options)


def correlated(rng, rows=4000, features=48, rank=3):
    mixing = rng.standard_normal((rank, features))
    return (0.5 + rng.standard_normal((rows, rank)) @ mixing + 0.3 * rng.standard_normal((rows, features))).astype("f4")


def test_moments_equal_numpy_on_the_whole():
    x = correlated(np.random.default_rng(0))
    statistics = collect(x, parts=7)
    np.testing.assert_allclose(statistics.mean, x.mean(0, dtype="f8"), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(statistics.second_moment, np.square(x, dtype="f8").mean(0), rtol=1e-5)
    np.testing.assert_allclose(statistics.covariance, np.cov(x.T.astype("f8")), rtol=1e-4, atol=2e-3)
    np.testing.assert_array_equal(statistics.amax, np.abs(x).max(0))
    # The profile rows are all rows here, so pooled quantiles are those of every value, to a bucket's width.
    np.testing.assert_allclose(statistics.quantiles, np.quantile(x, LEVELS), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("power", [-49, 49])
def test_small_and_large_tensors_err_as_others_do(power):
    from numerics.predict import predict_gemm_error

    rng = np.random.default_rng(3)
    x, w = correlated(rng), rng.standard_normal((64, 48), np.float32)
    recipes = "e4m3/rowwise", "e4m3/rowwise", "hopper_fast"
    for orient in (TensorStatistics.along_features, TensorStatistics.along_rows):
        errors = [
            predict_gemm_error(orient(collect(x * np.float32(size))), orient(collect(w)), (64, 64, 48), *recipes)
            for size in (1.0, 2.0**power)
        ]
        assert astuple(errors[0]) == pytest.approx(astuple(errors[1]), rel=1e-3)


def test_what_float32_cannot_square_is_refused():
    """Its moments would be zero or infinite, and a prediction made of them far too good."""
    tiny, huge, zeros = (StatisticsAccumulator(8) for _ in range(3))
    tiny.update(np.full((16, 8), 1e-30, np.float32))
    with pytest.raises(ValueError, match="go up to 1e-30.*power of two"):
        tiny.result()
    with pytest.raises(ValueError, match="go up to 1e.30.*power of two"):
        huge.update(np.full((16, 8), 1e30, np.float32))
    zeros.update(np.zeros((16, 8), np.float32))
    assert zeros.result().mean_square == 0.0


def test_merge_equals_one_stream():
    x = correlated(np.random.default_rng(1))
    left, right, whole = (StatisticsAccumulator(48) for _ in range(3))
    left.update(x[:1500])
    right.update(x[1500:2500])
    right.update(x[2500:])
    for part in (x[:1500], x[1500:2500], x[2500:]):
        whole.update(part)
    left.merge(right)
    left.merge(StatisticsAccumulator(48))
    merged, expected = left.result(), whole.result()
    np.testing.assert_allclose(merged.covariance, expected.covariance, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(merged.quantiles, expected.quantiles)
    np.testing.assert_array_equal(merged.profile_counts, expected.profile_counts)


def test_profiles_equal_a_direct_count():
    x = np.random.default_rng(2).standard_normal((256, 256)).astype("f4")
    x[x < 0] = 0
    statistics = collect(x, parts=1)
    amax = {
        "tensor": x.max(),
        "row": x.max(1, keepdims=True),
        "row128": np.repeat(x.reshape(256, 2, 128).max(2), 128, 1),
        "column32": np.repeat(x.reshape(8, 32, 256).max(1), 32, 0),
        "tile128": np.kron(x.reshape(2, 128, 2, 128).max((1, 3)), np.ones((128, 128), "f4")),
    }
    for scope, peaks in amax.items():
        counts = statistics.profile_counts[SCOPES.index(scope)]
        assert counts.sum() == pytest.approx(1 - (x == 0).mean(), abs=1e-6)
        assert counts[0] == pytest.approx((x == peaks)[x > 0].sum() / x.size, abs=1e-6)
        octave = (x < peaks) & (x > peaks / 2)
        assert counts[1:5].sum() == pytest.approx(octave.mean(), abs=2e-4)
        energy = statistics.profile_energy[SCOPES.index(scope)]
        assert energy[1:5].sum() == pytest.approx((x[octave] ** 2).sum() / (x**2).sum(), abs=2e-3)
    assert statistics.profile_lengths[SCOPES.index("tile128")] == 128 * 128


def test_store_round_trip_and_truncation():
    x = correlated(np.random.default_rng(3))
    statistics = collect(x)
    back = TensorStatistics.from_arrays(statistics.truncated(3).to_arrays())
    np.testing.assert_allclose(np.diag(back.covariance), np.diag(statistics.covariance), rtol=2e-3)
    np.testing.assert_allclose(back.covariance, statistics.covariance, atol=0.03)  # rank 3 carries nearly all
    assert back.rows_seen == 4000 and not back.spiked
    arrays = statistics.to_arrays()
    # Records of before the last two scopes take those of blocks of 32 for them.
    older = arrays | {name: arrays[name][:8] for name in arrays if name.startswith("profile")}
    last = TensorStatistics.from_arrays(older).profile_counts[SCOPES.index("row16")]
    np.testing.assert_array_equal(last, back.profile_counts[SCOPES.index("row32")])
    del arrays["amax"]
    with pytest.raises(ValueError, match="no array named amax"):
        TensorStatistics.from_arrays(arrays)
    with pytest.raises(ValueError, match="loadings do not fit"):
        TensorStatistics.from_arrays({**statistics.to_arrays(), "loadings": np.zeros((3, 47), "f2")})


def test_wide_tensors_keep_their_leading_directions():
    rng = np.random.default_rng(4)
    x = correlated(rng, rows=600, features=2100, rank=2)
    statistics = collect(x, parts=2)
    assert statistics.factor.shape[0] == 64
    np.testing.assert_allclose(np.diag(statistics.covariance), x.var(0, ddof=1), rtol=0.02)
    exact = np.cov(x[:, :200].T)
    assert np.linalg.norm(statistics.covariance[:200, :200] - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize("relu", [False, True])
def test_sampling_returns_the_marginals_and_the_correlation(relu):
    rng = np.random.default_rng(5)
    x = correlated(rng, rows=8000)
    if relu:
        x = np.maximum(x, 0)
    statistics = collect(x)
    assert statistics.spiked is relu
    drawn = sample(statistics, 8000, rng)
    assert (drawn == 0).mean() == pytest.approx((x == 0).mean(), abs=0.02)
    assert np.square(drawn).mean() == pytest.approx(np.square(x).mean(), rel=0.05)
    off = ~np.eye(48, dtype=bool)
    gap = np.corrcoef(drawn.T)[off] - np.corrcoef(x.T)[off]
    assert np.abs(gap).mean() < (0.15 if relu else 0.03)  # ReLU bends Gaussian correlation; the copula does not know


def test_views_are_found_again_and_resizing_repeats():
    statistics = gaussian(64, 1.0, 2.0)
    rows = statistics.along_rows()
    assert rows.contraction == "rows" and rows is statistics.along_rows() and rows.along_features() is statistics
    wide = statistics.resized(256)
    assert wide is statistics.resized(256) and wide.features == 256
    assert wide.origin is statistics and wide.resized(64) is statistics and wide.along_rows().origin is rows
    assert wide.mean_square == pytest.approx(5.0) and statistics.resized(16).features == 16
    with pytest.raises(ValueError, match="resize to 0"):
        statistics.resized(0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((4, 5)), "take .rows, 4."),
        (np.zeros(4), "take .rows, 4."),
        (np.array([[1, 2, np.nan, np.inf]]), "2 of 4 values are not finite"),
    ],
)
def test_bad_updates_are_refused(values, message):
    accumulator = StatisticsAccumulator(4)
    with pytest.raises(ValueError, match=message):
        accumulator.update(values)
    with pytest.raises(ValueError, match="no rows were seen"):
        accumulator.result()


def test_constant_and_zero_tensors_have_statistics():
    for value in (0.0, 3.0):
        statistics = collect(np.full((10, 8), value))
        assert statistics.mean_square == pytest.approx(value**2) and np.isfinite(statistics.covariance).all()


def test_no_torch_is_imported():
    code = "import sys, numerics.distributions, numerics.collect; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
