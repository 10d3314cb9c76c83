"""Kernels learned without a region of sizes and judged in it: how far off times are there, and how wide intervals must be.

`benchmarks/time_model.py extrapolation beyond` runs it. The intervals are the shipped model's, calibrated inside the sweeps. The
largest calls (`perfmodel.choice.are_largest`), of which few were measured, are left out of both: they would be the regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

import perfmodel
from perfmodel.calls import columns_of
from perfmodel.cells import Cells
from perfmodel.choice import Choice, are_largest
from perfmodel.hardware import HardwareSpec
from perfmodel.held_out import COVERAGE, accuracy
from perfmodel.kernels import KERNELS
from perfmodel.learn import learn_first, measured_range, predict_doubting, train
from perfmodel.parallel import each
from perfmodel.prediction import bounds_of, gap_octaves, octaves_beyond, wider

Array = npt.NDArray[np.float64]

GEMMS = ("torch/bf16", "torch/fp8_tensorwise_fast", "torch/fp8_rowwise_fast", "torch/fp8_block128", "torch/bf16_batched")
MEMORY = ("torch/quantize_rowwise", "torch/rmsnorm_forward", "torch/relu_forward", "torch/transpose_e4m3")
# By these it was not found how wide intervals are there.
OTHERS = {
    "other GEMMs": ("torch/fp8_tensorwise_split", "loka/fp8_rowwise_fast", "fbgemm/fp8_rowwise_fast"),
    "other memory-bound kernels": ("loka/quantize_tensorwise", "loka/quantize_rowwise_dual"),
}
UNSEEN_K = 1024
# Products in groups as weight gradients of towers have them: a hole is made of these.
GROUPED = ("torch/bf16_batched", "torch/fp8_grouped_rowwise_fast", "torch/fp8_grouped_rowwise_split")
LONG_K, LONGER_K, FEW_GROUPS, LEAST_SIDE = 8192, 131072, 128, 16
# Edges of the distances, in octaves, by which coverage is told.
DISTANCES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


def sizes(frame: pd.DataFrame) -> dict[str, Array]:
    """What a region is cut by."""
    m, n, k, groups = columns_of(frame)
    return {"M": m, "N": n, "K": k, "FLOPs": m * n * k * groups}


def one_octave(data: Any) -> Iterator[tuple[str, dict[str, float]]]:
    """Accuracy in the largest octave of M, N, K and FLOPs, and at one K, of each GEMM kernel.

    Args:
        data: `time_model.Data`.
    """

    def regions(frame: pd.DataFrame, largest: dict[str, float]) -> dict[str, npt.NDArray[np.bool_]]:
        found = {f"largest octave of {name}": size > largest[name] / 2 for name, size in sizes(frame).items()}
        return {**found, f"K = {UNSEEN_K}": columns_of(frame)[2] == UNSEEN_K}

    for label, rows in _extrapolated(data, [name for name, spec in KERNELS.items() if "gemm" in spec.kind], regions):
        yield label, accuracy(*(rows[name].to_numpy() for name in ("measured", "predicted")), rows[["low", "high"]].to_numpy())


def two_octaves(data: Any) -> str:
    """Coverage by how far beyond what was learned from calls are, as inside and as wide as there, and the width that it takes."""

    def regions(frame: pd.DataFrame, largest: dict[str, float]) -> dict[str, npt.NDArray[np.bool_]]:
        return {f"two octaves of {name}": sizes(frame)[name] > largest[name] / 4 for name in ("M", "N", "K")}

    families = {"GEMMs": GEMMS, "memory-bound kernels": MEMORY, **OTHERS}
    kernels = [name for names in families.values() for name in names]
    rows = pd.concat([found for _, found in _extrapolated(data, kernels, regions) if len(found)], ignore_index=True)
    rows = rows[rows["octaves"] > 0].reset_index(drop=True)
    octaves, power, (reach, error) = rows["octaves"].to_numpy(), rows["power"].to_numpy(), _off(rows)
    lines = ["", "Fitted without the two largest octaves of M, N or K, and judged there, by octaves beyond the rest"]
    head = f"{'':28s} {'octaves':>11s} {'n':>6s} {'MAPE':>6s} {'covered, as wide as inside':>27s} {'as predicted':>13s}"
    lines.append(f"{head} {'for 90%':>8s}")
    for family, names in families.items():
        mine = rows["kernel"].isin(names).to_numpy()
        for low, high in (*zip(DISTANCES, DISTANCES[1:], strict=False), (0.0, np.inf)):
            if (some := mine & (octaves > low) & (octaves <= high)).any():
                plain, wide = (reach[some] <= 1).mean(), (reach <= power)[some].mean()
                needed = np.quantile((reach[some] - 1) / octaves[some], COVERAGE)
                distance = f"{low:g} to {high:g}" if np.isfinite(high) else "all"
                shares = f"{error[some].mean():6.1%} {plain:27.1%} {wide:13.1%}"
                lines.append(f"{family:28s} {distance:>11s} {some.sum():6d} {shares} {needed:8.1f}")
    return "\n".join(lines)


def between(data: Any) -> str:
    """Coverage in a hole: products in groups learned without those of long K, by octaves from whatever they were learned from."""

    def regions(frame: pd.DataFrame, largest: dict[str, float]) -> dict[str, npt.NDArray[np.bool_]]:
        m, n, k, groups = columns_of(frame)
        return {"a hole": (k >= LONG_K) & (k <= LONGER_K) & (groups <= FEW_GROUPS) & (m >= LEAST_SIDE) & (n >= LEAST_SIDE)}

    rows = pd.concat([found for _, found in _extrapolated(data, GROUPED, regions)], ignore_index=True)
    gap, power, (reach, error) = rows["gap"].to_numpy(), rows["power"].to_numpy(), _off(rows)
    sides = f"{LONG_K:,} <= K <= {LONGER_K:,}, M and N from {LEAST_SIDE}, up to {FEW_GROUPS} groups"
    lines = ["", f"Products in groups, fitted without those of {sides}, and judged there, by octaves from the rest"]
    lines.append(
        f"{'octaves':>11s} {'n':>6s} {'MAPE':>6s} {'covered, as wide as inside':>27s} {'as predicted':>13s} {'for 90%':>8s}"
    )
    for octaves in (None, *np.unique(gap)):
        some = np.full(len(rows), True) if octaves is None else gap == octaves
        shares = f"{error[some].mean():6.1%} {(reach[some] <= 1).mean():27.1%} {(reach <= power)[some].mean():13.1%}"
        needed = "" if octaves is None else f"{np.quantile(reach[some], COVERAGE):8.1f}"
        lines.append(f"{'all' if octaves is None else f'{octaves:g}':>11s} {some.sum():6d} {shares} {needed}".rstrip())
    return "\n".join(lines)


def _off(rows: pd.DataFrame) -> tuple[Array, Array]:
    """How far off rows are, (rows,) each: over the interval that holds inside, 1 on its edge, and as a share of the time."""
    off = np.log(rows["measured"] / rows["predicted"]).to_numpy()
    ends = np.where(off > 0, np.log(rows["high"] / rows["predicted"]), np.log(rows["low"] / rows["predicted"])) / rows["power"]
    return off / ends.to_numpy(), np.abs(rows["predicted"] / rows["measured"] - 1).to_numpy()


def _extrapolated(data: Any, kernels: Sequence[str], regions: Any) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each kernel's rows in each region, learned without it, with a label."""
    jobs: list[tuple[Any, ...]] = []
    labels: list[str] = []
    entries = perfmodel.load(data.hardware.name).manifest["kernels"]
    for name in (name for name in kernels if name in data.kernels):
        rows, launches = (None if frame is None else _usual(frame, name) for frame in (data.rows, data.launches))
        launches = None if launches is None or launches.empty else launches
        largest = {of: float(size.max()) for of, size in sizes(rows).items()}
        quick = {} if launches is None else regions(launches, largest)
        for region, inside in regions(rows, largest).items():
            if not inside.any() or inside.all():
                continue
            outside = None if launches is None else launches[~quick[region]]
            jobs.append((name, rows, inside, outside, data.hardware, data.choices, entries[name]))
            labels.append(f"{name.removeprefix('torch/')}, {region}")
    return zip(labels, each(_learned_without, jobs), strict=True)


def _usual(frame: pd.DataFrame, kernel: str) -> pd.DataFrame:
    """A kernel's rows without the largest calls."""
    mine = frame[frame["kernel"] == kernel]
    return mine[~are_largest(columns_of(mine))].reset_index(drop=True)


def _learned_without(
    name: str,
    rows: pd.DataFrame,
    inside: npt.NDArray[np.bool_],
    launches: pd.DataFrame | None,
    hardware: HardwareSpec,
    choices: dict[str, Choice],
    entry: dict[str, Any],
) -> pd.DataFrame:
    """A kernel's rows inside a region, learned from those outside and from launches that lie outside, too.

    What the library chooses inside, which takes no measurement, is known.
    """
    first, known = learn_first(launches, hardware, [name], choices), rows[~inside]
    learned, measured = train(name, known, hardware, first.get(name)), measured_range(known)
    predicted, doubt = predict_doubting(learned, name, rows[inside], hardware, measured)
    calls, quick = columns_of(rows[inside]), [] if launches is None else [columns_of(launches)]
    without = {**entry, "range": measured, "cells": Cells.of(columns_of(known), *quick).save()}
    octaves, power = octaves_beyond(calls, measured), wider(name, calls, without)
    low, high = bounds_of(predicted, entry, doubt, power).T
    return pd.DataFrame({
        "kernel": name, "measured": rows["p50_us"].to_numpy()[inside], "predicted": predicted, "low": low, "high": high,
        "octaves": octaves, "power": power, "gap": gap_octaves(calls, without),
    })  # fmt: skip
