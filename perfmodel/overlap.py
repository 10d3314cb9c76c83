"""How much longer kernels and collectives take that run at the same time, learned from pairs of them (`hil.overlap`).

NCCL's kernels keep multiprocessors to themselves and move bytes through the memory that others wait for. By how much either
takes longer follows from how long the kernel runs, from its shares of the GPU's peak and of its bandwidth, from the waves of its
tiles, which are more on fewer multiprocessors, and from the collective: two ridge regressions of the logarithms on these and
their products, made anew from the table of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel import hardware as hardware_module
from perfmodel.choice import Codes, asked, chosen_tiles
from perfmodel.data_folder import data_folder
from perfmodel.gemm_plan import plans_of_many
from perfmodel.hardware import HardwareSpec
from perfmodel.judge import SHAPE
from perfmodel.kernels import KERNELS, library_of
from perfmodel.roofline import limits_us
from perfmodel.topology import OPS

if TYPE_CHECKING:
    from perfmodel.model import PerfModel

Array = npt.NDArray[np.float64]

FILE_NAME = "overlap.parquet"
COLUMNS = [
    "kernel", *SHAPE, "op", "ranks", "bytes_per_rank", "tiles", "alone_us", "beside_us",
    "exchange_alone_us", "exchange_beside_us",
]  # fmt: skip
# Of the regressions' weights, as if so many pairs said that each is 0; held out by whole shapes 1 to 10 are as good.
RIDGE = 10.0
# Multiprocessors that a collective is taken to hold: held out by whole shapes pairs are told best by so many of 8 to 40.
HELD = 24
FOLDS = 10
# Tiles of GEMMs of which nothing else is known, and the waves of what has no tiles but very many small programs.
_TILE, _MANY_WAVES = 128, 8.0


@dataclass(frozen=True)
class Kernels:
    """Kernels as others that run beside them see them; arrays of equal length.

    Attributes:
        us: How long each takes alone, in microseconds.
        peak: Its share of the tensor cores' peak, 0 to 1.
        bandwidth: Its share of the copy bandwidth, 0 to 1.
        tiles: Tiles of its result (`tiles`); 0 for what is bound by memory.
    """

    us: Array
    peak: Array
    bandwidth: Array
    tiles: Array


@dataclass(frozen=True)
class _Ridge:
    """A regression on standardized inputs and their products."""

    mean: Array
    deviation: Array
    weights: Array

    @classmethod
    def of(cls, inputs: Array, y: Array) -> _Ridge:
        mean, deviation = inputs.mean(axis=0), inputs.std(axis=0) + 1e-9
        terms = _terms((inputs - mean) / deviation)
        penalty = RIDGE * np.eye(terms.shape[1])
        penalty[0, 0] = 0.0
        weights = np.linalg.solve(terms.T @ terms + penalty, terms.T @ y).astype(np.float64)
        return cls(mean, deviation, weights)

    def __call__(self, inputs: Array) -> Array:
        return _terms((inputs - self.mean) / self.deviation) @ self.weights


def _terms(z: Array) -> Array:
    """1, every input, and the product of each two: (rows, inputs) to (rows, terms)."""
    first, second = np.triu_indices(z.shape[1])
    return np.concatenate([np.ones((len(z), 1)), z, z[:, first] * z[:, second]], axis=1)


@dataclass(frozen=True)
class OverlapModel:
    """Says how much longer kernels and collectives take beside one another.

    Attributes:
        hardware: The GPU that is asked about.
        table: Pairs: `COLUMNS`.
        measured_on: The GPU whose pairs they are.
    """

    hardware: HardwareSpec
    table: pd.DataFrame
    measured_on: HardwareSpec

    @property
    def ranks(self) -> list[int]:
        """Numbers of GPUs between which the collectives of pairs ran, rising."""
        return sorted(map(int, self.table["ranks"].unique()))

    def slower(self, kernels: Kernels, op: str, bytes_per_rank: float) -> tuple[Array, Array]:
        """How many times as long kernels take beside a collective that does not pause, and it beside each of them; 1 or more.

        What is outside the measured pairs counts as the nearest of them: a longer kernel as the longest, and so on.

        Args:
            kernels: What computes.
            op: all_reduce, all_to_all, all_gather, reduce_scatter.
            bytes_per_rank: The larger of a rank's two buffers.

        Raises:
            ValueError: no such op.
        """
        if op not in OPS:
            raise ValueError(f"op {op!r} is no collective; give one of {', '.join(OPS)}")
        rows = len(kernels.us)
        sizes = np.full(rows, float(bytes_per_rank))
        inputs = _inputs(kernels, np.full(rows, op, dtype=object), sizes, self.hardware.multiprocessors)
        low, high = self._range
        inputs = np.clip(inputs, low, high)
        kernel, exchange = self._fits
        return np.exp(np.maximum(kernel(inputs), 0.0)), np.exp(np.maximum(exchange(inputs), 0.0))

    @cached_property
    def held_out(self) -> pd.DataFrame:
        """Every pair with what the others say of it, fold by fold of whole shapes.

        That is `slower` and `exchange_slower`, as they were measured, `told_slower` and `told_exchange_slower`.
        """
        inputs, targets = self._pairs
        fold = self.table.groupby(["kernel", *SHAPE], sort=False, observed=True).ngroup().to_numpy() % FOLDS
        told = np.empty_like(targets)
        for number in range(FOLDS):
            out = fold == number
            for column in range(2):
                told[out, column] = np.maximum(_Ridge.of(inputs[~out], targets[~out, column])(inputs[out]), 0.0)
        names = ["slower", "exchange_slower"]
        every = np.exp(np.concatenate([targets, told], axis=1))
        found = pd.DataFrame(every, columns=[*names, *(f"told_{name}" for name in names)])
        return pd.concat([self.table.reset_index(drop=True), found], axis=1)

    @cached_property
    def _pairs(self) -> tuple[Array, Array]:
        """Inputs, and the logarithms of both: how much longer."""
        table = self.table
        limits = np.empty((len(table), 2))
        for kernel, rows in table.groupby("kernel", observed=True).indices.items():
            m, n, k, groups = (table[name].to_numpy(dtype=np.float64)[rows] for name in SHAPE)
            limits[rows] = np.stack(limits_us(str(kernel), m, n, k, groups, self.measured_on), axis=1)
        us = table["alone_us"].to_numpy(dtype=np.float64)
        kernels = Kernels(us, limits[:, 0] / us, limits[:, 1] / us, table["tiles"].to_numpy(dtype=np.float64))
        ops, sizes = table["op"].to_numpy(dtype=object), table["bytes_per_rank"].to_numpy(dtype=np.float64)
        inputs = _inputs(kernels, ops, sizes, self.measured_on.multiprocessors)
        ratios = table["beside_us"] / table["alone_us"], table["exchange_beside_us"] / table["exchange_alone_us"]
        return inputs, np.log(np.stack(ratios, axis=1))

    @cached_property
    def _fits(self) -> tuple[_Ridge, _Ridge]:
        inputs, targets = self._pairs
        return _Ridge.of(inputs, targets[:, 0]), _Ridge.of(inputs, targets[:, 1])

    @cached_property
    def _range(self) -> tuple[Array, Array]:
        inputs, _ = self._pairs
        return inputs.min(axis=0), inputs.max(axis=0)


def tiles(kernel: str, m: Array, n: Array, k: Array, groups: Array, parts: Codes | None = None) -> Array:
    """Tiles of the result of calls of one kernel, of our own GEMM so many of them as one as run on a multiprocessor at once.

    Args:
        kernel: A name of `perfmodel.kernels.KERNELS`.
        m: Rows, a 1-D array, and so on as of `perfmodel.features`.
        n: Columns of the result.
        k: Contracted dimension.
        groups: Products in one call.
        parts: What cuBLAS chooses for each, as of `perfmodel.choice.Choice.told`; None where it does not, or that is not known.

    Returns:
        Of each call, 0 for a kernel that is bound by memory.
    """
    if "gemm" not in KERNELS[kernel].kind:
        return np.zeros(len(m))
    if parts is not None:
        return chosen_tiles(parts, m, n, groups)
    if library_of(kernel) == "loka":
        plan = plans_of_many(m, n, k, fast=KERNELS[kernel].accumulation == "hopper_fast")
        return plan.tiles_down * plan.tiles_across * plan.parts / plan.resident
    return np.ceil(m / _TILE) * np.ceil(n / _TILE) * groups


def told_tiles(timing: PerfModel, kernel: str, m: Array, n: Array, k: Array, groups: Array) -> Array:
    """`tiles` by what a time model tells of cuBLAS's choices."""
    calls, place = np.unique(np.stack([m, n, k, groups]), axis=1, return_inverse=True)
    m, n, k, groups = calls
    choice = timing.choice(kernel) if kernel in timing.manifest["kernels"] else None
    parts = None if choice is None else choice.told(asked(kernel, m, n, k, groups, timing.hardware))[0]
    return tiles(kernel, m, n, k, groups, parts)[place.ravel()]


def _inputs(kernels: Kernels, ops: npt.NDArray[np.object_], sizes: Array, multiprocessors: int) -> Array:
    """(rows, inputs) of pairs: logarithms of time and bytes, shares, waves and how many times as many they become, which op."""
    shares = np.clip(kernels.peak, 0.0, 1.0), np.clip(kernels.bandwidth, 0.0, 1.0)
    known = kernels.tiles > 0
    waves = np.where(known, kernels.tiles / multiprocessors, _MANY_WAVES)
    more = np.log(
        np.ceil(kernels.tiles / max(multiprocessors - HELD, 1)) / np.maximum(np.ceil(kernels.tiles / multiprocessors), 1.0),
        where=known,
        out=np.zeros(len(known)),
    )
    which = [(ops == op).astype(np.float64) for op in OPS[1:]]
    return np.stack([np.log2(np.maximum(kernels.us, 1e-3)), *shares, np.log2(sizes), np.log2(waves), more, *which], axis=1)


def load(hardware: HardwareSpec, calibration: Path | None = None) -> OverlapModel | None:
    """Pairs measured on a GPU, or else on the nearest shipped one that has any; None where none has.

    Args:
        hardware: The GPU.
        calibration: A calibration folder, whose `perfmodel/overlap.parquet` replaces what ships.

    Raises:
        ValueError: the table is damaged or lacks a column.
    """
    own = None if calibration is None else calibration / "perfmodel" / FILE_NAME
    if own is not None and own.is_file():
        return OverlapModel(hardware, _read(own), hardware)
    like = hardware_module.serving(hardware, FILE_NAME)
    if like is None:
        return None
    return OverlapModel(hardware, _read(data_folder() / like / FILE_NAME), hardware_module.load(like))


def _read(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no table of pairs ({error}); measure again with: torchrun -m hil.overlap") from None
    if missing := [name for name in COLUMNS if name not in table.columns]:
        raise ValueError(f"{path} lacks the column {missing[0]}; measure again with: torchrun -m hil.overlap")
    if table.empty:
        raise ValueError(f"{path} holds no row; measure again with: torchrun -m hil.overlap")
    return table
