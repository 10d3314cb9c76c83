from math import erf, exp, log, sqrt

import numpy as np
import pytest

from perfmodel.information import NORMAL_90, Decision, value_of_measuring


def normal_cdf(x: float) -> float:
    return 0.5 * (1 + erf(x / sqrt(2)))


def put(a: float, median: float, sigma: float) -> float:
    """E[max(0, a - X)] for log-normal X: the undiscounted Black-Scholes put."""
    d = (log(a / median)) / sigma
    return a * normal_cdf(d) - median * exp(sigma**2 / 2) * normal_cdf(d - sigma)


def interval(median: float, sigma: float) -> tuple[float, float]:
    return median * exp(-NORMAL_90 * sigma), median * exp(NORMAL_90 * sigma)


@pytest.mark.parametrize("a, median, sigma, count", [(10.0, 11.0, 0.2, 1), (10.0, 10.0, 0.05, 7), (10.0, 15.0, 0.4, 3)])
def test_one_random_alternative_is_the_black_scholes_put(a, median, sigma, count):
    """Taken now: a known 10 us. Knowing the other saves max(0, a - X)."""
    low, high = interval(median, sigma)
    decision = Decision(count, [[0], [1]], chosen=0)
    value = value_of_measuring([a, median], [a, low], [a, high], [decision], draws=400_000)
    assert value[0] == 0.0  # known already
    assert value[1] == pytest.approx(count * put(a, median, sigma), rel=0.02)


def test_the_way_taken_now_may_be_the_random_one():
    """E[max(0, X - a)] = E[X] - a + E[max(0, a - X)]."""
    a, median, sigma = 12.0, 10.0, 0.3
    low, high = interval(median, sigma)
    value = value_of_measuring([a, median], [a, low], [a, high], [Decision(1, [[0], [1]], 1)], draws=400_000)
    assert value[1] == pytest.approx(median * exp(sigma**2 / 2) - a + put(a, median, sigma), rel=0.02)


def test_a_sum_of_rows_and_rows_measured_together():
    """The other way is 4 us known plus two rows; together they are worth what a plain simulation says."""
    times = np.array([20.0, 4.0, 9.0, 8.0])
    sigma = np.array([0.0, 0.0, 0.2, 0.3])
    low, high = times * np.exp(-NORMAL_90 * sigma), times * np.exp(NORMAL_90 * sigma)
    decision = Decision(1, [[0], [1, 2, 3]], 0)
    generator = np.random.default_rng(99)
    x, y = (t * np.exp(s * generator.standard_normal(2_000_000)) for t, s in ((9.0, 0.2), (8.0, 0.3)))
    value = value_of_measuring(times, low, high, [decision], groups=[[2, 3], [2]], draws=400_000)
    # At the medians the sum of 21 loses to 20: there is no gap to divide.
    assert value[0] == pytest.approx(np.maximum(0, 20 - 4 - x - y).mean(), rel=0.02)
    assert value[1] == pytest.approx(np.maximum(0, 20 - 4 - 8 - x).mean(), rel=0.02)


def test_a_gap_at_the_medians_goes_to_the_unsure_rows():
    """8 us is left for 10 us because it is unsure; its own row gets the whole gap, a sure third row nothing."""
    sigma = 0.3
    low, high = interval(8.0, sigma)
    decision = Decision(1, [[0], [1], [2]], 0)
    value = value_of_measuring([10.0, 8.0, 9.9], [10.0, low, 9.9], [10.0, high, 9.9], [decision], draws=400_000)
    x = 8.0 * np.exp(sigma * np.random.default_rng(3).standard_normal(2_000_000))
    assert value[1] == pytest.approx(np.mean(10.0 - np.minimum(9.9, x)), rel=0.02)
    assert value[0] == value[2] == 0.0


def test_what_changes_no_decision_is_worth_nothing():
    value = value_of_measuring([1.0, 100.0, 5.0], [0.9, 90.0, 4.0], [1.1, 110.0, 6.0], [Decision(5, [[0], [1]], 0)])
    assert value.tolist() == [0.0, 0.0, 0.0]


def test_seeded_and_row_named_twice_counts_twice():
    arguments = ([10.0, 5.5], [10.0, 4.5], [10.0, 6.6])
    once = value_of_measuring(*arguments, [Decision(2, [[0], [1, 1]], 0)], seed=4)
    again = value_of_measuring(*arguments, [Decision(2, [[0], [1, 1]], 0)], seed=4)
    other = value_of_measuring(*arguments, [Decision(2, [[0], [1, 1]], 0)], seed=5)
    doubled = value_of_measuring([10.0, 11.0], [10.0, 9.0], [10.0, 13.2], [Decision(2, [[0], [1]], 0)], seed=4)
    assert once.tolist() == again.tolist() != other.tolist()
    assert once[1] == pytest.approx(doubled[1])


def test_bad_input_is_named():
    good = ([1.0, 2.0], [0.5, 1.5], [2.0, 3.0])
    with pytest.raises(ValueError, match="inside its interval"):
        value_of_measuring([1.0], [1.1], [2.0], [])
    with pytest.raises(ValueError, match="decision 0 takes way 2 of 2"):
        value_of_measuring(*good, [Decision(1, [[0], [1]], 2)])
    with pytest.raises(ValueError, match="decision 0 names row 7"):
        value_of_measuring(*good, [Decision(1, [[0], [7]], 0)])
    with pytest.raises(ValueError, match="group 0 names row -1"):
        value_of_measuring(*good, [Decision(1, [[0], [1]], 0)], groups=[[-1]])
    with pytest.raises(ValueError, match="draws is 0"):
        value_of_measuring(*good, [], draws=0)


def test_a_large_model():
    """1,000 sites, 3 passes, 12 ways of 3 rows."""
    generator = np.random.default_rng(0)
    times = np.exp(generator.uniform(1, 5, 6000))
    decisions = [Decision(1, generator.integers(0, 6000, (12, 3)).tolist(), 0) for _ in range(3000)]
    value = value_of_measuring(times, 0.9 * times, 1.1 * times, decisions)
    assert value.shape == (6000,) and (value >= 0).all() and value.max() > 0
