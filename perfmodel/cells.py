"""Where among sizes something was measured, by cells of half an octave: holes inside the largest sizes are found so.

Each of a call's sizes may have been measured while nothing like the call was: of 54 batched products of K from 16,384 on, inside
every range of an H200's model that knew nothing like them, its times were 18% off in the median (docs/time_model.md). Nor is a
call known where others of its sizes are that 8 divides: to those a library gives other kernels. And where few calls were
measured carefully, times are further off than where many were: cells know of how many.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from perfmodel.calls import Sizes

Array = npt.NDArray[np.float64]

PER_OCTAVE = 2
# Of a size as a number from 0.5 up to 1 times a power of two, from where on it lies in the upper half of its octave.
_UPPER_HALF = np.sqrt(0.5) * (1 - 1e-12)
# Cells from a measured one that count as near: half an octave to a whole one away in each size.
NEAR = 1
# Cells beyond which a gap counts as no wider.
FURTHEST = NEAR + 2 * PER_OCTAVE
# Cells around a call's own in each size, up to an octave to 1.5 away, whose careful timings are its neighbours; how many of those
# put it into the next class.
AROUND, FEW = 2, (3, 11, 51)
# Three alignments: the first of these divides not N and K; does, 16 bytes of bf16; and the second K, too, 32 bytes of FP8.
ALIGNED, WELL_ALIGNED = 8, 32
ALIGNMENTS = 3
# As many classes has each alignment, those of better aligned calls the later ones: in the last many neighbours.
EACH = len(FEW) + 1
WELL_KNOWN = ALIGNMENTS * EACH - 1
# A call whose sizes have up to this product, and which sums up to so many, is a launch, which is known. Longer sums are not: one
# multiprocessor may have to do all of one (1 ms at a K of 87,488 and 4 products of 8 x 13).
LAUNCH_ONLY, LAUNCH_ONLY_K = 2**18, 2**10


def _cell(sizes: Sizes) -> npt.NDArray[np.int64]:
    """Number of each call's cell, (5, calls): twice the logarithm of each size to the base of two, rounded down; how aligned."""
    sizes = tuple(np.asarray(size, dtype=np.float64) for size in sizes)  # type: ignore[assignment]
    half, octave = np.frexp(np.stack(sizes))
    _, n, k, _ = sizes
    aligned = (n % ALIGNED == 0) & (k % ALIGNED == 0)
    alignment = aligned * (1 + (k % WELL_ALIGNED == 0))
    return np.vstack([PER_OCTAVE * (octave.astype(np.int64) - 1) + (half >= _UPPER_HALF), alignment])


def _around(number: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sum over all cells up to `AROUND` away in each size, of as many cells."""
    for axis in range(number.ndim - 1):
        total = np.cumsum(np.moveaxis(number, axis, 0), axis=0)
        last = np.minimum(np.arange(len(total)) + AROUND, len(total) - 1)
        result = total[last]
        result[AROUND + 1 :] -= total[: -AROUND - 1]
        number = np.moveaxis(result, 0, axis)
    return number


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells that hold a measured call.

    Attributes:
        measured: By cell of m, n, k and groups, from 1 up to the largest measured one, and by whether 8 divides N and K,
            (cells of m, of n, of k, of groups, 1 or 2).
        neighbours: Likewise the class, by `FEW`, of how many calls were timed carefully around it, by each of three alignments:
            (cells of m, of n, of k, of groups, 1 to 3).
    """

    measured: npt.NDArray[np.bool_]
    neighbours: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, careful: Sizes, *launched: Sizes) -> Cells:
        """Those of measured calls: m, n, k, groups of careful timings, and of quick launches, which are no neighbours."""
        cells = [_cell(sizes) for sizes in (np.unique(np.asarray(careful), axis=1), *launched)]  # type: ignore[arg-type]
        shape = np.concatenate(cells, axis=1).max(axis=1) + 1
        number = np.zeros(shape, dtype=np.int64)
        measured = np.zeros((*shape[:-1], min(2, shape[-1])), dtype=np.bool_)
        for some in cells:
            measured[_place(some, measured)] = True
        np.add.at(number, tuple(cells[0]), 1)
        return cls(measured, np.searchsorted(FEW, _around(number), side="right").astype(np.uint8))

    def __or__(self, other: Cells) -> Cells:
        """Measured here or there; neighbours where there are more."""

        def either(one: npt.NDArray[Any], another: npt.NDArray[Any]) -> npt.NDArray[Any]:
            result = np.zeros(np.maximum(one.shape, another.shape), dtype=one.dtype)
            for part in (one, another):
                place = tuple(slice(size) for size in part.shape)
                np.maximum(result[place], part, out=result[place])
            return result

        return Cells(either(self.measured, other.measured), either(self.neighbours, other.neighbours))

    def save(self) -> dict[str, Any]:
        """As JSON has it."""
        stored = {"bits": np.packbits(self.measured), "neighbours": self.neighbours}
        packed = {name: base64.b64encode(zlib.compress(array.tobytes(), 9)).decode() for name, array in stored.items()}
        return {"shape": list(self.measured.shape), **packed}

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> Cells:
        """What `save` made, or did before it told alignment and neighbours; the same object where it was asked for before."""
        return _load(tuple(saved["shape"]), saved["bits"], saved.get("neighbours"))

    @cached_property
    def _away(self) -> npt.NDArray[np.uint8]:
        """How many cells each cell is from a known one, in the size in which it is furthest; at most `FURTHEST`."""
        *sizes, _ = self.measured.shape
        edges = np.meshgrid(*((np.arange(size) + 1) / PER_OCTAVE for size in sizes), [0.0], indexing="ij", sparse=True)
        launch = sum(edges) <= np.log2(LAUNCH_ONLY)
        # What is bound by memory has a single column and group, and shares long rows out.
        products = self.measured.shape[1] * self.measured.shape[3] > 1
        reached = self.measured | (launch & (edges[2] <= np.log2(LAUNCH_ONLY_K)) if products else launch)
        away = np.where(reached, 0, FURTHEST).astype(np.uint8)
        for step in range(1, FURTHEST):
            grown = reached.copy()
            for axis in range(len(sizes)):
                along, before = np.moveaxis(grown, axis, 0), np.moveaxis(grown.copy(), axis, 0)
                along[1:] |= before[:-1]
                along[:-1] |= before[1:]
            away[grown & ~reached] = step
            reached = grown
        return away

    def gap_octaves(self, sizes: Sizes) -> Array:
        """By how many octaves each call lies away from all that was measured, (calls,); 0 where something near was.

        Sizes beyond the largest measured one count as that: how far beyond they are is for `prediction.octaves_beyond`.
        """
        away = self._away[_place(_cell(sizes), self._away)]
        return np.maximum(away.astype(np.float64) - NEAR, 0.0) / PER_OCTAVE

    def few(self, sizes: Sizes) -> npt.NDArray[np.int64]:
        """How well known what is around each call is, (calls,): its class of neighbours, and `EACH` more for each alignment."""
        place = _place(_cell(sizes), self.neighbours)
        return np.asarray(self.neighbours[place] + EACH * place[-1])


def _place(cell: npt.NDArray[np.int64], cells: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], ...]:
    """Each call's cell, or the last one of a size, or of an alignment, that is beyond all there are."""
    return tuple(np.minimum(cell, np.array(cells.shape)[:, None] - 1))


@lru_cache(maxsize=256)
def _load(shape: tuple[int, ...], bits: str, neighbours: str | None) -> Cells:
    def unpacked(text: str) -> npt.NDArray[np.uint8]:
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)

    measured = np.unpackbits(unpacked(bits), count=int(np.prod(shape))).astype(np.bool_).reshape(shape)
    if neighbours is None:
        alike = np.full((*shape, ALIGNMENTS), len(FEW), dtype=np.uint8)
        return Cells(np.repeat(measured[..., None], 2, axis=-1), alike)
    return Cells(measured, unpacked(neighbours).reshape(*shape[:-1], -1))
