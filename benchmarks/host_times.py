"""What the host does in a compiled step that no CUDA graph replays: the parts of its time, and what it launches in each.

`benchmarks/step_profile.py` writes it as `host`. The GPU is idle when a step begins, so that nothing but launching is timed.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hil import host

CALLS = {
    "triton": r"\.run\(",
    "extern": r"\bextern_kernels\.\w+\(|= torch\.ops\.[\w.]+\(",
    "allocations": r"= empty_strided\w*\(",
    "checks": r"\bassert_size_stride\(",
    "views": r"\breinterpret_tensor\(",
}
"""What a compiled graph's own Python calls, by how it is written."""
PACE_TURNS = 40


def written(source: str) -> dict[str, int]:
    """How often a compiled graph's source calls what.

    Args:
        source: Of the module that torch.compile writes for a forward or a backward.
    """
    body = source.partition("def call(self, args):")[2].partition("\nrunner = ")[0] or source
    return {name: len(re.findall(pattern, body)) for name, pattern in CALLS.items()}


@contextmanager
def graph_calls() -> Iterator[list[tuple[Any, int, float, float]]]:
    """Inside, every call of a compiled graph is kept: the graph, its inputs, when it began and when it ended (seconds)."""
    from torch._inductor.output_code import CompiledFxGraph

    calls: list[tuple[Any, int, float, float]] = []
    original = CompiledFxGraph.__call__

    def call(self: Any, inputs: Any) -> Any:
        number, begun = len(inputs), time.perf_counter()
        result = original(self, inputs)
        calls.append((self, number, begun, time.perf_counter()))
        return result

    setattr(CompiledFxGraph, "__call__", call)  # noqa: B010 (mypy refuses a plain assignment)
    try:
        yield calls
    finally:
        setattr(CompiledFxGraph, "__call__", original)  # noqa: B010


def pace() -> dict[str, float]:
    """How fast this host is: microseconds of each of `hil.host.quick`."""
    return {
        f"{name}_us": host.middle_us([host.seconds_of(call, host.QUICK_CALLS[name]) for _ in range(PACE_TURNS)])
        for name, call in host.quick().items()
    }


def host_times(step: Callable[[], None], turns: int = 40) -> dict[str, Any]:
    """Parts of a step's time on the host, medians in microseconds.

    `before_us` precedes the first compiled graph (guards), `between_us` is what passes between graphs (the loss, the start of the
    backward), `after_us` follows the last (gradients kept, and cleared).
    """
    totals: list[float] = []
    parts: dict[str, list[float]] = {"before_us": [], "between_us": [], "after_us": []}
    graphs: list[dict[str, Any]] = []
    spent: list[list[float]] = []
    for turn in range(turns):
        torch.cuda.synchronize()
        with graph_calls() as calls:
            begun = time.perf_counter()
            step()
            ended = time.perf_counter()
        totals.append(ended - begun)
        if not calls:
            continue
        if not graphs:
            graphs = [{**written(graph.source_code or ""), "inputs": number} for graph, number, _, _ in calls]
            spent = [[] for _ in graphs]
        inside = [end - start for _, _, start, end in calls]
        parts["before_us"].append(calls[0][2] - begun)
        parts["after_us"].append(ended - calls[-1][3])
        parts["between_us"].append(totals[turn] - sum(inside) - parts["before_us"][-1] - parts["after_us"][-1])
        for samples, seconds in zip(spent, inside, strict=False):
            samples.append(seconds)
    for graph, samples in zip(graphs, spent, strict=True):
        graph["us"] = host.middle_us(samples)
    tenths = statistics.quantiles(totals, n=10, method="inclusive")
    return {
        "step_us": host.middle_us(totals), "p10_us": round(1e6 * tenths[0], 2), "p90_us": round(1e6 * tenths[8], 2),
        **{name: host.middle_us(samples) for name, samples in parts.items() if samples},
        "graphs": graphs, "pace": pace(), **machine(),
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """The host, and how busy it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else "", "cpus": len(names), "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 1) for load in os.getloadavg()],
    }  # fmt: skip
