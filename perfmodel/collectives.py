"""Times of collectives inside one host, from the measured table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from perfmodel.data_folder import data_folder

# What tables measured before these columns existed hold throughout.
_DEFAULTS: dict[str, str | int] = {"split": "equal", "dim": 0, "groups": 1}


@dataclass(frozen=True)
class CollectiveModel:
    """Interpolates measured collectives; answers nothing that was not measured.

    Attributes:
        hardware: Name of the GPU.
        table: Measured rows: op, dtype, split, dim, ranks, groups, bytes_per_rank, p50_us.
    """

    hardware: str
    table: pd.DataFrame

    def predict(
        self,
        op: str,
        ranks: int,
        bytes_per_rank: float,
        dtype: str = "bf16",
        *,
        groups: int = 1,
        dim: int | None = None,
        split: str = "equal",
    ) -> float:
        """Time of one collective in microseconds, codec included where it is compressed.

        Linear between the measured sizes, and between the measured dims, in the logarithms of size, dim and time. Below
        the smallest size measured, where latency alone counts, its time.

        Args:
            op: all_to_all, all_reduce, reduce_scatter or all_gather.
            ranks: GPUs that take part, in one host.
            bytes_per_rank: The larger of a rank's two buffers in bf16, whatever travels.
            dtype: What travels: bf16; for all_to_all also fp16, fp8_rowwise, fp8_rowwise_unfused.
            groups: Groups of `ranks` GPUs of the host that do the same at the same moment.
            dim: Values of a row with a scale of its own; needed where the dtype scales rows, of no effect elsewhere.
            split: equal or uneven (see `hil.collectives` for how uneven).

        Raises:
            ValueError: op, dtype, split, ranks, groups or dim was not measured, or the size is larger than any measured.
        """
        rows = self._measured(op, ranks, dtype, groups, split)
        dims = sorted(set(rows["dim"]))
        if dims == [0]:
            return _at(rows, bytes_per_rank, op)
        if dim is None:
            raise ValueError(f"{op}/{dtype} depends on dim, the values of a row; give dim, {dims[0]} to {dims[-1]}")
        if not dims[0] <= dim <= dims[-1]:
            raise ValueError(f"dim {dim}: {op}/{dtype} was measured on {self.hardware} from dim {dims[0]} to {dims[-1]}")
        below, above = max(d for d in dims if d <= dim), min(d for d in dims if d >= dim)
        around = [np.log(_at(rows[rows["dim"] == d], bytes_per_rank, op)) for d in (below, above)]
        return float(np.exp(np.interp(np.log(dim), np.log([below, above]), around)))

    def _measured(self, op: str, ranks: int, dtype: str, groups: int, split: str) -> pd.DataFrame:
        """Rows of what is asked for, named column by column where there are none."""
        rows = self.table[(self.table["op"] == op) & (self.table["dtype"] == dtype)]
        if rows.empty:
            known = sorted({f"{o}/{d}" for o, d in zip(self.table["op"], self.table["dtype"], strict=True)})
            raise ValueError(f"collective {op}/{dtype} was not measured on {self.hardware}; there are: {', '.join(known)}")
        known_splits = _listed(rows["split"])
        rows = rows[rows["split"] == split]
        if rows.empty:
            raise ValueError(f"split {split}: {op}/{dtype} was measured on {self.hardware} with split {known_splits}")
        known_ranks = _listed(rows["ranks"])
        rows = rows[rows["ranks"] == ranks]
        if rows.empty:
            raise ValueError(f"{op} was measured on {self.hardware} between {known_ranks} GPUs of one host, not {ranks}")
        known_groups = _listed(rows["groups"])
        rows = rows[rows["groups"] == groups]
        if rows.empty:
            raise ValueError(
                f"groups {groups}: {op} between {ranks} GPUs was measured on {self.hardware} in {known_groups} groups at once"
            )
        return rows


def _listed(values: pd.Series) -> str:
    return ", ".join(str(value) for value in sorted(set(values)))


def _at(rows: pd.DataFrame, bytes_per_rank: float, op: str) -> float:
    rows = rows.sort_values("bytes_per_rank")
    sizes, times = rows["bytes_per_rank"].to_numpy(float), rows["p50_us"].to_numpy(float)
    if bytes_per_rank > sizes[-1]:
        most = sizes[-1] / 2**20
        raise ValueError(f"{op} of {bytes_per_rank / 2**20:,.0f} MiB a rank is beyond the {most:,.0f} MiB measured")
    return float(np.exp(np.interp(np.log(max(bytes_per_rank, 1.0)), np.log(sizes), np.log(times))))


def load(hardware: str = "h200") -> CollectiveModel:
    """The measured collectives of a GPU.

    Raises:
        FileNotFoundError: there are none.
    """
    path = data_folder() / hardware / "collectives.parquet"
    if not path.is_file():
        raise FileNotFoundError(f"no collective was measured on {hardware}; run: torchrun -m hil.collectives")
    table = pd.read_parquet(path)
    for name, value in _DEFAULTS.items():
        if name not in table.columns:
            table[name] = value
    return CollectiveModel(hardware, table)
