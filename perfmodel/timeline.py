"""A discrete-event schedule of operations on streams: when each runs, what bounds the total, what is exposed.

A stream runs its operations one after the other in the order in which they are listed, as a CUDA stream does; an
operation starts when its stream is free and all that it waits for has ended. While an operation of `COMPUTE` and one of another
stream run at the same time, both may go on more slowly.
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
HOST = "host"
"""What is no stream of the GPU: it slows nothing there, and what it does alone is no communication."""

SAMPLES = 400

# Of a duration: what the difference of two moments is off by, at most.
_ROUNDED = 1e-9

SLOWER_DEVIATION = 0.10
"""Standard deviation of the share by which all that operations take longer beside others is off together.

Twice what it is in seven measured steps (docs/steps.md).
"""


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        name: Unique in its schedule.
        stream: Where it runs: `COMPUTE`, or a fabric's.
        us: Its duration in microseconds while nothing runs beside it.
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
        ends: When each has ended: later than its duration says where others ran beside it.
        waits: Indices of the operations that each waits for: those it names and the one before it on its stream.
    """

    ops: tuple[Op, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    waits: tuple[tuple[int, ...], ...]

    @cached_property
    def spent_us(self) -> tuple[float, ...]:
        """How long each runs."""
        return tuple(end - start for start, end in zip(self.starts, self.ends, strict=True))

    @property
    def total_us(self) -> float:
        """From the first start to the last end."""
        return max(self.ends, default=0.0)

    @property
    def gpu_us(self) -> float:
        """From the first start to the last end of what runs on the GPU."""
        return max((end for op, end in zip(self.ops, self.ends, strict=True) if op.stream != HOST), default=0.0)

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
        return sum(spent for op, spent in zip(self.ops, self.spent_us, strict=True) if op.stream == stream)

    @property
    def slowed_us(self) -> float:
        """How much longer `COMPUTE` runs for what runs beside it."""
        return max(0.0, self.busy_us(COMPUTE) - sum(op.us for op in self.ops if op.stream == COMPUTE))

    @cached_property
    def exposed_us(self) -> float:
        """How long other streams of the GPU run while `COMPUTE` does not."""
        events = sorted(
            (time, step, op.stream == COMPUTE)
            for op, start, end in zip(self.ops, self.starts, self.ends, strict=True)
            if op.stream != HOST
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
            sums[key] = sums.get(key, 0.0) + self.spent_us[i]
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

        What is `alike` is drawn once; beside that all of `COMPUTE` is off together by `COMMON_DEVIATION`, and what operations
        take longer beside others by `SLOWER_DEVIATION`. Draws are normal on either side of a duration, each side as wide as its
        own half of the interval.
        """
        if not self.ops:
            return 0.0, 0.0
        generator = np.random.default_rng(seed)
        half = samples // 2

        def draw() -> Array:
            normal = generator.standard_normal(half)
            return np.concatenate([normal, -normal])

        shared: dict[str, Array] = {}
        common, slower = 1 + COMMON_DEVIATION * draw(), np.maximum(1 + SLOWER_DEVIATION * draw(), 0.0)
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
            if (more := self.spent_us[i] - op.us) > _ROUNDED * op.us:
                time = time * (1 + more / op.us * slower)
            ends[i] = time
            if waits:
                ends[i] += ends[waits[0]] if len(waits) == 1 else ends[list(waits)].max(axis=0)
        low, high = np.quantile(ends.max(axis=0), [0.05, 0.95])
        return min(float(low), self.total_us), max(float(high), self.total_us)


Slower = Callable[[Op, Op], tuple[float, float]]
"""How many times as long an operation of `COMPUTE` takes beside another stream's, and that beside it; each 1 or more."""


def schedule(ops: Sequence[Op], slower: Slower | None = None) -> Timeline:
    """Run operations on their streams.

    Args:
        ops: In the order in which they are issued; each stream keeps it.
        slower: What those that run at the same time cost one another; None for nothing. Beside several an operation of
            `COMPUTE` goes as slowly as beside the worst of them.

    Raises:
        ValueError: two operations of one name, one that waits for what is not listed before it, or a duration that is
            none or outside its own interval.
    """
    waits = _waits(ops)
    queues: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        queues.setdefault(op.stream, []).append(i)
    starts, ends = [0.0] * len(ops), [0.0] * len(ops)
    ended: set[int] = set()
    left: dict[int, float] = {}
    place = dict.fromkeys(queues, 0)
    now = 0.0
    while True:
        # Whatever may begin does, and what takes no time has ended at once, so that more may.
        while begun := [
            queue[place[stream]]
            for stream, queue in queues.items()
            if place[stream] < len(queue) and queue[place[stream]] not in left and ended.issuperset(waits[queue[place[stream]]])
        ]:
            for i in begun:
                starts[i] = now
                left[i] = ops[i].us
                if not ops[i].us:
                    del left[i]
                    _end(i, now, ops, ends, ended, place)
        if not left:
            break
        rates = _rates(list(left), ops, slower)
        first = min(left, key=lambda i: left[i] / rates[i])
        elapsed = left[first] / rates[first]
        now += elapsed
        for i in list(left):
            left[i] = max(left[i] - elapsed * rates[i], 0.0)
        for i in [i for i, rest in left.items() if i == first or not rest]:
            del left[i]
            _end(i, now, ops, ends, ended, place)
    return Timeline(tuple(ops), tuple(starts), tuple(ends), waits)


def _end(i: int, now: float, ops: Sequence[Op], ends: list[float], ended: set[int], place: dict[str, int]) -> None:
    ends[i] = now
    ended.add(i)
    place[ops[i].stream] += 1


def _rates(running: Sequence[int], ops: Sequence[Op], slower: Slower | None) -> dict[int, float]:
    """How fast each that runs goes on, 1 for as if alone."""
    rates = dict.fromkeys(running, 1.0)
    computing = next((i for i in running if ops[i].stream == COMPUTE), None)
    if slower is not None and computing is not None:
        for i in running:
            if i != computing and ops[i].stream != HOST:
                own, other = slower(ops[computing], ops[i])
                rates[computing], rates[i] = min(rates[computing], 1 / own), 1 / other
    return rates


def _waits(ops: Sequence[Op]) -> tuple[tuple[int, ...], ...]:
    """Indices of what each operation waits for; raises as `schedule` does."""
    index: dict[str, int] = {}
    last: dict[str, int] = {}
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
        waits.append(tuple(dict.fromkeys(before)))
        index[op.name] = last[op.stream] = i
    return tuple(waits)
