"""Measuring in processes of their own, so that each has the GPU's memory to itself and a killed one loses little."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from loka_sim.calibration import HOST
from loka_sim.errors import DataError
from loka_sim.files import write_text_atomic

if TYPE_CHECKING:
    import pandas

    from hil.kernels.base import Shape

# Of 16 cores or more, what compiles kernels at the same time; measuring is one at a time whatever the number.
MOST_WORKERS = 15
# Cores that the workers leave to the process that feeds the GPU, and to what is compiled beside.
OTHERS = 4
# Threads of one process: more wait for each other where others compile on the same cores.
MOST_THREADS = 4
HOST_SECONDS = 60.0
"""Longest that the process which tells how fast the host is may take."""
# What the processes of memory-bound kernels need to start and to compile the first of them.
WARMING_S = 30.0
# What a process that is past its time may take to end by itself.
GRACE_S = 20.0
# In the folder of the timings: held by whoever uses the GPU for long.
LOCK = "gpu.lock"

FAMILIES = ("gemm", "memory")
Wanted = Sequence[tuple["Shape", Sequence[str]]]
"""Shapes in the order of their worth, and the kernels to measure on each; a shape may be named more than once."""


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


def host_step_us(folder: Path) -> float | None:
    """Microseconds of `hil.host.step_us`; None where there is no figure.

    A process of its own measures it and ends: while one more holds the GPU, what others time seems shorter.

    Args:
        folder: Where the process leaves what it found.
    """
    path = folder / "host.json"
    path.unlink(missing_ok=True)
    with suppress(DataError):  # its last lines said why; nothing else hangs on it
        run("hil.host", ["--out", str(path)], seconds=HOST_SECONDS)
    found = (read_json(path) or {}).get(HOST)
    return float(found) if isinstance(found, float) else None


def workers() -> int:
    """Processes that may compile in parallel here."""
    return min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) - OTHERS))


class Sweeps:
    """GEMMs and memory-bound kernels, each family measured by processes that are started once, for all that is asked of them.

    GEMMs come first, by one process: of a few microseconds they seem up to 0.35 us shorter while other processes run kernels,
    as those do that compile memory-bound kernels, and in a training process none does.

    Args:
        folder: Where the timings go; what is there already is not measured again.
        kernels: Those that may be asked for; None for all that are here.
    """

    def __init__(self, folder: Path, kernels: Sequence[str] | None = None) -> None:
        """Starts what measures GEMMs: it imports and warms up at once."""
        self._folder, self._kernels, self._asked = folder, list(kernels or ["*"]), folder / "asked"
        shutil.rmtree(self._asked, ignore_errors=True)
        self._asked.mkdir(parents=True)
        self._children: dict[str, Child] = {}
        self._numbers = dict.fromkeys(FAMILIES, 0)
        self._start("gemm")

    def _start(self, family: str) -> None:
        if family not in self._children:
            some = workers() if family == "memory" else 1
            arguments = [family, "--out", str(self._folder), "--requests", str(self._asked), "--workers", str(some)]
            arguments += ["--lock", str(self._folder / LOCK), "--kernels", *self._kernels]
            self._children[family] = Child("hil.collect", arguments)

    def __enter__(self) -> Sweeps:
        """Themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends them."""
        for child in self._children.values():
            child.stop()
        shutil.rmtree(self._asked, ignore_errors=True)

    def measure(self, name: str, wanted: Mapping[str, Wanted], seconds: float, gemms: float = 0.5) -> None:
        """Measure shapes, by family, under their kernels, in the order given, as far as the time suffices: GEMMs first.

        Args:
            name: Of the sweep.
            wanted: By family.
            seconds: From now on.
            gemms: Of the time, what GEMMs take at most where others are wanted, too.

        Raises:
            DataError: a measuring process failed.
        """
        until = time.time() + seconds
        asked = [family for family in FAMILIES if wanted.get(family)]
        for number, family in enumerate(asked, 1):
            left = until - time.time()
            self.ask(name, {family: wanted[family]}, left if number == len(asked) else gemms * left)()

    def ask(self, name: str, wanted: Mapping[str, Wanted], seconds: float) -> Callable[[], None]:
        """Have shapes measured while something else is done that shares the GPU by its lock.

        Args:
            name: Of the sweep.
            wanted: By family, all at once.
            seconds: From now on; what was asked for before comes first.

        Returns:
            What waits until they are measured, or the time is over; it raises `DataError` where a measuring process failed.
        """
        until = time.time() + seconds
        asked = []
        for family, items in wanted.items():
            self._start(family)
            listed = [[s.m, s.n, s.k, s.groups, list(kernels)] for s, kernels in items]
            path = self._asked / f"{family}-{self._numbers[family]}.json"
            write_text_atomic(path, json.dumps({"sweep": name, "until": until, "items": listed}) + "\n")
            asked.append((family, path.with_suffix(".done")))
            self._numbers[family] += 1
        return lambda: self._wait(asked, until)

    def _wait(self, asked: Sequence[tuple[str, Path]], until: float) -> None:
        for family, done in asked:
            while not done.exists():
                if not self._children[family].alive:
                    self._children[family].wait(())
                if time.time() > until + GRACE_S:
                    raise DataError(
                        f"measuring {family} kernels took {GRACE_S:.0f} s longer than it may; run the same command again"
                    )
                time.sleep(0.05)


def collectives(folder: Path, gpus: int, seconds: float) -> None:
    """Measure the collectives between all GPUs of this machine.

    Raises:
        DataError: nothing was measured.
    """
    _between("hil.collectives", folder, gpus, seconds)
    if not (folder / "collectives.parquet").is_file():
        raise DataError("no collective was measured; the last lines of python -m hil.collectives above say why")


def _between(module: str, folder: Path, gpus: int, seconds: float) -> None:
    """Run what measures between all GPUs of this machine for so long; that it did not get through all is no failure."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    arguments = ["--out", str(folder), "--minutes", f"{seconds / 60:.3f}"]
    run(module, arguments, accept=(0, 1), launcher=launcher, seconds=seconds + 3 * GRACE_S)


def overlap(folder: Path, gpus: int, seconds: float) -> int:
    """Measure what kernels and collectives between all GPUs of this machine cost each other; how many pairs there are."""
    import pandas

    with suppress(DataError):  # its last lines said why; without it the shipped pairs serve
        _between("hil.overlap", folder, gpus, seconds)
    path = folder / "overlap.parquet"
    return len(pandas.read_parquet(path)) if path.is_file() else 0


def timings(folder: Path) -> pandas.DataFrame:
    """What `sweep` has measured into a folder, all families together; empty when nothing.

    Less than a launch can take means that nothing was launched (the transposition of a single column): no time. What several
    workers measured beside each other is brought to the level of one process, as the model's own timings are.
    """
    import pandas

    from perfmodel.measured import LEAST_US, of_one_process, runs_shared

    found = []
    for path in (folder / f"{family}.parquet" for family in ("gemm", "memory")):
        if path.is_file():
            frame = pandas.read_parquet(path)
            found.append(of_one_process(frame, runs_shared(path, frame)))
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
