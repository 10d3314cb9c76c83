"""How good the kernel-time model is on shapes that it has not seen, per kernel and size; how far it extrapolates; and its peers.

    python benchmarks/time_model.py [accuracy] [repeat] [coverage] [learning] [sweeps] [unseen] [fresh] [extrapolation]
        [beyond] [between] [peers] [--folds N] [--kernels PATTERN ...]
    python benchmarks/time_model.py fresh sweeps --hardware h100

accuracy: cross-validation by whole shapes over the fitted sweeps of an H200. repeat: how far two runs' timings of one kernel
on one shape are apart, and half of that, which is what the best guess between them is off. coverage: whole runs left out, the
intervals from the errors of other left-out runs alone. learning: what more rows bring. sweeps: a line each of the sweeps that no
fit saw, the zoo's models, `blind` to `blind13`, `blind_memory` to `blind_memory6`, and few products of any sizes (`blind_long`,
`blind_towers`), by the shipped trees, the intervals of each as they would be without it; unseen: kernel by kernel of each; fresh:
one table of these from `blind3` and `blind_memory` on.
extrapolation: fitted without the largest octave of M, N, K and FLOPs, and without one K, and judged there. beyond: likewise
without the two largest octaves of M, N or K, and how wide intervals must be there; between: without products in groups of long K,
a hole among smaller and larger sizes. peers: each fitted on the same folds; nvMatmulHeuristics where it is installed (pip install
nvidia-matmul-heuristics). Regret is the geometric mean of the chosen kernel's measured time over the best one's: per FP8
kernel of the choice between it and bf16. All are of timings at a clock of their own (`perfmodel.steady`); repeat and unseen
say what the others come to, too. On two cores everything takes about half an hour.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import extrapolation
import numpy as np
import numpy.typing as npt
import pandas as pd
from peers import PEERS, MatmulHeuristics

import perfmodel
from loka_sim.dispatch.baselines import filter_rowwise, filter_tensorwise
from perfmodel import data_folder, fit
from perfmodel.calls import columns_of
from perfmodel.cells import EACH, FEW, WELL_KNOWN
from perfmodel.choice import DOUBT
from perfmodel.fresh import family_of, of_model
from perfmodel.held_out import (
    COVERAGE,
    FOLDS,
    LEAST_REST,
    accuracy,
    choice_regret,
    coverage_by_class,
    folds_of,
    held_out,
    leave_out_runs,
)
from perfmodel.judge import SHAPE
from perfmodel.kernels import GEMM_KERNELS, KERNELS
from perfmodel.learn import Learned, learn_first
from perfmodel.measured import read_choices
from perfmodel.prediction import SIZE_CLASSES_US, few_neighbours

Array = npt.NDArray[np.float64]

# What the sweeps that no fit saw are, where they are not shapes drawn anew.
DRAWN = "Fresh shapes or operands"
TITLES = {
    "zoo": "Whole models", "blind": "Fresh shapes, of many processes", "blind2": "Fresh shapes, of many processes",
    "blind4": "Fresh shapes of `collect --gpu`",
    "blind_long": "Few products of long K", "blind_towers": "Few products of any sizes",
}  # fmt: skip
# Kernels of which `sweeps` tells one by one, torch's.
SHOWN = {
    "bf16": "bf16", "tens fast": "fp8_tensorwise_fast", "tens split": "fp8_tensorwise_split", "row fast": "fp8_rowwise_fast",
    "row split": "fp8_rowwise_split", "block128": "fp8_block128", "batched": "bf16_batched",
}  # fmt: skip
SECTIONS = (
    "accuracy",
    "repeat",
    "coverage",
    "learning",
    "sweeps",
    "unseen",
    "fresh",
    "extrapolation",
    "beyond",
    "between",
    "peers",
)
HARDWARE = "h200"
# Fresh sweeps but for an H200's first two of GEMMs, which many workers timed. In some torch.compile's own clock chose among its
# candidates.
MANY_WORKERS = {"h200": ("blind", "blind2")}
# Those of few products of any sizes, mostly ones that 8 does not divide, of which few were fitted.
FEW_PRODUCTS = ("blind_long", "blind_towers")
OWN_CLOCK = {"h200": ("blind_memory", "blind_memory3"), "h100": ("blind_memory", "blind_memory2")}


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

        Intervals are calibrated by fresh sweeps: each sweep's are as they would be without it.
        """
        model = perfmodel.load(self.hardware.name)
        known = self.everything["sweep"].isin(list(fit.NEVER_SEEN)) & self.everything["kernel"].isin(
            list(model.manifest["kernels"])
        )
        rows = self.everything[known].reset_index(drop=True)
        predicted, bounds, asked = of_model(model, rows)
        low, high = asked.raised(predicted, bounds).T
        rows = rows.assign(predicted=predicted, low=low, high=high)
        return rows[rows["kernel"].isin(self.kernels)].reset_index(drop=True)

    def judged(self) -> tuple[pd.DataFrame, Array]:
        """Rows of the judged folds and their held-out predictions."""
        known = np.flatnonzero(np.isfinite(self.by_fold))
        return self.rows.iloc[known].reset_index(drop=True), self.by_fold[known]


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


def coverage(data: Data) -> None:
    """Share of measurements of left-out runs inside their 90% intervals, per kernel and size class."""
    rows = data.rows
    fresh = leave_out_runs(rows, data.hardware, data.first, data.by_fold)
    predicted, bounds = fresh.predicted, fresh.bounds(rows)
    groups = {name: (rows["kernel"] == name).to_numpy() for name in data.kernels}
    by_size("runs that neither the trees nor the intervals saw", groups, rows, predicted, bounds)


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


def unseen(data: Data) -> None:
    """The shipped model on sweeps that nothing was fitted to."""
    for sweep in fit.NEVER_SEEN:
        rows = data.unseen[data.unseen["sweep"] == sweep].reset_index(drop=True)
        if len(rows):
            predicted, bounds, settled = (
                rows["predicted"].to_numpy(),
                rows[["low", "high"]].to_numpy(),
                rows["settled"].to_numpy(),
            )
            title = f"{TITLES.get(sweep, DRAWN)} (sweep {sweep}): the shipped trees"
            accuracy_table(rows[settled].reset_index(drop=True), predicted[settled], bounds[settled], title)
            for whose, some in (("all", settled), ("at another's clock", ~settled), ("all, as timed", settled | ~settled)):
                if some.any():
                    print(line(whose, accuracy(rows["p50_us"].to_numpy()[some], predicted[some], bounds[some]), None))
    fresh(data, classes=True)
    in_doubt(data.unseen[data.unseen["sweep"].str.fullmatch(r"blind\d*")], perfmodel.load(HARDWARE))
    by_neighbours(data)


def fresh(data: Data, classes: bool = False) -> None:
    """The shipped model on fresh sweeps: GEMMs kernel by kernel, others library by library; by size class, too, if `classes`."""
    gpu, sweep = data.hardware.name, data.unseen["sweep"]
    rows = data.unseen[data.unseen["settled"] & (sweep != "zoo") & ~sweep.isin(MANY_WORKERS.get(gpu, ()))].reset_index(drop=True)
    predicted, bounds = rows["predicted"].to_numpy(), rows[["low", "high"]].to_numpy()
    kinds = {**dict.fromkeys(OWN_CLOCK.get(gpu, ()), "own clock"), **dict.fromkeys(FEW_PRODUCTS, "few")}
    of = rows["sweep"].map(kinds).fillna("").to_numpy()
    names = np.array([family(*pair) for pair in zip(rows["kernel"], of, strict=True)], dtype=object)
    families = {
        name: names == name for name in dict.fromkeys(family(name, kind) for name in KERNELS for kind in ("", "own clock", "few"))
    }
    families = {name: mine for name, mine in families.items() if mine.any()}
    print(f"\n{HEAD}")
    for name, mine in families.items():
        regret = fit.regret_beside_bf16(rows, predicted, name)
        print(line(name, accuracy(rows["p50_us"].to_numpy()[mine], predicted[mine], bounds[mine]), regret).rstrip())
    choices(rows, predicted)
    if classes:
        by_size("fresh sweeps", families, rows, predicted, bounds)


def sweeps(data: Data) -> None:
    """The shipped model on each of the sweeps that nothing was fitted to: GEMMs, then what is bound by memory."""
    rows = data.unseen.assign(gemm=["gemm" in KERNELS[name].kind for name in data.unseen["kernel"]])
    shown = [(name, f"torch/{kernel}") for name, kernel in SHOWN.items()]
    print(
        f"\n{'MAPE / p90, %':12s} {'times of':>12s}"
        + "".join(f"{name:>12s}" for name in ("all", *SHOWN))
        + f"{'regret':>8s}{'inside':>8s}"
    )
    for sweep in fit.NEVER_SEEN:
        timed = rows[(rows["sweep"] == sweep) & rows["gemm"]]
        mine = timed[timed["settled"]].reset_index(drop=True)
        if len(mine):
            cells = "".join(_short(mine[mine["kernel"] == kernel]) for _, kernel in shown)
            cost = choice_regret(mine, mine["predicted"].to_numpy(), fit.TORCH_GEMMS)
            regret = f"{cost['geomean']:8.2%}" if cost else f"{'':8s}"
            print(f"{sweep:12s} {len(mine):5d} {len(timed):6d}{_short(mine)}{cells}{regret}{_covered(mine):8.1%}")
    names = ("loka/quantize_*", "fbgemm/quantize_*", "torch/quantize_*", "torch, other memory-bound")
    print(f"\n{'MAPE / inside, %':16s}" + "".join(f"{name:>28s}" for name in names))
    for sweep in fit.NEVER_SEEN:
        mine = rows[(rows["sweep"] == sweep) & ~rows["gemm"]]
        if len(mine):
            of, cells = mine["kernel"].map(family_of), ""
            for name in names:
                some = mine[of == name]
                off = np.abs(some["predicted"] / some["p50_us"] - 1).mean()
                cells += f"{f'{100 * off:.1f} / {100 * _covered(some):.0f} ({len(some)})' if len(some) else '-':>28s}"
            print(f"{sweep:16s}{cells}")


def _short(rows: pd.DataFrame) -> str:
    """MAPE and 90th percentile of fresh rows' errors in percent."""
    error = 100 * np.abs(rows["predicted"] / rows["p50_us"] - 1)
    return f"{f'{error.mean():.1f} / {error.quantile(0.9):.1f}' if len(rows) else '-':>12s}"


def _covered(rows: pd.DataFrame) -> float:
    """Share of fresh rows inside their intervals."""
    return float(((rows["p50_us"] >= rows["low"]) & (rows["p50_us"] <= rows["high"])).mean())


def family(kernel: str, of: str = "") -> str:
    """What a kernel is judged with (`perfmodel.fresh.family_of`).

    Those of torch.compile that its own clock chose among its candidates, in sweeps of before, are a family of their own; so are
    few products of any sizes.

    Args:
        kernel: Which.
        of: "own clock" or "few" for a row of such a sweep.
    """
    gemm = "gemm" in KERNELS[kernel].kind
    if (of == "own clock" and kernel.startswith("torch/") and not gemm) or (of == "few" and gemm):
        return f"{family_of(kernel)} ({of})"
    return family_of(kernel)


def choices(rows: pd.DataFrame, predicted: Array) -> None:
    """What choosing among GEMM kernels costs."""
    for whose, kernels in (("torch's GEMMs", fit.TORCH_GEMMS), ("all libraries' GEMMs", GEMM_KERNELS)):
        if regret := choice_regret(rows, predicted, kernels):
            print(
                f"choice of {whose}, {regret['shapes']} shapes: right {regret['right']:.1%}, regret {regret['geomean']:.2%}, "
                f"p90 {regret['p90']:.1%}, worst {regret['worst']:.0%}"
            )


def in_doubt(rows: pd.DataFrame, model: perfmodel.PerfModel) -> None:
    """Share of settled timings inside the shipped intervals, by the doubt about the kernel that cuBLAS takes."""
    told = [name for name in rows["kernel"].unique() if model.choice(name) is not None]
    rows = rows[rows["kernel"].isin(told) & rows["settled"]].reset_index(drop=True)
    doubt = np.zeros(len(rows), dtype=np.int64)
    for name, index in rows.groupby("kernel").indices.items():
        doubt[index] = model.seen(str(name), columns_of(rows.iloc[index])).doubt
    predicted, bounds = rows["predicted"].to_numpy(), rows[["low", "high"]].to_numpy()
    powers = np.array([model.manifest["kernels"][name]["wider_in_doubt"] for name in rows["kernel"]])
    sure = predicted[:, None] * (bounds / predicted[:, None]) ** (1 / powers[np.arange(len(rows)), doubt, None])
    # As wide for all as covers as many.
    wider = np.quantile(np.maximum(*(np.log(rows["p50_us"].to_numpy() / predicted) / np.log(sure / predicted[:, None]).T)), 0.9)
    alike = predicted[:, None] * (sure / predicted[:, None]) ** wider
    print(f"\nGEMMs of {', '.join(sorted(rows['sweep'].unique()))}, settled, by the probability of the kernel that is told")
    print(f"{'':16s} {'n':>6s} {'MAPE':>6s} {'p90':>6s} {'covered':>8s} {'by one width for all':>21s}")
    edges = (1.0, *DOUBT, 0.0)
    for number, (high, low) in enumerate(zip(edges, edges[1:], strict=False)):
        mine = doubt == number
        if mine.any():
            measured = rows["p50_us"].to_numpy()[mine]
            found, even = (accuracy(measured, predicted[mine], ends[mine]) for ends in (bounds, alike))
            print(
                f"{f'{low:.0%} to {high:.0%}':16s} {found['n']:6.0f} {found['mape']:6.1%} {found['p90']:6.1%} "
                f"{found['coverage']:8.1%} {even['coverage']:21.1%}"
            )


def by_neighbours(data: Data) -> None:
    """Share of fresh timings inside by how many careful ones lie around, and if that had no say in how wide intervals are."""
    model = perfmodel.load(data.hardware.name)
    entries = model.manifest["kernels"]
    rows = data.unseen[data.unseen["sweep"] != "zoo"].reset_index(drop=True)
    kind, few = np.array([KERNELS[name].kind for name in rows["kernel"]], dtype=object), np.zeros(len(rows), dtype=np.int64)
    for name, index in rows.groupby("kernel").indices.items():
        few[index] = few_neighbours(columns_of(rows.iloc[index]), entries[str(name)])
    plain = {name: {**entry, "wider_where_few": [1.0] * (WELL_KNOWN + 1)} for name, entry in entries.items()}
    predicted, ends, asked = of_model(replace(model, manifest={**model.manifest, "kernels": plain}), rows)
    both, measured = (rows[["low", "high"]].to_numpy(), asked.raised(predicted, ends)), rows["p50_us"].to_numpy()
    print(
        "\nFresh timings by how many careful ones lie around; alike: if that had no say in intervals; +: their upper end, median"
    )
    head = "".join(f"{name:>9s}" for name in ("n", "MAPE", "covered", "alike", "+", "+ alike"))
    print(f"{'kernels':14s}{'N and K':>12s}{'around':>10s}{head}")
    edges = (0, *FEW, None)
    for of in dict.fromkeys(KERNELS[name].kind for name in KERNELS):
        for number in range(WELL_KNOWN + 1):
            mine = asked.heard & (kind == of) & (few == number)
            if mine.any():
                aligned, least = divmod(number, EACH)
                around = f"{edges[least]} to {edges[least + 1] - 1}" if edges[least + 1] else f"from {edges[least]}"
                each = [accuracy(measured[mine], predicted[mine], ends[mine]) for ends in both]
                above = [np.median(ends[mine, 1] / predicted[mine]) - 1 for ends in both]
                shares = "".join(f"{value:9.1%}" for value in (each[0]["mape"], *(one["coverage"] for one in each), *above))
                names = ("some odd", "8 divides")[aligned] if "gemm" in of else ""
                print(f"{of:14s}{names:>12s}{around:>10s}{each[0]['n']:9.0f}{shares}")


def peers(data: Data) -> None:
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
    model = perfmodel.load(HARDWARE)
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
        help="whose timings; fresh and sweeps alone are of any",
    )
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {sorted(unknown)[0]!r}; choose from {', '.join(SECTIONS)}")
    wanted = options.sections or SECTIONS
    if options.hardware != HARDWARE and not set(wanted) <= {"fresh", "sweeps"}:
        parser.error(f"--hardware {options.hardware} has the sections fresh and sweeps alone; name them")
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
    if "sweeps" in wanted:
        sweeps(data)
    if "unseen" in wanted:
        unseen(data)
    elif "fresh" in wanted:
        fresh(data)
    if "extrapolation" in wanted:
        print(f"\nFitted without a region, timings and launches alike, and judged in it\n{HEAD}")
        for label, result in extrapolation.one_octave(data):
            print(line(label, result, None), flush=True)
    if "beyond" in wanted:
        print(extrapolation.two_octaves(data))
    if "between" in wanted:
        print(extrapolation.between(data))
    if "peers" in wanted:
        peers(data)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
