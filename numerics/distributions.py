"""What is kept of a tensor once the tensor is gone: moments, marginals, and how values sit below their amax.

A tensor of shape (rows, features) has independent rows (samples of a batch, or rows of a weight). Nothing
here is a raw value, everything is a numpy array, and torch is never imported. `numerics.collect` makes the
record from tensors, `gaussian` makes one without data, `numerics.predict` turns two of them into a GEMM's error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from numerics.normal import normal_quantile
from numerics.sizes import check_whole, is_whole

# Scopes that share one scale, and what each spans of a (rows, features) tensor. A profile is kept for each.
SCOPES = ("tensor", "row", "row128", "row32", "column", "column128", "column32", "tile128", "row16", "column16")
# Records older than the last two scopes take those of blocks of 32 for them.
_OLDER = [*range(8), SCOPES.index("row32"), SCOPES.index("column32")]

# A profile says where values lie below the amax of their scope: bin 0 is the amax itself (a scaled amax is
# representable, so it carries no rounding error), then quarter octaves, then all that is further below.
BINS_PER_OCTAVE = 4
PROFILE_OCTAVES = 24
PHASES = 16
PROFILE_BINS = BINS_PER_OCTAVE * PROFILE_OCTAVES + 2

_TAILS = 2.0 ** -np.arange(24, 3, -1.0)
LEVELS = np.concatenate([[0.0], _TAILS, np.linspace(1 / 16, 15 / 16, 57)[1:-1], 1.0 - _TAILS[::-1], [1.0]])
# Levels of the spread of row magnitudes: midpoints of 16 equal shares.
ROW_LEVELS = (np.arange(16) + 0.5) / 16

_VECTORS = ("mean", "second_moment", "amax", "zero_share", "residual")
_PROFILES = ("profile_counts", "profile_energy", "profile_lengths", "profile_phase")
_ARRAYS = (*_VECTORS, "factor", "quantiles", "shape_quantiles", "row_rms", *_PROFILES)
_SHARES = ("profile_counts", "profile_energy", "profile_phase")
_SINGLE_PRECISION = (
    "mean", "second_moment", "amax", "residual", "quantiles", "shape_quantiles", "profile_lengths",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class TensorStatistics:
    """Statistics of a (rows, features) tensor with independent rows.

    Attributes:
        rows_seen: Rows that went in.
        mean: (F,) mean of each feature.
        second_moment: (F,) mean square of each feature, not centred.
        amax: (F,) largest magnitude seen of each feature.
        zero_share: (F,) share of exact zeros of each feature.
        factor: (R, F); the covariance is `factor.T @ factor + diag(residual)`, exact when R is F.
        residual: (F,) variance that `factor` leaves, so that the diagonal is always exact.
        quantiles: values of all features pooled at `LEVELS`; the first and last are the least and the greatest.
        shape_quantiles: the same of values standardised per feature: (x - mean) / deviation, or, for a `spiked`
            tensor, nonzero values over the feature's root mean square of its nonzero values.
        spiked: Whether zeros are a spike of their own (over 2% of the values), as after ReLU.
        row_rms: root mean square of a row over that of the tensor, at `ROW_LEVELS`.
        profile_counts: (scopes, bins) share of all elements that lie in a bin below the amax of their scope.
        profile_energy: (scopes, bins) share of the sum of squares in that bin.
        profile_lengths: (scopes,) elements that shared an amax when the profile was taken.
        profile_phase: (scopes, 16) where amax lies inside its octave: shares of sixteenths of log2(amax), by amax^2.
        contraction: `features` or `rows`: the axis that a GEMM sums over, see `along_features`.
    """

    rows_seen: int
    mean: np.ndarray
    second_moment: np.ndarray
    amax: np.ndarray
    zero_share: np.ndarray
    factor: np.ndarray
    residual: np.ndarray
    quantiles: np.ndarray
    shape_quantiles: np.ndarray
    row_rms: np.ndarray
    profile_counts: np.ndarray
    profile_energy: np.ndarray
    profile_lengths: np.ndarray
    profile_phase: np.ndarray
    spiked: bool = False
    contraction: str = "features"
    _views: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Refuse arrays that do not belong together.

        Raises:
            ValueError: a shape is wrong or a value is not finite.
        """
        expected: dict[str, tuple[int, ...]] = {name: (self.features,) for name in _VECTORS}
        expected |= {"factor": (self.factor.shape[0], self.features), "profile_lengths": (len(SCOPES),)}
        expected |= {"profile_phase": (len(SCOPES), PHASES)}
        expected |= {"quantiles": LEVELS.shape, "shape_quantiles": LEVELS.shape, "row_rms": ROW_LEVELS.shape}
        expected |= {name: (len(SCOPES), PROFILE_BINS) for name in ("profile_counts", "profile_energy")}
        for name, shape in expected.items():
            value = getattr(self, name)
            if value.shape != shape:
                raise ValueError(f"statistics: {name} has shape {value.shape}, expected {shape}")
            if not np.isfinite(value).all():
                raise ValueError(f"statistics: {name} holds values that are not finite")
        if self.contraction not in ("features", "rows"):
            raise ValueError(f"statistics: contraction is {self.contraction!r}, choose features or rows")

    @property
    def features(self) -> int:
        """Number of features."""
        return int(self.mean.shape[0])

    @property
    def mean_square(self) -> float:
        """Mean square of all elements."""
        return float(self.second_moment.mean(dtype=np.float64))

    @property
    def covariance(self) -> np.ndarray:
        """(F, F) covariance, made on each call."""
        return self.factor.T @ self.factor + np.diag(self.residual)

    def along_features(self) -> TensorStatistics:
        """The operand whose contraction runs over features: x and w of `output`, g and w^T of `grad_input`."""
        return self._with_contraction("features")

    def along_rows(self) -> TensorStatistics:
        """The operand whose contraction runs over rows: g^T and x^T of `grad_weight`, where K is the batch."""
        return self._with_contraction("rows")

    def _with_contraction(self, contraction: str) -> TensorStatistics:
        if contraction == self.contraction:
            return self
        if contraction not in self._views:
            view = dataclasses.replace(self, contraction=contraction, _views={})
            # Each orientation keeps the other, so that memos keyed by identity are found again.
            view._views[self.contraction] = self
            if "origin" in self._views:
                view._views["origin"] = self._views["origin"]._with_contraction(contraction)
            self._views[contraction] = view
        return self._views[contraction]

    def resized(self, features: int) -> TensorStatistics:
        """The same kind of tensor with another width, for a layer wider than the one that was measured.

        Features are repeated (or thinned) evenly in order. So the mean keeps its size per feature and its share
        of the signal; factors of the covariance that many features share, and that stand above what independent
        features show by chance, are shared by all, as more views of the same latent causes; everything else is
        independent for every new feature. Both operands of a GEMM are stretched in the same way, so what was
        coherent between them stays so. Profiles are kept with the lengths that they were taken at; a longer scope
        moves its amax when a prediction is made.

        Raises:
            ValueError: `features` is no positive whole number.
        """
        base = self.stretched(features)
        if features == base.features:
            return base
        if self.origin is not self:
            return self.origin.resized(features)
        if features not in self._views:
            index = np.arange(features) * self.features // features
            vectors: dict[str, Any] = {name: getattr(base, name)[index] for name in _VECTORS}
            self._views[features] = dataclasses.replace(self, **vectors, factor=base.factor[:, index], _views={"origin": self})
        return self._views[features]

    def stretched(self, features: int) -> TensorStatistics:
        """The record whose features `resized` repeats to get so many: this one where it has as many.

        Raises:
            ValueError: `features` is no positive whole number.
        """
        if not is_whole(features):
            raise ValueError(f"statistics: cannot resize to {features!r} features; give a positive whole number")
        if features == self.features:
            return self
        origin = self.origin
        return origin if features == origin.features else origin._with_lasting_coherence()

    def repeats(self, features: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """How often `resized` repeats each feature to get so many, (widths, F)."""
        own = np.arange(self.features + 1)
        return np.diff(-(-own * features[:, None] // self.features)).astype(np.float64)

    @property
    def origin(self) -> TensorStatistics:
        """The record as it was measured or made, of one that was resized; others are their own."""
        return self._views.get("origin", self)

    def _with_lasting_coherence(self) -> TensorStatistics:
        """The record without coherence that is chance or one feature's own; that variance becomes independent."""
        if "lasting" not in self._views:
            variance = np.square(self.factor).sum(0) + self.residual
            energy = np.square(self.factor).sum(1)
            # Largest eigenvalue of independent features seen n times (Marchenko and Pastur), and half as much again.
            chance = variance.mean() * (1.0 + math.sqrt(self.features / max(self.rows_seen, 1))) ** 2
            fourth = np.square(np.square(self.factor, dtype=np.float64)).sum(1)  # may be beyond float32
            reach = np.square(energy, dtype=np.float64) / np.maximum(fourth, 1e-300)
            kept = (energy > 1.5 * chance) & (reach > 3.0)
            factor = self.factor[kept]
            # A mean over n rows is off by a variance of 1/n.
            square = float(np.square(self.mean).sum())
            certain = max(0.0, 1.0 - float(variance.sum()) / max(self.rows_seen, 1) / max(square, 1e-38))
            lost = np.square(self.mean) * (1.0 - certain)
            self._views["lasting"] = dataclasses.replace(
                self, mean=self.mean * np.float32(math.sqrt(certain)), factor=factor,
                residual=np.maximum(variance - np.square(factor).sum(0) + lost, 0.0).astype(np.float32), _views={},
            )  # fmt: skip
        return self._views["lasting"]

    def truncated(self, rank: int) -> TensorStatistics:
        """A smaller record whose covariance keeps its `rank` leading factors; the diagonal stays exact.

        Raises:
            ValueError: `rank` is no whole number, or negative.
        """
        check_whole(0, rank=rank)
        if rank >= self.factor.shape[0]:
            return self
        kept, dropped = self.factor[:rank], self.factor[rank:]
        residual = (self.residual + np.square(dropped).sum(0)).astype(np.float32)
        return dataclasses.replace(self, factor=kept, residual=residual, _views={})

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays for a store, by name: float32, and float16 for what is a share or a loading between -1 and 1."""
        deviation = np.sqrt(np.maximum(self.second_moment - np.square(self.mean), 1e-38))
        arrays = {name: getattr(self, name).astype(np.float32) for name in _SINGLE_PRECISION}
        arrays |= {name: getattr(self, name).astype(np.float16) for name in ("zero_share", "row_rms")}
        # Shares below 6e-8 vanish in float16 and matter to no figure that is printed.
        arrays |= {name: getattr(self, name).astype(np.float16) for name in _SHARES}
        # A feature that is all but constant has a deviation that float32 moments round away; its factor goes with it.
        arrays["loadings"] = np.clip(self.factor / deviation, -1.0, 1.0).astype(np.float16)
        arrays["header"] = np.array([self.rows_seen, int(self.spiked)], np.int64)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> TensorStatistics:
        """The inverse of `to_arrays`, oriented along features.

        Raises:
            ValueError: an array is missing or does not fit the others.
        """
        # Where amax lies in its octave was not always kept; without it, it may be anywhere.
        arrays = {"profile_phase": np.full((len(SCOPES), PHASES), 1.0 / PHASES)} | arrays
        names = {*_ARRAYS, "loadings", "header"} - {"factor"}
        if missing := sorted(names - set(arrays)):
            raise ValueError(f"statistics: no array named {missing[0]}; the record is incomplete, collect it again")
        values: dict[str, Any] = {name: np.asarray(arrays[name], np.float32) for name in names - {"loadings", "header"}}
        for name in _PROFILES:
            if len(values[name]) == 8:
                values[name] = values[name][_OLDER]
        deviation = np.sqrt(np.maximum(values["second_moment"] - np.square(values["mean"]), 1e-38))
        loadings = np.asarray(arrays["loadings"], np.float32)
        if loadings.ndim != 2 or loadings.shape[1:] != deviation.shape or arrays["header"].shape != (2,):
            raise ValueError("statistics: loadings do not fit the features; the record is damaged, collect it again")
        rows_seen, spiked = (int(value) for value in arrays["header"])
        return cls(rows_seen=rows_seen, spiked=bool(spiked), factor=loadings * deviation, **values)


@functools.lru_cache(maxsize=64, typed=True)
def gaussian(features: int, mean: float = 0.0, std: float = 1.0) -> TensorStatistics:
    """Independent normal values, for predictions without data.

    The moments and quantiles are exact; the profiles come from 4,096 x 128 seeded samples and are moved to the
    length at hand when a prediction is made.

    Raises:
        ValueError: `features` is no positive whole number, or `std` is not positive.
    """
    if not is_whole(features) or not std > 0:
        raise ValueError(f"gaussian: features = {features!r} and std = {std} must both be positive, features a whole number")
    from numerics.collect import StatisticsAccumulator

    width = min(features, 128)
    accumulator = StatisticsAccumulator(width)
    rng = np.random.default_rng(20)
    for _ in range(4):
        accumulator.update(mean + std * rng.standard_normal((1024, width), np.float32))
    inner = LEVELS.copy()
    inner[0], inner[-1] = 2.0**-26, 1 - 2.0**-26
    shape = normal_quantile(inner).astype(np.float32)

    def full(value: float) -> np.ndarray:
        return np.full(width, value, np.float32)

    return dataclasses.replace(
        accumulator.result(),
        mean=full(mean), second_moment=full(mean**2 + std**2), amax=full(abs(mean) + 4.0 * std), zero_share=full(0.0),
        factor=np.zeros((0, width), np.float32), residual=full(std**2),
        quantiles=(mean + std * shape).astype(np.float32), shape_quantiles=shape, _views={},
    ).resized(features)  # fmt: skip


def sample(statistics: TensorStatistics, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Rows drawn from the statistics: a Gaussian copula with their correlation over their empirical marginals.

    Each feature takes the pooled shape of the marginals, moved to its own mean and deviation or, where zeros are a
    spike (ReLU), its own share of zeros and its own scale. Row magnitudes spread only as far as the factors make them.

    Returns:
        (rows, features) float32.

    Raises:
        ValueError: `rows` is no whole number, or negative.
    """
    check_whole(0, rows=rows)
    deviation = np.sqrt(np.maximum(statistics.second_moment - np.square(statistics.mean), 1e-38))
    noise = rng.standard_normal((rows, statistics.features), np.float32) * np.sqrt(np.maximum(statistics.residual, 0.0))
    shared = rng.standard_normal((rows, statistics.factor.shape[0]), np.float32) @ statistics.factor
    normal = (shared + noise) / deviation
    scores = normal_quantile(np.clip(LEVELS, 2.0**-26, 1 - 2.0**-26))
    if not statistics.spiked:
        shaped = np.interp(normal, scores, statistics.shape_quantiles)
        return (statistics.mean + deviation * shaped).astype(np.float32)
    # Above the zeros, a score is stretched over the nonzero marginal: level (p - zero) / (1 - zero).
    from numerics.normal import normal_cdf

    table = np.linspace(-6.0, 6.0, 2049)
    level = np.interp(normal, table, normal_cdf(table))
    zero = statistics.zero_share
    inner = np.clip((level - zero) / np.maximum(1.0 - zero, 1e-6), 0.0, 1.0)
    scale = np.sqrt(statistics.second_moment / np.maximum(1.0 - zero, 1e-6))
    values = np.interp(inner, LEVELS, statistics.shape_quantiles) * scale
    return np.where(level <= zero, 0.0, values).astype(np.float32)


def __getattr__(name: str) -> Any:
    """`StatisticsAccumulator` is found here too, beside the record that it makes."""
    if name == "StatisticsAccumulator":
        from numerics.collect import StatisticsAccumulator

        return StatisticsAccumulator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
