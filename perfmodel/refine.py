"""Refine the time model from what one machine measured, with intervals that say how good that is.

    python -m perfmodel.refine CALIBRATION

makes a calibration's refinement anew from the measurements in it, where the time model that ships has changed since.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel.calls import columns_of
from perfmodel.correction import Array, Local, choose_local, fit_local, fit_machine
from perfmodel.judge import SHAPE, accuracy_of
from perfmodel.kernels import KERNELS
from perfmodel.model import PerfModel
from perfmodel.prediction import SIZE_CLASSES_US, size_class
from perfmodel.refinement import LEAST_ROWS, NEW, NORMAL_90, Correction, Refinement, apply, inputs, interval, read, with_base
from perfmodel.saved import load

FOLDS = 5
COVERAGE = 0.90
# A kernel that the base has no trees for needs this many measured shapes.
LEAST_ROWS_NEW = 60
LEAST_ROWS_LOCAL = 8
# How many measured shapes the base's own interval outweighs.
PRIOR_SHAPES = 40
# At 200 equal steps of probability.
_NORMAL = np.array([NormalDist().inv_cdf((step + 0.5) / 200) for step in range(200)])
# How far a second measurement of a shape is off (90th percentile) where the base does not know.
REPEAT_P90 = 0.05
# How sure held-out shapes must make it that a part of a correction helps: each of some twenty kernels is asked.
SURE = 0.99
# How much gains vary is not known from fewer shapes, where they are not normally distributed; and they are not.
LEAST_SHAPES = 5
METHODS = ("none", "machine", "local")


def _prepare(base: PerfModel, rows: pd.DataFrame) -> pd.DataFrame:
    """One row per kernel and shape, with what the base predicts; rows of kind `linear` have no model and are left out."""
    missing = {"kernel", "m", "n", "k", "p50_us"} - set(rows.columns)
    if missing:
        raise ValueError(f"the measured rows lack the columns {sorted(missing)}; refine needs kernel, m, n, k, p50_us")
    rows = rows.assign(**dict(zip(SHAPE, columns_of(rows), strict=True)))
    unknown = sorted(set(rows["kernel"].astype(str)) - set(KERNELS))
    if unknown:
        raise ValueError(f"kernel {unknown[0]!r} is not a kernel; known: {', '.join(KERNELS)}")
    rows = rows[[KERNELS[name].kind != "linear" for name in rows["kernel"]]]
    times = rows["p50_us"].to_numpy(dtype=float)
    if not len(rows) or not (np.isfinite(times) & (times > 0)).all():
        raise ValueError("p50_us must be positive and finite in every measured row, and there must be a row")
    if not np.isfinite(rows[SHAPE].to_numpy()).all() or (rows[SHAPE].to_numpy() < 1).any():
        raise ValueError("m, n, k and groups must be at least 1 in every measured row")
    for name in ("p10_us", "p90_us"):
        rows = rows.assign(**{name: rows[name] if name in rows else rows["p50_us"]})
    columns = ["p10_us", "p50_us", "p90_us"]
    rows = rows.assign(kernel=rows["kernel"].astype(str)).groupby(["kernel", *SHAPE], as_index=False)[columns].median()
    for kernel, number in rows["kernel"].value_counts().items():
        if not base.knows(str(kernel)) and number < LEAST_ROWS_NEW:
            raise ValueError(
                f"{kernel} is new to the time model of {base.hardware.name} and has {number} measured shapes; "
                f"measure at least {LEAST_ROWS_NEW}, or leave its rows out"
            )
    return with_base(base, rows).assign(target=lambda frame: np.log(frame["p50_us"] / frame["base_us"]))


def _features(rows: pd.DataFrame, base: PerfModel) -> tuple[Array, Array]:
    features, at = np.empty((len(rows), 4)), np.empty((len(rows), 7))
    for kernel, index in rows.groupby("kernel").indices.items():
        part = rows.iloc[index]
        features[index], at[index] = inputs(str(kernel), part["base_us"].to_numpy(), columns_of(part), base)
    return features, at


def shape_folds(rows: pd.DataFrame, seed: int = 0) -> np.ndarray:
    """Fold of each row; all kernels of a shape share theirs."""
    shape = rows.groupby(SHAPE).ngroup().to_numpy()
    return np.random.default_rng(seed).permutation(shape.max() + 1)[shape] % FOLDS


def _parts(
    rows: pd.DataFrame, features: Array, at: Array, parameters: dict[str, tuple[float, float, float]] | None
) -> tuple[dict[str, tuple[Array, Array]], dict[str, Local]]:
    """Machine part per kernel (and per group, for its kernels without rows), and local parts where rows suffice."""
    machine: dict[str, tuple[Array, Array]] = {}
    local: dict[str, Local] = {}
    names, target = rows["kernel"].to_numpy(dtype=object), rows["target"].to_numpy()
    for group, index in rows.groupby("group").indices.items():
        # Kernels err alike on a shape: rows of the same shape are no independent witnesses.
        per_shape = len(index) / rows.iloc[index].groupby(SHAPE).ngroups
        fitted = fit_machine(names[index], features[index], target[index], per_shape)
        machine[str(group)] = fitted.pop("")
        machine |= fitted
    for kernel, index in rows.groupby("kernel").indices.items():
        if len(index) >= LEAST_ROWS_LOCAL:
            left = target[index] - features[index] @ machine[str(kernel)][0]
            chosen = parameters[str(kernel)] if parameters else choose_local(at[index], left)
            local[str(kernel)] = fit_local(at[index], left, chosen)
    return machine, local


def least_needed(errors: Array, shape: npt.NDArray[np.integer]) -> int:
    """Index of the fewest parts that no more of them surely beat (`SURE`, Student's t), every shape one witness.

    Args:
        errors: Held-out errors with none of the parts, with the first, with two, ..., (rows, methods); NaN where not judged.
        shape: Which rows are of one shape, (rows,).
    """
    from scipy.special import stdtrit

    known = np.isfinite(errors).all(axis=1)
    judged = pd.DataFrame(errors[known]).groupby(shape[known]).mean().to_numpy()
    chosen = 0
    for more in range(1, errors.shape[1]):
        gain = judged[:, chosen] - judged[:, more] if len(judged) else np.zeros(0)
        if len(gain) >= LEAST_SHAPES and gain.mean() > stdtrit(len(gain) - 1, SURE) * gain.std(ddof=1) / np.sqrt(len(gain)):
            chosen = more
    return chosen


def _fit(base: PerfModel, rows: pd.DataFrame, seed: int) -> dict[str, Correction]:
    """Corrections per kernel and group; how many parts each has is chosen by cross-validation inside `rows`."""
    features, at = _features(rows, base)
    machine, local = _parts(rows, features, at, None)
    parameters = {kernel: (part.length, part.amplitude, part.noise) for kernel, part in local.items()}
    names, target = rows["kernel"].to_numpy(dtype=object), rows["target"].to_numpy()
    errors = np.full((len(rows), len(METHODS)), np.nan)
    fold, shape = shape_folds(rows, seed), rows.groupby(SHAPE).ngroup().to_numpy()
    for number in range(FOLDS):
        train, test = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        if not len(train) or not len(test):
            continue
        coefficients, processes = _parts(rows.iloc[train], features[train], at[train], parameters)
        for name in set(names[test]):
            some = test[names[test] == name]
            group = str(rows["group"].iloc[some[0]])
            known = coefficients.get(name, coefficients.get(group))
            value = features[some] @ known[0] if known else np.zeros(len(some))
            more = processes[name].predict(at[some])[0] if name in processes else 0.0
            predictions = np.stack([np.zeros(len(some)), value, value + more], axis=1)
            errors[some] = np.abs(predictions - target[some, None])
    result: dict[str, Correction] = {}
    by_group = rows.groupby("group").indices
    for key, index in rows.groupby("kernel").indices.items():
        kernel = str(key)
        group = str(rows["group"].iloc[index[0]])
        judged = index if len(index) >= LEAST_ROWS else by_group[group]
        method = METHODS[least_needed(errors[judged], shape[judged])]
        if method == "local" and kernel not in local:
            method = "machine"
        unknown = not base.knows(kernel)
        left = target[index] - features[index] @ machine[kernel][0]
        spread = float(np.sqrt(np.mean(left**2))) if unknown else 0.0
        process = local[kernel] if method == "local" else None
        result[kernel] = Correction(method, *machine[kernel], process, spread)
    for name, index in by_group.items():
        # One kernel says little about another: a kind's part is for the others only where two or more agree on it.
        several = rows["kernel"].iloc[index].nunique() > 1
        method = "machine" if several and least_needed(errors[index, :2], shape[index]) else "none"
        result[str(name)] = Correction(method, *machine[str(name)])
    return result


def interval_bounds(
    score: Array, shapes: int, expected: tuple[float, float] = (-NORMAL_90, NORMAL_90), least: float = NORMAL_90
) -> tuple[float, float]:
    """Bounds on (log measured - log predicted) / scale that hold 90%; they always include 0.

    Quantiles of the held-out scores together with what was expected of them, two half normals with those bounds: the
    latter weigh as much as `PRIOR_SHAPES` shapes, so that a few shapes do not widen much what many calibrated.

    They are never narrower than the base's own: those hold for shapes of every kind, and a model's shapes are alike; where
    they err less than usual, it is that they are easy ones, and the next model's are not. What is narrower near measured
    shapes is the scale.

    Args:
        score: Held-out scores, (rows,).
        shapes: Distinct shapes among them: kernels err alike on a shape, so that rows count together as this many.
        expected: Bounds of 90% before any score was seen; the base's own by default.
        least: How far from 0 either bound is at least; 0 for a kernel that the base does not know.
    """
    prior = np.where(_NORMAL < 0, -expected[0], expected[1]) / NORMAL_90 * _NORMAL
    values = np.concatenate([prior, score])
    weights = np.repeat([PRIOR_SHAPES / len(prior), shapes / max(len(score), 1)], [len(prior), len(score)])
    order = np.argsort(values)
    rank = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    tail = (1 - COVERAGE) / 2
    low, high = np.interp([tail, 1 - tail], rank, values[order])
    return min(float(low), -least), max(float(high), least)


def _bounds(rows: pd.DataFrame, score: Array, predicted_us: Array) -> dict[str, list[tuple[float, float]]]:
    """Bounds per kernel and group, one pair per size class: each expects what is wider around it, from class to group."""
    classes, groups, names = size_class(predicted_us), rows["group"].to_numpy(), rows["kernel"].to_numpy()
    shape = rows.groupby(SHAPE).ngroup().to_numpy()

    def bounds(pool: np.ndarray, expected: tuple[float, float], least: float) -> tuple[float, float]:
        return interval_bounds(score[pool], len(np.unique(shape[pool])), expected, least)

    def by_class(pool: np.ndarray, whole: tuple[float, float], least: float) -> list[tuple[float, float]]:
        return [bounds(pool & (classes == number), whole, least) for number in range(len(SIZE_CLASSES_US) + 1)]

    usual = (-NORMAL_90, NORMAL_90)
    everything = bounds(np.ones(len(rows), dtype=bool), usual, NORMAL_90)
    result = {"": [everything] * (len(SIZE_CLASSES_US) + 1)}
    for group in np.unique(groups):
        # Nothing of another kind: GEMMs that are more regular than expected say nothing of quantizers.
        least = 0.0 if str(group).startswith(NEW) else NORMAL_90
        of_group = bounds(groups == group, usual, least)
        result[str(group)] = by_class(groups == group, of_group, least)
        for name in np.unique(names[groups == group]):
            result[str(name)] = by_class(names == name, bounds(names == name, of_group, least), least)
    return result


def refine(base: PerfModel, rows: pd.DataFrame, seed: int = 0) -> Refinement:
    """Correct a time model by what one machine measured in one run.

    Everything, the choice of parts included, is cross-validated by whole shapes: those residuals make the accuracy and
    the intervals.

    Args:
        base: The time model to correct.
        rows: Columns kernel, m, n, k, p50_us; groups (default 1), p10_us and p90_us where known. Others are ignored, and
            so are rows of kernels of kind `linear`.
        seed: Seeds the folds.

    Raises:
        ValueError: a column is missing, a value is impossible, or a kernel new to the base has fewer than
            `LEAST_ROWS_NEW` shapes.
    """
    prepared = _prepare(base, rows)
    fold = shape_folds(prepared, seed)
    value, scale = np.zeros(len(prepared)), prepared["scale"].to_numpy().copy()
    for number in range(FOLDS):
        test = fold == number
        if test.any() and not test.all():
            value[test], scale[test] = apply(_fit(base, prepared[~test], seed + 1), base, prepared[test])
    corrections = _fit(base, prepared, seed + 1)
    base_us, measured = prepared["base_us"].to_numpy(), prepared["p50_us"].to_numpy()
    time = base_us * np.exp(value)
    error, skew = np.log(measured / time), prepared["skew"].to_numpy()
    score = error / np.maximum(scale * np.where(error < 0, 1 - skew, 1 + skew), 1e-6)
    bounds = _bounds(prepared, score, time)
    # Coverage is judged with bounds that the judged fold had no part in.
    low, high = time.copy(), time.copy()
    for number in range(FOLDS):
        test = fold == number
        if test.any() and not test.all():
            others = _bounds(prepared[~test], score[~test], time[~test])
            for kernel, index in prepared.groupby("kernel").indices.items():
                some = index[test[index]]
                chosen = others.get(str(kernel)) or others.get(str(prepared["group"].iloc[index[0]])) or others[""]
                low[some], high[some] = interval(time[some], scale[some], skew[some], chosen)
    known = np.array([base.knows(name) for name in prepared["kernel"]], dtype=bool)
    before = prepared[known]
    repeat = float((base.manifest.get("repeat_on_another_machine") or {}).get("p90") or REPEAT_P90)
    return Refinement(
        base, prepared[["kernel", *SHAPE, "p10_us", "p50_us", "p90_us"]].reset_index(drop=True), corrections, bounds, repeat,
        accuracy_of(before, *(before[name].to_numpy() for name in ("base_us", "low_us", "high_us"))),
        accuracy_of(prepared, time, low, high), pd.DataFrame({"time_us": time, "low_us": low, "high_us": high}),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.refine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("calibration", type=Path, help="folder that loka-sim validate or collect wrote")
    folder = parser.parse_args(arguments).calibration
    try:
        document, _, rows = read(folder)
        refinement = refine(load(document["hardware"]), rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    refinement.save(folder)
    for name, after in refinement.accuracy_after["kinds"].items():
        print(f"{name}: {after['n']} rows, {after['mape']:.1%} off on shapes held out, {after['coverage']:.0%} in 90% intervals")
    return 0


if __name__ == "__main__":
    sys.exit(main())
