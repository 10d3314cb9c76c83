"""Fit what parts of memory-bound launches cost (`perfmodel/memory_costs.py`), which the trees' baseline is made of.

    python -m perfmodel.fit_memory_costs --hardware h200

writes `data/h200/memory_costs.json`, from the timings that `python -m perfmodel.fit` fits, before which it is run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from perfmodel import hardware as hardware_module
from perfmodel.data_folder import data_folder
from perfmodel.fit import fitted_rows
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import KERNELS, MEMORY_KINDS
from perfmodel.measured import read_timings
from perfmodel.memory_costs import FILE, terms

# Rounds of the fit, and the relative error from which on a timing counts less.
_ROUNDS, _BEND = 6, 0.04


def fitted(
    kernel: str, rows: pd.DataFrame, hardware: HardwareSpec, others: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Costs that come closest to a kernel's timings, by name: least relative squares, in which what is far off counts less.

    `others` are those of kernels that it may be made of, by name.
    """
    m, k, time = (rows[name].to_numpy(dtype=float) for name in ("m", "k", "p50_us"))
    found = terms(kernel, m, k, hardware, others)
    matrix, weight = np.column_stack(list(found.values())), 1 / time
    for _ in range(_ROUNDS):
        costs, _ = nnls(matrix * weight[:, None], time * weight)
        off = np.abs(matrix @ costs / time - 1)
        weight = np.minimum(1, np.sqrt(_BEND / np.maximum(off, 1e-6))) / time
    # What is nothing on every row is left out.
    share = costs * matrix.mean(axis=0) / (matrix @ costs).mean()
    return {name: float(f"{cost:.4g}") for name, cost, some in zip(found, costs, share, strict=True) if some > 1e-4}


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.fit_memory_costs", description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200", choices=hardware_module.available())
    options = parser.parse_args(arguments)
    hardware = hardware_module.load(options.hardware)
    rows = fitted_rows(read_timings(hardware.name))
    kernels: dict[str, dict[str, float]] = {}
    for kernel, spec in KERNELS.items():
        mine = rows[rows["kernel"] == kernel]
        if spec.kind in MEMORY_KINDS and len(mine):
            kernels[kernel] = fitted(kernel, mine, hardware, kernels)
    document = {
        "schema_version": 1,
        "command": f"python -m perfmodel.fit_memory_costs --hardware {options.hardware}",
        "method": "least relative squares, no cost negative, of the terms of perfmodel/memory_costs.py, in microseconds",
        "rows": int(rows["kernel"].isin(list(kernels)).sum()),
        "kernels": kernels,
    }
    path = data_folder() / hardware.name / FILE
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{path.name}: {len(kernels)} kernels, {document['rows']} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
