"""Where among sizes something was measured, by cells of half an octave: holes inside the largest sizes are found so.

Each of a call's sizes may have been measured while nothing like the call was: of 54 batched products of K from 16,384 on, inside
every range of an H200's model that knew nothing like them, its times were 18% off in the median (docs/time_model.md).
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
# A call whose sizes have up to this product, and which sums up to so many, is a launch, which is known. Longer sums are not: one
# multiprocessor may have to do all of one (1 ms at a K of 87,488 and 4 products of 8 x 13).
LAUNCH_ONLY, LAUNCH_ONLY_K = 2**18, 2**10


def _cell(sizes: Sizes) -> npt.NDArray[np.int64]:
    """Number of each size's cell, (4, calls): twice the logarithm to the base of two, rounded down."""
    half, octave = np.frexp(np.asarray(sizes, dtype=np.float64))
    return PER_OCTAVE * (octave.astype(np.int64) - 1) + (half >= _UPPER_HALF)


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells that hold a measured call.

    Attributes:
        measured: By cell of m, n, k and groups, from 1 up to the largest measured one, (cells of m, of n, of k, of groups).
    """

    measured: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, *calls: Sizes) -> Cells:
        """Those of measured calls: m, n, k, groups, one or several times."""
        cells = np.concatenate([_cell(sizes) for sizes in calls], axis=1)
        measured = np.zeros(cells.max(axis=1) + 1, dtype=np.bool_)
        measured[tuple(cells)] = True
        return cls(measured)

    def __or__(self, other: Cells) -> Cells:
        """Measured here or there."""
        measured = np.zeros(np.maximum(self.measured.shape, other.measured.shape), dtype=np.bool_)
        for part in (self.measured, other.measured):
            measured[tuple(slice(size) for size in part.shape)] |= part
        return Cells(measured)

    def save(self) -> dict[str, Any]:
        """As JSON has it."""
        bits = base64.b64encode(zlib.compress(np.packbits(self.measured).tobytes(), 9)).decode()
        return {"shape": list(self.measured.shape), "bits": bits}

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> Cells:
        """What `save` made; the same object where it was asked for before."""
        return _load(tuple(saved["shape"]), saved["bits"])

    @cached_property
    def _away(self) -> npt.NDArray[np.uint8]:
        """How many cells each cell is from a known one, in the size in which it is furthest; at most `FURTHEST`."""
        edges = np.meshgrid(*((np.arange(size) + 1) / PER_OCTAVE for size in self.measured.shape), indexing="ij", sparse=True)
        launch = sum(edges) <= np.log2(LAUNCH_ONLY)
        # What is bound by memory has a single column and group, and shares long rows out.
        products = self.measured.shape[1] * self.measured.shape[3] > 1
        reached = self.measured | (launch & (edges[2] <= np.log2(LAUNCH_ONLY_K)) if products else launch)
        away = np.where(reached, 0, FURTHEST).astype(np.uint8)
        for step in range(1, FURTHEST):
            grown = reached.copy()
            for axis in range(grown.ndim):
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
        last = np.array(self.measured.shape)[:, None] - 1
        away = self._away[tuple(np.minimum(_cell(sizes), last))]
        return np.maximum(away.astype(np.float64) - NEAR, 0.0) / PER_OCTAVE


@lru_cache(maxsize=256)
def _load(shape: tuple[int, ...], bits: str) -> Cells:
    packed = np.frombuffer(zlib.decompress(base64.b64decode(bits)), dtype=np.uint8)
    return Cells(np.unpackbits(packed, count=int(np.prod(shape))).astype(np.bool_).reshape(shape))
