"""Measure kernels on this machine's GPU over LRM-like shapes, into parquet with a sidecar.

    python -m hil.collect gemm --out data/h200
    python -m hil.collect memory --out data/h200 --workers 12

A row per (kernel, shape): samples, p10, p50 and p90 in microseconds, the error of one result against FP64, and the GPU's
clock and power. The file already in the folder is extended, not replaced: shapes that it holds are skipped, so an
interrupted sweep goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd

from hil.kernels.base import Runner, Shape
from hil.shapes import SWEEPS
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
    "samples",
    "launches",
    "error",
    "sm_mhz",
    "power_w",
    "sweep",
)
FAMILIES = {"gemm": ("gemm", "batched_gemm"), "memory": ("quantize", "layout", "pointwise")}


def legal_runners(shape: Shape, kinds: Sequence[str]) -> list[Runner]:
    """The registered kernels of these kinds that may run this shape."""
    from hil.kernels import RUNNERS

    runners = [
        r for r in RUNNERS.values() if KERNELS[r.name].kind in kinds and not KERNELS[r.name].illegal(shape.m, shape.n, shape.k)
    ]
    if "gemm" in kinds:
        wanted = "batched_gemm" if shape.groups > 1 else "gemm"
        runners = [r for r in runners if KERNELS[r.name].kind == wanted]
    # BlockNorm's blocks are 256 features wide, or all features where there are fewer.
    return [r for r in runners if "blocknorm" not in r.name or shape.k % min(256, shape.k) == 0]


def measure_shape(
    shape: Shape, runners: Sequence[Runner], pool: Any, lock: AbstractContextManager[Any] | None = None
) -> list[dict[str, Any]]:
    """Time every runner on one shape, interleaved, and check each result.

    Args:
        shape: The shape.
        runners: Kernels that may run it.
        pool: A `hil.timing.BufferPool` large enough for its operands.
        lock: Held while the GPU is timed, so that parallel workers compile but never measure at once.

    Raises:
        ValueError: a kernel's result is wrong (its error exceeds the runner's limit).
    """
    import torch

    from hil.timing import capture, launches_for, time_interleaved

    launchers = []
    for runner in runners:
        launch = runner.bind(shape, pool)
        error = runner.error(shape, pool, launch(0))
        if not error <= runner.limit:
            raise ValueError(f"{runner.name} on {shape} is wrong: relative error {error:.3g} against FP64, limit {runner.limit}")
        launchers.append((runner, launch, error))
    with lock or nullcontext():
        graphs, kept = [], []
        for runner, launch, _ in launchers:
            launches = launches_for(runner.moved_bytes(shape))
            graph, results = capture(launch, launches)
            graphs.append((graph, launches))
            kept.append(results)
        timings = time_interleaved(graphs)
        clock, power = torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3
        del graphs, kept
    rows = []
    for (runner, _, error), timing in zip(launchers, timings, strict=True):
        rows.append(
            {
                "kernel": runner.name, "m": shape.m, "n": shape.n, "k": shape.k, "groups": shape.groups,
                "p10_us": timing.quantile(0.1), "p50_us": timing.quantile(0.5), "p90_us": timing.quantile(0.9),
                "samples": len(timing.samples_us), "launches": timing.launches, "error": error,
                "sm_mhz": clock, "power_w": power,
            }
        )  # fmt: skip
    return rows


@contextmanager
def _locked_autotune(lock: AbstractContextManager[Any]) -> Iterator[None]:
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


def _worker(index: int, shapes: list[Shape], kinds: Sequence[str], lock: Any, queue: Any, deadline: float) -> None:
    import torch

    from hil.timing import BufferPool

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = 256
    pool = BufferPool(elements=2**29, seed=index)
    with _locked_autotune(lock):
        for shape in shapes:
            if time.time() > deadline:
                break
            torch._dynamo.reset()
            queue.put((index, _attempt(shape, kinds, pool, lock)))
            torch.cuda.empty_cache()
    queue.put((index, None))


def _attempt(shape: Shape, kinds: Sequence[str], pool: Any, lock: Any = None) -> list[dict[str, Any]]:
    """Rows of one shape; a kernel that fails is named on stderr and left out, and the rest are measured."""
    rows: list[dict[str, Any]] = []
    runners = legal_runners(shape, kinds)
    try:
        return measure_shape(shape, runners, pool, lock)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        print(f"{shape}: {str(error).splitlines()[0]}; measuring its kernels one by one", file=sys.stderr)
    for runner in runners:
        try:
            rows += measure_shape(shape, [runner], pool, lock)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            print(f"left out: {runner.name} on {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
    return rows


def _progress(done: int, total: int, started: float, rows: int) -> None:
    elapsed = time.time() - started
    print(
        f"\r{done}/{total} shapes, {rows} rows, {elapsed:.0f} s",
        end="" if sys.stderr.isatty() else "\n",
        file=sys.stderr,
        flush=True,
    )


def collect(
    shapes: list[Shape], family: str, minutes: float, workers: int, on_rows: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Measure the shapes, handing over each shape's rows as they come, until done or out of time."""
    deadline = time.time() + 60 * minutes
    started, kinds, rows = time.time(), FAMILIES[family], 0
    if workers <= 1:
        import torch

        from hil.timing import BufferPool

        pool = BufferPool()
        for done, shape in enumerate(shapes, 1):
            if time.time() > deadline:
                print(f"out of time after {done - 1} of {len(shapes)} shapes; run again to go on", file=sys.stderr)
                break
            if family == "memory":
                torch._dynamo.reset()
            fresh = _attempt(shape, kinds, pool)
            rows += len(fresh)
            on_rows(fresh)
            if done % 50 == 0 or done == len(shapes):
                torch.cuda.empty_cache()
                _progress(done, len(shapes), started, rows)
        return
    context = multiprocessing.get_context("spawn")
    lock, queue = context.Lock(), context.Queue()
    processes = [
        context.Process(target=_worker, args=(i, shapes[i::workers], kinds, lock, queue, deadline), daemon=True)
        for i in range(workers)
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
            _progress(done, len(shapes), started, rows)


def _write(path: Path, frame: pd.DataFrame) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    frame.to_parquet(temporary, index=False, compression="zstd")
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def read_shapes(path: Path) -> list[Shape]:
    """Shapes of a CSV with columns m, n, k and optionally groups."""
    frame = pd.read_csv(path)
    groups = frame["groups"] if "groups" in frame else [1] * len(frame)
    return [Shape(int(m), int(n), int(k), int(g)) for m, n, k, g in zip(frame["m"], frame["n"], frame["k"], groups, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the sweep."""
    parser = argparse.ArgumentParser(prog="python -m hil.collect", description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=sorted(FAMILIES), help="gemm: GEMMs; memory: quantization, layout, norms, activations")
    parser.add_argument("--out", type=Path, required=True, help="folder of the parquet file, extended if it is there")
    parser.add_argument("--count", type=int, default=None, help="shapes to draw (default: the sweep's own)")
    parser.add_argument("--shapes", type=Path, help="CSV with columns m,n,k[,groups] to measure instead of drawn shapes")
    parser.add_argument("--sweep", default="lrm", help="which shapes to draw, or what to call those of --shapes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0, help="stop in time and keep what is measured")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile in parallel (they measure one at a time)")
    options = parser.parse_args(arguments)

    import torch

    if not torch.cuda.is_available():
        print("no CUDA GPU here: run this on a Hopper machine", file=sys.stderr)
        return 3
    from hil.fingerprint import fingerprint

    if options.shapes:
        shapes = read_shapes(options.shapes)
    elif (options.family, options.sweep) in SWEEPS:
        draw, count = SWEEPS[options.family, options.sweep]
        shapes = draw(options.count or count, options.seed)
    else:
        known = ", ".join(sweep for family, sweep in SWEEPS if family == options.family)
        parser.error(f"--sweep {options.sweep} is none of {known}; name one, or give --shapes")

    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.family}.parquet"
    sidecar_path = path.with_suffix(".json")
    rows: list[dict[Any, Any]] = []
    runs: list[dict[str, Any]] = []
    if path.exists():
        rows = pd.read_parquet(path).to_dict("records")
        runs = json.loads(sidecar_path.read_text())["runs"]
        measured = {(r["m"], r["n"], r["k"], r["groups"]) for r in rows if r["sweep"] == options.sweep}
        shapes = [s for s in shapes if (s.m, s.n, s.k, s.groups) not in measured]
    given = list(arguments if arguments is not None else sys.argv[1:])
    # The folders and files of one machine mean nothing on another: record the last parts of their paths.
    given = [f"{Path(word).parent.name}/{Path(word).name}" if "/" in word else word for word in given]
    command = f"python -m hil.collect {shlex.join(given)}"
    run = {
        "sweep": options.sweep,
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **fingerprint(),
    }

    def keep(fresh: list[dict[str, Any]]) -> None:
        rows.extend({**row, "sweep": options.sweep} for row in fresh)

    before = len(rows)
    try:
        collect(shapes, options.family, options.minutes, options.workers, keep)
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
    if len(rows) == before:
        print("nothing new was measured", file=sys.stderr)
        return 1
    _write(path, pd.DataFrame(rows, columns=list(COLUMNS)))
    run["rows"] = len(rows) - before
    sidecar = {
        "schema_version": 1,
        "method": "median of CUDA-graph replays over rotating buffers; see hil/timing.py",
        "runs": [*runs, run],
    }
    sidecar_path.write_text(json.dumps(sidecar, indent=1) + "\n")
    print(f"{path.name}: {len(rows) - before} new rows, {len(rows)} in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
