"""Every assignment of kernels to one site's passes, priced at once.

A tensor is read by two passes, so the cost of an assignment is a term a pass (its GEMM) and a term a pair of passes (what
makes the tensor that both read). Totals of all assignments are sums of small arrays; only intervals, which equal launches
enter together, need the launches one by one: as counts over the site's distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_sim.dispatch.candidates import Row, SiteShape, legal_fp8
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.operands import Toolbox
from perfmodel.kernels import KERNELS

Array = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Place = tuple[int, ...]
"""An assignment: per pass the place of its kernel in `SiteCosts.options`, or its length for a pass that is left out."""

_CHUNKS = (16, 64, 256)


@dataclass(frozen=True)
class _Tensor:
    """What makes one of x, w, g.

    What kernels take of it is numbered from 1; 0 is a kernel that takes nothing quantized, or a pass left out.

    Attributes:
        axes: The one or two passes that read it.
        taken: For each of them, what each of its kernels takes, (options + 1,).
        rows: The rows launched, for each taking of the first pass and each of the second.
    """

    axes: list[int]
    taken: list[Places]
    rows: list[list[list[int]]]


class SiteCosts:
    """Costs of a site's assignments, and which of them gain enough, and surely.

    Attributes:
        shape: The site.
        options: Per pass the kernels that it may run, bf16 included, by name.
        bf16: The place where all passes are in bf16.
        totals: Time of every assignment, microseconds, an axis a pass.
    """

    def __init__(self, shape: SiteShape, times: Times, toolbox: Toolbox, min_speedup: float) -> None:
        """Price a site.

        Args:
            shape: The site.
            times: Predicted time of every row of `possible_rows(shape, toolbox)`.
            toolbox: Kernels to choose from, with the same times.
            min_speedup: Least speedup of the passes that an assignment converts, together and each.
        """
        self.shape, self.min_speedup = shape, min_speedup
        stays = shape.bf16()
        # By name: of equal totals the first place is the one of the least names.
        self.options = [sorted((stays[name], *legal_fp8(shape, name, toolbox))) for name in shape.names]
        self.bf16: Place = tuple(names.index(stays[name]) for names, name in zip(self.options, shape.names, strict=True))
        self._index: dict[Row, int] = {}
        gemms = [
            [self._row(Row(k, *shape.gemm(name))) for k in names] for names, name in zip(self.options, shape.names, strict=True)
        ]
        self._tensors = [found for tensor in "xwg" if (found := self._tensor(tensor, toolbox))]
        columns = np.array([times.of[row] for row in self._index])
        self._us, self._below, self._above = columns[:, 0], columns[:, 0] - columns[:, 1], columns[:, 2] - columns[:, 0]
        self._gemms = [self._counts([*([row] for row in rows), []]) for rows in gemms]
        self._made = [
            self._counts([row for line in t.rows for row in line]).reshape(len(t.rows), len(t.rows), -1) for t in self._tensors
        ]
        self.totals = self._totals()
        self._order = self._gaining()
        # Whether their gains are sure: -1 where nobody asked yet.
        self._sure = np.full(len(self._order), -1, dtype=np.int8)

    def _row(self, row: Row) -> int:
        return self._index.setdefault(row, len(self._index))

    def _counts(self, lists: Sequence[Sequence[int]]) -> Array:
        """How often each of the site's rows is in each list, (lists, rows)."""
        result = np.zeros((len(lists), len(self._index)))
        for number, rows in enumerate(lists):
            for row in rows:
                result[number, row] += 1
        return result

    def _tensor(self, tensor: str, toolbox: Toolbox) -> _Tensor | None:
        """Who reads a tensor, and what is launched for each pair of what they take; None where nobody takes it quantized."""
        axes: list[int] = []
        turned: list[bool] = []
        takes: list[list[str | None]] = []
        for axis, name in enumerate(self.shape.names):
            for side, use in enumerate(self.shape.reads(name)):
                if use.tensor == tensor:
                    specs = [KERNELS[kernel] for kernel in self.options[axis]]
                    axes.append(axis)
                    turned.append(use.transposed)
                    takes.append([(spec.takes_a, spec.takes_b)[side] for spec in specs])
        kinds = sorted({some for taken in takes for some in taken if some is not None})
        if not kinds:
            return None
        number: dict[str | None, int] = {some: i for i, some in enumerate((None, *kinds))}
        size = self.shape.tensor(tensor)

        def made(some: str, *readings: bool) -> list[int]:
            return [self._row(launch.row) for launch in toolbox.fastest(some, frozenset(readings), *size)]

        alone = [
            [[], *(made(some, reading) if some in taken else [] for some in kinds)]
            for reading, taken in zip(turned, takes, strict=True)
        ]
        if len(axes) == 1:
            alone.append([[] for _ in number])
        rows = [[first + second for second in alone[1]] for first in alone[0]]
        for some in kinds:
            if len(axes) == 2 and some in takes[0] and some in takes[1]:
                rows[number[some]][number[some]] = made(some, *turned)
        # A pass that is left out takes nothing.
        taken = [np.array([*(number[some] for some in each), 0]) for each in takes]
        return _Tensor(axes, taken, rows)

    def _along(self, values: npt.NDArray[Any], *axes: int) -> npt.NDArray[Any]:
        """Values of one or two passes, laid along their axes of `totals`."""
        shape = [1] * len(self.options)
        for axis in axes:
            shape[axis] = len(self.options[axis])
        return values.reshape(shape)

    def _totals(self) -> Array:
        total: Array = np.zeros([len(names) for names in self.options])
        for axis, counts in enumerate(self._gemms):
            total = total + self._along(counts[:-1] @ self._us, axis)
        for tensor, counts in zip(self._tensors, self._made, strict=True):
            taken = [some[:-1] for some in tensor.taken] + [np.zeros(1, dtype=np.int64)] * (2 - len(tensor.axes))
            total = total + self._along((counts @ self._us)[np.ix_(*taken)], *tensor.axes)
        return total

    def launched(self, places: Places) -> Array:
        """How often each distinct row is launched, (places, rows)."""
        result: Array = sum(counts[places[:, axis]] for axis, counts in enumerate(self._gemms))  # type: ignore[assignment]
        for tensor, counts in zip(self._tensors, self._made, strict=True):
            first, *second = (taken[places[:, axis]] for axis, taken in zip(tensor.axes, tensor.taken, strict=True))
            result = result + counts[first, second[0] if second else 0]
        return result

    def difference(self, places: Places, without: Places) -> tuple[Array, Array, Array]:
        """As `Times.difference`, of many assignments at once: microseconds and both ends of the 90% interval, (places,)."""
        change = self.launched(places) - self.launched(without)
        new, gone = np.maximum(change, 0.0), np.maximum(-change, 0.0)
        us = change @ self._us
        below = np.sqrt((new**2) @ self._below**2 + (gone**2) @ self._above**2)
        above = np.sqrt((new**2) @ self._above**2 + (gone**2) @ self._below**2)
        return us, us - below, us + above

    def kernels(self, place: Place) -> dict[str, str]:
        """The kernel of each pass."""
        return {name: self.options[axis][place[axis]] for axis, name in enumerate(self.shape.names)}

    def _bf16_us(self, axis: int) -> float:
        return float(self._gemms[axis][self.bf16[axis]] @ self._us)

    def _gaining(self) -> Places:
        """Assignments faster than bf16 that gain enough as a whole and by each pass, the fastest first, (assignments, passes)."""
        saved: Array = np.zeros(self.totals.shape)
        number = np.zeros(self.totals.shape)
        converts = []
        for axis, names in enumerate(self.options):
            converted = self._along(np.arange(len(names)) != self.bf16[axis], axis)
            converts.append(converted)
            saved, number = saved + self._bf16_us(axis) * converted, number + converted
        bf16 = self.totals[self.bf16]
        gain = (self.totals < bf16) & (saved >= self.min_speedup * (self.totals - bf16 + saved)) & (number > 0)
        for axis, converted in enumerate(converts):
            back = np.take(self.totals, [self.bf16[axis]], axis=axis)
            one = self._bf16_us(axis)
            gain &= ~converted | (number == 1) | (one >= self.min_speedup * (self.totals - back + one))
        flat = np.flatnonzero(gain)
        ordered = flat[np.argsort(self.totals.ravel()[flat], kind="stable")]
        return np.stack(np.unravel_index(ordered, self.totals.shape), axis=1).astype(np.int64)

    def _tests(self, places: Places) -> list[tuple[Places, npt.NDArray[np.bool_]]]:
        """What assignments must surely beat, and which of them must: bf16, and each converted pass taken back."""
        home = np.array(self.bf16)
        converted = places != home
        several = converted.sum(axis=1) > 1
        tests = [(np.broadcast_to(home, places.shape), np.ones(len(places), dtype=bool))]
        for axis in range(places.shape[1]):
            back = places.copy()
            back[:, axis] = home[axis]
            tests.append((back, several & converted[:, axis]))
        return tests

    def surely(self, places: Places) -> npt.NDArray[np.bool_]:
        """Whether every gain of these assignments survives the prediction interval, (places,)."""
        sure = np.ones(len(places), dtype=bool)
        for without, needed in self._tests(places):
            some = np.flatnonzero(needed & sure)
            if len(some):
                sure[some] = self.difference(places[some], without[some])[2] < 0
        return sure

    def best(self, allowed: Sequence[Sequence[bool]]) -> Place:
        """The fastest assignment that gains enough and surely, of those whose kernels are all allowed; bf16 if there is none."""
        order = self._order
        keep = np.flatnonzero(np.all([np.asarray(some)[order[:, axis]] for axis, some in enumerate(allowed)], axis=0))
        start = 0
        for size in (*_CHUNKS, len(keep)):
            some = keep[start : start + size]
            fresh = some[self._sure[some] < 0]
            if len(fresh):
                self._sure[fresh] = self.surely(order[fresh])
            found = some[self._sure[some] == 1]
            if len(found):
                return tuple(order[found[0]].tolist())
            start += size
        return self.bf16

    def shortfall(self, place: Place) -> str | None:
        """Why an assignment is not admissible, in words; None when it is."""
        places = np.array([place])
        for number, (without, needed) in enumerate(self._tests(places)):
            if not needed[0] or place == self.bf16:
                continue
            back = tuple(without[0].tolist())
            saved = sum(self._bf16_us(axis) for axis in range(len(place)) if place[axis] != back[axis])
            spent = float(self.totals[place] - self.totals[back]) + saved
            speedup = saved / spent if spent > 0 else float("inf")
            label = f"{self.shape.names[number - 1]}: " if number else ""
            if speedup < 1.0:
                return f"{label}{speedup:.2f}x, slower than bf16 with its quantization"
            if speedup < self.min_speedup:
                return f"{label}{speedup:.2f}x with its quantization is below the least speedup {self.min_speedup:g}"
            if not self.difference(places, without)[2][0] < 0:
                return f"{label}{speedup:.2f}x with its quantization, but the gain does not survive the prediction interval"
        return None

    def added(self, place: Place) -> list[list[Time]]:
        """What each kernel of each pass adds to the site, the other passes as they are: its GEMM and the quantization for it."""
        sizes = [len(names) for names in self.options]
        places = np.tile(np.array(place), (sum(sizes), 1))
        without = places.copy()
        start = 0
        for axis, size in enumerate(sizes):
            places[start : start + size, axis], without[start : start + size, axis] = np.arange(size), size
            start += size
        columns: Any = zip(*(column.tolist() for column in self.difference(places, without)), strict=True)
        times = iter([Time(*entry) for entry in columns])
        return [[next(times) for _ in range(size)] for size in sizes]

    def gemm_us(self, axis: int) -> list[float]:
        """Time of each kernel of a pass alone."""
        found: list[float] = (self._gemms[axis][:-1] @ self._us).tolist()
        return found
