"""Measure kernels on this machine's GPU over LRM-like shapes, into parquet with a sidecar.

    python -m hil.collect gemm --out data/h200
    python -m hil.collect memory --out data/h200 --workers 12
    python -m hil.collect gemm --out data/h200 --kernels 'fbgemm/*' 'loka/*'

A row per (kernel, shape): how many samples, their p10, p50, p90 and extremes in microseconds, how many are outliers, the
time of an eager call, the error of one result against FP64, and the GPU's clock, power and temperature. Where an earlier
shape's work has lowered the clock, the GPU rests and the shape is timed again (`hil.measure.FullClock`). The file already in
the folder is extended, not replaced: what it holds is skipped kernel by kernel, so that an interrupted sweep goes on where it
was, and new kernels are measured over the shapes of the old ones. Kernels of a shape are replayed in turn, so that each finds its
operands as the others leave the L2: by itself one whose call moves under 0.3 MB finds its own still there, and takes up to a
fifth less, so `--kernels` should name all that take the shapes. It is saved every minute. Files of before a column was
added have NaN there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from hil.candidates import locked_autotune
from hil.command import Parser
from hil.files import write_atomic
from hil.fingerprint import has_gpu
from hil.kernels.availability import absences, availability, available_kernels
from hil.kernels.base import Runner, Shape
from hil.lock import GpuLock
from hil.measure import Rows, Work, Workers, attempt, progress
from hil.shapes import SWEEPS as GEMM_AND_MEMORY_SWEEPS
from hil.shapes import gemm_shapes
from hil.warm import compile_ahead
from perfmodel.kernels import KERNELS, MEMORY_KINDS, library_of

COLUMNS = (
    "kernel",
    "m",
    "n",
    "k",
    "groups",
    "p10_us",
    "p50_us",
    "p90_us",
    "least_us",
    "most_us",
    "outliers",
    "eager_us",
    "samples",
    "launches",
    "error",
    "sm_mhz",
    "power_w",
    "temperature_c",
    "sweep",
)
FAMILIES = {
    "gemm": ("gemm", "batched_gemm"),
    "memory": MEMORY_KINDS,
    "linear": ("linear",),
}
SAVE_SECONDS = 60.0
# Kernels of one shape that a worker compiles, and then measures in turn: more at once, and the last worker works alone.
AT_ONCE = 4
# Of the time that there is, what compiling ahead takes at most.
AHEAD_SHARE = 0.4


def linear_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct layers, taken from `gemm_shapes`: (rows, out features, in features), all multiples of 16."""
    fitting = [
        shape
        for shape in gemm_shapes(8 * count, seed)
        if shape.m >= 256
        and max(shape.n, shape.k) <= 8192
        and not (shape.m % 16 or shape.n % 16 or shape.k % 16)
        # x, y and their gradients of several launches lie side by side.
        and max(shape.m * shape.k, shape.m * shape.n) <= 2**27
    ]
    return fitting[:count]


SWEEPS = {**GEMM_AND_MEMORY_SWEEPS, ("linear", "lrm"): (linear_shapes, 300)}


def matching(kinds: Sequence[str], patterns: Sequence[str] = ("*",)) -> list[str]:
    """Names of the registered kernels of these kinds that fit one of the patterns, here or not.

    bf16 products that read an operand across fit none with a wildcard: whoever wants one names it.
    """
    from hil.kernels import RUNNERS

    return [name for name in RUNNERS if KERNELS[name].kind in kinds and _fits(name, patterns)]


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return name in patterns or (not KERNELS[name].across and _alike(name, patterns))


def _alike(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def legal_runners(shape: Shape, kinds: Sequence[str], patterns: Sequence[str] = ("*",)) -> list[Runner]:
    """The kernels of these kinds and names that are here and may run this shape."""
    from hil.kernels import RUNNERS
    from hil.kernels.torch_grouped import MAX_GROUPS

    runners = [
        RUNNERS[name]
        for name in available_kernels(matching(kinds, patterns))
        if not KERNELS[name].illegal(shape.m, shape.n, shape.k)
    ]
    if "gemm" in kinds:
        wanted = "batched_gemm" if shape.groups > 1 else "gemm"
        runners = [r for r in runners if KERNELS[r.name].kind == wanted]
    if shape.groups > MAX_GROUPS:
        runners = [r for r in runners if "grouped" not in r.name]
    # BlockNorm's blocks are 256 features wide, or all features where there are fewer.
    return [r for r in runners if "blocknorm" not in r.name or shape.k % min(256, shape.k) == 0]


def collect(
    work: Work,
    family: str,
    deadline: float,
    workers: Workers | None,
    on_rows: Callable[[Rows], None],
    lock: AbstractContextManager[Any] | None = None,
) -> None:
    """Measure the shapes, handing over each shape's rows as they come, until done or out of time.

    Args:
        work: What to measure, in order.
        family: Of `FAMILIES`.
        deadline: Of `time.time()`.
        workers: Who measures; None for this process alone.
        on_rows: Called with each shape's rows.
        lock: Held by whoever measures; other processes may share it (`hil.lock.GpuLock`).
    """
    if workers is not None:
        workers.run(work, deadline, on_rows)
        return
    import torch

    from hil.timing import POOL_ELEMENTS, BufferPool

    started, rows = time.time(), 0
    pool = BufferPool(elements=max([POOL_ELEMENTS, *(2 * shape.largest_operand for shape, _ in work)]))
    # GEMMs are not compiled by torch.compile, whose import takes seconds.
    with nullcontext() if family == "gemm" else locked_autotune(lock):
        for done, (shape, names) in enumerate(work, 1):
            if time.time() > deadline:
                print(f"out of time after {done - 1} of {len(work)} shapes; run again to go on", file=sys.stderr)
                break
            if family != "gemm":
                torch._dynamo.reset()
                # Functions that share a wrapper count as one, and beyond the limit would run uncompiled.
                torch._dynamo.config.recompile_limit = 256
            fresh = attempt(shape, names, pool, lock, deadline)
            rows += len(fresh)
            on_rows(fresh)
            if done % 50 == 0 or done == len(work):
                torch.cuda.empty_cache()
                progress(done, len(work), started, rows)


class Timings:
    """A family's rows on disk, and beside them the runs that they come from.

    The sidecar is written first: a kill between the two leaves a run that claims more rows than there are, which is set
    right when the pair is read again, and never rows that no run accounts for.
    """

    def __init__(self, folder: Path, family: str) -> None:
        """Read what is in the folder, which is made when something is saved."""
        self.path, self.sidecar = folder / f"{family}.parquet", folder / f"{family}.json"
        self.rows: list[dict[Any, Any]] = pd.read_parquet(self.path).to_dict("records") if self.path.exists() else []
        self._runs: list[dict[str, Any]] = json.loads(self.sidecar.read_text())["runs"] if self.sidecar.exists() else []
        unsaved = sum(run["rows"] for run in self._runs) - len(self.rows)
        if self._runs and unsaved > 0:
            self._runs[-1]["rows"] -= unsaved
            self._runs = [run for run in self._runs if run["rows"] > 0]
        self._before, self._saved = len(self.rows), time.monotonic()

    @property
    def fresh(self) -> int:
        """Rows added since the files were read."""
        return len(self.rows) - self._before

    def measured(self, sweep: str) -> set[tuple[Any, ...]]:
        """(kernel, m, n, k, groups) of the sweep's rows."""
        return {(r["kernel"], r["m"], r["n"], r["k"], r["groups"]) for r in self.rows if r["sweep"] == sweep}

    def add(self, rows: list[dict[str, Any]], run: dict[str, Any]) -> None:
        """Add a run's rows, and save them if the last time was a minute ago."""
        self.rows.extend({**row, "sweep": run["sweep"]} for row in rows)
        if self.fresh and time.monotonic() - self._saved > SAVE_SECONDS:
            self.save(run)

    def save(self, run: dict[str, Any]) -> None:
        """Write both files."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        sidecar = {
            "schema_version": 1,
            "method": "median of CUDA-graph replays over rotating buffers, and of back-to-back eager calls; see hil/timing.py",
            "runs": [*self._runs, {**run, "rows": self.fresh}],
        }
        text, frame = json.dumps(sidecar, indent=1) + "\n", pd.DataFrame(self.rows, columns=list(COLUMNS))
        write_atomic(self.sidecar, lambda beside: beside.write_text(text))
        write_atomic(self.path, lambda beside: frame.to_parquet(beside, index=False, compression="zstd"))
        self._saved = time.monotonic()


Items = Sequence[tuple[Shape, tuple[str, ...]]]
"""Shapes, and patterns of the kernels that are wanted on each."""


def read_shapes(path: Path) -> list[tuple[Shape, tuple[str, ...]]]:
    """Shapes of a CSV with columns m, n, k and optionally groups and kernels: patterns of those wanted, spaces between.

    Raises:
        ValueError: it is not there, lacks a column, or has a size that is no positive whole number, which is named.
    """
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no CSV of shapes: {error}") from error
    if missing := {"m", "n", "k"} - set(frame.columns):
        raise ValueError(f"{path} lacks the columns {sorted(missing)}; shapes need m, n, k")
    frame = frame.assign(**{name: value for name, value in (("groups", 1), ("kernels", "*")) if name not in frame})
    for name in ("m", "n", "k", "groups"):
        sizes = pd.to_numeric(frame[name], errors="coerce")
        if (wrong := ~((sizes >= 1) & (sizes % 1 == 0))).any():
            raise ValueError(f"{path} has {name} = {frame[name][wrong].iloc[0]}; sizes are whole numbers, 1 or more")
        frame[name] = sizes.astype(int)
    columns = zip(*(frame[name].tolist() for name in ("m", "n", "k", "groups", "kernels")), strict=True)
    return [(Shape(m, n, k, groups), tuple(str(patterns).split())) for m, n, k, groups, patterns in columns]


def _drawn(options: argparse.Namespace, parser: Parser) -> Items:
    if options.shapes:
        try:
            return read_shapes(options.shapes)
        except ValueError as error:
            parser.error(f"--shapes: {error}")
    if (options.family, options.sweep) in SWEEPS:
        draw, count = SWEEPS[options.family, options.sweep]
        return [(shape, ("*",)) for shape in draw(options.count or count, options.seed)]
    known = ", ".join(sweep for family, sweep in SWEEPS if family == options.family)
    parser.error(f"--sweep {options.sweep} is none of {known}; name one, or give --shapes")


def _command(arguments: Sequence[str]) -> str:
    # The folders and files of one machine mean nothing on another: record the last parts of their paths.
    given = [f"{Path(word).parent.name}/{Path(word).name}" if "/" in word else word for word in arguments]
    return f"python -m hil.collect {shlex.join(given)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the sweep."""
    parser = Parser(prog="python -m hil.collect", description=__doc__.splitlines()[0])
    parser.add_argument(
        "family",
        choices=sorted(FAMILIES),
        help="gemm: GEMMs; memory: quantization, layout, norms, activations; linear: whole layers, forward and backward",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the parquet file, extended if it is there")
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="kernels to measure, as 'fbgemm/*' (default: all; bf16 products that read an operand across by full name alone)",
    )
    parser.add_argument("--count", type=int, default=None, help="shapes to draw (default: the sweep's own)")
    parser.add_argument("--shapes", type=Path, help="CSV with columns m,n,k[,groups,kernels] to measure instead of drawn shapes")
    parser.add_argument("--sweep", default="lrm", help="which shapes to draw, or what to call those of --shapes (default: lrm)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0, help="stop in time and keep what is measured (default: 9)")
    parser.add_argument("--until", type=float, help="the same as a Unix time, instead of --minutes")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile in parallel (they measure one at a time)")
    parser.add_argument(
        "--ahead",
        type=int,
        default=0,
        metavar="N",
        help="processes that compile everything first and end, for one to measure alone",
    )
    parser.add_argument(
        "--requests", type=Path, metavar="DIR", help="measure what others ask for in this folder, one after another"
    )
    parser.add_argument("--lock", type=Path, help="file that whoever uses this GPU for long locks (see hil.lock)")
    options = parser.parse_args(arguments)
    deadline = options.until if options.until is not None else time.time() + 60 * options.minutes
    if options.ahead and options.workers > 1:
        parser.error("--ahead is for one measuring process; leave out --workers")

    kinds = FAMILIES[options.family]
    names = matching(kinds, options.kernels)
    if not names:
        parser.error(f"--kernels {' '.join(options.kernels)} fits none of: {', '.join(matching(kinds))}")
    items = [] if options.requests else _drawn(options, parser)

    if not has_gpu():
        return 3
    for line in absences(names):
        print(line, file=sys.stderr)
    if not available_kernels(names):
        return 3
    lock = GpuLock(options.lock) if options.lock else None
    command = _command(arguments if arguments is not None else sys.argv[1:])
    with Workers(options.workers, lock) if options.workers > 1 else nullcontext() as workers:
        if options.requests:
            for path, request in requests(options.requests, options.family):
                fresh = _sweep(options, command, request["sweep"], request["items"], request["until"], workers, lock)
                write_atomic(path.with_suffix(".done"), partial(Path.write_text, data=json.dumps(fresh)))
            return 0
        return 0 if _sweep(options, command, options.sweep, items, deadline, workers, lock) else 1


def requests(folder: Path, family: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What others ask for, as `FAMILY-0.json`, `FAMILY-1.json`, ...: sweep, until (Unix time) and items, until they are gone.

    An item is m, n, k, groups, and a list of patterns of kernels.
    """
    parent, number = os.getppid(), 0
    while os.getppid() == parent:
        path = folder / f"{family}-{number}.json"
        if not path.exists():
            time.sleep(0.05)
            continue
        request = json.loads(path.read_text())
        items = [(Shape(m, n, k, groups), tuple(patterns)) for m, n, k, groups, patterns in request["items"]]
        yield path, {**request, "items": items}
        number += 1


def _sweep(
    options: argparse.Namespace, command: str, sweep: str, items: Items, deadline: float, workers: Workers | None, lock: Any
) -> int:
    """Measure what the file does not hold yet of a sweep, and save it; how many rows there are more."""
    from hil.fingerprint import fingerprint

    kinds = FAMILIES[options.family]
    timings = Timings(options.out, options.family)
    measured = timings.measured(sweep)
    work: list[tuple[Shape, list[str]]] = []
    for shape, patterns in items:
        legal = [runner.name for runner in legal_runners(shape, kinds, options.kernels) if _alike(runner.name, patterns)]
        calls = {name: (name, shape.m, shape.n, shape.k, shape.groups) for name in legal}
        wanted = [name for name, call in calls.items() if call not in measured]
        # A list may have a shape twice.
        measured.update(calls.values())
        size = AT_ONCE if workers else len(wanted) or 1
        work += [(shape, wanted[first : first + size]) for first in range(0, len(wanted), size)]
    if options.ahead and work:
        import torch

        torch._inductor.config.compile_threads = 1
        compile_ahead(work, options.ahead, time.time() + AHEAD_SHARE * (deadline - time.time()))
    used = [KERNELS[name] for name in available_kernels(matching(kinds, options.kernels))]
    run = {
        "sweep": sweep,
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **fingerprint(),
        "libraries": {library_of(spec.name): found for spec in used if (found := availability(spec).version)},
    }
    failure = None
    try:
        collect(work, options.family, deadline, workers, lambda rows: timings.add(rows, run), lock)
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
    except RuntimeError as error:
        failure = str(error)
    if timings.fresh:
        timings.save(run)
        print(f"{timings.path.name}: {timings.fresh} new rows, {len(timings.rows)} in all", flush=True)
    else:
        print("nothing new was measured", file=sys.stderr)
    if failure:
        sys.exit(failure)
    return timings.fresh


if __name__ == "__main__":
    sys.exit(main())
