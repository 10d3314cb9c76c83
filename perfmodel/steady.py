"""Times without what the clocks did to them: careful ones left out, quick launches with the drift taken out.

A GPU that has run GEMMs at the power that it may draw lowers its clock, and keeps it low for some tenths of a second: whatever
is timed then takes longer than it does by itself, in the median by 2.5%. 8,592 calls timed on one H200 in some order, and in the
reverse on the one beside it, differed by 2.2% on average, by 1.3% where both had read the full clock. The clock was low for 1%
of the shapes of less than 0.1 TFLOP that followed three of less than 0.02, for nine in ten after one of more than 0.3 at full
rate; and for 17% of those of 0.1 to 0.3 and 59% of those of 0.3 to 1 TFLOP that ran at full rate themselves. So below 0.1 TFLOP
a low clock is a neighbour's, and above it may be the GEMM's own. It is back within 0.2 s, at rest as under small GEMMs
(`python benchmarks/clock.py`): sweeps that rest (`hil.measure.FullClock`) read a low clock for 0.6% of those below 0.1 TFLOP.

A single launch runs at whatever clock the GPU has at that moment, and that wanders: what one launch takes longer than usual,
those before and after it take longer, too, whatever their shape. So the drift is read off the neighbours in the order of
measurement, and what remains of a time is its shape's. On an H200 this takes the mean error of a rowwise FP8 launch from
5.1 to 3.1%, of a bf16 one from 5.6 to 4.8%.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel.judge import SHAPE
from perfmodel.prediction import size_class

Array = npt.NDArray[np.float64]

# FLOP from which on a low clock may be a GEMM's own, and the share of a run's full clock below which one is low.
HEAVY_FLOP, FULL_CLOCK = 1e11, 0.975
# The quantile of a run's clocks that is its full one: hardly any reading is higher, and few shapes are heavy.
FULL_QUANTILE = 0.9

# Standard deviation, in shapes, of the weights of the neighbours, and how many of them on either side count.
NEIGHBOURHOOD, REACH = 4.0, 20
# A neighbour further off than this (of a logarithm) was no drift.
MOST = 0.2
# Fewer rows of a kernel and size say nothing of how it follows the drift; the drift is taken as it is.
LEAST_ROWS = 200


def settled(timings: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether each careful timing, with its `run`, is of a clock of its own, (rows,); all are where clocks were not read."""
    if "sm_mhz" not in timings:
        return np.ones(len(timings), dtype=bool)
    full = timings.groupby("run")["sm_mhz"].transform("quantile", FULL_QUANTILE)
    low = (timings["sm_mhz"] < FULL_CLOCK * full).to_numpy()
    flop = 2 * timings[SHAPE].astype(float).prod(axis=1).to_numpy()
    return ~(low & (flop < HEAVY_FLOP))


def drift(launches: pd.DataFrame, residual: Array) -> Array:
    """What the clocks did to each launch, as a logarithm of its time.

    Args:
        launches: Rows with `kernel`, the shape and `time_us`, in the order of their measurement.
        residual: log(time / expected time) of each, by a model that knows shapes alone; NaN where there is none.
    """
    known = np.isfinite(residual)
    kernel = launches["kernel"].to_numpy()
    off = pd.Series(np.where(known, residual, np.nan)).groupby(kernel)
    centred = np.clip(residual - off.transform("median").to_numpy(), -MOST, MOST)
    weight = 1 / np.maximum(pd.Series(np.abs(centred)).groupby(kernel).transform("median").to_numpy(), 1e-3) ** 2
    # A shape's own launches say how well its shape is known, not how fast the clocks were.
    sizes = launches[SHAPE].to_numpy()
    place = np.cumsum(np.r_[False, (sizes[1:] != sizes[:-1]).any(axis=1)])
    near = np.exp(-0.5 * (np.arange(-REACH, REACH + 1) / NEIGHBOURHOOD) ** 2)
    near[REACH] = 0.0

    def around(values: Array) -> Array:
        return np.convolve(np.bincount(place[known], values[known], place[-1] + 1), near, "full")[REACH:-REACH]

    found = (around(weight * centred) / np.maximum(around(weight), 1e-300))[place]
    # A kernel bound by memory follows the clock of the cores less than another.
    result, classes = found.copy(), size_class(launches["time_us"].to_numpy(dtype=float))
    for name in pd.unique(kernel):
        for number in np.unique(classes):
            mine = known & (kernel == name) & (classes == number)
            if mine.sum() >= LEAST_ROWS and (power := float(found[mine] @ found[mine])):
                result[(kernel == name) & (classes == number)] *= float(found[mine] @ centred[mine]) / power
    return result
