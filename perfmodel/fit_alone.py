"""Find which timings of a sweep of several workers are as long all the same as one process reads them.

    python -m perfmodel.fit_alone --hardware h200

writes `data/h200/memory_alone.json`, before `python -m perfmodel.fit` is run on new timings of memory-bound kernels; with
`--rest` of those alone that were added since, as for a fresh sweep that is to judge a fit.

What one of several workers times reads 0.345 us a launch short (`perfmodel.measured.SHARED_LAUNCH_US`), but not always: in one
of fifteen goes of sixteen workers all kernels that are measured in turn read just that much longer than in the others, as if
nothing else used the GPU. Brought to the level of one process as the others are, they would be too long by it: a call of two
microseconds by a sixth. They are found by what times are expected from other shapes. A row is told by the other kernels that were
measured with it, and never by itself, so that it stays a measurement. Of 291 kernels and shapes that two runs of sixteen workers
timed, the two differ by 3.3% on average, 12% at the 90th percentile, with all rows brought up alike, by 1.5% and 4.0% without
those that are found; where one process timed them, 3.6% and 10% become 2.2% and 5.2% (232 pairs). Of 6,327 rows that one process
timed by itself 25 would be taken for such.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel import hardware as hardware_module
from perfmodel.data_folder import data_folder
from perfmodel.fit import fitted_rows
from perfmodel.hardware import HardwareSpec
from perfmodel.held_out import held_out
from perfmodel.judge import SHAPE
from perfmodel.kernels import KERNELS, MEMORY_KINDS
from perfmodel.learn import predict, train
from perfmodel.measured import ALONE_FILE, LEAST_US, SHARED_LAUNCH_US, checksum, of_one_process, told_by_runs
from perfmodel.memory_plan import launches
from perfmodel.parallel import each

Array = npt.NDArray[np.float64]

# How far a row usually is from what is expected, as a share of that and in microseconds a launch at least. Far beyond, it says
# nothing (a Cauchy distribution).
USUAL, LEAST_OFF_US = 0.03, 0.04
# The logarithm of how much likelier the other rows must be if they were timed alone: some do, one in ten.
SURE = 2.2
# Times are expected from such as the round before has brought to one level.
ROUNDS = 2
# What was measured in one go has these alike.
IN_ONE_GO = ("run", *SHAPE, "power_w", "temperature_c")


def others_say(rows: pd.DataFrame, expected_us: Array) -> npt.NDArray[np.bool_]:
    """Whether what was measured in one go with each row was timed as if alone, (rows,), the row itself aside.

    Args:
        rows: Timings, those of several workers brought to the level of one process as if all were short, with `run`.
        expected_us: Their times by other shapes, NaN where none is expected.
    """
    number = launches(rows["kernel"], rows["m"], rows["k"])
    off = (rows["p50_us"].to_numpy(dtype=float) - expected_us) / number
    scale = np.maximum(USUAL * expected_us / number, LEAST_OFF_US)
    likelier = np.log((1 + (off / scale) ** 2) / (1 + ((off - SHARED_LAUNCH_US) / scale) ** 2))
    says = pd.Series(np.where(np.isfinite(expected_us), likelier, 0.0), index=rows.index)
    together = [rows[name] for name in IN_ONE_GO if name in rows]
    return (says.groupby(together, dropna=False).transform("sum") - says > SURE).to_numpy()


def expected(rows: pd.DataFrame, hardware: HardwareSpec) -> Array:
    """Times of rows by trees that saw nothing of their shapes, or, of what is not fitted, by all that is, in microseconds."""
    fitted = fitted_rows(rows)
    result = pd.Series(np.nan, index=rows.index)
    result[fitted["row"]] = held_out(fitted, hardware)
    rest = rows[~rows.index.isin(fitted["row"]) & rows["kernel"].isin(fitted["kernel"].unique())]
    jobs = [(str(kernel), fitted[fitted["kernel"] == kernel], mine, hardware) for kernel, mine in rest.groupby("kernel")]
    for (*_, mine, _), times in zip(jobs, each(_of_all_fitted, jobs), strict=True):
        result[mine.index] = times
    return np.asarray(result, dtype=np.float64)


def _of_all_fitted(kernel: str, fitted: pd.DataFrame, rows: pd.DataFrame, hardware: HardwareSpec) -> Array:
    return predict(train(kernel, fitted, hardware), kernel, rows, hardware)


def find(rows: pd.DataFrame, hardware: HardwareSpec) -> npt.NDArray[np.bool_]:
    """`others_say` of rows, beside times that are expected round by round from such as are on one level, (rows,).

    Args:
        rows: As `others_say` takes them, with `shared`, `settled` and their index as `row`.
        hardware: The GPU.
    """
    alone = np.zeros(len(rows), dtype=bool)
    short = SHARED_LAUNCH_US * launches(rows["kernel"], rows["m"], rows["k"])
    for _ in range(ROUNDS):
        time = rows["p50_us"].to_numpy(dtype=float) - np.where(alone & rows["shared"].to_numpy(), short, 0.0)
        alone = others_say(rows, expected(rows.assign(p50_us=time), hardware))
    return alone


def read_rows(path: Path) -> pd.DataFrame:
    """The timings at `path` of memory-bound kernels, all of several workers brought to the level of one process as if short."""
    frame = pd.read_parquet(path).reset_index(drop=True)
    frame = told_by_runs(path, frame).assign(row=np.arange(len(frame)), settled=True)
    frame = of_one_process(frame, frame["shared"].to_numpy())
    memory = [name in KERNELS and KERNELS[name].kind in MEMORY_KINDS for name in frame["kernel"]]
    return frame[np.array(memory) & (frame["p50_us"] >= LEAST_US)]


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.fit_alone", description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200", choices=hardware_module.available())
    parser.add_argument(
        "--rest", action="store_true", help="tell of timings that were added since; those before stay as a fit has them"
    )
    options = parser.parse_args(arguments)
    hardware = hardware_module.load(options.hardware)
    path = data_folder() / hardware.name / "memory.parquet"
    rows, whole = read_rows(path), pd.read_parquet(path, columns=["p50_us"])
    alone, shared = find(rows, hardware), rows["shared"].to_numpy()
    if options.rest:
        if not path.with_name(ALONE_FILE).is_file():
            parser.error(f"{path.with_name(ALONE_FILE)} is not there: leave out --rest")
        known = json.loads(path.with_name(ALONE_FILE).read_text())
        if len(whole) < known["timings"] or checksum(whole[: known["timings"]]) != known["checksum"]:
            parser.error(f"{path.with_name(ALONE_FILE)} is of other timings: leave out --rest")
        alone = np.where(rows["row"] < known["timings"], rows["row"].isin(known["rows"]), alone)
    document = {
        "schema_version": 1,
        "command": f"python -m perfmodel.fit_alone --hardware {options.hardware}" + (" --rest" if options.rest else ""),
        "method": "rows of memory.parquet that several workers timed as one process does, as told by what was measured with them",
        "timings": len(whole),
        "checksum": checksum(whole),
        "shared": int(shared.sum()),
        "rows": rows["row"][alone & shared].tolist(),
    }
    path.with_name(ALONE_FILE).write_text(json.dumps(document) + "\n")
    print(f"{ALONE_FILE}: {len(document['rows'])} of {document['shared']} rows of several workers; of one process they would be")
    for library, mine in rows[~shared].groupby(rows["kernel"].str.partition("/")[0]):
        print(f"{library}: {int(alone[rows.index.isin(mine.index)].sum())} of {len(mine)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
