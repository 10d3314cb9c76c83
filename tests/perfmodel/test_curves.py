import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator
from sklearn.isotonic import IsotonicRegression

from perfmodel.curves import Curve

steps = st.lists(st.floats(0.05, 3.0), min_size=3, max_size=20)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(widths=steps, seed=st.integers(0, 2**31))
def test_against_scipys_pchip_in_logarithms(widths, seed):
    generator = np.random.default_rng(seed)
    x = np.cumsum(widths)
    y = np.abs(generator.normal(size=len(x))).cumsum() * 0.3
    at = generator.uniform(x[0], x[-1], 20)
    got = np.log(Curve(np.exp(x), np.exp(y))(np.exp(at)))
    np.testing.assert_allclose(got, PchipInterpolator(x, y)(at), atol=1e-9)


def test_ends():
    """Below the first size its time; beyond the last one the bandwidth of the last two intervals."""
    curve = Curve(np.array([1.0, 10.0, 100.0, 1000.0]), np.array([5.0, 6.0, 20.0, 200.0]))
    assert curve([0.001, 1.0]).tolist() == pytest.approx([5.0, 5.0])
    a_byte = (200.0 - 6.0) / (1000.0 - 10.0)
    assert curve(3000.0)[0] == pytest.approx(200.0 + 2000 * a_byte)
    assert curve.without(1).sizes.tolist() == [1.0, 100.0, 1000.0]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(widths=steps, seed=st.integers(0, 2**31))
def test_times_never_fall(widths, seed):
    """Points out of order stand at their mean, as scikit-learn's isotonic regression puts them."""
    generator = np.random.default_rng(seed)
    x = np.cumsum(widths)
    y = generator.normal(size=len(x)).cumsum() * 0.3
    curve = Curve(np.exp(x), np.exp(y))
    np.testing.assert_allclose(np.log(curve(np.exp(x))), IsotonicRegression().fit_transform(x, y), atol=1e-9)
    times = curve(np.exp(np.linspace(x[0] - 1, x[-1] + 1, 200)))
    assert (np.diff(times) >= -1e-9 * times[1:]).all()
