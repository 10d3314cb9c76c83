"""How good the kernel-time model is on shapes that it has not seen, per kernel and size; how far it extrapolates; and its peers.

    python benchmarks/time_model.py [accuracy] [repeat] [coverage] [learning] [launches] [sweeps] [unseen] [fresh] [extrapolation]
        [beyond] [between] [peers] [--folds N] [--kernels PATTERN ...]
    python benchmarks/time_model.py fresh sweeps unseen --hardware h100

accuracy: cross-validation by whole shapes over the fitted sweeps of an H200. repeat: how far two runs' timings of one kernel
on one shape are apart, and half of that, which is what the best guess between them is off; and what choosing by a second run
of fresh shapes, on another GPU, costs beside the model's choice of them. coverage: whole runs left out, the intervals from
the errors of other left-out runs alone. learning: what more rows bring; launches: what more quick launches do. sweeps: a line
each of the sweeps that no fit saw, the zoo's models, `blind` to `blind28`, `blind_memory` to `blind_memory10`, few products of
any sizes (`blind_long`, `blind_towers`, `blind_towers2`), the largest batches' calls (`zoo_large`, `blind_large`,
`blind_large2`, `blind_large3`) and GEMMs of any sizes, drawn unlike what is fitted (`blind14`, of an H100), by the shipped
trees, the intervals of each as they would be without it; unseen: kernel by kernel of each; fresh: one table of them from
`blind3`, `blind_memory` on. extrapolation: fitted without the largest octave of M, N, K and FLOPs, and without one
K, and judged there. beyond: likewise without the two largest octaves of M, N or K, and how wide intervals must be there;
between: without products in groups of long K, a hole
among smaller and larger sizes. peers: each fitted on the same folds; nvMatmulHeuristics where it is installed (pip install
nvidia-matmul-heuristics). Regret is the geometric mean of the chosen kernel's measured time over the best one's: per FP8
kernel of the choice between it and bf16. All are of timings at a clock of their own (`perfmodel.steady`); repeat and unseen
say what the others come to, too. Choices on sweeps that no fit saw are by times told together (`perfmodel.pairs`), as
decisions are, and once more by each kernel's alone. On two cores everything takes over two hours, most of it extrapolation,
beyond and between.
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import extrapolation
import fresh_sweeps
import numpy as np
import numpy.typing as npt
import pandas as pd
import peers
from accuracy_tables import HEAD, accuracy_table, by_size, line

import perfmodel
from perfmodel import data_folder, fit
from perfmodel.fresh import of_model
from perfmodel.held_out import (
    COVERAGE,
    FOLDS,
    LEAST_REST,
    folds_of,
    held_out,
    leave_out_runs,
)
from perfmodel.judge import SHAPE
from perfmodel.kernels import GEMM_KERNELS, KERNELS
from perfmodel.learn import Learned, learn_first
from perfmodel.measured import read_choices

Array = npt.NDArray[np.float64]

SECTIONS = (
    "accuracy",
    "repeat",
    "coverage",
    "learning",
    "launches",
    "sweeps",
    "unseen",
    "fresh",
    "extrapolation",
    "beyond",
    "between",
    "peers",
)
HARDWARE = "h200"


class Data:
    """Timings, launches and cross-validated predictions, made when first asked for."""

    def __init__(self, patterns: list[str], folds: int, hardware: str = HARDWARE) -> None:
        """Read the timings of the kernels that fit a pattern; judge the first `folds` of the folds."""
        self.hardware = perfmodel.hardware.load(hardware)
        self.everything = fit.read_timings(hardware)
        rows = fit.fitted_rows(self.everything)
        wanted = [any(fnmatchcase(name, pattern) for pattern in patterns) for name in rows["kernel"]]
        self.rows = rows[wanted].reset_index(drop=True)
        self.launches = fit.read_launches(self.everything, data_folder() / hardware)
        self.choices = read_choices(data_folder() / hardware)
        self.folds = range(folds)
        self.fold = folds_of(self.rows)

    @property
    def kernels(self) -> list[str]:
        """Names, in the registry's order."""
        present = set(self.rows["kernel"])
        return [name for name in KERNELS if name in present]

    @cached_property
    def first(self) -> dict[str, Learned]:
        """What quick launches taught."""
        return learn_first(self.launches, self.hardware, self.kernels, self.choices)

    @cached_property
    def by_fold(self) -> Array:
        """Each row's time, its shape held out; NaN outside the judged folds."""
        return held_out(self.rows, self.hardware, self.first, judged=self.folds)

    @cached_property
    def unseen(self) -> pd.DataFrame:
        """Rows that no fit saw, with the shipped model's `predicted` and the ends `low` and `high` of their intervals.

        `together` are times as told where kernels of one shape are asked together, which choices go by. Intervals are calibrated
        by fresh sweeps: each sweep's are as they would be without it.
        """
        model = perfmodel.load(self.hardware.name)
        known = self.everything["sweep"].isin(list(fit.NEVER_SEEN)) & self.everything["kernel"].isin(
            list(model.manifest["kernels"])
        )
        rows = self.everything[known].reset_index(drop=True)
        predicted, bounds, asked = of_model(model, rows)
        low, high = asked.raised(predicted, bounds).T
        together = model.predict_together(rows)["time_us"].to_numpy()
        rows = rows.assign(predicted=predicted, low=low, high=high, together=together)
        return rows[rows["kernel"].isin(self.kernels)].reset_index(drop=True)

    def judged(self) -> tuple[pd.DataFrame, Array]:
        """Rows of the judged folds and their held-out predictions."""
        known = np.flatnonzero(np.isfinite(self.by_fold))
        return self.rows.iloc[known].reset_index(drop=True), self.by_fold[known]


def repeat(data: Data) -> None:
    """Timings of the same kernel on the same shape in two runs, of whatever sweeps."""
    rows = data.everything[data.everything["kernel"].isin(data.rows["kernel"].unique())]
    key = ["kernel", *SHAPE]
    pairs = rows.merge(rows, on=key, suffixes=("", "_again"))
    pairs = pairs[pairs["run"] < pairs["run_again"]]
    apart = 2 * np.tanh(np.abs(np.log(pairs["p50_us_again"] / pairs["p50_us"])) / 2)
    settled = pairs["settled"] & pairs["settled_again"]
    print("\nTwo runs' timings of one shape: difference over their mean, and the error of the best guess between them")
    print(f"{'kernel':38s} {'pairs':>6s} {'mean':>7s} {'median':>7s} {'p90':>7s} {'over 10%':>9s} {'best guess':>11s}")
    groups = [(name, settled & (pairs["kernel"] == name)) for name in KERNELS]
    gemms = pairs["kernel"].isin(GEMM_KERNELS)
    groups += [("GEMMs", gemms & settled), ("GEMMs, one at another's clock", gemms & ~settled)]
    tflop = 2e-12 * pairs[list(SHAPE)].astype(float).prod(axis=1)
    reverse = (pairs["sweep"] == "blind9") & (pairs["sweep_again"] == "again")
    for low, high in ((0.0, 0.1), (0.1, 1.0), (1.0, np.inf)):
        groups.append((f"blind9, reversed, {low:g} to {high:g} TFLOP", reverse & (tflop >= low) & (tflop < high)))
    # What torch.compile makes, by how it chose among its candidates, twice anew.
    for whose, sweep in (("its own clock", "own_clock"), ("the GPU's queue", "queued")):
        twice = (pairs["sweep"] == sweep) & (pairs["sweep_again"] == sweep)
        groups += [(f"chosen by {whose}, over {least:g} us", twice & (pairs["p50_us"] >= least)) for least in (0, 5)]
    for name, mine in groups:
        if len(d := apart[mine]):
            shares = f"{d.mean():7.1%} {d.median():7.1%} {d.quantile(0.9):7.1%} {(d > 0.1).mean():9.1%} {d.mean() / 2:11.1%}"
            print(f"{name:38s} {len(d):6d} {shares}")
    mine = pairs[(pairs["sweep"] == "own_clock") & (pairs["sweep_again"] == "queued_alone")]
    if len(ratio := (mine["p50_us_again"] / mine["p50_us"]).to_numpy()):
        mean, shorter = np.exp(np.log(ratio).mean()) - 1, (ratio < 0.9).mean()
        print(
            f"chosen by the GPU's queue, {len(ratio)} of these take {mean:+.1%} on average, {np.median(ratio) - 1:+.1%} in the "
            f"median; {shorter:.0%} over a tenth less, {(ratio > 1.1).mean():.0%} more"
        )
    fresh_sweeps.second(data)


def coverage(data: Data) -> None:
    """Share of measurements of left-out runs inside their 90% intervals, per kernel and size class."""
    rows = data.rows
    fresh = leave_out_runs(rows, data.hardware, data.first, data.by_fold)
    predicted, bounds = fresh.predicted, fresh.bounds(rows)
    groups = {name: (rows["kernel"] == name).to_numpy() for name in data.kernels}
    by_size("runs that neither the trees nor the intervals saw", groups, rows, predicted, bounds)


def learning(data: Data) -> None:
    """By how much held-out errors fall with the rows learned from: half of a kernel's, and four fifths."""
    rows, halves = data.rows, held_out(data.rows, data.hardware, data.first, folds_of(data.rows, 2))
    print("\n90th percentile of held-out errors by half and by four fifths of the rows, and the power of these that it falls by")
    powers: dict[str, list[float]] = {}
    for name in data.kernels:
        mine = (rows["kernel"] == name).to_numpy() & np.isfinite(halves) & np.isfinite(data.by_fold)
        if mine.sum() >= LEAST_REST:
            measured = rows["p50_us"].to_numpy()[mine]
            half, more = (np.quantile(np.abs(np.log(measured / p[mine])), COVERAGE) for p in (halves, data.by_fold))
            power = float(np.log(half / more) / np.log((1 - 1 / FOLDS) / (1 / 2)))
            powers.setdefault("GEMMs" if "gemm" in KERNELS[name].kind else "memory-bound kernels", []).append(power)
            print(f"{name:38s} {mine.sum():6d} {half:7.1%} {more:7.1%} {power:7.2f}")
    for kind, found in powers.items():
        print(f"{kind}: a median power of {np.median(found):.2f}")


def launches(data: Data) -> None:
    """Held-out shapes by trees that began from a part of the quick launches."""
    kernels = [name for name in data.kernels if name in data.first]
    print(f"\nBegun from a quarter, half and all of the launches: MAPE / p90 of held-out shapes, %\n{'':34s}", end="")
    print(f"{'n':>6s}{'launches':>10s}{'a quarter':>14s}{'half':>14s}{'all':>14s}")
    wanted = data.rows["kernel"].isin(kernels)
    rows = data.rows[wanted].reset_index(drop=True)
    judged = np.isin(data.fold[wanted], data.folds)
    off = []
    for share in (1 / 4, 1 / 2, 1.0):
        part = data.launches.sample(frac=share, random_state=0).sort_index()
        first = data.first if share == 1 else learn_first(part, data.hardware, kernels, data.choices)
        predicted = held_out(rows, data.hardware, first, data.fold[wanted], data.folds)
        off.append(np.abs(predicted / rows["p50_us"].to_numpy() - 1))
    for name in kernels:
        mine = judged & (rows["kernel"] == name).to_numpy()
        cells = [f"{each[mine].mean():.2%} / {np.quantile(each[mine], 0.9):.1%}" for each in off]
        count = int((data.launches["kernel"] == name).sum())
        print(f"{name:34s}{mine.sum():6d}{count:10d}" + "".join(f"{cell.replace('%', ''):>14s}" for cell in cells))


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"which of: {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--folds", type=int, default=FOLDS, choices=range(2, FOLDS + 1), help="how many folds to judge")
    parser.add_argument("--kernels", nargs="+", default=["*"], metavar="PATTERN", help="as 'torch/fp8_*' (default: all)")
    parser.add_argument(
        "--hardware",
        default=HARDWARE,
        choices=perfmodel.hardware.available(),
        help="whose timings; fresh, sweeps and unseen alone are of any",
    )
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {sorted(unknown)[0]!r}; choose from {', '.join(SECTIONS)}")
    wanted = options.sections or SECTIONS
    if options.hardware != HARDWARE and not set(wanted) <= {"fresh", "sweeps", "unseen"}:
        parser.error(f"--hardware {options.hardware} has the sections fresh, sweeps and unseen alone; name them")
    data = Data(options.kernels, options.folds, options.hardware)
    if "accuracy" in wanted:
        shapes = data.rows.groupby(SHAPE).ngroups
        title = f"Held-out shapes: {FOLDS}-fold cross-validation over {shapes} shapes, {len(data.rows)} timings"
        accuracy_table(*data.judged(), None, title)
    if "repeat" in wanted:
        repeat(data)
    if "coverage" in wanted:
        coverage(data)
    if "learning" in wanted:
        learning(data)
    if "launches" in wanted:
        launches(data)
    if "sweeps" in wanted:
        fresh_sweeps.sweeps(data)
    if "unseen" in wanted:
        fresh_sweeps.unseen(data)
    elif "fresh" in wanted:
        fresh_sweeps.fresh(data)
    if "extrapolation" in wanted:
        print(f"\nFitted without a region, timings and launches alike, and judged in it\n{HEAD}")
        for label, result in extrapolation.one_octave(data):
            print(line(label, result, None), flush=True)
    if "beyond" in wanted:
        print(extrapolation.two_octaves(data))
    if "between" in wanted:
        print(extrapolation.between(data))
    if "peers" in wanted:
        peers.compare(data)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
