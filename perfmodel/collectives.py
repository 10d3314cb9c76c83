"""Times of collectives: inside one host from the measured table, across hosts from it and the network's links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel import hardware as hardware_module
from perfmodel.curves import Array, Curve
from perfmodel.data_folder import data_folder
from perfmodel.hardware import HardwareSpec
from perfmodel.topology import HOST_GPUS, MOST_GPUS, OPS, PRESETS, Cluster, is_hgx, usual, wire

FILE_NAME = "collectives.parquet"
LARGE_BYTES = 2**20
"""From this size on bandwidth counts more than latency: errors are judged on either side by themselves."""
COVERAGE = 0.9
OCTAVES = 3
"""How far beyond the largest size errors are judged: by predicting it without so many octaves below it."""
MOST_BYTES = 2.0**62
"""Sizes and counts from which on no arithmetic with them is sure to be right."""
SCALE_BYTES = 4
"""Bytes of one row's scale in a compressed message."""
CODEC = "pack", "unpack"
INTERPOLATED, EXTRAPOLATED, MODELLED = "interpolated", "extrapolated", "modelled"

# What tables measured before these columns existed hold throughout.
_DEFAULTS: dict[str, str | int] = {"split": "equal", "dim": 0, "groups": 1}


class Setting(NamedTuple):
    """What a measured curve over sizes is of."""

    op: str
    dtype: str
    split: str
    dim: int
    ranks: int
    groups: int


class Estimate(NamedTuple):
    """Times in microseconds at some sizes with the ends of their 90% intervals, and whether anything was beyond measurement."""

    time: Array
    low: Array
    high: Array
    extrapolated: npt.NDArray[np.bool_]

    def plus(self, other: Estimate) -> Estimate:
        """One after the other; errors of a kind may be shared, so that half-widths add."""
        return Estimate(
            self.time + other.time, self.low + other.low, self.high + other.high, self.extrapolated | other.extrapolated
        )


class Spread(NamedTuple):
    """Half the widths of 90% intervals in logarithms, from what was predicted without having been seen.

    Attributes:
        small: At sizes below `LARGE_BYTES`.
        large: At sizes from there on.
        below: At sizes below the smallest measured.
        beyond: At the largest size measured, and one, two, ... octaves beyond it.
    """

    small: float
    large: float
    below: float
    beyond: tuple[float, ...]

    def at(self, sizes: Array, first: float, last: float) -> Array:
        """At each size, where `first` to `last` was measured."""
        octaves = np.log2(np.maximum(sizes / last, 1.0))
        far = len(self.beyond) - 1
        outside = np.interp(octaves, np.arange(far + 1), self.beyond) + np.maximum(octaves - far, 0.0) * self.beyond[-1] / far
        inside = np.where(sizes < LARGE_BYTES, self.small, self.large)
        return np.where(sizes > last, outside, np.where(sizes < first, self.below, inside))


@dataclass(frozen=True)
class CollectiveModel:
    """Predicts collectives on one kind of GPU.

    Attributes:
        hardware: Name of the GPU.
        table: Measured rows: op, dtype, split, dim, ranks, groups, bytes_per_rank, p50_us.
        like: Name of the shipped GPU that they were measured on, where that is another one.
    """

    hardware: str
    table: pd.DataFrame
    like: str | None = None

    @property
    def measured_on(self) -> str:
        """Name of the GPU that the rows were measured on."""
        return self.like or self.hardware

    @cached_property
    def curves(self) -> dict[Setting, Curve]:
        """A curve over sizes for each setting with at least four of them."""
        names = list(Setting._fields)
        # A size that was measured in several runs counts once.
        points = self.table.groupby([*names, "bytes_per_rank"], observed=True, as_index=False)["p50_us"].median()
        series: dict[Setting, list[tuple[float, float]]] = {}
        for row in points[[*names, "bytes_per_rank", "p50_us"]].itertuples(index=False):
            series.setdefault(Setting(*row[:-2]), []).append((float(row[-2]), float(row[-1])))
        return {key: Curve(*np.array(sorted(some)).T) for key, some in series.items() if len(some) >= 4}

    def predict(self, frame: pd.DataFrame, cluster: Cluster | None = None) -> pd.DataFrame:
        """Times of collectives, codec included where they are compressed.

        Args:
            frame: Columns `op` (all_to_all, all_reduce, reduce_scatter, all_gather), `ranks`, `bytes_per_rank` (the larger
                of a rank's two buffers in bf16, whatever travels), and optionally `dtype` (bf16; for all_to_all also fp16,
                fp8_rowwise, fp8_rowwise_unfused), `groups` (how many such groups of one host do the same at the same
                moment, 1), `dim` (values of a row with a scale of its own, where the dtype has one), `split` (equal, or
                uneven as `hil.collectives` says), `per_host` (GPUs of a group in each host; as many as fit).
            cluster: Hosts and the network between them; None for the preset `hgx_<hardware>`, where there is one.

        Returns:
            Columns `time_us`, `low_us`, `high_us` (a 90% interval), with the index and the order of `frame`.

        Raises:
            ValueError: an op, dtype, split or dim that was not measured, a size or a number of ranks that cannot be, or ranks
                beyond one host where no cluster is known.
        """
        result = np.empty((len(frame), 3))
        for rows, estimate, _ in self._estimates(frame, cluster):
            result[rows] = np.stack([estimate.time, estimate.low, estimate.high], axis=1)
        return pd.DataFrame(result, columns=["time_us", "low_us", "high_us"], index=frame.index)

    def basis(self, frame: pd.DataFrame, cluster: Cluster | None = None) -> pd.Series:
        """What each prediction rests on.

        Returns:
            `interpolated` between measured sizes of this very setting; `extrapolated` inside a host to sizes, ranks or
            groups that were never measured; `modelled` across hosts.
        """
        result = np.empty(len(frame), dtype=object)
        for rows, estimate, across in self._estimates(frame, cluster):
            result[rows] = MODELLED if across else np.where(estimate.extrapolated, EXTRAPOLATED, INTERPOLATED)
        return pd.Series(result, index=frame.index)

    def _estimates(self, frame: pd.DataFrame, cluster: Cluster | None) -> Iterator[tuple[npt.NDArray[np.int64], Estimate, bool]]:
        """For each distinct setting of a frame: its rows, their estimate, whether it spans hosts."""
        if not isinstance(frame, pd.DataFrame):
            raise ValueError(f"collectives are asked for by a DataFrame, not a {type(frame).__name__}; make one of it")
        if frame.columns.has_duplicates:
            twice = frame.columns[frame.columns.duplicated()][0]
            raise ValueError(f"the frame has the column {twice!r} more than once; leave one of them out")
        missing = {"op", "ranks", "bytes_per_rank"} - set(frame.columns)
        if missing:
            raise ValueError(f"the frame lacks the columns {sorted(missing)}; predict_collective needs op, ranks, bytes_per_rank")
        cluster = usual(self.hardware) if cluster is None else cluster
        asked = frame.reset_index(drop=True)
        sizes = _numbers(asked["bytes_per_rank"])
        if not ((sizes > 0) & (sizes < MOST_BYTES)).all():
            raise ValueError("bytes_per_rank must be positive and finite, and below 2^62; leave out collectives of nothing")
        defaults: dict[str, str | int] = {"dtype": "bf16", "groups": 1, "dim": 0, "split": "equal", "per_host": 0}
        columns = {
            name: asked[name].astype(object).where(asked[name].notna(), value) if name in asked else [value] * len(asked)
            for name, value in defaults.items()
        }
        keys = pd.DataFrame({"op": asked["op"], "ranks": asked["ranks"], **columns})
        for name in ("ranks", "groups", "dim", "per_host"):
            whole, least = _numbers(keys[name]), {"ranks": 2, "groups": 1}.get(name, 0)
            if (wrong := ~((np.floor(whole) == whole) & (whole >= least) & (whole < MOST_BYTES))).any():
                raise ValueError(f"{name} = {keys[name][wrong].iloc[0]}; give a whole number, {least} or more, below 2^62")
            keys[name] = whole.astype(int)
        distinct = keys.groupby(list(keys.columns), sort=False).ngroup().to_numpy()
        order = np.argsort(distinct, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(distinct[order])) + 1) if len(order) else ():
            op, ranks, dtype, groups, dim, split, per_host = keys.iloc[rows[0]].tolist()
            setting = self._check(Setting(op, dtype, split, dim, ranks, groups))
            if cluster is None:
                island = ranks
                if per_host or ranks > HOST_GPUS:
                    raise ValueError(
                        f"ranks {ranks}: no cluster is known for {self.hardware}; give {', '.join(PRESETS)} or another's links"
                    )
            else:
                island = cluster.island(ranks, per_host or None)
            host = HOST_GPUS if cluster is None else cluster.gpus_per_host
            if groups * island > host:
                raise ValueError(f"groups {groups}: a host of {host} GPUs has room for {host // island} with {island} each")
            if island == ranks:
                yield rows, self.inside(setting, sizes[rows]), False
            else:
                assert cluster is not None
                from perfmodel.across import across

                yield rows, across(self, cluster, setting, island, sizes[rows]), True

    def _check(self, setting: Setting) -> Setting:
        """Refuse what no measurement stands behind, naming what there is; a dim of no effect becomes 0."""
        op, dtype, split, dim, ranks, _ = setting
        if ranks > MOST_GPUS:
            raise ValueError(f"ranks {ranks}: at most {MOST_GPUS:,} GPUs can be asked about")
        known = [key for key in self.curves if (key.op, key.dtype) == (op, dtype)]
        if op not in OPS or not known:
            there = ", ".join(sorted({f"{key.op}/{key.dtype}" for key in self.curves if key.op in OPS}))
            raise ValueError(f"collective {op}/{dtype} was not measured on {self.measured_on}; there are: {there}")
        if not any(key.split == split for key in known):
            raise ValueError(
                f"split {split}: {op}/{dtype} was measured on {self.measured_on} with split {_listed(k.split for k in known)}"
            )
        dims = sorted({key.dim for key in known})
        if dims == [0]:
            return setting._replace(dim=0)
        if not dim:
            raise ValueError(f"{op}/{dtype} depends on dim, the values of a row; give dim, {dims[0]} to {dims[-1]}")
        if not dims[0] <= dim <= dims[-1]:
            raise ValueError(f"dim {dim}: {op}/{dtype} was measured on {self.measured_on} from dim {dims[0]} to {dims[-1]}")
        return setting

    def inside(self, setting: Setting, sizes: Array) -> Estimate:
        """Times inside one host.

        Ranks that were never measured send as many bytes as the nearest measured number of ranks does in the same time,
        and pay the measured latency of each rank more; what travels compressed is then its codec and the plain exchange.
        Groups that were never measured are as many as were.
        """
        measured = {(key.ranks, key.groups) for key in self.curves if key[:3] == setting[:3]}
        if (setting.ranks, setting.groups) in measured:
            return self._at(setting, sizes)
        ranks = min((r for r, _ in measured), key=lambda r: (abs(np.log(r / setting.ranks)), -r))
        groups = max(g for r, g in measured if r == ranks)
        nearest = setting._replace(ranks=ranks, groups=groups)
        if ranks == setting.ranks:
            estimate = self._at(nearest, sizes)
            return estimate._replace(extrapolated=np.ones(len(sizes), dtype=bool))
        if setting.dim:
            return self.codec(setting, sizes).plus(self.inside(plain(setting), sizes * compression(setting.dim)))
        estimate = self._at(nearest, sizes * wire(setting.op, setting.ranks) / wire(setting.op, ranks))
        latency = max(setting.ranks - ranks, 0) * self._latency_of_a_rank(setting)
        small, large = self._ranks_errors[setting.op]
        octaves = max(1.0, abs(float(np.log2(setting.ranks / ranks))))
        spread = np.exp(octaves * np.where(sizes < LARGE_BYTES, small, large))
        return Estimate(
            estimate.time + latency, estimate.low / spread, (estimate.high + latency) * spread, np.ones(len(sizes), dtype=bool)
        )

    def floor(self, setting: Setting) -> float:
        """Time of the smallest size measured of an op inside a host, whatever the ranks: what launching it takes."""
        return min(
            float(curve(curve.sizes[0])[0]) for key, curve in self.curves.items() if key.op == setting.op and key.dtype == "bf16"
        )

    def codec(self, setting: Setting, sizes: Array) -> Estimate:
        """Quantizing before and dequantizing after a compressed exchange, from the two halves measured alone."""
        halves = []
        for op in CODEC:
            there = [key for key in self.curves if key.op == op and key.dtype == setting.dtype]
            if not there:
                raise ValueError(f"{setting.op}/{setting.dtype} between {setting.ranks} ranks needs {op}, not measured alone")
            halves.append(self._at(there[0]._replace(dim=setting.dim), sizes))
        return halves[0].plus(halves[1])

    def _at(self, setting: Setting, sizes: Array) -> Estimate:
        """Times on a measured setting, between measured dims in their logarithm."""
        dims = sorted({key.dim for key in self.curves if key._replace(dim=setting.dim) == setting})
        if not dims or not dims[0] <= setting.dim <= dims[-1]:
            raise ValueError(f"{setting.op}/{setting.dtype} at dim {setting.dim} was not measured between {setting.ranks} ranks")
        below, above = max(d for d in dims if d <= setting.dim), min(d for d in dims if d >= setting.dim)
        curves = [self.curves[setting._replace(dim=dim)] for dim in (below, above)]
        share = 0.0 if below == above else float(np.log(setting.dim / below) / np.log(above / below))
        time = curves[0](sizes) ** (1 - share) * curves[1](sizes) ** share
        first, last = curves[0].sizes[[0, -1]]
        factor = np.exp(self._errors[setting.op, setting.dtype].at(sizes, first, last))
        return Estimate(time, time / factor, time * factor, (sizes > last) | (sizes < first))

    @cached_property
    def held_out(self) -> pd.DataFrame:
        """Every measured size predicted from the other sizes of its setting.

        Returns:
            The columns of `Setting`, bytes_per_rank, measured_us, predicted_us, and whether it is the `smallest` size.
        """
        records = []
        for key, curve in self.curves.items():
            for i, (size, time) in enumerate(zip(curve.sizes, curve.times, strict=True)):
                records.append((*key, size, time, curve.without(i)(size)[0], i == 0))
        return pd.DataFrame(records, columns=[*Setting._fields, "bytes_per_rank", "measured_us", "predicted_us", "smallest"])

    @cached_property
    def _errors(self) -> dict[tuple[str, str], Spread]:
        """Half the widths of intervals, per op and dtype."""
        rows = self.held_out
        error = np.abs(np.log(rows["predicted_us"].to_numpy() / rows["measured_us"].to_numpy()))
        large = (rows["bytes_per_rank"] >= LARGE_BYTES).to_numpy()
        result = {}
        for op, dtype in {(key.op, key.dtype) for key in self.curves}:
            own = ((rows["op"] == op) & (rows["dtype"] == dtype)).to_numpy()
            parts = [error[own & ~large], error[own & large], error[own & rows["smallest"].to_numpy()]]
            # A part without rows takes the widest of the others.
            widest = max(half_width(part) for part in parts if len(part))
            small_half, large_half, below = (half_width(part) if len(part) else widest for part in parts)
            beyond = [large_half]
            for octaves in range(1, OCTAVES + 1):
                found = [c.beyond(octaves) for key, c in self.curves.items() if (key.op, key.dtype) == (op, dtype)]
                errors = [abs(np.log(ratio)) for ratio in found if ratio is not None]
                beyond.append(max([beyond[-1], *([half_width(errors)] if errors else [])]))
            result[op, dtype] = Spread(small_half, large_half, below, tuple(beyond))
        return result

    @cached_property
    def _ranks_errors(self) -> dict[str, tuple[float, float]]:
        """What twice the ranks add to half the width of an interval, in logarithms: per op, below and from `LARGE_BYTES` on.

        Each measured number of ranks is predicted by the next fewer; where that is not twice as few, the error of an octave.
        """
        errors: dict[str, list[tuple[bool, float]]] = {}
        for key, curve in self.curves.items():
            fewer = [k for k in self.curves if k._replace(ranks=key.ranks) == key and k.ranks < key.ranks]
            if key.op in OPS and not key.dim and fewer:
                below = max(fewer, key=lambda k: k.ranks)
                sizes = curve.sizes * wire(key.op, key.ranks) / wire(key.op, below.ranks)
                found = np.abs(np.log(self.curves[below](sizes) / curve.times)) / np.log2(key.ranks / below.ranks)
                errors.setdefault(key.op, []).extend(zip(curve.sizes >= LARGE_BYTES, found.tolist(), strict=True))
        if not errors:
            raise ValueError(
                f"collectives were measured on {self.measured_on} between one number of ranks only; none other can be said"
            )
        every = [error for some in errors.values() for _, error in some]
        result = {}
        for op in {key.op for key in self.curves}:
            parts = ([error for at, error in errors.get(op, ()) if at == large] for large in (False, True))
            small, large = (half_width(part or every) for part in parts)
            result[op] = (small, large)
        return result

    def _latency_of_a_rank(self, setting: Setting) -> float:
        """What each rank more adds to the smallest message, in microseconds, over the measured numbers of ranks."""
        at = {key.ranks: curve.times[0] for key, curve in self.curves.items() if key[:4] == setting[:4] and key.groups == 1}
        if len(at) < 2:
            return 0.0
        return max(0.0, float(at[max(at)] - at[min(at)]) / (max(at) - min(at)))


def plain(setting: Setting) -> Setting:
    """The exchange of a compressed setting as if bf16 travelled."""
    return setting._replace(dtype="bf16", dim=0)


def compression(dim: int) -> float:
    """Bytes that travel for each byte of bf16 content, where a row of `dim` values has one byte each and a scale."""
    return (dim + SCALE_BYTES) / (2 * dim)


def half_width(errors: npt.ArrayLike, coverage: float = COVERAGE) -> float:
    """The conformal quantile of absolute errors: an unseen one stays below it at least so often."""
    ordered = np.sort(np.asarray(errors, dtype=float))
    return float(ordered[min(int(np.ceil((len(ordered) + 1) * coverage)), len(ordered)) - 1])


def _listed(values: Iterator[str]) -> str:
    return ", ".join(sorted(set(values)))


def _numbers(column: pd.Series) -> Array:
    """A column as numbers, NaN for what is none: words, and truth values, which pandas would take for 0 and 1."""
    if column.dtype == bool:
        return np.full(len(column), np.nan)
    if column.dtype == object:
        column = column.map(lambda value: None if isinstance(value, bool) else value)
    return np.asarray(pd.to_numeric(column, errors="coerce"), dtype=np.float64)


def load(hardware: str | HardwareSpec = "h200", calibration: Path | None = None) -> CollectiveModel:
    """The measured collectives of a GPU, or where there are none and it stands in HGX hosts, those of the nearest shipped one.

    Args:
        hardware: Its name, or its specification.
        calibration: A calibration folder: `perfmodel/collectives.parquet` in it, a table of `hil.collectives`, replaces the
            shipped one. A calibration without it leaves the shipped one.

    Raises:
        FileNotFoundError: there are none.
        ValueError: the table is damaged or lacks a column.
    """
    name = hardware if isinstance(hardware, str) else hardware.name
    own = None if calibration is None else Path(calibration) / "perfmodel" / FILE_NAME
    path = own if own is not None and own.is_file() else data_folder() / name / FILE_NAME
    if path.is_file():
        return CollectiveModel(name, _read(path))
    spec = hardware if isinstance(hardware, HardwareSpec) else _known(name)
    like = hardware_module.serving(spec, FILE_NAME) if spec is not None and is_hgx(spec.gpu) else None
    if spec is None or like is None:
        raise FileNotFoundError(f"no collective was measured on {name}; run: torchrun -m hil.collectives")
    slower = hardware_module.load(like).copy_bandwidth_tbs / spec.copy_bandwidth_tbs
    return CollectiveModel(name, _with_codecs(_read(data_folder() / like / FILE_NAME), slower), like)


def _known(name: str) -> HardwareSpec | None:
    return hardware_module.load(name) if name in hardware_module.available() else None


def _with_codecs(table: pd.DataFrame, slower: float) -> pd.DataFrame:
    """A table as of a GPU with as fast links whose memory takes so many times as long: what packs and unpacks does, too.

    Of these the least time measured is taken to be their launch.
    """
    alone = table["op"].isin([*CODEC, "copy"])
    launch = table.groupby(["op", "dtype", "dim"])["p50_us"].transform("min")
    more = ((slower - 1) * (table["p50_us"] - launch)).where(alone, 0.0)
    around = table.assign(more=more)[table["op"].isin(CODEC)].groupby(["dtype", "dim", "bytes_per_rank"])["more"].sum()
    keys = pd.MultiIndex.from_frame(table[["dtype", "dim", "bytes_per_rank"]])
    exchanged = around.reindex(keys).fillna(0.0).to_numpy() * (table["op"] == "all_to_all")
    return table.assign(p50_us=table["p50_us"] + more + exchanged)


def _read(path: Path) -> pd.DataFrame:
    """A table of `hil.collectives`, with the columns that older ones lack."""
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no table of collectives ({error}); measure again") from None
    for name, value in _DEFAULTS.items():
        if name not in table.columns:
            table[name] = value
    missing = {*Setting._fields, "bytes_per_rank", "p50_us"} - set(table.columns)
    if missing or table.empty:
        what = f"lacks the column {sorted(missing)[0]}" if missing else "holds no row"
        raise ValueError(f"{path} {what}; measure again with: torchrun -m hil.collectives")
    return table
