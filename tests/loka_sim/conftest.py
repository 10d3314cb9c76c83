"""A made-up time model for tests of what stands above it; its figures mean nothing outside them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pandas
import pytest

from loka_sim.modelspec import Dim, Gemm, ModelSpec, Site, Table, linear_passes
from perfmodel import collectives
from perfmodel.collectives import CollectiveModel
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import KERNELS


class MadeUpTimes:
    """Stands for `perfmodel.PerfModel`: a launch cost and a throughput per kind of kernel, and a fixed interval."""

    hardware = HardwareSpec("h200", "NVIDIA H200", (9, 0), 780.0, 1370.0, 4.3, 62_914_560, 132)
    overlap = None
    fingerprint = "made-up"
    manifest: ClassVar = {
        "command": "none",
        "choice_regret": {"geomean": 0.02},
        # Two kernels were held out, the others are known.
        "kernels": {
            **{name: {"held_out": {"n": 0, "mape": 0.0}} for name, spec in KERNELS.items() if spec.kind != "linear"},
            "torch/bf16": {"held_out": {"n": 3, "mape": 0.04}},
            "torch/transpose_e4m3": {"held_out": {"n": 1, "mape": 0.08}},
        },
    }

    def __init__(self, interval: float = 0.05, bandwidth: float = 4.0) -> None:
        self.interval, self.bandwidth = interval, bandwidth
        self.calls = 0

    def predict(self, rows: Any) -> pandas.DataFrame:
        self.calls += 1
        rows = pandas.DataFrame(rows)
        us = np.array([self.time(row.kernel, row.m, row.n, row.k, row.groups) for row in rows.itertuples()])
        return pandas.DataFrame({"time_us": us, "low_us": us * (1 - self.interval), "high_us": us * (1 + self.interval)})

    def predict_together(self, rows: Any) -> pandas.DataFrame:
        return self.predict(rows)

    def time(self, kernel: str, m: int, n: int, k: int, groups: int = 1) -> float:
        if "quantize" in kernel or "transpose" in kernel or "ward" in kernel:
            return 2.0 + 3 * m * k / (self.bandwidth * 1e6)
        peak = {"fp8_tensorwise_fast": 1200, "fp8_tensorwise_split": 1000, "fp8_rowwise_fast": 1100, "fp8_rowwise_split": 900,
                "fp8_block128": 950}.get(kernel.partition("/")[2], 600)  # fmt: skip
        return 3.0 + 2 * m * n * k * groups / (peak * 1e6)

    @property
    def collectives(self) -> CollectiveModel:
        return collectives.load("h200")

    def in_range(self, rows: Any) -> pandas.Series:
        rows = pandas.DataFrame(rows)
        return (rows.m <= 65_536) & (rows.k <= 65_536)


@pytest.fixture
def made_up_times() -> type[MadeUpTimes]:
    return MadeUpTimes


def _model() -> ModelSpec:
    """A small model with something of everything: large and small linears, a head, a batched product, tables."""
    batch = Dim(0, 1)

    def linear(name: str, n: int, k: int, **fields: object) -> Site:
        return Site(name, "linear", linear_passes(batch, Dim(n), Dim(k)), weight=f"{name}.weight", **fields)  # type: ignore[arg-type]

    product = {
        "output": Gemm(Dim(32), Dim(32), Dim(64), batch),
        "grad_input": Gemm(Dim(32), Dim(64), Dim(32), batch),
        "grad_weight": Gemm(Dim(32), Dim(64), Dim(32), batch),
    }
    return ModelSpec(
        "made-up", 2048,
        (
            linear("bottom.0", 512, 13, bias=True, activation="relu"),
            Site("interaction", "bmm", product),
            linear("top.0", 4096, 2048, bias=True, norm="layernorm", activation="silu"),
            linear("top.1", 4096, 4096, activation="gelu"),
            linear("top.2", 64, 256),
            linear("head", 1, 4096, bias=True),
        ),
        tables=(Table("ids", 1_000_000, 64, "sum", 20.0), Table("tags", 5_000, 32, "none", 3.0)),
        dense_parameters=4096 * 2048 + 4096 * 4096,
        unaccounted=("fft: not a GEMM",),
        source="made up",
    )  # fmt: skip


@pytest.fixture
def made_up_model() -> ModelSpec:
    return _model()


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUpTimes:
    """The made-up time model in place of the measured one."""
    import perfmodel

    times = MadeUpTimes()
    monkeypatch.setattr(perfmodel, "load", lambda hardware="h200", calibration=None: times)
    return times


@pytest.fixture(scope="module")
def gemms_alone() -> Iterator[None]:
    """Captures leave out the kernels beside the GEMMs: nine tenths of a capture's time, and no concern of tests of sites."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("loka_sim.capture"), "_fused", lambda *given: ([], (), given[-1], "left out"))
        yield
