"""How good the model is on shapes that it has not seen: whole shapes held out, with the intervals that follow from it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel.hardware import HardwareSpec
from perfmodel.judge import SHAPE
from perfmodel.kernels import GEMM_KERNELS
from perfmodel.learn import Learned, predict, train
from perfmodel.model import SIZE_CLASSES_US, size_class

Array = npt.NDArray[np.float64]

FOLDS = 5
COVERAGE = 0.90
# A size class with fewer held-out rows takes its interval from all of the kernel's rows.
LEAST_ROWS = 40


def folds_of(timings: pd.DataFrame, folds: int = FOLDS, seed: int = 0) -> npt.NDArray[np.int64]:
    """Fold of each row; all kernels of one shape share theirs."""
    shape = timings.groupby(SHAPE).ngroup().to_numpy()
    return np.random.default_rng(seed).permutation(shape.max() + 1)[shape] % folds


def held_out(
    timings: pd.DataFrame, hardware: HardwareSpec, first: dict[str, Learned] | None = None, folds: Iterable[int] = range(FOLDS)
) -> Array:
    """Each row's time as predicted by trees that saw no row of its shape, in microseconds.

    Args:
        timings: Careful timings of any kernels.
        hardware: The GPU.
        first: Per kernel, what quick launches of other shapes taught, to go on from.
        folds: Which folds to judge; the rows of others are NaN.
    """
    fold = folds_of(timings)
    result = np.full(len(timings), np.nan)
    for kernel, index in timings.groupby("kernel").indices.items():
        rows = timings.iloc[index]
        for number in folds:
            test = fold[index] == number
            if test.any() and not test.all():
                learned = train(str(kernel), rows[~test], hardware, (first or {}).get(str(kernel)))
                result[index[test]] = predict(learned, str(kernel), rows[test], hardware)
        print(f"held out {kernel}: {len(rows)} rows", file=sys.stderr)
    return result


def interval_factors(measured: Array, predicted: Array) -> list[list[float]]:
    """Factors on a prediction that hold 90% of held-out measurements, per size class.

    Split-conformal: the quantile of each class's held-out ratios, with the finite-sample correction.
    """
    ratio, classes = measured / predicted, size_class(predicted)

    def bounds(values: Array) -> list[float]:
        tail = (1 - COVERAGE) / 2
        rank = min(1.0, (1 - tail) * (len(values) + 1) / len(values))
        return [float(np.quantile(values, 1 - rank)), float(np.quantile(values, rank))]

    everywhere = bounds(ratio)
    result = []
    for number in range(len(SIZE_CLASSES_US) + 1):
        chosen = ratio[classes == number]
        result.append(bounds(chosen) if len(chosen) >= LEAST_ROWS else everywhere)
    return result


def cross_intervals(timings: pd.DataFrame, predicted: Array) -> Array:
    """Ends of each row's interval, (rows, 2), from the held-out errors of the other folds' shapes alone.

    So the share of measurements inside is that of shapes that calibrated nothing. NaN where a kernel has rows in one fold only.
    """
    fold, measured = folds_of(timings), timings["p50_us"].to_numpy()
    result = np.full((len(timings), 2), np.nan)
    for index in timings.groupby("kernel").indices.values():
        for number in range(FOLDS):
            test, rest = index[fold[index] == number], index[fold[index] != number]
            if len(test) and len(rest):
                factors = np.asarray(interval_factors(measured[rest], predicted[rest]))
                result[test] = predicted[test, None] * factors[size_class(predicted[test])]
    return result


def accuracy(measured: Array, predicted: Array, bounds: Array | None = None) -> dict[str, float]:
    """MAPE, median, 90th percentile and worst absolute relative error; with `bounds` (rows, 2) the share inside them."""
    error = np.abs(predicted / measured - 1)
    result = {
        "n": len(error), "mape": float(error.mean()), "median": float(np.median(error)),
        "p90": float(np.quantile(error, 0.9)), "worst": float(error.max()),
    }  # fmt: skip
    if bounds is not None:
        result["coverage"] = float(((measured >= bounds[:, 0]) & (measured <= bounds[:, 1])).mean())
    return result


def coverage_by_class(measured: Array, predicted: Array, bounds: Array) -> list[dict[str, float]]:
    """Rows, and the share of them inside `bounds`, per size class of the predicted time; None where there are no rows."""
    inside, classes = (measured >= bounds[:, 0]) & (measured <= bounds[:, 1]), size_class(predicted)
    chosen = [inside[classes == number] for number in range(len(SIZE_CLASSES_US) + 1)]
    return [{"n": len(c), **({"coverage": float(c.mean())} if len(c) else {})} for c in chosen]


def choice_regret(timings: pd.DataFrame, predicted: Array, kernels: Iterable[str] = GEMM_KERNELS) -> dict[str, float] | None:
    """What choosing each shape's kernel among `kernels` by prediction costs against the measured best; None without a choice.

    Only shapes with at least two of them. Quantization is not part of it: `benchmarks/choice.py` includes it.
    """
    frame = timings.assign(predicted=predicted)
    frame = frame[frame["kernel"].isin(list(kernels))]
    several = frame.groupby(SHAPE)["kernel"].transform("nunique") > 1
    if not several.any():
        return None
    groups = frame[several].groupby(SHAPE)
    best, chosen = (frame.loc[groups[column].idxmin()].set_index(SHAPE)["p50_us"] for column in ("p50_us", "predicted"))
    ratio = chosen / best
    return {
        "shapes": len(ratio), "right": float((ratio == 1).mean()), "geomean": float(np.exp(np.log(ratio).mean()) - 1),
        "p90": float(ratio.quantile(0.9) - 1), "worst": float(ratio.max() - 1),
    }  # fmt: skip


def repeat_difference(everything: pd.DataFrame) -> dict[str, float] | None:
    """How far a second measurement on another machine is from the first, what no model can beat; None without one."""
    key = ["kernel", *SHAPE]
    first = everything[everything["sweep"] == "lrm"].set_index(key)["p50_us"]
    second = everything[everything["sweep"] == "repeat"].set_index(key)["p50_us"]
    both = pd.concat([first, second], axis=1, join="inner", keys=["first", "second"])
    return accuracy(both["first"].to_numpy(), both["second"].to_numpy()) if len(both) else None
