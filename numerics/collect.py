"""Collecting `TensorStatistics` from tensors as they pass by; numpy only, mergeable over ranks and runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from numerics.distributions import BINS_PER_OCTAVE, LEVELS, PHASES, PROFILE_BINS, ROW_LEVELS, SCOPES, TensorStatistics
from numerics.sizes import check_whole

# Values are counted by sign, exponent and three bits of their fraction: exact to merge, 6% wide at most.
_FRACTION_BITS = 3
_BUCKETS = 256 << _FRACTION_BITS
# A full (F, F) covariance up to here; a sketch of its leading directions beyond.
_FULL_COVARIANCE_FEATURES = 2048
# Profiles are taken from the first rows of an update (rows are independent), their amax from all of them.
_PROFILE_ROWS = 1024
# Sizes whose squares float32 holds with all its bits, sums of them included.
_LEAST, _MOST = 2.0**-55, 2.0**55


class StatisticsAccumulator:
    """Streams (rows, features) tensors into statistics: batched Welford moments, histograms, amax profiles.

    Args:
        features: Width of every tensor to come.
    """

    def __init__(self, features: int) -> None:
        """Start empty.

        Raises:
            ValueError: `features` is no positive whole number.
        """
        check_whole(features=features)
        self.features = features
        self.rows = 0
        self._mean = np.zeros(features)
        self._squares = np.zeros(features)
        self._amax = np.zeros(features)
        self._zeros = np.zeros(features)
        self._scatter = _Scatter(features)
        self._pooled = _Histogram()
        self._centred = _Histogram()
        self._nonzero = _Histogram()
        self._row_rms = _Histogram()
        self._counts = np.zeros((len(SCOPES), PROFILE_BINS))
        self._energy = np.zeros((len(SCOPES), PROFILE_BINS))
        self._lengths = np.zeros(len(SCOPES))
        self._phases = np.zeros((len(SCOPES), PHASES))
        self._profiled = 0.0

    def update(self, values: Any) -> None:
        """Take in one (rows, features) array or tensor of any float type, on any device.

        Raises:
            ValueError: the rank or width is wrong, a value is NaN or infinite, or so large that its square is beyond float32.
        """
        x = as_array(values)
        if x.ndim != 2 or x.shape[1] != self.features:
            raise ValueError(f"statistics take (rows, {self.features}) tensors, got shape {tuple(x.shape)}")
        if x.shape[0] == 0:
            return
        if not np.isfinite(x).all():
            raise ValueError(f"{int((~np.isfinite(x)).sum())} of {x.size} values are not finite; collect before they are")
        amax = np.abs(x).max(0)
        if amax.max() > _MOST:
            raise ValueError(_out_of_range(float(amax.max())))
        batch = x.shape[0]
        batch_mean = x.mean(0, dtype=np.float64)
        delta = batch_mean - self._mean
        total = self.rows + batch
        self._scatter.add((x - batch_mean.astype(np.float32)), delta, self.rows * batch / total)
        self._mean = self._mean + delta * (batch / total)
        self._squares += np.square(x, dtype=np.float64).sum(0)
        self._amax = np.maximum(self._amax, amax)
        self._zeros += (x == 0).sum(0)
        self.rows = total
        self._count_values(x)
        self._profile(x)

    def merge(self, other: StatisticsAccumulator) -> None:
        """Take in what another accumulator of the same width has seen.

        Raises:
            ValueError: the widths differ.
        """
        if other.features != self.features:
            raise ValueError(f"cannot merge statistics of {other.features} features into {self.features}")
        if not other.rows:
            return
        total = self.rows + other.rows
        delta = other._mean - self._mean
        self._scatter.merge(other._scatter, delta, self.rows * other.rows / total)
        self._mean = self._mean + delta * (other.rows / total)
        self._amax = np.maximum(self._amax, other._amax)
        for name in ("_squares", "_zeros", "_counts", "_energy", "_lengths", "_phases", "_profiled"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("_pooled", "_centred", "_nonzero", "_row_rms"):
            getattr(self, name).merge(getattr(other, name))
        self.rows = total

    def result(self, rank: int | None = None) -> TensorStatistics:
        """The statistics so far.

        Args:
            rank: Covariance factors to keep; all (up to 512 features) or 64 when None.

        Raises:
            ValueError: nothing was seen, values so small that their squares are below float32, or a rank that is none.
        """
        if rank is not None:
            check_whole(0, rank=rank)
        if not self.rows:
            raise ValueError("no rows were seen; there are no statistics")
        if 0.0 < self._amax.max() < _LEAST:
            raise ValueError(_out_of_range(float(self._amax.max())))
        if rank is None:
            rank = self.features if self.features <= 512 else 64
        second = self._squares / self.rows
        variance = np.maximum(second - np.square(self._mean), 0.0)
        factor = self._scatter.factor(rank) / np.sqrt(max(self.rows - 1, 1))
        zero_share = self._zeros / self.rows
        spiked = bool(zero_share.mean() > 0.02)
        shape = (self._nonzero if spiked else self._centred).quantiles(LEVELS)
        row_rms = self._row_rms.quantiles(ROW_LEVELS) / max(np.sqrt(second.mean()), 1e-38)
        single = np.float32
        return TensorStatistics(
            rows_seen=self.rows, mean=self._mean.astype(single), second_moment=second.astype(single),
            amax=self._amax.astype(single), zero_share=zero_share.astype(single), factor=factor.astype(single),
            residual=np.maximum(variance - np.square(factor).sum(0), 0.0).astype(single),
            quantiles=self._pooled.quantiles(LEVELS).astype(single), shape_quantiles=shape.astype(single),
            row_rms=row_rms.astype(single),
            profile_counts=(self._counts / max(self._profiled, 1.0)).astype(single),
            profile_energy=(self._energy / np.maximum(self._energy.sum(1, keepdims=True), 1e-300)).astype(single),
            profile_lengths=(self._lengths / max(self._profiled, 1.0)).astype(single),
            profile_phase=(self._phases / np.maximum(self._phases.sum(1, keepdims=True), 1e-300)).astype(single), spiked=spiked,
        )  # fmt: skip

    def _count_values(self, x: np.ndarray) -> None:
        x = x[:_PROFILE_ROWS]
        self._pooled.add(x)
        mean = self._mean.astype(np.float32)
        second = self._squares / self.rows
        deviation = np.sqrt(np.maximum(second - np.square(self._mean), 1e-38)).astype(np.float32)
        self._centred.add((x - mean) / deviation)
        nonzero_rms = np.sqrt(self._squares / np.maximum(self.rows - self._zeros, 1)).astype(np.float32)
        scaled = x / np.maximum(nonzero_rms, np.float32(1e-38))
        self._nonzero.add(scaled[x != 0])
        self._row_rms.add(np.sqrt(np.square(x, dtype=np.float64).mean(1)).astype(np.float32))

    def _profile(self, x: np.ndarray) -> None:
        """Add how far each value lies below the amax of each scope that it may share a scale with."""
        magnitude = np.abs(x)
        scale = float(magnitude.max())
        column = magnitude.max(0)
        magnitude = magnitude[:_PROFILE_ROWS]
        if scale == 0.0:
            return
        rows, features = magnitude.shape
        with np.errstate(divide="ignore"):
            log = np.log2(magnitude)
            amaxes = {"tensor": np.log2(scale), "column": np.log2(column), "row": np.log2(magnitude.max(1, keepdims=True))}
            for block in (128, 32, 16):
                amaxes[f"row{block}"] = np.log2(_block_amax(magnitude, 1, block))
                amaxes[f"column{block}"] = np.log2(_block_amax(magnitude, block, 1))
            amaxes["tile128"] = np.log2(_block_amax(magnitude, 128, 128))
        lengths = {
            "tensor": x.size, "row": features, "row128": min(features, 128), "row32": min(features, 32),
            "column": x.shape[0], "column128": min(rows, 128), "column32": min(rows, 32),
            "tile128": min(rows, 128) * min(features, 128), "row16": min(features, 16), "column16": min(rows, 16),
        }  # fmt: skip
        present = magnitude > 0
        energy = np.square(magnitude[present], dtype=np.float64)
        octaves = log[present]
        weight = magnitude.size
        for index, scope in enumerate(SCOPES):
            below = np.broadcast_to(amaxes[scope], log.shape)[present] - octaves
            bins = np.minimum((below * BINS_PER_OCTAVE).astype(np.int64) + 1, PROFILE_BINS - 1)
            bins[below <= 0] = 0
            self._counts[index] += np.bincount(bins, minlength=PROFILE_BINS)
            self._energy[index] += np.bincount(bins, energy, minlength=PROFILE_BINS)
            self._lengths[index] += lengths[scope] * weight
            phase = ((octaves[bins == 0] % 1.0) * PHASES).astype(np.int64) % PHASES
            self._phases[index] += np.bincount(phase, energy[bins == 0], minlength=PHASES)
        self._profiled += weight


class _Histogram:
    """Counts of float32 values by sign, exponent and leading fraction bits."""

    def __init__(self) -> None:
        self.counts = np.zeros((2, _BUCKETS), np.int64)
        self.least, self.greatest = np.inf, -np.inf

    def add(self, values: np.ndarray) -> None:
        if not values.size:
            return
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        index = (flat.view(np.uint32) >> np.uint32(23 - _FRACTION_BITS)).astype(np.int64)
        self.counts += np.bincount(index, minlength=2 * _BUCKETS).reshape(2, _BUCKETS)
        self.least, self.greatest = min(self.least, float(flat.min())), max(self.greatest, float(flat.max()))

    def merge(self, other: _Histogram) -> None:
        self.counts += other.counts
        self.least, self.greatest = min(self.least, other.least), max(self.greatest, other.greatest)

    def quantiles(self, levels: np.ndarray) -> np.ndarray:
        """Values at `levels`, linear inside a bucket; 0 where nothing was counted."""
        if not self.counts.sum():
            return np.zeros(len(levels))
        exponent, fraction = np.divmod(np.arange(_BUCKETS + 1), 1 << _FRACTION_BITS)
        edges = np.ldexp(1.0 + fraction / (1 << _FRACTION_BITS), exponent - 127)
        # Subnormals and zeros share a spike at zero; every other bucket is a pair of edges, in rising order.
        subnormal = 1 << _FRACTION_BITS
        positive, negative = self.counts[0], self.counts[1]
        low = np.concatenate([-edges[subnormal + 1 :][::-1], [0.0], edges[subnormal:-1]])
        high = np.concatenate([-edges[subnormal:-1][::-1], [0.0], edges[subnormal + 1 :]])
        zeros = positive[:subnormal].sum() + negative[:subnormal].sum()
        mass = np.concatenate([negative[subnormal:][::-1], [zeros], positive[subnormal:]])
        kept = mass > 0
        upper = np.cumsum(mass[kept]) / mass.sum()
        lower = np.concatenate([[0.0], upper[:-1]])
        points = np.stack([low[kept], high[kept]], 1).reshape(-1)
        shares = np.stack([lower, upper], 1).reshape(-1)
        return np.clip(np.interp(levels, shares, points), self.least, self.greatest)


class _Scatter:
    """Sum of centred outer products: whole for moderate widths, a frequent-directions sketch for wide ones."""

    def __init__(self, features: int) -> None:
        self.full = features <= _FULL_COVARIANCE_FEATURES
        self.matrix = np.zeros((features, features) if self.full else (0, features))

    def add(self, centred: np.ndarray, delta: np.ndarray, weight: float) -> None:
        """Add rows centred on their own mean, and the shift of that mean."""
        if self.full:
            self.matrix += centred.T @ centred
            self.matrix += weight * np.outer(delta, delta)
        else:
            for start in range(0, len(centred), 256):
                self._sketch(centred[start : start + 256])
            self._sketch(np.sqrt(weight) * delta[None])

    def merge(self, other: _Scatter, delta: np.ndarray, weight: float) -> None:
        """Add another scatter around its own mean."""
        if self.full:
            self.matrix += other.matrix + weight * np.outer(delta, delta)
        else:
            self._sketch(np.concatenate([other.matrix, np.sqrt(weight) * delta[None]]))

    def factor(self, rank: int) -> np.ndarray:
        """(R, F) rows whose outer products sum to the scatter, the leading `rank` of them."""
        if not self.full:
            _, singular, right = np.linalg.svd(self.matrix, full_matrices=False)
            return (singular[:, None] * right)[:rank]
        values, vectors = np.linalg.eigh((self.matrix + self.matrix.T) / 2)
        kept = np.argsort(values)[::-1][:rank]
        return (vectors[:, kept] * np.sqrt(np.maximum(values[kept], 0.0))).T

    def _sketch(self, rows: np.ndarray) -> None:
        stacked = np.concatenate([self.matrix, rows])
        if len(stacked) > 256:
            _, singular, right = np.linalg.svd(stacked, full_matrices=False)
            shrunk = np.sqrt(np.maximum(np.square(singular) - singular[128] ** 2, 0.0))[:128]
            stacked = shrunk[:, None] * right[:128]
        self.matrix = stacked


def _out_of_range(amax: float) -> str:
    return (
        f"values go up to {amax:.2g}, where statistics, which hold their squares, take {_LEAST:.1g} to {_MOST:.1g}; multiply the "
        "tensor by a power of two, which changes no error of a scaled recipe"
    )


def _block_amax(magnitude: np.ndarray, block_rows: int, block_columns: int) -> np.ndarray:
    """The amax of each block, spread back over the elements of the block; edge blocks may be smaller."""
    spread = magnitude
    for axis, block in ((0, block_rows), (1, block_columns)):
        if block > 1:
            starts = np.arange(0, magnitude.shape[axis], block)
            peaks = np.maximum.reduceat(spread, starts, axis=axis)
            spread = np.repeat(peaks, block, axis=axis).take(np.arange(magnitude.shape[axis]), axis=axis)
    return spread


def as_array(values: Any) -> np.ndarray:
    """A float32 numpy array of an array or a torch tensor, without importing torch."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, np.float32)
