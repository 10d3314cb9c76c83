"""Fit the time model of memory-bound kernels on measured ones, and judge it on kernels held out.

    python -m perfmodel.fit_fused --hardware h200

Learned from `data/<hardware>/fused.parquet` (`python -m hil.fused`) and from the norms, activations, sums and quantizers of
`memory.parquet`, as kernels of so many bytes. Folds hold out whole shapes. No kernel of a model is among them: where steps were
profiled, `python -m perfmodel.fit_in_step` behind this fits the trees once more, to theirs, too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import hardware as hardware_module
from perfmodel.data_folder import data_folder
from perfmodel.fused import COLUMNS, MANIFEST, MODEL, SCHEMA_VERSION, baseline_us, features, instructions_of
from perfmodel.hardware import HardwareSpec

# Kernels of memory.parquet that are one kernel of a known kind: (kind, bytes read and written per element, operators).
# The backward of a norm with parameters is left out: it is several.
TIMED = {
    "torch/relu_forward": ("pointwise", 2, 2, "relu"),
    "torch/relu_backward": ("pointwise", 4, 2, "le where"),
    "torch/silu_forward": ("pointwise", 2, 2, "exp add div"),
    "torch/silu_backward": ("pointwise", 4, 2, "sigmoid mul sub add"),
    "torch/hardswish_forward": ("pointwise", 2, 2, "add clamp mul div"),
    "torch/hardswish_backward": ("pointwise", 4, 2, "le ge where div add mul"),
    "torch/layernorm_forward": ("row", 2, 2, "var_mean sub rsqrt mul add relu"),
    "torch/rmsnorm_forward": ("row", 2, 2, "mean mul rsqrt add relu"),
    "torch/blocknorm_backward": ("row", 4, 2, "add div mul sum"),
    "torch/quantize_rowwise": ("row", 2, 1, "abs amax clamp div mul"),
    "torch/bias_backward": ("column", 2, 0, "sum"),
}
IN_BLOCKS, BLOCK = {"torch/blocknorm_backward"}, 256  # whose rows are cut into such blocks
PARAMETERS: dict[str, Any] = {
    "max_depth": 5, "eta": 0.08, "subsample": 0.8, "colsample_bytree": 0.8, "min_child_weight": 1.0, "reg_lambda": 1.0,
    "objective": "reg:squarederror", "nthread": 2, "seed": 0,
}  # fmt: skip
ROUNDS = 400
FOLDS = 5
COVERAGE = 0.90
# A row of memory.parquet counts less: there are thirty times as many, over fewer kinds of kernels.
WEIGHT_TIMED = 0.15
LEAST_US = 0.3


def timed_kernels(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of memory.parquet as kernels of so many bytes."""
    frames = []
    for kernel, (kind, read, written, operators) in TIMED.items():
        rows = table[table["kernel"] == kernel]
        elements = (rows["m"] * rows["k"]).astype(np.int64)
        across = kind == "column"
        length = rows["k"].clip(upper=BLOCK) if kernel in IN_BLOCKS else rows["k"]
        sizes = {"row": (elements // length, length), "column": (rows["k"], rows["m"]), "pointwise": (elements, 1)}[kind]
        frames.append(
            pd.DataFrame(
                {
                    "kind": kind, "kept": sizes[0], "reduced": sizes[1], "read_bytes": read * elements,
                    "written_bytes": written * elements + 2 * rows["k"] * across, "unordered_bytes": 0, "uneven": False,
                    "instructions": instructions_of(operators.split()), "p50_us": rows["p50_us"], "weight": WEIGHT_TIMED,
                }
            )
        )  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def read_rows(folder: Path) -> pd.DataFrame:
    """Everything to learn from: `COLUMNS`, `p50_us`, `weight`."""
    fused = pd.read_parquet(folder / "fused.parquet").assign(weight=1.0)
    rows = pd.concat([fused, timed_kernels(pd.read_parquet(folder / "memory.parquet"))], ignore_index=True)
    return rows[rows["p50_us"] >= LEAST_US][[*COLUMNS, "p50_us", "weight"]].reset_index(drop=True)


def train(rows: pd.DataFrame, hardware: HardwareSpec) -> Any:
    """Trees on log(time / baseline)."""
    import xgboost

    names, matrix = features(rows, hardware)
    target = np.log(rows["p50_us"].to_numpy() / baseline_us(rows, hardware))
    data = xgboost.DMatrix(matrix, target, weight=rows["weight"].to_numpy(), feature_names=names)
    return xgboost.train(PARAMETERS, data, ROUNDS)


def predict(booster: Any, rows: pd.DataFrame, hardware: HardwareSpec) -> np.ndarray:
    """Microseconds."""
    _, matrix = features(rows, hardware)
    return baseline_us(rows, hardware) * np.exp(booster.inplace_predict(matrix))


def save(booster: Any, folder: Path) -> None:
    """Write the trees to a folder of models."""
    (folder / MODEL).write_bytes(gzip.compress(bytes(booster.save_raw("ubj")), mtime=0))


def held_out(rows: pd.DataFrame, hardware: HardwareSpec) -> np.ndarray:
    """Every row's time by trees that saw no kernel of its iteration space."""
    space = rows.groupby(["kept", "reduced"]).ngroup().to_numpy()
    fold = np.random.default_rng(0).permutation(space.max() + 1)[space] % FOLDS
    result = np.empty(len(rows))
    for number in range(FOLDS):
        test = fold == number
        result[test] = predict(train(rows[~test], hardware), rows[test], hardware)
    return result


def accuracy(rows: pd.DataFrame, predicted: np.ndarray) -> dict[str, Any]:
    """Per kind: number, MAPE, median, p90, how far the sum of times is off, and the factors of a 90% interval."""
    measured = rows["p50_us"].to_numpy()
    result = {}
    for kind, index in rows.groupby("kind").indices.items():
        error = np.abs(predicted[index] / measured[index] - 1)
        ratio = measured[index] / predicted[index]
        low, high = np.quantile(ratio, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
        result[str(kind)] = {
            "n": len(index),
            "mape": float(error.mean()),
            "median": float(np.median(error)),
            "p90": float(np.quantile(error, 0.9)),
            "sum": float(predicted[index].sum() / measured[index].sum() - 1),
            "interval_factors": [float(min(low, 1.0)), float(max(high, 1.0))],
        }
    return result


def main() -> int:
    """Fit, judge, write."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.fit_fused", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", default="h200", choices=hardware_module.available())
    options = parser.parse_args()
    spec = hardware_module.load(options.hardware)
    folder = data_folder() / options.hardware
    rows = read_rows(folder)
    predicted = held_out(rows, spec)
    kinds = accuracy(rows, predicted)
    own = rows["weight"] == 1.0
    booster = train(rows, spec)
    target = folder / "models"
    target.mkdir(exist_ok=True)
    save(booster, target)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "hardware": options.hardware,
        "command": f"python -m perfmodel.fit_fused --hardware {options.hardware}",
        "rows": len(rows),
        "kinds": kinds,
        "kernels_as_torch_compile_fuses_them": accuracy(rows[own].reset_index(drop=True), predicted[own.to_numpy()]),
    }
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for kind, entry in kinds.items():
        print(f"{kind:10s} n {entry['n']:5d}  MAPE {entry['mape']:6.1%}  p90 {entry['p90']:6.1%}  sum {entry['sum']:+.1%}")
    print(json.dumps(manifest["kernels_as_torch_compile_fuses_them"], indent=None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
