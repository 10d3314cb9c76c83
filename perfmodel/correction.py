"""Corrections of log(time / predicted time), learned from few measurements of one machine.

Two parts. The machine part is linear in four features of a call (constant, size, share of a launch, share of memory
traffic); its coefficients are shared by the kernels of a kind and shrunk toward 0, each kernel's own toward those of its
kind, as far as the data ask for it. The local part is a Gaussian process on log2 sizes and alignments: near measured
shapes it follows them, far from them it is 0, and its standard deviation says how far is far.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import KERNELS
from perfmodel.roofline import flops, moved_bytes

Array = npt.NDArray[np.float64]
Sizes = tuple[Array, Array, Array, Array]

# Standard deviations of the machine part's coefficients before a scale; scales are weighed by marginal likelihood.
MACHINE_SD = np.array([0.3, 0.1, 0.3, 0.2])
MACHINE_SCALES = (0.02, 0.1, 0.3, 1.0, 3.0)
# A kernel's own coefficients against those of its kind, likewise.
OWN_SCALES = (0.0625, 0.25)
LENGTHS = (1.0, 2.0, 4.0, 8.0)
AMPLITUDES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
NOISES = (0.015, 0.03, 0.06, 0.12, 0.25)
# Degrees of freedom of the Student-t that keeps single outliers from bending a correction.
TAIL = 4.0
# Rows that the choice of a process's parameters looks at, and rows that it keeps: they bound fitting and prediction.
MOST_TO_CHOOSE, MOST_ROWS = 200, 400


def memory_share(kernel: str, sizes: Sizes, hardware: HardwareSpec) -> Array:
    """Memory time over memory plus compute time, 0 to 1; 1 for a memory-bound kernel."""
    spec = KERNELS[kernel]
    peak = hardware.peak_fp8_tflops if spec.is_fp8 else hardware.peak_bf16_tflops
    compute = flops(spec, *sizes) / (peak * 1e6)
    memory = moved_bytes(spec, *sizes) / (hardware.copy_bandwidth_tbs * 1e6)
    return memory / (memory + compute)


def machine_features(base_us: Array, share: Array) -> Array:
    """(rows, 4): constant, log size, how much of the time is a launch, memory share."""
    return np.stack([np.ones_like(base_us), (np.log2(base_us) - 3.5) / 3, np.exp(-(base_us - 1) / 6), share], axis=1)


def coordinates(sizes: Sizes) -> Array:
    """(rows, 7): where a call lies for the local part; log2 sizes, and half the log2 alignments up to 256."""
    aligned = [np.minimum(whole & -whole, 256) for whole in (size.astype(np.int64) for size in sizes[:3])]
    return np.stack([*(np.log2(size) for size in sizes), *(0.5 * np.log2(value) for value in aligned)], axis=1)


def fit_machine(
    kernels: npt.NDArray[np.object_], features: Array, target: Array, rows_per_witness: float = 1.0
) -> dict[str, tuple[Array, Array]]:
    """Machine coefficients of each kernel of one kind.

    Args:
        kernels: Name of each row's kernel, (rows,).
        features: `machine_features` of each row, (rows, 4).
        target: log(measured / predicted), (rows,).
        rows_per_witness: So many rows say together what one would alone, where their errors are not independent.

    Returns:
        Four coefficients and their covariance (4, 4) per kernel, and under the empty name those of a kernel of this kind
        without rows.
    """
    names = sorted(set(kernels))
    design = np.zeros((len(target), 4 * (len(names) + 1)))
    design[:, :4] = features
    for number, name in enumerate(names, 1):
        rows = kernels == name
        design[rows, 4 * number : 4 * number + 4] = features[rows]
    likelihoods, solutions, covariances, priors = [], [], [], []
    for scale in MACHINE_SCALES:
        for own in OWN_SCALES:
            deviation = scale * np.concatenate([MACHINE_SD, np.tile(MACHINE_SD * own, len(names))])
            prior = np.diag(1 / deviation**2)
            weight, variance = np.ones(len(target)), 0.01
            for _ in range(5):
                counts = weight / (variance * rows_per_witness)
                precision = design.T @ (counts[:, None] * design) + prior
                solution = np.linalg.solve(precision, design.T @ (counts * target))
                residual = target - design @ solution
                variance = max(float(np.mean(weight * residual**2)), 1e-4)
                weight = (TAIL + 1) / (TAIL + residual**2 / variance)
            likelihoods.append(-0.5 * (
                (len(target) * np.log(variance) + np.sum(weight * residual**2) / variance) / rows_per_witness
                + solution @ prior @ solution + np.linalg.slogdet(precision)[1] - np.linalg.slogdet(prior)[1]
            ))  # fmt: skip
            solutions.append(solution)
            # The Fisher information of a Student-t location, not the weights, says how much the rows know.
            information = (TAIL + 1) / (TAIL + 3) * design.T @ design / (variance * rows_per_witness)
            covariances.append(np.linalg.inv(information + prior))
            priors.append(np.diag((scale * own * MACHINE_SD) ** 2))
    probable = np.exp(np.array(likelihoods) - max(likelihoods))
    probable /= probable.sum()
    mean = probable @ np.stack(solutions)
    strays = np.stack(solutions) - mean
    covariance = np.einsum("s,sij->ij", probable, np.stack(covariances)) + np.einsum("s,si,sj->ij", probable, strays, strays)
    # A kernel's coefficients are the kind's plus its own; of one without rows, its own are known by their prior alone.
    result = {"": (mean[:4], covariance[:4, :4] + np.einsum("s,sij->ij", probable, np.stack(priors)))}
    for number, name in enumerate(names, 1):
        both = np.zeros((4, len(mean)))
        both[:, :4] = both[:, 4 * number : 4 * number + 4] = np.eye(4)
        result[name] = both @ mean, both @ covariance @ both.T
    return result


def _similarity(a: Array, b: Array, length: float) -> Array:
    """Matern 3/2 correlation of every row of `a` with every row of `b`."""
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
    distance = np.sqrt(np.maximum(squares, 0.0)) * (np.sqrt(3) / length)
    return (1 + distance) * np.exp(-distance)


@dataclass(frozen=True)
class Local:
    """A Gaussian process on what the machine part leaves of one kernel.

    Attributes:
        length: Length scale, in doublings of a size.
        amplitude: Standard deviation of the process (of a logarithm).
        noise: Standard deviation of a measurement about it.
        at: `coordinates` of the rows that it was fitted to, (rows, 7).
        residual: What those rows ask for, (rows,).
        spread: Factor on the noise variance of each, above 1 for outliers, (rows,).
    """

    length: float
    amplitude: float
    noise: float
    at: Array
    residual: Array
    spread: Array

    @cached_property
    def _inverse_factor(self) -> Array:
        """Inverse of the Cholesky factor of the rows' covariance."""
        covariance = self.amplitude**2 * _similarity(self.at, self.at, self.length) + np.diag(self.noise**2 * self.spread)
        return np.linalg.inv(np.linalg.cholesky(covariance))

    @cached_property
    def _weights(self) -> Array:
        return self._inverse_factor.T @ (self._inverse_factor @ self.residual)

    def predict(self, at: Array) -> tuple[Array, Array, Array]:
        """Mean correction at coordinates (rows, 7), standard deviation of a measurement about it, and share not known.

        The share is 1 far from all rows, and near 0 at one of them.
        """
        covariance = self.amplitude**2 * _similarity(at, self.at, self.length)
        explained = ((covariance @ self._inverse_factor.T) ** 2).sum(axis=1)
        left = np.maximum(self.amplitude**2 - explained, 0.0)
        return covariance @ self._weights, np.sqrt(left + self.noise**2), np.sqrt(left) / self.amplitude

    def robust(self) -> Local:
        """The same with rows that the others contradict given a larger noise (Student-t, by leave-one-out)."""
        result = self
        for _ in range(3):
            inverse = result._inverse_factor.T @ result._inverse_factor
            left_out = (inverse @ self.residual) ** 2 / np.diag(inverse)
            spread = np.maximum((TAIL + left_out) / (TAIL + 1), 0.8)
            result = Local(self.length, self.amplitude, self.noise, self.at, self.residual, spread)
        return result


def choose_local(at: Array, residual: Array, seed: int = 0) -> tuple[float, float, float]:
    """Length, amplitude and noise of greatest marginal likelihood, from at most `MOST_TO_CHOOSE` of the rows."""
    if len(residual) > MOST_TO_CHOOSE:
        some = np.random.default_rng(seed).permutation(len(residual))[:MOST_TO_CHOOSE]
        at, residual = at[some], residual[some]
    amplitude, noise = (grid.ravel() for grid in np.meshgrid(AMPLITUDES, NOISES))
    best, chosen = -np.inf, (0.0, 0.0, 0.0)
    for length in LENGTHS:
        values, vectors = np.linalg.eigh(_similarity(at, at, length))
        variance = np.outer(amplitude**2, np.maximum(values, 0)) + (noise**2)[:, None]
        likelihood = -0.5 * ((vectors.T @ residual) ** 2 / variance + np.log(variance)).sum(axis=1)
        index = int(likelihood.argmax())
        if likelihood[index] > best:
            best, chosen = likelihood[index], (length, float(amplitude[index]), float(noise[index]))
    return chosen


def fit_local(at: Array, residual: Array, parameters: tuple[float, float, float] | None = None, seed: int = 0) -> Local:
    """A process fitted to rows of one kernel (at most `MOST_ROWS` of them, drawn with `seed`).

    Args:
        at: `coordinates`, (rows, 7).
        residual: What the machine part leaves, (rows,).
        parameters: Length, amplitude and noise; chosen by marginal likelihood where None.
        seed: Seeds the draw.
    """
    parameters = parameters or choose_local(at, residual, seed)
    if len(residual) > MOST_ROWS:
        some = np.sort(np.random.default_rng(seed).permutation(len(residual))[:MOST_ROWS])
        at, residual = at[some], residual[some]
    return Local(*parameters, at, residual, np.ones(len(residual))).robust()
