"""A made-up time model for tests of what stands above it; its figures mean nothing outside them."""

from __future__ import annotations

import types
from typing import ClassVar

import numpy as np
import pandas
import pytest


class MadeUpTimes:
    """Stands for `perfmodel.PerfModel`: a launch cost and a throughput per kind of kernel, and a fixed interval."""

    hardware = types.SimpleNamespace(
        name="h200", capability=(9, 0), peak_bf16_tflops=780.0, peak_fp8_tflops=1370.0, copy_bandwidth_tbs=4.3
    )
    fingerprint = "made-up"
    manifest: ClassVar = {
        "command": "none",
        "choice_regret": {"geomean": 0.02},
        "kernels": {"torch/bf16": {"held_out": {"n": 3, "mape": 0.04}}, "torch/other": {"held_out": {"n": 1, "mape": 0.08}}},
    }

    def __init__(self, interval: float = 0.05, bandwidth: float = 4.0) -> None:
        self.interval, self.bandwidth = interval, bandwidth
        self.calls = 0

    def predict(self, rows: pandas.DataFrame) -> pandas.DataFrame:
        self.calls += 1
        us = np.array([self.time(row.kernel, row.m, row.n, row.k, row.groups) for row in rows.itertuples()])
        return pandas.DataFrame({"time_us": us, "low_us": us * (1 - self.interval), "high_us": us * (1 + self.interval)})

    def time(self, kernel: str, m: int, n: int, k: int, groups: int = 1) -> float:
        if "quantize" in kernel or "transpose" in kernel or "ward" in kernel:
            return 2.0 + 3 * m * k / (self.bandwidth * 1e6)
        peak = {"fp8_tensorwise_fast": 1200, "fp8_tensorwise_split": 1000, "fp8_rowwise_fast": 1100, "fp8_rowwise_split": 900,
                "fp8_block128": 950}.get(kernel.partition("/")[2], 600)  # fmt: skip
        return 3.0 + 2 * m * n * k * groups / (peak * 1e6)

    def in_range(self, rows: pandas.DataFrame) -> pandas.Series:
        return (rows.m <= 65_536) & (rows.k <= 65_536)


@pytest.fixture
def made_up_times() -> type[MadeUpTimes]:
    return MadeUpTimes
