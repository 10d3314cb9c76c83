"""How one kernel's time is learned: first from many quick launches where there are some, then from careful timings.

A library chooses among a thousand kernels by rules that it does not publish, and each choice is a jump in the time. Single
profiled launches of tens of thousands of shapes (`hil.launches`) show where the jumps are, though each is some 6% off: a
small network takes what is smooth about them, trees on top of it the jumps. What the careful timings add is small, and
their few thousand shapes suffice for more trees to learn it.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel import network
from perfmodel.features import features
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import KERNELS
from perfmodel.model import baseline_us, columns_of, with_network
from perfmodel.network import Network

Array = npt.NDArray[np.float64]

PARAMETERS: dict[str, Any] = {
    "max_depth": 6, "eta": 0.05, "subsample": 0.8, "colsample_bytree": 1.0, "colsample_bynode": 0.5, "min_child_weight": 2.0,
    "objective": "reg:squarederror", "nthread": min(os.cpu_count() or 1, 16), "seed": 0,
}  # fmt: skip
ROUNDS = 500
# Memory-bound kernels: what torch.compile tunes is now and then a kernel three times as slow, which the median leaves aside.
MEMORY_PARAMETERS = {**PARAMETERS, "objective": "reg:absoluteerror", "max_depth": 4}
# Of the trees that quick launches grow.
FIRST_PARAMETERS = {**PARAMETERS, "max_depth": 8, "eta": 0.08}
FIRST_ROUNDS = 250
# Of those on top of them.
NEXT_PARAMETERS = {**PARAMETERS, "objective": "reg:absoluteerror", "eta": 0.06}
NEXT_ROUNDS = 400
# Fewer quick launches of a kernel teach nothing.
LEAST_LAUNCHES = 2000


class Learned(NamedTuple):
    """What predicts log(time / baseline) of one kernel: the network's value, if there is one, plus the trees'."""

    network: Network | None
    booster: Any


def _data(kernel: str, rows: pd.DataFrame, time_us: Array, hardware: HardwareSpec, net: Network | None) -> Any:
    import xgboost

    sizes = columns_of(rows)
    names, matrix = features(kernel, *sizes, hardware)
    names, matrix, smooth = with_network(names, matrix, net)
    target = np.log(time_us / baseline_us(kernel, *sizes, hardware)) - smooth
    return xgboost.DMatrix(matrix, target, feature_names=names)


def learn_first(kernel: str, launches: pd.DataFrame | None, hardware: HardwareSpec) -> Learned | None:
    """What one kernel's quick launches teach, for `train` to go on from; None where there are too few.

    Args:
        kernel: Which kernel.
        launches: Rows with `kernel`, `m`, `n`, `k`, `groups`, `time_us`, of any kernels; None for none.
        hardware: The GPU.
    """
    import xgboost

    mine = None if launches is None else launches[launches["kernel"] == kernel]
    if mine is None or len(mine) < LEAST_LAUNCHES:
        return None
    sizes, time = columns_of(mine), mine["time_us"].to_numpy(dtype=float)
    _, matrix = features(kernel, *sizes, hardware)
    net = network.train(matrix, np.log(time / baseline_us(kernel, *sizes, hardware)))
    return Learned(net, xgboost.train(FIRST_PARAMETERS, _data(kernel, mine, time, hardware, net), FIRST_ROUNDS))


def train(kernel: str, rows: pd.DataFrame, hardware: HardwareSpec, first: Learned | None = None) -> Learned:
    """Learn one kernel from careful timings.

    Args:
        kernel: Which kernel.
        rows: Its careful timings, `p50_us`.
        hardware: The GPU.
        first: What `learn_first` learned from other shapes.
    """
    import xgboost

    net, start = first or (None, None)
    alone = PARAMETERS if "gemm" in KERNELS[kernel].kind else MEMORY_PARAMETERS
    parameters = alone if first is None else NEXT_PARAMETERS
    data = _data(kernel, rows, rows["p50_us"].to_numpy(dtype=float), hardware, net)
    return Learned(net, xgboost.train(parameters, data, ROUNDS if first is None else NEXT_ROUNDS, xgb_model=start))


def predict(learned: Learned, kernel: str, rows: pd.DataFrame, hardware: HardwareSpec) -> Array:
    """Times in microseconds of one kernel's rows."""
    sizes = columns_of(rows)
    _, matrix, smooth = with_network(*features(kernel, *sizes, hardware), learned.network)
    ratio = smooth + learned.booster.inplace_predict(matrix).astype(np.float64)
    return baseline_us(kernel, *sizes, hardware) * np.exp(ratio)
