"""How good the model is on what it has not seen, whole shapes or whole runs held out, and the intervals that follow from it.

Shapes drawn for one sweep are each other's neighbours, and one GPU measured them in one go: a fold of them is easier to
predict than a sweep to come. So accuracy is that of folds of shapes inside the sweeps, and the intervals, which must hold for
the next sweep and another GPU, are calibrated on runs that were left out whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel.calls import columns_of
from perfmodel.cells import ALIGNMENTS, EACH, WELL_KNOWN, Cells
from perfmodel.choice import DOUBT, asked
from perfmodel.hardware import HardwareSpec
from perfmodel.judge import SHAPE
from perfmodel.kernels import GEMM_KERNELS, KERNELS
from perfmodel.learn import Learned, predict, train
from perfmodel.parallel import each
from perfmodel.prediction import SIZE_CLASSES_US, size_class
from perfmodel.transfer import Start, begin

Array = npt.NDArray[np.float64]

FOLDS = 5
COVERAGE = 0.90
# A size class with fewer held-out rows takes its interval from all of the kernel's rows.
LEAST_ROWS = 40
# Rows of other folds from which a kernel is learned, for its fold to be judged: fewer where it is known from another GPU.
LEAST_LEARNED, LEAST_LEARNED_ON = 40, 20
# What is usual for a size class counts as this many rows of it. GEMMs on H200s, calibrated on a single run and judged on another
# of a like draw: coverage of a kernel and class 88.4%, 7.0 points off 90 (root mean square of 355); without it 86.1%, 11.6 off.
ALIKE_ROWS = 200
# A kernel's runs of fewer rows are left out together.
LEAST_RUN = 100
# A left-out run says how the next will be predicted only where so many rows of other runs remain to learn from, and at least
# this share of all: trees without most of what is known say what few know.
LEAST_REST, LEAST_SHARE = 300, 0.5
# How much wider, as a power, an interval is for a run left out whole than for shapes held out of known runs, where no kernel's
# timings tell: the median over torch's kernels on H200s.
WIDER = 1.06


def folds_of(timings: pd.DataFrame, folds: int = FOLDS, seed: int = 0) -> npt.NDArray[np.int64]:
    """Fold of each row; all kernels of one shape share theirs."""
    shape = timings.groupby(SHAPE).ngroup().to_numpy()
    return np.random.default_rng(seed).permutation(shape.max() + 1)[shape] % folds


def runs_of(timings: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Run of each row, numbered per kernel from 0; those of fewer than `LEAST_RUN` rows of the kernel count as one."""
    number = timings.groupby(["kernel", "run"])["run"].transform("size").to_numpy()
    run = pd.Series(np.where(number < LEAST_RUN, -1, timings["run"].to_numpy()), index=timings.index)
    return run.groupby(timings["kernel"]).rank("dense").to_numpy().astype(np.int64) - 1


def held_out(
    timings: pd.DataFrame,
    hardware: HardwareSpec,
    first: Mapping[str, Learned | Start] | None = None,
    part: npt.NDArray[np.int64] | None = None,
    judged: Iterable[int] | None = None,
) -> Array:
    """Each row's time as predicted by trees that saw no row of its part nor of its shape, in microseconds.

    Args:
        timings: Careful timings of any kernels.
        hardware: The GPU.
        first: Per kernel, what quick launches of other shapes taught, or another GPU, to go on from.
        part: What is held out together: `folds_of` (the default) or `runs_of`.
        judged: Which parts to judge; all by default.

    Returns:
        (rows,); NaN in parts that are not judged, and where a kernel has no other part to learn from.
    """
    part = folds_of(timings) if part is None else part
    judged = list(range(part.max() + 1)) if judged is None else list(judged)
    shape = timings.groupby(SHAPE).ngroup().to_numpy()
    result = np.full(len(timings), np.nan)
    indices = {str(kernel): index for kernel, index in timings.groupby("kernel").indices.items()}
    jobs = [
        (kernel, timings.iloc[index], shape[index], part[index], judged, hardware, (first or {}).get(kernel))
        for kernel, index in indices.items()
    ]
    for (kernel, index), predicted in zip(indices.items(), each(_held_out, jobs), strict=True):
        result[index] = predicted
        print(f"held out {kernel}: {len(index)} rows", file=sys.stderr)
    return result


def _held_out(
    kernel: str,
    rows: pd.DataFrame,
    shape: npt.NDArray[np.int64],
    part: npt.NDArray[np.int64],
    judged: Iterable[int],
    hardware: HardwareSpec,
    first: Learned | Start | None,
) -> Array:
    """`held_out` of one kernel, whose rows have these shapes' numbers and parts."""
    result = np.full(len(rows), np.nan)
    least = LEAST_LEARNED_ON if isinstance(first, Start) else LEAST_LEARNED
    for number in judged:
        test = part == number
        known = ~test & ~np.isin(shape, shape[test])
        if test.any() and known.sum() >= least:
            learned = train(kernel, rows[known], hardware, begin(first, rows[test]))
            result[test] = predict(learned, kernel, rows[test], hardware)
    return result


def interval_factors(measured: Array, predicted: Array, profile: Array | None = None) -> list[list[float]]:
    """Factors on a prediction that hold 90% of held-out measurements, per size class.

    Split-conformal: the quantile of each class's held-out ratios, with the finite-sample correction. One run's rows of a class
    are alike, and say less of the next run than their number: a class counts beside `ALIKE_ROWS` rows that err as all of the
    kernel's do, by as much more or less as is usual for the class.

    Args:
        measured: Times, (rows,).
        predicted: Likewise, by trees that did not see the row.
        profile: `class_profile` of other kernels; None where there are none.
    """
    ratio, classes = np.log(measured / predicted), size_class(predicted)
    everywhere = _ends(ratio)
    result = []
    for number in range(len(SIZE_CLASSES_US) + 1):
        own = ratio[classes == number]
        ends = everywhere if profile is None else everywhere * profile[number]
        if len(own) >= LEAST_ROWS:
            beside = 0 if profile is None else ALIKE_ROWS
            ends = (len(own) * _ends(own) + beside * ends) / (len(own) + beside)
        result.append([float(end) for end in np.exp(ends)])
    return result


def class_profile(kernels: Iterable[tuple[Array, Array]]) -> Array:
    """By how much the intervals of a size class are usually wider than a kernel's are over all sizes, (classes, 2).

    Args:
        kernels: Of each kernel its measured and predicted times.
    """
    wider: list[list[Array]] = [[] for _ in range(len(SIZE_CLASSES_US) + 1)]
    for measured, predicted in kernels:
        ratio, classes = np.log(measured / predicted), size_class(predicted)
        for number, found in enumerate(wider):
            if (classes == number).sum() >= LEAST_ROWS:
                found.append(np.abs(_ends(ratio[classes == number])) / np.maximum(np.abs(_ends(ratio)), 1e-3))
    return np.array([np.median(found, axis=0) if found else np.ones(2) for found in wider])


def _ends(ratio: Array) -> Array:
    """Ends of the interval that holds the next of such ratios with a probability of 90%, (2,)."""
    tail = (1 - COVERAGE) / 2
    rank = min(1.0, (1 - tail) * (len(ratio) + 1) / len(ratio))
    return np.quantile(ratio, [1 - rank, rank])


@dataclass(frozen=True)
class Unseen:
    """Every row predicted as one of a run to come: what the intervals are calibrated on.

    Attributes:
        predicted: Times by trees that saw nothing of the row's part, (rows,).
        part: What was left out with the row, (rows,): its run, or where too little remained without that its fold of shapes,
            a number below 0.
        wider: By how much further off, as a power, the row would be with its run left out whole, (rows,): above 1 where a fold
            stands in for it.
        doubt: Of what the library chooses, by class (`doubts_of`), (rows,); None for none.
        wider_in_doubt: The power of each class.
        around: Likewise for how little is known around each row, (rows,).
    """

    predicted: Array
    part: npt.NDArray[np.int64]
    wider: Array | float = 1.0
    doubt: npt.NDArray[np.int64] | None = None
    wider_in_doubt: tuple[float, ...] = (1.0,)
    around: Array | float = 1.0

    @property
    def _power(self) -> Array | float:
        """By how much each row's interval is wider, for the doubt and for what is known around, and narrower for a fold."""
        return self.around * (1.0 if self.doubt is None else np.asarray(self.wider_in_doubt)[self.doubt]) / self.wider

    def factors(self, timings: pd.DataFrame, kernel: str, rows: Any, without: Any = ()) -> list[list[float]]:
        """Interval factors of a kernel per size class of calls without doubt, known around, from those rows that `rows` names.

        The profile of its size classes is that of the other kernels of its kind, without the runs that `without` numbers.
        """
        # As far off as each row would be without doubt and with much known around it, of a run left out whole.
        measured = self.predicted * (timings["p50_us"].to_numpy() / self.predicted) ** (1 / self._power)
        kind = KERNELS[kernel].kind
        known = np.isfinite(self.predicted) & ~np.isin(timings["run"].to_numpy(), without)
        others = [
            (measured[i], self.predicted[i])
            for name, index in timings.groupby("kernel").indices.items()
            if name != kernel and KERNELS[str(name)].kind == kind and len(i := np.asarray(index)[known[index]]) >= LEAST_ROWS
        ]
        return interval_factors(measured[rows], self.predicted[rows], class_profile(others) if others else None)

    def bounds(self, timings: pd.DataFrame) -> Array:
        """Ends of each row's interval, (rows, 2), from the errors of other parts alone; NaN where there are none.

        So the share of measurements inside is that of runs that neither trees nor intervals saw.
        """
        result, power = np.full((len(timings), 2), np.nan), np.broadcast_to(self._power, len(timings))
        for kernel, rows in timings.groupby("kernel").indices.items():
            index = np.asarray(rows)[np.isfinite(self.predicted[rows])]
            for number in np.unique(self.part[index]):
                test, rest = index[self.part[index] == number], index[self.part[index] != number]
                if len(rest):
                    factors = np.asarray(self.factors(timings, str(kernel), rest, timings["run"].iloc[test].unique()))
                    factors = factors[size_class(self.predicted[test])] ** power[test, None]
                    result[test] = self.predicted[test, None] * factors
        return result


def leave_out_runs(
    timings: pd.DataFrame, hardware: HardwareSpec, first: Mapping[str, Learned | Start] | None, by_fold: Array
) -> Unseen:
    """Predict every run by trees that did not see it.

    Args:
        timings: Careful timings with their `run`.
        hardware: The GPU.
        first: As of `held_out`.
        by_fold: Times as predicted by folds of shapes, for kernels of which too little remains without one of their runs.
    """
    part, predicted, measured, run = -1 - folds_of(timings), by_fold.copy(), timings["p50_us"].to_numpy(), runs_of(timings)
    kernel = timings["kernel"].to_numpy()
    own, every = (timings.groupby(by)["kernel"].transform("size").to_numpy() for by in ([kernel, run], [kernel]))
    whole = every - own >= np.maximum(LEAST_REST, LEAST_SHARE * every)
    ratios: dict[str, list[float]] = {}
    if whole.any():
        some = np.isin(kernel, np.unique(kernel[whole]))
        predicted[some] = held_out(timings[some], hardware, first, np.where(whole, run, -1)[some])
        part, predicted = np.where(whole, run, part), np.where(whole, predicted, by_fold)
    for name in np.unique(kernel[whole]):
        both = whole & (kernel == name) & np.isfinite(by_fold) & np.isfinite(predicted)
        widths = [np.quantile(np.abs(np.log(measured / p))[both], COVERAGE) for p in (predicted, by_fold)]
        ratios.setdefault(_family(str(name)), []).append(float(widths[0] / widths[1]))
    usual = {family: max(1.0, float(np.median(found))) for family, found in ratios.items()}
    said = ", ".join(f"{power:.2f} ({family}, {len(ratios[family])} kernels)" for family, power in usual.items()) or "unknown"
    print(f"runs left out whole: intervals wider by a power of {said}", file=sys.stderr)
    wider = np.where(whole, 1.0, np.array([usual.get(_family(name), WIDER) for name in kernel]))
    doubt = doubts_of(timings, hardware, first or {})
    in_doubt = wider_in_doubt(timings["kernel"].to_numpy(), np.abs(np.log(measured / predicted)), doubt)
    print(f"in doubt of the kernel chosen: wider by a power of {', '.join(f'{w:.2f}' for w in in_doubt)}", file=sys.stderr)
    return Unseen(predicted, part, wider, doubt, in_doubt)


def _family(kernel: str) -> str:
    """Kernels whose runs differ alike: GEMMs of any kind, quantizers, others."""
    return "GEMMs" if "gemm" in KERNELS[kernel].kind else KERNELS[kernel].kind


def doubts_of(timings: pd.DataFrame, hardware: HardwareSpec, first: Mapping[str, Learned | Start]) -> npt.NDArray[np.int64]:
    """Of each row, how much in doubt is what the library chooses, by class (`perfmodel.choice.DOUBT`), (rows,)."""
    result = np.zeros(len(timings), dtype=np.int64)
    for kernel, index in timings.groupby("kernel").indices.items():
        known = first.get(str(kernel))
        if known is not None and known.choice is not None:
            sizes = columns_of(timings.iloc[index])
            result[index] = known.choice.told(asked(str(kernel), *sizes, hardware))[1]
    return result


def wider_in_doubt(kernels: npt.NDArray[Any], off: Array, doubt: npt.NDArray[np.int64]) -> tuple[float, ...]:
    """By how much, as a power, intervals of each class of doubt are wider than those of calls without; never less in more doubt.

    The 90th percentile of how far off a class's rows are, over that of their kernel's rows without doubt.

    Args:
        kernels: Names, (rows,).
        off: Absolute logarithms of measured over predicted times, NaN where there is no prediction.
        doubt: Classes.
    """
    share = np.full(len(off), np.nan)
    for kernel in np.unique(kernels):
        mine = (kernels == kernel) & np.isfinite(off)
        if (sure := mine & (doubt == 0)).sum() >= LEAST_ROWS:
            share[mine] = off[mine] / np.quantile(off[sure], COVERAGE)
    found = [1.0]
    for number in range(1, len(DOUBT) + 1):
        rows = share[(doubt == number) & np.isfinite(share)]
        wider = float(np.quantile(rows, COVERAGE)) if len(rows) >= LEAST_ROWS else 1.0
        found.append(max(wider, found[-1]))
    return tuple(found)


def wider_where_few(kernels: npt.NDArray[Any], off: Array, few: npt.NDArray[np.int64]) -> dict[str, tuple[float, ...]]:
    """By how much, as a power, intervals of each class of neighbours are wider than those of calls with many, by kind of kernel.

    The 90th percentile of how far off a class's rows are, over that of their kernel's rows that are well aligned and have many,
    or of those that are not aligned where that is what it has. Never less for fewer neighbours.

    Args:
        kernels: Names, (rows,).
        off: Absolute logarithms of measured over predicted times, of shapes held out fold by fold, over the power by which doubt
            about the kernel chosen makes their intervals wider; NaN where there is no prediction.
        few: Classes, as of `Cells.few`.
    """
    share: dict[str, list[tuple[Array, npt.NDArray[np.int64]]]] = {}
    for kernel in np.unique(kernels):
        mine = (kernels == kernel) & np.isfinite(off)
        many = next((found for number in (WELL_KNOWN, EACH - 1) if (found := mine & (few == number)).sum() >= LEAST_ROWS), None)
        if many is not None:
            share.setdefault(KERNELS[str(kernel)].kind, []).append((off[mine] / np.quantile(off[many], COVERAGE), few[mine]))
    result = {}
    for kind, parts in share.items():
        rows, classes = (np.concatenate(part) for part in zip(*parts, strict=True))
        some = [rows[classes == number] for number in range(WELL_KNOWN + 1)]
        found = [float(np.quantile(own, COVERAGE)) if len(own) >= LEAST_ROWS else 1.0 for own in some]
        more = np.maximum(found, 1.0).reshape(ALIGNMENTS, EACH)
        more[-1, -1] = 1.0
        result[kind] = tuple(float(power) for power in np.maximum.accumulate(more[:, ::-1], axis=1)[:, ::-1].ravel())
    return result


def known_around(
    fresh: Unseen, timings: pd.DataFrame, by_fold: Array, cells: Mapping[str, Cells]
) -> tuple[Unseen, dict[str, tuple[float, ...]]]:
    """What intervals are calibrated on, with how little is known around each row; and the powers for that, by kind of kernel.

    Args:
        fresh: Of `leave_out_runs`.
        timings: Careful timings.
        by_fold: Their times, shapes held out fold by fold, (rows,).
        cells: By kernel, where something was measured: of these rows, and of whatever else.
    """
    few, kernel = np.zeros(len(timings), dtype=np.int64), timings["kernel"].to_numpy()
    for name, index in timings.groupby("kernel").indices.items():
        few[index] = cells[str(name)].few(columns_of(timings.iloc[index]))
    off = np.abs(np.log(timings["p50_us"].to_numpy() / by_fold))
    in_doubt = 1.0 if fresh.doubt is None else np.asarray(fresh.wider_in_doubt)[fresh.doubt]
    powers = wider_where_few(kernel, off / in_doubt, few)
    for kind, found in powers.items():
        print(f"little known around {kind}: wider by a power of {', '.join(f'{power:.2f}' for power in found)}", file=sys.stderr)
    around = [powers[kind][c] if (kind := KERNELS[name].kind) in powers else 1.0 for name, c in zip(kernel, few, strict=True)]
    return replace(fresh, around=np.array(around)), powers


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
    """Rows, and the share of them inside `bounds`, per size class of the predicted time; no share where there are no rows."""
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
    first, second = (everything[everything["sweep"] == sweep].groupby(key)["p50_us"].mean() for sweep in ("lrm", "repeat"))
    both = pd.concat([first, second], axis=1, join="inner", keys=["first", "second"])
    return accuracy(both["first"].to_numpy(), both["second"].to_numpy()) if len(both) else None
