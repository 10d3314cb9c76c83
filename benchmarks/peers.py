"""What else predicts a GEMM's time, for `benchmarks/time_model.py`: each fitted on the same rows as our model is."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

import perfmodel
from loka_sim.dispatch.baselines import filter_rowwise, filter_tensorwise
from perfmodel.calls import columns_of
from perfmodel.hardware import HardwareSpec
from perfmodel.held_out import accuracy, choice_regret
from perfmodel.judge import SHAPE
from perfmodel.kernels import GEMM_KERNELS, KERNELS
from perfmodel.roofline import roofline_us

if TYPE_CHECKING:
    from time_model import Data

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


def compare(data: Data) -> None:
    """Others on the same held-out shapes."""
    rows, ours = data.judged()
    rows = rows.assign(ours=ours)
    rows = rows[rows["kernel"].isin(GEMM_KERNELS) & (rows["kernel"].str.startswith("torch/"))].reset_index(drop=True)
    fold = rows.merge(data.rows.assign(fold=data.fold)[[*SHAPE, "fold"]].drop_duplicates(SHAPE), on=SHAPE, how="left")["fold"]
    measured = rows["p50_us"].to_numpy()
    predictions = {"loka-sim": rows["ours"].to_numpy()}
    for peer, make in PEERS.items():
        predictions[peer] = np.full(len(rows), np.nan)
        for name in rows["kernel"].unique():
            everything = data.rows[data.rows["kernel"] == name]
            for number in data.folds:
                test = ((rows["kernel"] == name) & (fold == number)).to_numpy()
                known = everything[data.fold[everything.index] != number]
                predictions[peer][test] = make(str(name), known, rows[test], data.hardware)
    try:
        heuristics = MatmulHeuristics()
        predictions["nvMatmulHeuristics"] = np.full(len(rows), np.nan)
        for name in rows["kernel"].unique():
            mine = (rows["kernel"] == name).to_numpy()
            predictions["nvMatmulHeuristics"][mine] = heuristics(str(name), rows[mine])
    except ModuleNotFoundError as absent:
        print(absent, file=sys.stderr)
    print("\nPeers on the same held-out shapes of torch's GEMMs; regret of the choice among them, without and with quantization")
    print(f"{'':28s} {'n':>6s} {'MAPE':>7s} {'median':>7s} {'p90':>7s} {'worst':>7s} {'regret':>8s} {'quantized':>10s}")
    model = perfmodel.load(data.hardware.name)
    added = quantization(rows, model)
    for peer, predicted in predictions.items():
        known = np.isfinite(predicted)
        result = accuracy(measured[known], predicted[known])
        regrets = [regret_of(rows[known], predicted[known], extra[known]) for extra in (np.zeros(len(rows)), added)]
        shown = f"{regrets[0]:8.2%} {regrets[1]:10.2%}"
        print(
            f"{peer:28s} {result['n']:6.0f} {result['mape']:7.1%} {result['median']:7.1%} {result['p90']:7.1%} "
            f"{result['worst']:7.0%} {shown}"
        )
    for name, wants in (("tensorwise", filter_tensorwise), ("rowwise", filter_rowwise)):
        kernel = f"torch/fp8_{name}_fast"
        chosen = [
            (row.kernel == kernel) if wants(int(row.n), int(row.k)) else (row.kernel == "torch/bf16") for row in rows.itertuples()
        ]
        score = np.where(chosen, 0.0, 1.0)
        both = rows["kernel"].isin(["torch/bf16", kernel]).to_numpy()
        regrets = [
            regret_of(rows[both], score[both], extra[both], chosen_by_score=True) for extra in (np.zeros(len(rows)), added)
        ]
        print(f"torchao's filter, {name:11s} {'':38s} {regrets[0]:8.2%} {regrets[1]:10.2%}")


def quantization(rows: pd.DataFrame, model: perfmodel.PerfModel) -> Array:
    """Time of quantizing both operands of each FP8 row, as the shipped model has it (its own accuracy: `accuracy`)."""
    extra = np.zeros(len(rows))
    for name, index in rows.groupby("kernel").indices.items():
        spec = KERNELS[str(name)]
        for recipe, size in ((spec.recipe_a, "m"), (spec.recipe_b, "n")):
            if spec.is_fp8 and recipe is not None:
                part = rows.iloc[index]
                quantizer = f"torch/quantize_{recipe.partition('/')[2]}"
                calls = pd.DataFrame({"kernel": quantizer, "m": part[size], "n": 1, "k": part["k"]})
                extra[index] += model.predict(calls)["time_us"].to_numpy()
    return extra


def regret_of(rows: pd.DataFrame, predicted: Array, extra: Array, chosen_by_score: bool = False) -> float:
    """Regret of choosing by `predicted` (plus `extra`, unless it is a score) when each row costs its time plus `extra`."""
    frame = rows.assign(p50_us=rows["p50_us"] + extra)
    result = choice_regret(frame, predicted if chosen_by_score else predicted + extra)
    return result["geomean"] if result else float("nan")
