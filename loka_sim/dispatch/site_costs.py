"""Every assignment of kernels to one site's passes, priced at once.

A tensor is read by two passes, so the cost of an assignment is a term a pass (its GEMM) and a term a pair of passes (what
makes the tensor that both read). Totals of all assignments are sums of small arrays; only intervals, which equal launches
enter together, need the launches one by one: as counts over the site's distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_sim.dispatch.candidates import Row, SiteShape, Use, legal_fp8
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.operands import Toolbox
from perfmodel.kernels import KERNELS

Array = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Place = tuple[int, ...]
"""An assignment: per pass the place of its kernel in `SiteCosts.options`, or its length for a pass that is left out."""

_CHUNKS = (16, 64, 256)


@dataclass(frozen=True, eq=False)
class _Tensor:
    """Who reads one of x, w, g, and what is to be made of it.

    What kernels take of it is numbered from 1; 0 is a kernel that takes nothing quantized, or a pass left out.

    Attributes:
        name: x, w or g.
        axes: The one or two passes that read it.
        taken: For each of them, what each of its kernels takes, (options + 1,).
        needs: Quantized readings that are made together: what kernels take, and the readings.
        made: Which of `needs` serve each taking of the first pass and each of the second.
    """

    name: str
    axes: list[int]
    taken: list[Places]
    needs: list[tuple[str, frozenset[bool]]]
    made: list[list[tuple[int, ...]]]


@dataclass(frozen=True, eq=False)
class _Layout:
    """How often each distinct row of a site is in what its assignments launch; sites differ in it where sizes coincide.

    Attributes:
        gemms: Per pass, of each kernel's GEMM, and last of no kernel, (options + 1, rows).
        made: Per tensor, of what makes it, for each taking of its first pass and each of its second, (takings, takings, rows).
    """

    gemms: list[Array]
    made: list[Array]


Options = tuple[tuple[str, ...], ...]
"""Per pass the kernels that it may run, by name."""


@cache
def _tensors(options: Options, reads: tuple[tuple[Use, Use], ...]) -> tuple[_Tensor, ...]:
    """The tensors that some kernel takes quantized."""
    found = (_tensor(name, options, reads) for name in "xwg")
    return tuple(tensor for tensor in found if tensor is not None)


def _tensor(name: str, options: Options, reads: tuple[tuple[Use, Use], ...]) -> _Tensor | None:
    axes: list[int] = []
    turned: list[bool] = []
    takes: list[list[str | None]] = []
    for axis, kernels in enumerate(options):
        for side, use in enumerate(reads[axis]):
            if use.tensor == name:
                axes.append(axis)
                turned.append(use.transposed)
                takes.append([(KERNELS[kernel].takes_a, KERNELS[kernel].takes_b)[side] for kernel in kernels])
    kinds = sorted({some for taken in takes for some in taken if some is not None})
    if not kinds:
        return None
    number: dict[str | None, int] = {some: i for i, some in enumerate((None, *kinds))}
    needs: list[tuple[str, frozenset[bool]]] = []

    def need(some: str, *readings: bool) -> tuple[int, ...]:
        needs.append((some, frozenset(readings)))
        return (len(needs) - 1,)

    alone = [
        [(), *(need(some, reading) if some in taken else () for some in kinds)]
        for reading, taken in zip(turned, takes, strict=True)
    ]
    if len(axes) == 1:
        alone.append([() for _ in number])
    made = [[first + second for second in alone[1]] for first in alone[0]]
    for some in kinds:
        if len(axes) == 2 and some in takes[0] and some in takes[1]:
            made[number[some]][number[some]] = need(some, *turned)
    # A pass that is left out takes nothing.
    taken = [np.array([*(number[some] for some in each), 0]) for each in takes]
    return _Tensor(name, axes, taken, needs, made)


@cache
def _structure(shape: SiteShape, toolbox: Toolbox) -> tuple[Options, Place, tuple[_Tensor, ...]]:
    """Of sites that may run the same kernels: what each pass may run, where in it bf16 stands, and what is quantized."""
    stays = shape.bf16()
    # By name: of equal totals the first place is the one of the least names.
    options = tuple(tuple(sorted((stays[name], *legal_fp8(shape, name, toolbox)))) for name in shape.names)
    bf16 = tuple(names.index(stays[name]) for names, name in zip(options, shape.names, strict=True))
    return options, bf16, _tensors(options, tuple(shape.reads(name) for name in shape.names))


@lru_cache(maxsize=4096)
def _layout(
    tensors: tuple[_Tensor, ...],
    gemms: tuple[tuple[int, ...], ...],
    ways: tuple[tuple[tuple[int, ...], ...], ...],
    width: int,
) -> _Layout:
    """Counts of rows, given by number: each pass' GEMMs, and what makes each tensor's needs."""

    def counts(lists: list[tuple[int, ...]]) -> Array:
        result = np.zeros((len(lists), width))
        for number, rows in enumerate(lists):
            for row in rows:
                result[number, row] += 1
        return result

    made = []
    for tensor, launched in zip(tensors, ways, strict=True):
        lists = [tuple(row for need in needs for row in launched[need]) for line in tensor.made for needs in line]
        made.append(counts(lists).reshape(len(tensor.made), len(tensor.made), -1))
    return _Layout([counts([*((row,) for row in rows), ()]) for rows in gemms], made)


@cache
def _each_kernel(sizes: tuple[int, ...]) -> tuple[Places, Places]:
    """Assignments of each kernel of each pass, and without any in that pass; -1 where a pass runs what it runs."""
    each, none = (np.full((sum(sizes), len(sizes)), -1) for _ in range(2))
    start = 0
    for axis, size in enumerate(sizes):
        each[start : start + size, axis], none[start : start + size, axis] = np.arange(size), size
        start += size
    return each, none


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
        self.options, self.bf16, self._tensors = _structure(shape.least, toolbox.unpriced)
        index: dict[Row, int] = {}

        def number(row: Row) -> int:
            return index.setdefault(row, len(index))

        gemms = tuple(
            tuple(number(Row(kernel, *shape.gemm(name))) for kernel in names)
            for names, name in zip(self.options, shape.names, strict=True)
        )
        ways = tuple(
            tuple(
                tuple(number(launch.row) for launch in toolbox.fastest(takes, readings, *shape.tensor(tensor.name)))
                for takes, readings in tensor.needs
            )
            for tensor in self._tensors
        )
        layout = _layout(self._tensors, gemms, ways, len(index))
        self._gemms, self._made = layout.gemms, layout.made
        columns = np.array([times.of[row] for row in index])
        self._us, self._below, self._above = columns[:, 0], columns[:, 0] - columns[:, 1], columns[:, 2] - columns[:, 0]
        self._bf16_us = [float(counts[home] @ self._us) for counts, home in zip(self._gemms, self.bf16, strict=True)]
        self.totals = self._totals()
        self._order = self._gaining()
        # Whether their gains are sure: -1 where nobody asked yet.
        self._sure = np.full(len(self._order), -1, dtype=np.int8)

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

    def _gaining(self) -> Places:
        """Assignments faster than bf16 that gain enough as a whole and by each pass, the fastest first, (assignments, passes)."""
        totals = self.totals.ravel()
        bf16 = self.totals[self.bf16]
        flat = np.flatnonzero(totals < bf16)
        places = np.stack(np.unravel_index(flat, self.totals.shape), axis=1).astype(np.int64)
        if not len(flat):
            return places
        took, converted = totals[flat], places != np.array(self.bf16)
        saved, several = converted @ np.array(self._bf16_us), converted.sum(axis=1) > 1
        gain = saved >= self.min_speedup * (took - bf16 + saved)
        for axis, one in enumerate(self._bf16_us):
            back = places.copy()
            back[:, axis] = self.bf16[axis]
            needed = took - self.totals[tuple(back.T)] + one
            gain &= ~(several & converted[:, axis]) | (one >= self.min_speedup * needed)
        return places[gain][np.argsort(took[gain], kind="stable")]

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

    def best(self, allowed: Sequence[Sequence[bool]] | None = None) -> Place:
        """The fastest assignment that gains enough and surely, of those whose kernels are all allowed; bf16 if there is none."""
        order = self._order
        keep = np.arange(len(order))
        if allowed is not None:
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
        converted = [axis for axis, (here, home) in enumerate(zip(place, self.bf16, strict=True)) if here != home]
        tests = [(0, self.bf16)] if converted else []
        if len(converted) > 1:
            tests += [(axis + 1, (*place[:axis], self.bf16[axis], *place[axis + 1 :])) for axis in converted]
        for number, back in tests:
            saved = sum(self._bf16_us[axis] for axis in range(len(place)) if place[axis] != back[axis])
            spent = float(self.totals[place] - self.totals[back]) + saved
            speedup = saved / spent if spent > 0 else float("inf")
            label = f"{self.shape.names[number - 1]}: " if number else ""
            if speedup < 1.0:
                return f"{label}{speedup:.2f}x, slower than bf16 with its quantization"
            if speedup < self.min_speedup:
                return f"{label}{speedup:.2f}x with its quantization is below the least speedup {self.min_speedup:g}"
            if not self.difference(np.array([place]), np.array([back]))[2][0] < 0:
                return f"{label}{speedup:.2f}x with its quantization, but the gain does not survive the prediction interval"
        return None

    def added(self, place: Place) -> list[list[Time]]:
        """What each kernel of each pass adds to the site, the other passes as they are: its GEMM and the quantization for it."""
        sizes = tuple(len(names) for names in self.options)
        each, none = _each_kernel(sizes)
        places, without = (np.where(some < 0, np.array(place), some) for some in (each, none))
        columns: Any = zip(*(column.tolist() for column in self.difference(places, without)), strict=True)
        times = iter([Time(*entry) for entry in columns])
        return [[next(times) for _ in range(size)] for size in sizes]

    def gemm_us(self, axis: int) -> list[float]:
        """Time of each kernel of a pass alone."""
        found: list[float] = (self._gemms[axis][:-1] @ self._us).tolist()
        return found
