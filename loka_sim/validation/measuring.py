"""Measuring in processes of their own, so that each has the GPU's memory to itself and a killed one loses little."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loka_sim.errors import DataError

if TYPE_CHECKING:
    import pandas

    from hil.kernels.base import Shape

# Of 16 cores or more, what compiles kernels at the same time; measuring is one at a time whatever the number.
MOST_WORKERS = 15


def run(module: str, arguments: Sequence[str], *, accept: Sequence[int] = (0,), launcher: Sequence[str] = ()) -> int:
    """Run `python -m MODULE ARGUMENTS`, its standard output on our standard error; ended with us.

    Raises:
        DataError: it leaves another code than those accepted.
    """
    command = [sys.executable, *(launcher or ()), "-m", module, *arguments]
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    child = subprocess.Popen(command, stdout=sys.stderr, env=environment, start_new_session=True)
    try:
        code = child.wait()
    except BaseException:
        # The whole group: torchrun and the compiling workers are children of the child.
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
        raise
    if code not in accept:
        raise DataError(f"python -m {module} ended with code {code}; its last lines above say why")
    return code


def sweep(folder: Path, family: str, name: str, shapes: Iterable[Shape], seconds: float, kernels: Sequence[str]) -> None:
    """Measure shapes of a family ('gemm' or 'memory') under those of `kernels` that may run them, in the order given.

    What the time does not suffice for is left out; what is in `folder` already is not measured again.
    """
    shapes = list(shapes)
    if not shapes or seconds <= 0:
        return
    handle, path = tempfile.mkstemp(prefix=f"loka-sim-{name}-", suffix=".csv")
    try:
        with os.fdopen(handle, "w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(("m", "n", "k", "groups"))
            writer.writerows((s.m, s.n, s.k, s.groups) for s in shapes)
        workers = min(MOST_WORKERS, max(1, (os.cpu_count() or 1) - 1)) if family == "memory" else 1
        arguments = [family, "--out", str(folder), "--shapes", path, "--sweep", name]
        # 1: nothing new was measured, because everything was already or the time was too short.
        arguments += ["--minutes", f"{seconds / 60:.3f}", "--workers", str(workers), "--kernels", *kernels]
        run("hil.collect", arguments, accept=(0, 1))
    finally:
        os.unlink(path)


def timings(folder: Path) -> pandas.DataFrame:
    """What `sweep` has measured into a folder, all families together; empty when nothing.

    Less than a launch can take means that nothing was launched (the transposition of a single column): no time.
    """
    import pandas

    from perfmodel.fit import LEAST_US

    found = [pandas.read_parquet(path) for family in ("gemm", "memory") if (path := folder / f"{family}.parquet").is_file()]
    columns = ["kernel", "m", "n", "k", "groups", "p10_us", "p50_us", "p90_us", "sweep", "eager_us"]
    if not found:
        return pandas.DataFrame(columns=columns)
    frame = pandas.concat(found, ignore_index=True)
    frame = frame[frame["p50_us"] >= LEAST_US].reset_index(drop=True)
    return frame if "eager_us" in frame else frame.assign(eager_us=float("nan"))


def read_json(path: Path) -> dict | None:
    """A stage's result; None where it is not there or was not finished."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
