"""One kernel's learning beside another's: as many processes as it has cores, each with a single thread.

Kernels are learned apart from each other, and their matrices are too small to share among threads.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")

# Rows of all kernels from which on starting processes pays: one takes two seconds.
MANY_ROWS = 10_000
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def each(function: Callable[..., Result], jobs: Sequence[tuple[Any, ...]]) -> Iterator[Result]:
    """`function(*job)` of each job, in order.

    Args:
        function: A module's function.
        jobs: Arguments: a kernel's name, its rows, and what else the function takes.

    Raises:
        What the function raises; `concurrent.futures.process.BrokenProcessPool` where a process was killed.
    """
    workers = min(_cores(), len(jobs))
    if workers < 2 or sum(len(job[1]) for job in jobs) < MANY_ROWS:
        yield from (function(*job) for job in jobs)
        return
    # The longest first, so that none is left to the end; spawned, since threads of a library do not survive a fork.
    order = sorted(range(len(jobs)), key=lambda number: -len(jobs[number][1]))
    with _single_threads(), ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {number: pool.submit(function, *jobs[number]) for number in order}
        try:
            for number in range(len(jobs)):
                yield futures.pop(number).result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _cores() -> int:
    """Cores that this process may use, which are fewer than there are where it is bound to some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _single_threads() -> Iterator[None]:
    """Processes started in this context have one thread each."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
