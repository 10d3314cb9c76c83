"""Which of its kernels cuBLAS chooses for a GEMM, told from the size, and what follows from that: tiles, waves, clusters.

cuBLAS has a thousand kernels and chooses by rules that it does not publish; each change of kernel is a jump in the time. What
it chooses can be asked without running anything (`hil.choices`), so a network learns the rules from hundreds of thousands of
answers without noise. Offline it says which of the kernels that the library was seen to choose is the likeliest; the time model
sees the parts of that kernel's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from perfmodel import compiled
from perfmodel.features import PLANNED, features
from perfmodel.fits import CONTEXT, KIND, NEVER, Fits, Grid, add_worth_of_tiles, worth_of_rests
from perfmodel.hardware import HardwareSpec
from perfmodel.network import Experts, Network, single_threaded

Array = npt.NDArray[np.float64]
Array32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]
Sizes = tuple[Array, Array, Array, Array]

# What is told of a kernel, each a whole number: a tile's extent along N (and 1,000 for each kind of kernel), along M, a
# cluster's extents along N and M (as 10 N + M), which operand two groups of warps share (0: none; of older kernels the extent of
# a step along K and how many are under way, as 10 K + steps, or which form of a vector's product), whether K is split, whether
# tiles are walked along rows, whether the result is stored transposed, whether something is cleared first.
PARTS = ("tile_n", "tile_m", "cluster", "shared_operand", "split_k", "along_rows", "layout", "cleared")
# So many of them are the tile; the network values tiles by themselves, then the rests of the likeliest.
TILE = 2
# Kernels of cuBLAS for Hopper are kind 0; older ones are told by a word in their names, and of no such word `_UNHEARD_OF`.
_OLDER = {
    "cutlass_75": 1, "cutlass_80": 2, "xmma": 3, "gemv": 4, "wmma": 5, "gemmk1": 6, "dot": 7, "split": 8, "gemmSN": 10,
    "magma": 11,
}  # fmt: skip
_UNHEARD_OF = 9
_LAID = (1, 2, 3)  # kinds whose names say how operands lie
_HOPPER = re.compile(r"nvjet_sm90_\w+?_(\d+)x(\d+)_\d+x\d+_(\d+)x(\d+)_([hv])_")
_TRANSPOSED = re.compile(r"_[TN][TN]N$")
_TILE = re.compile(r"(?:_|tilesize)(\d+)x(\d+)[_x]")
_STEPS = re.compile(r"_\d+x\d+_(\d+)x(\d+)_t|tilesize\d+x\d+x(\d+)_|gemvx\w+?Li(\d+)E")
# A product of a few rows takes 8 columns and all of the rows that its name tells at once.
_FEW_ROWS, _FEW_ROWS_COLUMNS = re.compile(r"gemmSN\w*?(?:ELi\d+){4}ELi(\d+)E"), 8
# The tile of a product without tensor cores.
_MAGMA_TILE = 64
# Extents of tiles that the network is told the fill of, and of pairs (M, N) the waves.
_FILLS = {"m": (64, 128, 192, 256), "n": (8, 16, 32, 64, 96, 128, 160, 192, 256), "k": (32, 64, 128)}
_WAVES_M, _WAVES_N = (64, 128, 192, 256), (16, 32, 64, 96, 128, 160, 192, 256)
# Periods of a size's logarithm to base 2: a half, one, two, four.
_FREQUENCIES = (0.5, 1.0, 2.0, 4.0)
_ROWS = 2048
# Calls of more floating-point operations, or of more values of an operand or the result, are the largest.
LARGE_FLOP, LARGE_VALUES = 2.2e12, 2**29
# What a size read back from its logarithm is multiplied by, not to lie beyond them for being rounded.
_ROUNDED = 1 - 1e-5
# How sure the network is of its choice, in classes of doubt: probabilities below which one is in the next class.
DOUBT = (0.99, 0.9, 0.7, 0.5)
# A probability by the compiled loops that is closer to one of these is found again by numpy: it is off by less than 1e-6.
_CLOSE = 1e-5


def parts_of(names: Sequence[str]) -> tuple[int, ...]:
    """The `PARTS` of what one call launches.

    Args:
        names: Of its GPU kernels in order, with "memset" for memory that is cleared.
    """
    kernels = [name for name in names if name != "memset"]
    main = kernels[0]
    cleared = int(len(kernels) < len(names))
    if found := _HOPPER.search(main):
        high, wide, *cluster = (int(found[i]) for i in range(1, 5))
        shared = 1 if "coopA" in main else 2 if "coopB" in main else 0
        return (
            high, wide, 10 * cluster[0] + cluster[1], shared, int("splitK" in main), int(found[5] == "h"),
            int(bool(_TRANSPOSED.search(main))), cleared,
        )  # fmt: skip
    kind = next((number for word, number in _OLDER.items() if word in main), _UNHEARD_OF)
    split, layout = int(any("split" in name for name in names)), int("_tn_" in main)
    return (*_older_tile(main, kind), 11, _older_steps(main), split, 0, layout, cleared)


def _older_tile(main: str, kind: int) -> tuple[int, int]:
    """`PARTS` of an older kernel's tile: along N with its kind, and along M; 16 where its name does not tell."""
    high, wide = 16, 16
    if found := _TILE.search(main):
        high, wide = int(found[1]), int(found[2])
    elif found := _FEW_ROWS.search(main):
        high, wide = _FEW_ROWS_COLUMNS, int(found[1])
    elif "magma" in main:
        high = wide = _MAGMA_TILE
    return high + KIND * kind, wide


def _older_steps(main: str) -> int:
    """The part of an older kernel in the place of `shared_operand`; 0 where its name does not tell."""
    found = _STEPS.search(main)
    if not found:
        return 0
    step, under_way, only_step, form = (int(number or 0) for number in found.groups())
    return 10 * (step or only_step) + under_way + form


def asked(
    kernel: str, m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec, known: Array | None = None
) -> npt.NDArray[np.float32]:
    """What the network sees of calls, (rows, inputs): the time model's features, and how many more tiles fit and fill.

    Args:
        kernel: A name of `perfmodel.kernels.KERNELS`.
        m: Rows, a 1-D array.
        n: Columns of the result.
        k: Contracted dimension.
        groups: Products in one call.
        hardware: The GPU.
        known: What `features` says of these calls; None where that was not asked yet.
    """
    if known is None:
        _, known = features(kernel, m, n, k, groups, hardware)
    more = sum(map(len, _FILLS.values())) + 2 * len(_WAVES_M) * len(_WAVES_N) + 6 * len(_FREQUENCIES)
    result = np.empty((len(m), known.shape[1] + more), dtype=np.float32)
    result[:, : known.shape[1]] = known
    # As many rows at once as stay in the cache with their columns.
    for start in range(0, len(m), _ROWS):
        rows = slice(start, start + _ROWS)
        np.stack(list(_fits(m[rows], n[rows], k[rows], groups[rows], hardware)), axis=1, out=result[rows, known.shape[1] :])
    return result


def _fits(m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec) -> Iterator[npt.NDArray[np.float32]]:
    """Columns of `asked` beside the features."""
    for size, extents in zip((m, n, k), _FILLS.values(), strict=True):
        for extent in extents:
            yield (size / (np.ceil(size / extent) * extent)).astype(np.float32)
    across = [np.ceil(n / extent) * (groups / hardware.multiprocessors) for extent in _WAVES_N]
    for extent in _WAVES_M:
        down = np.ceil(m / extent)
        for part in across:
            waves = down * part
            whole = np.ceil(waves)
            yield np.log2(whole.astype(np.float32))
            yield (waves / whole).astype(np.float32)
    for size in (m, n, k):
        turns = (2 * np.pi * np.log2(size)).astype(np.float32)
        for frequency in _FREQUENCIES:
            yield from (np.sin(np.float32(frequency) * turns), np.cos(np.float32(frequency) * turns))


@dataclass(frozen=True)
class Choice:
    """What a library chooses for one of its GEMMs.

    Attributes:
        network: From `asked` to a value for each tile, then for each rest, as `vocabulary` numbers them, and where there are
            `fits` to what these are worth: one for all calls, or several, each for results of some sizes.
        kernels: `PARTS` of those that the library was seen to choose, (kernels, parts). The likeliest has the tile of the largest
            value, and of the rests that there are with it the one of the largest.
        fits: How tiles and clusters fit a call, and what that is worth; None for a network that does without.
        largest: What tells it of the largest calls (`are_largest`), where that is learned apart.
        said: `PARTS` to say in the place of each of `kernels`; None for their own.
    """

    network: Network | Experts
    kernels: Codes
    fits: Fits | None = None
    largest: Choice | None = None
    said: Codes | None = None

    @cached_property
    def as_k_fastest(self) -> Choice:
        """The same choice, its older kernels named as those that read K fastest: they differ in how operands lie alone."""
        said = self.kernels.copy()
        said[np.isin(said[:, 0] // KIND, _LAID), PARTS.index("layout")] = 1
        return replace(self, said=said, largest=self.largest.as_k_fastest if self.largest else None)

    @cached_property
    def _pairs(self) -> tuple[Codes, Array32]:
        """The kernel of each tile and rest, -1 for none, and what a rest is worth where that is all to know: (tiles, rests)."""
        (tiles, tile), (rests, rest) = vocabulary(self.kernels)
        table = np.full((len(tiles), len(rests)), -1)
        table[tile, rest] = np.arange(len(self.kernels))
        return table, np.where(table < 0, np.float32(NEVER), np.float32(0))

    @cached_property
    def grid(self) -> Grid:
        """Of the kernels."""
        return grid_of(self.kernels)

    def told(self, matrix: npt.NDArray[np.floating]) -> tuple[Codes, npt.NDArray[np.int64]]:
        """For what `asked` makes: `PARTS` of the likeliest kernel, (rows, parts), and the class of doubt, (rows,).

        That is by `DOUBT`: 0 where the network is sure, 4 where the likeliest tile and rest have half a chance.
        """
        if self.largest is None or not (largest := _of_largest(matrix)).any():
            return self._told(matrix)
        parts, doubt = np.empty((len(matrix), len(PARTS)), dtype=np.int64), np.empty(len(matrix), dtype=np.int64)
        for choice, numbers in ((self.largest, np.flatnonzero(largest)), (self, np.flatnonzero(~largest))):
            parts[numbers], doubt[numbers] = choice._told(matrix, numbers)
        return parts, doubt

    def _told(
        self, matrix: npt.NDArray[np.floating], numbers: npt.NDArray[np.int64] | None = None
    ) -> tuple[Codes, npt.NDArray[np.int64]]:
        """As `told`, by this network whatever the calls: of all rows, or of those with these numbers, ascending."""
        kernel, chance = np.empty(len(matrix), dtype=np.int64), np.empty(len(matrix))
        with single_threaded():
            for rows, values in self.network.blocks(matrix, numbers):
                kernel[rows], chance[rows] = self._likeliest(values, matrix[rows, :4])
        if numbers is not None:
            kernel, chance = kernel[numbers], chance[numbers]
        return (self.kernels if self.said is None else self.said)[kernel], (chance[:, None] < DOUBT).sum(axis=1)

    def _likeliest(
        self, values: npt.NDArray[np.float32], logarithms: npt.NDArray[np.floating]
    ) -> tuple[Codes, npt.NDArray[np.floating]]:
        """Of each row the likeliest kernel, by number, and its probability.

        By the compiled loops the probability is a bit off, and on the same side of each edge of `DOUBT`.
        """
        table, pairs = self._pairs
        tiles, rests, context = np.split(values, np.cumsum(table.shape), axis=1)
        if self.fits is None:
            tile, of_tiles = _best(values, 0, len(table))
            rests = rests + pairs[tile]
        else:
            sizes = sizes_in(logarithms)
            add_worth_of_tiles(values, sizes, self.grid, self.fits, context)
            tile, of_tiles = _best(values, 0, len(table))
            rests = rests + worth_of_rests(np, sizes, self.grid, self.fits, context, tile)
        rest, of_rests = _best(rests, 0, rests.shape[1])
        chance = of_tiles * of_rests
        if compiled.at_hand():
            at_edge = np.flatnonzero((np.abs(chance[:, None] - DOUBT) < _CLOSE).any(axis=1))
            halves = ((tiles[at_edge], tile[at_edge]), (rests[at_edge], rest[at_edge]))
            chance[at_edge] = np.prod([_softmax(half, place) for half, place in halves], axis=0)
        return table[tile, rest], chance

    def save(self) -> bytes:
        """As JSON."""
        document: dict[str, Any] = {"kernels": self.kernels.tolist(), "network": json.loads(self.network.save())}
        if self.fits is not None:
            document["fits"] = self.fits.save()
        if self.largest is not None:
            document["largest"] = json.loads(self.largest.save())
        return json.dumps(document).encode()

    @classmethod
    def load(cls, saved: bytes) -> Choice:
        """What `save` made.

        Raises:
            ValueError: it is damaged.
        """
        try:
            return cls.of(json.loads(saved))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError("the choice is damaged") from error

    @classmethod
    def of(cls, document: dict[str, Any]) -> Choice:
        """What `save` made, read from JSON.

        Raises:
            IndexError, KeyError, TypeError, ValueError: it is damaged.
        """
        kernels = np.asarray(document["kernels"], dtype=np.int64)
        network_document = document["network"]
        network = (Experts if "networks" in network_document else Network).of(network_document)
        if kernels.ndim != 2 or kernels.shape[1] != len(PARTS) or not len(kernels):
            raise ValueError
        fits = Fits.of(document["fits"], grid_of(kernels)) if "fits" in document else None
        if network.values != sum(len(halves) for halves, _ in vocabulary(kernels)) + (CONTEXT if fits else 0):
            raise ValueError
        return cls(network, kernels, fits, cls.of(document["largest"]) if "largest" in document else None)


def _best(values: Array32, first: int, last: int) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.floating]]:
    """Where among some of each row's values the largest is, and its softmax among them: a bit off by the compiled loops."""
    loops: Any = compiled.at_hand()
    if loops:
        place, chance = loops.best(values, first, last)
        return place, chance
    place = values[:, first:last].argmax(axis=1)
    return place, _softmax(values[:, first:last], place)


def _softmax(values: Array32, place: npt.NDArray[np.integer]) -> Array32:
    """Of the largest of each row's values, which is at this place, (rows,)."""
    less = values - np.take_along_axis(values, place[:, None], axis=1)
    return np.asarray(1 / np.exp(less, out=less).sum(axis=1))


def are_largest(sizes: Sizes) -> npt.NDArray[np.bool_]:
    """Which calls of sizes m, n, k and groups are of the largest, (calls,): `LARGE_FLOP`, `LARGE_VALUES`."""
    m, n, k, groups = sizes
    values = groups * np.maximum(m * k, np.maximum(n * k, m * n))
    return np.asarray((2 * groups * m * n * k > LARGE_FLOP) | (values > LARGE_VALUES))


def _of_largest(matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    """`are_largest`, for what `asked` makes of calls: it begins with the logarithms of their sizes, which are rounded."""
    m, n, k, groups = _ROUNDED * 2.0 ** matrix[:, :4].T.astype(np.float64)
    return are_largest((m, n, k, groups))


def sizes_in(logarithms: npt.NDArray[np.floating]) -> tuple[Array32, Array32, Array32]:
    """M, N and groups of calls, each (rows, 1), by the first four inputs of `asked`: exact up to a million."""
    m, n, _, groups = np.rint(np.exp2(logarithms.astype(np.float64))).astype(np.float32).T[:, :, None]
    return m, n, groups


def vocabulary(kernels: Codes) -> list[tuple[Codes, Codes]]:
    """Of the tiles, and then of the rests: those that there are, in order of their parts, and which of them each kernel has.

    Args:
        kernels: `PARTS`, (kernels, parts).
    """
    found = (np.unique(half, axis=0, return_inverse=True) for half in np.split(kernels, [TILE], axis=1))
    return [(halves, number.ravel()) for halves, number in found]


def grid_of(kernels: Codes) -> Grid:
    """Extents of the tiles and clusters of kernels; the argument as of `vocabulary`."""
    (tiles, _), (rests, _) = vocabulary(kernels)
    return Grid.of(tiles, rests)


def chosen_tiles(parts: Codes, m: Array, n: Array, groups: Array) -> Array:
    """Tiles of the result that chosen kernels make, in whole clusters; `parts` as of `Choice.told`."""
    tile_n, tile_m, cluster = parts[:, :3].T.astype(np.float64)
    return _tiles(m, n, groups, tile_m, tile_n % KIND, *np.divmod(cluster, 10))


def _tiles(m: Array, n: Array, groups: Array, tile_m: Array, tile_n: Array, cluster_n: Array, cluster_m: Array) -> Array:
    """Of a cluster, which is launched whole, count all."""
    across = np.ceil(np.ceil(n / tile_n) / cluster_n) * cluster_n
    down = np.ceil(np.ceil(m / tile_m) / cluster_m) * cluster_m
    return across * down * groups


def chosen_features(parts: Codes, m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec) -> tuple[list[str], Array]:
    """Names and (rows, features) matrix of what follows from a chosen kernel; `parts` as of `Choice.told`."""
    part = dict(zip(PARTS, parts.T.astype(np.float64), strict=True))
    kind, tile_n = np.divmod(part["tile_n"], KIND)
    cluster_n, cluster_m = np.divmod(part["cluster"], 10)
    tile_m = part["tile_m"]
    tiles = _tiles(m, n, groups, tile_m, tile_n, cluster_n, cluster_m)
    waves = tiles / hardware.multiprocessors
    columns = {
        "chosen_tile_n": tile_n, "chosen_tile_m": tile_m, "chosen_cluster_n": cluster_n, "chosen_cluster_m": cluster_m,
        "chosen_kind": kind, **{f"chosen_{name}": part[name] for name in PARTS[3:]},
        "chosen_tile_area": tile_m * tile_n, "log2_chosen_tiles": np.log2(tiles), "log2_chosen_waves": np.log2(np.ceil(waves)),
        "chosen_wave_fill": waves / np.ceil(waves), "chosen_tile_fill": m * n * groups / (tiles * tile_m * tile_n),
        "log2_chosen_work": np.log2(np.ceil(waves) * tile_m * tile_n * k),
    }  # fmt: skip
    return list(columns), np.stack(list(columns.values()), axis=1)


def with_choice(
    names: list[str],
    matrix: Array,
    choice: Choice | None,
    kernel: str,
    sizes: tuple[Array, Array, Array, Array],
    hardware: HardwareSpec,
    doubted: bool = True,
    planned: int = PLANNED,
) -> tuple[list[str], Array, npt.NDArray[np.int64]]:
    """Features, followed by those of the kernel that the library is likely to choose, and each call's class of doubt.

    That class is the last feature, too, if `doubted`. Without a choice the features are as they were, and nothing is in doubt.
    They know as much of a launch as `planned` says (`perfmodel.features`); what a choice is asked by always knows all.
    """
    if choice is None:
        return names, matrix, np.zeros(len(matrix), dtype=np.int64)
    parts, doubt = choice.told(asked(kernel, *sizes, hardware, matrix if planned == PLANNED else None))
    more, columns = chosen_features(parts, *sizes, hardware)
    if doubted:
        return [*names, *more, "chosen_doubt"], np.column_stack([matrix, columns, doubt]), doubt
    return [*names, *more], np.column_stack([matrix, columns]), doubt
