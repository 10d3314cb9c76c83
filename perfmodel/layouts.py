"""What a bf16 GEMM takes in another layout of its operands than the one that it was timed in.

`torch/bf16` and `torch/bf16_batched` are timed and learned with K fastest in both operands, as a layer's output reads its input
and its weight. A gradient reads one of them, or both, across: cuBLAS has other kernels for that, and where sizes are odd far
older ones. A layer's output may have a bias that the kernel adds, for which cuBLAS chooses otherwise again: that is learned as
one more layout, of single products. Which kernel cuBLAS takes in a layout is learned from its answers (`hil.choices`), and what
that kernel would take with K fastest is known; by which factor the product takes longer than so, trees of a layout say, by the
sizes, by what the product and its transpose take with K fastest, and by which kernels (`perfmodel.fit_layouts`, from
`hil.layouts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perfmodel import hardware as hardware_module
from perfmodel import opened
from perfmodel.calls import of_calls
from perfmodel.data_folder import data_folder
from perfmodel.features import alignment, gemm_features, waves
from perfmodel.hardware import HardwareSpec
from perfmodel.in_step import VECTOR
from perfmodel.kernels import ACROSS, BF16, BF16_BATCHED, BIASED, K_FASTEST, KERNELS, Layout, laid
from perfmodel.network import THREADS, threads
from perfmodel.roofline import moved_bytes
from perfmodel.trees import Trees

if TYPE_CHECKING:
    from perfmodel.calls import Sizes
    from perfmodel.choice import Choice
    from perfmodel.model import PerfModel

Array = npt.NDArray[np.float64]

SCHEMA_VERSION = 3
FILE, MANIFEST = "layouts.parquet", "layouts.json"
OTHERS = (*ACROSS, BIASED)
LAYOUTS = (K_FASTEST, *OTHERS)
# Of the logarithm of two times' ratio: networks' sums of float32 in another order change the seventh.
_DIGITS = 5
# From which on two threads tell them.
_MANY_PRODUCTS = 512
# Output tiles of cuBLAS' older kernels, beside those of `features.TILES`.
_TILES = ((32, 32), (64, 32), (32, 64), (256, 64), (64, 256), (128, 64), (192, 128), (128, 192))


def column(layout: Layout) -> str:
    """Of microseconds in a layout, in `FILE`."""
    return f"{'_'.join(layout)}_us"


def model_file(layout: Layout) -> str:
    """File name of a layout's trees inside the models folder."""
    return f"layouts__{'_'.join(layout)}.ubj.gz"


class Known(NamedTuple):
    """What is known of products with K fastest.

    Attributes:
        sizes: m, n, k and groups, 1-D arrays.
        us: What they are told to take, in microseconds, (products,).
        names: Of the columns.
        matrix: Features, (products, features).
    """

    sizes: Sizes
    us: Array
    names: list[str]
    matrix: Array

    @classmethod
    def of(cls, sizes: Sizes, model: PerfModel) -> Known:
        """By sizes, times, and which kernel cuBLAS takes with K fastest: for products and for their transposes.

        Args:
            sizes: m, n, k and groups, 1-D arrays.
            model: Of kernels' times.
        """
        m, n, k, groups = sizes
        hardware = model.hardware
        (alone_us, chosen, own), (turned_us, _, turned) = (_chosen(model, way) for way in (sizes, (n, m, k, groups)))
        names, matrix = gemm_features(BF16, m, n, k, groups, hardware)
        moved = moved_bytes(KERNELS[BF16], m, n, k, groups)
        along_m, along_n, along_k = (alignment(size) for size in (m, n, k))
        columns: dict[str, Array] = {
            "log2_alone": np.log2(alone_us), "log_turned_over_alone": _log_ratio(turned_us, alone_us),
            "log2_alone_over_bytes": np.log2(alone_us * hardware.copy_bandwidth_tbs * 1e6 / moved),
            "align_mn": np.minimum(along_m, along_n), "align_mk": np.minimum(along_m, along_k),
            "align_nk": np.minimum(along_n, along_k),
            "last_m": (m - 1) % 128 + 1, "last_n": (n - 1) % 128 + 1, "last_k": (k - 1) % 64 + 1,
            "last_m_of_256": (m - 1) % 256 + 1, "last_n_of_256": (n - 1) % 256 + 1,
            "log2_less_of_mn": np.log2(np.minimum(m, n)), "log2_more_of_mn": np.log2(np.maximum(m, n)),
            "log2_k_over_groups": np.log2(k / groups),
        }  # fmt: skip
        for tile_m, tile_n in _TILES:
            tiles, name = np.ceil(m / tile_m) * np.ceil(n / tile_n) * groups, f"{tile_m}x{tile_n}"
            columns[f"log2_waves_{name}"], columns[f"wave_fill_{name}"] = waves(tiles, hardware.multiprocessors)
            columns[f"tile_fill_{name}"] = groups * m * n / (tiles * tile_m * tile_n)
        names += [*columns, *chosen, *(f"turned_{name}" for name in chosen)]
        return cls(sizes, alone_us, names, np.column_stack([matrix, *columns.values(), own, turned]))

    def of_products(self, products: slice | npt.NDArray[np.intp]) -> Known:
        """Of some of them."""
        return Known(of_calls(self.sizes, products), self.us[products], self.names, self.matrix[products])

    def in_layout(self, layout: Layout, model: PerfModel, folder: Path) -> tuple[list[str], Array, Array]:
        """What is known of them in a layout, by which kernel cuBLAS takes for them there.

        Args:
            layout: Of their operands.
            model: Of kernels' times with K fastest.
            folder: That has what tells which kernel cuBLAS takes.

        Returns:
            Names and (products, features) matrix; and the logarithm of what they would take with K fastest by that kernel, over
            what they take by their own, (products,).
        """
        us, chosen, columns = _chosen(model, self.sizes, lambda kernel: opened.choice(folder, laid(kernel, layout)))
        as_if = _log_ratio(us, self.us)
        names = [*self.names, *(f"laid_{name}" for name in chosen), "log_laid_over_alone"]
        return names, np.column_stack([self.matrix, columns, as_if]), as_if


def _chosen(model: PerfModel, sizes: Sizes, choice_of: Callable[[str], Choice] | None = None) -> tuple[Array, list[str], Array]:
    """Of which kernel cuBLAS is told to take: microseconds with K fastest, names, and (products, features) with how sure that is.

    Args:
        model: Of kernels' times.
        sizes: Of the products.
        choice_of: Tells it of a kernel's products, by default as they take with K fastest.
    """
    names, us, result = list[str](), np.empty(len(sizes[3])), np.empty((0, 0))
    for kernel, products in ((BF16, np.flatnonzero(sizes[3] == 1)), (BF16_BATCHED, np.flatnonzero(sizes[3] > 1))):
        if not len(products):
            continue
        some = of_calls(sizes, products)
        seen = model.seen(kernel, some, choice_of(kernel).as_k_fastest if choice_of else None)
        us[products] = model.times_of(kernel, some, seen)[:, 0]
        mine = [place for place, name in enumerate(seen.names) if "chosen" in name and name != "chosen_doubt"]
        assert mine  # every GPU whose layouts were timed has been asked
        names = [seen.names[place] for place in mine]
        if not result.size:
            result = np.empty((len(us), len(mine) + 1))
        result[products] = np.column_stack([seen.matrix[:, mine], seen.doubt])
    return us, [*names, "chosen_doubt"], result


def _log_ratio(us: Array, than_us: Array) -> Array:
    """The logarithm of one time over another, 0 where they are the same but for the rounding of sums in another order.

    Trees part what is 0 from what is not.
    """
    return np.asarray(np.round(np.log(us / than_us), _DIGITS), dtype=np.float64)


@dataclass(frozen=True)
class LayoutModel:
    """By which factor bf16 products of one GPU take longer in other layouts than with K fastest.

    Attributes:
        folder: Where the trees lie.
        manifest: What they were fitted on, and how far off they were.
        times: Of kernels on the GPU whose products these are.
    """

    folder: Path
    manifest: Mapping[str, Any]
    times: PerfModel

    @cached_property
    def _read(self) -> dict[Layout, Trees]:
        return {}

    def _trees(self, layout: Layout) -> Trees:
        if layout not in self._read:
            path = self.folder / model_file(layout)
            try:
                self._read[layout] = Trees(path.read_bytes())
            except (EOFError, OSError) as error:
                raise ValueError(f"{path} is missing or truncated; copy the folder again") from error
        return self._read[layout]

    @cached_property
    def _off(self) -> dict[tuple[Layout, bool, bool], float]:
        """Of each layout, single or batched products, of even sizes or not: how far factors' logarithms are off, 90% of them."""
        return {
            (tuple(entry["layout"].split("_")), entry["batched"], entry["even"]): float(entry["off"])
            for entry in self.manifest["judged"]
        }

    def told(
        self, layouts: Sequence[Layout], m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike, groups: npt.ArrayLike
    ) -> tuple[Array, Array]:
        """Time in each product's layout over its time with K fastest, and how far off its logarithm may be, (products,) each.

        Factors are 1 and sure with K fastest. Nine in ten are off by less.

        Args:
            layouts: Of each product's operands.
            m: Rows of their results.
            n: Columns of their results.
            k: What they contract.
            groups: Products in one call.
        """
        sizes: Sizes = tuple(np.asarray(size, dtype=np.float64) for size in (m, n, k, groups))  # type: ignore[assignment]
        factor, off = np.ones(len(sizes[0])), np.zeros(len(sizes[0]))
        places = {layout: found for layout in OTHERS if len(found := np.flatnonzero([other == layout for other in layouts]))}
        if not places:
            return factor, off
        rows = np.concatenate(list(places.values()))
        kinds = np.repeat(np.arange(len(places)), [len(found) for found in places.values()])

        def fill(part: npt.NDArray[np.intp]) -> None:
            mine = rows[part]
            factor[mine], off[mine] = self._told(list(places), kinds[part], of_calls(sizes, mine))

        if len(rows) < _MANY_PRODUCTS:
            fill(np.arange(len(rows)))
        else:
            with threads() as pool:
                # Each file is read once before two threads may ask for it.
                single = sizes[3][rows] == 1
                kernels = [
                    laid(kernel, layout)
                    for kind, layout in enumerate(places)
                    for kernel, some in ((BF16, single), (BF16_BATCHED, ~single))
                    if some[kinds == kind].any()
                ]
                for read in (pool.map(self._trees, places), pool.map(partial(opened.choice, self.folder), kernels)):
                    list(read)
                list(pool.map(fill, np.array_split(np.arange(len(rows)), THREADS)))
        return factor, off

    def _told(self, layouts: Sequence[Layout], kinds: npt.NDArray[np.intp], sizes: Sizes) -> tuple[Array, Array]:
        """As `told`, of products whose layouts are `layouts[kinds]`, ascending."""
        factor, off = np.empty(len(kinds)), np.empty(len(kinds))
        known, even, batched = Known.of(sizes, self.times), are_even(sizes), sizes[3] > 1
        for kind, layout in enumerate(layouts):
            mine = slice(*np.searchsorted(kinds, (kind, kind + 1)))
            if mine.start == mine.stop:
                continue
            _, matrix, as_if = known.of_products(mine).in_layout(layout, self.times, self.folder)
            factor[mine] = np.exp(as_if + self._trees(layout).predict(matrix))
            off[mine] = [self._off[layout, *sort] for sort in zip(batched[mine].tolist(), even[mine].tolist(), strict=True)]
        return factor, off


def are_even(sizes: Sizes) -> npt.NDArray[np.bool_]:
    """Of which products 8 divides M, N and K, (products,)."""
    return np.all([size % VECTOR == 0 for size in sizes[:3]], axis=0)


@lru_cache(maxsize=4)
def load(hardware: HardwareSpec) -> LayoutModel | None:
    """Of a GPU, or of the nearest shipped one whose products were timed in other layouts; None where there is neither.

    Raises:
        ValueError: the file is of another schema version.
    """
    import perfmodel

    found = hardware_module.fitted(hardware, MANIFEST, SCHEMA_VERSION)
    if found is None:
        return None
    manifest, like = found
    return LayoutModel(data_folder() / like / "models", manifest, perfmodel.load(like))
