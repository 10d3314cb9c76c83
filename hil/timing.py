"""Timing GPU kernels by replaying CUDA graphs whose launches rotate over buffers.

Rotation keeps a launch from finding its operands in the L2 that the launch before left there: the buffers of one graph
together exceed twice the L2 wherever the launch limit allows (a launch below about 0.8 MB stays L2-resident, as the
output of the kernel before it would be in a model).

A graph's replay leaves out what it costs to call a kernel from Python, which is what a small layer takes in a model that
runs eagerly: `eager_call_us` times that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ROTATION_BYTES = 160 * 2**20
MAX_LAUNCHES = 192
MIN_LAUNCHES = 4
# What moves more than this is launched once in a graph: no L2 helps it, and several results would not fit beside those of others.
SINGLE_BYTES = 3.5e9
# A call of longer is made once a turn.
SINGLE_US = 2e3
# Values of each dtype that operands are cut from, each out of a half (`BufferPool.view`).
POOL_ELEMENTS = 2**30
_KEPT_VIEWS = 2048


@dataclass(frozen=True)
class Timing:
    """Samples of one kernel's time; a sample is a graph replay divided by its launches.

    Attributes:
        samples_us: Every sample, in microseconds, in the order measured.
        launches: Kernel calls in one graph.
    """

    samples_us: tuple[float, ...]
    launches: int

    def quantile(self, q: float) -> float:
        """Linear-interpolated quantile of the samples, in microseconds."""
        return float(torch.tensor(self.samples_us, dtype=torch.float64).quantile(q))

    @property
    def outliers(self) -> int:
        """Samples further from the median than five times the distance from p10 to p90; they stay among the samples."""
        middle, reach = self.quantile(0.5), 5 * (self.quantile(0.9) - self.quantile(0.1))
        return sum(abs(sample - middle) > reach for sample in self.samples_us)


def launches_for(bytes_per_launch: int) -> int:
    """Launches per graph: enough that the rotated buffers exceed twice the L2, within limits."""
    if bytes_per_launch > SINGLE_BYTES:
        return 1
    return max(MIN_LAUNCHES, min(MAX_LAUNCHES, -(-ROTATION_BYTES // max(bytes_per_launch, 1))))


def capture(launch: Callable[[int], object], launches: int) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """Capture `launch(0) ... launch(launches - 1)` in one CUDA graph.

    Returns the graph and the launches' results, which must stay referenced while it is replayed: they are the
    rotated output buffers.
    """
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [launch(index) for index in range(launches)]
    return graph, results


def time_interleaved(graphs: Sequence[tuple[torch.cuda.CUDAGraph, int]], budget_ms: float = 12.0) -> list[Timing]:
    """Replay several graphs in turn, so that a drift of the clocks hits all alike.

    Args:
        graphs: (graph, launches in it).
        budget_ms: Replay time to spend on each graph, within 7 to 25 replays.
    """
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    counts = []
    for graph, _ in graphs:
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        counts.append(int(max(7, min(25, budget_ms / max(start.elapsed_time(stop), 1e-3)))))
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
    for turn in range(max(counts)):
        for index, (graph, _) in enumerate(graphs):
            if turn < counts[index]:
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                pair[0].record()
                graph.replay()
                pair[1].record()
                events[index].append(pair)
    torch.cuda.synchronize()
    return [
        Timing(tuple(1e3 * first.elapsed_time(last) / launches for first, last in pairs), launches)
        for pairs, (_, launches) in zip(events, graphs, strict=True)
    ]


def eager_call_us(launch: Callable[[int], object], kernel_us: float, budget_ms: float = 1.0, turns: int = 3) -> float:
    """Median wall time of a call among back-to-back eager calls, in microseconds.

    The GPU's work is waited for after the last call only, so this is the larger of the kernel's time and of what a call
    costs on the CPU.

    Args:
        launch: The kernel, called with a rotating index.
        kernel_us: Its time in a graph, by which the number of calls is chosen.
        budget_ms: Time to spend on one turn, within 4 to 64 calls; one call of a kernel above `SINGLE_US`.
        turns: Turns that the median is taken over.
    """
    calls = 1 if kernel_us > SINGLE_US else int(max(4, min(64, 1e3 * budget_ms / max(kernel_us, 1.0))))
    samples = []
    # The first turn fills caches, and is no sample.
    for _ in range(turns + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for index in range(calls):
            launch(index)
        torch.cuda.synchronize()
        samples.append(1e6 * (time.perf_counter() - start) / calls)
    return statistics.median(samples[1:])


class BufferPool:
    """Random operands, cut at rotating offsets from one allocation per dtype.

    Values are standard normal (bf16 as they are; e4m3 rounded to nearest), since all-zero operands draw less power and
    run faster than real data.
    """

    def __init__(self, device: str = "cuda", elements: int = POOL_ELEMENTS, seed: int = 0) -> None:
        """Allocate and fill `elements` values of each dtype (3 bytes an element in all)."""
        generator = torch.Generator(device=device).manual_seed(seed)
        self._bf16 = torch.empty(elements, dtype=torch.bfloat16, device=device)
        self._e4m3 = torch.empty(elements, dtype=torch.float8_e4m3fn, device=device)
        for piece_b, piece_e in zip(self._bf16.split(2**26), self._e4m3.split(2**26), strict=True):
            piece_b.normal_(generator=generator)
            piece_e.copy_(piece_b)
        self._elements = elements
        self._views: dict[tuple[object, ...], torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the operands lie."""
        return self._bf16.device

    def view(self, shape: tuple[int, ...], index: int, slot: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Operand number `slot` (0 or 1) of launch `index`.

        The slots lie in halves of their own: overlapping operands would be correlated, and a product of correlated
        operands is not what its shape's time and error are wanted for. Launches take distinct memory up to half the pool.

        Raises:
            ValueError: the operand exceeds half the pool.
        """
        key = (shape, index, slot, dtype)
        if key not in self._views:
            # A view costs more to make than some kernels cost to call: keep those of the shape at hand.
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            self._views[key] = self._cut(shape, index, slot, dtype)
        return self._views[key]

    def _cut(self, shape: tuple[int, ...], index: int, slot: int, dtype: torch.dtype) -> torch.Tensor:
        size = 1
        for extent in shape:
            size *= extent
        half = self._elements // 2
        if size > half:
            raise ValueError(f"operand of shape {shape} exceeds half the pool of {self._elements} elements; enlarge it")
        pool = self._e4m3 if dtype is torch.float8_e4m3fn else self._bf16
        steps = -(-size // 1024)
        room = max((half - size) // 1024, 1)
        offset = slot * half + (index * steps % room) * 1024
        return pool[offset : offset + size].view(shape)
