"""Intervals as wide as fresh sweeps ask: closed forms of normal errors, who has a say, and the shipped powers."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import fit, fresh
from perfmodel.choice import are_largest
from perfmodel.fresh import (
    ALIKE_CLASS_ROWS,
    ALIKE_FAMILY_ROWS,
    ALIKE_IN_A_RUN,
    BY_DIGITS,
    HALVED,
    IN_FEW_GROUPS,
    LARGEST,
    WRITTEN_SHARE,
    Fresh,
    family_of,
    kind_of,
    lower_factors,
    raise_bounds,
    raise_factors,
)
from perfmodel.kernels import KERNELS, library_of
from perfmodel.prediction import FEW_GROUPS, bounds_of, digits, in_few_groups, wider

KERNEL = "torch/bf16"
# Two standard normal deviations hold 90%, in this many of one.
NORMAL = 1.6449


def of_runs(*sizes):
    """As `NORMAL`, where so many rows of each run say as much as fewer of a run each: by the design effect of clusters."""
    alike = 1 + ALIKE_IN_A_RUN * (sum(size**2 for size in sizes) / sum(sizes) - 1)
    return NormalDist().inv_cdf(0.5 + 0.45 * (1 + alike / sum(sizes)))


def rows_of(spread, sweep="blind3", kernel=KERNEL, count=40_000, seed=0, **columns):
    """Rows of one size class beside intervals of one standard deviation of 0.1; their errors have `spread` of these."""
    generator = np.random.default_rng(seed)
    predicted = np.full(count, 50.0)
    measured = predicted * np.exp(0.1 * spread * generator.standard_normal(count))
    rows = pd.DataFrame({"kernel": kernel, "sweep": sweep, "p50_us": measured, "shared": False, "settled": True})
    rows = rows.assign(m=64, n=64, k=64, groups=1, run=0)
    return rows.assign(**columns), predicted, predicted[:, None] * np.exp([-0.1, 0.1])


def together(*parts):
    rows, predicted, bounds = zip(*parts, strict=True)
    return pd.concat(rows, ignore_index=True), np.concatenate(predicted), np.concatenate(bounds)


def inside(rows, bounds):
    measured = rows["p50_us"].to_numpy()
    return (measured >= bounds[:, 0]) & (measured <= bounds[:, 1])


def test_the_power_is_what_holds_nine_tenths_of_normal_errors():
    rows, predicted, bounds = rows_of(1.5)
    powers = Fresh.of(rows, predicted, bounds).powers()
    assert list(powers) == [KERNEL, BY_DIGITS[0]] and powers[KERNEL][2] == pytest.approx(1.5 * NORMAL, rel=0.02)
    np.testing.assert_allclose(powers[BY_DIGITS[0]], 1.0, atol=1e-3)
    again, predicted, bounds = rows_of(1.5, seed=1)
    assert inside(again, raise_bounds(again, predicted, bounds, powers)).mean() == pytest.approx(0.9, abs=0.01)


def test_lopsided_intervals_are_widened_by_what_both_sides_ask():
    rows, predicted, _ = rows_of(1.0)
    bounds = predicted[:, None] * np.exp([-0.05, 0.2])
    power = Fresh.of(rows, predicted, bounds).powers()[KERNEL][2]
    assert inside(rows, predicted[:, None] * np.exp(power * np.array([-0.05, 0.2]))).mean() == pytest.approx(0.9, abs=0.005)


def test_few_rows_change_little_and_other_classes_take_the_familys():
    rows, predicted, bounds = rows_of(3.0, kernel="loka/quantize_rowwise", count=40)
    # Of no class of digits, which would take a share of what they ask.
    asked = replace(Fresh.of(rows, predicted, bounds), digits=np.full(40, -1))
    own = np.sort(asked.needed)
    wanted = np.quantile(own, 0.9 * 41 / 40)
    everyones = 40 * wanted / (40 + ALIKE_FAMILY_ROWS)
    usual = (40 * wanted + ALIKE_FAMILY_ROWS * everyones) / (40 + ALIKE_FAMILY_ROWS)
    powers = np.log(asked.powers()["loka/quantize_*"])
    np.testing.assert_allclose(powers[[0, 1, 3]], usual)
    assert powers[2] == pytest.approx((40 * wanted + ALIKE_CLASS_ROWS * usual) / (40 + ALIKE_CLASS_ROWS))


def test_few_rows_lean_on_what_their_kind_asks_for():
    """A kernel of a few GEMMs on the other GEMMs, not on quantizers."""
    few = rows_of(1.0, kernel="torch/fp8_block128", count=20)
    many = rows_of(0.5, count=40_000, seed=1), rows_of(3.0, kernel="torch/quantize_rowwise", count=40_000, seed=2)
    powers = Fresh.of(*together(few, *many)).powers()
    wanted = np.quantile(Fresh.of(*few).needed, 0.9 * 21 / 20)
    usual = (20 * wanted + ALIKE_FAMILY_ROWS * np.log(0.5 * NORMAL)) / (20 + ALIKE_FAMILY_ROWS)
    assert np.log(powers["torch/fp8_block128"][0]) == pytest.approx(usual, abs=0.02)
    assert powers["torch/quantize_*"][0] == pytest.approx(3 * NORMAL, rel=0.03)


def test_a_sweep_has_no_say_in_its_own_intervals():
    """One that scatters twice as much is covered as badly as if it came tomorrow."""
    rows, predicted, bounds = together(rows_of(1.0, "blind3"), rows_of(1.0, "blind4", seed=1), rows_of(2.0, "blind5", seed=2))
    found = inside(rows, Fresh.of(rows, predicted, bounds).raised(predicted, bounds))
    # 90% of a normal variable hold 58.9% of one of twice its deviation.
    assert found[rows["sweep"] == "blind5"].mean() == pytest.approx(0.589, abs=0.01)
    assert found[rows["sweep"] == "blind3"].mean() > 0.93


def test_the_largest_calls_of_a_kernel_have_a_power_of_their_own_and_runs_for_sweeps():
    large = {"m": 2**21, "k": 512}
    rows, predicted, bounds = together(
        rows_of(1.0, count=4000),
        *(
            rows_of(2.0, "blind_large", name, 4000, run, run=run, **large)
            for run, name in ((1, KERNEL), (2, "torch/fp8_block128"))
        ),
    )
    asked = Fresh.of(rows, predicted, bounds)
    assert dict.fromkeys(asked.family) == dict.fromkeys([KERNEL, f"{KERNEL}{LARGEST}", f"torch/fp8_block128{LARGEST}"])
    assert set(asked.sweep) == {"blind3", "blind_large, run 1", "blind_large, run 2"}
    powers = asked.powers()
    assert powers[KERNEL][2] == pytest.approx(NORMAL, rel=0.1)
    assert powers[f"torch{LARGEST}"][2] == pytest.approx(2 * of_runs(4000, 4000), rel=0.02)
    # A kernel whose own run has no say goes by its library's others, of one run.
    held = 2 * NormalDist().cdf(of_runs(4000)) - 1
    assert inside(rows, asked.raised(predicted, bounds))[4000:].mean() == pytest.approx(held, abs=0.02)
    # Another library's few beside what all of the largest ask for: as many as those count, so half way between.
    more = rows_of(1.0, "blind_large", "loka/fp8_rowwise_fast", ALIKE_CLASS_ROWS, 5, run=3, **large)
    ours = Fresh.of(*together((rows, predicted, bounds), more)).powers()[f"loka{LARGEST}"][3]
    assert 1.2 * NORMAL < ours < 1.8 * NORMAL


def test_a_kernel_of_many_largest_calls_asks_for_itself_and_one_of_few_leans_on_its_library():
    large, other = {"m": 2**21, "k": 512, "run": 1}, "torch/fp8_block128"
    many = rows_of(2.0, "blind_large", KERNEL, 4000, 1, **large), rows_of(1.0, "blind_large", other, 4000, 2, **large)
    few = rows_of(1.0, "blind_large", "torch/fp8_rowwise_fast", ALIKE_CLASS_ROWS, 3, **large)
    powers = Fresh.of(*together(*many, few)).powers()
    assert powers[f"{KERNEL}{LARGEST}"][3] == pytest.approx(2 * of_runs(4000), rel=0.03)
    assert powers[f"{other}{LARGEST}"][3] == pytest.approx(of_runs(4000), rel=0.03)
    library, leaning = powers[f"torch{LARGEST}"][3], powers[f"torch/fp8_rowwise_fast{LARGEST}"][3]
    assert 1.4 * NORMAL < library < 2 * NORMAL
    alike = 1 + ALIKE_IN_A_RUN * (ALIKE_CLASS_ROWS - 1)
    needed = np.quantile(Fresh.of(*few).needed, 0.9 * (1 + alike / ALIKE_CLASS_ROWS))
    assert np.log(leaning) == pytest.approx((needed + np.log(library)) / 2, abs=0.01)


def test_intervals_of_the_largest_calls_are_raised_where_they_are_asked():
    entry = {"interval_factors": [[0.9, 1.2]] * 4, "range": {"product": [1.0, 2.0**50]}}
    raised = raise_factors(
        {KERNEL: entry, "torch/relu_forward": entry}, {KERNEL: [1.0, 1.0, 1.0, 2.0], f"torch{LARGEST}": [3.0] * 4}
    )
    assert raised[KERNEL]["wider_where_largest"] == 1.5 and "wider_where_largest" not in raised["torch/relu_forward"]
    own = raise_factors({KERNEL: entry}, {f"{KERNEL}{LARGEST}": [4.0] * 4, f"torch{LARGEST}": [3.0] * 4})
    assert own[KERNEL]["wider_where_largest"] == 4.0
    assert lower_factors(raised[KERNEL]) == {**entry, "interval_powers": [1.0, 1.0, 1.0, 2.0]}
    sizes = tuple(np.array(x, dtype=float) for x in ([64, 2**20], [64, 512], [64, 1024], [1, 1]))
    np.testing.assert_array_equal(are_largest(sizes), [False, True])
    np.testing.assert_allclose(wider(KERNEL, sizes, raised[KERNEL]), [1.0, 1.5])
    time = np.array([200.0, 200.0])
    found = bounds_of(time, raised[KERNEL], np.zeros(2, dtype=int), wider(KERNEL, sizes, raised[KERNEL])) / time[:, None]
    np.testing.assert_allclose(found, [[0.9**2, 1.2**2], [0.9**3, 1.2**3]])


def test_products_in_few_groups_have_one_power_more_of_every_size():
    batched = "torch/bf16_batched"
    many, few = (rows_of(spread, "blind3", batched, 20_000, seed=g, groups=g) for spread, g in ((1.0, 4096), (2.0, 8)))
    rows, predicted, bounds = together(many, few)
    # A few of another class, as the usual ones lack it.
    predicted[-40:], bounds[-40:] = predicted[-40:] / 20, bounds[-40:] / 20
    rows.loc[rows.index[-40:], "p50_us"] /= 20
    powers = Fresh.of(rows, predicted, bounds).powers()
    assert list(powers) == [batched, batched + IN_FEW_GROUPS, BY_DIGITS[0]]
    np.testing.assert_allclose(np.divide(powers[batched + IN_FEW_GROUPS], powers[batched]), 2.0, rtol=0.05)
    entry = {"interval_factors": [[0.9, 1.2]] * 4, "range": {"product": [1.0, 2.0**50]}}
    raised = raise_factors({batched: entry, KERNEL: entry}, powers)
    assert raised[batched]["wider_in_few_groups"] == pytest.approx(2.0, rel=0.05) and "wider_in_few_groups" not in raised[KERNEL]
    assert lower_factors(raised[batched])["interval_factors"][0] == pytest.approx([0.9, 1.2])
    assert not {"wider_in_few_groups", "wider_by_digits"} & set(lower_factors(raised[batched]))
    sizes = tuple(np.array(x, dtype=float) for x in ([64] * 3, [64] * 3, [64] * 3, [FEW_GROUPS, FEW_GROUPS - 1, 2**20]))
    np.testing.assert_array_equal(in_few_groups(batched, sizes), [False, True, False])
    assert not in_few_groups("torch/fp8_grouped_rowwise_fast", sizes).any() and not in_few_groups(KERNEL, sizes).any()
    more = np.array([1.0, raised[batched]["wider_in_few_groups"]])
    np.testing.assert_allclose(wider(batched, sizes, raised[batched])[:2], powers[BY_DIGITS[0]][0] * more)


def test_sizes_of_many_digits_have_one_power_more_of_every_kernel_of_a_kind():
    """What is as far off by any kernel of a kind, and GEMMs twice, quantizers 1.5 times as far where sizes are not round."""
    other, quantizer, norm = "loka/fp8_rowwise_fast", "loka/quantize_rowwise", "torch/rmsnorm_forward"
    round_, any_ = ({"m": 4096, "n": 512, "k": 64}, {"m": 4095, "n": 511, "k": 63})
    rows, predicted, bounds = together(
        rows_of(1.0, "blind3", KERNEL, 20_000, 0, **round_),
        rows_of(2.0, "blind4", KERNEL, 20_000, 1, **any_),
        rows_of(1.0, "blind3", other, 20_000, 2, **round_),
        rows_of(2.0, "blind4", other, 20_000, 3, **any_),
        rows_of(1.0, "blind3", quantizer, 20_000, 4, **round_),
        rows_of(1.5, "blind4", quantizer, 20_000, 5, **any_),
    )
    asked = Fresh.of(rows, predicted, bounds)
    assert set(asked.digits) == {0, 3, 4, 7}
    powers = asked.powers()
    gemms, quantizers = (powers[name] for name in BY_DIGITS[:2])
    assert gemms[3] / gemms[0] == pytest.approx(2.0, rel=0.03) and quantizers[3] / quantizers[0] == pytest.approx(1.5, rel=0.03)
    assert gemms[1:3] == quantizers[1:3] == [1.0, 1.0] and BY_DIGITS[2] not in powers
    found = inside(rows, raise_bounds(rows, predicted, bounds, powers))
    assert all(found[start : start + 20_000].mean() == pytest.approx(0.9, abs=0.01) for start in range(0, 120_000, 20_000))
    entry = {"interval_factors": [[0.9, 1.2]] * 4, "range": {"product": [1.0, 2.0**50]}}
    raised = raise_factors(dict.fromkeys((KERNEL, quantizer, norm), entry), powers)
    assert raised[KERNEL]["wider_by_digits"] == gemms and raised[quantizer]["wider_by_digits"] == quantizers
    assert "wider_by_digits" not in raised[norm]
    sizes = tuple(np.array(x, dtype=float) for x in ([4096, 4095, 2**21], [512, 511, 511], [64, 63, 1023], [1, 1, 1]))
    np.testing.assert_allclose(wider(KERNEL, sizes, raised[KERNEL]), [gemms[0], gemms[3], 1.0])
    assert lower_factors(raised[KERNEL])["interval_factors"][2] == pytest.approx([0.9, 1.2])


def test_halves_of_the_shapes_of_operands_of_any_sizes_judge_each_other():
    """All rows of a shape in one half, as many shapes in either; together they have their sweep's weight."""
    quantizer = "loka/quantize_rowwise"
    rows, predicted, bounds = rows_of(3.0, HALVED, quantizer, 400)
    rows = rows.assign(m=[8 * (1 + number // 4) for number in range(400)])
    usual = rows_of(1.0, "blind_memory2", quantizer, 4000, 1)
    both = together((rows, predicted, bounds), usual)
    asked = Fresh.of(*both)
    halves = pd.Series(asked.sweep[:400]).groupby(rows["m"].to_numpy()).agg(["nunique", "first"])
    assert (halves["nunique"] == 1).all() and halves["first"].value_counts().tolist() == [50, 50]
    weight = asked._weight(asked.heard)
    assert (weight[400:] == 1).all() and weight[:400].sum() / weight.sum() == pytest.approx(WRITTEN_SHARE)
    # Each is judged by what the other asks for, so by more than usual sizes would.
    one, other = (asked.powers(f"{HALVED}, half {number}")["loka/quantize_*"][2] for number in (0, 1))
    alone = Fresh.of(*usual).powers()["loka/quantize_*"][2]
    assert min(one, other) > 1.2 * alone and one != other


def test_digits_are_those_between_the_ones_at_both_ends():
    m, n, k = [1, 4096, 96, 4095, 1_000_000], [1, 1, 96, 1, 1], [1, 7, 96, 1, 1]
    taken = [sum(len(f"{size:b}".strip("0")) - 1 for size in sizes) for sizes in zip(m, n, k, strict=True)]
    assert taken == [0, 2, 3, 11, 13]
    sizes = tuple(np.array(size, dtype=float) for size in (m, n, k, [1] * 5))
    np.testing.assert_array_equal(digits(sizes), [sum(count >= edge for edge in (5, 12, 16)) for count in taken])


def test_few_sizes_as_people_write_them_count_as_a_quarter():
    """And no more than they are where there are many."""
    many, few = (
        rows_of(spread, sweep, KERNEL, count, count) for spread, sweep, count in ((1.0, "blind3", 9000), (2.0, "blind15", 100))
    )
    asked = Fresh.of(*together(many, few))
    heard = asked.heard
    weight = asked._weight(heard)
    assert (weight[:9000] == 1).all() and weight[9000:].sum() / weight.sum() == pytest.approx(WRITTEN_SHARE)
    rare = Fresh.of(*together(rows_of(1.0, "blind3", KERNEL, 100), rows_of(2.0, "blind15", KERNEL, 9000)))
    assert (rare._weight(rare.heard) == 1).all()
    assert asked.powers()[KERNEL][2] > 1.1 * Fresh.of(*many).powers()[KERNEL][2]


@pytest.mark.parametrize("rank", [0.0, 0.3, 0.9, 1.0])
def test_a_quantile_of_equal_weights_is_numpys_and_one_of_whole_ones_that_of_repeated_values(rank):
    generator = np.random.default_rng(7)
    values = generator.standard_normal(501)
    assert fresh._quantile(values, np.full(501, 2.5), rank) == pytest.approx(np.quantile(values, rank), abs=1e-9)
    weight = generator.integers(1, 5, 501).astype(float)
    assert fresh._quantile(values, weight, rank) == pytest.approx(
        np.quantile(np.repeat(values, weight.astype(int)), rank), abs=0.02
    )


@pytest.mark.parametrize(
    ("columns", "heard"),
    [
        ({"sweep": "zoo"}, False),
        ({"settled": False}, False),
        ({"shared": True}, False),
        ({"shared": True, "kernel": "torch/bf16_batched"}, False),
        ({"shared": True, "kernel": "loka/quantize_rowwise"}, True),
        ({}, True),
    ],
)
def test_who_has_a_say(columns, heard):
    rows, predicted, bounds = rows_of(2.0, count=400)
    asked = Fresh.of(rows.assign(**columns), predicted, bounds)
    assert asked.heard.all() == heard == bool(asked.powers())
    # Who has none is judged by what the others ask for.
    both = together((rows.assign(**columns), predicted, bounds), rows_of(2.0, "blind7", columns.get("kernel", KERNEL)))
    raised = Fresh.of(*both).raised(*both[1:])[:400]
    assert inside(rows, raised).mean() == pytest.approx(0.9, abs=0.05)


def test_kernels_without_fresh_rows_keep_their_intervals_and_raising_is_undone():
    entry = {"interval_factors": [[0.9, 1.2]] * 4, "range": {}}
    entries = {KERNEL: entry, "loka/quantize_rowwise": entry}
    raised = raise_factors(entries, {KERNEL: [1.0, 2.0, 0.5, 1.0]})
    assert raised["loka/quantize_rowwise"]["interval_factors"] == entry["interval_factors"]
    np.testing.assert_allclose(raised[KERNEL]["interval_factors"][1], [0.81, 1.44])
    assert raised[KERNEL]["interval_powers"] == [1.0, 2.0, 0.5, 1.0]
    np.testing.assert_allclose(lower_factors(raised[KERNEL])["interval_factors"], entry["interval_factors"])
    assert lower_factors(entry)["interval_factors"] == entry["interval_factors"]


def test_families():
    assert family_of("torch/bf16_batched") == "torch/bf16_batched"
    assert family_of("torch/quantize_rowwise_transposed") == "torch/quantize_*"
    assert family_of("torch/layernorm_forward") == family_of("torch/transpose_e4m3") == "torch, other memory-bound"


@pytest.mark.parametrize("hardware", ["h200", "h100"])
def test_the_shipped_powers_are_those_of_the_shipped_sweeps(hardware):
    everything, model = fit.read_timings(hardware), perfmodel.load(hardware)
    known = everything["sweep"].isin(list(fit.NEVER_SEEN)) & everything["kernel"].isin(list(model.manifest["kernels"]))
    rows = everything[known].reset_index(drop=True)
    predicted, bounds, asked = fresh.of_model(model, rows)
    powers = asked.powers()
    for kernel, entry in model.manifest["kernels"].items():
        # Another processor's matrix products end in other bits, and a row at an edge in another class.
        own = powers.get(family_of(kernel), [1.0] * 4)
        assert entry["interval_powers"] == pytest.approx(own, rel=0.03)
        largest = powers.get(kernel + LARGEST, powers.get(library_of(kernel) + LARGEST))
        assert entry.get("wider_where_largest") == (
            pytest.approx(largest[-1] / own[-1], rel=0.03) if "gemm" in KERNELS[kernel].kind else None
        )
        few = powers.get(family_of(kernel) + IN_FEW_GROUPS)
        assert ("wider_in_few_groups" in entry) == (few is not None) == (kernel == "torch/bf16_batched")
        if few is not None:
            assert entry["wider_in_few_groups"] == pytest.approx(few[-1] / own[-1], rel=0.03)
        assert entry["wider_by_digits"] == pytest.approx(powers[f"{kind_of(family_of(kernel))}, by digits"], rel=0.03)
    # Sweeps that had no say are covered as all are to be, by every family of which there are enough rows.
    found = inside(rows, asked.raised(predicted, bounds))
    family_of_each = np.array([library_of(name) + LARGEST if name.endswith(LARGEST) else name for name in asked.family])
    for family in dict.fromkeys(family_of_each.tolist()):
        mine = asked.heard & (family_of_each == family)
        if mine.sum() >= 200:
            assert 0.88 <= found[mine].mean() <= 0.92, family
