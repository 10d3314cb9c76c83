"""Measured times of a GPU as the model is fitted to them: careful timings of several runs on one level, and quick launches."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel.data_folder import data_folder
from perfmodel.judge import SHAPE
from perfmodel.kernels import KERNELS
from perfmodel.memory_plan import launches

Array = npt.NDArray[np.float64]

# Less than a launch can take: transposing a single column launches nothing.
LEAST_US = 0.3
# A replayed GEMM of a few microseconds seems this much shorter while other processes hold the GPU, too, as the workers of a
# sweep do: whole up to the first time, nothing from the second on. A training process is alone. Measured on H200s: torch's
# GEMMs of 14 workers (sweep `dense`, two machines) against those of one process (`lrm`, `repeat`, two others), both over what
# quick launches say of their shapes: 0.25 to 0.29 us up to 5 us, 0.13 from 5 to 7, 0.03 from 10 on. The zoo's shapes measured
# again, by one process with others beside it: 0.2 to 0.34 us shorter up to 7 us; without others, 0.01 us longer.
SHARED_US, SHARED_FADES_US = 0.27, (5.0, 10.0)
# torch's grouped GEMM launches two kernels a call, and is that much shorter at any time: both over what quick launches say of
# their shapes, 477 shapes timed by 7 workers took 0.5 to 1.1 us less than 803 of the same draw timed by one process (medians
# of classes from 7 to 100 us, on two machines).
SHARED_GROUPED_US = 0.7
# Of memory-bound kernels it is this much for each GPU kernel that a call launches, whatever its time: 369 calls of what
# torch.compile makes, timed by 15 workers, and then by one process, the same binaries: 0.33 to 0.36 us a launch in every class
# from 1 to 100 us. Of our own and FBGEMM's, timed on two machines, 0.31 to 0.35.
SHARED_LAUNCH_US = 0.345


def read_timings(hardware: str, folder: Path | None = None) -> pd.DataFrame:
    """All measured rows of a GPU that the model is of, one per kernel, shape and sweep.

    The column `run` numbers the runs of `hil.collect` that the rows come from, as the sidecars tell them; without a sidecar
    each sweep counts as one. What several workers measured is brought to the level of one process (`SHARED_US`,
    `SHARED_LAUNCH_US`).

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
    frames: list[pd.DataFrame] = []
    for path in files:
        frame = pd.read_parquet(path)
        if missing := {"kernel", "m", "n", "k", "p50_us"} - set(frame.columns):
            raise ValueError(f"{path} lacks the columns {sorted(missing)}; measure it again with: python -m hil.collect")
        frame = frame.assign(**{name: value for name, value in (("groups", 1), ("sweep", "own")) if name not in frame})
        if not np.isfinite(frame["p50_us"]).all():
            raise ValueError(f"{path} has a p50_us that is not finite; measure it again with: python -m hil.collect")
        run, shared = _runs(path, frame)
        first = 1 + max((int(known["run"].max()) for known in frames if len(known)), default=-1)
        frame = frame.assign(run=first + run)
        if path.stem == "gemm":
            start, end = SHARED_FADES_US
            share = np.clip((end - frame["p50_us"]) / (end - start), 0, 1)
            grouped = frame["kernel"].str.contains("grouped").to_numpy(dtype=bool)
            frame["p50_us"] += np.where(shared, np.where(grouped, SHARED_GROUPED_US, SHARED_US * share), 0.0)
        else:
            launched = shared & (frame["p50_us"] >= LEAST_US)
            frame["p50_us"] += np.where(launched, SHARED_LAUNCH_US * launches(frame["kernel"], frame["m"], frame["k"]), 0.0)
        modelled = [name in KERNELS and KERNELS[name].kind != "linear" for name in frame["kernel"]]
        unknown = sorted(set(frame["kernel"]) - set(KERNELS))
        if unknown:
            print(f"{path.name}: rows of unknown kernels are left out: {', '.join(unknown)}", file=sys.stderr)
        frames.append(frame[modelled])
    everything = pd.concat(frames, ignore_index=True)
    return everything[everything["p50_us"] >= LEAST_US].reset_index(drop=True)


def _runs(path: Path, frame: pd.DataFrame) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Number of each row's run, from 0, and whether it had several workers, by the sidecar; by sweep where it tells nothing."""
    try:
        runs: list[dict[str, Any]] = json.loads(path.with_suffix(".json").read_text())["runs"]
        rows = [int(run["rows"]) for run in runs]
        workers = [re.search(r"--workers (\d+)", str(run["command"])) for run in runs]
    except (OSError, ValueError, KeyError, TypeError):
        rows, workers = [], []
    if sum(rows) != len(frame):
        return pd.factorize(frame["sweep"])[0].astype(np.int64), np.zeros(len(frame), dtype=bool)
    several = np.array([found is not None and int(found[1]) > 1 for found in workers], dtype=bool)
    return np.repeat(np.arange(len(rows)), rows), np.repeat(several, rows)


def read_launches(timings: pd.DataFrame, folder: Path) -> pd.DataFrame | None:
    """Quick launches of shapes that no careful timing has, from `launches.parquet` in `folder`; None where there is none.

    Trees that learn from them stay ignorant of every shape that fits or judges what comes on top.
    """
    path = folder / "launches.parquet"
    if not path.is_file():
        return None
    launches = pd.read_parquet(path).assign(kernel=lambda frame: frame["kernel"].astype(str))
    known = pd.MultiIndex.from_frame(timings[SHAPE].drop_duplicates())
    return launches[~pd.MultiIndex.from_frame(launches[SHAPE]).isin(known)].reset_index(drop=True)
