"""Fit how long torch's optimizers take (`perfmodel/optimizers.py`) to steps measured launch by launch.

    python -m perfmodel.fit_optimizers --hardware h200

prints the constants, and how far steps over lists of tensors that were not fitted to, the last quarter of them, are from what
they give.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from perfmodel.data_folder import data_folder
from perfmodel.hardware import available
from perfmodel.optimizers import OPTIMIZERS, Optimizer, step_us

FITTED = ("launch_us", "chunk_us", "bandwidth_tbs", "bend")
DTYPE = "bfloat16"


def measured(hardware: str) -> list[dict[str, Any]]:
    """Steps on bf16 parameters: `optimizer`, `sizes`, `us`."""
    rows = json.loads((data_folder() / hardware / "optimizers.json").read_text())["rows"]
    return [{**row, "us": sum(row["launch_us"])} for row in rows if row["dtype"] == DTYPE]


def split(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps to fit to, and those over the last quarter of the lists."""
    lists = list(dict.fromkeys(tuple(row["sizes"]) for row in rows))
    held_out = set(lists[len(lists) - len(lists) // 4 :])
    return [r for r in rows if tuple(r["sizes"]) not in held_out], [r for r in rows if tuple(r["sizes"]) in held_out]


def errors(kind: str, rows: list[dict[str, Any]], made: Optimizer | None = None) -> npt.NDArray[np.float64]:
    """Logarithm of predicted over measured of each step of a kind of optimizer; of the present constants where none are given."""
    own = [row for row in rows if row["optimizer"] == kind]
    return np.log([step_us(row["sizes"], kind, made) / row["us"] for row in own])


def fitted(kind: str, rows: list[dict[str, Any]]) -> Optimizer:
    """The constants that come closest, by least squares of relative errors."""
    begin = OPTIMIZERS[kind]

    def made(logs: npt.NDArray[np.float64]) -> Optimizer:
        return replace(begin, **dict(zip(FITTED, np.exp(logs).tolist(), strict=True)))

    start = np.log([getattr(begin, name) for name in FITTED])
    return made(least_squares(lambda logs: errors(kind, rows, made(logs)), start).x)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.fit_optimizers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", default="h200", choices=available())
    options = parser.parse_args(arguments)
    known, held_out = split(measured(options.hardware))
    print(f"{'':14s}" + "".join(f"{name:>15s}" for name in FITTED) + "   held out: n  mean   90%  worst")
    for kind in OPTIMIZERS:
        made = fitted(kind, known)
        off = np.abs(np.expm1(errors(kind, held_out, made)))
        figures = f"{len(off):14d} {off.mean():5.1%} {np.percentile(off, 90):5.1%} {off.max():6.1%}"
        print(f"{kind:14s}" + "".join(f"{getattr(made, name):15.3g}" for name in FITTED) + figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
