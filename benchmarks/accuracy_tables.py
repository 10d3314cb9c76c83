"""Tables of how far off the time model is, which the benchmarks of it print."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel import fit
from perfmodel.held_out import accuracy, choice_regret, coverage_by_class
from perfmodel.kernels import GEMM_KERNELS, KERNELS
from perfmodel.prediction import SIZE_CLASSES_US

Array = npt.NDArray[np.float64]


def line(name: str, result: dict[str, float], regret: dict[str, float] | None) -> str:
    """A row of an accuracy table."""
    tail = f"{regret['geomean']:8.2%}" if regret else f"{'':8s}"
    cover = f"{result['coverage']:8.1%}" if "coverage" in result else f"{'':8s}"
    return (
        f"{name:38s} {result['n']:5.0f} {result['mape']:6.1%} {result['median']:7.1%} {result['p90']:6.1%} "
        f"{result['worst']:6.0%} {cover} {tail}"
    )


HEAD = f"{'kernel':38s} {'n':>5s} {'MAPE':>6s} {'median':>7s} {'p90':>6s} {'worst':>6s} {'covered':>8s} {'regret':>8s}"


def accuracy_table(rows: pd.DataFrame, predicted: Array, bounds: Array | None, title: str) -> None:
    """Per kernel, and the choice among GEMM kernels."""
    print(f"\n{title}\n{HEAD}")
    measured = rows["p50_us"].to_numpy()
    for name in (name for name in KERNELS if (rows["kernel"] == name).any()):
        mine = (rows["kernel"] == name).to_numpy()
        regret = fit.regret_beside_bf16(rows, predicted, name)
        print(line(name, accuracy(measured[mine], predicted[mine], None if bounds is None else bounds[mine]), regret))
    choices(rows, predicted)


def choices(rows: pd.DataFrame, predicted: Array, of: str = "") -> None:
    """What choosing among GEMM kernels costs, `of` some of the calls: torch's, and where others were timed all libraries'."""
    others = set(rows["kernel"]) & set(GEMM_KERNELS) - set(fit.TORCH_GEMMS)
    for whose, kernels in (("torch's", fit.TORCH_GEMMS), *([("all libraries'", GEMM_KERNELS)] if others else [])):
        if regret := choice_regret(rows, predicted, kernels):
            print(
                f"choice of {whose} GEMMs{of}, {regret['shapes']} shapes: right {regret['right']:.1%}, "
                f"regret {regret['geomean']:.2%}, p90 {regret['p90']:.1%}, worst {regret['worst']:.0%}"
            )


def by_size(what: str, groups: dict[str, npt.NDArray[np.bool_]], rows: pd.DataFrame, predicted: Array, bounds: Array) -> None:
    """Share of measurements inside their 90% intervals, per group of rows and size class."""
    edges = (0.0, *SIZE_CLASSES_US, np.inf)
    names = [
        f"{low:g}-{high:g} us" if np.isfinite(high) else f"over {low:g} us" for low, high in zip(edges, edges[1:], strict=False)
    ]
    print(f"\nShare inside the 90% interval by predicted time (rows): {what}")
    print(f"{'':38s}" + "".join(f"{name:>15s}" for name in names))
    for name, mine in {**groups, "all": np.ones(len(rows), dtype=bool)}.items():
        found = coverage_by_class(rows["p50_us"].to_numpy()[mine], predicted[mine], bounds[mine])
        cells = (f"{c['coverage']:.1%} ({c['n']:.0f})" if c["n"] >= 20 else "-" for c in found)
        print(f"{name:38s}" + "".join(f"{cell:>15s}" for cell in cells))
