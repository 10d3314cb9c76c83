"""What a bf16 GEMM takes in another layout of its operands than the one that it was timed in.

`torch/bf16` and `torch/bf16_batched` are timed and learned with K fastest in both operands, as a layer's output reads its input
and its weight. A gradient reads one of them, or both, across: cuBLAS has other kernels for that, and where sizes are odd far
older ones. A layer's output may have a bias that the kernel adds, for which cuBLAS chooses otherwise again: that is learned as
one more layout, of single products. Trees of a layout say by which factor, by the sizes, by what the product and its transpose
take with K fastest, and by which kernel cuBLAS takes for them then (`perfmodel.fit_layouts`, from `hil.layouts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfmodel import hardware as hardware_module
from perfmodel.calls import of_calls
from perfmodel.choice import asked, chosen_features
from perfmodel.data_folder import data_folder
from perfmodel.features import alignment, gemm_features, waves
from perfmodel.hardware import HardwareSpec
from perfmodel.in_step import VECTOR
from perfmodel.kernels import ACROSS, BF16, BF16_BATCHED, BIASED, K_FASTEST, KERNELS, Layout
from perfmodel.roofline import moved_bytes
from perfmodel.trees import Trees

if TYPE_CHECKING:
    from perfmodel.calls import Sizes
    from perfmodel.model import PerfModel

Array = npt.NDArray[np.float64]

SCHEMA_VERSION = 2
FILE, MANIFEST = "layouts.parquet", "layouts.json"
OTHERS = (*ACROSS, BIASED)
LAYOUTS = (K_FASTEST, *OTHERS)
# Output tiles of cuBLAS' older kernels, beside those of `features.TILES`.
_TILES = ((32, 32), (64, 32), (32, 64), (256, 64), (64, 256), (128, 64), (192, 128), (128, 192))


def column(layout: Layout) -> str:
    """Of microseconds in a layout, in `FILE`."""
    return f"{'_'.join(layout)}_us"


def model_file(layout: Layout) -> str:
    """File name of a layout's trees inside the models folder."""
    return f"layouts__{'_'.join(layout)}.ubj.gz"


def features(sizes: Sizes, model: PerfModel) -> tuple[list[str], Array]:
    """Names and (products, features) matrix of products.

    Args:
        sizes: m, n, k and groups, 1-D arrays.
        model: Of kernels' times, and of which kernel cuBLAS takes, with K fastest: for the products and for their transposes.
    """
    m, n, k, groups = sizes
    hardware, (alone_us, turned_us) = model.hardware, both_ways(model, sizes)
    names, matrix = gemm_features(BF16, m, n, k, groups, hardware)
    moved = moved_bytes(KERNELS[BF16], m, n, k, groups)
    along_m, along_n, along_k = (alignment(size) for size in (m, n, k))
    columns: dict[str, Array] = {
        "log2_alone": np.log2(alone_us), "log_turned_over_alone": np.log(turned_us / alone_us),
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
    for which, way in (("", sizes), ("turned_", (n, m, k, groups))):
        chosen, found = _chosen(model, way)
        columns |= {f"{which}{name}": column for name, column in zip(chosen, found.T, strict=True)}
    return [*names, *columns], np.column_stack([matrix, *columns.values()])


def _chosen(model: PerfModel, sizes: Sizes) -> tuple[list[str], Array]:
    """Names and (products, features) matrix of which kernel cuBLAS is told to take with K fastest, and how sure that is."""
    names, result, groups = list[str](), np.empty((0, 0)), sizes[3]
    for kernel, rows in ((BF16, np.flatnonzero(groups == 1)), (BF16_BATCHED, np.flatnonzero(groups > 1))):
        if not len(rows):
            continue
        choice, (m, n, k, some) = model.choice(kernel), of_calls(sizes, rows)
        assert choice is not None  # every GPU whose layouts were timed has been asked
        parts, doubt = choice.told(asked(kernel, m, n, k, some, model.hardware))
        names, columns = chosen_features(parts, m, n, k, some, model.hardware)
        if not result.size:
            result = np.empty((len(groups), len(names) + 1))
        result[rows] = np.column_stack([columns, doubt])
    return [*names, "chosen_doubt"], result


def both_ways(model: PerfModel, sizes: Sizes) -> tuple[Array, Array]:
    """Microseconds with K fastest of products and of their transposes, by a model of kernels' times."""
    m, n, k, groups = sizes
    kernels = np.where(groups > 1, BF16_BATCHED, BF16)
    calls = {
        "kernel": np.concatenate([kernels, kernels]).tolist(), "m": np.concatenate([m, n]), "n": np.concatenate([n, m]),
        "k": np.concatenate([k, k]), "groups": np.concatenate([groups, groups]),
    }  # fmt: skip
    both = np.asarray(model.predict(calls)["time_us"], dtype=np.float64)
    return both[: len(m)], both[len(m) :]


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
        some = of_calls(sizes, np.concatenate(list(places.values())))
        _, matrix = features(some, self.times)
        even, batched = are_even(some), some[3] > 1
        start = 0
        for layout, rows in places.items():
            mine = slice(start, start := start + len(rows))
            factor[rows] = np.exp(self._trees(layout).predict(matrix[mine]))
            off[rows] = [self._off[layout, *sort] for sort in zip(batched[mine].tolist(), even[mine].tolist(), strict=True)]
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
