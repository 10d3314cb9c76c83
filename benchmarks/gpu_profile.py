"""What a GPU did in a few steps, read from torch's profiler: what computed, what was exchanged, and which hid which."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

STEPS, MOST_KERNELS = 3, 40
_LONGEST_NAME = 80
MARKER = "spin_kernel"
"""What `torch.cuda._sleep` launches, between the steps of a profile."""
KINDS = (
    ("allreduce", "all_reduce"), ("sendrecv", "all_to_all"), ("alltoall", "all_to_all"), ("broadcast", "broadcast"),
    ("allgather", "all_gather"), ("reducescatter", "reduce_scatter"),
)  # fmt: skip


class Event(NamedTuple):
    """A kernel, copy or fill on the GPU, in microseconds."""

    name: str
    start: float
    stop: float

    @property
    def us(self) -> float:
        """How long it took."""
        return self.stop - self.start


class Spans:
    """The union of events, as spans that do not touch."""

    def __init__(self, events: Sequence[Event]) -> None:
        """Of events in any order."""
        self.starts: list[float] = []
        self.stops: list[float] = []
        for event in sorted(events, key=lambda e: e.start):
            if self.stops and event.start <= self.stops[-1]:
                self.stops[-1] = max(self.stops[-1], event.stop)
            else:
                self.starts.append(event.start)
                self.stops.append(event.stop)

    @property
    def us(self) -> float:
        """Their sum."""
        return sum(self.stops) - sum(self.starts)

    def beside(self, event: Event) -> float:
        """How much of an event they cover."""
        near = slice(bisect_right(self.stops, event.start), bisect_left(self.starts, event.stop))
        pairs = zip(self.starts[near], self.stops[near], strict=True)
        return sum(min(event.stop, stop) - max(event.start, start) for start, stop in pairs)


def nccl_kind(name: str) -> str | None:
    """Which collective a kernel is of; None where it is not NCCL's at all."""
    low = name.lower()
    if not low.startswith("nccl"):
        return None
    return next((kind for part, kind in KINDS if part in low), "other")


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """What happened from the first marker to the last, a step: `exposed` is communication beside which nothing computes.

    A kernel is `beside` communication if more than half of it is.

    Raises:
        ValueError: there are not two markers.
    """
    at = _markers(events)
    inside = [event for event in events if at[0] <= event.start < at[-1] and MARKER not in event.name]
    computing = [event for event in inside if nccl_kind(event.name) is None]
    exchanging = [event for event in inside if nccl_kind(event.name)]
    compute, communication = Spans(computing), Spans(exchanging)
    span_us, busy_us, compute_us = at[-1] - at[0], Spans(inside).us, sum(event.us for event in computing)
    beside_us = sum(event.us for event in computing if communication.beside(event) > event.us / 2)
    kinds: dict[str, dict[str, float]] = {}
    for event in exchanging:
        row = kinds.setdefault(nccl_kind(event.name) or "", {"kernels": 0.0, "us": 0.0, "exposed_us": 0.0})
        for name, value in (("kernels", 1.0), ("us", event.us), ("exposed_us", event.us - compute.beside(event))):
            row[name] += value
    found = {
        "span_us": span_us, "busy_us": busy_us, "idle_us": span_us - busy_us,
        "compute_us": compute_us, "compute_kernels": len(computing),
        "communication_us": communication.us, "exposed_us": busy_us - compute.us,
        "beside_us": beside_us, "not_beside_us": compute_us - beside_us,
    }  # fmt: skip
    steps = len(at) - 1
    return {
        **{name: value / steps for name, value in found.items()},
        "spans_us": [stop - start for start, stop in zip(at, at[1:], strict=False)],
        "by_kind": {kind: {name: value / steps for name, value in row.items()} for kind, row in kinds.items()},
    }


def kernels(alone: Sequence[Event], joined: Sequence[Event]) -> list[dict[str, Any]]:
    """Computing kernels by name, a step, without exchanges and with them; those that take the longest, the longest first.

    `beside_us` is what launches took that were `beside` communication (see `summary`), `beside_alone_us` the same launches in
    the steps without exchanges, place by place in a step; None where a name has not as many launches in every step.
    """
    communication = Spans([event for event in joined if nccl_kind(event.name)])
    first, second = _by_name(alone), _by_name(joined)
    rows = []
    for name in {*first, *second}:
        apart, with_them = first.get(name, [[]] * STEPS), second.get(name, [[]] * STEPS)
        places = [[communication.beside(event) > event.us / 2 for event in launches] for launches in with_them]
        row: dict[str, Any] = {"kernel": name[:_LONGEST_NAME], "launches": len(apart[0])}
        for key, steps in (("us", apart), ("ddp_us", with_them)):
            row[key] = round(sum(event.us for launches in steps for event in launches) / len(steps), 3)
        touched = [(place, event.us) for near, launches in zip(places, with_them, strict=True)
                   for place, (event, is_near) in enumerate(zip(launches, near, strict=True)) if is_near]  # fmt: skip
        row["beside_launches"] = round(len(touched) / len(with_them), 3)
        row["beside_us"] = round(sum(us for _, us in touched) / len(with_them), 3)
        row["beside_alone_us"] = None
        if len({len(launches) for launches in (*apart, *with_them)}) == 1:
            usual = [sum(event.us for event in launches) / len(launches) for launches in zip(*apart, strict=True)]
            row["beside_alone_us"] = round(sum(usual[place] for place, _ in touched) / len(with_them), 3)
        rows.append(row)
    return sorted(rows, key=lambda row: -row["ddp_us"])[:MOST_KERNELS]


def _by_name(events: Sequence[Event]) -> dict[str, list[list[Event]]]:
    """Computing kernels from the first marker to the last: by name, for each step in order."""
    at = _markers(events)
    found: dict[str, list[list[Event]]] = {}
    for event in sorted(events, key=lambda e: e.start):
        step = bisect_right(at, event.start) - 1
        if 0 <= step < len(at) - 1 and MARKER not in event.name and nccl_kind(event.name) is None:
            found.setdefault(event.name, [[] for _ in at[1:]])[step].append(event)
    return found


def _markers(events: Sequence[Event]) -> list[float]:
    """When each marker began; raises ValueError where there are not two."""
    at = sorted(event.start for event in events if MARKER in event.name)
    if len(at) < 2:
        raise ValueError(f"the profile has {len(at)} markers among {len(events)} events")
    return at


def profiled(step: Callable[[], None], gathered: Callable[[bool], Sequence[bool]]) -> list[Event]:
    """Everything on the GPU in a few steps, with a marker before, between and behind them.

    Args:
        step: Is run on every rank, so that the profiler slows all alike.
        gathered: Every rank's value; all ranks wait for each other in it.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    events: list[Event] = []
    # What the host does is left out, for that slows it, unless the profiler gives nothing without.
    for activities in ([ProfilerActivity.CUDA], [ProfilerActivity.CUDA, ProfilerActivity.CPU]):
        with profile(activities=activities) as profiler:
            gathered(True)
            # The first is not looked at: ranks do not begin it together.
            step()
            for _ in range(STEPS):
                torch.cuda._sleep(1)
                step()
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
        events = [
            Event(event.name, float(event.time_range.start), float(event.time_range.end))
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
            and not event.name.startswith("nccl:")
        ]
        if all(gathered(sum(MARKER in event.name for event in events) > STEPS)):
            break
    return events
