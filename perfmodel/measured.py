"""Measured times of a GPU as the model is fitted to them: careful timings of several runs on one level, and quick launches."""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel.choice import Choice
from perfmodel.data_folder import data_folder
from perfmodel.judge import SHAPE
from perfmodel.kernels import KERNELS, MEMORY_KINDS, library_of
from perfmodel.memory_plan import launches
from perfmodel.opened import choice_file
from perfmodel.steady import settled

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
_LAUNCHES = re.compile(r"launches(\d*)\.parquet")
# Beside the timings of memory-bound kernels: which of those that several workers took are as long all the same as one process
# reads them (`perfmodel.fit_alone`).
ALONE_FILE = "memory_alone.json"
# A GPU that runs nothing but FBGEMM's GEMMs keeps a higher clock than one with torch's among them, as a training step has it: 170
# shapes of the sweep `dense`, timed once so and once beside torch's (sweep `beside`), differed beyond 100 us at half the kernel's
# best rate or more, all others were as long. So do torch's blocks of 128 (last runs of the sweep `mixed`); our own, which are
# slower, leave it cool, too (runs of both, sweeps `wide` and `lrm`). Of 1,174, 192, 231 and 270 such shapes that ran so the model
# before this one said these factors more, over what they took, than of 140, 413, 227 and 1,243 beside all of torch's; medians. So
# our own were found later, of 523 to 690 and 567 to 731, held out fold by fold: those of split accumulation, which work longest.
ALONE_SHARE = {
    "fbgemm/fp8_block128": 1.133, "fbgemm/fp8_rowwise_fast": 1.055, "fbgemm/fp8_rowwise_split": 1.066, "torch/fp8_block128": 1.15,
    "loka/fp8_tensorwise_fast": 1.009, "loka/fp8_tensorwise_split": 1.027, "loka/fp8_rowwise_fast": 1.018,
    "loka/fp8_rowwise_split": 1.029,
}  # fmt: skip
ALONE_FROM_US, ALONE_BEST_SHARE, BEST_QUANTILE = 100.0, 0.5, 0.99


def read_timings(hardware: str, folder: Path | None = None) -> pd.DataFrame:
    """All measured rows of a GPU that the model is of, one per kernel, shape and sweep.

    The column `run` numbers the runs of `hil.collect` that the rows come from, as the sidecars tell them; without a sidecar
    each sweep counts as one. What several workers measured is brought to the level of one process (`SHARED_US`,
    `SHARED_GROUPED_US`, `SHARED_LAUNCH_US`; the column `shared` says which were), but for what is known to have been timed at
    that level (the column `alone`, by `timed_alone`), what cool GEMMs took by themselves to that of a step (`ALONE_SHARE`). The
    column `settled` says which rows were timed at a clock of their own (`perfmodel.steady`), `own_clock` which kernels
    torch.compile's own clock chose among its candidates, as sidecars tell it (`hil.candidates`).

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
        first = 1 + max((int(known["run"].max()) for known in frames if len(known)), default=-1)
        frame = told_by_runs(path, frame, first)
        frame["settled"], frame["alone"] = settled(frame), timed_alone(path, frame)
        frame = of_a_step(of_one_process(frame, (frame["shared"] & ~frame["alone"]).to_numpy()))
        modelled = [name in KERNELS and KERNELS[name].kind != "linear" and not KERNELS[name].across for name in frame["kernel"]]
        unknown = sorted(set(frame["kernel"]) - set(KERNELS))
        if unknown:
            print(f"{path.name}: rows of unknown kernels are left out: {', '.join(unknown)}", file=sys.stderr)
        frames.append(frame[modelled])
    everything = pd.concat(frames, ignore_index=True)
    return everything[everything["p50_us"] >= LEAST_US].reset_index(drop=True)


def of_one_process(frame: pd.DataFrame, shared: npt.NDArray[np.bool_]) -> pd.DataFrame:
    """Timings with those that were `shared` (rows,), measured beside other processes, at the level of one process.

    The level is of what is typical; every quantile of a row moves by as much.
    """
    time = frame["p50_us"].to_numpy(dtype=float)
    kinds = np.array([KERNELS[name].kind if name in KERNELS else "" for name in frame["kernel"]], dtype=object)
    memory, grouped = np.isin(kinds, MEMORY_KINDS), frame["kernel"].str.contains("fp8_grouped")
    start, end = SHARED_FADES_US
    short = np.where(grouped, SHARED_GROUPED_US, SHARED_US * np.clip((end - time) / (end - start), 0, 1))
    short[memory] = SHARED_LAUNCH_US * launches(frame["kernel"][memory], frame["m"][memory], frame["k"][memory])
    # What launches nothing is not short.
    short = np.where(shared & ~(memory & (time < LEAST_US)), short, 0.0)
    moved = [name for name in ("p10_us", "p50_us", "p90_us") if name in frame]
    return frame.assign(**{name: frame[name] + short for name in moved})


def of_a_step(frame: pd.DataFrame) -> pd.DataFrame:
    """Timings, by `run`, with those of GEMMs that ran without torch's hot ones as they are among those.

    Every quantile of a row is longer by the same factor.
    """
    hot = {name for name, of in KERNELS.items() if of.kind == "gemm" and library_of(name) == "torch"} - set(ALONE_SHARE)
    mixed = frame["run"].isin(frame["run"][frame["kernel"].isin(hot)])
    factor = np.ones(len(frame))
    for name, share in ALONE_SHARE.items():
        of_it = (frame["kernel"] == name).to_numpy()
        if of_it.any():
            time = frame["p50_us"].to_numpy(dtype=float)
            rate = frame[["m", "n", "k"]].to_numpy(dtype=float).prod(axis=1) / np.maximum(time, LEAST_US)
            fast = rate >= ALONE_BEST_SHARE * np.quantile(rate[of_it], BEST_QUANTILE)
            factor[of_it & ~mixed.to_numpy() & fast & (time > ALONE_FROM_US)] = share
    moved = [name for name in ("p10_us", "p50_us", "p90_us") if name in frame]
    return frame.assign(**{name: frame[name] * factor for name in moved})


def told_by_runs(path: Path, frame: pd.DataFrame, first: int = 0) -> pd.DataFrame:
    """The timings at `path` with what their sidecar tells of their runs.

    `run` numbers them from `first`, `shared` says whether a run had several workers, `own_clock` whether torch.compile's own
    clock chose a kernel. By sweep, and neither, where the sidecar tells nothing.
    """
    try:
        runs: list[dict[str, Any]] = json.loads(path.with_suffix(".json").read_text())["runs"]
        rows = [int(run["rows"]) for run in runs]
        workers = [re.search(r"--workers (\d+)", str(run["command"])) for run in runs]
        own_clock = [run.get("candidates") == "own clock" for run in runs]
    except (OSError, ValueError, KeyError, TypeError):
        rows, workers, own_clock = [], [], []
    if sum(rows) != len(frame):
        return frame.assign(run=first + pd.factorize(frame["sweep"])[0].astype(np.int64), shared=False, own_clock=False)
    several = np.array([found is not None and int(found[1]) > 1 for found in workers], dtype=bool)
    run = np.repeat(np.arange(len(rows)), rows)
    torchs = (frame["kernel"].map(library_of) == "torch").to_numpy(dtype=bool)
    return frame.assign(run=first + run, shared=several[run], own_clock=np.array(own_clock, dtype=bool)[run] & torchs)


def runs_shared(path: Path, frame: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether each row of the timings at `path` was measured by a run of several workers, (rows,)."""
    return told_by_runs(path, frame)["shared"].to_numpy(dtype=bool)


def timed_alone(path: Path, frame: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which rows of the timings at `path` several workers took as one process would have, (rows,), by `ALONE_FILE` beside them.

    None where there is no such file, of another family's timings, and of rows that were added since it was made.
    """
    alone, known = np.zeros(len(frame), dtype=bool), path.with_name(ALONE_FILE)
    if path.stem != "memory" or not known.is_file():
        return alone
    document: dict[str, Any] = json.loads(known.read_text())
    if len(frame) < document["timings"] or checksum(frame[: document["timings"]]) != document["checksum"]:
        print(f"{known} is of other timings and left aside; make it again with: python -m perfmodel.fit_alone", file=sys.stderr)
        return alone
    alone[document["rows"]] = True
    return alone


def checksum(frame: pd.DataFrame) -> int:
    """Of the times as they were measured."""
    return zlib.crc32(frame["p50_us"].to_numpy(dtype="<f8").tobytes())


def launch_file(folder: Path, number: int) -> Path:
    """The file of quick launches with a number from 1: `launches.parquet`, `launches2.parquet` and on."""
    return folder / f"launches{number if number > 1 else ''}.parquet"


def launch_files(folder: Path) -> list[Path]:
    """Those that are there, in the order of their measurement."""
    found = {int(part[1] or 1): path for path in folder.glob("launches*.parquet") if (part := _LAUNCHES.fullmatch(path.name))}
    return [found[number] for number in sorted(found)]


def read_launches(timings: pd.DataFrame, folder: Path) -> pd.DataFrame | None:
    """Quick launches of shapes that no careful timing has, from `launch_files` of `folder`; None where there are none.

    Trees that learn from them stay ignorant of every shape that fits or judges what comes on top.

    Raises:
        FileNotFoundError: their sidecar is there without them, as in an installed package, or a file among them is missing.
    """
    files = launch_files(folder)
    if not files and not (folder / "launches.json").is_file():
        return None
    expected = (launch_file(folder, number) for number in range(1, max(len(files), 1) + 1))
    if missing := [path for path in expected if path not in files]:
        raise FileNotFoundError(f"{missing[0]} is missing, as in every installed package; fit in a checkout of loka-sim")
    launches = pd.concat(
        [pd.read_parquet(path).assign(kernel=lambda frame: frame["kernel"].astype(str)) for path in files], ignore_index=True
    )
    known = pd.MultiIndex.from_frame(timings[SHAPE].drop_duplicates())
    return launches[~pd.MultiIndex.from_frame(launches[SHAPE]).isin(known)].reset_index(drop=True)


def read_choices(folder: Path) -> dict[str, Choice]:
    """What tells which of its kernels a library chooses (`hil.choices`), by kernel; none where `choices` is not in `folder`.

    Raises:
        ValueError: a file is damaged; it is named.
    """
    found: dict[str, Choice] = {}
    for kernel in KERNELS:
        path = folder / "choices" / choice_file(kernel)
        if path.is_file():
            try:
                found[kernel] = Choice.load(gzip.decompress(path.read_bytes()))
            except (EOFError, OSError, zlib.error, ValueError) as error:
                raise ValueError(f"{path} is truncated or damaged; make it again with: python -m hil.choices") from error
    return found
