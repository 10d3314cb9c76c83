"""Fit the costs of torch's fused attention to timed calls, and judge them on calls held out.

    python -m perfmodel.fit_attention --hardware h200

reads `data/h200/attention.parquet` (`python -m hil.fused attention`, then `python -m hil.attention`) and writes
`data/h200/models/attention.json`.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import nnls

from perfmodel import hardware as hardware_module
from perfmodel.attention import FILE, KINDS, NAMES, PADDED, SCHEMA_VERSION, terms
from perfmodel.data_folder import data_folder

Array = npt.NDArray[np.float64]

FOLDS, COVERAGE = 10, 0.90


def matrix_of(kind: str, rows: pd.DataFrame) -> Array:
    """`terms` of timed calls."""
    sizes = (rows[name].to_numpy(dtype=float) for name in ("groups", "queries", "keys", "features", "causal"))
    return terms(kind, *sizes)


def fitted(matrix: Array, us: Array) -> Array:
    """Costs of least relative squares, none negative."""
    costs: Array = nnls(matrix / us[:, None], np.ones(len(us)))[0]
    return costs


def held_out(matrix: Array, us: Array) -> Array:
    """Each call's time by costs that saw none of its fold."""
    fold = np.random.default_rng(0).permutation(len(us)) % FOLDS
    result = np.empty(len(us))
    for number in range(FOLDS):
        test = fold == number
        result[test] = matrix[test] @ fitted(matrix[~test], us[~test])
    return result


def main() -> int:
    """Fit, judge, write."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.fit_attention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", default="h200", choices=hardware_module.available())
    options = parser.parse_args()
    folder = data_folder() / options.hardware
    table = pd.read_parquet(folder / "attention.parquet")
    kinds: dict[str, Any] = {}
    for kind, padded in product(KINDS, (False, True)):
        rows = table[(table["kind"] == kind) & (table["padded"] == padded)]
        if rows.empty:
            continue
        matrix, us = matrix_of(kind + PADDED * padded, rows), rows["p50_us"].to_numpy(dtype=float)
        told = held_out(matrix, us)
        error, ratio = np.abs(told / us - 1), us / told
        low, high = np.quantile(ratio, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
        costs = {name: float(f"{cost:.4g}") for name, cost in zip(NAMES, fitted(matrix, us), strict=True) if cost > 0}
        kinds[kind + PADDED * padded] = {
            "n": len(rows), "mape": float(error.mean()), "median": float(np.median(error)), "p90": float(np.quantile(error, 0.9)),
            "worst": float(error.max()), "interval_factors": [float(min(low, 1.0)), float(max(high, 1.0))], "costs_us": costs,
        }  # fmt: skip
        said = f"MAPE {error.mean():.1%}  p90 {np.quantile(error, 0.9):.1%}  worst {error.max():.1%}"
        print(f"{kind + PADDED * padded:25s} n {len(rows)}  {said}")
    command = f"python -m perfmodel.fit_attention --hardware {options.hardware}"
    document = {"schema_version": SCHEMA_VERSION, "hardware": options.hardware, "command": command, "kinds": kinds}
    (folder / "models" / FILE).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
