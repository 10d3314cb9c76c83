"""Kernels learned without a region of sizes and judged in it: how far off times are there, and how wide intervals must be.

`benchmarks/time_model.py extrapolation beyond` runs it. The intervals are the shipped model's, calibrated inside the sweeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

import perfmodel
from perfmodel.calls import columns_of
from perfmodel.choice import Choice
from perfmodel.hardware import HardwareSpec
from perfmodel.held_out import COVERAGE, accuracy
from perfmodel.learn import learn_first, measured_range, predict_doubting, train
from perfmodel.parallel import each
from perfmodel.prediction import bounds_of, octaves_beyond, wider_beyond

Array = npt.NDArray[np.float64]

KERNELS = ("torch/bf16", "torch/fp8_tensorwise_fast", "torch/fp8_rowwise_fast", "torch/fp8_block128", "torch/bf16_batched")
UNSEEN_K = 1024
# Edges of the distances, in octaves, by which coverage is told.
DISTANCES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


def sizes(frame: pd.DataFrame) -> dict[str, Array]:
    """What a region is cut by."""
    m, n, k, groups = columns_of(frame)
    return {"M": m, "N": n, "K": k, "FLOPs": m * n * k * groups}


def one_octave(data: Any) -> Iterator[tuple[str, dict[str, float]]]:
    """Accuracy in the largest octave of M, N, K and FLOPs, and at one K, by kernel.

    Args:
        data: `time_model.Data`.
    """

    def regions(frame: pd.DataFrame, largest: dict[str, float]) -> dict[str, npt.NDArray[np.bool_]]:
        found = {f"largest octave of {name}": size > largest[name] / 2 for name, size in sizes(frame).items()}
        return {**found, f"K = {UNSEEN_K}": columns_of(frame)[2] == UNSEEN_K}

    for label, rows in _extrapolated(data, regions):
        yield label, accuracy(*(rows[name].to_numpy() for name in ("measured", "predicted")), rows[["low", "high"]].to_numpy())


def two_octaves(data: Any) -> str:
    """Coverage by how far beyond what was learned from calls are, as inside and as wide as there, and the width that it takes."""

    def regions(frame: pd.DataFrame, largest: dict[str, float]) -> dict[str, npt.NDArray[np.bool_]]:
        return {f"two octaves of {name}": sizes(frame)[name] > largest[name] / 4 for name in ("M", "N", "K")}

    rows = pd.concat([found for _, found in _extrapolated(data, regions)], ignore_index=True)
    off, power = np.log(rows["measured"] / rows["predicted"]), wider_beyond(rows["octaves"].to_numpy())
    ends = np.where(off > 0, np.log(rows["high"] / rows["predicted"]), np.log(rows["low"] / rows["predicted"])) / power
    # 1 on the edge of the interval that holds inside.
    reach = (off / ends).to_numpy()
    octaves, error = rows["octaves"].to_numpy(), np.abs(rows["predicted"] / rows["measured"] - 1)
    lines = ["", "Fitted without the two largest octaves of M, N or K, and judged there, by octaves beyond the rest"]
    lines.append(f"{'octaves':>14s} {'n':>6s} {'MAPE':>6s} {'covered, as inside':>19s} {'as wide as predicted':>21s}")
    for low, high in zip(DISTANCES, DISTANCES[1:], strict=False):
        if (mine := (octaves > low) & (octaves <= high)).any():
            plain, wide = (reach[mine] <= 1).mean(), (reach <= power)[mine].mean()
            lines.append(f"{f'{low:g} to {high:g}':>14s} {mine.sum():6d} {error[mine].mean():6.1%} {plain:19.1%} {wide:21.1%}")
    for name in ("all", *KERNELS):
        mine = (octaves > 0) & ((rows["kernel"] == name).to_numpy() | (name == "all"))
        if mine.any():
            needed = np.quantile((reach[mine] - 1) / octaves[mine], COVERAGE)
            lines.append(
                f"{name}: {(reach <= power)[mine].mean():.1%} of {mine.sum()} covered; {needed:.1f} an octave would cover 90%"
            )
    return "\n".join(lines)


def _extrapolated(data: Any, regions: Any) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each kernel's rows in each region, learned without it, with a label."""
    jobs: list[tuple[Any, ...]] = []
    labels: list[str] = []
    entries = perfmodel.load(data.hardware.name).manifest["kernels"]
    for name in (name for name in KERNELS if name in data.kernels):
        rows = data.rows[data.rows["kernel"] == name].reset_index(drop=True)
        launches = None if data.launches is None else data.launches[data.launches["kernel"] == name]
        largest = {of: float(size.max()) for of, size in sizes(rows).items()}
        quick = {} if launches is None else regions(launches, largest)
        for region, inside in regions(rows, largest).items():
            outside = None if launches is None else launches[~quick[region]]
            jobs.append((name, rows, inside, outside, data.hardware, data.choices, entries[name]))
            labels.append(f"{name.removeprefix('torch/')}, {region}")
    return zip(labels, each(_learned_without, jobs), strict=True)


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
    octaves = octaves_beyond(columns_of(rows[inside]), measured)
    low, high = bounds_of(predicted, entry, doubt, octaves).T
    return pd.DataFrame({
        "kernel": name, "measured": rows["p50_us"].to_numpy()[inside], "predicted": predicted, "low": low, "high": high,
        "octaves": octaves,
    })  # fmt: skip
