"""The learned kernel-time model: gradient-boosted trees on the logarithm of time over roofline."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel import hardware as hardware_module
from perfmodel.data_folder import data_folder
from perfmodel.features import features
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import KERNELS
from perfmodel.roofline import roofline_us

Array = npt.NDArray[np.float64]

# Added to the roofline, so that the target stays of order one for launches that take a microsecond whatever their size.
LAUNCH_FLOOR_US = 1.0
# Edges of the size classes, in microseconds of predicted time, within which intervals are calibrated.
SIZE_CLASSES_US = (5.0, 20.0, 100.0)


def size_class(time_us: Array) -> npt.NDArray[np.int64]:
    """Index of the size class of each time: below 5 us, 20 us, 100 us, and above."""
    return np.searchsorted(np.asarray(SIZE_CLASSES_US), time_us, side="right")


def baseline_us(kernel: str, m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec) -> Array:
    """What the trees correct: the roofline plus a launch, in microseconds."""
    return roofline_us(kernel, m, n, k, groups, hardware) + LAUNCH_FLOOR_US


def model_file(kernel: str) -> str:
    """File name of a kernel's trees inside the models folder."""
    return kernel.replace("/", "__") + ".ubj.gz"


def columns_of(frame: pd.DataFrame) -> tuple[Array, Array, Array, Array]:
    """The (m, n, k, groups) columns as float arrays; groups is 1 where there is no such column."""
    m, n, k = (frame[name].to_numpy(dtype=np.float64) for name in ("m", "n", "k"))
    groups = frame["groups"].to_numpy(dtype=np.float64) if "groups" in frame else np.ones_like(m)
    return m, n, k, groups


@dataclass(frozen=True)
class PerfModel:
    """Predicts kernel times on one GPU.

    Attributes:
        hardware: The GPU.
        folder: Where the trees lie.
        manifest: What they were fitted on, how good they are on held-out shapes, and their interval factors.
    """

    hardware: HardwareSpec
    folder: Path
    manifest: dict[str, Any]

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the fitted model and its data."""
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def _boosters(self) -> dict[str, Any]:
        return {}

    def _booster(self, kernel: str) -> Any:
        if kernel not in self._boosters:
            import xgboost

            booster = xgboost.Booster()
            booster.load_model(bytearray(gzip.decompress((self.folder / model_file(kernel)).read_bytes())))
            booster.set_param({"nthread": 2})
            self._boosters[kernel] = booster
        return self._boosters[kernel]

    def predict(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Times of kernel calls.

        Args:
            frame: Columns `kernel`, `m`, `n`, `k` and optionally `groups` (default 1). For a memory-bound kernel `m` and
                `k` are the rows and columns of its input and `n` is 1.

        Returns:
            Columns `time_us`, `low_us`, `high_us` (a 90% interval), with the index and the order of `frame`.

        Raises:
            ValueError: an unknown kernel, one without measurements on this GPU, or a dimension below 1.
        """
        missing = {"kernel", "m", "n", "k"} - set(frame.columns)
        if missing:
            raise ValueError(f"the frame lacks the columns {sorted(missing)}; predict needs kernel, m, n, k")
        m, n, k, groups = columns_of(frame)
        if len(frame) and not min(m.min(), n.min(), k.min(), groups.min()) >= 1:
            raise ValueError("m, n, k and groups must be at least 1")
        result = np.empty((len(frame), 3))
        for kernel, rows in frame.reset_index(drop=True).groupby("kernel", observed=True).indices.items():
            name = str(kernel)
            if name not in self.manifest["kernels"]:
                known = "has no measurements on" if name in KERNELS else "is not a kernel; known on"
                raise ValueError(f"kernel {name!r} {known} {self.hardware.name}: {', '.join(sorted(self.manifest['kernels']))}")
            sizes = (m[rows], n[rows], k[rows], groups[rows])
            _, matrix = features(name, *sizes, self.hardware)
            time = baseline_us(name, *sizes, self.hardware) * np.exp(
                self._booster(name).inplace_predict(matrix).astype(np.float64)
            )
            factors = np.asarray(self.manifest["kernels"][name]["interval_factors"])[size_class(time)]
            result[rows] = np.stack([time, time * factors[:, 0], time * factors[:, 1]], axis=1)
        return pd.DataFrame(result, columns=["time_us", "low_us", "high_us"], index=frame.index)

    def in_range(self, frame: pd.DataFrame) -> pd.Series:
        """Whether each call lies inside the sizes that the kernel was measured at (every dimension, and their product)."""
        sizes = dict(zip(("m", "n", "k", "groups"), columns_of(frame), strict=True))
        sizes["product"] = sizes["m"] * sizes["n"] * sizes["k"] * sizes["groups"]
        inside = np.ones(len(frame), dtype=bool)
        for kernel, rows in frame.reset_index(drop=True).groupby("kernel", observed=True).indices.items():
            for name, (low, high) in self.manifest["kernels"][str(kernel)]["range"].items():
                inside[rows] &= (sizes[name][rows] >= low) & (sizes[name][rows] <= high)
        return pd.Series(inside, index=frame.index)


def load(hardware: str = "h200", calibration: Path | None = None) -> PerfModel:
    """The performance model of a GPU.

    Args:
        hardware: A name of `perfmodel.hardware.available()`.
        calibration: A folder with models of the user's own machine, in the layout of `data/<hardware>/models`.

    Raises:
        ValueError: there are no data for that hardware.
        FileNotFoundError: the models folder is incomplete.
    """
    spec = hardware_module.load(hardware)
    folder = calibration or data_folder() / hardware / "models"
    path = folder / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; fit it with: python -m perfmodel.fit --hardware {hardware}")
    return PerfModel(spec, folder, json.loads(path.read_text()))
