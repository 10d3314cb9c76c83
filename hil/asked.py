"""Ask cuBLAS which kernel it takes for every call that is timed carefully.

    python -m hil.asked --out data/h100

No network learns from these (`hil.choices` leaves such shapes out), so that they judge them: `benchmarks/told_kernels.py`. Calls
of more values than an operand or a result has but in the largest batches are left out. Written: `choices/asked.parquet`, rows of
`kernel`, the shape and `perfmodel.choice.PARTS`, and a sidecar beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from hil.asking import KERNELS_ASKED, asked_of
from hil.choices import NETWORKS
from hil.command import Parser
from hil.files import write_atomic
from hil.fingerprint import fingerprint, has_gpu
from hil.kernels.base import Shape
from perfmodel.choice import LARGE_VALUES
from perfmodel.judge import SHAPE

FILE, SIDECAR = "asked.parquet", "asked.json"


def careful_calls(timings: pd.DataFrame) -> list[tuple[str, Shape]]:
    """Calls of GEMMs whose kernel cuBLAS chooses, each once.

    Args:
        timings: Rows with `kernel` and the shape.
    """
    wanted = timings[timings["kernel"].isin(KERNELS_ASKED)][["kernel", *SHAPE]].drop_duplicates()
    rows = zip(wanted["kernel"].astype(str), wanted[SHAPE].astype(int).to_numpy().tolist(), strict=True)
    calls = [(kernel, Shape(*sizes)) for kernel, sizes in rows]
    return [
        (name, shape) for name, shape in calls if max(shape.largest_operand, shape.groups * shape.m * shape.n) <= LARGE_VALUES
    ]


def write(folder: Path, answers: pd.DataFrame, run: dict[str, Any]) -> None:
    """Put answers and what is said of them into a folder's `choices/`, each whole or not at all."""
    into = folder / NETWORKS
    into.mkdir(parents=True, exist_ok=True)
    method = "the kernel of each captured call of gemm.parquet, in perfmodel.choice.PARTS; see hil/asked.py"
    document = json.dumps({"schema_version": 1, "method": method, "run": run, "rows": len(answers)}, indent=1) + "\n"
    small = {"kernel": "category", **dict.fromkeys(answers.columns[1:], "int32")}
    write_atomic(into / FILE, partial(answers.astype(small).to_parquet, index=False, compression="zstd", compression_level=15))
    write_atomic(into / SIDECAR, partial(Path.write_text, data=document))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = Parser(prog="python -m hil.asked", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of gemm.parquet, and of choices/ for the answers")
    options = parser.parse_args(arguments)
    if not (timings := options.out / "gemm.parquet").is_file():
        parser.error(f"--out {options.out} has no gemm.parquet: python -m hil.collect gemm --out {options.out} times GEMMs first")
    if not has_gpu():
        return 3
    calls = careful_calls(pd.read_parquet(timings, columns=["kernel", *SHAPE]))
    answers = asked_of(calls)
    command = f"python -m hil.asked --out {options.out}"
    write(options.out, answers.sort_values(["kernel", *SHAPE], ignore_index=True), {"command": command, **fingerprint()})
    print(f"{len(answers)} answers", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
