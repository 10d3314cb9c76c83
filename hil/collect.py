"""Measure kernels on this machine's GPU over LRM-like shapes, into parquet with a sidecar.

    python -m hil.collect gemm --out data/h200
    python -m hil.collect memory --out data/h200 --workers 12
    python -m hil.collect gemm --out data/h200 --kernels 'fbgemm/*' 'loka/*'

A row per (kernel, shape): how many samples, their p10, p50, p90 and extremes in microseconds, how many are outliers, the
time of an eager call, the error of one result against FP64, and the GPU's clock, power and temperature. The file already
in the folder is extended, not replaced: what it holds is skipped kernel by kernel, so that an interrupted sweep goes on
where it was, and new kernels are measured over the shapes of the old ones. It is saved every minute. Files of before a
column was added have NaN there.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd

from hil.kernels.availability import absences, availability, available_kernels
from hil.kernels.base import Runner, Shape
from hil.lock import GpuLock
from hil.shapes import SWEEPS as GEMM_AND_MEMORY_SWEEPS
from hil.shapes import gemm_shapes
from perfmodel.kernels import KERNELS

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
    "memory": ("quantize", "layout", "pointwise"),
    "linear": ("linear",),
}
SAVE_SECONDS = 60.0


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
    """Names of the registered kernels of these kinds that fit one of the patterns, here or not."""
    from hil.kernels import RUNNERS

    return [name for name in RUNNERS if KERNELS[name].kind in kinds and _fits(name, patterns)]


def _fits(name: str, patterns: Sequence[str]) -> bool:
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


def measure_shape(
    shape: Shape,
    runners: Sequence[Runner],
    pool: Any,
    lock: AbstractContextManager[Any] | None = None,
    deadline: float = math.inf,
) -> list[dict[str, Any]]:
    """Time every runner on one shape, interleaved, and check each result.

    Args:
        shape: The shape.
        runners: Kernels that may run it.
        pool: A `hil.timing.BufferPool` large enough for its operands.
        lock: Held while the GPU works for long, so that parallel workers compile but never measure or check at once.
        deadline: Of `time.time()`; kernels that were not compiled by then, but for the first, are left out.

    Raises:
        ValueError: a kernel's result is wrong (its error exceeds the runner's limit).
    """
    import torch

    from hil.timing import capture, eager_call_us, launches_for, time_interleaved

    bound: list[tuple[Runner, Callable[[int], object]]] = []
    for runner in runners:
        if bound and time.time() > deadline:
            break
        launch = runner.bind(shape, pool)
        launch(0)  # compiles: that needs no lock
        bound.append((runner, launch))
    with lock or nullcontext():
        launchers = []
        for runner, launch in bound:
            error = runner.error(shape, pool, launch(0))
            if not error <= runner.limit:
                raise ValueError(
                    f"{runner.name} on {shape} is wrong: relative error {error:.3g} against FP64, limit {runner.limit}"
                )
            launchers.append((runner, launch, error))
        graphs, kept = [], []
        for runner, launch, _ in launchers:
            launches = launches_for(runner.moved_bytes(shape))
            graph, results = capture(launch, launches)
            graphs.append((graph, launches))
            kept.append(results)
        timings = time_interleaved(graphs)
        clock, power, temperature = torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3, torch.cuda.temperature()
        del graphs, kept
        calls = [eager_call_us(launch, timing.quantile(0.5)) for (_, launch, _), timing in zip(launchers, timings, strict=True)]
    rows = []
    for (runner, _, error), timing, call in zip(launchers, timings, calls, strict=True):
        rows.append(
            {
                "kernel": runner.name, "m": shape.m, "n": shape.n, "k": shape.k, "groups": shape.groups,
                "p10_us": timing.quantile(0.1), "p50_us": timing.quantile(0.5), "p90_us": timing.quantile(0.9),
                "least_us": min(timing.samples_us), "most_us": max(timing.samples_us), "outliers": timing.outliers,
                "eager_us": call, "samples": len(timing.samples_us), "launches": timing.launches, "error": error,
                "sm_mhz": clock, "power_w": power, "temperature_c": temperature,
            }
        )  # fmt: skip
    return rows


@contextmanager
def locked_autotune(lock: AbstractContextManager[Any]) -> Iterator[None]:
    """Hold the lock while torch.compile benchmarks its candidate kernels, so that its choice is not made on a busy GPU."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original = CachingAutotuner.benchmark_all_configs

    def benchmark(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return original(self, *args, **kwargs)

    CachingAutotuner.benchmark_all_configs = benchmark  # type: ignore[method-assign]
    try:
        yield
    finally:
        CachingAutotuner.benchmark_all_configs = original  # type: ignore[method-assign]


Work = Sequence[tuple[Shape, Sequence[str]]]
"""Shapes, and the names of the kernels to measure on each."""


def _worker(index: int, work: Work, lock: Any, queue: Any, deadline: float) -> None:
    import torch

    from hil.timing import BufferPool

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = 256
    pool = BufferPool(elements=2**29, seed=index)
    with locked_autotune(lock):
        for shape, names in work:
            if time.time() > deadline:
                break
            torch._dynamo.reset()
            queue.put((index, _attempt(shape, names, pool, lock, deadline)))
            torch.cuda.empty_cache()
    queue.put((index, None))


def _attempt(shape: Shape, names: Sequence[str], pool: Any, lock: Any = None, deadline: float = math.inf) -> list[dict[str, Any]]:
    """Rows of one shape; a kernel that fails is named on stderr and left out, and the rest are measured."""
    from hil.kernels import RUNNERS

    rows: list[dict[str, Any]] = []
    runners = [RUNNERS[name] for name in names]
    # Whatever a library raises (an assertion, a missing symbol) concerns its own kernels alone.
    try:
        return measure_shape(shape, runners, pool, lock, deadline)
    except Exception as error:
        print(f"{shape}: {_line(error)}; measuring its kernels one by one", file=sys.stderr)
    for runner in runners:
        if time.time() > deadline:
            break
        try:
            rows += measure_shape(shape, [runner], pool, lock)
        except Exception as error:
            print(f"left out: {runner.name} on {shape}: {_line(error)}", file=sys.stderr)
    return rows


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _progress(done: int, total: int, started: float, rows: int) -> None:
    elapsed = time.time() - started
    print(
        f"\r{done}/{total} shapes, {rows} rows, {elapsed:.0f} s",
        end="" if sys.stderr.isatty() else "\n",
        file=sys.stderr,
        flush=True,
    )


def collect(
    work: Work,
    family: str,
    deadline: float,
    workers: int,
    on_rows: Callable[[list[dict[str, Any]]], None],
    lock: AbstractContextManager[Any] | None = None,
) -> None:
    """Measure the shapes, handing over each shape's rows as they come, until done or out of time.

    Args:
        work: What to measure, in order.
        family: Of `FAMILIES`.
        deadline: Of `time.time()`.
        workers: Processes that compile in parallel.
        on_rows: Called with each shape's rows.
        lock: Held by whoever measures; other processes may share it (`hil.lock.GpuLock`).
    """
    started, rows = time.time(), 0
    workers = min(workers, len(work))
    if workers <= 1:
        import torch

        from hil.timing import BufferPool

        pool = BufferPool()
        for done, (shape, names) in enumerate(work, 1):
            if time.time() > deadline:
                print(f"out of time after {done - 1} of {len(work)} shapes; run again to go on", file=sys.stderr)
                break
            if family != "gemm":
                torch._dynamo.reset()
            fresh = _attempt(shape, names, pool, lock, deadline)
            rows += len(fresh)
            on_rows(fresh)
            if done % 50 == 0 or done == len(work):
                torch.cuda.empty_cache()
                _progress(done, len(work), started, rows)
        return
    context = multiprocessing.get_context("spawn")
    lock, queue = lock or context.Lock(), context.Queue()
    processes = [
        context.Process(target=_worker, args=(i, work[i::workers], lock, queue, deadline), daemon=True) for i in range(workers)
    ]
    for process in processes:
        process.start()
    alive, done = set(range(workers)), 0
    while alive:
        try:
            index, fresh = queue.get(timeout=20)
        except Exception:
            alive -= {i for i in alive if not processes[i].is_alive()}
            continue
        if fresh is None:
            alive.discard(index)
            continue
        done, rows = done + 1, rows + len(fresh)
        on_rows(fresh)
        if done % 20 == 0:
            _progress(done, len(work), started, rows)


def _replace(path: Path, write: Callable[[str], object]) -> None:
    """Write a file beside its place and move it there, so that a reader or a kill never meets half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


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
        _replace(self.sidecar, lambda name: Path(name).write_text(text))
        _replace(self.path, lambda name: frame.to_parquet(name, index=False, compression="zstd"))
        self._saved = time.monotonic()


def read_shapes(path: Path) -> dict[Shape, tuple[str, ...]]:
    """Shapes of a CSV with columns m, n, k and optionally groups and kernels: patterns of those wanted, spaces between."""
    frame = pd.read_csv(path)
    groups = frame["groups"] if "groups" in frame else [1] * len(frame)
    patterns = frame["kernels"] if "kernels" in frame else ["*"] * len(frame)
    columns = zip(frame["m"], frame["n"], frame["k"], groups, patterns, strict=True)
    return {Shape(int(m), int(n), int(k), int(g)): tuple(str(some).split()) for m, n, k, g, some in columns}


def _drawn(options: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[Shape, tuple[str, ...]]:
    if options.shapes:
        return read_shapes(options.shapes)
    if (options.family, options.sweep) in SWEEPS:
        draw, count = SWEEPS[options.family, options.sweep]
        return dict.fromkeys(draw(options.count or count, options.seed), ("*",))
    known = ", ".join(sweep for family, sweep in SWEEPS if family == options.family)
    parser.error(f"--sweep {options.sweep} is none of {known}; name one, or give --shapes")


def _command(arguments: Sequence[str]) -> str:
    # The folders and files of one machine mean nothing on another: record the last parts of their paths.
    given = [f"{Path(word).parent.name}/{Path(word).name}" if "/" in word else word for word in arguments]
    return f"python -m hil.collect {shlex.join(given)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the sweep."""
    parser = argparse.ArgumentParser(prog="python -m hil.collect", description=__doc__.splitlines()[0])
    parser.add_argument(
        "family",
        choices=sorted(FAMILIES),
        help="gemm: GEMMs; memory: quantization, layout, norms, activations; linear: whole layers, forward and backward",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the parquet file, extended if it is there")
    parser.add_argument("--kernels", nargs="+", default=["*"], metavar="PATTERN", help="kernels to measure, as 'fbgemm/*'")
    parser.add_argument("--count", type=int, default=None, help="shapes to draw (default: the sweep's own)")
    parser.add_argument("--shapes", type=Path, help="CSV with columns m,n,k[,groups,kernels] to measure instead of drawn shapes")
    parser.add_argument("--sweep", default="lrm", help="which shapes to draw, or what to call those of --shapes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0, help="stop in time and keep what is measured")
    parser.add_argument("--until", type=float, help="the same as a Unix time, instead of --minutes")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile in parallel (they measure one at a time)")
    parser.add_argument("--lock", type=Path, help="file that whoever uses this GPU for long locks (see hil.lock)")
    options = parser.parse_args(arguments)
    deadline = options.until if options.until is not None else time.time() + 60 * options.minutes

    kinds = FAMILIES[options.family]
    names = matching(kinds, options.kernels)
    if not names:
        parser.error(f"--kernels {' '.join(options.kernels)} fits none of: {', '.join(matching(kinds))}")
    shapes = _drawn(options, parser)

    import torch

    if not torch.cuda.is_available():
        print("no CUDA GPU here: run this on a Hopper machine", file=sys.stderr)
        return 3
    from hil.fingerprint import fingerprint

    for line in absences(names):
        print(line, file=sys.stderr)
    available = available_kernels(names)
    if not available:
        return 3
    timings = Timings(options.out, options.family)
    measured = timings.measured(options.sweep)
    work: list[tuple[Shape, list[str]]] = []
    for shape, patterns in shapes.items():
        legal = [runner.name for runner in legal_runners(shape, kinds, options.kernels) if _fits(runner.name, patterns)]
        wanted = [name for name in legal if (name, shape.m, shape.n, shape.k, shape.groups) not in measured]
        if wanted:
            work.append((shape, wanted))
    run = {
        "sweep": options.sweep,
        "command": _command(arguments if arguments is not None else sys.argv[1:]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **fingerprint(),
        "libraries": {KERNELS[name].library: version for name in available if (version := availability(KERNELS[name]).version)},
    }
    try:
        lock = GpuLock(options.lock) if options.lock else None
        collect(work, options.family, deadline, options.workers, lambda rows: timings.add(rows, run), lock)
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
    if not timings.fresh:
        print("nothing new was measured", file=sys.stderr)
        return 1
    timings.save(run)
    print(f"{timings.path.name}: {timings.fresh} new rows, {len(timings.rows)} in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
