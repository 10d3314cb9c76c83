"""Holes between measured sizes: by hand, against scipy's distance transform, and in the shipped model."""

import numpy as np
import pandas as pd
import pytest
from scipy.ndimage import distance_transform_cdt

import perfmodel
from perfmodel.cells import (
    ALIGNED,
    AROUND,
    EACH,
    FEW,
    FURTHEST,
    LAUNCH_ONLY,
    LAUNCH_ONLY_K,
    NEAR,
    PER_OCTAVE,
    WELL_ALIGNED,
    WELL_KNOWN,
    Cells,
)
from perfmodel.prediction import WIDER_BETWEEN, few_neighbours, wider, wider_beyond


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


def test_what_8_divides_says_nothing_of_what_it_does_not():
    m = 2**14
    cells = Cells.of(sizes((m, 64, 64, 2), (m, 60, 64, 2**7)))
    asked = sizes((m, 64, 64, 2), (m, 64, 60, 2), (m, 62, 64, 2), (m, 62, 62, 100), (m, 64, 72, 100), (m, 72, 64, 2))
    np.testing.assert_allclose(cells.gap_octaves(asked), [0, 2.0, 2.0, 0, 2.0, 0])


def test_the_distance_is_scipys():
    measured = np.random.default_rng(0).random((12, 11, 24, 12)) < 0.002
    at = np.indices(measured.shape).reshape(4, -1)
    # Calls of so few elements are launches, whatever was measured, but for long sums.
    edges = np.exp2((at + 1) / PER_OCTAVE)
    known = measured | ((edges.prod(axis=0) < LAUNCH_ONLY * 1.01) & (edges[2] < LAUNCH_ONLY_K * 1.01)).reshape(measured.shape)
    away = distance_transform_cdt(~known, "chessboard")
    # Sizes between powers of two: 8 divides none.
    both = np.stack([measured, np.zeros_like(measured)], axis=-1)
    found = Cells(both, np.zeros(both.shape, dtype=np.uint8)).gap_octaves(tuple(np.exp2((at + 0.5) / PER_OCTAVE)))
    expected = np.clip(away.ravel() - NEAR, 0, FURTHEST - NEAR) / PER_OCTAVE
    np.testing.assert_array_equal(found, expected)
    assert (expected > 0).sum() > 500


def test_saved_and_put_together():
    first, second = Cells.of(sizes((16, 16, 64, 1))), Cells.of(sizes((1, 1, 100, 8)), sizes((64, 1, 1, 1)))
    both = first | second
    again = Cells.load(both.save())
    np.testing.assert_array_equal(again.measured, both.measured)
    np.testing.assert_array_equal(again.neighbours, both.neighbours)
    assert Cells.load(both.save()) is again
    for call in ((16, 16, 64, 1), (1, 1, 100, 8), (64, 1, 1, 1)):
        assert both.measured[
            *np.floor(PER_OCTAVE * np.log2(call) + 1e-9).astype(int), int(call[1] % ALIGNED == call[2] % ALIGNED == 0)
        ]
    assert both.measured.sum() == 3
    # Sizes at a cell's lower edge, whose logarithm ends in other bits, belong to it.
    powers = np.exp2(np.arange(40) / PER_OCTAVE)
    assert Cells.of((powers, powers, powers, powers)).measured.sum() == 40


def test_neighbours_are_counted_as_by_hand():
    """Distinct careful timings up to so many cells away in each size, of the same alignment."""
    generator = np.random.default_rng(0)
    careful, asked = (np.exp2(generator.uniform(0, 6, (4, count))).round() for count in (3000, 500))
    careful[2, ::10] = asked[2, ::10] = 32

    def cells_of(calls):
        aligned = (calls[1] % ALIGNED == 0) & (calls[2] % ALIGNED == 0)
        return np.floor(PER_OCTAVE * np.log2(calls) + 1e-9).astype(int), np.where(aligned, 1 + (calls[2] % WELL_ALIGNED == 0), 0)

    distinct = np.unique(careful, axis=1)
    (known, known_aligned), (of, aligned) = cells_of(distinct), cells_of(asked)
    # Larger sizes than all that were measured count as those.
    of = np.minimum(of, known.max(axis=1)[:, None])
    near = (np.abs(of[:, :, None] - known[:, None]).max(axis=0) <= AROUND) & (aligned[:, None] == known_aligned)
    expected = np.searchsorted(FEW, near.sum(axis=1), side="right") + EACH * aligned
    found = Cells.of(np.concatenate([careful, careful[:, :50]], axis=1), asked).few(tuple(asked))
    np.testing.assert_array_equal(found, expected)
    assert set(expected % EACH) == set(range(EACH)) and set(aligned) == {0, 1, 2}
    # Quick launches are no neighbours.
    assert Cells.of(sizes((16, 16, 64, 1)), sizes(*[(64, 64, 64, n) for n in range(1, 40)])).few(sizes((64, 64, 64, 8))) == [
        2 * EACH
    ]


def test_where_few_were_timed_an_interval_is_wider():
    entry = {"range": {name: [1.0, 8192.0] for name in ("m", "n", "k", "groups")} | {"product": [1.0, 2.0**40]}}
    calls = sizes((1024, 64, 64, 1), (1024, 16, 64, 1), (16384, 64, 64, 1))
    assert few_neighbours(calls, entry).tolist() == [WELL_KNOWN] * 3 and wider("torch/bf16", calls, entry).tolist()[:2] == [1, 1]
    entry["cells"] = Cells.of(sizes(*[(1024 + 8 * n, 64, 64, 1) for n in range(20)])).save()
    beyond = wider_beyond("torch/bf16", calls, entry)
    np.testing.assert_array_equal(wider("torch/bf16", calls, entry), beyond)
    entry["wider_where_few"] = [4.0, 4.0, 4.0, 3.0, 3.5, 3.5, 3.5, 1.0, 2.0, 1.5, 1.25, 1.0]
    assert few_neighbours(calls, entry).tolist() == [2 * EACH + 2, 2 * EACH, 2 * EACH + 2]
    # That 8 does not divide its N is another class, of which none were timed.
    assert wider("torch/bf16", sizes((1024, 62, 64, 1)), entry).tolist() == [4.0]
    # And that 32 does not divide its K another, but what was measured around is no hole for it.
    assert wider("torch/bf16", sizes((1024, 64, 80, 1)), entry).tolist() == [3.5]
    assert wider_beyond("torch/bf16", sizes((1024, 64, 56, 1)), entry).tolist() == [1.0]
    np.testing.assert_allclose(wider("torch/bf16", calls, entry), [1.25, max(2.0, beyond[1]), beyond[2]])
    assert beyond[2] > 2


def test_cells_of_before_are_read():
    """They told neither alignment nor neighbours."""
    old = Cells.of(sizes((1024, 64, 64, 1))).measured[..., 1]
    saved = {"shape": list(old.shape), "bits": Cells(old, np.zeros(old.shape, dtype=np.uint8)).save()["bits"]}
    calls = sizes((1024, 64, 64, 1), (1024, 62, 63, 1), (16, 64, 1024, 1))
    np.testing.assert_array_equal(Cells.load(saved).gap_octaves(calls) > 0, [False, False, False])
    assert Cells.load(saved).few(calls).tolist() == [WELL_KNOWN, WELL_KNOWN - 2 * EACH, WELL_KNOWN]


def test_cells_of_two_alignments_are_read():
    """They told no K that 32 divides from others."""
    cells = Cells.of(sizes((1024, 64, 64, 1)))
    old = Cells.load(Cells(cells.measured, cells.neighbours[..., [0, 2]]).save())
    assert old.few(sizes((1024, 64, 64, 1), (1024, 64, 48, 1), (1024, 62, 64, 1))).tolist() == [EACH, EACH, 0]


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
    for kernel, each in (("torch/bf16", WIDER_BETWEEN["gemm"]), ("torch/quantize_rowwise", WIDER_BETWEEN["memory"])):
        np.testing.assert_allclose(wider_beyond(kernel, sizes((2900, 64, 64, 1)), entry), [1 + each])


@pytest.mark.parametrize("kernel", ["torch/bf16", "torch/fp8_rowwise_fast", "torch/quantize_rowwise"])
def test_what_was_measured_lies_in_no_hole(kernel):
    from perfmodel import fit

    rows = fit.fitted_rows(fit.read_timings("h200"))
    rows = rows[rows["kernel"] == kernel]
    assert perfmodel.load("h200").in_range(rows).all()
