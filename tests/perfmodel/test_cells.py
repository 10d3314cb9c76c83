"""Holes between measured sizes: by hand, against scipy's distance transform, and in the shipped model."""

import numpy as np
import pandas as pd
import pytest
from scipy.ndimage import distance_transform_cdt

import perfmodel
from perfmodel.cells import FURTHEST, LAUNCH_ONLY, LAUNCH_ONLY_K, NEAR, PER_OCTAVE, Cells
from perfmodel.prediction import WIDER_BETWEEN, WIDER_MEMORY, wider_beyond


def sizes(*calls):
    return tuple(np.array(calls, dtype=float).T)


def test_octaves_from_what_was_measured_by_hand():
    cells = Cells.of(sizes((1024, 64, 64, 1), (2**17, 64, 64, 1)))
    # Measured; half an octave off; 1.5 octaves above 1,024 in M, and 3; as far in two sizes counts once; beyond the largest; and
    # a launch, which is known, but not where the sum is long.
    asked = sizes(
        (1024, 64, 64, 1), (1450, 64, 64, 1), (2900, 64, 64, 1), (8192, 64, 64, 1), (2900, 16, 64, 1), (2**18, 64, 64, 1),
        (1024, 8, 16, 1),
    )  # fmt: skip
    np.testing.assert_allclose(cells.gap_octaves(asked), [0, 0, 1.0, 2.0, 1.5, 0, 0])
    long = Cells.of(sizes((1024, 64, 64, 1), (64, 64, 2**16, 1)))
    np.testing.assert_allclose(long.gap_octaves(sizes((1, 1, 512, 1), (1, 1, 2**16, 1))), [0, 2.0])
    # A row of one operand is shared out.
    assert Cells.of(sizes((1024, 1, 2**18, 1))).gap_octaves(sizes((2, 1, 2**16, 1))).tolist() == [0]


def test_the_distance_is_scipys():
    measured = np.random.default_rng(0).random((12, 11, 24, 12)) < 0.002
    at = np.indices(measured.shape).reshape(4, -1)
    # Calls of so few elements are launches, whatever was measured, but for long sums.
    edges = np.exp2((at + 1) / PER_OCTAVE)
    known = measured | ((edges.prod(axis=0) < LAUNCH_ONLY * 1.01) & (edges[2] < LAUNCH_ONLY_K * 1.01)).reshape(measured.shape)
    away = distance_transform_cdt(~known, "chessboard")
    found = Cells(measured).gap_octaves(tuple(np.exp2((at + 0.5) / PER_OCTAVE)))
    expected = np.clip(away.ravel() - NEAR, 0, FURTHEST - NEAR) / PER_OCTAVE
    np.testing.assert_array_equal(found, expected)
    assert (expected > 0).sum() > 500


def test_saved_and_put_together():
    first, second = Cells.of(sizes((16, 16, 64, 1))), Cells.of(sizes((1, 1, 100, 8)), sizes((64, 1, 1, 1)))
    both = first | second
    again = Cells.load(both.save())
    np.testing.assert_array_equal(again.measured, both.measured)
    assert Cells.load(both.save()) is again
    for call in ((16, 16, 64, 1), (1, 1, 100, 8), (64, 1, 1, 1)):
        assert both.measured[tuple(np.floor(PER_OCTAVE * np.log2(call) + 1e-9).astype(int))]
    assert both.measured.sum() == 3
    # Sizes at a cell's lower edge, whose logarithm ends in other bits, belong to it.
    powers = np.exp2(np.arange(40) / PER_OCTAVE)
    assert Cells.of((powers, powers, powers, powers)).measured.sum() == 40


def test_a_call_in_a_hole_is_an_extrapolation_and_its_interval_wider():
    model = perfmodel.load("h200")
    entry = model.manifest["kernels"]["torch/bf16_batched"]
    grid = np.exp2(np.arange(0, 14.5, 0.5)).round()
    m, n, k, groups = (axis.ravel() for axis in np.meshgrid(grid, grid[:24], grid, np.array([2.0, 16.0, 256.0]), indexing="ij"))
    gap, largest = Cells.load(entry["cells"]).gap_octaves((m, n, k, groups)), entry["range"]["product"][1]
    hole = np.flatnonzero((gap > 0) & (m * n * k * groups <= largest))
    assert len(hole) > 100
    calls = pd.DataFrame({"kernel": "torch/bf16_batched", "m": m, "n": n, "k": k, "groups": groups}).iloc[hole[:50]]
    assert not model.in_range(calls).any() and model.predict(calls).attrs["extrapolated"] == len(calls)
    said = model.explain(calls.iloc[0])
    assert said.gap_octaves == gap[hole[0]] and said.outside == ()
    assert said.wider_beyond == pytest.approx(1 + WIDER_BETWEEN["batched_gemm"] * said.gap_octaves)
    assert "from whatever was measured: an extrapolation, its interval" in said.words()


def test_a_model_that_knows_of_no_cells_has_no_holes():
    entry = {"range": {name: [1.0, 8192.0] for name in ("m", "n", "k", "groups")} | {"product": [1.0, 2.0**40]}}
    assert wider_beyond("torch/bf16", sizes((46, 16, 64, 1)), entry).tolist() == [1]
    entry["cells"] = Cells.of(sizes((1024, 64, 64, 1), (2**17, 64, 64, 1))).save()
    for kernel, each in (("torch/bf16", WIDER_BETWEEN["gemm"]), ("torch/quantize_rowwise", WIDER_MEMORY)):
        np.testing.assert_allclose(wider_beyond(kernel, sizes((2900, 64, 64, 1)), entry), [1 + each])


@pytest.mark.parametrize("kernel", ["torch/bf16", "torch/fp8_rowwise_fast", "torch/quantize_rowwise"])
def test_what_was_measured_lies_in_no_hole(kernel):
    from perfmodel import fit

    rows = fit.fitted_rows(fit.read_timings("h200"))
    rows = rows[rows["kernel"] == kernel]
    assert perfmodel.load("h200").in_range(rows).all()
