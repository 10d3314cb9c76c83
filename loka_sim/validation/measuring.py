"""Measuring in processes of their own, so that each has the GPU's memory to itself and a killed one loses little."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from loka_sim.errors import DataError

if TYPE_CHECKING:
    import pandas

    from hil.kernels.base import Shape

# Of 16 cores or more, what compiles kernels at the same time; measuring is one at a time whatever the number.
MOST_WORKERS = 15
# Cores that the workers leave to the process that feeds the GPU, and to what is compiled beside.
OTHERS = 3
# Threads of one process: more wait for each other where others compile on the same cores.
MOST_THREADS = 4
# What a process that is past its time may take to end by itself.
GRACE_S = 20.0
# In the folder of the timings: held by whoever uses the GPU for long.
LOCK = "gpu.lock"

Wanted = Mapping["Shape", Sequence[str]]
"""Shapes in the order of their worth, and the kernels to measure on each."""


class Child:
    """`python -m MODULE ARGUMENTS`, its standard output on our standard error; ended with us, and when a block is left."""

    def __init__(self, module: str, arguments: Sequence[str], launcher: Sequence[str] = ()) -> None:
        """Starts it."""
        command = [sys.executable, *launcher, "-m", module, *arguments]
        paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"OMP_NUM_THREADS": str(MOST_THREADS), **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.module = module
        self._process = subprocess.Popen(command, stdout=sys.stderr, env=environment, start_new_session=True)

    def __enter__(self) -> Child:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends it, and whatever it started."""
        self.stop()

    def stop(self) -> None:
        """End it where it still runs: the whole group, for torchrun and compiling workers are its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def wait(self, accept: Sequence[int] = (0,), seconds: float | None = None) -> int | None:
        """Its exit code; None where it had not ended after so many seconds and was stopped.

        Raises:
            DataError: it left another code than those accepted.
        """
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            return None
        except BaseException:
            self.stop()
            raise
        if code not in accept:
            raise DataError(f"python -m {self.module} ended with code {code}; its last lines above say why")
        return code


@contextmanager
def ending_children() -> Iterator[None]:
    """What a terminated process started ends with it, as what an interrupted one did."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(
    module: str,
    arguments: Sequence[str],
    *,
    accept: Sequence[int] = (0,),
    launcher: Sequence[str] = (),
    seconds: float | None = None,
) -> int | None:
    """Run a `Child` to its end, or for so many seconds; see `Child.wait`."""
    with Child(module, arguments, launcher) as child:
        return child.wait(accept, seconds)


def workers() -> int:
    """Processes that may compile in parallel here."""
    return min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) - OTHERS))


def sweep(folder: Path, name: str, wanted: Mapping[str, Wanted], seconds: float) -> None:
    """Measure shapes of the families 'gemm' and 'memory' side by side: one compiles while the other has the GPU.

    What the time does not suffice for is left out; what is in `folder` already is not measured again.
    """
    jobs, files = {}, list[str]()
    try:
        for family, shapes in wanted.items():
            kernels = sorted({kernel for some in shapes.values() for kernel in some})
            if kernels:
                files.append(_write(name, shapes))
                jobs[family] = ["--shapes", files[-1], "--sweep", name, "--kernels", *kernels]
        _side_by_side(folder, jobs, seconds)
    finally:
        for path in files:
            os.unlink(path)


def sweeps_drawn(folder: Path, families: Sequence[str], seconds: float) -> None:
    """The same for the shapes that each family draws by default, under every kernel that is here."""
    _side_by_side(folder, {family: [] for family in families}, seconds)


def _side_by_side(folder: Path, jobs: Mapping[str, Sequence[str]], seconds: float) -> None:
    """Run `hil.collect` for each family with its arguments, all at once."""
    until = time.time() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    try:
        for family, more in jobs.items():
            some = workers() if family == "memory" else 1
            arguments = [family, "--out", str(folder), "--until", f"{until:.2f}", "--workers", str(some)]
            children.append(Child("hil.collect", [*arguments, "--lock", str(folder / LOCK), *more]))
        for child in children:
            # 1: nothing new was measured, because everything was already or the time was too short.
            child.wait((0, 1), max(until - time.time(), 0) + GRACE_S)
    finally:
        for child in children:
            child.stop()


def collectives(folder: Path, gpus: int, seconds: float) -> None:
    """Measure the collectives between all GPUs of this machine.

    Raises:
        DataError: nothing was measured.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    arguments = ["--out", str(folder), "--minutes", f"{seconds / 60:.3f}"]
    # 1: the time did not suffice for all of them.
    run("hil.collectives", arguments, accept=(0, 1), launcher=launcher, seconds=seconds + 3 * GRACE_S)
    if not (folder / "collectives.parquet").is_file():
        raise DataError("no collective was measured; the last lines of python -m hil.collectives above say why")


def _write(name: str, shapes: Wanted) -> str:
    handle, path = tempfile.mkstemp(prefix=f"loka-sim-{name}-", suffix=".csv")
    with os.fdopen(handle, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("m", "n", "k", "groups", "kernels"))
        writer.writerows((s.m, s.n, s.k, s.groups, " ".join(some)) for s, some in shapes.items())
    return path


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
