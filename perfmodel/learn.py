"""Trees for one kernel's time: first from many quick launches where there are some, then from careful timings.

A library chooses among a thousand kernels by rules that it does not publish, and each choice is a jump in the time. Single
profiled launches of tens of thousands of shapes (`hil.launches`) show where the jumps are, though each is some 6% off; what
the careful timings add on top is small and smooth, and their few thousand shapes suffice for it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel.features import features
from perfmodel.hardware import HardwareSpec
from perfmodel.model import baseline_us, columns_of

Array = npt.NDArray[np.float64]

PARAMETERS: dict[str, Any] = {
    "max_depth": 6, "eta": 0.05, "subsample": 0.8, "colsample_bytree": 1.0, "colsample_bynode": 0.5, "min_child_weight": 2.0,
    "objective": "reg:squarederror", "nthread": min(os.cpu_count() or 1, 16), "seed": 0,
}  # fmt: skip
ROUNDS = 500
# Of the trees that quick launches grow.
FIRST_PARAMETERS = {**PARAMETERS, "max_depth": 8, "eta": 0.06}
FIRST_ROUNDS = 600
# Of those on top of them.
NEXT_PARAMETERS = {**PARAMETERS, "eta": 0.03}
# Fewer quick launches of a kernel teach nothing.
LEAST_LAUNCHES = 2000


def _data(kernel: str, rows: pd.DataFrame, time_us: Array, hardware: HardwareSpec) -> Any:
    import xgboost

    sizes = columns_of(rows)
    names, matrix = features(kernel, *sizes, hardware)
    return xgboost.DMatrix(matrix, np.log(time_us / baseline_us(kernel, *sizes, hardware)), feature_names=names)


def first_trees(kernel: str, launches: pd.DataFrame | None, hardware: HardwareSpec) -> Any | None:
    """Trees of one kernel's quick launches, to grow those of careful timings on; None where there are too few.

    Args:
        kernel: Which kernel.
        launches: Rows with `kernel`, `m`, `n`, `k`, `groups`, `time_us`, of any kernels; None for none.
        hardware: The GPU.
    """
    import xgboost

    mine = None if launches is None else launches[launches["kernel"] == kernel]
    if mine is None or len(mine) < LEAST_LAUNCHES:
        return None
    return xgboost.train(FIRST_PARAMETERS, _data(kernel, mine, mine["time_us"].to_numpy(float), hardware), FIRST_ROUNDS)


def train(kernel: str, rows: pd.DataFrame, hardware: HardwareSpec, first: Any | None = None) -> Any:
    """Trees for one kernel, fitted to log(time / baseline).

    Args:
        kernel: Which kernel.
        rows: Its careful timings, `p50_us`.
        hardware: The GPU.
        first: What `first_trees` made of other shapes.
    """
    import xgboost

    parameters = PARAMETERS if first is None else NEXT_PARAMETERS
    return xgboost.train(parameters, _data(kernel, rows, rows["p50_us"].to_numpy(), hardware), ROUNDS, xgb_model=first)


def predict(booster: Any, kernel: str, rows: pd.DataFrame, hardware: HardwareSpec) -> Array:
    """Times in microseconds of one kernel's rows."""
    sizes = columns_of(rows)
    _, matrix = features(kernel, *sizes, hardware)
    return baseline_us(kernel, *sizes, hardware) * np.exp(booster.inplace_predict(matrix).astype(np.float64))
