"""How a library's kernels fit a call: what of each kernel by itself a network of choices (`perfmodel.choice`) goes by.

A network sees how a few tiles fill a call; a library chooses among three hundred, each in clusters. So of each tile it is worked
out into how many waves the result falls and how full the last one is, and along either side how many tiles there are and how
full the last one is; of each kind of cluster the same of whole clusters of the tile that is likeliest. The network says for each
call what each of these is worth, and what is worth more to one tile than to another is learned beside it. Last, each tile's
pairs: what a rest is worth with it, and that there is no such kernel.

Taught by 33,700 answers, without these a network tells an H200's bf16 rightly for 41% of shapes of any sizes and 64% of usual
ones, with them for 53% and 73% (a script).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from perfmodel import compiled

Array = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]
Sizes = tuple[Any, Any, Any]

# What of a tile the network says the worth of: how full the last wave is, one over the waves, and along N, then along M, how full
# the last tile is and the logarithm of how many there are.
OF_TILE = 6
# Of a cluster: how much of whole clusters is tiles of the result, along N and along M, the logarithm of the waves of whole
# clusters, and how full the last one is.
OF_CLUSTER = 4
# So many values for each call stand behind those of tiles and rests.
CONTEXT = OF_TILE + OF_CLUSTER
# What a rest is worth with a tile that there is no such kernel of: float16 holds it.
NEVER = -3e4
# What the first part of a kernel has for each kind of kernel beside its tile's extent along N.
KIND = 1000


def filled_up(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows with zeros behind them, up to a multiple of what the compiled loops take at once, densely in memory."""
    return np.ascontiguousarray(np.pad(rows, ((0, 0), (0, -rows.shape[1] % compiled.AT_ONCE))))


@dataclass(frozen=True)
class Grid:
    """Extents of the tiles and clusters that there are, each once, and which of them each tile and rest has.

    Attributes:
        wide: Extents of tiles along N.
        high: Likewise along M.
        clusters: Extents along N and M of the clusters, (clusters, 2).
        tile_wide: Which of `wide` each tile has, (tiles,).
        tile_high: Likewise of `high`.
        rest_cluster: Which of the clusters each rest has, (rests,).
    """

    wide: Any
    high: Any
    clusters: Any
    tile_wide: Any
    tile_high: Any
    rest_cluster: Any

    @classmethod
    def of(cls, tiles: Codes, rests: Codes) -> Grid:
        """The grid of tiles and rests as `perfmodel.choice.vocabulary` has them, (tiles, 2) and (rests, parts)."""
        wide, tile_wide = np.unique(tiles[:, 0] % KIND, return_inverse=True)
        high, tile_high = np.unique(tiles[:, 1], return_inverse=True)
        cluster, rest_cluster = np.unique(rests[:, 0], return_inverse=True)
        extents = np.maximum(np.stack(np.divmod(cluster, 10), axis=1), 1)
        places = (part.ravel() for part in (tile_wide, tile_high, rest_cluster))
        return cls(*(part.astype(np.float32) for part in (wide, high, extents)), *places)

    def of_arrays(self, made: Callable[[npt.NDArray[Any]], Any]) -> Grid:
        """The same of what each array is made into, such as a tensor."""
        return Grid(*(made(getattr(self, field.name)) for field in fields(self)))

    @cached_property
    def places(self) -> npt.NDArray[np.int32]:
        """`tile_wide` and `tile_high` as the compiled loops take them: filled up, (2, a multiple of `AT_ONCE`)."""
        return filled_up(np.stack([self.tile_wide, self.tile_high]).astype(np.int32))


@dataclass(frozen=True)
class Fits:
    """What was learned beside a network, of all its calls alike.

    Attributes:
        multiprocessors: Of the GPU that it was learned for.
        tiles: What the first two of `OF_TILE` are worth more to each tile, (tiles, 2).
        across: Likewise the next two to each extent along N, (extents, 2).
        down: Likewise the last two along M.
        clusters: What each of `OF_CLUSTER` is worth more to each cluster, (clusters, 4).
        pairs: What each rest is worth more with each tile, (tiles, rests); `NEVER` where there is no such kernel.
    """

    multiprocessors: int
    tiles: Any
    across: Any
    down: Any
    clusters: Any
    pairs: Any

    @cached_property
    def arrays(self) -> list[Any]:
        """All that is learned, in order."""
        return [self.tiles, self.across, self.down, self.clusters, self.pairs]

    @cached_property
    def own_of_tiles(self) -> Array:
        """`tiles` as the compiled loops take them: filled up, (2, a multiple of `AT_ONCE`)."""
        return filled_up(self.tiles.T)

    @classmethod
    def of_arrays(cls, multiprocessors: int, arrays: Sequence[Any]) -> Fits:
        """Fits whose `arrays` are these."""
        tiles, across, down, clusters, pairs = arrays
        return cls(multiprocessors, tiles, across, down, clusters, pairs)

    def save(self) -> dict[str, Any]:
        """For JSON: arrays as base64 of little-endian float16, which is to hold every value."""
        packed = [{"shape": a.shape, "float16": base64.b64encode(a.astype("<f2").tobytes()).decode()} for a in self.arrays]
        return {"multiprocessors": self.multiprocessors, "arrays": packed}

    @classmethod
    def of(cls, document: dict[str, Any], grid: Grid) -> Fits:
        """What `save` made.

        Raises:
            KeyError, TypeError, ValueError: it is damaged, or of another grid.
        """
        arrays = [
            np.frombuffer(base64.b64decode(packed["float16"]), "<f2").astype(np.float32).reshape(packed["shape"])
            for packed in document["arrays"]
        ]
        if [array.shape for array in arrays] != shapes(grid):
            raise ValueError("these fits are of other kernels")
        return cls.of_arrays(int(document["multiprocessors"]), arrays)


def shapes(grid: Grid) -> list[tuple[int, ...]]:
    """Of the arrays of `Fits`, in order."""
    tiles, rests = len(grid.tile_wide), len(grid.rest_cluster)
    return [(tiles, 2), (len(grid.wide), 2), (len(grid.high), 2), (len(grid.clusters), OF_CLUSTER), (tiles, rests)]


def unlearned(grid: Grid, exists: npt.NDArray[np.bool_], multiprocessors: int) -> Fits:
    """Nothing is worth more to one than to another yet.

    Args:
        grid: Of the kernels.
        exists: Which pairs of tile and rest there are, (tiles, rests).
        multiprocessors: Of the GPU.
    """
    *others, _ = shapes(grid)
    pairs = np.where(exists, 0.0, NEVER).astype(np.float32)
    return Fits.of_arrays(multiprocessors, [*(np.zeros(shape, np.float32) for shape in others), pairs])


def worth_of_tiles(xp: Any, sizes: Sizes, grid: Grid, fits: Fits, context: Any) -> Any:
    """What is added to the values of tiles, (rows, tiles).

    Args:
        xp: `numpy`, or `torch` for tensors.
        sizes: M, N and groups of calls, each (rows, 1), whole numbers as float32.
        grid: Of the kernels, arrays of `xp`.
        fits: Likewise.
        context: `CONTEXT` values of each call.
    """
    across, along, down, along_m = _sides(xp, sizes, grid, fits, context)
    waves = across[:, grid.tile_wide] * down[:, grid.tile_high]
    waves *= sizes[2] / fits.multiprocessors
    one_over = 1 / xp.ceil(waves)
    worth = (fits.tiles[:, 0] + context[:, 0:1]) * (waves * one_over)
    worth += (fits.tiles[:, 1] + context[:, 1:2]) * one_over
    worth += along[:, grid.tile_wide]
    worth += along_m[:, grid.tile_high]
    return worth


def add_worth_of_tiles(values: Array, sizes: Sizes, grid: Grid, fits: Fits, context: Array) -> None:
    """`worth_of_tiles` added to the first values of each row, (rows, values), by the compiled loop where that is at hand."""
    loops: Any = compiled.at_hand()
    if not loops:
        values[:, : len(grid.tile_wide)] += worth_of_tiles(np, sizes, grid, fits, context)
        return
    each = np.concatenate([context[:, :2], sizes[2] / np.float32(fits.multiprocessors)], axis=1)
    own, sides = fits.own_of_tiles, _sides(np, sizes, grid, fits, context)
    loops.add_worth(values, grid.places, own, len(grid.tile_wide), sides, each)


def _sides(xp: Any, sizes: Sizes, grid: Grid, fits: Fits, context: Any) -> tuple[Any, Any, Any, Any]:
    """Tiles along N and what is worth of them, then along M, each (rows, extents)."""
    m, n, _ = sizes
    across, down = xp.ceil(n / grid.wide), xp.ceil(m / grid.high)
    along = _along(xp, n / (across * grid.wide), across, fits.across, context[:, 2:4])
    return across, along, down, _along(xp, m / (down * grid.high), down, fits.down, context[:, 4:6])


def _along(xp: Any, fill: Any, tiles: Any, own: Any, context: Any) -> Any:
    """Of one side, (rows, extents): what the fill of the last tile and the number of tiles are worth."""
    return (own[:, 0] + context[:, 0:1]) * fill + (own[:, 1] + context[:, 1:2]) * xp.log2(tiles)


def worth_of_rests(xp: Any, sizes: Sizes, grid: Grid, fits: Fits, context: Any, tile: Any) -> Any:
    """What is added to the values of rests, (rows, rests), where each call's tile is known, (rows,); others as above."""
    m, n, groups = sizes
    across, down = xp.ceil(n / grid.wide[grid.tile_wide[tile]][:, None]), xp.ceil(m / grid.high[grid.tile_high[tile]][:, None])
    whole_across = xp.ceil(across / grid.clusters[:, 0]) * grid.clusters[:, 0]
    whole_down = xp.ceil(down / grid.clusters[:, 1]) * grid.clusters[:, 1]
    waves = whole_across * whole_down * (groups / fits.multiprocessors)
    whole = xp.ceil(waves)
    found = (across / whole_across, down / whole_down, xp.log2(whole), waves / whole)
    each = ((fits.clusters[:, at] + context[:, OF_TILE + at, None]) * fit for at, fit in enumerate(found))
    worth = sum(each, xp.zeros_like(waves))
    return worth[:, grid.rest_cluster] + fits.pairs[tile]
