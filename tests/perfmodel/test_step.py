import numpy as np
import pytest

from perfmodel.step import COMMON_DEVIATION, combine


def test_combine_against_sampling():
    """Independent kernel errors plus one in common, sampled: the 90% interval of the sum."""
    generator = np.random.default_rng(0)
    times = np.exp(generator.uniform(1, 6, 30))
    deviation = 0.05 * times
    low, high = times - 1.6449 * deviation, times + 1.6449 * deviation
    draws = times + deviation * generator.standard_normal((200_000, 30))
    sums = draws.sum(axis=1) * (1 + COMMON_DEVIATION * generator.standard_normal(200_000))
    total, below, above = combine(times, low, high)
    assert total == pytest.approx(times.sum())
    assert below == pytest.approx(np.quantile(sums, 0.05), rel=2e-3)
    assert above == pytest.approx(np.quantile(sums, 0.95), rel=2e-3)


def test_combine_of_nothing_is_nothing():
    assert combine(np.array([]), np.array([]), np.array([])) == (0.0, 0.0, 0.0)
