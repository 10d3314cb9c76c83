"""The signal of a weight gradient: what is collected, and predictions with it against drawn and multiplied samples."""

import numpy as np
import pytest
import torch

from numerics import GradientSignal, SignalAccumulator, StatisticsAccumulator, gemm_error, predict_gemm_error

KERNELS = [
    ("e4m3/tensorwise", "e4m3/tensorwise", "hopper_fast"),
    ("e4m3/rowwise", "e4m3/rowwise", "hopper_split"),
    ("bf16", "bf16", "fp32"),
]


def drawn(seed, samples, coherence, each=1, together=False):
    """g (samples, each, 48) and x (samples, each, 32): a number of each row in both, `coherence` times a pattern in x.

    `together` gives all rows of a sample the same number in g and most of the same x. No operand alone shows any of it.
    """
    rng, pattern = np.random.default_rng(seed), np.random.default_rng(99)
    left, right = pattern.standard_normal(48), pattern.standard_normal(32)
    number = np.broadcast_to(rng.standard_normal((samples, 1 if together else each, 1)), (samples, each, 1))
    x = rng.standard_normal((samples, 1 if together else each, 32)) + coherence * number * right
    x = x + 0.3 * rng.standard_normal((samples, each, 32))
    g = number * left + rng.standard_normal((samples, each, 48)) / 2
    return g.astype("f4"), x.astype("f4")


def power(g, x):
    y = np.einsum("stn,stk->nk", g.astype("f8"), x.astype("f8"))
    return np.square(y).mean() / np.square(g, dtype="f8").mean() / np.square(x, dtype="f8").mean()


def collected(batches):
    signal, left, right = SignalAccumulator(), StatisticsAccumulator(48), StatisticsAccumulator(32)
    for g, x in batches:
        signal.update(torch.from_numpy(g) * 1e-6, x)  # gradients of a mean over a batch are tiny
        left.update(g.reshape(-1, 48))
        right.update(x.reshape(-1, 32))
    return signal.result(), left.result().along_rows(), right.result().along_rows()


@pytest.mark.parametrize("case", [(0.0, 1, False), (0.3, 1, False), (0.0, 8, False), (0.0, 8, True), (0.2, 8, True)], ids=str)
def test_power_of_sums_at_the_batch_seen_and_at_others(case):
    coherence, each, together = case
    signal, _, _ = collected([drawn(seed, 128, coherence, each, together) for seed in range(40)])
    assert (signal.quadratic > 0) == (coherence > 0)
    for samples in (32, 128, 1024):
        measured = np.mean([power(*drawn(1000 + seed, samples, coherence, each, together)) for seed in range(48)])
        assert 10 * np.log10(signal.power(samples * each) / measured) == pytest.approx(0, abs=1.0)


def test_independent_part_is_the_mean_square_of_a_single_product():
    g, x = drawn(1, 500, 0.5, 3)
    direct = (np.square(g)[..., :, None].astype("f8") * np.square(x)[..., None, :]).mean()
    signal = collected([(g, x)])[0]
    assert signal.independent == pytest.approx(
        direct / np.square(g, dtype="f8").mean() / np.square(x, dtype="f8").mean(), rel=1e-5
    )


def test_parts_merge_into_the_whole():
    batches = [drawn(seed, 64, 0.2, 2) for seed in range(4)]
    one, other = SignalAccumulator(), SignalAccumulator()
    for index, batch in enumerate(batches):
        (one if index % 2 else other).update(*batch)
    one.merge(other)
    whole = SignalAccumulator()
    whole.update(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))
    for name in ("independent", "linear", "quadratic"):
        assert getattr(one.result(), name) == pytest.approx(getattr(whole.result(), name), rel=1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel[0])
@pytest.mark.parametrize("case", [(0.3, 1, False), (0.0, 8, True)], ids=str)
def test_predictions_with_the_signal(case, kernel):
    signal, left, right = collected([drawn(seed, 128, *case) for seed in range(40)])
    signals = noises = 0.0
    for seed in range(24):
        g, x = (np.ascontiguousarray(v.reshape(-1, v.shape[-1]).T) for v in drawn(2000 + seed, 192, *case))
        error = gemm_error(torch.from_numpy(g), torch.from_numpy(x), *kernel)
        size = np.square(g.astype("f8") @ x.T).mean()
        signals, noises = signals + size, noises + size * error.relative_frobenius**2
    shape = (48, 32, 192 * case[1])
    measured = 10 * np.log10(signals / noises)
    without = predict_gemm_error(left, right, shape, *kernel).sqnr_db
    predicted = predict_gemm_error(left, right, shape, *kernel, signal).sqnr_db
    assert predicted == pytest.approx(measured, abs=1.0)
    if kernel[0] != "bf16":
        assert abs(without - measured) > 3.0


def test_what_is_refused_and_what_is_nothing():
    assert SignalAccumulator().result() is None
    accumulator = SignalAccumulator()
    accumulator.update(np.zeros((4, 3), "f4"), np.ones((4, 2), "f4"))
    assert accumulator.result() is None
    with pytest.raises(ValueError, match="must agree in all but their last axis"):
        accumulator.update(np.zeros((4, 3), "f4"), np.ones((5, 2), "f4"))
    with pytest.raises(ValueError, match="quadratic is -1.0; it must be finite and not negative"):
        GradientSignal(1.0, 1.0, -1.0)
    _, left, right = collected([drawn(0, 64, 0.0)])
    with pytest.raises(ValueError, match="orient both by along_rows"):
        predict_gemm_error(left.along_features(), right.along_features(), (8, 8, 32), *KERNELS[0], GradientSignal(1, 1, 0))
