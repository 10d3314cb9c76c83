"""Fit the kernel-time model on measured timings and judge it on shapes that it has not seen.

    python -m perfmodel.fit --hardware h200
    python -m perfmodel.fit --hardware h100 --start h200
    python -m perfmodel.fit --hardware h200 --memory
    python -m perfmodel.fit --hardware h200 --pairs
    python -m perfmodel.fit --hardware h200 --intervals
    python -m perfmodel.fit --timings DIR --hardware-spec FILE --start h200 --out CALIBRATION

`--memory` fits memory-bound kernels alone, in minutes, as when timings of such were added: GEMMs' trees and pairs, which no other
kernel's timings change, stay. `--pairs` learns what pairs of kernels differ by (`perfmodel/pairs.py`) anew, which every fit does
at its end, and leaves the kernels as they are. `--intervals` makes intervals as wide as fresh sweeps ask (`perfmodel/fresh.py`),
as when there is one more, and judges these anew; trees, and what left-out runs said, stay. The last fits a user's own sweep: DIR
holds `gemm.parquet`, `memory.parquet` or both as `hil.collect` writes them, FILE is a specification as `data/h200/hardware.json`,
and `perfmodel.load(name, calibration=CALIBRATION)` reads the result. With `--start` a kernel is learned from where a shipped
GPU's model of it ends (`perfmodel/transfer.py`), by far fewer timings.

Where `launches.parquet` (`hil.launches`) lies beside the timings, each GEMM kernel is learned from its quick launches first:
`perfmodel/learn.py` says why. Where `choices` (`hil.choices`) lies there, too, its kernels are told what the library chooses.

Accuracy comes from two sources. Cross-validation holds out whole shapes, every kernel's row of a shape together; what
calibrates the intervals holds out whole runs (`perfmodel.held_out`). The sweep `zoo` holds the shapes of whole models, those
called `blind` shapes drawn anew, most as the fitted ones were, each first looked at after a fit (`NEVER_SEEN`): none is fitted
to, nor is any swept row of a shape that they have, so the shipped trees are judged on models and shapes that they have not
seen. The sweep `repeat` is a second measurement of known shapes on another machine, the floor that no model can beat; `again`
one in the reverse order. What was timed at a clock that an earlier shape had lowered (`perfmodel.steady`) is neither fitted nor
judged.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import hardware as hardware_module
from perfmodel.calls import columns_of
from perfmodel.cells import Cells
from perfmodel.data_folder import data_folder
from perfmodel.features import PLANNED
from perfmodel.fresh import Fresh, lower_factors, of_model, raise_bounds, raise_factors, shown
from perfmodel.hardware import HardwareSpec
from perfmodel.held_out import (
    FOLDS,
    accuracy,
    choice_regret,
    coverage_by_class,
    folds_of,
    held_out,
    known_around,
    leave_out_runs,
    repeat_difference,
)
from perfmodel.judge import SHAPE
from perfmodel.kernels import GEMM_KERNELS, KERNELS, MEMORY_KINDS, library_of
from perfmodel.learn import Learned, learn_first, measured_range, predict, predict_doubting, train
from perfmodel.learn_pairs import add_pairs, judge_choices
from perfmodel.measured import ALONE_FILE, LEAST_US, read_choices, read_launches, read_timings
from perfmodel.model import PerfModel
from perfmodel.opened import choice_file, model_file, network_file
from perfmodel.packed import pack
from perfmodel.parallel import each
from perfmodel.prediction import bounds_of, wider
from perfmodel.saved import SCHEMA_VERSION, load, read_spec
from perfmodel.slim import slim
from perfmodel.transfer import Start, begin, starts

__all__ = [
    "FOLDS", "LEAST_US", "SHAPE", "fit", "folds_of", "judge", "predict", "read_launches", "read_timings", "table", "train",
]  # fmt: skip

# Sweeps whose shapes no fitted row may have, and what the manifest calls what they judge.
NEVER_SEEN = {
    sweep: f"held_out_{sweep.replace('zoo', 'models')}"
    for sweep in (
        "zoo", "blind", *(f"blind{number}" for number in range(2, 29)), "blind_long", "blind_towers", "blind_towers2",
        "zoo_large", "blind_large", "blind_large2", "blind_large3",
        "blind_memory", *(f"blind_memory{number}" for number in range(2, 11)),
    )
}  # fmt: skip
TORCH_GEMMS = tuple(name for name in GEMM_KERNELS if library_of(name) == "torch")
# And that are at a level of their own: half of what ran beside large GEMMs of the sweep `hot` left the GPU cool.
HELD_OUT_SWEEPS = (*NEVER_SEEN, "repeat", "again", "second", "own_clock", "queued", "queued_alone", "hot")
# A kernel with fewer rows is left out; one that another GPU's model knows needs fewer.
LEAST_ROWS_FIT, LEAST_ROWS_START = 60, 30


def predict_unseen(
    rows: pd.DataFrame, learned: dict[str, Learned], entries: dict[str, Any], hardware: HardwareSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Times of rows that nothing was fitted to, (rows,), and both ends of their intervals, (rows, 2).

    Args:
        rows: Measured rows of kernels that were learned.
        learned: What `train` made of each kernel.
        entries: Each kernel's part of the manifest.
        hardware: The GPU.
    """
    predicted, bounds = np.full(len(rows), np.nan), np.full((len(rows), 2), np.nan)
    for kernel, index in rows.groupby("kernel").indices.items():
        entry, name = entries[str(kernel)], str(kernel)
        predicted[index], doubt = predict_doubting(learned[name], name, rows.iloc[index], hardware, entry["range"])
        bounds[index] = bounds_of(predicted[index], entry, doubt, wider(name, columns_of(rows.iloc[index]), entry))
    return predicted, bounds


def judge(rows: pd.DataFrame, predicted: np.ndarray, bounds: np.ndarray) -> dict[str, Any] | None:
    """How good predictions of unseen rows are: accuracy per kernel, coverage, choice regret; None without rows.

    Args:
        rows: Measured rows.
        predicted: Their times, (rows,).
        bounds: Both ends of their intervals, (rows, 2).
    """
    if not len(rows):
        return None
    measured = rows["p50_us"].to_numpy()
    by_kernel = {str(kernel): index for kernel, index in rows.groupby("kernel").indices.items()}
    return {
        "kernels": {kernel: accuracy(measured[i], predicted[i], bounds[i]) for kernel, i in by_kernel.items()},
        "gemm_choice": choice_regret(rows, predicted, TORCH_GEMMS),
        "gemm_choice_all_libraries": choice_regret(rows, predicted),
        "coverage": accuracy(measured, predicted, bounds)["coverage"],
    }


def fitted_rows(everything: pd.DataFrame, least: int = LEAST_ROWS_FIT) -> pd.DataFrame:
    """Rows to fit: settled, no held-out sweep, no shape of `NEVER_SEEN`, no kernel of fewer than `least` (named on stderr).

    An operand is no GEMM's shape, though both may be written alike: a GEMM's N may be 1.
    """
    fitted = everything["settled"] & ~everything["sweep"].isin(HELD_OUT_SWEEPS)
    of_memory = {name: name in KERNELS and KERNELS[name].kind in MEMORY_KINDS for name in everything["kernel"].unique()}
    shapes = pd.MultiIndex.from_frame(everything[SHAPE].assign(memory=everything["kernel"].map(of_memory).astype(bool)))
    fitted &= ~shapes.isin(shapes[everything["sweep"].isin(NEVER_SEEN).to_numpy()])
    rows = everything[fitted]
    number = rows["kernel"].value_counts()
    for kernel, count in number[number < least].items():
        print(f"left out {kernel}: {count} rows, and a fit needs {least}", file=sys.stderr)
    rows = rows[rows["kernel"].isin(list(number.index[number >= least]))].reset_index(drop=True)
    if not len(rows):
        raise ValueError(f"no kernel has {least} rows to fit; measure more with: python -m hil.collect")
    return rows


def _timings_of(hardware: str) -> pd.DataFrame | None:
    """What a shipped GPU's model was fitted to; None where the package came without that."""
    try:
        return fitted_rows(read_timings(hardware), 1)
    except FileNotFoundError:
        return None


def fit(
    hardware_name: str = "h200",
    folder: Path | None = None,
    timings_folder: Path | None = None,
    spec: Path | None = None,
    start: str | None = None,
) -> dict[str, Any]:
    """Cross-validate, fit on everything, write the trees and the manifest; returns the manifest.

    Args:
        hardware_name: A name of `perfmodel.hardware.available()`; not looked at where `spec` is given.
        folder: Where the trees go, by default `data/<hardware>/models`. With `timings_folder` it is needed, and is a
            calibration folder: the trees go to `perfmodel` in it and the specification beside that.
        timings_folder: A user's own sweep.
        spec: File with the specification of the GPU that it was measured on; by default that of `hardware_name`.
        start: The shipped GPU whose model to go on from; None to learn from these timings alone.

    Raises:
        ValueError: an argument is missing, or the timings or the specification are unusable.
        FileNotFoundError: there are no timings.
    """
    if timings_folder is None and spec is not None:
        raise ValueError("--hardware-spec says what --timings were measured on; give both")
    if timings_folder is not None and folder is None:
        raise ValueError("--timings needs --out, the calibration folder to write")
    spec_path = spec or data_folder() / hardware_name / "hardware.json"
    hardware = hardware_module.load(hardware_name) if spec is None else read_spec(spec)
    measured_folder = timings_folder or data_folder() / hardware.name
    everything = read_timings(hardware.name, measured_folder)
    settled = everything[everything["settled"]]
    timings = fitted_rows(everything, LEAST_ROWS_FIT if start is None else LEAST_ROWS_START)
    launches, choices = read_launches(everything, measured_folder), read_choices(measured_folder)
    first: dict[str, Learned | Start] = {}
    begun: PerfModel | None = None
    if start is None:
        first |= learn_first(launches, hardware, timings["kernel"].unique(), choices)
    else:
        begun = load(start)
        if hardware.like != start:
            raise ValueError(f'{spec_path} says like {hardware.like!r}; to start from {start}, say "like": "{start}" in it')
        first |= starts(begun, _timings_of(start), hardware, timings["kernel"].unique(), launches, choices)
    predicted = held_out(timings, hardware, first)
    indices = {str(kernel): index for kernel, index in timings.groupby("kernel").indices.items()}
    elsewhere = begun.manifest["kernels"] if begun else {}
    cells = {name: _cells(name, timings.iloc[index], launches, elsewhere.get(name)) for name, index in indices.items()}
    fresh, few = known_around(leave_out_runs(timings, hardware, first, predicted), timings, predicted, cells)
    measured, bounds = timings["p50_us"].to_numpy(), fresh.bounds(timings)
    command = f"python -m perfmodel.fit --hardware {hardware_name}"
    target = folder or data_folder() / hardware.name / "models"
    if timings_folder is not None and folder is not None:
        command = f"python -m perfmodel.fit --timings {timings_folder} --hardware-spec {spec_path} --out {folder}"
        target = folder / "perfmodel"
        target.mkdir(parents=True, exist_ok=True)
        (folder / "hardware.json").write_text(spec_path.read_text())
    kernels: dict[str, Any] = {}
    files: dict[str, bytes | None] = {}
    learned: dict[str, Learned] = {}
    jobs = [(kernel, timings.iloc[index], hardware, first.get(kernel)) for kernel, index in indices.items()]
    for (kernel, rows, *_), (mine, trees) in zip(jobs, each(_stored, jobs), strict=True):
        index, learned[kernel] = indices[kernel], mine
        files[model_file(kernel)] = trees
        for part, name in ((mine.network, network_file(kernel)), (mine.choice, choice_file(kernel))):
            files[name] = None if part is None else gzip.compress(part.save(), 9, mtime=0)
        kernels[kernel] = {
            "interval_factors": fresh.factors(timings, kernel, index),
            **({} if mine.choice is None else {"wider_in_doubt": list(fresh.wider_in_doubt)}),
            **({"wider_where_few": list(few[kind])} if (kind := KERNELS[kernel].kind) in few else {}),
            "network": mine.network is not None,
            "choice": mine.choice is not None,
            "planned": PLANNED,
            "least_us": mine.least_us,
            **({"regret": beside["geomean"]} if (beside := regret_beside_bf16(timings, predicted, kernel)) else {}),
            "range": _range(rows, elsewhere.get(kernel)),
            "cells": cells[kernel].save(),
        }
    unseen = _to_judge(everything)
    unseen = unseen[unseen["kernel"].isin(list(learned))].reset_index(drop=True)
    times, ends = predict_unseen(unseen, learned, kernels, hardware)
    asked = Fresh.of(unseen, times, ends)
    ends, powers = asked.raised(times, ends), asked.powers()
    kernels, bounds = raise_factors(kernels, powers), raise_bounds(timings, fresh.predicted, bounds, powers)
    for kernel, drawn in shown(unseen, times).items():
        kernels[kernel]["fresh"] = drawn
    for kernel, index in indices.items():
        kernels[kernel]["held_out"] = accuracy(measured[index], predicted[index], bounds[index])
        kernels[kernel]["classes"] = coverage_by_class(measured[index], fresh.predicted[index], bounds[index])
    judged = {
        "choice_regret": choice_regret(timings, predicted, TORCH_GEMMS),
        "choice_regret_all_libraries": choice_regret(timings, predicted),
        **dict.fromkeys(NEVER_SEEN.values()),
        **_judged_on_sweeps(unseen, times, ends),
        # Who measures again may meet a low clock, too.
        "repeat_on_another_machine": repeat_difference(everything),
    }
    # A GPU that a user measures need have none of the sweeps that are drawn here, but for whole models.
    of_sweeps = {key for sweep, key in NEVER_SEEN.items() if sweep != "zoo"}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "hardware": hardware.name,
        "command": command + (f" --start {start}" if start else ""),
        "rows": len(timings),
        "unsettled": len(everything) - len(settled),
        "shapes": int(timings.groupby(SHAPE).ngroups),
        "launches": 0 if launches is None else int(launches["kernel"].isin(list(first)).sum()),
        **({"start": {"hardware": start, "kernels_fingerprint": begun.kernels_fingerprint}} if begun else {}),
        "held_out": f"{FOLDS}-fold cross-validation by whole shapes",
        **{name: value for name, value in judged.items() if value is not None},
        **(
            {"not_measured": missing}
            if (missing := [name for name, value in judged.items() if value is None and name not in of_sweeps])
            else {}
        ),
        "kernels": kernels,
    }
    _write(target, {**files, "manifest.json": (json.dumps(manifest, indent=1) + "\n").encode()})
    return _with_pairs(PerfModel(hardware, target, manifest), timings, launches, unseen)


def fit_memory(hardware_name: str) -> dict[str, Any]:
    """Fit a shipped GPU's memory-bound kernels anew, its GEMMs as they are; returns the manifest.

    Raises:
        ValueError, FileNotFoundError: as `fit`.
    """
    kept, folder = load(hardware_name), data_folder() / hardware_name
    if not (folder / "memory.parquet").is_file():
        raise FileNotFoundError(f"no memory.parquet under {folder}; measure it with: python -m hil.collect memory")
    start = kept.manifest.get("start", {}).get("hardware")
    with TemporaryDirectory() as beside:
        timings = Path(beside) / "timings"
        timings.mkdir()
        for name in ("memory.parquet", "memory.json", ALONE_FILE):
            if (folder / name).is_file():
                (timings / name).symlink_to((folder / name).resolve())
        own = fit(hardware_name, Path(beside), timings, folder / "hardware.json", start)
        made = {path.name: path.read_bytes() for path in (Path(beside) / "perfmodel").glob("*.gz")}
    everything = read_timings(hardware_name)
    fitted = fitted_rows(everything, LEAST_ROWS_FIT if start is None else LEAST_ROWS_START)
    gemms = {name: of for name, of in kept.manifest["kernels"].items() if KERNELS[name].kind not in MEMORY_KINDS}
    gone: dict[str, bytes | None] = {model_file(name): None for name in kept.manifest["kernels"] if name not in gemms}
    manifest = kept.manifest | {
        "command": f"{kept.manifest['command'].removesuffix(' --memory')} --memory",
        "rows": len(fitted),
        "unsettled": int((~everything["settled"]).sum()),
        "shapes": int(fitted.groupby(SHAPE).ngroups),
        "repeat_on_another_machine": repeat_difference(everything),
        "kernels": dict(sorted({**gemms, **own["kernels"]}.items())),
        **({"start": own["start"]} if start else {}),
    }
    _write(kept.folder, {**gone, **made, "manifest.json": (json.dumps(manifest, indent=1) + "\n").encode()})
    return fit_intervals(hardware_name)


def fit_pairs(hardware_name: str) -> dict[str, Any]:
    """Learn what pairs of kernels differ by anew, on top of a shipped GPU's kernels as they are; returns the manifest.

    Raises:
        ValueError, FileNotFoundError: as `fit`.
    """
    model, everything = load(hardware_name), read_timings(hardware_name)
    launches = read_launches(everything, data_folder() / hardware_name)
    return _with_pairs(model, fitted_rows(everything), launches, _to_judge(everything))


def fit_intervals(hardware_name: str) -> dict[str, Any]:
    """Make a shipped GPU's intervals as wide as its fresh sweeps ask, and judge it by these; returns the manifest.

    How often left-out runs are inside (`held_out`, `classes`) stays as the last fit found it.

    Raises:
        ValueError, FileNotFoundError: as `load` and `read_timings`.
    """
    model, everything = load(hardware_name), read_timings(hardware_name)
    unseen = _to_judge(everything)
    unseen = unseen[unseen["kernel"].isin(list(model.manifest["kernels"]))].reset_index(drop=True)
    times, ends, asked = of_model(model, unseen)
    lowered = {kernel: lower_factors(entry) for kernel, entry in model.manifest["kernels"].items()}
    kernels = raise_factors(lowered, asked.powers())
    for kernel, drawn in shown(unseen, times).items():
        kernels[kernel]["fresh"] = drawn
    manifest = model.manifest | _judged_on_sweeps(unseen, times, asked.raised(times, ends)) | {"kernels": kernels}
    _write(model.folder, {"manifest.json": (json.dumps(manifest, indent=1) + "\n").encode()})
    if "pairs" not in manifest:
        return manifest
    return judge_choices(replace(model, manifest=manifest), unseen, NEVER_SEEN, TORCH_GEMMS)


def _to_judge(everything: pd.DataFrame) -> pd.DataFrame:
    """Settled timings of sweeps that no fit sees."""
    return everything[everything["settled"] & everything["sweep"].isin(list(NEVER_SEEN))]


def _judged_on_sweeps(unseen: pd.DataFrame, times: np.ndarray, ends: np.ndarray) -> dict[str, Any]:
    """`judge` of each sweep that no fit sees and that there is, by its key in a manifest."""
    found = {}
    for sweep, key in NEVER_SEEN.items():
        mine = (unseen["sweep"] == sweep).to_numpy()
        if mine.any():
            found[key] = judge(unseen[mine].reset_index(drop=True), times[mine], ends[mine])
    return found


def _with_pairs(model: PerfModel, timings: pd.DataFrame, launches: pd.DataFrame | None, unseen: pd.DataFrame) -> dict[str, Any]:
    """A written fit with its pairs of kernels, where enough was timed of any; returns the manifest."""
    manifest = add_pairs(model, timings, launches)
    if "pairs" not in manifest:
        return manifest
    return judge_choices(replace(model, manifest=manifest), unseen, NEVER_SEEN, TORCH_GEMMS)


def regret_beside_bf16(timings: pd.DataFrame, predicted: np.ndarray, kernel: str) -> dict[str, float] | None:
    """What choosing between bf16 and an FP8 GEMM costs over the faster one (`choice_regret`); None where nothing is to choose."""
    if kernel not in GEMM_KERNELS or not KERNELS[kernel].is_fp8:
        return None
    return choice_regret(timings, predicted, ("torch/bf16", kernel))


def _range(rows: pd.DataFrame, begun: dict[str, Any] | None) -> dict[str, list[float]]:
    """`measured_range`, with what was measured on the GPU that learning began from."""
    own = measured_range(rows)
    if begun is None:
        return own
    return {name: [min(low, begun["range"][name][0]), max(high, begun["range"][name][1])] for name, (low, high) in own.items()}


def _cells(kernel: str, rows: pd.DataFrame, launches: pd.DataFrame | None, begun: dict[str, Any] | None) -> Cells:
    """Where something was measured: careful timings, quick launches, and those of the GPU that learning began from."""
    quick = None if launches is None else launches[launches["kernel"] == kernel]
    own = Cells.of(columns_of(rows), *([] if quick is None or quick.empty else [columns_of(quick)]))
    return own if begun is None or "cells" not in begun else own | Cells.load(begun["cells"])


def _write(folder: Path, files: dict[str, bytes | None]) -> None:
    """Write files, and remove those without content: one after the other, since those of two fits do not go together."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            (folder / name).write_bytes(content)


def _stored(kernel: str, rows: pd.DataFrame, hardware: HardwareSpec, first: Learned | Start | None) -> tuple[Learned, bytes]:
    """What `train` makes, and its trees as they are written."""
    learned = train(kernel, rows, hardware, begin(first))
    return learned, pack(slim(learned.booster))


def _choice_line(what: str, r: dict[str, float]) -> str:
    return (
        f"{what}, {r['shapes']} shapes: right {r['right']:.1%}, "
        f"regret {r['geomean']:.2%}, p90 {r['p90']:.1%}, worst {r['worst']:.0%}"
    )


def table(manifest: dict[str, Any]) -> str:
    """The manifest's accuracy as text, a row a kernel; the regret is a geometric mean."""
    models = manifest.get("held_out_models", {"kernels": {}})
    lines = [f"{'':38s} {'held-out shapes':>45s} {'held-out models':>16s}"]
    columns = (("rows", 6), ("MAPE", 6), ("median", 7), ("p90", 6), ("worst", 6), ("inside", 7), ("regret", 7), ("rows", 5))
    lines.append(f"{'kernel':38s}" + "".join(f"{name:>{width}s}" for name, width in (*columns, ("MAPE", 6), ("p90", 6))))
    for kernel in (name for name in KERNELS if name in manifest["kernels"]):
        entry, z = manifest["kernels"][kernel], models["kernels"].get(kernel)
        a, cost = entry["held_out"], f"{entry['regret']:7.2%}" if "regret" in entry else f"{'':7s}"
        line = f"{kernel:38s}{a['n']:6d}{a['mape']:6.1%}{a['median']:7.1%}{a['p90']:6.1%}{a['worst']:6.0%}{a['coverage']:7.0%}"
        lines.append((line + cost + (f"{z['n']:5d}{z['mape']:6.1%}{z['p90']:6.1%}" if z else "")).rstrip())
    lines.append(
        "Inside: left-out runs' measurements inside the intervals that fresh sweeps ask for. Regret: of choosing it or bf16."
    )
    if again := manifest.get("repeat_on_another_machine"):
        lines.append(
            f"A second measurement on another GPU differs by {again['mape']:.1%} (p90 {again['p90']:.1%}, n = {again['n']})."
        )
    if "coverage" in models:
        lines.append(f"Of the held-out models' measurements, {models['coverage']:.1%} lie inside their 90% intervals.")
    for what, regret in (
        ("torch's GEMMs, held-out shapes, each kernel told alone", manifest.get("choice_regret")),
        ("torch's GEMMs, held-out models", models.get("gemm_choice")),
        ("all libraries', held-out models", models.get("gemm_choice_all_libraries")),
    ):
        if regret:
            lines.append(_choice_line(f"Choice of {what}", regret))
    if missing := manifest.get("not_measured"):
        lines.append(f"Not measured in these timings: {', '.join(missing)}.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.fit", description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--timings", type=Path, metavar="DIR", help="a sweep of your own (gemm.parquet, memory.parquet)")
    parser.add_argument("--hardware-spec", type=Path, metavar="FILE", help="what it was measured on; as data/h200/hardware.json")
    parser.add_argument("--start", metavar="NAME", help="shipped hardware whose model to go on from (default: none)")
    parser.add_argument(
        "--out", type=Path, help="folder for the trees (default: data/<hardware>/models); with --timings, the calibration folder"
    )
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--memory", action="store_true", help="memory-bound kernels alone, GEMMs as they are")
    alone.add_argument("--pairs", action="store_true", help="what pairs of kernels differ by alone, the kernels as they are")
    alone.add_argument(
        "--intervals", action="store_true", help="how wide fresh sweeps ask intervals to be alone, the trees as they are"
    )
    options = parser.parse_args(arguments)
    parts = {"--memory": fit_memory, "--pairs": fit_pairs, "--intervals": fit_intervals}
    part = next((name for name in parts if getattr(options, name[2:])), "")
    if part and (options.timings or options.hardware_spec or options.start or options.out):
        parser.error(f"{part} is of a shipped fit as it is; leave --timings, --hardware-spec, --start and --out away")
    try:
        if part:
            print(table(parts[part](options.hardware)))
            return 0
        print(table(fit(options.hardware, options.out, options.timings, options.hardware_spec, options.start)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
