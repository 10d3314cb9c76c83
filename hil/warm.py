"""Compiling kernels ahead of their timing, in processes that are gone before anything is timed.

What they compile stays in the caches of Triton and of torch.compile on disk. So one process can then time what many have
compiled, and has the GPU to itself; among torch.compile's candidates it is that one that chooses (`hil.candidates`).
"""

from __future__ import annotations

import multiprocessing
import queue
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hil.candidates import left_open
from hil.kernels.base import Shape
from hil.measure import PATIENCE_S, Work

# Kernels and shapes that a process takes at a time: neighbours, which often are one compiled kernel.
_CHUNK = 6

Item = tuple[str, Shape]


def chunks(work: Work, size: int = _CHUNK) -> list[list[Item]]:
    """Kernels and shapes, alike ones together."""
    items = [(name, shape) for shape, names in work for name in names]
    pairs = sorted(items, key=lambda item: (item[0], item[1].k, item[1].m, item[1].n, item[1].groups))
    return [pairs[first : first + size] for first in range(0, len(pairs), size)]


def compile_ahead(
    work: Work,
    processes: int,
    deadline: float,
    serve: Callable[..., None] | None = None,
) -> int:
    """Compile every kernel for its shapes; how many chunks of them were done by the deadline, of `time.time()`.

    Args:
        work: Shapes, and the names of the kernels that will be timed on each.
        processes: How many compile at once.
        deadline: When to stop.
        serve: What each process runs: called with the queues of tasks and of what is done, how many elements the pool of
            operands needs, and the deadline.
    """
    context = multiprocessing.get_context("spawn")
    tasks, done = context.Queue(), context.Queue()
    todo = chunks(work)
    elements = max([2**26, *(2 * shape.largest_operand for shape, _ in work)])
    for chunk in todo:
        tasks.put(chunk)
    number = min(processes, len(todo))
    for _ in range(number):
        tasks.put(None)
    running = [
        context.Process(target=serve or _compile, args=(tasks, done, elements, deadline), daemon=True) for _ in range(number)
    ]
    for process in running:
        process.start()
    finished = 0
    while any(process.is_alive() for process in running) and time.time() < deadline + PATIENCE_S:
        try:
            finished += done.get(timeout=0.2)
        except queue.Empty:
            continue
    for process in running:
        process.terminate()
        process.join()
    while True:
        try:
            finished += done.get(timeout=0.05)
        except queue.Empty:
            break
    tasks.cancel_join_thread()
    print(f"compiled ahead: {finished} of {len(todo)} parts", file=sys.stderr)
    return finished


def _compile(tasks: Any, done: Any, elements: int, deadline: float) -> None:
    """A process: compiles the chunks that it finds."""
    import torch

    from hil.kernels import RUNNERS
    from hil.timing import BufferPool

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = 256
    pool = BufferPool(elements=elements)
    with left_open():
        while (chunk := tasks.get()) is not None and time.time() < deadline:
            torch._dynamo.reset()
            for failed in compiled(chunk, RUNNERS, pool):
                print(f"not compiled ahead: {failed}", file=sys.stderr)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            done.put(1)


def compiled(chunk: Sequence[Item], runners: Any, pool: Any) -> list[str]:
    """Run each once; those that fail, which timing will name again, with why."""
    failed = []
    for name, shape in chunk:
        try:
            runners[name].bind(shape, pool)(0)
        except Exception as error:
            failed.append(f"{name} on {shape}: {type(error).__name__}")
    return failed
