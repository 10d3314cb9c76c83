"""What else predicts a GEMM's time, for `benchmarks/time_model.py`: each fitted on the same rows as our model is."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel.calls import columns_of
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import KERNELS
from perfmodel.roofline import roofline_us

Array = npt.NDArray[np.float64]

# nvMatmulHeuristics' letters for bf16 and e4m3 operands with FP32 sums and bf16 results.
_PRECISIONS = {False: "TST", True: "QST"}


def _sizes(rows: pd.DataFrame) -> Array:
    return np.log2(np.stack(columns_of(rows), axis=1))


def roofline(kernel: str, train: pd.DataFrame, test: pd.DataFrame, hardware: HardwareSpec) -> Array:
    """The larger of compute and memory time at the measured ceilings."""
    return roofline_us(kernel, *columns_of(test), hardware)


def plain_xgboost(kernel: str, train: pd.DataFrame, test: pd.DataFrame, hardware: HardwareSpec) -> Array:
    """Plain xgboost on the logarithms of m, n, k and groups alone; its usual settings but for 500 rounds at a rate of 0.05."""
    import xgboost

    settings = {"eta": 0.05, "seed": 0, "nthread": 2}
    booster = xgboost.train(settings, xgboost.DMatrix(_sizes(train), np.log(train["p50_us"].to_numpy())), 500)
    return np.exp(booster.inplace_predict(_sizes(test)).astype(np.float64))


def hist_gradient_boosting(kernel: str, train: pd.DataFrame, test: pd.DataFrame, hardware: HardwareSpec) -> Array:
    """scikit-learn's HistGradientBoostingRegressor on the same four numbers, 500 rounds at a rate of 0.05."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(max_iter=500, learning_rate=0.05, random_state=0)
    return np.exp(model.fit(_sizes(train), np.log(train["p50_us"].to_numpy())).predict(_sizes(test)))


def nearest_neighbours(kernel: str, train: pd.DataFrame, test: pd.DataFrame, hardware: HardwareSpec) -> Array:
    """The time per roofline of the four nearest shapes in log size, weighed by inverse distance, times the roofline."""
    from sklearn.neighbors import KNeighborsRegressor

    ratio = np.log(train["p50_us"].to_numpy() / roofline_us(kernel, *columns_of(train), hardware))
    model = KNeighborsRegressor(n_neighbors=min(4, len(train)), weights="distance").fit(_sizes(train), ratio)
    return roofline_us(kernel, *columns_of(test), hardware) * np.exp(model.predict(_sizes(test)))


PEERS = {
    "roofline": roofline, "plain XGBoost": plain_xgboost, "HistGradientBoosting": hist_gradient_boosting,
    "nearest neighbours": nearest_neighbours,
}  # fmt: skip


class MatmulHeuristics:
    """NVIDIA's nvMatmulHeuristics: the runtime that it estimates for the configuration that it recommends on an H200."""

    def __init__(self) -> None:
        """Set it up for CUTLASS 3 kernels.

        Raises:
            ModuleNotFoundError: it is not installed (`pip install nvidia-matmul-heuristics`).
        """
        if importlib.util.find_spec("nvMatmulHeuristics") is None:
            raise ModuleNotFoundError("nvMatmulHeuristics is not installed; pip install nvidia-matmul-heuristics")
        import nvMatmulHeuristics as library  # type: ignore[import-not-found]

        self._library: Any = library
        self._interface = library.NvMatmulHeuristicsInterfaceEx(
            backend=library.NvMatmulHeuristicsTarget.CUTLASS3,
            flags=library.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
            gpu=library.NvMatmulHeuristicsNvidiaGpu.H200_SXM,
        )

    def __call__(self, kernel: str, test: pd.DataFrame) -> Array:
        """Estimated times in microseconds of a GEMM kernel's rows; NaN where it recommends nothing."""
        layout = self._library.NvMatmulHeuristicsMatmulLayout.TN_ROW_MAJOR
        precision = _PRECISIONS[KERNELS[kernel].is_fp8]
        times = np.full(len(test), np.nan)
        for index, (m, n, k, groups) in enumerate(zip(*columns_of(test), strict=True)):
            problem = self._interface.makeNvMatmulHeuristicsProblem(int(m), int(n), int(k), layout, int(groups))
            if found := self._interface.get(problem, 1, precision):
                times[index] = 1e6 * found[0]["runtime"]
        return times
