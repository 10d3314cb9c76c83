"""Fit the kernel-time model on measured timings and judge it on shapes that it has not seen.

    python -m perfmodel.fit --hardware h200
    python -m perfmodel.fit --timings DIR --hardware-spec FILE --out CALIBRATION

The second fits a user's own sweep: DIR holds `gemm.parquet`, `memory.parquet` or both as `hil.collect` writes them, FILE is
a specification as `data/h200/hardware.json`, and `perfmodel.load(name, calibration=CALIBRATION)` reads the result.

Accuracy comes from two sources. Cross-validation holds out whole shapes, every kernel's row of a shape together; its
residuals calibrate the intervals. The sweep `zoo` holds the shapes of whole models, `blind` shapes drawn as the fitted ones
were and looked at once, at the end: neither is fitted to, nor is any swept row of a shape that they have, so the shipped
trees are judged on models and shapes that they have not seen. The sweep `repeat` is a second measurement of known shapes on
another machine: the floor that no model can beat.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import hardware as hardware_module
from perfmodel.data_folder import data_folder
from perfmodel.features import features
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import GEMM_KERNELS, KERNELS
from perfmodel.model import SCHEMA_VERSION, SIZE_CLASSES_US, baseline_us, columns_of, model_file, read_spec, size_class

PARAMETERS: dict[str, Any] = {
    "max_depth": 6, "eta": 0.05, "subsample": 0.8, "colsample_bytree": 0.6, "min_child_weight": 2.0,
    "objective": "reg:squarederror", "nthread": min(os.cpu_count() or 1, 16), "seed": 0,
}  # fmt: skip
ROUNDS = 500
FOLDS = 5
HELD_OUT_SWEEPS = ("zoo", "blind", "repeat")
# Sweeps whose shapes no fitted row may have.
NEVER_SEEN = ("zoo", "blind")
SHAPE = ["m", "n", "k", "groups"]
COVERAGE = 0.90
# A kernel with fewer rows is left out.
LEAST_ROWS_FIT = 60
# Less than a launch can take: transposing a single column launches nothing.
LEAST_US = 0.3
# A size class with fewer held-out rows takes its interval from all of the kernel's rows.
LEAST_ROWS = 40


def read_timings(hardware: str, folder: Path | None = None) -> pd.DataFrame:
    """All measured rows of a GPU that the model is of, one per kernel, shape and sweep.

    Args:
        hardware: A name of `perfmodel.hardware.available()`.
        folder: Where the timings lie; by default `data/<hardware>`.

    Raises:
        FileNotFoundError: there are no timings.
        ValueError: a file lacks a column, or holds a time that is none.
    """
    folder = data_folder() / hardware if folder is None else folder
    files = [path for path in sorted(folder.glob("*.parquet")) if path.stem in ("gemm", "memory")]
    if not files:
        raise FileNotFoundError(f"no gemm.parquet or memory.parquet under {folder}; measure them with: python -m hil.collect")
    frames = []
    for path in files:
        frame = pd.read_parquet(path)
        if missing := {"kernel", "m", "n", "k", "p50_us"} - set(frame.columns):
            raise ValueError(f"{path} lacks the columns {sorted(missing)}; measure it again with: python -m hil.collect")
        frame = frame.assign(**{name: value for name, value in (("groups", 1), ("sweep", "own")) if name not in frame})
        modelled = [name in KERNELS and KERNELS[name].kind != "linear" for name in frame["kernel"]]
        unknown = sorted(set(frame["kernel"]) - set(KERNELS))
        if unknown:
            print(f"{path.name}: rows of unknown kernels are left out: {', '.join(unknown)}", file=sys.stderr)
        frame = frame[modelled]
        if not np.isfinite(frame["p50_us"]).all():
            raise ValueError(f"{path} has a p50_us that is not finite; measure it again with: python -m hil.collect")
        frames.append(frame)
    everything = pd.concat(frames, ignore_index=True)
    return everything[everything["p50_us"] >= LEAST_US].reset_index(drop=True)


def train(kernel: str, rows: pd.DataFrame, hardware: HardwareSpec) -> Any:
    """Trees for one kernel, fitted to log(time / baseline)."""
    import xgboost

    sizes = columns_of(rows)
    names, matrix = features(kernel, *sizes, hardware)
    target = np.log(rows["p50_us"].to_numpy() / baseline_us(kernel, *sizes, hardware))
    return xgboost.train(PARAMETERS, xgboost.DMatrix(matrix, target, feature_names=names), ROUNDS)


def predict(booster: Any, kernel: str, rows: pd.DataFrame, hardware: HardwareSpec) -> np.ndarray:
    """Times in microseconds of one kernel's rows."""
    sizes = columns_of(rows)
    _, matrix = features(kernel, *sizes, hardware)
    return baseline_us(kernel, *sizes, hardware) * np.exp(booster.inplace_predict(matrix))


def folds_of(timings: pd.DataFrame, folds: int = FOLDS, seed: int = 0) -> np.ndarray:
    """Fold of each row; all kernels of one shape share theirs."""
    shape = timings.groupby(SHAPE).ngroup().to_numpy()
    return np.random.default_rng(seed).permutation(shape.max() + 1)[shape] % folds


def held_out(timings: pd.DataFrame, hardware: HardwareSpec) -> np.ndarray:
    """Each row's time as predicted by trees that saw no row of its shape, in microseconds."""
    fold = folds_of(timings)
    result = np.full(len(timings), np.nan)
    for kernel, index in timings.groupby("kernel").indices.items():
        rows = timings.iloc[index]
        for number in range(FOLDS):
            test = fold[index] == number
            if test.any() and not test.all():
                booster = train(str(kernel), rows[~test], hardware)
                result[index[test]] = predict(booster, str(kernel), rows[test], hardware)
        print(f"held out {kernel}: {len(rows)} rows", file=sys.stderr)
    return result


def interval_factors(measured: np.ndarray, predicted: np.ndarray) -> list[list[float]]:
    """Factors on a prediction that hold 90% of held-out measurements, per size class.

    Split-conformal: the quantile of each class's held-out ratios, with the finite-sample correction.
    """
    ratio, classes = measured / predicted, size_class(predicted)

    def bounds(values: np.ndarray) -> list[float]:
        tail = (1 - COVERAGE) / 2
        rank = min(1.0, (1 - tail) * (len(values) + 1) / len(values))
        return [float(np.quantile(values, 1 - rank)), float(np.quantile(values, rank))]

    everywhere = bounds(ratio)
    result = []
    for number in range(len(SIZE_CLASSES_US) + 1):
        chosen = ratio[classes == number]
        result.append(bounds(chosen) if len(chosen) >= LEAST_ROWS else everywhere)
    return result


def accuracy(measured: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """MAPE, median, 90th percentile and worst absolute relative error."""
    error = np.abs(predicted / measured - 1)
    return {
        "n": len(error), "mape": float(error.mean()), "median": float(np.median(error)),
        "p90": float(np.quantile(error, 0.9)), "worst": float(error.max()),
    }  # fmt: skip


def choice_regret(timings: pd.DataFrame, predicted: np.ndarray) -> dict[str, float] | None:
    """What choosing each shape's GEMM kernel by prediction costs against the measured best; None without a choice.

    Only shapes with at least one legal FP8 kernel. Quantization is not part of it: `benchmarks/choice.py` includes it.
    """
    frame = timings.assign(predicted=predicted)
    frame = frame[frame["kernel"].isin(GEMM_KERNELS)]
    best = frame.loc[frame.groupby(SHAPE)["p50_us"].idxmin()].set_index(SHAPE)["p50_us"]
    chosen = frame.loc[frame.groupby(SHAPE)["predicted"].idxmin()].set_index(SHAPE)["p50_us"]
    several = frame.groupby(SHAPE)["kernel"].nunique() > 1
    ratio = (chosen / best)[several]
    if not len(ratio):
        return None
    return {
        "shapes": len(ratio), "right": float((ratio == 1).mean()), "geomean": float(np.exp(np.log(ratio).mean()) - 1),
        "p90": float(ratio.quantile(0.9) - 1), "worst": float(ratio.max() - 1),
    }  # fmt: skip


def judge_on_models(
    everything: pd.DataFrame, boosters: dict[str, Any], factors: dict[str, list[list[float]]], hardware: HardwareSpec
) -> dict[str, Any] | None:
    """The trees on the sweep `zoo`: accuracy per kernel, share inside the intervals, choice regret; None without it."""
    zoo = everything[(everything["sweep"] == "zoo") & everything["kernel"].isin(list(boosters))].reset_index(drop=True)
    if not len(zoo):
        return None
    predicted, bounds = np.full(len(zoo), np.nan), np.full((len(zoo), 2), np.nan)
    for kernel, index in zoo.groupby("kernel").indices.items():
        predicted[index] = predict(boosters[str(kernel)], str(kernel), zoo.iloc[index], hardware)
        bounds[index] = predicted[index, None] * np.asarray(factors[str(kernel)])[size_class(predicted[index])]
    measured = zoo["p50_us"].to_numpy()
    kernels = {
        str(kernel): accuracy(measured[index], predicted[index]) for kernel, index in zoo.groupby("kernel").indices.items()
    }
    return {
        "kernels": kernels,
        "gemm_choice": choice_regret(zoo, predicted),
        "coverage": float(((measured >= bounds[:, 0]) & (measured <= bounds[:, 1])).mean()),
    }


def repeat_difference(everything: pd.DataFrame) -> dict[str, float] | None:
    """How far a second measurement on another machine is from the first, what no model can beat; None without one."""
    key = ["kernel", *SHAPE]
    first = everything[everything["sweep"] == "lrm"].set_index(key)["p50_us"]
    second = everything[everything["sweep"] == "repeat"].set_index(key)["p50_us"]
    both = pd.concat([first, second], axis=1, join="inner", keys=["first", "second"])
    return accuracy(both["first"].to_numpy(), both["second"].to_numpy()) if len(both) else None


def _fitted_rows(everything: pd.DataFrame) -> pd.DataFrame:
    """Rows to fit: no held-out sweep, no shape of `NEVER_SEEN`, no kernel with too few rows (named on stderr)."""
    fitted = ~everything["sweep"].isin(HELD_OUT_SWEEPS)
    kept = pd.MultiIndex.from_frame(everything.loc[everything["sweep"].isin(NEVER_SEEN), SHAPE])
    fitted &= ~pd.MultiIndex.from_frame(everything[SHAPE]).isin(kept)
    rows = everything[fitted]
    number = rows["kernel"].value_counts()
    for kernel, count in number[number < LEAST_ROWS_FIT].items():
        print(f"left out {kernel}: {count} rows, and a fit needs {LEAST_ROWS_FIT}", file=sys.stderr)
    rows = rows[rows["kernel"].isin(list(number.index[number >= LEAST_ROWS_FIT]))].reset_index(drop=True)
    if not len(rows):
        raise ValueError(f"no kernel has {LEAST_ROWS_FIT} rows to fit; measure more with: python -m hil.collect")
    return rows


def fit(
    hardware_name: str = "h200", folder: Path | None = None, timings_folder: Path | None = None, spec: Path | None = None
) -> dict[str, Any]:
    """Cross-validate, fit on everything, write the trees and the manifest; returns the manifest.

    Args:
        hardware_name: A name of `perfmodel.hardware.available()`; not looked at where `spec` is given.
        folder: Where the trees go, by default `data/<hardware>/models`. With `timings_folder` it is needed, and is a
            calibration folder: the trees go to `perfmodel` in it and the specification beside that.
        timings_folder: A user's own sweep.
        spec: File with the specification of the GPU that it was measured on; by default that of `hardware_name`.

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
    everything = read_timings(hardware.name, timings_folder)
    timings = _fitted_rows(everything)
    predicted = held_out(timings, hardware)
    measured = timings["p50_us"].to_numpy()
    command = f"python -m perfmodel.fit --hardware {hardware_name}"
    target = folder or data_folder() / hardware.name / "models"
    if timings_folder is not None and folder is not None:
        command = f"python -m perfmodel.fit --timings {timings_folder} --hardware-spec {spec_path} --out {folder}"
        target = folder / "perfmodel"
        target.mkdir(parents=True, exist_ok=True)
        (folder / "hardware.json").write_text(spec_path.read_text())
    target.mkdir(parents=True, exist_ok=True)
    kernels: dict[str, Any] = {}
    boosters: dict[str, Any] = {}
    for kernel, index in timings.groupby("kernel").indices.items():
        rows = timings.iloc[index]
        booster = boosters[str(kernel)] = train(str(kernel), rows, hardware)
        (target / model_file(str(kernel))).write_bytes(gzip.compress(bytes(booster.save_raw("ubj")), 9, mtime=0))
        sizes = dict(zip(SHAPE, columns_of(rows), strict=True))
        sizes["product"] = sizes["m"] * sizes["n"] * sizes["k"] * sizes["groups"]
        kernels[str(kernel)] = {
            "held_out": accuracy(measured[index], predicted[index]),
            "interval_factors": interval_factors(measured[index], predicted[index]),
            "range": {name: [float(values.min()), float(values.max())] for name, values in sizes.items()},
        }
    judged = {
        "choice_regret": choice_regret(timings, predicted),
        "held_out_models": judge_on_models(
            everything, boosters, {kernel: entry["interval_factors"] for kernel, entry in kernels.items()}, hardware
        ),
        "repeat_on_another_machine": repeat_difference(everything),
    }
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "hardware": hardware.name,
        "command": command,
        "rows": len(timings),
        "shapes": int(timings.groupby(SHAPE).ngroups),
        "held_out": f"{FOLDS}-fold cross-validation by whole shapes",
        **{name: value for name, value in judged.items() if value is not None},
        **({"not_measured": missing} if (missing := [name for name, value in judged.items() if value is None]) else {}),
        "kernels": kernels,
    }
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _choice_line(what: str, r: dict[str, float]) -> str:
    return (
        f"{what}, {r['shapes']} shapes: right {r['right']:.1%}, "
        f"regret {r['geomean']:.2%}, p90 {r['p90']:.1%}, worst {r['worst']:.0%}"
    )


def table(manifest: dict[str, Any]) -> str:
    """The manifest's accuracy as text, a row a kernel; the regret is a geometric mean."""
    models = manifest.get("held_out_models", {"kernels": {}})
    lines = [f"{'':38s} {'held-out shapes':>36s} {'held-out models':>23s}"]
    lines.append(
        f"{'kernel':38s} {'rows':>5s} {'MAPE':>7s} {'median':>7s} {'p90':>6s} {'worst':>7s} {'rows':>6s} {'MAPE':>8s} {'p90':>7s}"
    )
    for kernel in (name for name in KERNELS if name in manifest["kernels"]):
        a, z = manifest["kernels"][kernel]["held_out"], models["kernels"].get(kernel)
        line = f"{kernel:38s} {a['n']:5d} {a['mape']:7.1%} {a['median']:7.1%} {a['p90']:6.1%} {a['worst']:7.0%}"
        lines.append(line + (f" {z['n']:6d} {z['mape']:8.1%} {z['p90']:7.1%}" if z else ""))
    if again := manifest.get("repeat_on_another_machine"):
        lines.append(
            f"A second measurement on another machine differs by {again['mape']:.1%} (p90 {again['p90']:.1%}, n = {again['n']})."
        )
    if "coverage" in models:
        lines.append(f"Of the held-out models' measurements, {models['coverage']:.1%} lie inside their 90% intervals.")
    for what, regret in (("shapes", manifest.get("choice_regret")), ("models", models.get("gemm_choice"))):
        if regret:
            lines.append(_choice_line(f"GEMM choice, held-out {what}", regret))
    if missing := manifest.get("not_measured"):
        lines.append(f"Not measured in these timings: {', '.join(missing)}.")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.fit", description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--timings", type=Path, metavar="DIR", help="a sweep of your own (gemm.parquet, memory.parquet)")
    parser.add_argument("--hardware-spec", type=Path, metavar="FILE", help="what it was measured on; as data/h200/hardware.json")
    parser.add_argument(
        "--out", type=Path, help="folder for the trees (default: data/<hardware>/models); with --timings, the calibration folder"
    )
    options = parser.parse_args(arguments)
    try:
        print(table(fit(options.hardware, options.out, options.timings, options.hardware_spec)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
