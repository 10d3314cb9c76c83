"""How good predictions of measured rows are: per kernel, per kind, and the worst of them by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel.kernels import KERNELS

Array = npt.NDArray[np.float64]

SHAPE = ["m", "n", "k", "groups"]


def accuracy_of(rows: pd.DataFrame, time_us: Array, low_us: Array, high_us: Array) -> dict[str, Any]:
    """Accuracy of predictions of `rows`: overall, per kernel and per kind; and the ten worst rows."""
    measured = rows["p50_us"].to_numpy()
    error = np.abs(time_us / measured - 1)
    inside = (measured >= low_us) & (measured <= high_us)

    def of(index: np.ndarray) -> dict[str, float]:
        e = error[index]
        return {
            "n": len(e), "mape": float(e.mean()), "median": float(np.median(e)), "p90": float(np.quantile(e, 0.9)),
            "worst": float(e.max()), "coverage": float(inside[index].mean()),
        }  # fmt: skip

    kinds = np.array([KERNELS[name].kind for name in rows["kernel"]], dtype=object)
    names = rows["kernel"].to_numpy(dtype=object)
    worst = [
        {
            **{"kernel": str(rows["kernel"].iloc[i])}, **{name: int(rows[name].iloc[i]) for name in SHAPE},
            "predicted_us": float(time_us[i]), "measured_us": float(measured[i]), "error": float(time_us[i] / measured[i] - 1),
        }
        for i in np.argsort(-error)[:10]
    ]  # fmt: skip
    return {
        "all": of(np.arange(len(rows))) if len(rows) else {},
        "kernels": {str(name): of(np.flatnonzero(names == name)) for name in sorted(set(names))},
        "kinds": {str(kind): of(np.flatnonzero(kinds == kind)) for kind in sorted(set(kinds))},
        "worst": worst,
    }
