"""Every assignment of kernels to the passes of many sites, priced at once.

Sites of one layout (`dispatch.layout`) are rows of the same arrays. Totals of all assignments are sums of small arrays; only
intervals, which equal launches enter together, need the launches one by one: as counts over a site's distinct rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_sim.dispatch.candidates import SiteShape
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.layout import Array, Layout, Place, Places, Structure, layout, structure
from loka_sim.dispatch.operands import Toolbox

Mask = npt.NDArray[np.bool_]

_CHUNKS = (16, 64, 256)
# Sites that are priced at once: few enough for a core's cache.
_AT_ONCE = 64


@cache
def _each_kernel(sizes: tuple[int, ...]) -> tuple[Places, Places]:
    """Assignments of each kernel of each pass, and without any in that pass; -1 where a pass runs what it runs."""
    each, none = (np.full((sum(sizes), len(sizes)), -1) for _ in range(2))
    start = 0
    for axis, size in enumerate(sizes):
        each[start : start + size, axis], none[start : start + size, axis] = np.arange(size), size
        start += size
    return each, none


class Sites:
    """Costs of the assignments of sites of one layout, and which of them gain enough, and surely.

    Attributes:
        structure: What the sites may run.
        totals: Time of every assignment, microseconds, (sites, an axis a pass).
    """

    def __init__(self, of: Structure, counts: Layout, times: Array, min_speedup: float) -> None:
        """Price sites.

        Args:
            of: What they may run.
            counts: What their assignments launch.
            times: Of their distinct rows: microseconds and both ends of the interval, (sites, rows, 3).
            min_speedup: Least speedup of the passes that an assignment converts, together and each.
        """
        self.structure, self.min_speedup, self._counts = of, min_speedup, counts
        self._us = np.ascontiguousarray(times[..., 0])
        self._below, self._above = times[..., 0] - times[..., 1], times[..., 2] - times[..., 0]
        # Of each kernel of a pass alone.
        self.gemm_us = [self._us @ some[:-1].T for some in counts.gemms]
        self.bf16_us = np.stack([us[:, home] for us, home in zip(self.gemm_us, of.bf16, strict=True)], axis=1)
        self.totals = self._totals()
        # Assignments that gain, those of a site together and its fastest first: whose they are, and their kernels.
        self._site, self._places = self._gaining()
        self._starts = np.searchsorted(self._site, np.arange(len(times) + 1))
        # Whether their gains are sure: -1 where nobody asked yet.
        self._sure = np.full(len(self._site), -1, dtype=np.int8)

    def _along(self, values: npt.NDArray[Any], *axes: int) -> npt.NDArray[Any]:
        """Values of one or two passes, (sites, ...), laid along their axes of `totals`."""
        shape = [len(values)] + [1] * len(self.structure.options)
        for axis in axes:
            shape[axis + 1] = len(self.structure.options[axis])
        return values.reshape(shape)

    def _totals(self) -> Array:
        total: Array = np.zeros([len(self._us), *(len(names) for names in self.structure.options)])
        for axis, us in enumerate(self.gemm_us):
            total = total + self._along(us, axis)
        for tensor, counts in zip(self.structure.tensors, self._counts.made, strict=True):
            taken = [some[:-1] for some in tensor.taken] + [np.zeros(1, dtype=np.int64)] * (2 - len(tensor.axes))
            each = (self._us @ counts.reshape(-1, counts.shape[-1]).T).reshape(-1, *counts.shape[:2])
            total = total + self._along(each[:, taken[0][:, None], taken[1]], *tensor.axes)
        return total

    def _launched(self, places: Places) -> Array:
        """How often each distinct row is launched, (places, rows)."""
        result: Array = sum(counts[places[:, axis]] for axis, counts in enumerate(self._counts.gemms))  # type: ignore[assignment]
        for tensor, counts in zip(self.structure.tensors, self._counts.made, strict=True):
            first, *second = (taken[places[:, axis]] for axis, taken in zip(tensor.axes, tensor.taken, strict=True))
            result = result + counts[first, second[0] if second else 0]
        return result

    def difference(self, sites: Places, places: Places, without: Places) -> tuple[Array, Array, Array]:
        """As `Times.difference`, of many assignments at once.

        Args:
            sites: Whose assignment each is, (places,).
            places: Assignments, (places, passes).
            without: What each is compared with.

        Returns:
            Microseconds and both ends of the 90% interval, each (places,).
        """
        change = self._launched(places) - self._launched(without)
        new, gone = np.maximum(change, 0.0), np.maximum(-change, 0.0)
        below, above = self._below[sites], self._above[sites]
        us = np.einsum("pr,pr->p", change, self._us[sites])
        down = np.sqrt(np.square(new * below + gone * above).sum(1))
        up = np.sqrt(np.square(new * above + gone * below).sum(1))
        return us, us - down, us + up

    def _gaining(self) -> tuple[Places, Places]:
        """Assignments faster than bf16 that gain enough as a whole and by each pass: their sites, and (assignments, passes)."""
        home = self.structure.bf16
        bf16 = self.totals[:, *home]  # type: ignore[arg-type]
        sites, *axes = np.nonzero(self.totals < bf16.reshape(-1, *(1 for _ in home)))
        places = np.stack(axes, axis=1)
        took, in_bf16, converted = self.totals[sites, *axes], self.bf16_us[sites], places != np.array(home)
        saved, several = (converted * in_bf16).sum(axis=1), converted.sum(axis=1) > 1
        gain = saved >= self.min_speedup * (took - bf16[sites] + saved)
        for axis, one in enumerate(in_bf16.T):
            back = self.totals[sites, *axes[:axis], home[axis], *axes[axis + 1 :]]
            gain &= ~(several & converted[:, axis]) | (one >= self.min_speedup * (took - back + one))
        sites, places, took = sites[gain], places[gain], took[gain]
        order = np.lexsort((took, sites))
        return sites[order], places[order]

    def _surely(self, sites: Places, places: Places) -> Mask:
        """Whether every gain of these assignments survives the prediction interval: over bf16, and of each pass, (places,)."""
        home = np.array(self.structure.bf16)
        sure = self.difference(sites, places, np.broadcast_to(home, places.shape))[2] < 0
        converted = places != home
        several = converted.sum(axis=1) > 1
        for axis in range(places.shape[1]):
            some = np.flatnonzero(sure & several & converted[:, axis])
            if len(some):
                back = places[some]
                back[:, axis] = home[axis]
                sure[some] = self.difference(sites[some], places[some], back)[2] < 0
        return sure

    def best(self, sites: Places, allowed: Sequence[Mask] | None = None) -> Places:
        """The fastest assignment of each site that gains enough and surely; bf16 where there is none.

        Args:
            sites: Which, each as often as it is asked for.
            allowed: Per pass, which kernels each may run, (sites, options); None for all.

        Returns:
            (sites, passes).
        """
        each = self._starts[sites + 1] - self._starts[sites]
        asked = np.repeat(np.arange(len(sites)), each)
        entry = np.arange(len(asked)) + np.repeat(self._starts[sites] - np.append(0, np.cumsum(each)[:-1]), each)
        if allowed is not None:
            kept = np.ones(len(asked), dtype=bool)
            for axis, some in enumerate(allowed):
                kept &= some[asked, self._places[entry, axis]]
            asked, entry = asked[kept], entry[kept]
        rank = np.arange(len(asked)) - np.searchsorted(asked, asked)
        result = np.tile(np.array(self.structure.bf16), (len(sites), 1))
        open_ = np.ones(len(sites), dtype=bool)
        start = 0
        for size in (*_CHUNKS, len(self._site)):
            now = np.flatnonzero(open_[asked] & (rank >= start) & (rank < start + size))
            if not len(now):
                break
            fresh = np.unique(entry[now])
            fresh = fresh[self._sure[fresh] < 0]
            self._sure[fresh] = self._surely(self._site[fresh], self._places[fresh])
            now = now[self._sure[entry[now]] == 1]
            found, first = np.unique(asked[now], return_index=True)
            result[found] = self._places[entry[now[first]]]
            open_[found] = False
            start += size
        return result

    def added(self, sites: Places, places: Places) -> list[list[Time]]:
        """What each kernel of each pass adds to its site, the other passes as they are: its GEMM and the quantization for it.

        Args:
            sites: Which.
            places: What each runs, (sites, passes).

        Returns:
            For each of them the kernels of the first pass, then those of the next.
        """
        each, none = _each_kernel(tuple(len(names) for names in self.structure.options))
        found: list[list[Time]] = [[] for _ in sites]
        alike: dict[Place, list[int]] = {}
        for number, place in enumerate(places.tolist()):
            alike.setdefault(tuple(place), []).append(number)
        for place, numbers in alike.items():
            runs = (np.where(some < 0, np.array(place), some) for some in (each, none))
            here, away = (self._launched(some) for some in runs)
            change, some = here - away, sites[numbers]
            new, gone = np.square(np.maximum(change, 0.0)).T, np.square(np.maximum(-change, 0.0)).T
            below, above = np.square(self._below[some]), np.square(self._above[some])
            us = self._us[some] @ change.T
            ends = us - np.sqrt(below @ new + above @ gone), us + np.sqrt(above @ new + below @ gone)
            for number, *columns in zip(numbers, us.tolist(), *(end.tolist() for end in ends), strict=True):
                found[number] = list(map(Time, *columns))
        return found


@dataclass(frozen=True, eq=False)
class SiteCosts:
    """Costs of one site's assignments.

    Attributes:
        shape: The site.
        sites: Those that it is priced with.
        number: Which of them it is.
    """

    shape: SiteShape
    sites: Sites
    number: int

    @property
    def structure(self) -> Structure:
        """What it may run."""
        return self.sites.structure

    @property
    def totals(self) -> Array:
        """Time of every assignment, microseconds, an axis a pass."""
        found: Array = self.sites.totals[self.number]
        return found

    def difference(self, places: Places, without: Places) -> tuple[Array, Array, Array]:
        """As `Sites.difference`, of this site."""
        return self.sites.difference(np.full(len(places), self.number), places, without)

    def gemm_us(self, axis: int) -> list[float]:
        """Time of each kernel of a pass alone."""
        found: list[float] = self.sites.gemm_us[axis][self.number].tolist()
        return found

    def kernels(self, place: Place) -> dict[str, str]:
        """The kernel of each pass."""
        return {name: self.structure.options[axis][place[axis]] for axis, name in enumerate(self.shape.names)}

    def shortfall(self, place: Place) -> str | None:
        """Why an assignment is not admissible, in words; None when it is."""
        home, least = self.structure.bf16, self.sites.min_speedup
        converted = [axis for axis, (here, back) in enumerate(zip(place, home, strict=True)) if here != back]
        tests = [(0, home)] if converted else []
        if len(converted) > 1:
            tests += [(axis + 1, (*place[:axis], home[axis], *place[axis + 1 :])) for axis in converted]
        totals, bf16_us = self.totals, self.sites.bf16_us[self.number].tolist()
        for number, back in tests:
            saved = sum(bf16_us[axis] for axis in range(len(place)) if place[axis] != back[axis])
            spent = float(totals[place] - totals[back]) + saved
            speedup = saved / spent if spent > 0 else float("inf")
            label = f"{self.shape.names[number - 1]}: " if number else ""
            if speedup < 1.0:
                return f"{label}{speedup:.2f}x, slower than bf16 with its quantization"
            if speedup < least:
                return f"{label}{speedup:.2f}x with its quantization is below the least speedup {least:g}"
            if not self.difference(np.array([place]), np.array([back]))[2][0] < 0:
                return f"{label}{speedup:.2f}x with its quantization, but the gain does not survive the prediction interval"
        return None


def price(shapes: Iterable[SiteShape], times: Times, toolbox: Toolbox, min_speedup: float) -> dict[SiteShape, SiteCosts]:
    """Costs of sites.

    Args:
        shapes: The sites.
        times: Predicted time of every row of `possible_rows(shape, toolbox)` of each.
        toolbox: Kernels to choose from, with the same times.
        min_speedup: As of `Sites`.
    """
    alike: dict[Structure, list[SiteShape]] = {}
    for shape in dict.fromkeys(shapes):
        alike.setdefault(structure(shape, toolbox), []).append(shape)
    found: dict[SiteShape, SiteCosts] = {}
    for of, some in alike.items():
        columns = times.columns(chain.from_iterable(map(of.rows, some))).reshape(len(some), -1, 3)
        chosen = _ways(of, columns[..., 0], toolbox.us is not None)
        layouts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for number, (shape, ways) in enumerate(zip(some, chosen, strict=True)):
            layouts.setdefault((ways, of.coinciding(shape)), []).append(number)
        for key, members in layouts.items():
            counts = layout(of, *key)
            for start in range(0, len(members), _AT_ONCE):
                part = members[start : start + _AT_ONCE]
                sites = Sites(of, counts, columns[np.ix_(part, counts.columns)], min_speedup)
                found.update((some[at], SiteCosts(some[at], sites, number)) for number, at in enumerate(part))
    return found


def _ways(of: Structure, us: Array, priced: bool) -> list[tuple[int, ...]]:
    """Which of the ways to make it each need of each tensor is met by, for each site: the fastest, or the first of all.

    Args:
        of: What the sites may run.
        us: Times of their rows, (sites, rows).
        priced: Whether there is a choice.
    """
    first = us.shape[1] - len(of.makers)
    columns = []
    for ways in chain.from_iterable(of.ways):
        if not priced or len(ways) == 1:
            columns.append([0] * len(us))
            continue
        # Of equal times the first by name.
        order = sorted(range(len(ways)), key=lambda way: [of.makers[maker][1] for maker in ways[way]])
        cost = np.stack([sum(us[:, first + maker] for maker in ways[way]) for way in order], axis=1)
        columns.append(np.array(order)[cost.argmin(axis=1)].tolist())
    return list(zip(*columns, strict=True)) if columns else [()] * len(us)
