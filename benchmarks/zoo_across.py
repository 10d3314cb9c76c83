"""Timings of the zoo's bf16 products as gradients read their operands: the sweep `zoo` has them with K fastest alone.

One run timed both (`data/h200/across/`, `hil.collect`); its ratios bring the sweep's times into each layout. Batched products,
which that run left out, count as with K fastest.
"""

from __future__ import annotations

import pandas as pd

from perfmodel.data_folder import data_folder
from perfmodel.kernels import ACROSS, BF16, BF16_BATCHED, laid

SIZES = ["m", "n", "k"]
QUANTILES = ["p10_us", "p50_us", "p90_us"]


def with_across(zoo: pd.DataFrame) -> pd.DataFrame:
    """Timings of the sweep, and behind them those of its bf16 products that read an operand across."""
    run = pd.read_parquet(data_folder() / "h200" / "across" / "gemm.parquet").set_index([*SIZES, "kernel"])["p50_us"].unstack()
    single, batched = zoo[zoo["kernel"] == BF16], zoo[zoo["kernel"] == BF16_BATCHED]
    found = [zoo]
    for layout in ACROSS:
        ratio = (run[laid(BF16, layout)] / run[BF16]).rename("ratio").dropna()
        timed = single.join(ratio, on=SIZES, how="inner").assign(kernel=laid(BF16, layout))
        timed[QUANTILES] = timed[QUANTILES].mul(timed["ratio"], axis=0)
        found += [timed.drop(columns="ratio"), batched.assign(kernel=laid(BF16_BATCHED, layout))]
    return pd.concat(found, ignore_index=True)
