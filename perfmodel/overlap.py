"""How much longer kernels and collectives take that run at the same time, learned from pairs of them (`hil.overlap`).

NCCL's kernels keep multiprocessors to themselves and move bytes through the memory that others wait for. A GEMM that begins
beside one has fewer, and where its tiles made one wave they make two; a collective that is called while a long kernel holds all
of them waits for its end. So by how much either takes longer follows from how long both run, from the kernel's shares of the
GPU's peak and of its bandwidth, from the waves of its tiles, and from which collective it is: a kernel ridge regression of the
logarithms, made anew from the table of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
# Multiprocessors that a collective holds where a table has no `blocks`: NCCL 2.28's between two H200s, 16 to 256 MiB a rank.
HELD = {"all_to_all": 32, "all_gather": 24, "all_reduce": 24, "reduce_scatter": 24}
# Of the regression: how far apart pairs are alike, in standard deviations of its inputs, what of a ratio does not repeat, and how
# much a straight line counts; found, as are `WEIGHTS`, with 742 pairs of H100s and 554 of H200s held out by whole shapes.
LENGTH, NOISE, LINEAR = 4.0, 0.03, 0.05
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
class _Regression:
    """A kernel ridge regression, Gaussian and linear, of several targets at once."""

    mean: Array
    deviation: Array
    known: Array
    weights: Array
    level: Array

    @classmethod
    def of(cls, inputs: Array, y: Array) -> _Regression:
        mean, deviation, level = inputs.mean(axis=0), inputs.std(axis=0) + 1e-9, y.mean(axis=0)
        known = (inputs - mean) / deviation * WEIGHTS / LENGTH
        weights = np.linalg.solve(_alike(known, known) + NOISE * np.eye(len(known)), y - level)
        return cls(mean, deviation, known, weights, level)

    def __call__(self, inputs: Array) -> Array:
        asked = (inputs - self.mean) / self.deviation * WEIGHTS / LENGTH
        return self.level + _alike(asked, self.known) @ self.weights


def _alike(a: Array, b: Array) -> Array:
    """How alike rows of inputs are: (rows of a, rows of b)."""
    products = a @ b.T
    apart = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * products
    return np.asarray(np.exp(-np.maximum(apart, 0.0) / 2) + LINEAR * products, dtype=np.float64)


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

    def slower(self, kernels: Kernels, op: str, exchange_us: float) -> tuple[Array, Array]:
        """How many times as long kernels take beside a collective that does not pause, and it beside each of them; 1 or more.

        What is outside the measured pairs counts as the nearest of them: a longer kernel as the longest, and so on.

        Args:
            kernels: What computes.
            op: all_reduce, all_to_all, all_gather, reduce_scatter.
            exchange_us: How long it takes alone, in microseconds.

        Raises:
            ValueError: no such op.
        """
        if op not in OPS:
            raise ValueError(f"op {op!r} is no collective; give one of {', '.join(OPS)}")
        rows = len(kernels.us)
        (least_us, most_us), (least_exchange_us, most_exchange_us) = self._measured_us
        near = replace(kernels, us=np.clip(kernels.us, least_us, most_us))
        exchange = np.full(rows, float(np.clip(exchange_us, least_exchange_us, most_exchange_us)))
        inputs = _inputs(near, np.full(rows, op, dtype=object), exchange, self.hardware.multiprocessors, self._held)
        told = np.exp(np.maximum(self._fit(np.clip(inputs, *self._range)), 0.0))
        return told[:, 0], told[:, 1]

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
            told[out] = np.maximum(_Regression.of(inputs[~out], targets[~out])(inputs[out]), 0.0)
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
        ops, exchange = table["op"].to_numpy(dtype=object), table["exchange_alone_us"].to_numpy(dtype=np.float64)
        inputs = _inputs(kernels, ops, exchange, self.measured_on.multiprocessors, self._held)
        ratios = table["beside_us"] / table["alone_us"], table["exchange_beside_us"] / table["exchange_alone_us"]
        return inputs, np.log(np.stack(ratios, axis=1))

    @cached_property
    def _held(self) -> dict[str, int]:
        """Multiprocessors that each op holds."""
        if "blocks" not in self.table:
            return HELD
        seen = self.table[self.table["blocks"] > 0].groupby("op", observed=True)["blocks"].median()
        return HELD | {str(op): int(blocks) for op, blocks in seen.items()}

    @cached_property
    def _fit(self) -> _Regression:
        return _Regression.of(*self._pairs)

    @cached_property
    def _range(self) -> tuple[Array, Array]:
        inputs, _ = self._pairs
        return inputs.min(axis=0), inputs.max(axis=0)

    @property
    def _measured_us(self) -> list[tuple[float, float]]:
        """The shortest and the longest kernel, and collective."""
        return [(float(self.table[name].min()), float(self.table[name].max())) for name in ("alone_us", "exchange_alone_us")]


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


WEIGHTS = np.array([1.0, 2.0, 1.5, 1.0, 0.75, 0.75, 0.75, 2.0, 1.0, 0.75, 1.0, 1.0])
"""How much each of `_inputs` counts."""


def _inputs(
    kernels: Kernels, ops: npt.NDArray[np.object_], exchange_us: Array, multiprocessors: int, held: Mapping[str, int]
) -> Array:
    """(rows, inputs) of pairs.

    Logarithms of the kernel's time, of its waves and of its time by waves, its shares of peak and bandwidth, whether it has
    tiles, how full its waves are and how many times as many they become; the collective's time over the kernel's, and which op.
    """
    us = np.maximum(kernels.us, 1e-3)
    known = kernels.tiles > 0
    tiled = np.where(known, kernels.tiles, 1.0)
    waves = np.where(known, tiled / multiprocessors, _MANY_WAVES)
    whole = np.ceil(tiled / multiprocessors)
    left = np.maximum(multiprocessors - np.array([held[op] for op in ops]), 1)
    more = np.where(known, np.log(np.ceil(tiled / left) / whole), 0.0)
    return np.stack(
        [
            np.log2(us), np.clip(kernels.peak, 0.0, 1.0), np.clip(kernels.bandwidth, 0.0, 1.0), np.log2(waves),
            *((ops == op).astype(np.float64) for op in OPS[1:]), np.log2(exchange_us / us), more,
            np.where(known, waves / whole, 1.0), known.astype(np.float64),
            np.log2(np.maximum(us / np.where(known, whole, _MANY_WAVES), 1.0)),
        ], axis=1,
    )  # fmt: skip


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
