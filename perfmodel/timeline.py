"""A discrete-event schedule of operations on streams: when each runs, what bounds the total, what is exposed.

A stream runs its operations one after the other in the order in which they are listed, as a CUDA stream does; an
operation starts when its stream is free and all that it waits for has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from perfmodel.information import NORMAL_90
from perfmodel.step import COMMON_DEVIATION

Array = npt.NDArray[np.float64]

COMPUTE = "compute"
"""The stream that the others should hide behind."""

SAMPLES = 400


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: Unique in its schedule.
        stream: Where it runs: `COMPUTE`, or a fabric's.
        us: Its duration in microseconds.
        low_us: Lower end of the duration's 90% interval.
        high_us: Upper end.
        after: Names of operations, listed before it, that must have ended.
        kind: What it is, for sums: gemm, quantize, all_to_all, ...
        alike: Operations that name the same are off by the same share; None for one whose error is its own.
        details: What a trace shows of it beside its times; plain JSON values.
    """

    name: str
    stream: str
    us: float
    low_us: float
    high_us: float
    after: tuple[str, ...] = ()
    kind: str = "compute"
    alike: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """A schedule.

    Attributes:
        ops: As listed.
        starts: When each begins, in microseconds.
        waits: Indices of the operations that each waits for: those it names and the one before it on its stream.
    """

    ops: tuple[Op, ...]
    starts: tuple[float, ...]
    waits: tuple[tuple[int, ...], ...]

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """When each ends, in microseconds."""
        return tuple(start + op.us for start, op in zip(self.starts, self.ops, strict=True))

    @property
    def total_us(self) -> float:
        """From the first start to the last end."""
        return max(self.ends, default=0.0)

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Indices of a chain of operations without a gap from time 0 to the end: shorten none of them, and nothing is won."""
        if not self.ops:
            return ()
        at = max(range(len(self.ops)), key=lambda i: self.ends[i])
        path = [at]
        while self.waits[at] and self.starts[at] > 0:
            at = max(self.waits[at], key=lambda i: self.ends[i])
            path.append(at)
        return tuple(reversed(path))

    @property
    def streams(self) -> tuple[str, ...]:
        """Names, `COMPUTE` first, the others as they first appear."""
        return tuple(sorted(dict.fromkeys(op.stream for op in self.ops), key=lambda name: name != COMPUTE))

    def busy_us(self, stream: str) -> float:
        """How long a stream runs something."""
        return sum(op.us for op in self.ops if op.stream == stream)

    @cached_property
    def exposed_us(self) -> float:
        """How long other streams run while `COMPUTE` does not."""
        events = sorted(
            (time, step, op.stream == COMPUTE)
            for op, start, end in zip(self.ops, self.starts, self.ends, strict=True)
            for time, step in ((start, 1), (end, -1))
        )
        exposed, since, computing, others = 0.0, 0.0, 0, 0
        for time, step, on_compute in events:
            if others and not computing:
                exposed += time - since
            since = time
            computing, others = (computing + step, others) if on_compute else (computing, others + step)
        return exposed

    def sum_us(self, by: str = "kind", only: Iterable[int] | None = None) -> dict[str, float]:
        """Durations added up by an attribute of `Op`, the largest sum first.

        Args:
            by: `kind` or `stream`.
            only: Indices, such as those of the critical path; None for all.
        """
        sums: dict[str, float] = {}
        for i in range(len(self.ops)) if only is None else only:
            key = getattr(self.ops[i], by)
            sums[key] = sums.get(key, 0.0) + self.ops[i].us
        return dict(sorted(sums.items(), key=lambda entry: -entry[1]))

    def spans(self, label: Callable[[Op], str], resolution: float = 1e-3) -> dict[str, list[tuple[float, float, str]]]:
        """What each stream does, in few words: (start, end, label) of stretches of one label.

        Args:
            label: What an operation counts as.
            resolution: Share of the total up to which a gap inside a stretch is passed over.
        """
        gap = resolution * self.total_us
        found: dict[str, list[tuple[float, float, str]]] = {stream: [] for stream in self.streams}
        for op, start, end in zip(self.ops, self.starts, self.ends, strict=True):
            own, what = found[op.stream], label(op)
            if own and own[-1][2] == what and start - own[-1][1] <= gap:
                own[-1] = (own[-1][0], end, what)
            else:
                own.append((start, end, what))
        return found

    def interval(self, seed: int = 0, samples: int = SAMPLES) -> tuple[float, float]:
        """The total's 90% interval: the schedule run again with durations drawn from theirs.

        What is `alike` is drawn once; beside that all of `COMPUTE` is off together by `COMMON_DEVIATION`. Draws are
        normal on either side of a duration, each side as wide as its own half of the interval.
        """
        if not self.ops:
            return 0.0, 0.0
        generator = np.random.default_rng(seed)
        half = samples // 2

        def draw() -> Array:
            normal = generator.standard_normal(half)
            return np.concatenate([normal, -normal])

        shared: dict[str, Array] = {}
        common = 1 + COMMON_DEVIATION * draw()
        ends = np.empty((len(self.ops), 2 * half))
        for i, (op, waits) in enumerate(zip(self.ops, self.waits, strict=True)):
            if op.alike is None:
                normal = draw()
            else:
                if op.alike not in shared:
                    shared[op.alike] = draw()
                normal = shared[op.alike]
            time = op.us + normal / NORMAL_90 * np.where(normal > 0, op.high_us - op.us, op.us - op.low_us)
            time = np.maximum(time, 0.0) * (common if op.stream == COMPUTE else 1.0)
            ends[i] = time
            if waits:
                ends[i] += ends[waits[0]] if len(waits) == 1 else ends[list(waits)].max(axis=0)
        low, high = np.quantile(ends.max(axis=0), [0.05, 0.95])
        return min(float(low), self.total_us), max(float(high), self.total_us)


def schedule(ops: Sequence[Op]) -> Timeline:
    """Run operations on their streams.

    Args:
        ops: In the order in which they are issued; each stream keeps it.

    Raises:
        ValueError: two operations of one name, one that waits for what is not listed before it, or a duration that is
            none or outside its own interval.
    """
    index: dict[str, int] = {}
    last: dict[str, int] = {}
    starts: list[float] = []
    waits: list[tuple[int, ...]] = []
    for i, op in enumerate(ops):
        if op.name in index:
            raise ValueError(f"operation {op.name!r} is listed twice; give each a name of its own")
        if not 0 <= op.low_us <= op.us <= op.high_us < float("inf"):
            raise ValueError(f"operation {op.name!r} takes {op.us} us [{op.low_us}, {op.high_us}]; give 0 <= low <= us <= high")
        unknown = [name for name in op.after if name not in index]
        if unknown:
            raise ValueError(f"operation {op.name!r} waits for {unknown[0]!r}, which is not listed before it")
        before = [index[name] for name in op.after]
        if op.stream in last:
            before.append(last[op.stream])
        starts.append(max((starts[j] + ops[j].us for j in before), default=0.0))
        waits.append(tuple(dict.fromkeys(before)))
        index[op.name] = last[op.stream] = i
    return Timeline(tuple(ops), tuple(starts), tuple(waits))
