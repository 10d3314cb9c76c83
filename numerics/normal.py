"""The standard normal distribution in plain numpy (scipy is no dependency of this floor)."""

from __future__ import annotations

import math

import numpy as np

_ERF = np.vectorize(math.erf, otypes=[np.float64])
_CENTRAL = (
    (-39.69683028665376, 220.9460984245205, -275.9285104469687, 138.3577518672690, -30.66479806614716, 2.506628277459239),
    (-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972, -13.28068155288572, 1.0),
)
_TAIL = (
    (-0.007784894002430293, -0.3223964580411365, -2.400758277161838, -2.549732539343734, 4.374664141464968, 2.938163982698783),
    (0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416, 1.0),
)  # fmt: skip


def normal_cdf(z: np.ndarray) -> np.ndarray:
    """Share of a standard normal below `z`, any shape, float64."""
    return 0.5 * (1.0 + _ERF(np.asarray(z, np.float64) / math.sqrt(2.0)))


def normal_density(z: np.ndarray) -> np.ndarray:
    """Density of a standard normal at `z`, any shape, float64."""
    return np.exp(-0.5 * np.square(z)) / math.sqrt(2.0 * math.pi)


def normal_quantile(levels: np.ndarray) -> np.ndarray:
    """Inverse of `normal_cdf` for levels in (0, 1), relative error below 1.2e-9 (P. J. Acklam's rational fits)."""
    p = np.asarray(levels, np.float64)
    tail = np.minimum(p, 1.0 - p)
    r = np.sqrt(-2.0 * np.log(np.clip(tail, 1e-300, 0.02425)))
    outer = np.polyval(_TAIL[0], r) / np.polyval(_TAIL[1], r)
    q = np.where(tail < 0.02425, 0.0, p - 0.5)
    inner = np.polyval(_CENTRAL[0], q * q) * q / np.polyval(_CENTRAL[1], q * q)
    return np.where(tail < 0.02425, np.where(p < 0.5, outer, -outer), inner)
