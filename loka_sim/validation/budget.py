"""One deadline for a validation: what each stage may take of the time that is left, and which are cut.

A stage's time is its part of what is left when it begins, so that what one takes too long the later ones make up for, and
what it leaves they have. Where the least of all that are to come does not fit, the lowest in rank is not begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """What a stage may take.

    Attributes:
        share: Of the time that all stages take together.
        least_s: Seconds that it is worth beginning for; half of them where nothing else is waiting.
        rank: The lowest is cut first.
    """

    share: float
    least_s: float
    rank: int


PARTS: Mapping[str, Part] = {
    "times_gemms": Part(0.10, 18, 7),
    "sampled": Part(0.08, 10, 3),
    "times_first": Part(0.22, 8, 6),
    "tensors": Part(0.10, 6, 4),
    # What it needs, if so much: where all of the model is measured it takes none, and the later ones have it.
    "times_second": Part(0.24, 8, 1),
    "times_fresh": Part(0.18, 8, 2),
    "step": Part(0.18, 8, 5),
}
"""Stages in the order in which they run. The shares of a run of 4 minutes on an H200; the least is what starting a process,
or compiling the first kernels, takes there."""

RESERVE_S, WRITING_S = 10.0, 4.0
"""For refining twice, deciding anew and writing the report; for the last alone."""


class Budget:
    """The time of one run.

    Args:
        seconds: All of it, from now on.
        parts: Its stages, in order.
        reserve_s: Kept for what comes between and after them.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        seconds: float,
        parts: Mapping[str, Part] = PARTS,
        reserve_s: float = RESERVE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The time runs from now on."""
        self._clock, self._parts, self.reserve_s = clock, parts, reserve_s
        self._waiting = list(parts)
        self.deadline = clock() + seconds

    def left(self) -> float:
        """Seconds until the deadline, less than 0 beyond it."""
        return self.deadline - self._clock()

    def done(self, name: str) -> None:
        """A stage whose result is there already, or that does not come, takes no time."""
        if name in self._waiting:
            self._waiting.remove(name)

    def until(self, name: str) -> float:
        """Seconds until a stage ends, if it and all before it that are to come take what their shares are."""
        ahead = self._waiting[: self._waiting.index(name) + 1]
        every = sum(self._parts[other].share for other in self._waiting)
        return max(self.left() - self.reserve_s, 0.0) * sum(self._parts[other].share for other in ahead) / every

    def begin(self, name: str) -> float | None:
        """Seconds that a stage which begins now may take; None where it is cut."""
        left = max(self.left() - self.reserve_s, 0.0)
        ahead = self._waiting[self._waiting.index(name) :]
        self._waiting.remove(name)
        kept = sorted(ahead, key=lambda other: -self._parts[other].rank)
        while len(kept) > 1 and sum(self._parts[other].least_s for other in kept) > left:
            kept.pop()
        part = self._parts[name]
        if name not in kept or left < part.least_s / 2:
            return None
        seconds = left * part.share / sum(self._parts[other].share for other in kept)
        return min(left, max(seconds, part.least_s))
