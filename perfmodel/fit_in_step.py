"""Fit what kernels take inside a step to those of profiled steps.

    python -m perfmodel.fit_in_step

Learned from `data/<hardware>/step_kernels.parquet` (`benchmarks/step_kernels.py`), over the times alone: of GEMMs by the model
as it ships, in the layouts of their passes (`perfmodel.fit_layouts`), of fused kernels by trees fitted to those timed alone
(`perfmodel.fit_fused`). Run it again when those are fitted anew. A curve in a few knots for each family, drawn to one
common curve and kept smooth; kernels that are far off count less. Then the trees of fused kernels are fitted once more, to those
of steps among the others, less what the curves say. How far a family's kernels of a step are off together is what it was in steps
of the kinds of models that a fit left out; the gaps between kernels are those of steps that had a GPU to themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel import fit_fused, fused
from perfmodel import load as load_kernels
from perfmodel.data_folder import data_folder
from perfmodel.hardware import HardwareSpec, available
from perfmodel.hardware import load as load_hardware
from perfmodel.in_step import (
    CLEARED_US,
    FILE,
    FUSED,
    GEMMS,
    LEAST_OF_BATCHED,
    SCHEMA_VERSION,
    SHORT_US,
    WITHOUT_CURVE,
    family,
    is_counted,
    weights,
)
from perfmodel.kernels import BF16_BATCHED, KERNELS, library_of, of_kernel

Array = npt.NDArray[np.float64]

LOG2_BYTES = np.array([15.0, 17.0, 19.0, 21.0, 23.0, 24.0, 25.0, 26.0, 27.0, 29.0])
LOG2_US = np.arange(1.0, 10.0)
# Penalties, a step's time being 1: a curve's distance from the common one, the common one's from 1, and bends of both. These, and
# how outlying kernels count, are those of eighteen tried that left the least error on kinds of models left out.
APART, FROM_ONE, BENDS = 0.012, 0.004, 0.04
OUTLYING = 0.15  # of the logarithm: kernels further off count in proportion less
ROUNDS = 8
SHARED_WEIGHT = 0.5  # of steps that ran beside other work on the machine
STEP_WEIGHT = 30.0  # of a step's kernels in the trees of fused ones, together; one timed alone counts 1
PARTS_WEIGHT = 6.0  # of sums of parts, beside: no curve has what they take in steps, and each is a small share of one
MOST_LONGER = 2.0  # than trees and curves say that know no step's
FIELDS = 256  # elements that a sum across memory over fields, or over what a user saw before, adds up at most
SMALL_US = 25.0  # batched products of which what is not their kernel is a share to be seen
LEAST_OFF, MOST_OFF = 0.03, 0.5  # of a family that one kind of model has alone nothing can be said without it
DRAWN_KINDS = 8
# What a whole step is off by, in parts of what its found kernels are: what found no partner is in none of what is learned. So
# wide, intervals held 90% of 45 steps of drawn models that nothing was learned from; `benchmarks/whole_step.py` says how wide is
# wide enough.
WHOLE = 1.6
STEP = ["model", "batch", "variant"]


def alone_us(table: pd.DataFrame, trees: Any, hardware: HardwareSpec) -> Array:
    """Times alone of a table's kernels: of products by the model as it ships, of fused kernels by trees."""
    result = np.empty(len(table))
    products = (table["kind"] == "gemm").to_numpy()
    rows = table[products][["kernel", "m", "n", "k", "groups"]].astype({name: int for name in ("m", "n", "k", "groups")})
    result[products] = _products_us(rows, hardware.name)
    result[~products] = fit_fused.predict(trees, _fused(table), hardware)
    return result


def _fused(table: pd.DataFrame) -> pd.DataFrame:
    """The fused kernels of a table as the trees take them."""
    return table[table["kind"] != "gemm"].astype({"uneven": bool})


def with_steps(rows: pd.DataFrame, table: pd.DataFrame, factor: Array, alone: Array) -> pd.DataFrame:
    """Rows to fit trees to, and fused kernels of steps as they would take alone, by the curves of their families."""
    us, families = table["us"].to_numpy(dtype=float) / factor, families_of(table)
    known = np.isin(families, (*FUSED, *WITHOUT_CURVE, "rescale"))
    # What takes that much longer is hardly the kernel that was predicted, but one of as many bytes that computes more.
    fields = ((table["kind"] == "column") & (table["reduced"] <= FIELDS)).to_numpy()  # of which none was timed alone
    mine = known & ((us < MOST_LONGER * alone) | fields)
    kernels = _fused(table[mine])
    share = (kernels["us"] * kernels["launches"] / kernels["step_us"]).to_numpy(dtype=float)
    weight = STEP_WEIGHT * share * np.where(families[mine] == "partials", PARTS_WEIGHT, 1.0)
    added = kernels[list(fused.COLUMNS)].assign(p50_us=us[mine], weight=weight)
    return pd.concat([rows, added], ignore_index=True)


def _products_us(rows: pd.DataFrame, hardware: str) -> Array:
    """Times of products as a decision among torch's GEMMs has them: all that can run a shape are asked of it together."""
    model = load_kernels(hardware)
    shapes, asked = rows[["m", "n", "k", "groups"]].drop_duplicates(), [rows]
    sizes = shapes.to_numpy().tolist()
    for name in filter(lambda name: library_of(name) == "torch", model.agreement.kernels):
        spec = KERNELS[name]
        runs = [groups == 1 and spec.illegal(m, n, k) is None for m, n, k, groups in sizes]
        asked.append(shapes[runs].assign(kernel=name))
    return model.predict_together(pd.concat(asked, ignore_index=True))["time_us"].to_numpy()[: len(rows)]


def families_of(table: pd.DataFrame) -> npt.NDArray[np.str_]:
    """Family of each kernel."""
    rows = table[["kernel", "kind", "label", "kept", "unordered_bytes"]].itertuples(index=False, name=None)
    found = np.array(
        [GEMMS[KERNELS[kernel].is_fp8] if rest[0] == "gemm" else family(*rest) for kernel, *rest in rows], dtype=object
    )
    sizes = (table[name].fillna(1) for name in ("m", "n", "k"))
    batched = (table["kernel"].map(of_kernel, na_action="ignore") == BF16_BATCHED).to_numpy()
    found[is_counted(BF16_BATCHED, *sizes) & batched] = BF16_BATCHED
    return found.astype(str)


def fit(table: pd.DataFrame, alone: Array) -> dict[str, dict[str, list[float]]]:
    """Curves per family: knots, and the factor there.

    Args:
        table: Kernels of steps.
        alone: Their times alone, in microseconds.
    """
    families = families_of(table)
    ratio = np.log(table["us"].to_numpy(dtype=float) / alone)
    share = (table["us"] * table["launches"] / table["step_us"]).to_numpy(dtype=float)
    weight = share * np.where(table["shared"].to_numpy(dtype=bool), SHARED_WEIGHT, 1.0)
    moved = np.maximum((table["read_bytes"] + table["written_bytes"]).to_numpy(dtype=float), 1.0)
    curves: dict[str, dict[str, list[float]]] = {}
    for names, knots, x in ((FUSED, LOG2_BYTES, np.log2(moved)), (GEMMS, LOG2_US, np.log2(alone))):
        mine = np.isin(families, names)
        found = _curves(names, families[mine], x[mine], ratio[mine], weight[mine], knots)
        curves |= {name: {"log2": knots.tolist(), "factor": np.exp(log).round(4).tolist()} for name, log in found.items()}
    return curves


def batched_us(table: pd.DataFrame, alone: Array) -> float:
    """What counted products take alone beyond their kernels: the median over kinds of models of smaller ones' means."""
    mine = (families_of(table) == BF16_BATCHED) & (alone < SMALL_US)
    number = table["launches"].to_numpy(dtype=float)[mine]
    apart = pd.DataFrame({"us": number * (alone - table["us"].to_numpy(dtype=float))[mine], "number": number})
    sums = apart.groupby(table["model"].map(architecture).to_numpy()[mine]).sum()
    return float((sums["us"] / sums["number"]).median()) if mine.any() else 0.0


def _curves(
    names: Sequence[str], families: npt.NDArray[np.str_], x: Array, ratio: Array, weight: Array, knots: Array
) -> dict[str, Array]:
    """Ridge regression on the shares of knots, common to all families and for each, reweighted."""
    shares = weights(x, knots)
    number = len(knots)
    design = np.hstack([shares, *(shares * (families == name)[:, None] for name in names)])
    bends = np.diff(np.eye(number), axis=0)
    penalty = np.zeros((design.shape[1], design.shape[1]))
    for block in range(len(names) + 1):
        part = slice(block * number, (block + 1) * number)
        penalty[part, part] = (APART if block else FROM_ONE) * np.eye(number) + (0.5 if block else 1.0) * BENDS * bends.T @ bends
    now = weight
    for _ in range(ROUNDS):
        weighted = design * now[:, None]
        found = np.linalg.solve(weighted.T @ design + penalty, weighted.T @ ratio)
        off = np.abs(ratio - design @ found)
        now = weight * np.minimum(1.0, OUTLYING / np.maximum(off, 1e-9))
    common = found[:number]
    return {name: common + found[(i + 1) * number : (i + 2) * number] for i, name in enumerate(names)}


def architecture(model: str) -> str:
    """Kind of a model by its name: sizes of one kind are no strangers to each other; models drawn at random are of eight."""
    drawn, _, seed = model.rpartition(":")[2].partition("_")
    if drawn == "drawn" and seed.isdigit():
        return f"{drawn} {int(seed) % DRAWN_KINDS}"
    return model.rpartition(":")[2].partition("-")[0].partition("_")[0]


def factors(curves: dict[str, dict[str, list[float]]], table: pd.DataFrame, alone: Array, less: float = 0.0) -> Array:
    """From times alone to times in a step, of each kernel of a table; `less` is what `batched_us` says."""
    families = families_of(table)
    moved = np.maximum((table["read_bytes"] + table["written_bytes"]).to_numpy(dtype=float), 1.0)
    x = np.where(np.isin(families, GEMMS), np.log2(alone), np.log2(moved))
    result = np.ones(len(table))
    for name, curve in curves.items():
        mine = families == name
        result[mine] = np.exp(np.interp(x[mine], curve["log2"], np.log(curve["factor"])))
    mine = families == BF16_BATCHED
    result[mine] = np.maximum(1 - less / alone[mine], LEAST_OF_BATCHED)
    return result


def held_out(table: pd.DataFrame, alone: Array, rows: pd.DataFrame, hardware: HardwareSpec) -> Array:
    """Times in a step by fits that left kernels of the same kind of model out.

    Args:
        table: Kernels of steps.
        alone: Their times alone, in microseconds, by trees that know of no step.
        rows: What those trees were fitted to.
        hardware: The GPU.
    """
    kinds = table["model"].map(architecture).to_numpy()
    result = np.empty(len(table))
    for kind in np.unique(kinds):
        mine = kinds == kind
        result[mine] = told_by_others(table, alone, rows, hardware, mine)
    return result


def told_by_others(
    table: pd.DataFrame, alone: Array, rows: pd.DataFrame, hardware: HardwareSpec, mine: npt.NDArray[np.bool_]
) -> Array:
    """Times in a step of some kernels by a fit that left them out; arguments as of `held_out`, and which they are."""
    others, its = table[~mine].reset_index(drop=True), alone[mine].copy()
    curves, less = fit(others, alone[~mine]), batched_us(others, alone[~mine])
    trees = fit_fused.train(with_steps(rows, others, factors(curves, others, alone[~mine], less), alone[~mine]), hardware)
    its[(table[mine]["kind"] != "gemm").to_numpy()] = fit_fused.predict(trees, _fused(table[mine]), hardware)
    return its * factors(curves, table[mine], its, less)


def off_together(table: pd.DataFrame, predicted: Array) -> dict[str, float]:
    """Per family, the half-width of a 90% interval of its total in a step, as a share.

    A model counts by the share of its time, however many of its steps there are; Student's t for so many models.
    """
    from scipy.stats import t

    sums = table.assign(
        family=families_of(table), measured=table["us"] * table["launches"], predicted=predicted * table["launches"]
    )
    totals = sums.groupby([*STEP, "family"], as_index=False)[["measured", "predicted"]].sum()
    totals = totals.merge(table.groupby(STEP, as_index=False)["step_us"].first())
    totals["share"] = totals["measured"] / totals["step_us"]
    totals["square"] = totals["share"] * np.log(totals["measured"] / totals["predicted"]) ** 2
    by_model = totals.groupby(["family", "model"])[["share", "square"]].mean()
    result = {}
    for name, models in by_model.groupby("family"):
        quantile = float(t.ppf(0.95, max(len(models) - 1, 1)))
        share = quantile * float(models["square"].sum() / models["share"].sum()) ** 0.5
        result[str(name)] = round(min(max(share, LEAST_OFF), MOST_OFF), 4)
    return result


def calibrated(table: pd.DataFrame, predicted: Array, off: dict[str, float]) -> dict[str, float]:
    """The same, all by one factor, so that 90% of the steps' totals lie inside (conformal: of so many steps and one more).

    Then by `WHOLE`.

    A family's share alone is too wide for the whole: where one family was predicted too long, another was too short.

    Args:
        table: Kernels of steps.
        predicted: Their times by fits that left the same kind of model out.
        off: Per family.
    """
    families = pd.Series(families_of(table), index=table.index)
    sums = table.assign(
        family=families, measured=table["us"] * table["launches"], predicted=predicted * table["launches"],
        off=predicted * table["launches"] * families.map(off),
    )  # fmt: skip
    totals = sums.groupby([*STEP, "family"])[["measured", "predicted", "off"]].sum()
    totals["off"] **= 2
    steps = totals.groupby(STEP).sum()
    outside = np.sort((steps["measured"] - steps["predicted"]).abs() / np.sqrt(steps["off"]))
    factor = float(outside[min(math.ceil(0.9 * (len(outside) + 1)), len(outside)) - 1])
    return {name: round(WHOLE * factor * share, 4) for name, share in off.items()}


def gaps_us(table: pd.DataFrame) -> tuple[float, float]:
    """Between two kernels of a CUDA graph of `SHORT_US` or longer, and beside that around each batched product.

    Of steps that had a GPU to themselves: those that leave the least error, as a share of the steps, in the sum of all.
    """
    from scipy.optimize import linprog

    columns = ["step_us", "graph_us", "step_launches", "step_batched"]
    steps = table[~table["shared"].astype(bool)].groupby(STEP)[columns].first().dropna()
    # Kernels that found no partner are as long as the others.
    whole = (table["launches"] * np.minimum(table["us"] / SHORT_US, 1.0)).groupby([table[name] for name in STEP]).sum()
    share = (whole / table.groupby(STEP)["launches"].sum()).reindex(steps.index)
    counts = np.column_stack([share * steps["step_launches"], steps["step_batched"]]) / steps[["graph_us"]].to_numpy()
    wanted = ((steps["graph_us"] - steps["step_us"]) / steps["graph_us"]).to_numpy()
    # The least sum of absolute errors, each the sum of what is above and what is below.
    errors = np.eye(len(steps))
    found = linprog(
        np.r_[np.zeros(2), np.ones(2 * len(steps))], A_eq=np.hstack([counts, errors, -errors]), b_eq=wanted, method="highs"
    )
    kernel, batched = found.x[:2].round(3).tolist()
    return kernel, batched


def main() -> int:
    """Fit, judge, write."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.fit_in_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", default="h200", choices=available())
    options = parser.parse_args()
    folder = data_folder() / options.hardware
    spec = load_hardware(options.hardware)
    table, rows = pd.read_parquet(folder / "step_kernels.parquet"), fit_fused.read_rows(folder)
    alone = alone_us(table, fit_fused.train(rows, spec), spec)
    predicted = held_out(table, alone, rows, spec)
    gap_us, batched_gap_us = gaps_us(table)
    curves, less = fit(table, alone), batched_us(table, alone)
    document = {
        "schema_version": SCHEMA_VERSION,
        "hardware": options.hardware,
        "command": f"python -m perfmodel.fit_in_step --hardware {options.hardware}",
        "kernels": len(table),
        "steps": int(table.groupby(STEP).ngroups),
        "curves": curves,
        "gap_us": gap_us,
        "batched_gap_us": batched_gap_us,
        "batched_less_us": round(less - CLEARED_US, 3),
        "off": calibrated(table, predicted, off_together(table, predicted)),
    }
    taught = with_steps(rows, table, factors(curves, table, alone, less), alone)
    fit_fused.save(fit_fused.train(taught, spec), folder / "models")
    (folder / "models" / FILE).write_text(json.dumps(document, indent=1) + "\n")
    for name, curve in document["curves"].items():
        line = " ".join(f"{factor:.2f}" for factor in curve["factor"])
        print(f"{name:18s} off together {document['off'].get(name, float('nan')):5.1%}  {line}")
    print(f"gap {gap_us} us behind kernels of {SHORT_US} us and longer, of a batched product {batched_gap_us} us more")
    print(f"a batched product is {document['batched_less_us']} us shorter than alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
