"""What is said of each kernel's emulation agrees with what was measured, and says `unknown` of everything else."""

import json
from pathlib import Path

import pytest

from numerics import fidelity

DATA = Path(__file__).resolve().parents[2] / "data" / "h200"
MEASURED, LIBRARIES = DATA / "exactness.json", DATA / "exactness_libraries.json"


def test_a_kernel_that_was_not_compared_is_unknown():
    assert fidelity("deep_gemm/fp8_block128").level == "unknown" and fidelity("deep_gemm/fp8_block128").bound is None


def test_where_k_is_not_split_a_kernel_is_exact():
    assert fidelity("torch/fp8_rowwise_fast").level == "exact"
    assert fidelity("torch/fp8_tensorwise_fast").level == "close"
    assert fidelity("torch/fp8_tensorwise_fast", (256, 256, 4096)).level == "exact"
    assert fidelity("torch/fp8_tensorwise_fast", (4096, 4096, 65536)).level == "exact"
    assert fidelity("torch/fp8_tensorwise_fast", (64, 64, 65536)).level == "close"


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("how", ["fast", "split"])
def test_our_gemms_are_exact_given_their_plan(scaling, how):
    """As tests/gpu/test_loka_kernels.py compares them on an H200, with the parts that `perfmodel.gemm_plan` names."""
    for shape in (None, (64, 64, 65536)):
        found = fidelity(f"loka/fp8_{scaling}_{how}", shape)
        assert (found.level, found.bound) == ("exact", 0.0) and "perfmodel.gemm_plan" in found.note


@pytest.mark.parametrize("row", json.loads(MEASURED.read_text())["rows"], ids=lambda row: row["kernel"])
def test_measurements_bear_it_out(row):
    """Every output equal; no distance above the bound that is stated for a blind emulation."""
    assert row["outputs"] > 100_000 and row["unequal"] == 0
    stated = fidelity(row["kernel"].split()[0])
    if row["kernel"].startswith("torch/") and " " not in row["kernel"]:
        assert stated.level == ("close" if row["split_shapes"] else "exact")
        assert row["most_apart_without_parts"] <= stated.bound


@pytest.mark.parametrize("row", json.loads(LIBRARIES.read_text())["rows"], ids=lambda row: row["kernel"])
def test_a_second_run_with_other_libraries_bears_it_out(row):
    """Where `exact` is said, every output equal; where a last bit may differ, few do."""
    stated = fidelity(row["kernel"].split()[0])
    assert row["outputs"] > 30_000 and row["unequal"] <= row["outputs"] / 10_000
    if row["kernel"].startswith(("loka/", "fbgemm/")):
        assert stated.level in ("exact", "close")
    if stated.level == "exact" or row["kernel"].startswith("torch/"):
        assert row["unequal"] == 0
