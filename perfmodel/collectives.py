"""Times of collectives inside one host, from the measured table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from perfmodel.data_folder import data_folder


@dataclass(frozen=True)
class CollectiveModel:
    """Interpolates measured collectives; answers nothing that was not measured.

    Attributes:
        hardware: Name of the GPU.
        table: Measured rows: op, dtype, ranks, bytes_per_rank, p50_us.
    """

    hardware: str
    table: pd.DataFrame

    def predict(self, op: str, ranks: int, bytes_per_rank: float, dtype: str = "bf16") -> float:
        """Time of one collective in microseconds.

        Linear between the measured sizes in the logarithms of size and time. Below the smallest size measured, where
        latency alone counts, its time.

        Args:
            op: all_to_all, all_reduce, reduce_scatter or all_gather.
            ranks: GPUs that take part, in one host.
            bytes_per_rank: The larger of a rank's two buffers.
            dtype: bf16.

        Raises:
            ValueError: op, ranks or dtype was not measured, or the size is larger than any measured.
        """
        rows = self.table[(self.table["op"] == op) & (self.table["dtype"] == dtype)]
        if rows.empty:
            known = ", ".join(sorted(f"{o}/{d}" for o, d in set(zip(self.table["op"], self.table["dtype"], strict=True))))
            raise ValueError(f"collective {op}/{dtype} was not measured on {self.hardware}; there are: {known}")
        rows = rows[rows["ranks"] == ranks].sort_values("bytes_per_rank")
        if rows.empty:
            known = ", ".join(str(r) for r in sorted(set(self.table["ranks"])))
            raise ValueError(f"{op} was measured on {self.hardware} between {known} GPUs of one host, not {ranks}")
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
    return CollectiveModel(hardware, pd.read_parquet(path))
