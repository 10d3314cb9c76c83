"""Which of its candidates for a kernel torch.compile takes: timed so that it does not hang on what else the machine does.

torch.compile has a few forms of each of its kernels and times them when they first run. It starts a form's clock, then calls it:
a form that takes the GPU less time than the CPU needs for the call seems to take as long as that, like the next one, and the
choice is a throw of dice. Here the calls wait in the GPU's queue behind a pause, so that the clock sees the GPU alone.
`benchmarks/time_model.py repeat` has how far two choices are apart in both ways.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

# Calls that are timed; how long the GPU waits for them at first, how often the wait may grow by which factor.
_CALLS, _WAIT_S, _WAITS, _LONGER = 15, 2e-3, 4, 3.0


def queued_ms(call: Callable[[], object]) -> float:
    """Median milliseconds that the GPU takes for a call whose operands are not in its L2, however long the CPU takes for it."""
    import torch

    call()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    flushed = torch.empty(properties.L2_cache_size, dtype=torch.int8, device="cuda")
    # The clock's rate is at most this; a pause is then at least as long as it is meant to be.
    cycles_per_s = 2e9
    wait = _WAIT_S
    for _ in range(_WAITS):
        torch.cuda.synchronize()
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_CALLS)]
        begun = time.perf_counter()
        torch.cuda._sleep(int(wait * cycles_per_s))
        for start, stop in pairs:
            flushed.zero_()
            start.record()
            call()
            stop.record()
        queued = time.perf_counter() - begun
        torch.cuda.synchronize()
        if queued < wait:
            break
        wait = _LONGER * max(wait, queued)
    return statistics.median(start.elapsed_time(stop) for start, stop in pairs)


class _Queued:
    """Stands for `torch._inductor.runtime.benchmarking.benchmarker` where candidates are timed."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def benchmark(self, fn: Callable[[], object], *arguments: Any, device: Any = "cuda", **options: Any) -> Any:
        """As the original, which stays with other devices."""
        if str(device).partition(":")[0] != "cuda" or any(arguments):
            return self._original.benchmark(fn, *arguments, device=device, **options)
        return self.benchmark_gpu(fn)

    def benchmark_gpu(self, fn: Callable[[], object], **options: Any) -> float:
        """As the original: what the GPU cannot launch takes forever."""
        try:
            return queued_ms(fn)
        except RuntimeError as error:
            if "invalid configuration" in str(error):
                return float("inf")
            raise


@contextmanager
def locked_autotune(lock: AbstractContextManager[Any] | None = None) -> Iterator[None]:
    """Inside, torch.compile chooses anew among its candidates, by `queued_ms`, and holds the lock while it times them.

    What it chose on another occasion is neither read nor kept. It holds the lock, too, while it times products padded and as
    they are, by its own clock: there, what calls take the CPU is part of what it chooses by.
    """
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime import triton_heuristics

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def benchmark(self: Any, *args: Any, **kwargs: Any) -> Any:
            with lock or nullcontext():
                return original(self, *args, **kwargs)

        return benchmark

    def should_pad(*args: Any, **kwargs: Any) -> Any:
        with lock or nullcontext():
            return decided(*args, **kwargs)

    decided = pad_mm.should_pad
    with (
        patch.object(triton_heuristics, "benchmarker", _Queued(triton_heuristics.benchmarker)),
        _chosen(timed),
        patch.object(pad_mm, "should_pad", should_pad),
    ):
        yield


@contextmanager
def left_open() -> Iterator[None]:
    """Inside, torch.compile makes all its candidates and runs the first: whoever runs the kernel next chooses."""

    def untimed(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: {launcher: float(number) for number, launcher in enumerate(self.launchers)}

    with _chosen(untimed):
        yield


@contextmanager
def _chosen(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, what times a kernel's candidates is what `change` makes of it, and choices on disk count for nothing."""
    from torch._inductor import config
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    changed = change(CachingAutotuner.benchmark_all_configs)
    with (
        patch.object(CachingAutotuner, "benchmark_all_configs", changed),
        # What is compiled here has no such cache; what was compiled elsewhere would ask for it.
        config.patch(autotune_local_cache=False),
        patch.object(AutotuneCache, "create", lambda *_: None),
    ):
        yield
