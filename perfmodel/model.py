"""The learned kernel-time model: the logarithm of time over roofline, by a small network and gradient-boosted trees."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from perfmodel.choice import Choice, with_choice
from perfmodel.features import features
from perfmodel.forest import worth_compiling
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import KERNELS
from perfmodel.memory_costs import estimated_us
from perfmodel.network import Network, single_threaded
from perfmodel.roofline import roofline_us
from perfmodel.trees import Trees

if TYPE_CHECKING:
    import pandas as pd

    from perfmodel.collectives import CollectiveModel
    from perfmodel.explain import Explanation
    from perfmodel.topology import Cluster

Array = npt.NDArray[np.float64]
Sizes = tuple[Array, Array, Array, Array]
Columns = Mapping[str, Sequence[Any]]
"""Columns by name, all equally long: a DataFrame without pandas, whose import takes longer than a small prediction."""

# Added to the roofline, so that the target stays of order one for launches that take a microsecond whatever their size.
LAUNCH_FLOOR_US = 1.0
# Of the roofline, what no call is predicted below: of all timings on H200s and H100s none took less (a test of the model's).
ROOFLINE_SHARE = 0.97
# Edges of the size classes, in microseconds of predicted time, within which intervals are calibrated.
SIZE_CLASSES_US = (5.0, 20.0, 100.0)
# What the features know of a size's alignment: its remainder by this.
EDGE_MULTIPLE = 256
# Threads of a prediction; rows of one kernel that one works on at once, few enough for its cache; and rows from which on more
# than one is woken.
THREADS, _ROWS_AT_ONCE, _MANY_ROWS = 2, 4096, 4096


def size_class(time_us: Array) -> npt.NDArray[np.int64]:
    """Index of the size class of each time: below 5 us, 20 us, 100 us, and above."""
    return np.searchsorted(np.asarray(SIZE_CLASSES_US), time_us, side="right")


def baseline_us(kernel: str, m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec, planned: bool = True) -> Array:
    """What the trees correct, in microseconds: a memory-bound kernel's costs where they are known, else roofline and launch.

    Args:
        kernel: Which.
        m: Rows.
        n: Columns of the result.
        k: Contracted dimension.
        groups: Products.
        hardware: The GPU.
        planned: As of `perfmodel.features.features`.
    """
    estimate = estimated_us(kernel, m, k, hardware) if planned else None
    if estimate is not None:
        return estimate
    return roofline_us(kernel, m, n, k, groups, hardware) + LAUNCH_FLOOR_US


def no_less(time: Array, kernel: str, sizes: Sizes, hardware: HardwareSpec, least_us: float) -> Array:
    """Learned times of one kernel's calls, or where these are less `ROOFLINE_SHARE` of the roofline or `PerfModel.least_us`."""
    return np.maximum(time, np.maximum(ROOFLINE_SHARE * roofline_us(kernel, *sizes, hardware), least_us))


def bounds_of(time_us: Array, entry: Mapping[str, Any], doubt: npt.NDArray[np.int64]) -> Array:
    """Both ends of the 90% intervals of predicted times, (calls, 2).

    Args:
        time_us: The times.
        entry: The kernel's, of a manifest: factors by size class, and powers of them by class of doubt where it has a choice.
        doubt: As of `Seen`.
    """
    factors = np.asarray(entry["interval_factors"])[size_class(time_us)]
    if wider := entry.get("wider_in_doubt"):
        factors = factors ** np.asarray(wider)[doubt, None]
    return time_us[:, None] * factors


def model_file(kernel: str) -> str:
    """File name of a kernel's trees inside the models folder."""
    return kernel.replace("/", "__") + ".ubj.gz"


def network_file(kernel: str) -> str:
    """File name of a kernel's network, where it has one."""
    return kernel.replace("/", "__") + ".network.json.gz"


def choice_file(kernel: str) -> str:
    """File name of what tells which of its kernels the library chooses, where there is such a thing."""
    return kernel.replace("/", "__") + ".choice.json.gz"


class Seen(NamedTuple):
    """What the trees see of calls of one kernel.

    Attributes:
        names: Of the features, `network` the last where there is one.
        matrix: The features, (calls, features).
        doubt: Of what the library chooses, by class (`perfmodel.choice.DOUBT`), (calls,).
        smooth: The network's value, 0 without one.
    """

    names: list[str]
    matrix: Array
    doubt: npt.NDArray[np.int64]
    smooth: Array | float = 0.0

    @classmethod
    def of(
        cls,
        kernel: str,
        sizes: Sizes,
        hardware: HardwareSpec,
        choice: Choice | None,
        network: Network | None,
        planned: bool = True,
    ) -> Seen:
        """Features, those of the kernel that is likely chosen, and what the network makes of both."""
        known = features(kernel, *sizes, hardware, planned)
        seen = cls(*with_choice(*known, choice, kernel, sizes, hardware))
        if network is None:
            return seen
        smooth = network.predict(seen.matrix)
        return seen._replace(names=[*seen.names, "network"], matrix=np.column_stack([seen.matrix, smooth]), smooth=smooth)


def _kernels_of(frame: pd.DataFrame | Columns) -> list[str]:
    """The names in the kernel column, of a frame that has the columns of sizes, too."""
    if missing := {"kernel", "m", "n", "k"} - set(frame):
        raise ValueError(f"the frame lacks the columns {sorted(missing)}; predict needs kernel, m, n, k")
    column = frame["kernel"]
    if getattr(column, "ndim", 1) > 1:
        raise ValueError("the frame has the column 'kernel' more than once; leave one of them out")
    # A column of strings that Arrow holds takes ten times as long value by value.
    kernels = list(column.to_numpy(dtype=object) if hasattr(column, "to_numpy") else column)
    if not all(issubclass(kind, str) for kind in set(map(type, kernels))):
        raise ValueError("a row names no kernel; predict needs kernel, m, n, k in every row")
    return kernels


def columns_of(frame: pd.DataFrame | Columns) -> Sizes:
    """The (m, n, k, groups) columns as float arrays; groups is 1 where there is no such column."""
    m, n, k = (_numbers(name, frame[name]) for name in ("m", "n", "k"))
    return m, n, k, _numbers("groups", frame["groups"]) if "groups" in frame else np.ones_like(m)


def _numbers(name: str, column: pd.Series | Sequence[Any]) -> Array:
    """A column of numbers, or of None; of truth values, words or anything else it is refused."""
    values = column.to_numpy() if hasattr(column, "to_numpy") else np.asarray(column)
    odd: list[Any] = []
    if values.dtype == object:
        odd = [value for value in values.reshape(-1) if not isinstance(value, Real | None) or isinstance(value, bool)]
    elif values.dtype.kind not in "iuf":
        odd = values.reshape(-1).tolist()
    if odd:
        raise ValueError(f"{name} = {odd[0]!r} is no size; m, n, k and groups must be at least 1, and whole numbers")
    return np.asarray(values, dtype=np.float64)


def _places(kernels: Sequence[str]) -> dict[str, npt.NDArray[np.intp]]:
    """The rows of each kernel, by name."""
    numbers = {kernel: number for number, kernel in enumerate(dict.fromkeys(kernels))}
    found = np.fromiter(map(numbers.__getitem__, kernels), dtype=np.int64, count=len(kernels))
    return {kernel: np.flatnonzero(found == number) for kernel, number in sorted(numbers.items())}


def at_edge(sizes: Sizes, measured: dict[str, list[float]]) -> Sizes:
    """Sizes beyond what was measured, cut to the largest measured one with the same remainder by `EDGE_MULTIPLE`.

    A call outside takes the roofline's time there, times what was learned at the edge: along that dimension it never falls,
    and what an odd size costs stays.

    Args:
        sizes: m, n, k, groups.
        measured: Least and largest measured size by name.
    """

    def cut(size: Array, edge: float) -> Array:
        alike = edge - (edge - size) % EDGE_MULTIPLE
        return np.where(size > edge, np.where(alike < edge / 2, edge, alike), size)

    m, n, k, groups = (cut(size, measured[name][1]) for size, name in zip(sizes, ("m", "n", "k", "groups"), strict=True))
    return m, n, k, groups


class _Stamp(NamedTuple):
    """A file as it is now: another one of the same name has another time or size."""

    path: Path
    changed_ns: int
    size: int

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        """The file's, or a stamp that no file has where there is none."""
        try:
            found = path.stat()
        except OSError:
            return cls(path, -1, -1)
        return cls(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=128)
def _learned(trees: _Stamp, network: _Stamp | None = None) -> tuple[Network | None, Trees]:
    """What a kernel's files hold; models that are opened again share it."""
    path = trees.path
    try:
        forest, smooth = Trees(path.read_bytes()), None
        if network is not None:
            path = network.path
            smooth = Network.load(gzip.decompress(path.read_bytes()))
    except (EOFError, OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} is missing or truncated; copy the folder again") from error
    return smooth, forest


@lru_cache(maxsize=128)
def _choice(saved: _Stamp) -> Choice:
    """What a kernel's file of choices holds; models that are opened again share it."""
    try:
        return Choice.load(gzip.decompress(saved.path.read_bytes()))
    except (EOFError, OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{saved.path} is missing or truncated; copy the folder again") from error


@dataclass(frozen=True)
class PerfModel:
    """Predicts kernel times on one GPU.

    Attributes:
        hardware: The GPU.
        folder: Where the trees lie.
        manifest: What they were fitted on, how good they are on held-out shapes, and their interval factors.
        calibration: The calibration folder that it came with, if any.
    """

    hardware: HardwareSpec
    folder: Path
    manifest: dict[str, Any]
    calibration: Path | None = field(default=None, kw_only=True)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the fitted model and its data."""
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def _loaded(self) -> dict[str, tuple[Network | None, Trees]]:
        return {}

    def learned(self, kernel: str) -> tuple[Network | None, Trees]:
        """Network, if it has one, and trees of a kernel that the manifest names, read when first asked for.

        Raises:
            ValueError: a file is missing or damaged.
        """
        if kernel not in self._loaded:
            names = [model_file(kernel), *([network_file(kernel)] if self.manifest["kernels"][kernel].get("network") else [])]
            self._loaded[kernel] = _learned(*(_Stamp.of(self.folder / name) for name in names))
        return self._loaded[kernel]

    def choice(self, kernel: str) -> Choice | None:
        """What tells which of its kernels the library chooses, where the trees were fitted with that.

        Raises:
            ValueError: its file is missing or damaged.
        """
        has = self.manifest["kernels"][kernel].get("choice")
        return _choice(_Stamp.of(self.folder / choice_file(kernel))) if has else None

    def seen(self, kernel: str, sizes: Sizes) -> Seen:
        """What the trees see of calls of one kernel."""
        sizes = at_edge(sizes, self.manifest["kernels"][kernel]["range"])
        return Seen.of(kernel, sizes, self.hardware, self.choice(kernel), self.learned(kernel)[0], self.planned(kernel))

    def planned(self, kernel: str) -> bool:
        """Whether its trees were fitted with what is known of a memory-bound kernel's launch."""
        return bool(self.manifest["kernels"][kernel].get("planned"))

    def least_us(self, kernel: str) -> float:
        """The kernel's shortest call among those that were fitted, in microseconds; 0 of a model that does not say."""
        return float(self.manifest["kernels"][kernel].get("least_us", 0.0))

    def _times(self, kernel: str, sizes: Sizes) -> Array:
        """Times of calls of one kernel and both ends of their intervals, (calls, 3)."""
        entry, seen = self.manifest["kernels"][kernel], self.seen(kernel, sizes)
        ratio = seen.smooth + self.learned(kernel)[1].predict(seen.matrix).astype(np.float64)
        learned = baseline_us(kernel, *sizes, self.hardware, self.planned(kernel)) * np.exp(ratio)
        time = no_less(learned, kernel, sizes, self.hardware, self.least_us(kernel))
        return np.column_stack([time, bounds_of(time, entry, seen.doubt)])

    @overload
    def predict(self, frame: pd.DataFrame) -> pd.DataFrame: ...

    @overload
    def predict(self, frame: Columns) -> Mapping[str, Array]: ...

    def predict(self, frame: pd.DataFrame | Columns) -> pd.DataFrame | Mapping[str, Array]:
        """Times of kernel calls.

        Beyond the largest measured M, N or K a call never takes less for being larger (of the same alignment). Inside, the
        library's own times fall now and then where it changes its kernel: of pairs of H200 timings of aligned GEMMs that
        differ by a factor of two in one size, 1 to 4% by kernel fall by more than 5%, one to less than half. The prediction
        follows by at most a third, and by more than 5% in less than 2% of such pairs. Nothing takes less than 97% of the
        roofline, nor than the shortest call of its kernel that was fitted to.

        Args:
            frame: Columns `kernel`, `m`, `n`, `k` and optionally `groups` (default 1). For a memory-bound kernel `m` and
                `k` are the rows and columns of its input and `n` is 1. A DataFrame, or columns by name.

        Returns:
            Columns `time_us`, `low_us`, `high_us` (a 90% interval), in the order of `frame`: a DataFrame with its index, or
            arrays by name where it is no DataFrame.

        Raises:
            ValueError: an unknown kernel, one without measurements on this GPU, a size that is no whole number from 1 on, or a
                shape that the kernel cannot run.
        """
        kernels = _kernels_of(frame)
        m, n, k, groups = columns_of(frame)
        for name, size in zip(("m", "n", "k", "groups"), (m, n, k, groups), strict=True):
            if size.shape != (len(kernels),):
                raise ValueError(f"{name} has the shape {size.shape} for {len(kernels)} kernels; give each of them one {name}")
            if (wrong := ~((size >= 1) & (size < 2**62) & (np.floor(size) == size))).any():
                raise ValueError(
                    f"{name} = {size[wrong][0]:g} is no size; m, n, k and groups must be at least 1, and whole numbers"
                )
        result, parts = np.empty((len(kernels), 3)), []
        for name, rows in _places(kernels).items():
            self._refuse(name, (m[rows], n[rows], k[rows], groups[rows]))
            parts += [(name, rows[start : start + _ROWS_AT_ONCE]) for start in range(0, len(rows), _ROWS_AT_ONCE)]

        def fill(part: tuple[str, npt.NDArray[np.intp]]) -> None:
            name, rows = part
            result[rows] = self._times(name, (m[rows], n[rows], k[rows], groups[rows]))

        # Each kernel's files are read once before two threads may ask for them.
        names = dict.fromkeys(name for name, _ in parts)
        if len(kernels) < _MANY_ROWS:
            if len(unread := [name for name in names if name not in self._loaded]) >= THREADS:
                # Reading is most of what few rows take. They themselves are too little work to be shared.
                with ThreadPoolExecutor(THREADS) as pool:
                    list(pool.map(self.learned, unread))
            for part in parts:
                fill(part)
        else:
            # A part alone is too small to have the loop compiled; once it is there, parts use it.
            worth_compiling(len(kernels))
            with single_threaded(), ThreadPoolExecutor(THREADS) as pool:
                for found in (pool.map(self.learned, names), pool.map(self.choice, names), pool.map(fill, parts)):
                    list(found)
        columns = dict(zip(("time_us", "low_us", "high_us"), result.T, strict=True))
        if isinstance(frame, Mapping):
            return columns
        import pandas

        return pandas.DataFrame(columns, index=frame.index)

    def _refuse_unknown(self, kernel: str) -> None:
        if kernel not in self.manifest["kernels"]:
            known = "has no measurements on" if kernel in KERNELS else "is not a kernel; known on"
            raise ValueError(f"kernel {kernel!r} {known} {self.hardware.name}: {', '.join(sorted(self.manifest['kernels']))}")

    def _refuse(self, kernel: str, sizes: Sizes) -> None:
        """Raise where a kernel is not known here or cannot run one of the shapes."""
        self._refuse_unknown(kernel)
        spec = KERNELS[kernel]
        multiples = (spec.multiple_m, spec.multiple_n, spec.multiple_k)
        for letter, size, multiple in zip("MNK", sizes[:3], multiples, strict=True):
            if (wrong := size % multiple != 0).any():
                raise ValueError(f"{kernel} cannot run {letter} = {size[wrong][0]:.0f}: it is no multiple of {multiple}")
        if spec.kind == "gemm" and (several := sizes[3] != 1).any():
            raise ValueError(f"{kernel} makes one product, not groups = {sizes[3][several][0]:.0f}; name a batched kernel")
        if spec.most_k is not None and (long := sizes[2] > spec.most_k).any():
            raise ValueError(f"{kernel} cannot run K = {sizes[2][long][0]:.0f}: it is more than {spec.most_k}")
        if spec.most_groups is not None and (many := sizes[3] > spec.most_groups).any():
            raise ValueError(f"{kernel} takes at most {spec.most_groups} groups, not {sizes[3][many][0]:.0f}")

    def explain(self, row: Mapping[str, Any] | pd.Series) -> Explanation:
        """Why a call takes as long as predicted: roofline, launch, and what each feature of the shape adds.

        Args:
            row: `kernel`, `m`, `n`, `k` and optionally `groups`.

        Raises:
            ValueError: as `predict`.
        """
        from perfmodel.explain import explain

        return explain(self, row)

    @cached_property
    def collectives(self) -> CollectiveModel:
        """Collectives on this GPU, of the calibration where it measured them, or of a GPU with the same links.

        Raises:
            FileNotFoundError: none were measured.
        """
        from perfmodel import collectives

        return collectives.load(self.hardware, self.calibration)

    def predict_collective(self, frame: pd.DataFrame, cluster: Cluster | None = None) -> pd.DataFrame:
        """Times of collectives, inside one host or over several; see `CollectiveModel.predict`.

        Args:
            frame: Columns `op`, `dtype`, `ranks`, `groups`, `bytes_per_rank`; `dim` where rows have scales.
            cluster: Hosts and the network between them (`perfmodel.topology`); None for the preset `hgx_<hardware>`.

        Returns:
            Columns `time_us`, `low_us`, `high_us` (a 90% interval), with the index and the order of `frame`.
        """
        return self.collectives.predict(frame, cluster)

    @overload
    def in_range(self, frame: pd.DataFrame) -> pd.Series: ...

    @overload
    def in_range(self, frame: Columns) -> npt.NDArray[np.bool_]: ...

    def in_range(self, frame: pd.DataFrame | Columns) -> pd.Series | npt.NDArray[np.bool_]:
        """Whether each call lies inside the sizes that the kernel was measured at (every dimension, and their product).

        Raises:
            ValueError: an unknown kernel, or one without measurements on this GPU.
        """
        kernels = _kernels_of(frame)
        sizes = dict(zip(("m", "n", "k", "groups"), columns_of(frame), strict=True))
        sizes["product"] = sizes["m"] * sizes["n"] * sizes["k"] * sizes["groups"]
        inside = np.ones(len(kernels), dtype=bool)
        for kernel, rows in _places(kernels).items():
            self._refuse_unknown(kernel)
            for name, (low, high) in self.manifest["kernels"][kernel]["range"].items():
                inside[rows] &= (sizes[name][rows] >= low) & (sizes[name][rows] <= high)
        if isinstance(frame, Mapping):
            return inside
        import pandas

        return pandas.Series(inside, index=frame.index)
