"""Timing the kernels of one shape on the GPU, and of many shapes in processes that compile in parallel."""

from __future__ import annotations

import math
import multiprocessing
import queue
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from hil.candidates import locked_autotune
from hil.kernels.base import Runner, Shape
from perfmodel.steady import FULL_CLOCK, HEAVY_FLOP

Work = Sequence[tuple[Shape, Sequence[str]]]
"""Shapes, and the names of the kernels to measure on each."""

Rows = list[dict[str, Any]]
# Seconds past the deadline after which a worker that is still busy is not waited for.
PATIENCE_S = 15.0
# How long the GPU rests, and how often, before a shape is timed again whose clock an earlier one had lowered: it is back within
# 0.2 s (`benchmarks/clock.py`).
REST_S, RESTS = 0.3, 2


class FullClock:
    """The clock of a GPU that nothing holds back, as far as its readings tell."""

    def __init__(self) -> None:
        """Nothing is read yet."""
        self.mhz = 0.0

    def low(self, mhz: float) -> bool:
        """Whether a reading is below it."""
        self.mhz = max(self.mhz, mhz)
        return mhz < FULL_CLOCK * self.mhz

    def settle(self, shape: Shape, take: Callable[[], tuple[Any, float]]) -> tuple[Any, float]:
        """What `take` returns, a measurement and the clock after it, taken again after a rest where an earlier shape slows it.

        A GEMM of `HEAVY_FLOP` lowers the clock by itself. Where rests do not help, this clock is the full one from then on.
        """
        measured, mhz = take()
        if 2 * shape.m * shape.n * shape.k * shape.groups >= HEAVY_FLOP:
            return measured, mhz
        for _ in range(RESTS):
            if not self.low(mhz):
                return measured, mhz
            time.sleep(REST_S)
            measured, mhz = take()
        if self.low(mhz):
            self.mhz = mhz
        return measured, mhz


_full_clock = FullClock()


def _timed(graphs: Sequence[Any]) -> tuple[Any, float]:
    """The graphs' timings, and the clock at their end in MHz."""
    import torch

    from hil.timing import time_interleaved

    return time_interleaved(graphs), float(torch.cuda.clock_rate())


def measure_shape(
    shape: Shape,
    runners: Sequence[Runner],
    pool: Any,
    lock: AbstractContextManager[Any] | None = None,
    deadline: float = math.inf,
) -> list[dict[str, Any]]:
    """Time every runner on one shape, interleaved, and check each result.

    The clock is to be the shape's own: `FullClock.settle`.

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

    from hil.timing import capture, eager_call_us, launches_for

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
        timings, clock = _full_clock.settle(shape, partial(_timed, graphs))
        power, temperature = torch.cuda.power_draw() / 1e3, torch.cuda.temperature()
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


def attempt(shape: Shape, names: Sequence[str], pool: Any, lock: Any = None, deadline: float = math.inf) -> list[dict[str, Any]]:
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


def progress(done: int, total: int, started: float, rows: int) -> None:
    """A line on stderr, or the same line again on a terminal."""
    elapsed = time.time() - started
    print(
        f"\r{done}/{total} shapes, {rows} rows, {elapsed:.0f} s",
        end="" if sys.stderr.isatty() else "\n",
        file=sys.stderr,
        flush=True,
    )


def _serve(index: int, lock: Any, tasks: Any, results: Any) -> None:
    """A worker: measures the tasks that it finds, whosever they are."""
    import torch

    from hil.timing import BufferPool

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = 256
    # The first compilation takes many times as long as the next: while there is nothing else to do.
    torch.compile(lambda x: (x + 1).sum())(torch.zeros(512, device="cuda"))
    pool, elements = None, 0
    with locked_autotune(lock):
        while (task := tasks.get()) is not None:
            key, shape, names, deadline = task
            rows: Rows = []
            if time.time() <= deadline:
                # An operand takes half of the pool at most.
                needed = max(2**29, 2 * shape.largest_operand)
                if needed > elements:
                    pool = None
                    pool, elements = BufferPool(elements=needed, seed=index), needed
                torch._dynamo.reset()
                rows = attempt(shape, names, pool, lock, deadline)
                torch.cuda.empty_cache()
            results.put((key, rows))


class Workers:
    """Processes that compile kernels in parallel and measure one at a time, for as many sweeps as they are given.

    Args:
        number: How many.
        lock: Held by whoever measures; one among themselves where there is none to share.
        serve: What each runs: called with its number, the lock, and the queues of tasks and of results.
    """

    def __init__(
        self, number: int, lock: AbstractContextManager[Any] | None = None, serve: Callable[..., None] | None = None
    ) -> None:
        """Starts them."""
        context = multiprocessing.get_context("spawn")
        self._tasks, self._results, self._sweep = context.Queue(), context.Queue(), 0
        # Kept: a process that has yet to start finds a lock by its name, and the last reference takes the name along.
        self._lock = lock or context.Lock()
        given = (self._lock, self._tasks, self._results)
        self._processes = [context.Process(target=serve or _serve, args=(index, *given), daemon=True) for index in range(number)]
        for process in self._processes:
            process.start()

    def __enter__(self) -> Workers:
        """Themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends them."""
        for process in self._processes:
            process.terminate()
        # What nobody reads any more would otherwise be waited for.
        self._tasks.cancel_join_thread()

    def run(self, work: Work, deadline: float, on_rows: Callable[[Rows], None]) -> None:
        """Measure the shapes in their order, handing over each one's rows as they come, until done or out of time.

        Raises:
            RuntimeError: every worker has died.
        """
        started, rows, done = time.time(), 0, 0
        self._sweep += 1
        for number, (shape, names) in enumerate(work):
            self._tasks.put(((self._sweep, number), shape, list(names), deadline))
        waiting, alive = len(work), sum(process.is_alive() for process in self._processes)
        while waiting > 0:
            try:
                (sweep, _), fresh = self._results.get(timeout=1.0)
            except queue.Empty:
                # What a dead worker was at is lost.
                now = sum(process.is_alive() for process in self._processes)
                waiting, alive = waiting - (alive - now), now
                if not alive:
                    raise RuntimeError(
                        f"every measuring process died, {len(work) - waiting} of {len(work)} tasks were done"
                    ) from None
                if time.time() > deadline + PATIENCE_S:
                    break
                continue
            if sweep != self._sweep:
                continue
            waiting, rows = waiting - 1, rows + len(fresh)
            on_rows(fresh)
            if time.time() > deadline and not fresh:
                continue  # it was not begun
            done += 1
            if done % 20 == 0:
                progress(done, len(work), started, rows)
        if time.time() > deadline and done < len(work):
            print(f"out of time after {done} of {len(work)} parts of shapes; run again to go on", file=sys.stderr)
