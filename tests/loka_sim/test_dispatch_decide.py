"""The decision against a brute force that shares no code with it, on made-up costs."""

import sys
from itertools import product

import numpy as np
import pytest

from loka_sim.dispatch.candidates import Row, SiteShape, launches, possible_rows
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.decide import Accuracy, Policy, decide_site, flat
from loka_sim.dispatch.operands import TORCH, Toolbox
from loka_sim.dispatch.steps import speedup
from loka_sim.modelspec import Dim, Site, linear_passes
from perfmodel.step import combine

SCALED = tuple(f"fp8_{s}_{how}" for s in ("tensorwise", "rowwise") for how in ("fast", "split"))
FP8_KERNELS = (*(f"torch/{name}" for name in SCALED), "torch/fp8_block128")
ALL_KERNELS = (
    *FP8_KERNELS, *(f"loka/{name}" for name in SCALED), "fbgemm/fp8_rowwise_fast", "fbgemm/fp8_rowwise_split",
    "fbgemm/fp8_block128",
)  # fmt: skip
SEVERAL = Toolbox.of(("torch", "loka", "fbgemm"))
PASSES = ("output", "grad_input", "grad_weight")
SHAPE = SiteShape.of(Site("layer", "linear", linear_passes(Dim(0, 1), Dim(512), Dim(1024))), 2048)
M, N, K = 2048, 512, 1024
GEMMS = {"output": (M, N, K), "grad_input": (M, K, N), "grad_weight": (N, K, M)}
TENSORS = {"x": (M, K), "w": (N, K), "g": (M, N)}
# In bf16 a pass reads its operands as they are stored: the weight across for the input's gradient, both for the weight's.
IN_BF16 = {"output": "torch/bf16", "grad_input": "torch/bf16_row_row", "grad_weight": "torch/bf16_column_row"}
# What each pass reads: tensor, side of the block scales, transposed.
READS = {
    "output": [("x", "left", False), ("w", "right", False)],
    "grad_input": [("g", "left", False), ("w", "right", True)],
    "grad_weight": [("g", "left", True), ("x", "right", True)],
}


def scaling(kernel):
    return next((s for s in ("tensorwise", "rowwise", "block") if s in kernel), None)


def makers(how, several):
    """Quantizers of a tensor as stored, of its transpose, and of both at once."""
    libraries = {"torch", "loka"} if several else {"torch"}
    if how == "block1x128":
        libraries = {"torch"}  # our own scales lie otherwise than cuBLAS takes them
    plain = libraries | ({"fbgemm"} if several and "block" not in how else set())
    names = [f"{library}/quantize_{how}" for library in sorted(plain)]
    return (
        names,
        [f"{m}/quantize_{how}_transposed" for m in sorted(libraries)],
        ["loka/quantize_" + how + "_dual"] * ("loka" in libraries),
    )


def brute_rows(kernels, table=None):
    """Launches of (kernel of output, grad_input, grad_weight), written a second time from the issue's words.

    With a table, quantizers of any library, the fastest ones; else torch's.
    """
    run = {name: IN_BF16[name] if kernel == "torch/bf16" else kernel for name, kernel in zip(PASSES, kernels, strict=True)}
    rows = [(kernel, *GEMMS[name]) for name, kernel in run.items()]
    wanted = {}
    for name, kernel in zip(PASSES, kernels, strict=True):
        for tensor, side, transposed in READS[name]:
            how = scaling(kernel)
            if how == "block":
                how = "block1x128" if side == "left" and kernel.startswith("torch/") else "block128x128"
            if how:
                wanted.setdefault((tensor, how), set()).add(transposed)
    for (tensor, how), readings in wanted.items():
        height, width = TENSORS[tensor]
        plain, turned, dual = makers(how, table is not None)
        if len(readings) == 2:
            second = ["torch/transpose_e4m3"] if how in ("tensorwise", "block128x128") else turned
            ways = [*product(plain, second), *((one,) for one in dual)]
        else:
            ways = [(one,) for one in (turned if True in readings else plain)]
        lists = [[(kernel, height, 1, width) for kernel in way] for way in ways]
        rows += min(lists, key=lambda some: sum(table[row].us for row in some)) if table is not None else lists[0]
    return rows


def brute_force(table, mere, policy, fp8_kernels=FP8_KERNELS, several=False):
    """The fastest assignment whose gain is sure, over all."""
    prices = table if several else None

    def us(rows, end=0):
        return sum(table[row][end] for row in rows)

    def passes_test(rows, without, saved):
        new, gone = list(rows), list(without)
        for row in rows:
            if row in gone:
                gone.remove(row)
                new.remove(row)
        gain = us(gone) - us(new)
        spread = sum(((table[r][2] - table[r][0]) * new.count(r)) ** 2 for r in set(new))
        spread += sum(((table[r][0] - table[r][1]) * gone.count(r)) ** 2 for r in set(gone))
        spent = us(rows) - us(without) + saved
        return gain > spread**0.5 and (spent <= 0 or saved / spent >= policy.min_speedup)

    bf16 = ("torch/bf16",) * 3
    best, best_us = bf16, us(brute_rows(bf16))
    for kernels in product(*(("torch/bf16", *fp8_kernels) for _ in PASSES)):
        fp8 = [i for i, kernel in enumerate(kernels) if kernel != "torch/bf16"]
        if any(mere[PASSES[i], kernels[i]] >= policy.max_mere for i in fp8):
            continue
        tests = [fp8, *([i] for i in fp8)]
        rows = brute_rows(kernels, prices)
        ok = bool(fp8) and us(rows) < best_us
        for reverted in tests:
            back = tuple("torch/bf16" if i in reverted else kernel for i, kernel in enumerate(kernels))
            saved = us([(IN_BF16[PASSES[i]], *GEMMS[PASSES[i]]) for i in reverted])
            ok = ok and passes_test(rows, brute_rows(back, prices), saved)
        if ok:
            best, best_us = kernels, us(rows)
    return best, best_us


def draw(seed, toolbox=TORCH, fp8_kernels=FP8_KERNELS):
    rng = np.random.default_rng(seed)
    rows = sorted(possible_rows(SHAPE, toolbox))
    table = {}
    spread = rng.choice([0.0, 0.03, 0.15])
    fastest = rng.choice([6.0, 14.0])
    for row in rows:
        if row.kernel in IN_BF16.values():
            us = rng.uniform(18, 30)
        else:
            us = rng.uniform(fastest, 18) if "fp8" in row.kernel else rng.uniform(0.2, 6)
        table[row] = Time(us, us * (1 - spread * rng.uniform(0.2, 1)), us * (1 + spread * rng.uniform(0.2, 1)))
    mere = {(name, kernel): float(rng.choice([0.01, 0.05, 0.3], p=[0.4, 0.4, 0.2])) for name in PASSES for kernel in fp8_kernels}
    return table, mere


@pytest.mark.parametrize("seed", range(40))
def test_decision_equals_brute_force(seed):
    table, mere = draw(seed)
    policy = Policy(max_mere=0.2, min_speedup=[1.0, 1.05, 1.3][seed % 3])
    errors = {key: Accuracy(value, 20.0) for key, value in mere.items()}
    decided = decide_site(SHAPE, Times(table), errors, policy)
    expected, expected_us = brute_force({(r.kernel, r.m, r.n, r.k): t for r, t in table.items()}, mere, policy)
    assert tuple(decided[name].kernel for name in PASSES) == expected
    assert sum(entry.predicted.us for entry in decided.values()) == pytest.approx(expected_us)
    for name, entry in decided.items():
        assert (entry.status == "fast") == (entry.kernel != "torch/bf16")
        assert entry.kernel == "torch/bf16" or mere[name, entry.kernel] < policy.max_mere


@pytest.mark.parametrize("seed", range(12))
def test_decision_among_several_libraries_equals_brute_force(seed):
    table, mere = draw(seed, SEVERAL, ALL_KERNELS)
    policy = Policy(max_mere=0.2, min_speedup=[1.0, 1.05, 1.3][seed % 3])
    decided = decide_site(SHAPE, Times(table), {k: Accuracy(v, 20.0) for k, v in mere.items()}, policy, SEVERAL)
    prices = {(r.kernel, r.m, r.n, r.k): t for r, t in table.items()}
    expected, expected_us = brute_force(prices, mere, policy, ALL_KERNELS, several=True)
    assert tuple(decided[name].kernel for name in PASSES) == expected
    rows = [row[:4] for entry in decided.values() for row in entry.rows]
    assert sorted(rows) == sorted(brute_rows(expected, prices))
    assert sum(entry.predicted.us for entry in decided.values()) == pytest.approx(expected_us)


def test_the_draws_mix_libraries_and_ways():
    """GEMMs fed by other libraries' quantizers, and kernels that write both readings, are among what is compared above."""
    mixed = dual = turned = False
    for seed in range(12):
        table, mere = draw(seed, SEVERAL, ALL_KERNELS)
        errors = {key: Accuracy(value, 20.0) for key, value in mere.items()}
        for entry in decide_site(SHAPE, Times(table), errors, Policy(), SEVERAL).values():
            libraries = {kernel.partition("/")[0] for kernel in entry.makers.values()}
            mixed |= bool(libraries - {entry.kernel.partition("/")[0]})
            dual |= any(kernel.endswith("_dual") for kernel in entry.makers.values())
            turned |= "torch/transpose_e4m3" in entry.makers.values()
    assert mixed and dual and turned


@pytest.mark.parametrize("seed", range(12))
def test_of_a_square_site_passes_are_one_launch_in_fp8_and_three_in_bf16(seed, monkeypatch):
    """What is launched twice is off together: equal sizes are equal rows in FP8, and in bf16 no layout is another."""
    here, size = sys.modules[__name__], 1024
    square = SiteShape.of(Site("layer", "linear", linear_passes(Dim(0, 1), Dim(size), Dim(size))), size)
    monkeypatch.setattr(here, "SHAPE", square)
    monkeypatch.setattr(here, "GEMMS", dict.fromkeys(PASSES, (size, size, size)))
    monkeypatch.setattr(here, "TENSORS", dict.fromkeys("xwg", (size, size)))
    assert len({row for row in possible_rows(square) if row.kernel.startswith("torch/bf16")}) == 3
    test_decision_equals_brute_force(seed)


def test_the_draws_reach_every_kind_of_decision():
    counts = set()
    for seed in range(40):
        table, mere = draw(seed)
        errors = {key: Accuracy(value, 20.0) for key, value in mere.items()}
        decided = decide_site(SHAPE, Times(table), errors, Policy(min_speedup=[1.0, 1.05, 1.3][seed % 3]))
        counts.add(sum(entry.status == "fast" for entry in decided.values()))
    assert counts == {0, 1, 2, 3}


def made_up(bf16, fp8, quantize, interval=0.0):
    def us(row):
        return bf16 if row.kernel in IN_BF16.values() else fp8 if "fp8" in row.kernel else quantize

    return Times({row: Time(us(row), us(row) * (1 - interval), us(row) * (1 + interval)) for row in possible_rows(SHAPE)})


def errors_of(**mere):
    default = {(name, kernel): Accuracy(0.02, 30.0) for name in PASSES for kernel in FP8_KERNELS}
    return default | {(name, kernel): Accuracy(value, 3.0) for name, value in mere.items() for kernel in FP8_KERNELS}


def test_a_gain_inside_the_interval_is_not_taken():
    sure = decide_site(SHAPE, made_up(20, 12, 1, interval=0.02), errors_of(), Policy())
    unsure = decide_site(SHAPE, made_up(20, 12, 1, interval=0.5), errors_of(), Policy())
    assert {entry.status for entry in sure.values()} == {"fast"}
    assert {entry.status for entry in unsure.values()} == {"not_worth_it"}
    assert "does not survive the prediction interval" in unsure["output"].reason


def test_quantization_eats_the_gain():
    decided = decide_site(SHAPE, made_up(20, 12, 6), errors_of(), Policy())
    assert {entry.kernel for entry in decided.values()} == {"torch/bf16"}
    assert "slower than bf16 with its quantization" in decided["output"].reason


def test_an_inaccurate_pass_that_would_be_faster_is_unsafe():
    decided = decide_site(SHAPE, made_up(20, 8, 1), errors_of(grad_weight=0.4), Policy())
    assert {name: entry.status for name, entry in decided.items()} == {
        "output": "fast",
        "grad_input": "fast",
        "grad_weight": "unsafe",
    }
    assert "0.400 is not below 0.2" in decided["grad_weight"].reason


def test_an_inaccurate_pass_that_would_not_be_faster_is_not_worth_it():
    decided = decide_site(SHAPE, made_up(20, 19.5, 1), errors_of(grad_weight=0.4), Policy())
    assert decided["grad_weight"].status == "not_worth_it"


def test_sharing_makes_two_passes_pay_that_alone_would_not():
    # Alone a pass costs 11 + 2 x 4.2 = 19.4 of 20 us; with all three each second reading costs 0.1.
    def us(row):
        if row.kernel in IN_BF16.values():
            return 20.0
        if "rowwise" in row.kernel or "block" in row.kernel:
            return 50.0
        return 11.0 if "fp8" in row.kernel else 0.1 if row.kernel == "torch/transpose_e4m3" else 4.2

    times = Times({row: Time(us(row), us(row), us(row)) for row in possible_rows(SHAPE)})
    decided = decide_site(SHAPE, times, errors_of(), Policy(min_speedup=1.05))
    assert {entry.status for entry in decided.values()} == {"fast"}
    assert sum(entry.predicted.us for entry in decided.values()) == pytest.approx(3 * 11 + 3 * 4.2 + 3 * 0.1)
    assert "shares the quantized x and w with another pass" in decided["output"].reason
    alone = next(c for c in decided["output"].candidates if c.kernel == decided["output"].kernel)
    # Without `output`, x and w would be quantized for the other passes all the same.
    assert alone.total is not None and alone.total.us == pytest.approx(11 + 2 * 0.1)


def test_illegal_names_the_dimension():
    shape = SiteShape.of(Site("head", "linear", linear_passes(Dim(0, 1), Dim(1), Dim(512))), 2048)
    times = Times({row: Time(5, 4, 6) for row in possible_rows(shape)})
    decided = decide_site(shape, times, errors_of(), Policy())
    # Of grad_weight, (1, 512, 2048), the 1 is M: any M will do.
    assert [entry.status for entry in decided.values()] == ["illegal", "illegal", "not_worth_it"]
    assert decided["output"].reason == "N = 1 is no multiple of 16"
    assert decided["grad_input"].reason == "K = 1 is no multiple of 16"
    assert decided["output"].runner_up is None


def test_candidates_and_runner_up():
    table, mere = draw(3)
    errors = {key: Accuracy(value, 20.0) for key, value in mere.items()}
    decided = decide_site(SHAPE, Times(table), errors, Policy())
    kernels = {name: entry.kernel for name, entry in decided.items()}
    for name, entry in decided.items():
        assert [c.kernel for c in entry.candidates] == ["torch/bf16", *FP8_KERNELS]
        rest = {other: kernel for other, kernel in kernels.items() if other != name}
        for candidate in entry.candidates:
            with_it = flat(launches(SHAPE, {**kernels, name: candidate.kernel}))
            expected = sum(table[r].us for r in with_it) - sum(table[r].us for r in flat(launches(SHAPE, rest)))
            assert candidate.total is not None and candidate.total.us == pytest.approx(expected)
        assert entry.runner_up is not None and entry.runner_up.kernel != entry.kernel


def test_interval_of_sums():
    row, other = Row("torch/bf16", 1, 1, 1), Row("torch/bf16", 2, 2, 2)
    times = Times({row: Time(10, 9, 12), other: Time(20, 16, 23)})
    # Equal launches are off together, so they go in as one entry with their total.
    assert times.interval([row, other, row]) == pytest.approx(combine(np.array([20, 20]), np.array([18, 16]), np.array([24, 23])))
    assert times.interval([]) == (0, 0, 0)
    assert times.difference([row, other], [other]) == pytest.approx((10, 9, 12))
    assert times.difference([row], [other]) == pytest.approx((-10, -10 - (1 + 9) ** 0.5, -10 + (4 + 16) ** 0.5))


def test_interval_of_a_speedup_against_sampling():
    """First-order propagation against drawn times: normal errors, equal launches off together."""
    from collections import Counter

    rng = np.random.default_rng(5)
    shared, slow, fast = (Row("torch/bf16", i, 1, 1) for i in range(3))
    table = {shared: Time(50, 46, 54), slow: Time(40, 37, 43), fast: Time(25, 23, 27)}
    found = speedup(Times(table), Counter({shared: 2, fast: 3}), Counter({shared: 2, slow: 3}))
    c, s, f = (table[r].us + rng.standard_normal(400_000) * (table[r].high_us - table[r].us) / 1.6449 for r in table)
    low, high = np.quantile((2 * c + 3 * s) / (2 * c + 3 * f), [0.05, 0.95])
    assert found.us == pytest.approx(220 / 175)
    assert (found.low_us, found.high_us) == pytest.approx((low, high), abs=0.004)
